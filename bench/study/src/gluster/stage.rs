//! The mounts and runs of one volume, and their measurement.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use defuse_measure::command::find_own_program;
use defuse_measure::threads::ThreadClocks;
use defuse_measure::{caches, cpu};
use rustix::mount::UnmountFlags;

use super::cases::{CaseWork, FioEngine, GlusterCase, SmallFileOp, VolumeKind};
use super::names::{SmallFileMeasurement, SmallFileOrder};
use super::results::{GlusterCell, RequestLatency};
use super::shell::TargetShell;
use super::targets::{GlusterTargetSpec, VolumePaths};
use super::{GlusterStudyOptions, fio, graph};
use crate::interrupt::InterruptFlag;
use crate::mount::connection;
use crate::process::{ChildProcess, ProcessStart};

/// Time limit for a target to start.
const START: Duration = Duration::from_secs(30);
/// Time limit for a program, in addition to the time that it is requested to run.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time after which a client that keeps attributes for a second requests them again.
const FORGOTTEN: Duration = Duration::from_millis(1100);

/// The names of the directories of fio, and of small files, in a volume.
const IO: &str = "io";
const SMALL: &str = "small";
const COLD: &str = "cold";

/// The targets on a volume.
#[derive(Debug)]
pub struct VolumeTargets<'a> {
    options: &'a GlusterStudyOptions,
    place: VolumeKind,
    work: &'a Path,
    /// The running targets, in the order of the request.
    pub targets: Vec<RunningTarget>,
}

/// A running target. Fields are dropped in this order: the users of a mount before its end.
#[derive(Debug)]
pub struct RunningTarget {
    /// Its name.
    pub name: String,
    root: PathBuf,
    shell: TargetShell,
    mount: Option<DaemonMount>,
    /// The round whose directory of small files was made.
    made: Option<u32>,
}

/// A mount, and the daemon that serves it.
#[derive(Debug)]
struct DaemonMount {
    mountpoint: PathBuf,
    daemon: ChildProcess,
}

impl DaemonMount {
    /// Waits until it is mounted.
    fn wait(&mut self) -> Result<()> {
        let end = Instant::now() + START;
        while connection(&self.mountpoint).is_none() {
            self.check_daemon()?;
            if Instant::now() > end {
                bail!("nothing was mounted within {START:?}; its output: {}", self.daemon_output());
            }
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Fails if it is no longer mounted.
    fn check(&mut self) -> Result<()> {
        self.check_daemon()?;
        ensure!(connection(&self.mountpoint).is_some(), "{}", self.daemon_output());
        Ok(())
    }

    fn check_daemon(&mut self) -> Result<()> {
        ensure!(self.daemon.exit_status().is_none(), "{}", self.daemon_output());
        Ok(())
    }

    /// The output of the daemon in one line.
    fn daemon_output(&self) -> String {
        let text = self.daemon.log_tail();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines.join("; ")
    }
}

impl Drop for DaemonMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.mountpoint, UnmountFlags::DETACH);
    }
}

/// The figures of a program.
#[derive(Debug, Default)]
struct ProgramFigures {
    operations: u64,
    bytes: u64,
    ns: u64,
    app_ns: u64,
    latency: Option<RequestLatency>,
}

impl From<SmallFileMeasurement> for ProgramFigures {
    fn from(outcome: SmallFileMeasurement) -> ProgramFigures {
        let SmallFileMeasurement { operations, ns, app_ns } = outcome;
        ProgramFigures { operations, ns, app_ns, ..ProgramFigures::default() }
    }
}

impl From<fio::FioMeasurement> for ProgramFigures {
    fn from(outcome: fio::FioMeasurement) -> ProgramFigures {
        let fio::FioMeasurement { operations, bytes, ns, app_ns, latency } = outcome;
        ProgramFigures { operations, bytes, ns, app_ns, latency: Some(latency) }
    }
}

impl<'a> VolumeTargets<'a> {
    /// Starts all targets that can be started, and makes their files. Returns the reasons of those
    /// that cannot.
    ///
    /// # Errors
    ///
    /// Fails if the files cannot be made.
    pub fn set(
        options: &'a GlusterStudyOptions,
        place: VolumeKind,
        work: &'a Path,
        cases: &[GlusterCase],
    ) -> Result<(VolumeTargets<'a>, Vec<String>)> {
        let mut stage = VolumeTargets { options, place, work, targets: Vec::new() };
        let mut left_out = Vec::new();
        for spec in &options.targets {
            match stage.start(spec) {
                Ok(target) => stage.targets.push(target),
                Err(error) => {
                    left_out.push(format!("{} on {}: {error:#}", spec.name, place.name()))
                }
            }
        }
        if !stage.targets.is_empty() {
            stage.make_files(cases).with_context(|| format!("the files of {}", place.name()))?;
        }
        Ok((stage, left_out))
    }

