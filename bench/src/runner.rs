//! The run: mounts all targets at once, and measures every cell on each of them in turn, round
//! after round.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};

use crate::args::BenchmarkArgs;
use crate::backing::BackingFileSystem;
use crate::caches;
use crate::measure::{RoundMeasurement, measure};
use crate::peers;
use crate::report::{BenchmarkCell, BenchmarkResults, TargetSeries};
use crate::target::{self, BenchmarkTarget};
use crate::workloads::{BatchDirs, BenchmarkCase, FilesetSizes};

/// The mounts of the run. Fields are dropped in this order: targets before the file system that
/// they serve.
struct BenchmarkStage {
    targets: Vec<BenchmarkTarget>,
    data: PathBuf,
    _backing: BackingFileSystem,
    _work: tempfile::TempDir,
}

/// Runs the benchmark. After an interrupt, the completed rounds are the result.
pub fn run(args: &BenchmarkArgs) -> Result<BenchmarkResults> {
    ensure!(rustix::process::geteuid().is_root(), "root is needed: to mount and to drop caches");
    if cfg!(debug_assertions) {
        eprintln!("this build is not optimised, nor is its fuser peer: run it with --release");
    }
    let cells = select_cells(args)?;
    let specs = peers::specs(args)?;
    let interrupted = catch_interrupt()?;
    defuse_measure::limits::raise_file_limit();
    let most_threads = args.threads.iter().copied().max().unwrap_or(1);
    let stage = BenchmarkStage::set(args, specs, FilesetSizes::full(most_threads))?;
    let mut results = BenchmarkResults::new(args, stage.targets.iter().map(|target| &target.spec));
    results.cells = cells.iter().map(|cell| empty_cell(cell, &stage, args)).collect();
    let mut batches = 0;
    for round in 0..args.rounds() {
        for cell in &mut results.cells {
            for turn in 0..stage.targets.len() {
                if interrupted.load(Ordering::Relaxed) {
                    eprintln!("interrupted in round {}", round + 1);
                    return Ok(results);
                }
                // Over the rounds, every target has every place in the order, so that none profits
                // from its predecessor.
                let index = (turn + round) % stage.targets.len();
                let measured = stage.measure(cell, index, args, &mut batches);
                cell.series[index].push(measured);
            }
            eprintln!(
                "round {} {:24} x{} {}",
                round + 1,
                cell.workload,
                cell.threads,
                cell.describe_latest()
            );
        }
        results.rounds = round + 1;
    }
    Ok(results)
}

fn select_cells(args: &BenchmarkArgs) -> Result<Vec<(&'static BenchmarkCase, usize)>> {
    ensure!(args.threads.iter().all(|&threads| threads > 0), "--threads: 0 threads do nothing");
    let wanted = BenchmarkCase::ALL.iter().filter(|case| args.wants(case.name));
    let cells: Vec<_> = wanted
        .flat_map(|case| args.threads.iter().map(move |&threads| (case, threads)))
        .filter(|(case, threads)| case.applies(*threads))
        .collect();
    ensure!(!cells.is_empty(), "--only leaves no workload; --list shows them");
    Ok(cells)
}

fn empty_cell(
    (case, threads): &(&'static BenchmarkCase, usize),
    stage: &BenchmarkStage,
    args: &BenchmarkArgs,
) -> BenchmarkCell {
    let series = stage.targets.iter().map(|target| TargetSeries::new(&target.spec)).collect();
    let (workload, what) = (case.name.to_owned(), case.what.to_owned());
    BenchmarkCell { workload, what, threads: *threads, required: args.required_ratio(case), series }
}

impl BenchmarkStage {
    fn set(
        args: &BenchmarkArgs,
        specs: Vec<target::TargetSpec>,
        fileset: FilesetSizes,
    ) -> Result<Self> {
        let dir = args.work_dir();
        let work = tempfile::Builder::new()
            .prefix("defuse-bench-")
            .tempdir_in(&dir)
            .with_context(|| format!("no work directory in {}", dir.display()))?;
        eprintln!("working in {}", work.path().display());
        let backing = BackingFileSystem::create(args.backing, work.path())?;
        let data = backing.data();
        fileset.create(&data)?;
        let mut stage = Self { targets: Vec::new(), data, _backing: backing, _work: work };
        for spec in specs {
            fs::create_dir(stage.data.join(directory_name(&spec.name)))?;
            let target = BenchmarkTarget::start(spec, &stage.data, stage._work.path())?;
            eprintln!("{}: {}", target.spec.name, target.spec.version);
            stage.targets.push(target);
        }
        Ok(stage)
    }

    fn measure(
        &self,
        cell: &BenchmarkCell,
        index: usize,
        args: &BenchmarkArgs,
        batches: &mut u64,
    ) -> Result<RoundMeasurement> {
        let target = &self.targets[index];
        let case = BenchmarkCase::ALL.iter().find(|case| case.name == cell.workload);
        let case = case.context("the cell's workload is unknown")?;
        let most_threads = args.threads.iter().copied().max().unwrap_or(1);
        caches::sync(&self.data)?;
        caches::settle(&self.daemons());
        measure(case, target.pid(), args.min_time(), || {
            *batches += 1;
            self.prepare_directories(
                target,
                &format!("batch-{batches}"),
                cell.threads,
                most_threads,
            )
        })
    }

    fn prepare_directories(
        &self,
        target: &BenchmarkTarget,
        batch: &str,
        threads: usize,
        most_threads: usize,
    ) -> BatchDirs {
        BatchDirs {
            root: target.root.clone(),
            below: self.data.clone(),
            own: Path::new(&directory_name(&target.spec.name)).join(batch).display().to_string(),
            threads,
            fileset: FilesetSizes::full(most_threads),
            daemons: self.daemons(),
        }
    }

    fn daemons(&self) -> Vec<u32> {
        self.targets.iter().filter_map(BenchmarkTarget::pid).collect()
    }
}

/// Targets cache entries for a long time, so each uses its own directory and does not see changes
/// by another.
fn directory_name(target: &str) -> String {
    format!("for-{target}")
}

/// The first Ctrl-C ends the run in order; a second one ends it at once.
fn catch_interrupt() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, flag.clone())?;
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(flag)
}
