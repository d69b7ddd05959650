//! Reads the output of `cargo test`: the parts that tests left out, and the tests that failed.
//!
//! A test that cannot do something passes and prints a line `skipped: REASON` or `not here:
//! REASON`. The first is for requirements that any machine can meet: a program, a user, a device.
//! The second is for features that this kernel or the lower file systems lack. libtest hides the
//! output of passing tests unless `--show-output` is set.

use std::collections::VecDeque;
use std::time::Duration;

/// Lines kept of the output of one failed test: its last ones.
const KEPT: usize = 40;

/// The beginning of the last line of a test program.
const LAST: &str = "test result: ";

/// A failed test, with the last lines of its output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailedTest {
    /// The name that libtest gives it.
    pub name: String,
    /// Its output.
    pub said: VecDeque<String>,
}

impl FailedTest {
    fn say(&mut self, line: &str) {
        let begins = line.trim_start();
        // The frames of a backtrace, which would displace the message.
        let numbered = begins.split_once(": ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
        if begins.is_empty()
            || (begins.len() < line.len() && (numbered || begins.starts_with("at ")))
        {
            return;
        }
        if self.said.len() == KEPT {
            self.said.pop_front();
        }
        self.said.push_back(line.to_owned());
    }
}

/// A part of a test that was left out.
#[derive(Debug, PartialEq, Eq)]
pub struct SkippedPart {
    /// The test, or nothing outside of the output of tests.
    pub test: String,
    /// The reason.
    pub why: String,
    /// True if any machine can meet the requirement.
    pub can_be_had: bool,
}

/// The time that a test program took.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramTime {
    /// The name of the program, or the name of its crate for the tests within a library or a
    /// program.
    pub program: String,
    /// The time by its own account, without its build.
    pub took: Duration,
}

/// Reads the output line by line.
#[derive(Debug, Default)]
pub struct OutputReader {
    within: OutputSection,
    program: String,
    test: String,
    /// The programs that have ended, in their order.
    pub times: Vec<ProgramTime>,
    /// Parts that were left out.
    pub missing: Vec<SkippedPart>,
    /// Tests that failed, in the order of their output.
    pub failed: Vec<FailedTest>,
    /// Targets that failed, as arguments of cargo: `-p defuse --test run`.
    pub targets: Vec<String>,
    /// Tests that were run, by the last lines of the programs.
    pub run: usize,
}

/// The section of the output.
#[derive(Debug, Default, PartialEq, Eq)]
enum OutputSection {
    #[default]
    Progress,
    /// Output of passing tests, which is not shown.
    Successes,
    Failures,
    /// Cargo's list of the targets that failed.
    Targets,
}

impl OutputReader {
    /// Reads a line. Returns true if it should be shown.
    pub fn read(&mut self, line: &str) -> bool {
        let name = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(name) = name {
            name.clone_into(&mut self.test);
            if self.within == OutputSection::Failures {
                self.failed.push(FailedTest { name: name.to_owned(), ..FailedTest::default() });
            }
        } else if let Some(why) = line.strip_prefix("skipped: ") {
            self.leave_out(why, true);
        } else if let Some(why) = line.strip_prefix("not here: ") {
            self.leave_out(why, false);
        } else {
            self.read_other(line);
        }
        self.within != OutputSection::Successes
    }

    fn read_other(&mut self, line: &str) {
        if line == "successes:" {
            self.within = OutputSection::Successes;
        } else if line == "failures:" {
            self.within = OutputSection::Failures;
            self.test.clear();
        } else if let Some(counts) = line.strip_prefix(LAST) {
            self.within = OutputSection::Progress;
            self.test.clear();
            self.run += count(counts, "passed") + count(counts, "failed");
            let took = duration(counts).unwrap_or_default();
            self.times.push(ProgramTime { program: std::mem::take(&mut self.program), took });
        } else if let Some(program) = program(line) {
            self.program = program;
        } else if line.starts_with("error: ") && line.contains(" failed:") {
            self.within = OutputSection::Targets;
        } else if self.within == OutputSection::Targets {
            let target = line.trim().strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
            self.targets.extend(target.map(str::to_owned));
        } else if self.within == OutputSection::Failures
            && !self.test.is_empty()
            && let Some(failed) = self.failed.last_mut()
        {
            failed.say(line);
        }
    }

    fn leave_out(&mut self, why: &str, can_be_had: bool) {
        let test = self.test.clone();
        self.missing.push(SkippedPart { test, why: why.to_owned(), can_be_had });
    }
}

/// True for the last line of a test program.
pub fn ends_program(line: &str) -> bool {
    line.starts_with(LAST)
}