    fn start(&self, spec: &GlusterTargetSpec) -> Result<RunningTarget> {
        let file = match self.place {
            VolumeKind::Graph => graph::make(self.work, &spec.name)?,
            _ => PathBuf::new(),
        };
        let (program, work) = (self.options.program.as_path(), self.work);
        let paths = VolumePaths { place: self.place, graph: &file, program, work };
        let mut env = vec![("DEFUSE_RUNTIME_DIR", runtime(work)?)];
        if self.place == VolumeKind::Graph && spec.is_ours() {
            env.push(("LD_PRELOAD", graph::preload(work)?));
        }
        let mount = match paths.daemon(spec) {
            Some(words) => Some(mount(&spec.name, &words, &paths.mountpoint(spec), work, &env)?),
            None => None,
        };
        let shell = TargetShell::start(&spec.name, &paths.shell(spec), work, &env, START)?;
        let mut target = RunningTarget {
            name: spec.name.clone(),
            root: paths.root(spec),
            shell,
            mount,
            made: None,
        };
        // A volume that cannot be read is a reason, too.
        let list = ["ls".into(), target.root.clone().into_os_string()];
        target.shell.perform(&list, START, &InterruptFlag::default())?;
        // The end of a daemon uncovers the mount point, which can be read, too.
        target.mount.iter_mut().try_for_each(DaemonMount::check)?;
        Ok(target)
    }

    /// Makes the files: once for all targets on servers, and for each of those that have a volume
    /// of their own.
    fn make_files(&mut self, cases: &[GlusterCase]) -> Result<()> {
        let volumes = if self.place == VolumeKind::Graph { self.targets.len() } else { 1 };
        let options = self.options;
        self.targets.iter_mut().take(volumes).try_for_each(|target| target.fill(options, cases))
    }

    /// Measures a case on a target. An error is a result, too.
    pub fn measure(
        &mut self,
        case: GlusterCase,
        index: usize,
        round: u32,
        interrupt: &InterruptFlag,
    ) -> GlusterCell {
        let name = self.targets[index].name.clone();
        match self.try_measure(case, index, round, interrupt) {
            Ok(cell) => cell,
            Err(error) => GlusterCell {
                case,
                target: name,
                round,
                error: Some(format!("{error:#}")),
                operations: 0,
                bytes: 0,
                ns: 0,
                app_ns: 0,
                client_ns: 0,
                threads: Vec::new(),
                servers_ns: 0,
                latency: None,
            },
        }
    }

    fn try_measure(
        &mut self,
        case: GlusterCase,
        index: usize,
        round: u32,
        interrupt: &InterruptFlag,
    ) -> Result<GlusterCell> {
        self.prepare(case, index, round)?;
        let servers = servers();
        let target = &mut self.targets[index];
        let client = target.client();
        let before =
            (ThreadClocks::read(client), cpu::ProcessCpuTime::read(client), clocks(&servers));
        let figures = perform(self.options, target, case, round, interrupt)?;
        let after =
            (ThreadClocks::read(client), cpu::ProcessCpuTime::read(client), clocks(&servers));
        let servers_ns =
            before.2.iter().zip(&after.2).map(|(before, after)| after.usage_since(before));
        Ok(GlusterCell {
            case,
            target: target.name.clone(),
            round,
            error: None,
            operations: figures.operations,
            bytes: figures.bytes,
            ns: figures.ns,
            app_ns: figures.app_ns,
            client_ns: after.1.usage_since(&before.1),
            threads: after.0.usage_since(&before.0),
            servers_ns: servers_ns.sum(),
            latency: figures.latency,
        })
    }

    /// Makes the same state for each target before a case.
    fn prepare(&mut self, case: GlusterCase, index: usize, round: u32) -> Result<()> {
        let daemons: Vec<u32> = self.targets.iter().map(RunningTarget::client).collect();
        let target = &mut self.targets[index];
        if let CaseWork::Names(op) = case.work
            && op != SmallFileOp::Lookup
            && target.made != Some(round)
        {
            let words = ["mkdir".into(), small(target, round).into()];
            target.shell.perform(&words, PATIENCE, &InterruptFlag::default())?;
            target.made = Some(round);
            // The case that creates the files may not be among those to measure.
            if op != SmallFileOp::Create {
                let jobs = SmallFileOp::Create.jobs();
                let create =
                    GlusterCase { work: CaseWork::Names(SmallFileOp::Create), jobs, ..case };
                perform(self.options, target, create, round, &InterruptFlag::default())?;
            }
        }
        match case.work {
            CaseWork::Io { .. } => caches::settle(&[target.client()]),
            CaseWork::Names(SmallFileOp::Create) => {}
            CaseWork::Names(SmallFileOp::List | SmallFileOp::Lookup) => {
                caches::drop_dentries(&daemons)?
            }
            // Other targets have listed their files since, and the caches of all were dropped for
            // each.
            CaseWork::Names(SmallFileOp::Stat) => {
                let listing = GlusterCase { work: CaseWork::Names(SmallFileOp::List), ..case };
                perform(self.options, target, listing, round, &InterruptFlag::default())?;
                sleep(FORGOTTEN);
            }
            CaseWork::Names(SmallFileOp::Delete) => caches::settle(&[target.client()]),
        }
        Ok(())
    }
}

