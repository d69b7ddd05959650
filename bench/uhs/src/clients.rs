//! uhs for several processes: by shared memory, by a socket, by a mount of the kernel and in the
//! process itself, beside ext4 and xfs. Each process is `defuse workload`, so that all of them make
//! the same calls. They have files of their own unless noted otherwise.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use defuse_measure::command::find_own_program;
use defuse_measure::server::ServerProcess;
use defuse_measure::{caches, command, cpu};
use serde_json::Value;

use crate::mounted::with_mount;
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::{TargetStage, UhsBenchTarget, sectors};
use crate::{UhsBenchOptions, UhsBenchScale, calls};

/// Processes that share the work, in turns.
const READERS: [usize; 4] = [1, 2, 4, 8];

/// Bytes of the files that they read.
const OWN_FILES: u64 = 8 << 20;

/// Processes that read the same file.
const TOGETHER: usize = 4;

/// A way for several processes to one file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientAccess {
    Shared,
    Socket,
    KernelMount,
    /// In the process itself, which must be the only one.
    Inside,
    Kernel(UhsBenchTarget),
}

impl ClientAccess {
    const ALL: [ClientAccess; 6] = [
        ClientAccess::Shared,
        ClientAccess::Socket,
        ClientAccess::KernelMount,
        ClientAccess::Inside,
        ClientAccess::Kernel(UhsBenchTarget::Ext4),
        ClientAccess::Kernel(UhsBenchTarget::Xfs),
    ];

    fn name(self) -> &'static str {
        match self {
            ClientAccess::Shared => "shared",
            ClientAccess::Socket => "socket",
            ClientAccess::KernelMount => "kernel mount",
            ClientAccess::Inside => "in the process",
            ClientAccess::Kernel(target) => target.name(),
        }
    }
}

/// The arguments by which a workload finds its files.
#[derive(Clone, Debug)]
enum WorkloadFiles {
    /// The source, in the process of the workload.
    Source(String),
    Directory(PathBuf),
}

/// Texts of workloads, and what runs them.
struct WorkloadRunner<'a> {
    program: &'a Path,
    dir: &'a Path,
}

/// The work of several processes in all.
#[derive(Default)]
struct TotalRate {
    operations_per_second: f64,
    cpu_us: f64,
}

impl WorkloadRunner<'_> {
    /// Runs a process for each text at the same time.
    fn run(&self, place: &WorkloadFiles, texts: &[String]) -> Result<TotalRate> {
        let before = cpu::CpuSample::take(None);
        let mut running = Vec::new();
        for (number, text) in texts.iter().enumerate() {
            let file = self.dir.join(format!("{number}.f"));
            fs::write(&file, text)?;
            let mut command = Command::new(find_own_program()?);
            command.args(["workload", "--json", "--quiet"]).arg(&file);
            match place {
                WorkloadFiles::Source(source) => {
                    command.args(["--dir", "/work", "--direct", source])
                }
                WorkloadFiles::Directory(dir) => command.arg("--dir").arg(dir),
            };
            let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            running.push(child.spawn().context("cannot start defuse workload")?);
        }
        let (mut done, mut operations) = (TotalRate::default(), 0.0);
        for child in running {
            let output = child.wait_with_output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "defuse workload: {said}");
            let value: Value = serde_json::from_slice(&output.stdout)?;
            let total = value.as_array().and_then(|all| Some(all.last()?["total"].clone()));
            let total = total.context("a workload has a run")?;
            let figure = |name: &str| total[name].as_f64().context("a report has a total");
            done.operations_per_second += figure("operations_per_second")?;
            operations += figure("operations")?;
        }
        let used = before.usage_until(&cpu::CpuSample::take(None));
        done.cpu_us = used.system_ns as f64 / 1e3 / operations.max(1.0);
        Ok(done)
    }
}

/// One round.
pub(crate) fn measure(
    stage: &mut TargetStage,
    options: &UhsBenchOptions,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let Some(program) = options.program.clone() else { return Ok(()) };
    let dir = stage.scratch()?;
    let runner = WorkloadRunner { program: &program, dir: &dir };
    calls::measure(stage, &program, &dir, results)?;
    for way in ClientAccess::ALL {
        with(stage, way, &runner, &mut |place| {
            measure_many_readers(&runner, place, way, options, results)
        })?;
    }
    measure_first_reads(stage, &runner, options, results)?;
    for &name in options.scale.personalities {
        for way in ClientAccess::ALL {
            for processes in [1, 4] {
                if way == ClientAccess::Inside && processes > 1 {
                    continue;
                }
                with(stage, way, &runner, &mut |place| {
                    let texts =
                        (0..processes).map(|at| personality(name, at, processes, &options.scale));
                    let done = runner.run(place, &texts.collect::<Result<Vec<_>>>()?)?;
                    let row = format!("{name}, processes: {processes}");
                    results.add(
                        (&row, "1/s", FigureDirection::More, 0.0),
                        way.name(),
                        done.operations_per_second,
                    );
                    results.add(
                        (&row, "us of CPU", FigureDirection::Less, 0.0),
                        way.name(),
                        done.cpu_us,
                    );
                    Ok(())
                })?;
            }
        }
    }
    Ok(())
}

