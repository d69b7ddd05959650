//! Prints the measurements as tables and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};
use serde_json::json;

use super::programs::PROGRAMS;
use super::statistics::RequestCounts;
use super::{TARGETS, is_mount};
use crate::median::median;

/// One run of a program on a target.
pub struct DemoMeasurement {
    /// Duration in seconds.
    pub seconds: f64,
    /// The result, which must be the same on every target.
    pub said: String,
    /// The requests to the mount during the run.
    pub requests: RequestCounts,
}

/// All runs, by program and by target (0 is the native directory).
#[derive(Default)]
pub struct DemoReport {
    runs: BTreeMap<(usize, usize), Vec<DemoMeasurement>>,
}

impl DemoReport {
    /// Adds a run.
    pub fn add(&mut self, program: usize, target: usize, measured: DemoMeasurement) {
        self.runs.entry((program, target)).or_default().push(measured);
    }

    /// Fails if a program had a different result on a mount.
    pub fn check(&self) -> Result<()> {
        for (&(program, target), runs) in &self.runs {
            let Some(native) = self.runs.get(&(program, 0)).and_then(|runs| runs.first()) else {
                continue;
            };
            if let Some(run) = runs.iter().find(|run| run.said != native.said) {
                let (name, on) = (PROGRAMS[program].name, name_of(target));
                bail!("{name} came to {:?} on {on}, natively to {:?}", run.said, native.said);
            }
        }
        Ok(())
    }

    /// All results as JSON.
    pub fn json(&self) -> serde_json::Value {
        let row = |(&(program, target), runs): (&(usize, usize), &Vec<DemoMeasurement>)| {
            let seconds: Vec<f64> = runs.iter().map(|run| run.seconds).collect();
            json!({
                "program": PROGRAMS[program].name,
                "target": name_of(target),
                "seconds": seconds,
                "ratio": self.ratio(program, target),
                "requests": runs.last().map(|run| &run.requests.counts),
            })
        };
        self.runs.iter().map(row).collect()
    }

    /// The duration, as the median over the rounds; `None` before a round.
    pub fn seconds(&self, program: usize, target: usize) -> Option<f64> {
        let runs = self.runs.get(&(program, target))?;
        median(&runs.iter().map(|run| run.seconds).collect::<Vec<_>>())
    }

    /// The duration relative to the native directory, as the median over the rounds. Ratios are
    /// taken within a round, because disturbances affect neighbouring runs alike.
    pub fn ratio(&self, program: usize, target: usize) -> Option<f64> {
        let (native, runs) = (self.runs.get(&(program, 0))?, self.runs.get(&(program, target))?);
        let ratios = runs.iter().zip(native).map(|(run, native)| run.seconds / native.seconds);
        median(&ratios.collect::<Vec<_>>())
    }

    fn requests(&self, program: usize, target: usize) -> Option<&RequestCounts> {
        self.runs.get(&(program, target))?.last().map(|run| &run.requests)
    }

    fn write_times(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<16}", "time")?;
        for target in TARGETS {
            write!(f, " {target:>10}")?;
        }
        writeln!(f, "   (others: times native, median)")?;
        for (program, of) in PROGRAMS.iter().enumerate() {
            let Some(native) = self.seconds(program, 0) else { continue };
            write!(f, "{:<16} {:>10}", of.name, format!("{native:.3} s"))?;
            for target in 1..TARGETS.len() {
                let ratio = self.ratio(program, target).unwrap_or(f64::NAN);
                write!(f, " {:>10}", format!("{ratio:.2}x"))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }

    /// Prints the requests of one program, the most frequent operation first.
    fn write_requests(&self, f: &mut fmt::Formatter<'_>, program: usize) -> fmt::Result {
        let targets = mounts();
        let count = |target: usize, op: &str| {
            let requests = self.requests(program, target);
            requests.and_then(|requests| requests.counts.get(op)).copied().unwrap_or(0)
        };
        let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
        for requests in targets.clone().filter_map(|target| self.requests(program, target)) {
            for (op, count) in &requests.counts {
                *totals.entry(op).or_default() += count;
            }
        }
        let mut rows: Vec<_> = totals.into_iter().collect();
        rows.sort_by_key(|&(op, total)| (std::cmp::Reverse(total), op));
        for (op, _) in rows {
            write!(f, "  {op:<25}")?;
            for target in targets.clone() {
                write!(f, " {:>10}", count(target, op))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_times(f)?;
        write!(f, "\n{:<27}", "requests")?;
        for target in mounts() {
            write!(f, " {:>10}", TARGETS[target])?;
        }
        writeln!(f, "   (in the last round)")?;
        for (program, of) in PROGRAMS.iter().enumerate() {
            let total = |target| -> u64 {
                self.requests(program, target).map_or(0, |requests| requests.counts.values().sum())
            };
            write!(f, "{:<27}", of.name)?;
            for target in mounts() {
                write!(f, " {:>10}", total(target))?;
            }
            writeln!(f)?;
            self.write_requests(f, program)?;
        }
        Ok(())
    }
}

fn name_of(target: usize) -> &'static str {
    TARGETS[target]
}

/// The targets that have requests.
fn mounts() -> impl Iterator<Item = usize> + Clone {
    (0..TARGETS.len()).filter(|&target| is_mount(TARGETS[target]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_measurement(seconds: f64, said: &str) -> DemoMeasurement {
        let counts = BTreeMap::from([("READ".to_owned(), 7)]);
        DemoMeasurement { seconds, said: said.to_owned(), requests: RequestCounts { counts } }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let mut report = DemoReport::default();
        for (native, mounted) in [(1.0, 2.0), (10.0, 20.0), (1.0, 4.0)] {
            report.add(0, 0, make_measurement(native, "same"));
            report.add(0, 1, make_measurement(mounted, "same"));
        }
        assert_eq!(report.ratio(0, 1), Some(2.0));
        assert!(report.check().is_ok());
        let text = report.to_string();
        assert!(text.contains("1.000 s      2.00x") && text.contains("READ"), "{text}");
        report.add(0, 1, make_measurement(1.0, "other"));
        assert!(report.check().is_err());
    }
}
