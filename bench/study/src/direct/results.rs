//! What was measured: the file `direct.json`. Its fields are documented in docs/direct.md; [`SCHEMA`] changes when their
//! meaning does.

use std::path::Path;

use anyhow::Result;
use defuse_measure::stats::{Summary, paired_ratios};
use defuse_measure::switches::Switches;
use serde::{Deserialize, Serialize};

use super::worker::Op;
use crate::results::{Machine, write_atomically};

/// Which meaning the fields have.
pub const SCHEMA: &str = "defuse-bench-direct/1";
/// The name of the file in the directory of results.
pub const FILE: &str = "direct.json";

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: String,
    /// The version of this program.
    pub program: String,
    /// Whether this build was optimised: otherwise times say nothing.
    pub optimised: bool,
    /// When it began, in milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// Where it ran.
    pub machine: Machine,
    /// How many programs wanted a processor at the beginning, on the mean of a minute.
    pub load: f64,
    /// Complete rounds.
    pub rounds: u32,
    /// Writes in the table of context switches.
    pub writes: u64,
    /// Bytes of the file of sequential reads and writes.
    pub file_bytes: u64,
    /// Where calls went, and how.
    pub targets: Vec<Target>,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
    /// Whether it was ended before all rounds were complete.
    pub interrupted: bool,
    /// What was measured of calls.
    pub cells: Vec<Cell>,
    /// What was measured of starts.
    pub starts: Vec<Start>,
}

/// Where calls go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// What it is.
    pub how: String,
}

/// One of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Table {
    /// Writes and their context switches.
    Writes,
    /// A file written, rewritten and read from its beginning to its end.
    Sequential,
    /// `memory:` beside tmpfs.
    Memory,
    /// Calls of the client, complete and with a file system that does nothing.
    Share,
}

/// What the file lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lower {
    /// Memory.
    Tmpfs,
    /// A loop device made for the purpose.
    Ext4,
}

impl Lower {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Lower::Tmpfs => "tmpfs",
            Lower::Ext4 => "ext4",
        }
    }
}

/// What is compared: the same calls in the same table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Which table it belongs to.
    pub table: Table,
    /// What the file lies on.
    pub lower: Lower,
    /// What was done.
    pub op: Op,
    /// Bytes of a call.
    pub block: u64,
}

/// One case on one target in one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// What was done.
    #[serde(flatten)]
    pub case: Case,
    /// On which target.
    pub target: String,
    /// Counted from 1.
    pub round: u32,
    /// How often it was done.
    pub passes: u64,
    /// Calls of a pass.
    pub calls: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Time of the fastest pass, in nanoseconds.
    pub ns: u64,
    /// Context switches of the application, in all passes.
    pub app: Switches,
    /// Those of whoever serves: the daemon of a mount, the parent of a run.
    pub server: Switches,
    /// READ or WRITE requests that the daemon had; none where it was not asked, or there is none.
    pub requests: Option<u64>,
}

/// `true` alone and within a run: the fastest of a round's starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Counted from 1.
    pub round: u32,
    /// Alone, in nanoseconds.
    pub plain_ns: u64,
    /// Within a run.
    pub run_ns: u64,
}

impl Cell {
    /// Bytes in a second.
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / (self.ns.max(1) as f64 / 1e9)
    }

    /// Nanoseconds of a call.
    pub fn ns_per_call(&self) -> f64 {
        self.ns as f64 / self.calls.max(1) as f64
    }
}

impl Results {
    /// A figure of a case on a target, round by round.
    pub fn by_round(&self, case: Case, target: &str, figure: fn(&Cell) -> f64) -> Vec<Option<f64>> {
        let of_round = |round| {
            let mut cells = self.cells.iter();
            let is = |cell: &&Cell| (cell.case, cell.round, &*cell.target) == (case, round, target);
            cells.find(is).map(figure)
        };
        (1..=self.rounds).map(of_round).collect()
    }

    /// The median of a figure, with quartiles; `None` where it was not measured.
    pub fn summary(&self, case: Case, target: &str, figure: fn(&Cell) -> f64) -> Option<Summary> {
        let values = self.by_round(case, target, figure);
        Summary::of(&values.into_iter().flatten().collect::<Vec<_>>())
    }

    /// How many times as fast `target` is as `base`: the median of the ratios of each round, with quartiles.
    pub fn speed(&self, case: Case, target: &str, base: &str) -> Option<Summary> {
        let rate = |target| self.by_round(case, target, Cell::bytes_per_s);
        Summary::of(&paired_ratios(&rate(target), &rate(base)))
    }

    /// The cases of a table, in the order in which they were measured.
    pub fn cases(&self, table: Table) -> Vec<Case> {
        let mut cases = Vec::new();
        for cell in self.cells.iter().filter(|cell| cell.case.table == table) {
            if !cases.contains(&cell.case) {
                cases.push(cell.case);
            }
        }
        cases
    }

    /// The targets of a case, in the order of [`Results::targets`].
    pub fn targets_of(&self, case: Case) -> Vec<&str> {
        let has =
            |name: &str| self.cells.iter().any(|cell| cell.case == case && cell.target == name);
        self.targets.iter().map(|target| &*target.name).filter(|name| has(name)).collect()
    }

    /// How much longer a start within a run takes, in milliseconds.
    pub fn start_more_ms(&self) -> Option<Summary> {
        let more = |start: &Start| (start.run_ns as f64 - start.plain_ns as f64) / 1e6;
        Summary::of(&self.starts.iter().map(more).collect::<Vec<_>>())
    }

    /// Writes the results into a directory.
    ///
    /// # Errors
    ///
    /// A directory that cannot be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_atomically(&dir.join(FILE), &serde_json::to_vec(self)?)
    }
}
