//! The workload engine as a separate process: its job, its work, and its outcome.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use defuse_wml::plan::WorkloadAction;
use defuse_wml::{RowDevice, RunObserver, RunReport, RunSettings, SystemCallDriver, WorkloadPlan};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::results::FlowopFigures;
use crate::rows::StorageMedia;

/// A phase of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowPhase {
    /// Creates the files.
    Prepare,
    /// Runs on existing files.
    Run,
}

/// The job of the engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineJob {
    /// The row's number.
    pub row: u8,
    /// The device whose amount of work is used.
    pub media: StorageMedia,
    /// Factor of sizes and counts.
    pub factor: f64,
    /// Factor for the number of accesses in the random rows, whose files are scaled by `factor`.
    pub access_factor: f64,
    /// Directory of the files.
    pub dir: PathBuf,
    /// Seed of random choices.
    pub seed: u64,
    /// The phase.
    pub phase: RowPhase,
}

/// The outcome of the engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineOutcome {
    /// Duration of the run in seconds.
    pub seconds: f64,
    /// Number of I/O flow operations.
    pub operations: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// The operations by name.
    pub flowops: Vec<FlowopFigures>,
    /// CPU time of the run, in nanoseconds.
    pub cpu_ns: u64,
    /// Size of all files of the workload in bytes.
    pub data_bytes: u64,
    /// Descriptions of the changes by scaling.
    pub scaled: Vec<String>,
}

/// Executes a job. Returns the outcome as JSON, or `None` after creating files.
///
/// # Errors
///
/// Fails if the job cannot be read, and with the first failure of the workload.
pub fn work(job_file: &Path) -> Result<Option<String>> {
    let text = fs::read(job_file).with_context(|| format!("cannot read {}", job_file.display()))?;
    let job: EngineJob = serde_json::from_slice(&text).context("the job is invalid")?;
    let mut plan = plan(&job)?;
    let phase = job.phase;
    plan.actions.retain(|action| match action {
        WorkloadAction::CreateFiles => true,
        WorkloadAction::Run(_) => phase == RowPhase::Run,
        _ => false,
    });
    let settings = RunSettings { adopt: phase == RowPhase::Run, ..RunSettings::default() };
    let began = StartCpuTime::default();
    let reports = defuse_wml::execute(&plan, &SystemCallDriver, settings, &began);
    let cpu_ns = cpu_ns() - began.0.load(Ordering::Relaxed);
    let mut reports = reports.map_err(|failure| anyhow!("row {}: {failure}", job.row))?;
    if phase == RowPhase::Prepare {
        return Ok(None);
    }
    ensure!(reports.len() == 1, "row {} has {} runs, not one", job.row, reports.len());
    Ok(Some(serde_json::to_string(&outcome(&reports.remove(0), cpu_ns))?))
}

/// CPU time at the start of the measured part.
#[derive(Default)]
struct StartCpuTime(AtomicU64);

impl RunObserver for StartCpuTime {
    fn begin(&self, _limit: Option<std::time::Duration>) {
        self.0.store(cpu_ns(), Ordering::Relaxed);
    }
}

/// The workload of a job.
fn plan(job: &EngineJob) -> Result<WorkloadPlan> {
    let row = defuse_wml::WorkloadRow::find_by_number(u32::from(job.row))
        .with_context(|| format!("there is no row {}", job.row))?;
    let workload = defuse_wml::builtin(row.workload)
        .with_context(|| format!("there is no workload {}", row.workload))?;
    let device = match job.media {
        StorageMedia::Hdd => RowDevice::Hdd,
        StorageMedia::Ssd => RowDevice::Ssd,
    };
    let dir = job.dir.to_str().context("the directory is not UTF-8")?;
    let mut variables = row.variables_on(device);
    for variable in &mut variables {
        *variable = scale_accesses(variable, job.access_factor / job.factor);
    }
    variables.push(format!("dir={dir}"));
    let options = defuse_wml::LoadOptions {
        variables,
        scale: job.factor,
        seed: job.seed,
        ..Default::default()
    };
    let file = format!("{}.f", workload.name);
    defuse_wml::load(workload.text, &file, &options)
        .map_err(|diagnostic| anyhow!("row {}: {diagnostic}", job.row))
}

/// The engine scales numbers of accesses with the file. This applies the quotient to their own
/// factor.
fn scale_accesses(variable: &str, factor: f64) -> String {
    let accesses = |name| variable.strip_prefix(name).and_then(|value| value.parse::<f64>().ok());
    for name in ["reads=", "writes="] {
        if let Some(count) = accesses(name) {
            return format!("{name}{}", (count * factor).round().max(1.0));
        }
    }
    variable.to_owned()
}

fn outcome(report: &RunReport, cpu_ns: u64) -> EngineOutcome {
    let bytes = |kinds: &[&str]| {
        report.flowops.iter().filter(|op| kinds.contains(&op.kind)).map(|op| op.bytes).sum()
    };
    let flowop = |flowop: &defuse_wml::FlowopReport| FlowopFigures {
        name: flowop.name.clone(),
        kind: flowop.kind.to_owned(),
        count: flowop.operations,
        bytes: flowop.bytes,
        mean_ns: flowop.mean_ns as f64,
        p50_ns: flowop.p50_ns,
        p99_ns: flowop.p99_ns,
        max_ns: flowop.max_ns,
    };
    EngineOutcome {
        seconds: report.seconds,
        operations: report.total.operations,
        read_bytes: bytes(&["read", "readwholefile"]),
        written_bytes: bytes(&["write", "writewholefile", "appendfile", "appendfilerand"]),
        flowops: report.flowops.iter().filter(|flowop| flowop.operations > 0).map(flowop).collect(),
        cpu_ns,
        data_bytes: report.data_bytes,
        scaled: report.scaling.changes.clone(),
    }
}

/// CPU time of this process.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0)).as_nanos()
        as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_accesses_have_a_separate_factor() {
        assert_eq!(scale_accesses("reads=1000", 0.5), "reads=500");
        assert_eq!(scale_accesses("nthreads=32", 0.5), "nthreads=32");
        assert_eq!(scale_accesses("writes=1", 0.1), "writes=1");
    }

    #[test]
    fn every_row_can_be_planned_and_its_phases_share_files() {
        for row in [1_u8, 9, 17, 21, 29, 38, 39, 41, 43, 44, 45] {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("job");
            let files = dir.path().join("data");
            fs::create_dir(&files).unwrap();
            let mut notes = Vec::new();
            for phase in [RowPhase::Prepare, RowPhase::Run] {
                let factor = 1.0 / 16384.0;
                let job = EngineJob {
                    row,
                    media: StorageMedia::Ssd,
                    factor,
                    access_factor: factor,
                    dir: files.clone(),
                    seed: 1,
                    phase,
                };
                fs::write(&file, serde_json::to_vec(&job).unwrap()).unwrap();
                notes.push(work(&file).unwrap());
            }
            assert_eq!(notes[0], None);
            let outcome: EngineOutcome = serde_json::from_str(notes[1].as_ref().unwrap()).unwrap();
            assert!(outcome.operations > 0 && outcome.seconds > 0.0, "row {row}: {outcome:?}");
        }
    }
}
