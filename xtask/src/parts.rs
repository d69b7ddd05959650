//! Records the lines that a test run prints at its end: the parts that it left out, the tests that
//! failed, and those that passed only at the second attempt.

use std::any::Any;
use std::io::{BufRead, BufReader, Write, pipe};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::command;
use crate::libtest::{self, FailedTest, OutputReader, ProgramTime};

/// Time to wait for output of processes that outlive cargo.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// One part that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OmittedPart {
    /// The step, and the test in it.
    pub place: String,
    /// The reason.
    pub why: String,
    /// True if any machine can meet the requirement.
    pub can_be_had: bool,
}

/// The lines that a run prints at its end.
#[derive(Debug)]
pub struct RunRecord {
    begun: Instant,
    step: &'static str,
    left_out: Vec<OmittedPart>,
    failures: Vec<TestFailure>,
    times: Vec<ProgramTime>,
    /// The output of tests is not shown: the output of programs that a test of this file runs would
    /// be taken for the output of that test.
    silent: bool,
}

/// A test that failed.
#[derive(Debug)]
pub struct TestFailure {
    /// The step.
    pub step: &'static str,
    /// The test, with its output at the first attempt.
    pub test: FailedTest,
    /// True if it passed at the second attempt.
    pub passed_later: bool,
}

impl Default for RunRecord {
    fn default() -> Self {
        RunRecord {
            begun: Instant::now(),
            step: "",
            left_out: Vec::new(),
            failures: Vec::new(),
            times: Vec::new(),
            silent: false,
        }
    }
}

impl RunRecord {
    /// The time since the beginning of the run.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Begins a step, to which the following parts belong.
    pub fn begin(&mut self, step: &'static str) {
        self.step = step;
    }

    /// Prints and records a part whose requirement any machine can meet.
    pub fn skip(&mut self, why: &str) {
        self.say(&format!("skipped: {why}"));
        self.note(self.step.to_owned(), why, true);
    }

    /// Prints and records a part that this kernel or machine cannot do.
    pub fn record_missing_part(&mut self, why: &str) {
        self.say(&format!("not here: {why}"));
        self.note(self.step.to_owned(), why, false);
    }

    /// For a test: a run that reads the output of the test must not take these parts for its own.
    #[cfg(test)]
    pub fn silent() -> RunRecord {
        RunRecord { silent: true, ..RunRecord::default() }
    }

    fn say(&self, line: &str) {
        if !self.silent {
            println!("{line}");
        }
    }

    /// Runs tests by cargo, and records the parts that they leave out and the tests that fail.
    ///
    /// Tests that failed run once more, alone: many of them wait for processes, mounts and timers,
    /// and other work shares the machine. Tests that pass then do not fail the run, but its last
    /// lines show them, so that their fault is found.
    ///
    /// # Errors
    ///
    /// Fails if tests fail twice, if the failure is not the failure of a test, and if there was no
    /// test.
    pub fn run_tests(&mut self, cargo: &mut Command) -> Result<()> {
        self.run_side_by_side(std::slice::from_mut(cargo))
    }

    /// Like [`run_tests`](Self::run_tests), for crates that may have no test at all.
    ///
    /// # Errors
    ///
    /// Fails if tests fail twice, and if something other than a test fails.
    pub fn run_tests_if_any(&mut self, cargo: &mut Command) -> Result<()> {
        self.run_lanes(std::slice::from_mut(cargo), 0)
    }

    /// [`run_tests`](Self::run_tests) for several commands at a time. The output is shown a test
    /// program at a time, so that the lines of two commands do not mix. Second attempts begin when
    /// all commands have ended.
    ///
    /// # Errors
    ///
    /// Fails in the cases of [`run_tests`](Self::run_tests), with the failures of all commands.
    pub fn run_side_by_side(&mut self, commands: &mut [Command]) -> Result<()> {
        self.run_lanes(commands, 1)
    }

    /// Runs the commands side by side. Each must have run at least `fewest` tests.
    fn run_lanes(&mut self, commands: &mut [Command], fewest: usize) -> Result<()> {
        let show =
            self.show(if commands.len() > 1 { ShownOutput::Programs } else { ShownOutput::Lines });
        for cargo in &mut *commands {
            cargo.args(["--", "--show-output"]);
        }
        let attempts: Vec<Result<CommandAttempt>> = std::thread::scope(|scope| {
            let run = |cargo| move || attempt(cargo, show);
            let started: Vec<_> =
                commands.iter_mut().map(|cargo| scope.spawn(run(cargo))).collect();
            started.into_iter().map(|lane| lane.join().map_err(panic_error)?).collect()
        });
        let mut failed = Vec::new();
        for (cargo, attempt) in commands.iter().zip(attempts) {
            if let Err(error) = self.judge(cargo, attempt?, fewest) {
                failed.push(format!("{error:#}"));
            }
        }
        ensure!(failed.is_empty(), "{}", failed.join("; "));
        Ok(())
    }

