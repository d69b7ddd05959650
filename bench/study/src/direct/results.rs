//! The results in the file `direct.json`. docs/direct.md documents its fields; [`SCHEMA`] changes
//! when their meaning does.

use std::path::Path;

use anyhow::Result;
use defuse_measure::stats::{QuartileSummary, paired_ratios};
use defuse_measure::switches::ContextSwitches;
use serde::{Deserialize, Serialize};

use super::worker::WorkerOp;
use crate::results::{MachineFacts, write_atomically};

/// The version of the format.
pub const SCHEMA: &str = "defuse-bench-direct/1";
/// The name of the file in the directory of results.
pub const FILE: &str = "direct.json";

/// All results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DirectResults {
    /// [`SCHEMA`].
    pub schema: String,
    /// The version of this program.
    pub program: String,
    /// This is an optimised build. Times of other builds are meaningless.
    pub optimised: bool,
    /// Start time in milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// The machine.
    pub machine: MachineFacts,
    /// Load average of one minute at the start.
    pub load: f64,
    /// Number of complete rounds.
    pub rounds: u32,
    /// Number of writes in the table of context switches.
    pub writes: u64,
    /// File size of sequential reads and writes, in bytes.
    pub file_bytes: u64,
    /// The targets.
    pub targets: Vec<DirectStudyTarget>,
    /// The parts that were not measured, with reasons.
    pub left_out: Vec<String>,
    /// It was interrupted before all rounds were complete.
    pub interrupted: bool,
    /// Measurements of calls.
    pub cells: Vec<DirectCell>,
    /// Measurements of program starts.
    pub starts: Vec<StartTimes>,
}

/// A target of calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DirectStudyTarget {
    /// Its name.
    pub name: String,
    /// Description.
    pub how: String,
}

/// One of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectTable {
    /// Writes and their context switches.
    Writes,
    /// A file written, rewritten and read from its beginning to its end.
    Sequential,
    /// `memory:` compared with tmpfs.
    Memory,
    /// Calls of the client, complete and on a file system that does nothing.
    Share,
}

/// The lower file system of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LowerFileSystem {
    /// Memory.
    Tmpfs,
    /// A loop device created for the measurement.
    Ext4,
}

impl LowerFileSystem {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            LowerFileSystem::Tmpfs => "tmpfs",
            LowerFileSystem::Ext4 => "ext4",
        }
    }
}

/// A case of a table: calls that are compared with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectCase {
    /// Its table.
    pub table: DirectTable,
    /// The lower file system of the file.
    pub lower: LowerFileSystem,
    /// The operation.
    pub op: WorkerOp,
    /// Bytes per call.
    pub block: u64,
}

/// The measurement of one case on one target in one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DirectCell {
    /// The case.
    #[serde(flatten)]
    pub case: DirectCase,
    /// The target.
    pub target: String,
    /// The round, counted from 1.
    pub round: u32,
    /// Number of passes.
    pub passes: u64,
    /// Number of calls per pass.
    pub calls: u64,
    /// Bytes transferred per pass.
    pub bytes: u64,
    /// Time of the fastest pass, in nanoseconds.
    pub ns: u64,
    /// Context switches of the application, in all passes.
    pub app: ContextSwitches,
    /// Context switches of the serving process: the daemon of a mount, or the parent of a run.
    pub server: ContextSwitches,
    /// Number of READ or WRITE requests to the daemon; `None` if not counted.
    pub requests: Option<u64>,
}

/// `true` alone and within a run: the fastest starts of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    /// The round, counted from 1.
    pub round: u32,
    /// Alone, in nanoseconds.
    pub plain_ns: u64,
    /// Within a run, in nanoseconds.
    pub run_ns: u64,
}

impl DirectCell {
    /// Bytes per second.
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / (self.ns.max(1) as f64 / 1e9)
    }

    /// Nanoseconds per call.
    pub fn ns_per_call(&self) -> f64 {
        self.ns as f64 / self.calls.max(1) as f64
    }
}

impl DirectResults {
    /// A figure of a case on a target, by rounds.
    pub fn figures_by_round(
        &self,
        case: DirectCase,
        target: &str,
        figure: fn(&DirectCell) -> f64,
    ) -> Vec<Option<f64>> {
        let of_round = |round| {
            let mut cells = self.cells.iter();
            let is = |cell: &&DirectCell| {
                (cell.case, cell.round, &*cell.target) == (case, round, target)
            };
            cells.find(is).map(figure)
        };
        (1..=self.rounds).map(of_round).collect()
    }

    /// The median of a figure, with quartiles; `None` if not measured.
    pub fn summary(
        &self,
        case: DirectCase,
        target: &str,
        figure: fn(&DirectCell) -> f64,
    ) -> Option<QuartileSummary> {
        let values = self.figures_by_round(case, target, figure);
        QuartileSummary::from_values(&values.into_iter().flatten().collect::<Vec<_>>())
    }

    /// The speed of `target` relative to `base`: the median of the ratios of each round, with
    /// quartiles.
    pub fn speed(&self, case: DirectCase, target: &str, base: &str) -> Option<QuartileSummary> {
        let rate = |target| self.figures_by_round(case, target, DirectCell::bytes_per_s);
        QuartileSummary::from_values(&paired_ratios(&rate(target), &rate(base)))
    }

    /// The cases of a table, in the order of measurement.
    pub fn cases(&self, table: DirectTable) -> Vec<DirectCase> {
        let mut cases = Vec::new();
        for cell in self.cells.iter().filter(|cell| cell.case.table == table) {
            if !cases.contains(&cell.case) {
                cases.push(cell.case);
            }
        }
        cases
    }

    /// The targets of a case, in the order of [`DirectResults::targets`].
    pub fn targets_of(&self, case: DirectCase) -> Vec<&str> {
        let has =
            |name: &str| self.cells.iter().any(|cell| cell.case == case && cell.target == name);
        self.targets.iter().map(|target| &*target.name).filter(|name| has(name)).collect()
    }

    /// Additional time of a start within a run, in milliseconds.
    pub fn start_more_ms(&self) -> Option<QuartileSummary> {
        let more = |start: &StartTimes| (start.run_ns as f64 - start.plain_ns as f64) / 1e6;
        QuartileSummary::from_values(&self.starts.iter().map(more).collect::<Vec<_>>())
    }

    /// Writes the results into a directory.
    ///
    /// # Errors
    ///
    /// Fails if the directory cannot be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_atomically(&dir.join(FILE), &serde_json::to_vec(self)?)
    }
}
