//! Child programs that end when this program receives a signal.
//!
//! Each has its own process group, so that a terminal signal reaches only this program. It ends the
//! group, gets an error from the child, and then cleans up.

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

/// Number of output bytes that are kept.
const START: usize = 4096;

/// The output of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramOutput {
    /// The start of the output.
    pub start: String,
    /// Total number of bytes.
    pub bytes: u64,
}

/// Runs programs, one at a time.
pub struct ChildPrograms {
    state: Arc<SignalFlags>,
}

#[derive(Default)]
struct SignalFlags {
    signalled: AtomicBool,
    /// Kill the running program with SIGKILL.
    at_once: AtomicBool,
    /// The running process group; 0 if there is none.
    group: AtomicU32,
}

impl ChildPrograms {
    /// From now on, SIGINT, SIGTERM and SIGHUP end the running program and prevent further ones.
    pub fn watch_signals() -> Result<ChildPrograms> {
        let state = Arc::new(SignalFlags::default());
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let seen = Arc::clone(&state);
        let watch = move || {
            for _ in signals.forever() {
                seen.signalled.store(true, Ordering::SeqCst);
                seen.end_group();
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(watch)?;
        Ok(ChildPrograms { state })
    }

    /// Fails if a signal has arrived.
    pub fn check(&self) -> Result<()> {
        if self.state.signalled.load(Ordering::SeqCst) {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Runs a program to its end. Returns its output and duration. Its standard error goes to
    /// `errors`.
    pub fn run(&self, command: &mut Command, errors: &Path) -> Result<(ProgramOutput, Duration)> {
        self.check()?;
        let said = File::create(errors).with_context(|| errors.display().to_string())?;
        command.stdout(Stdio::piped()).stderr(said).process_group(0);
        let begun = Instant::now();
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", line(command)))?;
        self.state.group.store(child.id(), Ordering::SeqCst);
        if self.check().is_err() {
            // The signal arrived before the process group was known.
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

    /// Runs a program to its end and shows its output. A signal kills it with SIGKILL. This is for
    /// the first process of a pid namespace, which other signals do not end.
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

impl SignalFlags {
    fn end_group(&self) {
        let group = self.group.load(Ordering::SeqCst);
        let signal = if self.at_once.load(Ordering::SeqCst) { "-KILL" } else { "-TERM" };
        if group != 0 {
            // By a program, because this crate has no unsafe code.
            let _ = Command::new("kill").args([signal, "--", &format!("-{group}")]).status();
        }
    }
}

/// Reads all output with little work per byte, because the time is measured.
fn read_all(child: &mut Child) -> Result<ProgramOutput> {
    let Some(mut pipe) = child.stdout.take() else { return Ok(ProgramOutput::default()) };
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
    Ok(ProgramOutput { start: String::from_utf8_lossy(&start).into_owned(), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_counted_and_a_failure_names_the_program() {
        let children = ChildPrograms { state: Arc::default() };
        let place = tempfile::tempdir().unwrap();
        let errors = place.path().join("errors");
        let run = |script| children.run(Command::new("sh").args(["-c", script]), &errors);
        let (printed, _) = run("echo a; echo b").unwrap();
        assert_eq!((printed.start.as_str(), printed.bytes), ("a\nb\n", 4));
        let failure = run("echo gone wrong >&2; exit 3").unwrap_err().to_string();
        assert!(failure.contains("gone wrong") && failure.contains('3'), "{failure}");
    }

    #[test]
    fn a_signal_kills_the_shown_program_and_is_an_error() {
        let children = ChildPrograms { state: Arc::default() };
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
        // A program that ignores SIGTERM.
        let deaf = ["-c", "trap '' TERM; sleep 600"];
        let error = children.show(Command::new("sh").args(deaf)).unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
        signal.join().unwrap();
    }

    #[test]
    fn nothing_begins_after_a_signal() {
        let children = ChildPrograms { state: Arc::default() };
        children.state.signalled.store(true, Ordering::SeqCst);
        let errors = Path::new("/dev/null");
        assert!(children.run(&mut Command::new("true"), errors).is_err());
    }
}
