//! What a study measured: the file `results.json`. Its fields are documented in docs/study.md; [`SCHEMA`] changes when
//! their meaning does.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use defuse_probe::{Histogram, Op, Snapshot, Stage};
use serde::{Deserialize, Serialize};

use crate::device::DeviceUse;
use crate::options::{Config, Scale};
use crate::rows::Media;
use crate::throttle::Limits;

/// What a version says of a build without optimisation.
pub const NOT_OPTIMISED: &str = "(not optimised)";

/// Which meaning the fields have.
pub const SCHEMA: &str = "defuse-study/1";
/// The name of the file in the directory of results.
pub const FILE: &str = "results.json";

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: String,
    /// The version of this program, with [`NOT_OPTIMISED`] where that is so.
    pub program: String,
    /// When it began, in milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// Where it ran.
    pub machine: Machine,
    /// How large rows were.
    pub scale: Scale,
    /// For the random choices of workloads.
    pub seed: u64,
    /// How often each cell was to be measured.
    pub runs: u32,
    /// Numbers of the rows.
    pub rows: Vec<u8>,
    /// What was compared.
    pub configs: Vec<Config>,
    /// The device.
    pub device: DeviceFacts,
    /// How memory was limited.
    pub memory: String,
    /// How the kernel's queues were measured, or why not.
    pub kernel_stages: String,
    /// Whether it ended before everything was measured.
    pub interrupted: bool,
    /// What was measured, in the order in which it was.
    pub cells: Vec<Cell>,
}

/// A machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Release of the kernel.
    pub kernel: String,
    /// The processor's name.
    pub cpu: String,
    /// How many processors there are.
    pub cpus: u64,
    /// Memory, in bytes.
    pub memory_bytes: u64,
}

/// The block device that was measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// In words; an emulated one is called that.
    pub description: String,
    /// Which device was emulated; none where the loop device was as fast as it is.
    pub emulated: Option<Media>,
    /// Its limits.
    pub limits: Option<Limits>,
    /// The type of the file system that holds its image.
    pub image_on: String,
}

/// One run of one row in one configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The row's number.
    pub row: u8,
    /// The configuration's name.
    pub config: String,
    /// Counted from 1.
    pub run: u32,
    /// What was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// Why nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What was measured in a cell. All figures are of the run alone, without making files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// How long it took.
    pub seconds: f64,
    /// I/O flow operations, as the paper counts them.
    pub operations: u64,
    /// Bytes that the application read.
    pub read_bytes: u64,
    /// Bytes that it wrote.
    pub written_bytes: u64,
    /// The operations by their names in the workload.
    pub flowops: Vec<Flowop>,
    /// CPU time.
    pub cpu: CpuUse,
    /// The block device from beginning to end.
    pub device: DeviceUse,
    /// The same with what was written out after the end.
    pub device_synced: DeviceUse,
    /// What the daemon measured; none for native and for other programs.
    pub daemon: Option<Snapshot>,
    /// What the kernel measured in its queues; none for native, and where that is not permitted.
    pub kernel: Option<Snapshot>,
    /// What application and daemon together may have beyond their own (anonymous) memory, in bytes: caches of data, names
    /// and inodes. None where it could not be limited.
    pub memory_limit_bytes: Option<u64>,
    /// The most that they used.
    pub memory_peak_bytes: Option<u64>,
    /// Bytes of the files that the workload began with.
    pub data_bytes: u64,
    /// What the scale changed in the workload, in words.
    pub scaled: Vec<String>,
    /// What else is to be known, such as that memory was not limited.
    pub remarks: Vec<String>,
}

