//! Times of test programs: the table at the end of a run, and the record by which `--quick`
//! chooses.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command;
use crate::libtest::ProgramTime;

/// Programs in the table of the longest ones.
const SHOWN: usize = 12;

/// The time of each test program in its last run, in seconds, by its name.
pub struct RecordedTimes {
    file: PathBuf,
    seconds: BTreeMap<String, f64>,
}

impl RecordedTimes {
    /// Reads the record in cargo's target directory. It is empty without a former run.
    pub fn load() -> Result<Self> {
        let file = command::target_dir()?.join("test-times.json");
        let read = fs::read(&file).ok();
        // A record that another version wrote is one that is not there.
        let seconds = read.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(RecordedTimes { file, seconds: seconds.unwrap_or_default() })
    }

    /// The time of a program, if it has run.
    pub fn time_of(&self, program: &str) -> Option<Duration> {
        self.seconds.get(program).map(|seconds| Duration::from_secs_f64(seconds.max(0.0)))
    }

    /// Adds the times of a run, and writes the record. Programs of one name, which cargo starts
    /// together, have one time.
    pub fn add(&mut self, times: &[ProgramTime]) -> Result<()> {
        for time in times {
            self.seconds.remove(&time.program);
        }
        for time in times {
            *self.seconds.entry(time.program.clone()).or_default() += time.took.as_secs_f64();
        }
        let text = serde_json::to_vec_pretty(&self.seconds)?;
        fs::write(&self.file, text).with_context(|| format!("cannot write {}", self.file.display()))
    }
}

/// Prints the programs that took longest.
pub fn print_longest(times: &[ProgramTime]) {
    let mut longest: Vec<&ProgramTime> = times.iter().collect();
    longest.sort_by_key(|time| std::cmp::Reverse(time.took));
    longest.truncate(SHOWN);
    if longest.is_empty() {
        return;
    }
    println!("\n==== test programs that took longest (two run at a time in step test)");
    for time in longest {
        println!("{:<44} {:>7.1} s", time.program, time.took.as_secs_f64());
    }
}