    /// Records the result of a command, after second attempts of what failed.
    fn judge(&mut self, cargo: &Command, attempt: CommandAttempt, fewest: usize) -> Result<()> {
        let CommandAttempt { status, mut read } = self.note_missing(attempt);
        self.times.append(&mut read.times);
        if status.success() {
            ensure!(read.run >= fewest, "`{}` ran no test", command::line(cargo));
            return Ok(());
        }
        let passed_later = !read.targets.is_empty()
            && read.targets.iter().try_fold(true, |passed, target| {
                Ok::<_, anyhow::Error>(self.rerun_failed(cargo, target, &read.failed)? && passed)
            })?;
        let step = self.step;
        let failures = read.failed.into_iter();
        self.failures.extend(failures.map(|test| TestFailure { step, test, passed_later }));
        match &*read.targets {
            _ if passed_later => Ok(()),
            [] => bail!("`{}` ended with {status}", command::line(cargo)),
            targets => bail!("tests failed twice: {}", targets.join(", ")),
        }
    }

    /// Runs the failed tests of a target once more. All its tests run if it ended without a word
    /// of one that failed.
    fn rerun_failed(
        &mut self,
        like: &Command,
        target: &str,
        failed: &[FailedTest],
    ) -> Result<bool> {
        if !self.silent {
            println!("\nonce more: {target}");
        }
        let again = |names: &[FailedTest]| {
            let mut cargo = command::cargo();
            if let Some(dir) = like.get_current_dir() {
                cargo.current_dir(dir);
            }
            cargo.envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
            cargo.arg("test");
            if names.is_empty() {
                cargo.args(target.split_whitespace()).args(["--", "--show-output"]);
            } else {
                cargo.args(build_arguments(like, target)).args(["--", "--show-output", "--exact"]);
                cargo.args(names.iter().map(|test| &test.name));
            }
            cargo
        };
        let mut once_more = |names: &[FailedTest]| {
            let attempt = attempt(&mut again(names), self.show(ShownOutput::Lines))?;
            Ok::<_, anyhow::Error>(self.note_missing(attempt))
        };
        let CommandAttempt { status, read } = once_more(failed)?;
        if read.run > 0 || failed.is_empty() {
            return Ok(status.success());
        }
        Ok(once_more(&[])?.status.success())
    }

    fn show(&self, wanted: ShownOutput) -> ShownOutput {
        if self.silent { ShownOutput::Nothing } else { wanted }
    }

    /// Records the parts that the tests of an attempt left out.
    fn note_missing(&mut self, mut attempt: CommandAttempt) -> CommandAttempt {
        for part in std::mem::take(&mut attempt.read.missing) {
            let place = match &*part.test {
                "" => self.step.to_owned(),
                test => format!("{}: {test}", self.step),
            };
            self.note(place, &part.why, part.can_be_had);
        }
        attempt
    }

    /// Adds the time of something that is no test program, as the build of all of them.
    pub fn note_time(&mut self, name: &str, took: Duration) {
        self.times.push(ProgramTime { program: name.to_owned(), took });
    }

    fn note(&mut self, place: String, why: &str, can_be_had: bool) {
        let part = OmittedPart { place, why: why.to_owned(), can_be_had };
        if !self.left_out.contains(&part) {
            self.left_out.push(part);
        }
    }

    /// The times of the test programs, without second attempts.
    pub fn times(&self) -> &[ProgramTime] {
        &self.times
    }

    /// The tests that failed at their first attempt.
    pub fn failures(&self) -> &[TestFailure] {
        &self.failures
    }

    /// The parts whose requirement any machine can meet, or the others.
    pub fn omitted_parts(&self, can_be_had: bool) -> Vec<&OmittedPart> {
        self.left_out.iter().filter(|part| part.can_be_had == can_be_had).collect()
    }
}

/// The part of the output that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShownOutput {
    Nothing,
    /// Each line at once.
    Lines,
    /// The lines of a test program together, at its end.
    Programs,
}

/// The result of one command.
struct CommandAttempt {
    status: ExitStatus,
    read: OutputReader,
}

