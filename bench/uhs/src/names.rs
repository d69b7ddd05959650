//! Operations on names: a million files in a thousand directories and in one.

use std::thread;

use anyhow::Result;

use crate::files::{PreparedPath, TimedFiles};
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::{TargetStage, UhsBenchTarget};
use crate::{UhsBenchScale, WorkTime, time_work};

/// How often two threads look at their files, so that the start of threads does not count.
const STAT_PASSES: usize = 8;

/// The files of a phase.
struct PhaseFiles {
    files: usize,
    directories: usize,
}

impl PhaseFiles {
    /// The names of files in this order, each with `end`.
    fn names(
        &self,
        files: &dyn TimedFiles,
        order: impl Iterator<Item = usize>,
        end: &str,
    ) -> Result<Vec<PreparedPath>> {
        let path = |file: usize| {
            let (dir, number) = (file % self.directories, file / self.directories);
            format!("/d{dir:04}/file{number:07}{end}")
        };
        order.map(|file| files.name(&path(file))).collect()
    }

    /// All files in their order.
    fn prepare_all(&self, files: &dyn TimedFiles, end: &str) -> Result<Vec<PreparedPath>> {
        self.names(files, 0..self.files, end)
    }

    /// All files in an order by chance.
    fn shuffle_files(&self, files: &dyn TimedFiles) -> Result<Vec<PreparedPath>> {
        let mut order: Vec<usize> = (0..self.files).collect();
        fastrand::Rng::with_seed(7).shuffle(&mut order);
        self.names(files, order.into_iter(), "")
    }
}

/// One round of all targets.
pub(crate) fn measure(
    stage: &mut TargetStage,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    for directories in [scale.directories, 1] {
        let set = PhaseFiles { files: scale.files, directories };
        for target in UhsBenchTarget::ALL {
            stage.with(target, |_, files| phases(files, target, &set, results))?;
        }
    }
    for target in UhsBenchTarget::ALL {
        stage.with(target, |_, files| measure_two_threads(files, target, scale, results))?;
        stage.with(target, |stage, files| directory(stage, files, target, scale, results))?;
    }
    Ok(())
}

fn phases(
    files: &dyn TimedFiles,
    target: UhsBenchTarget,
    set: &PhaseFiles,
    results: &mut UhsBenchResults,
) -> Result<()> {
    for dir in 0..set.directories {
        files.mkdir(&files.name(&format!("/d{dir:04}"))?)?;
    }
    files.sync()?;
    let mut phase = |what: &str, goal: f64, work: &dyn Fn() -> Result<()>| -> Result<()> {
        let WorkTime { seconds, cpu } = time_work(|| {
            work()?;
            files.sync()
        })?;
        let place = if set.directories == 1 { "one directory" } else { "many directories" };
        let (name, count) = (format!("{what}, {place}"), set.files as f64);
        results.add(
            (&name, "us of CPU", FigureDirection::Less, goal),
            target.name(),
            cpu * 1e6 / count,
        );
        results.add((&name, "1/s", FigureDirection::More, goal), target.name(), count / seconds);
        Ok(())
    };
    let names = set.prepare_all(files, "")?;
    phase("create", 4.0, &|| names.iter().try_for_each(|name| files.create(name)))?;
    phase("stat in order", 3.0, &|| names.iter().try_for_each(|name| files.stat(name)))?;
    let shuffled = set.shuffle_files(files)?;
    phase("stat at random", 3.0, &|| shuffled.iter().try_for_each(|name| files.stat(name)))?;
    phase("chmod at random", 1.0, &|| {
        shuffled.iter().try_for_each(|name| files.chmod(name, 0o600))
    })?;
    drop(shuffled);
    let renamed = set.prepare_all(files, ".new")?;
    phase("rename", 3.0, &|| {
        names.iter().zip(&renamed).try_for_each(|(from, to)| files.rename(from, to))
    })?;
    phase("unlink", 4.0, &|| renamed.iter().try_for_each(|name| files.unlink(name)))
}

/// Two threads, each in directories of its own, against one thread.
fn measure_two_threads(
    files: &dyn TimedFiles,
    target: UhsBenchTarget,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let of_thread = scale.files / 4;
    let run = |names: &[Vec<PreparedPath>],
               passes: usize,
               act: &(dyn Fn(&PreparedPath) -> Result<()> + Sync)| {
        time_work(|| {
            thread::scope(|scope| {
                let work = |names: &'_ [PreparedPath]| {
                    (0..passes).try_for_each(|_| names.iter().try_for_each(act))
                };
                let running: Vec<_> =
                    names.iter().map(|names| scope.spawn(move || work(names))).collect();
                running.into_iter().try_for_each(|one| one.join().expect("a worker does not panic"))
            })?;
            files.sync()
        })
    };
    let mut one_and_two = Vec::new();
    for threads in [1, 2] {
        let directory = |thread| format!("/t{threads}{thread}");
        (0..threads).try_for_each(|thread| files.mkdir(&files.name(&directory(thread))?))?;
        files.sync()?;
        let of_directory = |thread| {
            let path = |file| format!("{}/file{file:07}", directory(thread));
            (0..of_thread)
                .map(|file| files.name(&path(file)))
                .collect::<Result<Vec<PreparedPath>>>()
        };
        let names = (0..threads).map(of_directory).collect::<Result<Vec<_>>>()?;
        let created = run(&names, 1, &|name| files.create(name))?;
        let stated = run(&names, STAT_PASSES, &|name| files.stat(name))?;
        one_and_two.push((created.cpu / threads as f64, threads as f64 / stated.seconds));
    }
    let [(cpu_one, rate_one), (cpu_two, rate_two)] = one_and_two[..] else { return Ok(()) };
    let of_two = cpu_two / cpu_one.max(0.01);
    results.add(
        ("create, CPU of two threads", "to one", FigureDirection::Less, 0.0),
        target.name(),
        of_two,
    );
    let of_two = rate_two / rate_one;
    results.add(
        ("stat, rate of two threads", "to one", FigureDirection::More, 0.0),
        target.name(),
        of_two,
    );
    Ok(())
}

/// The rename of a directory with many files below it, against the rename of an empty one.
fn directory(
    stage: &TargetStage,
    files: &dyn TimedFiles,
    target: UhsBenchTarget,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let set = PhaseFiles { files: scale.files, directories: 1 };
    files.mkdir(&files.name("/d0000")?)?;
    set.prepare_all(files, "")?.iter().try_for_each(|name| files.create(name))?;
    files.mkdir(&files.name("/empty")?)?;
    files.sync()?;
    let mut rename = |from: &str, to: &str, name: &str| -> Result<()> {
        let (from, to) = (files.name(from)?, files.name(to)?);
        let before = stage.bytes_written()?;
        let took = time_work(|| {
            files.rename(&from, &to)?;
            files.sync()
        })?;
        let blocks = (stage.bytes_written()? - before) as f64 / 4096.0;
        results.add((name, "us", FigureDirection::Less, 0.0), target.name(), took.seconds * 1e6);
        results.add((name, "blocks", FigureDirection::Less, 0.0), target.name(), blocks);
        Ok(())
    };
    rename("/empty", "/empty.new", "rename of an empty directory, synced")?;
    rename("/d0000", "/full.new", "rename of a full directory, synced")
}