/// The name of the program that cargo starts, as in
/// `Running tests/x.rs (target/debug/deps/x-0123456789abcdef)`.
fn program(line: &str) -> Option<String> {
    if let Some(documented) = line.trim_start().strip_prefix("Doc-tests ") {
        return Some(format!("{documented} (examples)"));
    }
    let started = line.trim_start().strip_prefix("Running ")?;
    let (source, file) = started.strip_suffix(')')?.split_once(" (")?;
    let name = file.rsplit('/').next()?.rsplit_once('-')?.0;
    let unit = if source.starts_with("unittests") { " (unit tests)" } else { "" };
    Some(format!("{name}{unit}"))
}

/// The time at the end of the last line of a program, as in `filtered out; finished in 1.25s`.
fn duration(counts: &str) -> Option<Duration> {
    let seconds = counts.rsplit_once("finished in ")?.1.trim().strip_suffix('s')?;
    Duration::try_from_secs_f64(seconds.parse().ok()?).ok()
}

/// The number before a word, as in `2 passed; 1 failed`.
fn count(counts: &str, what: &str) -> usize {
    let before = counts.split(what).next().unwrap_or_default();
    before.split_whitespace().last().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\nrunning 3 tests\ntest a ... ok\ntest b ... ok\ntest c ... FAILED\n\nsuccesses:\n\n\
        ---- a stdout ----\nskipped: fio is not installed\nmore\n\n---- b stdout ----\nnot here: no rings\n\n\
        successes:\n    a\n    b\n\nfailures:\n\n---- c stdout ----\nassertion failed\n\n---- d stdout ----\n\n\
        other words\n   0: frame\n             at ./x.rs:1:1\n\nfailures:\n    c\n    d\n\n\
        test result: FAILED. 2 passed; 12 failed; 0 ignored\n\n\
        error: test failed, to rerun pass `-p defuse --test run`\n\
        \x20    Running tests/x.rs (target/debug/deps/x-1)\n\nrunning 0 tests\n\n\
        test result: ok. 0 passed; 0 failed; 0 filtered out; finished in 1.25s\n\n\
        error: 2 targets failed:\n    `-p defuse --test run`\n    `-p xtask --lib`\n";

    fn read() -> (OutputReader, Vec<&'static str>) {
        let mut reader = OutputReader::default();
        let shown = SAID.lines().filter(|line| reader.read(line)).collect();
        (reader, shown)
    }

    #[test]
    fn parts_left_out_by_passing_tests_are_recorded_and_their_other_output_is_hidden() {
        let (reader, shown) = read();
        assert!(shown.contains(&"assertion failed") && shown.contains(&"test a ... ok"));
        assert!(!shown.contains(&"more"));
        let missing = |test: &str, why: &str, can_be_had| SkippedPart {
            test: test.into(),
            why: why.into(),
            can_be_had,
        };
        assert_eq!(
            reader.missing,
            [missing("a", "fio is not installed", true), missing("b", "no rings", false)]
        );
    }

    #[test]
    fn failed_tests_and_targets_are_recorded_with_what_they_said() {
        let (reader, _) = read();
        let said: Vec<_> =
            reader.failed.iter().map(|test| (&*test.name, Vec::from(test.said.clone()))).collect();
        let words = |line: &str| vec![line.to_owned()];
        assert_eq!(said, [("c", words("assertion failed")), ("d", words("other words"))]);
        assert_eq!(reader.targets, ["-p defuse --test run", "-p xtask --lib"]);
        assert_eq!(reader.run, 14);
    }

    #[test]
    fn the_time_of_each_program_is_recorded() {
        let (reader, _) = read();
        let times: Vec<_> =
            reader.times.iter().map(|time| (&*time.program, time.took.as_millis())).collect();
        assert_eq!(times, [("", 0), ("x", 1250)]);
        let unit = "     Running unittests src/lib.rs (target/debug/deps/defuse_fs-1)";
        assert_eq!(program(unit).unwrap(), "defuse_fs (unit tests)");
        assert_eq!(program("   Doc-tests defuse_fs").unwrap(), "defuse_fs (examples)");
        assert_eq!(program("running 3 tests"), None);
    }

    #[test]
    fn of_a_talkative_test_the_last_lines_are_kept() {
        let mut reader = OutputReader::default();
        reader.read("failures:");
        reader.read("---- long stdout ----");
        for number in 0..1000 {
            reader.read(&number.to_string());
        }
        let said = &reader.failed[0].said;
        assert_eq!((said.len(), &*said[KEPT - 1]), (KEPT, "999"));
    }
}
