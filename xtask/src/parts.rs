//! Records the parts that a test run leaves out, and their reasons.
//!
//! A test that cannot do something passes and prints a line `skipped: REASON` or `not here:
//! REASON`. The first is for requirements that any machine can meet: a program, a user, a device.
//! The second is for features that this kernel or the lower file systems lack. libtest hides the
//! output of passing tests unless `--show-output` is set.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command;

/// Time to wait for output of processes that outlive cargo.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// One part that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The step, and the test in it.
    pub place: String,
    /// The reason.
    pub why: String,
    /// True if any machine can meet the requirement.
    pub can_be_had: bool,
}

/// All parts that a run left out.
#[derive(Debug, Default)]
pub struct Parts {
    step: &'static str,
    left_out: Vec<LeftOut>,
}

impl Parts {
    /// Begins a step, to which the following parts belong.
    pub fn begin(&mut self, step: &'static str) {
        self.step = step;
    }

    /// Prints and records a part whose requirement any machine can meet.
    pub fn skip(&mut self, why: &str) {
        println!("skipped: {why}");
        self.note(self.step.to_owned(), why, true);
    }

    /// Prints and records a part that this kernel cannot do.
    pub fn not_here(&mut self, why: &str) {
        println!("not here: {why}");
        self.note(self.step.to_owned(), why, false);
    }

    /// Runs tests by cargo, and records the parts that they leave out.
    ///
    /// # Errors
    ///
    /// Fails if the tests fail.
    pub fn run_tests(&mut self, cargo: &mut Command) -> Result<()> {
        let named = command::line(cargo);
        cargo.args(["--", "--show-output"]).stdout(Stdio::piped());
        let mut child = cargo.spawn().with_context(|| format!("cannot start {named}"))?;
        let output = child.stdout.take().context("a pipe")?;
        let (lines, received) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut line = Vec::new();
            while output.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                if lines.send(std::mem::take(&mut line)).is_err() {
                    break;
                }
            }
        });
        let mut ended = None;
        let mut reader = Reader::default();
        while let Some(line) = next_line(&received, || {
            ended = ended.or(child.try_wait().ok().flatten());
            ended.is_some()
        }) {
            let text = String::from_utf8_lossy(&line);
            if reader.shows(text.trim_end(), self) {
                std::io::stdout().write_all(&line)?;
            }
        }
        let status = child.wait()?;
        if !status.success() {
            bail!("`{named}` ended with {status}");
        }
        Ok(())
    }

    fn note(&mut self, place: String, why: &str, can_be_had: bool) {
        let part = LeftOut { place, why: why.to_owned(), can_be_had };
        if !self.left_out.contains(&part) {
            self.left_out.push(part);
        }
    }

    /// The parts whose requirement any machine can meet, or the others.
    pub fn left_out(&self, can_be_had: bool) -> Vec<&LeftOut> {
        self.left_out.iter().filter(|part| part.can_be_had == can_be_had).collect()
    }
}

/// The next line, or `None` at the end. The end is also reached if a process left behind by the
/// tests keeps the pipe open.
fn next_line(lines: &Receiver<Vec<u8>>, mut has_ended: impl FnMut() -> bool) -> Option<Vec<u8>> {
    loop {
        match lines.recv_timeout(LAST_WORDS) {
            Ok(line) => return Some(line),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) if has_ended() => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Parses the output of libtest.
#[derive(Debug, Default)]
struct Reader {
    /// In the output of passing tests, which is not shown.
    among_successes: bool,
    test: String,
}

impl Reader {
    /// Reads a line. Returns true if it should be shown.
    fn shows(&mut self, line: &str, parts: &mut Parts) -> bool {
        let name = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(name) = name {
            name.clone_into(&mut self.test);
        } else if let Some(why) = line.strip_prefix("skipped: ") {
            parts.note(self.place(parts), why, true);
        } else if let Some(why) = line.strip_prefix("not here: ") {
            parts.note(self.place(parts), why, false);
        }
        if line == "successes:" {
            self.among_successes = true;
        } else if line == "failures:" || line.starts_with("test result: ") {
            self.among_successes = false;
            self.test.clear();
        }
        !self.among_successes
    }

    fn place(&self, parts: &Parts) -> String {
        match self.test.as_str() {
            "" => parts.step.to_owned(),
            test => format!("{}: {test}", parts.step),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\nrunning 3 tests\ntest a ... ok\ntest b ... ok\ntest c ... FAILED\n\nsuccesses:\n\n\
        ---- a stdout ----\nskipped: fio is not installed\nmore\n\n---- b stdout ----\nnot here: no rings\n\n\
        successes:\n    a\n    b\n\nfailures:\n\n---- c stdout ----\nassertion failed\n\nfailures:\n    c\n\n\
        test result: FAILED. 2 passed; 1 failed\n";

    #[test]
    fn parts_left_out_by_passing_tests_are_recorded_and_their_other_output_is_hidden() {
        let mut parts = Parts::default();
        parts.begin("test");
        let mut reader = Reader::default();
        let shown: Vec<&str> = SAID.lines().filter(|line| reader.shows(line, &mut parts)).collect();
        assert!(shown.contains(&"assertion failed") && shown.contains(&"test a ... ok"));
        assert!(!shown.contains(&"more"));
        let missing = parts.left_out(true);
        assert_eq!(missing.len(), 1);
        assert_eq!((&*missing[0].place, &*missing[0].why), ("test: a", "fio is not installed"));
        assert_eq!(parts.left_out(false)[0].place, "test: b");
    }

    /// A daemon left behind by a test has the pipe, too. Waiting for its end would take for ever.
    #[test]
    fn output_kept_open_by_other_processes_does_not_delay_the_run() {
        let (_open, received) = channel();
        assert_eq!(next_line(&received, || true), None);
    }
}
