//! The results of a study in the file `results.json`. docs/study.md documents its fields;
//! [`SCHEMA`] changes when their meaning does.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use defuse_probe::{LatencyHistogram, Op, RequestStage, StatsSnapshot};
use serde::{Deserialize, Serialize};

use crate::device::DeviceUse;
use crate::options::{StudyConfig, StudyScale};
use crate::rows::StorageMedia;
use crate::throttle::ThrottleLimits;

/// Marks the version of a build without optimisation.
pub const NOT_OPTIMISED: &str = "(not optimised)";

/// The version of the format.
pub const SCHEMA: &str = "defuse-study/1";
/// The name of the file in the directory of results.
pub const FILE: &str = "results.json";

/// All results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StudyResults {
    /// [`SCHEMA`].
    pub schema: String,
    /// The version of this program, with [`NOT_OPTIMISED`] if it is not.
    pub program: String,
    /// Start time in milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// The machine.
    pub machine: MachineFacts,
    /// Size of the rows.
    pub scale: StudyScale,
    /// Seed of the workloads' random choices.
    pub seed: u64,
    /// Number of planned runs of each cell.
    pub runs: u32,
    /// Numbers of the rows.
    pub rows: Vec<u8>,
    /// The configurations.
    pub configs: Vec<StudyConfig>,
    /// The device.
    pub device: DeviceFacts,
    /// The method of limiting memory.
    pub memory: String,
    /// The method of measuring the kernel's queues, or the reason why they were not measured.
    pub kernel_stages: String,
    /// It ended before everything was measured.
    pub interrupted: bool,
    /// The measurements, in order.
    pub cells: Vec<StudyCell>,
}

/// A machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineFacts {
    /// Kernel release.
    pub kernel: String,
    /// The processor's name.
    pub cpu: String,
    /// Number of processors.
    pub cpus: u64,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

/// The block device of the measurements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// A description, which notes if the device is emulated.
    pub description: String,
    /// The emulated device; `None` for the loop device at full speed.
    pub emulated: Option<StorageMedia>,
    /// Its limits.
    pub limits: Option<ThrottleLimits>,
    /// Type of the file system that holds the image.
    pub image_on: String,
}

/// One run of one row in one configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StudyCell {
    /// The row's number.
    pub row: u8,
    /// The configuration's name.
    pub config: String,
    /// The run, counted from 1.
    pub run: u32,
    /// The measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<CellMeasurement>,
    /// The reason why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The measurement of a cell. All figures are of the run alone, without the creation of files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CellMeasurement {
    /// Duration in seconds.
    pub seconds: f64,
    /// I/O flow operations, as the paper counts them.
    pub operations: u64,
    /// Bytes that the application read.
    pub read_bytes: u64,
    /// Bytes that it wrote.
    pub written_bytes: u64,
    /// The operations by their names in the workload.
    pub flowops: Vec<FlowopFigures>,
    /// CPU time.
    pub cpu: CpuUse,
    /// I/O of the block device during the run.
    pub device: DeviceUse,
    /// I/O including write-back after the end.
    pub device_synced: DeviceUse,
    /// Statistics of the daemon; `None` for native and for other programs.
    pub daemon: Option<StatsSnapshot>,
    /// Statistics of the kernel's queues; `None` for native, and without permission.
    pub kernel: Option<StatsSnapshot>,
    /// Limit on the memory of application and daemon together beyond their anonymous memory, in
    /// bytes: caches of data, names and inodes. `None` if it could not be limited.
    pub memory_limit_bytes: Option<u64>,
    /// Peak memory usage in bytes.
    pub memory_peak_bytes: Option<u64>,
    /// Size of the workload's initial files in bytes.
    pub data_bytes: u64,
    /// Descriptions of the changes by scaling.
    pub scaled: Vec<String>,
    /// Remarks, for example that memory was not limited.
    pub remarks: Vec<String>,
}

/// One operation of a workload.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowopFigures {
    /// Its name in the workload.
    pub name: String,
    /// The kind of operation, such as `read` or `createfile`.
    pub kind: String,
    /// Number of operations.
    pub count: u64,
    /// Bytes transferred.
    pub bytes: u64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
    /// Median latency in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latency in nanoseconds.
    pub p99_ns: u64,
    /// Maximum latency in nanoseconds.
    pub max_ns: u64,
}