/// One operation of a workload.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Flowop {
    /// Its name in the workload.
    pub name: String,
    /// What it does, such as `read` or `createfile`.
    pub kind: String,
    /// How often it was done.
    pub count: u64,
    /// Bytes that it moved.
    pub bytes: u64,
    /// How long it took, in nanoseconds.
    pub mean_ns: f64,
    /// Half of them took no longer.
    pub p50_ns: u64,
    /// 99 of 100 took no longer.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// CPU time, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuUse {
    /// Of the application.
    pub app_ns: u64,
    /// Of the daemon; none for native.
    pub daemon_ns: Option<u64>,
    /// Of everything on the machine that is not idle, in steps of 10 ms.
    pub system_ns: u64,
}

impl Measured {
    /// Throughput.
    pub fn ops_per_s(&self) -> f64 {
        self.operations as f64 / self.seconds.max(1e-9)
    }

    /// Some time for each operation, in microseconds.
    pub fn us_per_op(&self, ns: u64) -> f64 {
        ns as f64 / 1e3 / self.operations.max(1) as f64
    }

    /// Requests by type, as the daemon counted them, or else the kernel; empty for native.
    pub fn requests(&self) -> BTreeMap<&'static str, u64> {
        let stages = [(&self.daemon, Stage::User), (&self.kernel, Stage::Total)];
        let found =
            stages.into_iter().find_map(|(snapshot, stage)| Some((snapshot.as_ref()?, stage)));
        let Some((snapshot, stage)) = found else { return BTreeMap::new() };
        let of_stage = snapshot.ops.iter().filter(|stats| stats.stage == stage);
        of_stage.map(|stats| (stats.op.name(), stats.latency.count)).collect()
    }

    /// How many requests of one type there were.
    pub fn request_count(&self, op: Op) -> u64 {
        self.requests().get(op.name()).copied().unwrap_or(0)
    }

    /// Latencies of an operation in a stage.
    pub fn latency(&self, stage: Stage, op: Op) -> Option<&Histogram> {
        let snapshot = if stage == Stage::User { &self.daemon } else { &self.kernel };
        snapshot.as_ref()?.get_stage(stage, op).map(|stats| &stats.latency)
    }
}

impl Results {
    /// What was measured of a row in a configuration, in the order of runs.
    pub fn measured(&self, row: u8, config: &str) -> Vec<&Measured> {
        let cells = self.cells.iter().filter(|cell| cell.row == row && cell.config == config);
        cells.filter_map(|cell| cell.measured.as_ref()).collect()
    }

    /// Whether a cell need not be measured again.
    pub fn has(&self, row: u8, config: &str, run: u32) -> bool {
        let mut cells = self.cells.iter();
        cells.any(|cell| {
            (cell.row, &*cell.config, cell.run) == (row, config, run) && cell.measured.is_some()
        })
    }

    /// Puts in a cell, in place of what was tried before.
    pub fn put(&mut self, cell: Cell) {
        self.cells
            .retain(|old| (old.row, &old.config, old.run) != (cell.row, &cell.config, cell.run));
        self.cells.push(cell);
    }

    /// Reads the results of a directory.
    pub fn read(dir: &Path) -> Result<Results> {
        let path = dir.join(FILE);
        let text = fs::read_to_string(&path).with_context(|| {
            format!("cannot read {}: name the directory that --out was", path.display())
        })?;
        #[derive(Deserialize)]
        struct Head {
            schema: String,
        }
        let head: Head = serde_json::from_str(&text)
            .with_context(|| format!("{} is no result of a study", path.display()))?;
        ensure!(
            head.schema == SCHEMA,
            "{} has schema {:?}, this program reads {SCHEMA}: use the version that wrote it",
            path.display(),
            head.schema
        );
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Writes the results into a directory; a reader sees the old ones or the new ones, never a part.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_atomically(&dir.join(FILE), &serde_json::to_vec(self)?)
    }
}

/// Replaces a file so that no reader ever sees a part of it.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension("tmp");
    let written = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    written.with_context(|| format!("cannot write {}", path.display()))
}

impl Machine {
    /// This one.
    pub fn this() -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = total.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
        Machine {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpu: cpu.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u64),
            memory_bytes: kib.unwrap_or(0) * 1024,
        }
    }
}