impl RunningTarget {
    /// Makes the files of all cases.
    fn fill(&mut self, options: &GlusterStudyOptions, cases: &[GlusterCase]) -> Result<()> {
        let quiet = InterruptFlag::default();
        let [io, small, cold] = [IO, SMALL, COLD].map(|name| self.root.join(name));
        let mut perform = |words: &[OsString]| self.shell.perform(words, PATIENCE, &quiet);
        perform(&["mkdir".into(), io.clone().into(), small.into(), cold.clone().into()])?;
        let jobs = cases.iter().filter(|case| matches!(case.work, CaseWork::Io { .. }));
        if let Some(jobs) = jobs.map(|case| case.jobs).max() {
            perform(&fio::layout(&io, jobs, options.file_bytes))?;
            // GlusterFS's own client may answer with a former size for a second, and fio then wants
            // to write the file anew.
            sleep(FORGOTTEN);
        }
        if cases.iter().any(|case| case.work == CaseWork::Names(SmallFileOp::Lookup)) {
            let order = SmallFileOrder {
                dir: cold,
                op: SmallFileOp::Create,
                threads: 16,
                files: options.files,
            };
            perform(&worker(&order)?)?;
        }
        Ok(())
    }

    /// False for work that the target cannot do: a run refuses io_setup(2).
    pub fn can(&self, case: GlusterCase) -> bool {
        let is_libaio = matches!(case.work, CaseWork::Io { engine: FioEngine::Libaio, .. });
        self.mount.is_some() || !is_libaio
    }

    /// The process that serves the volume: the daemon, or the process of a run.
    fn client(&self) -> u32 {
        self.mount.as_ref().map_or(self.shell.pid(), |mount| mount.daemon.pid())
    }
}

fn small(target: &RunningTarget, round: u32) -> PathBuf {
    target.root.join(SMALL).join(format!("{}-{round}", target.name))
}

/// Runs the program of a case.
fn perform(
    options: &GlusterStudyOptions,
    target: &mut RunningTarget,
    case: GlusterCase,
    round: u32,
    interrupt: &InterruptFlag,
) -> Result<ProgramFigures> {
    let time = Duration::from_millis(options.time_ms);
    match case.work {
        CaseWork::Io { .. } => {
            let words = fio::command(&case, &target.root.join(IO), options.file_bytes, time);
            let text = target.shell.perform(&words, PATIENCE + time, interrupt)?;
            Ok(fio::parse(&text, &case)?.into())
        }
        CaseWork::Names(op) => {
            let dir = match op {
                SmallFileOp::Lookup => target.root.join(COLD),
                _ => small(target, round),
            };
            let order = SmallFileOrder { dir, op, threads: case.jobs, files: options.files };
            let words = worker(&order)?;
            let text = target.shell.perform(&words, PATIENCE, interrupt)?;
            let outcome: SmallFileMeasurement =
                serde_json::from_str(&text).with_context(|| format!("the worker said {text:?}"))?;
            Ok(outcome.into())
        }
    }
}

/// The command of a program that works on small files.
fn worker(order: &SmallFileOrder) -> Result<Vec<OsString>> {
    let order = serde_json::to_string(order)?;
    Ok(vec![find_own_program()?.into(), "bench-names".into(), order.into()])
}

/// A directory that only root can use, as daemons demand.
fn runtime(work: &Path) -> Result<OsString> {
    let dir = work.join("run");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    Ok(dir.into_os_string())
}

fn mount(
    name: &str,
    words: &[OsString],
    mountpoint: &Path,
    work: &Path,
    env: &[(&str, OsString)],
) -> Result<DaemonMount> {
    fs::create_dir_all(mountpoint)?;
    let log = work.join(format!("{name}.daemon.log"));
    let start = ProcessStart { name, words, groups: &[], log: &log, output: None, env, dir: None };
    let daemon = ChildProcess::start(&start)?;
    let mut mount = DaemonMount { mountpoint: mountpoint.to_owned(), daemon };
    mount.wait()?;
    Ok(mount)
}

/// The processes of the bricks.
fn servers() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_brick = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.starts_with("glusterfsd"))
    };
    pids.filter(is_brick).collect()
}

fn clocks(pids: &[u32]) -> Vec<cpu::ProcessCpuTime> {
    pids.iter().map(|&pid| cpu::ProcessCpuTime::read(pid)).collect()
}