/// CPU time, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuUse {
    /// CPU time of the application.
    pub app_ns: u64,
    /// CPU time of the daemon; `None` for native.
    pub daemon_ns: Option<u64>,
    /// Non-idle CPU time of the whole machine, in steps of 10 ms.
    pub system_ns: u64,
}

impl CellMeasurement {
    /// Throughput in operations per second.
    pub fn ops_per_s(&self) -> f64 {
        self.operations as f64 / self.seconds.max(1e-9)
    }

    /// A time per operation, in microseconds.
    pub fn microseconds_per_op(&self, ns: u64) -> f64 {
        ns as f64 / 1e3 / self.operations.max(1) as f64
    }

    /// Requests by type, as counted by the daemon, or else by the kernel; empty for native.
    pub fn requests(&self) -> BTreeMap<&'static str, u64> {
        let stages = [(&self.daemon, RequestStage::User), (&self.kernel, RequestStage::Total)];
        let found =
            stages.into_iter().find_map(|(snapshot, stage)| Some((snapshot.as_ref()?, stage)));
        let Some((snapshot, stage)) = found else { return BTreeMap::new() };
        let of_stage = snapshot.ops.iter().filter(|stats| stats.stage == stage);
        of_stage.map(|stats| (stats.op.name(), stats.latency.count)).collect()
    }

    /// Number of requests of one type.
    pub fn request_count(&self, op: Op) -> u64 {
        self.requests().get(op.name()).copied().unwrap_or(0)
    }

    /// Latencies of an operation in a stage.
    pub fn latency(&self, stage: RequestStage, op: Op) -> Option<&LatencyHistogram> {
        let snapshot = if stage == RequestStage::User { &self.daemon } else { &self.kernel };
        snapshot.as_ref()?.get_stage(stage, op).map(|stats| &stats.latency)
    }
}

impl StudyResults {
    /// The measurements of a row in a configuration, in the order of runs.
    pub fn measurements_of(&self, row: u8, config: &str) -> Vec<&CellMeasurement> {
        let cells = self.cells.iter().filter(|cell| cell.row == row && cell.config == config);
        cells.filter_map(|cell| cell.measured.as_ref()).collect()
    }

    /// True if a cell need not be measured again.
    pub fn has(&self, row: u8, config: &str, run: u32) -> bool {
        let mut cells = self.cells.iter();
        cells.any(|cell| {
            (cell.row, &*cell.config, cell.run) == (row, config, run) && cell.measured.is_some()
        })
    }

    /// Adds a cell, in place of an earlier attempt.
    pub fn insert(&mut self, cell: StudyCell) {
        self.cells
            .retain(|old| (old.row, &old.config, old.run) != (cell.row, &cell.config, cell.run));
        self.cells.push(cell);
    }

    /// Reads the results of a directory.
    pub fn read(dir: &Path) -> Result<StudyResults> {
        let path = dir.join(FILE);
        let text = fs::read_to_string(&path).with_context(|| {
            format!("cannot read {}: name the directory that --out was", path.display())
        })?;
        #[derive(Deserialize)]
        struct ResultsHead {
            schema: String,
        }
        let head: ResultsHead = serde_json::from_str(&text)
            .with_context(|| format!("{} is not the result of a study", path.display()))?;
        ensure!(
            head.schema == SCHEMA,
            "{} has schema {:?}, this program reads {SCHEMA}: use the version that wrote it",
            path.display(),
            head.schema
        );
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Writes the results into a directory, atomically for readers.
    pub fn write(&self, dir: &Path) -> Result<()> {
        write_atomically(&dir.join(FILE), &serde_json::to_vec(self)?)
    }
}

/// Replaces a file atomically for readers.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension("tmp");
    let written = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    written.with_context(|| format!("cannot write {}", path.display()))
}

impl MachineFacts {
    /// This machine.
    pub fn read_machine() -> MachineFacts {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = total.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
        MachineFacts {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpu: cpu.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u64),
            memory_bytes: kib.unwrap_or(0) * 1024,
        }
    }
}
