//! Measures one cell: a new file system, the files of the row, a mount, and the workload.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use defuse_measure::command::find_own_program;
use defuse_measure::{caches, cpu};
use defuse_probe::StatsSnapshot;

use crate::cgroup::{CellCgroups, CgroupHierarchies, ProcessRole};
use crate::device::{DeviceUse, StudyDevice};
use crate::engine::{EngineJob, EngineOutcome, RowPhase};
use crate::interrupt::InterruptFlag;
use crate::kernel::{CellTrace, KernelStages};
use crate::mount::{MountPaths, StudyMount};
use crate::options::{DeviceChoice, StudyConfig, StudyOptions, StudyScale};
use crate::process::{ChildProcess, ProcessStart};
use crate::results::{CellMeasurement, CpuUse};
use crate::sizes::RowSizes;
use crate::throttle::ThrottleLimits;

/// Prefix of the names of control groups, before the process id.
pub const GROUP_PREFIX: &str = "defuse-study-";

/// State shared by all cells of a study.
#[derive(Debug)]
pub struct StudyContext<'a> {
    /// The options of the study.
    pub options: &'a StudyOptions,
    /// The device.
    pub device: StudyDevice,
    /// The working directory.
    pub work: PathBuf,
    /// The control-group hierarchies.
    pub hierarchies: CgroupHierarchies,
    /// The method of measuring the kernel's queues.
    pub kernel: KernelStages,
    /// Set when the user requests the end.
    pub interrupt: InterruptFlag,
}

/// Clocks and counters at one moment.
struct CounterSample {
    daemon: Option<StatsSnapshot>,
    device: DeviceUse,
    daemon_cpu_ns: Option<u64>,
    system: cpu::CpuSample,
}