/// Calls `work` with the place of a new file system.
fn with(
    stage: &mut TargetStage,
    way: ClientAccess,
    runner: &WorkloadRunner<'_>,
    work: &mut dyn FnMut(&WorkloadFiles) -> Result<()>,
) -> Result<()> {
    match way {
        ClientAccess::Kernel(target) => stage.with(target, |stage, _| {
            work(&WorkloadFiles::Directory(stage.mountpoint().to_owned()))
        }),
        ClientAccess::KernelMount => with_mount(stage, runner.program, "uhs", |at| {
            work(&WorkloadFiles::Directory(at.to_owned()))
        }),
        ClientAccess::Inside => {
            make(stage, runner.program)?;
            work(&WorkloadFiles::Source(format!("uhs:{}", stage.node()?.display())))
        }
        ClientAccess::Shared | ClientAccess::Socket => {
            make(stage, runner.program)?;
            serve(stage, way, runner, work)
        }
    }
}

/// An empty uhs on the device.
fn make(stage: &TargetStage, program: &Path) -> Result<()> {
    stage.device()?.wait_until_free()?;
    let node = stage.node()?.as_os_str();
    let mkfs = ["mkfs".as_ref(), "uhs".as_ref(), node, "--force".as_ref()];
    command::output(&program.to_string_lossy(), &mkfs).map(drop)
}

/// Serves the uhs that is on the device.
fn serve(
    stage: &TargetStage,
    way: ClientAccess,
    runner: &WorkloadRunner<'_>,
    work: &mut dyn FnMut(&WorkloadFiles) -> Result<()>,
) -> Result<()> {
    let socket = runner.dir.join("socket");
    let source = format!("uhs:{}", stage.node()?.display());
    let _server = ServerProcess::start(runner.program, source.as_ref(), &socket)?;
    let kind = if way == ClientAccess::Shared { "shared" } else { "socket" };
    work(&WorkloadFiles::Source(format!("{kind}:{}", socket.display())))
}

/// Reads of 4 KiB of cached pages by more and more processes, each of a file of its own. All files
/// together have the same size, so that the caches of the processors hold as much of them; then
/// each has the same size, so that they hold less.
fn measure_many_readers(
    runner: &WorkloadRunner<'_>,
    place: &WorkloadFiles,
    way: ClientAccess,
    options: &UhsBenchOptions,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let seconds = options.scale.seconds.min(3);
    // A short test takes the smallest and the largest number.
    let some = READERS.iter().filter(|processes| seconds > 1 || [1, 8].contains(*processes));
    let some: Vec<usize> =
        some.copied().filter(|&it| way != ClientAccess::Inside || it == 1).collect();
    for (kind, share) in [("", true), (" of 8 MiB each", false)] {
        let mut alone = None;
        for &processes in &some {
            let own = if share { OWN_FILES / processes as u64 } else { OWN_FILES };
            let texts = (0..processes).map(|at| {
                let file = format!("own{at}-{own}");
                let flow = format!("flowop read name=read,filename={file},random,iosize=4k");
                workload(&file, (own, "prealloc"), &flow, &format!("run {seconds}\n"))
            });
            let done = runner.run(place, &texts.collect::<Vec<_>>())?;
            let rate = done.operations_per_second;
            let row = format!("4K reads of own cached files{kind}, processes: {processes}");
            results.add((&row, "1/s", FigureDirection::More, 0.0), way.name(), rate);
            results.add((&row, "us of CPU", FigureDirection::Less, 0.0), way.name(), done.cpu_us);
            let alone = *alone.get_or_insert(rate);
            let row = format!("the same{kind} against one process, processes: {processes}");
            results.add((&row, "times", FigureDirection::More, 0.0), way.name(), rate / alone);
        }
    }
    Ok(())
}

