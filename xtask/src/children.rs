//! Programs that end when this one is told to.
//!
//! Each runs in a process group of its own: a signal then reaches this program alone, which ends
//! the group, gets an error from it, and so comes by everything that has to be cleaned up.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::command::line;

/// How much of what a program prints is kept, in bytes.
const START: usize = 4096;

/// What a program printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Printed {
    /// The start of it.
    pub start: String,
    /// How many bytes there were.
    pub bytes: u64,
}

/// Starts programs, one at a time.
pub struct Children {
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    signalled: AtomicBool,
    /// What runs is ended without being asked.
    at_once: AtomicBool,
    /// The process group that runs; 0 where none does.
    group: AtomicU32,
}

impl Children {
    /// From now on SIGINT, SIGTERM and SIGHUP end what runs and let nothing more begin.
    pub fn watch_signals() -> Result<Children> {
        let state = Arc::new(State::default());
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let seen = Arc::clone(&state);
        let watch = move || {
            for _ in signals.forever() {
                seen.signalled.store(true, Ordering::SeqCst);
                seen.end_group();
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(watch)?;
        Ok(Children { state })
    }

    /// An error once a signal has come.
    pub fn check(&self) -> Result<()> {
        if self.state.signalled.load(Ordering::SeqCst) {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Runs a program to its end. Returns what it printed and how long it took. What it says of
    /// errors goes to `errors`.
    pub fn run(&self, command: &mut Command, errors: &Path) -> Result<(Printed, Duration)> {
        self.check()?;
        let said = File::create(errors).with_context(|| errors.display().to_string())?;
        command.stdout(Stdio::piped()).stderr(said).process_group(0);
        let begun = Instant::now();
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", line(command)))?;
        self.state.group.store(child.id(), Ordering::SeqCst);
        if self.check().is_err() {
            // The signal came before there was a group to end.
            self.state.end_group();
        }
        let read = read_all(&mut child);
        let status = child.wait();
        let took = begun.elapsed();
        self.state.group.store(0, Ordering::SeqCst);
        self.check()?;
        let (status, printed) = (status?, read?);
        if !status.success() {
            let said = std::fs::read_to_string(errors).unwrap_or_default();
            bail!("`{}` ended with {status}: {}", line(command), said.trim());
        }
        Ok((printed, took))
    }

    /// Runs a program to its end; what it prints is seen. A signal kills it, without being asked: for one
    /// that is the first process of its namespaces, which no other signal ends.
    pub fn show(&self, command: &mut Command) -> Result<()> {
        self.check()?;
        command.stdin(Stdio::null()).process_group(0);
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", line(command)))?;
        self.state.at_once.store(true, Ordering::SeqCst);
        self.state.group.store(child.id(), Ordering::SeqCst);
        if self.check().is_err() {
            self.state.end_group();
        }
        let status = child.wait();
        self.state.group.store(0, Ordering::SeqCst);
        self.state.at_once.store(false, Ordering::SeqCst);
        self.check()?;
        let status = status?;
        if !status.success() {
            bail!("{} ended with {status}", command.get_program().display());
        }
        Ok(())
    }
}

impl State {
    fn end_group(&self) {
        let group = self.group.load(Ordering::SeqCst);
        let signal = if self.at_once.load(Ordering::SeqCst) { "-KILL" } else { "-TERM" };
        if group != 0 {
            // By program, because this crate has no unsafe code; that is as good for once.
            let _ = Command::new("kill").args([signal, "--", &format!("-{group}")]).status();
        }
    }
}

/// Reads everything, and does as little as possible with it: that is a part of the time measured.
fn read_all(child: &mut Child) -> Result<Printed> {
    let Some(mut pipe) = child.stdout.take() else { return Ok(Printed::default()) };
    let (mut start, mut bytes) = (Vec::new(), 0);
    let mut room = vec![0; 1 << 16];
    loop {
        let count = pipe.read(&mut room)?;
        if count == 0 {
            break;
        }
        bytes += count as u64;
        start.extend_from_slice(&room[..count.min(START.saturating_sub(start.len()))]);
    }
    Ok(Printed { start: String::from_utf8_lossy(&start).into_owned(), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_prints_is_counted_and_its_failure_named() {
        let children = Children { state: Arc::default() };
        let place = tempfile::tempdir().unwrap();
        let errors = place.path().join("errors");
        let run = |script| children.run(Command::new("sh").args(["-c", script]), &errors);
        let (printed, _) = run("echo a; echo b").unwrap();
        assert_eq!((printed.start.as_str(), printed.bytes), ("a\nb\n", 4));
        let failure = run("echo gone wrong >&2; exit 3").unwrap_err().to_string();
        assert!(failure.contains("gone wrong") && failure.contains('3'), "{failure}");
    }

    #[test]
    fn a_signal_kills_what_is_shown_and_is_an_error() {
        let children = Children { state: Arc::default() };
        assert!(children.show(&mut Command::new("true")).is_ok());
        assert!(children.show(&mut Command::new("false")).is_err());
        let state = Arc::clone(&children.state);
        let signal = std::thread::spawn(move || {
            while state.group.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            state.signalled.store(true, Ordering::SeqCst);
            state.end_group();
        });
        // A program that is deaf to what would ask it.
        let deaf = ["-c", "trap '' TERM; sleep 600"];
        let error = children.show(Command::new("sh").args(deaf)).unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
        signal.join().unwrap();
    }

    #[test]
    fn nothing_begins_after_a_signal() {
        let children = Children { state: Arc::default() };
        children.state.signalled.store(true, Ordering::SeqCst);
        let errors = Path::new("/dev/null");
        assert!(children.run(&mut Command::new("true"), errors).is_err());
    }
}