impl StudyContext<'_> {
    /// Measures one cell. Removes everything that it created, even after an error.
    pub fn measure(&mut self, row: u8, config: &StudyConfig) -> Result<CellMeasurement> {
        let sizes = RowSizes::for_row(row, self.options);
        self.device.format()?;
        let files = self.device.mountpoint().join("data");
        fs::create_dir(&files)?;
        self.engine(&sizes.job(row, &files, RowPhase::Prepare, self.options), &[])?;
        caches::sync(&files)?;
        self.device.remount()?;
        drop_caches()?;
        let limit = (self.options.scale != StudyScale::Tiny).then_some(sizes.memory_limit_bytes);
        let name = format!("{GROUP_PREFIX}{}-{row}-{}", std::process::id(), config.name);
        let groups = CellCgroups::create(&self.hierarchies, &name, limit);
        let measured = self.run_mounted(row, config, &sizes, &groups);
        drop(groups);
        self.device.unmount()?;
        measured
    }

    /// Mounts, measures and unmounts.
    fn run_mounted(
        &self,
        row: u8,
        config: &StudyConfig,
        sizes: &RowSizes,
        groups: &CellCgroups,
    ) -> Result<CellMeasurement> {
        let source = self.device.mountpoint().join("data");
        let place = MountPaths {
            source: &source,
            mountpoint: &self.work.join("mnt"),
            program: &self.options.program,
            work: &self.work,
            groups: &groups.procs_files(ProcessRole::Daemon),
        };
        let mount = StudyMount::start(config, &place)
            .with_context(|| format!("{} could not be mounted", config.name))?;
        let throttle = match self.options.device {
            DeviceChoice::Emulated(media) => {
                Some(groups.throttle(&self.device.number()?, &ThrottleLimits::for_media(media))?)
            }
            DeviceChoice::None => None,
        };
        let root = if mount.is_some() { place.mountpoint } else { &source };
        let job = sizes.job(row, root, RowPhase::Run, self.options);
        let mut measured = self.run(&job, mount.as_ref(), groups, sizes.caches_bytes)?;
        drop(throttle);
        let device_before = self.device.read_use()?;
        caches::sync(&source)?;
        measured.device_synced =
            sum(&measured.device, &self.device.read_use()?.usage_since(&device_before));
        mount.map_or(Ok(()), StudyMount::end)?;
        measured.memory_limit_bytes = groups.limit_bytes.map(|_| sizes.caches_bytes);
        measured.memory_peak_bytes = groups.peak_bytes();
        measured.remarks.extend(groups.trouble.clone());
        Ok(measured)
    }

    fn run(
        &self,
        job: &EngineJob,
        mount: Option<&StudyMount>,
        groups: &CellCgroups,
        caches_bytes: u64,
    ) -> Result<CellMeasurement> {
        let watch = match mount.and_then(StudyMount::connection) {
            Some(connection) => self.kernel.watch(connection)?,
            None => CellTrace::default(),
        };
        let before = self.take_sample(mount, groups)?;
        let ended = AtomicBool::new(false);
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| groups.follow(caches_bytes, &ended));
            let outcome = self.engine(job, &groups.procs_files(ProcessRole::Application));
            ended.store(true, Ordering::Relaxed);
            outcome
        })?;
        let outcome = outcome.context("the workload returned no result")?;
        let system = cpu::CpuSample::take(None);
        let device = self.device.read_use()?;
        let after = self.take_sample(mount, groups)?;
        let kernel = watch.end()?;
        let mut measured = CellMeasurement {
            seconds: outcome.seconds,
            operations: outcome.operations,
            read_bytes: outcome.read_bytes,
            written_bytes: outcome.written_bytes,
            flowops: outcome.flowops,
            data_bytes: outcome.data_bytes,
            scaled: outcome.scaled,
            device: device.usage_since(&before.device),
            kernel: kernel.snapshot,
            remarks: kernel.remarks,
            ..CellMeasurement::default()
        };
        measured.cpu = CpuUse {
            app_ns: outcome.cpu_ns,
            daemon_ns: mount
                .and(after.daemon_cpu_ns.zip(before.daemon_cpu_ns))
                .map(|(a, b)| a.saturating_sub(b)),
            system_ns: before.system.usage_until(&system).system_ns,
        };
        measured.daemon =
            after.daemon.zip(before.daemon).map(|(after, before)| after.delta_since(&before));
        Ok(measured)
    }

    fn take_sample(
        &self,
        mount: Option<&StudyMount>,
        groups: &CellCgroups,
    ) -> Result<CounterSample> {
        // Taken before the CPU clocks, because answering costs the daemon CPU time.
        let daemon = mount.map(StudyMount::snapshot).transpose()?.flatten();
        let of_process = || mount.map(|mount| cpu::ProcessCpuTime::read(mount.pid()).total_ns());
        Ok(CounterSample {
            daemon,
            device: self.device.read_use()?,
            daemon_cpu_ns: groups.cpu_ns(ProcessRole::Daemon).or_else(of_process),
            system: cpu::CpuSample::take(None),
        })
    }

    /// Runs the workload engine as a separate process, which can be put into control groups and
    /// killed.
    fn engine(&self, job: &EngineJob, groups: &[PathBuf]) -> Result<Option<EngineOutcome>> {
        let (file, output) = (self.work.join("job.json"), self.work.join("outcome.json"));
        fs::write(&file, serde_json::to_vec(job)?)?;
        let words: [OsString; 3] = [find_own_program()?.into(), "study-engine".into(), file.into()];
        let start = ProcessStart {
            name: "the workload",
            words: &words,
            groups,
            log: &self.work.join("workload.log"),
            output: Some(&output),
            env: &[],
            dir: None,
        };
        let patience = self.time_limit();
        ChildProcess::start(&start)?.finish(patience, &self.interrupt)?;
        let text = fs::read_to_string(&output)?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&text).context("the result of the workload is invalid")?))
    }

    /// Time limit of a cell.
    fn time_limit(&self) -> Duration {
        Duration::from_secs(match self.options.scale {
            StudyScale::Tiny => 120,
            StudyScale::Small => 300,
            StudyScale::Paper => 12 * 3600,
        })
    }
}

fn sum(a: &DeviceUse, b: &DeviceUse) -> DeviceUse {
    DeviceUse {
        read_requests: a.read_requests + b.read_requests,
        read_bytes: a.read_bytes + b.read_bytes,
        write_requests: a.write_requests + b.write_requests,
        write_bytes: a.write_bytes + b.write_bytes,
    }
}

/// Drops pages, dentries and inodes of the whole machine, since the kernel offers no narrower way.
fn drop_caches() -> Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "3")
        .context("caches could not be dropped: root is needed")
}

/// True if a path can be opened, to report errors before the start.
pub fn can_open(path: &Path) -> bool {
    File::open(path).is_ok()
}
