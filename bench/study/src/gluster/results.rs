//! The results in the file `gluster.json`. docs/gluster.md documents its fields; [`SCHEMA`] changes
//! when their meaning does.

use std::path::Path;

use anyhow::Result;
use defuse_measure::stats::{QuartileSummary, paired_ratios};
use defuse_measure::threads::ThreadUse;
use serde::{Deserialize, Serialize};

use super::cases::{GlusterCase, VolumeKind};
use crate::results::{MachineFacts, write_atomically};

/// The version of the format.
pub const SCHEMA: &str = "defuse-bench-gluster/1";
/// The name of the file in the directory of results.
pub const FILE: &str = "gluster.json";

/// All results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GlusterResults {
    /// [`SCHEMA`].
    pub schema: String,
    /// The version of this program.
    pub program: String,
    /// This is an optimised build. Times of other builds are meaningless.
    pub optimised: bool,
    /// The version of GlusterFS.
    pub glusterfs: String,
    /// The version of fio.
    pub fio: String,
    /// Start time in milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// The machine.
    pub machine: MachineFacts,
    /// Load average of one minute at the start.
    pub load: f64,
    /// Number of rounds that were requested.
    pub rounds: u32,
    /// Time of a run of fio, in milliseconds.
    pub time_ms: u64,
    /// Size of the file of each job, in bytes.
    pub file_bytes: u64,
    /// Number of small files.
    pub files: u32,
    /// The targets.
    pub targets: Vec<GlusterTarget>,
    /// The targets and parts that were not measured, with reasons.
    pub left_out: Vec<String>,
    /// It was interrupted before all rounds were complete.
    pub interrupted: bool,
    /// The measurements.
    pub cells: Vec<GlusterCell>,
}

/// A target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlusterTarget {
    /// Its name.
    pub name: String,
    /// The command that starts it, in short.
    pub how: String,
}

/// Latency of requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestLatency {
    /// The median, in nanoseconds.
    pub median_ns: u64,
    /// The 99th percentile, in nanoseconds.
    pub p99_ns: u64,
}

/// The measurement of one case on one target in one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GlusterCell {
    /// The case.
    pub case: GlusterCase,
    /// The target.
    pub target: String,
    /// The round, counted from 1.
    pub round: u32,
    /// The reason why it failed. All figures are 0 then.
    pub error: Option<String>,
    /// Number of requests, or of operations on names.
    pub operations: u64,
    /// Bytes read or written by fio.
    pub bytes: u64,
    /// Duration in nanoseconds.
    pub ns: u64,
    /// CPU time of the application, in nanoseconds. Within a run, it does a part of the file
    /// system's work.
    pub app_ns: u64,
    /// CPU time of the client of GlusterFS: the daemon of a mount, or the process of a run. In
    /// nanoseconds.
    pub client_ns: u64,
    /// The threads of the client, by name.
    pub threads: Vec<ThreadUse>,
    /// CPU time of the servers, in nanoseconds.
    pub servers_ns: u64,
    /// Latency of requests of fio.
    pub latency: Option<RequestLatency>,
}

impl GlusterCell {
    /// Operations per second.
    pub fn rate(&self) -> f64 {
        self.operations as f64 / (self.ns.max(1) as f64 / 1e9)
    }

    /// CPU time of application and client for each operation, in nanoseconds.
    pub fn cpu_ns(&self) -> f64 {
        (self.app_ns + self.client_ns) as f64 / self.operations.max(1) as f64
    }

    /// CPU time of the client in per cent of one processor.
    pub fn client_pct(&self) -> f64 {
        100.0 * self.client_ns as f64 / self.ns.max(1) as f64
    }

    /// CPU time of the busiest thread of the client that receives requests, in per cent of one
    /// processor; 0 without such a thread.
    pub fn reader_pct(&self) -> f64 {
        let readers = self.threads.iter().filter(|threads| is_reader(&threads.name));
        let busiest = readers.map(|threads| threads.busiest_ns).max().unwrap_or(0);
        100.0 * busiest as f64 / self.ns.max(1) as f64
    }
}

/// True for threads that receive requests from the kernel: the threads of GlusterFS
/// (`glfs_fuseproc`), and ours.
pub fn is_reader(thread: &str) -> bool {
    const NAMES: [&str; 3] = ["glfs_fuseproc", "defuse-worker", "defuse-ring"];
    NAMES.iter().any(|name| thread.starts_with(name))
}

impl GlusterResults {
    /// A figure of a case on a target, by rounds.
    pub fn figures_by_round(
        &self,
        case: GlusterCase,
        target: &str,
        figure: fn(&GlusterCell) -> f64,
    ) -> Vec<Option<f64>> {
        let of_round = |round| {
            let is = |cell: &&GlusterCell| {
                cell.error.is_none()
                    && (cell.case, cell.round, &*cell.target) == (case, round, target)
            };
            self.cells.iter().find(is).map(figure)
        };
        (1..=self.rounds).map(of_round).collect()
    }

    /// The median of a figure, with quartiles; `None` if not measured.
    pub fn summary(
        &self,
        case: GlusterCase,
        target: &str,
        figure: fn(&GlusterCell) -> f64,
    ) -> Option<QuartileSummary> {
        let values = self.figures_by_round(case, target, figure);
        QuartileSummary::from_values(&values.into_iter().flatten().collect::<Vec<_>>())
    }

    /// A figure of `target` relative to the figure of `base`: the median of the ratios of each
    /// round, with quartiles.
    pub fn ratio(
        &self,
        case: GlusterCase,
        target: &str,
        base: &str,
        figure: fn(&GlusterCell) -> f64,
    ) -> Option<QuartileSummary> {
        let of = |name| self.figures_by_round(case, name, figure);
        QuartileSummary::from_values(&paired_ratios(&of(target), &of(base)))
    }

    /// The target of GlusterFS with the highest rate, by its median.
    pub fn best_native(&self, case: GlusterCase) -> Option<&str> {
        let natives = self.targets.iter().map(|target| &*target.name);
        let natives = natives.filter(|name| name.starts_with(super::targets::NATIVE));
        let rates = natives
            .filter_map(|name| Some((name, self.summary(case, name, GlusterCell::rate)?.median)));
        rates.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(name, _)| name)
    }

    /// The cases of a volume, in the order of measurement.
    pub fn cases(&self, place: VolumeKind) -> Vec<GlusterCase> {
        let mut cases = Vec::new();
        for cell in self.cells.iter().filter(|cell| cell.case.place == place) {
            if !cases.contains(&cell.case) {
                cases.push(cell.case);
            }
        }
        cases
    }

    /// The targets with measurements on a volume, in the order of [`GlusterResults::targets`].
    pub fn targets_on(&self, place: VolumeKind) -> Vec<&str> {
        let has = |name: &str| {
            self.cells.iter().any(|cell| cell.case.place == place && cell.target == name)
        };
        self.targets.iter().map(|target| &*target.name).filter(|name| has(name)).collect()
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