/// Runs cargo once and reads its output.
fn attempt(cargo: &mut Command, show: ShownOutput) -> Result<CommandAttempt> {
    // One pipe for standard output and standard error, so that the lines of cargo stand between the
    // lines of its tests.
    let (output, input) = pipe().context("a pipe")?;
    let named = command::line(cargo);
    cargo.stdout(input.try_clone().context("a pipe")?).stderr(input);
    let mut child = cargo.spawn().with_context(|| format!("cannot start {named}"))?;
    // The command has the other end open.
    cargo.stdout(Stdio::null()).stderr(Stdio::null());
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
    let mut read = OutputReader::default();
    let mut said = Vec::new();
    while let Some(line) = next_line(&received, || {
        ended = ended.or(child.try_wait().ok().flatten());
        ended.is_some()
    }) {
        let text = String::from_utf8_lossy(&line);
        if read.read(text.trim_end()) && show != ShownOutput::Nothing {
            said.extend_from_slice(&line);
        }
        if show == ShownOutput::Lines || libtest::ends_program(&text) {
            std::io::stdout().write_all(&std::mem::take(&mut said))?;
        }
    }
    std::io::stdout().write_all(&said)?;
    Ok(CommandAttempt { status: child.wait()?, read })
}

/// The arguments of a target, in cargo's form, for which cargo builds nothing that it has not built
/// for `like`. The dependencies of one package have other features than the dependencies of all
/// packages together.
fn build_arguments<'a>(like: &Command, target: &'a str) -> Vec<&'a str> {
    let words = target.split_whitespace();
    if !like.get_args().any(|word| word == "--workspace") {
        return words.collect();
    }
    let mut words = words.skip_while(|word| *word == "-p" || *word == "--package");
    // Its name.
    words.next();
    std::iter::once("--workspace").chain(words).collect()
}

fn panic_error(_: Box<dyn Any + Send>) -> anyhow::Error {
    anyhow!("the thread of a command panicked")
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

#[cfg(test)]
mod tests {
    use super::*;

    const TESTS: &str = r#"
        #[test]
        fn fails_once() {
            println!("skipped: a part");
            let flag = concat!(env!("CARGO_MANIFEST_DIR"), "/flag");
            std::fs::File::create_new(flag).expect_err("the first attempt");
        }
        #[test]
        fn fails() {
            assert!(std::env::var_os("FAIL").is_none(), "a reason");
        }
    "#;

    #[test]
    fn tests_that_fail_run_once_more_and_their_words_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("tests")).unwrap();
        std::fs::write(dir.path().join("tests/some.rs"), TESTS).unwrap();
        let manifest = "[package]\nname = \"tried\"\nedition = \"2024\"\n[lib]\npath = \"lib.rs\"\n[workspace]\n";
        std::fs::write(dir.path().join("Cargo.toml"), manifest).unwrap();
        std::fs::write(dir.path().join("lib.rs"), "").unwrap();
        let cargo = |fail: bool| {
            let mut cargo = command::cargo();
            cargo.current_dir(dir.path()).args([
                "test",
                "--offline",
                "--workspace",
                "--no-fail-fast",
            ]);
            cargo.env("CARGO_TARGET_DIR", dir.path().join("target")).env_remove("FAIL");
            if fail {
                cargo.env("FAIL", "");
            }
            cargo
        };
        let mut parts = RunRecord::silent();
        parts.begin("test");
        parts.run_tests(&mut cargo(false)).unwrap();
        let [once] = parts.failures() else { panic!("{parts:?}") };
        assert!(once.passed_later && once.test.name == "fails_once");
        assert!(once.test.said.iter().any(|line| line.contains("the first attempt")));
        assert_eq!(parts.omitted_parts(true)[0].place, "test: fails_once");
        parts.run_tests(&mut cargo(true)).unwrap_err();
        let [_, twice] = parts.failures() else { panic!("{parts:?}") };
        assert!(!twice.passed_later && twice.test.said.iter().any(|line| line == "a reason"));
        let nothing = parts.run_tests(cargo(false).arg("no_such_test")).unwrap_err();
        assert!(nothing.to_string().contains("ran no test"), "{nothing}");
        parts.run_tests_if_any(cargo(false).arg("no_such_test")).unwrap();
    }

    /// A daemon left behind by a test has the pipe, too. Waiting for its end would take for ever.
    #[test]
    fn output_kept_open_by_other_processes_does_not_delay_the_run() {
        let (_open, received) = channel();
        assert_eq!(next_line(&received, || true), None);
    }
}