/// Several processes read one file that no process has in memory. Adds the ratio of bytes that the
/// device has read to bytes of the file.
fn measure_first_reads(
    stage: &mut TargetStage,
    runner: &WorkloadRunner<'_>,
    options: &UhsBenchOptions,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let bytes = options.scale.data_bytes.clamp(1 << 20, 64 << 20);
    let make_it = workload("common", (bytes, "prealloc"), &read_whole(bytes, ""), "");
    let read_it = |direct: &str| {
        let text = workload("common", (bytes, "prealloc,reuse"), &read_whole(bytes, direct), "");
        vec![text; TOGETHER]
    };
    let mut add = |target: &str, (read, took, cpu): (u64, f64, f64)| {
        let row = format!("one file read by {TOGETHER} processes");
        let times = read as f64 / bytes as f64;
        results.add((&row, "times read", FigureDirection::Less, 0.0), target, times);
        let rate = (bytes * TOGETHER as u64) as f64 / took / 1e6;
        results.add((&row, "MB/s", FigureDirection::More, 0.0), target, rate);
        results.add((&row, "us of CPU for 64 KiB", FigureDirection::Less, 0.0), target, cpu);
    };
    let timed =
        |stage: &TargetStage, place: &WorkloadFiles, direct: &str| -> Result<(u64, f64, f64)> {
            let (before, begun) = (sectors(stage.device()?, 2)?, Instant::now());
            let done = runner.run(place, &read_it(direct))?;
            let took = begun.elapsed().as_secs_f64();
            Ok((sectors(stage.device()?, 2)? - before, took, done.cpu_us))
        };
    make(stage, runner.program)?;
    let written = std::slice::from_ref(&make_it);
    serve(stage, ClientAccess::Shared, runner, &mut |place| runner.run(place, written).map(drop))?;
    serve(stage, ClientAccess::Shared, runner, &mut |place| {
        add("shared", timed(stage, place, "")?);
        Ok(())
    })?;
    stage.with(UhsBenchTarget::Ext4, |stage, _| {
        let place = WorkloadFiles::Directory(stage.mountpoint().to_owned());
        runner.run(&place, written)?;
        for (name, direct) in [("ext4, page cache", ""), ("ext4, O_DIRECT", ",directio")] {
            drop_pages(stage.mountpoint())?;
            add(name, timed(stage, &place, direct)?);
        }
        Ok(())
    })
}

/// Drops the cached pages of all files below `dir`.
fn drop_pages(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        match entry.file_type()? {
            kind if kind.is_dir() => drop_pages(&entry.path())?,
            kind if kind.is_file() => caches::drop_pages(&entry.path())?,
            _ => {}
        }
    }
    Ok(())
}

/// Reads a file once from its begin to its end.
fn read_whole(bytes: u64, direct: &str) -> String {
    // The opening of a file counts as an operation, so that the bytes decide about the end.
    let all_but_one = bytes - 1;
    format!(
        "flowop read name=read,filename=common,iosize=64k{direct}\n    \
         flowop finishonbytes name=end,value={all_but_one},target=read"
    )
}

/// A workload of one thread with a file.
fn workload(file: &str, (bytes, attributes): (u64, &str), flow: &str, run: &str) -> String {
    format!(
        "set $dir=/tmp\ndefine file name={file},path=$dir,size={bytes},{attributes}\n\
         define process name=p,instances=1 {{\n  thread name=t,memsize=1m,instances=1 {{\n    {flow}\n  }}\n}}\n\
         {}",
        if run.is_empty() { "run 60\n" } else { run }
    )
}

/// A personality as process `at` of several: its threads and files are a part of the threads and
/// files of one.
fn personality(name: &str, at: usize, processes: usize, scale: &UhsBenchScale) -> Result<String> {
    let builtin = defuse_wml::builtin(name).with_context(|| format!("no workload {name}"))?;
    let mut text = String::new();
    for line in builtin.text.lines() {
        let number = |line: &str| line.split_once('=').and_then(|(_, n)| n.parse::<usize>().ok());
        let part = |all: usize| all.div_ceil(processes).max(1);
        let line = match (line.split_once('='), number(line)) {
            (Some(("set $nthreads", _)), Some(all)) => {
                let all = scale.threads.map_or(all, |threads| threads as usize);
                format!("set $nthreads={}", part(all))
            }
            (Some(("set $nfiles", _)), Some(all)) => {
                let all = scale.threads.map_or(all, |threads| 100 * threads as usize);
                format!("set $nfiles={}", part(all))
            }
            (Some(("set $seconds", _)), _) => format!("set $seconds={}", scale.seconds),
            _ => line.to_owned(),
        };
        // The sets of each process have names of their own.
        let line = line.replace("filesetname=", &format!("filesetname=p{at}-"));
        let kinds = ["define fileset name=", "define file name="];
        let defined = kinds.iter().find_map(|kind| Some((kind, line.strip_prefix(kind)?)));
        let line = defined.map_or(line.clone(), |(kind, rest)| format!("{kind}p{at}-{rest}"));
        text += &line;
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_personality_is_a_workload_of_each_of_several_processes() {
        for name in crate::personalities::ALL {
            for (at, processes) in [(0, 1), (3, 4)] {
                let text = personality(name, at, processes, &UhsBenchScale::quick()).unwrap();
                let plan = defuse_wml::load(&text, "one.f", &defuse_wml::LoadOptions::default());
                let plan = plan.unwrap_or_else(|mistake| panic!("{name}: {mistake}"));
                let own = format!("p{at}-");
                assert!(plan.filesets.iter().all(|set| set.name.starts_with(&own)), "{name}");
            }
        }
    }
}
