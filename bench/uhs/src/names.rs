//! Operations on names: a million files in a thousand directories and in one.

use std::thread;

use anyhow::Result;

use crate::files::Files;
use crate::results::{Better, Results};
use crate::targets::{Stage, Target};
use crate::{Scale, Timed, timed};

/// The files of a phase.
struct Set {
    files: usize,
    directories: usize,
}

impl Set {
    fn path(&self, file: usize) -> String {
        format!("/d{:04}/file{:07}", file % self.directories, file / self.directories)
    }

    fn all(&self, act: impl Fn(&str) -> Result<()>) -> Result<()> {
        (0..self.files).try_for_each(|file| act(&self.path(file)))
    }

    /// All files in an order by chance.
    fn shuffled(&self, act: impl Fn(&str) -> Result<()>) -> Result<()> {
        let mut order: Vec<u32> = (0..self.files as u32).collect();
        fastrand::Rng::with_seed(7).shuffle(&mut order);
        order.into_iter().try_for_each(|file| act(&self.path(file as usize)))
    }
}

/// One round of all targets.
pub(crate) fn measure(stage: &mut Stage, scale: &Scale, results: &mut Results) -> Result<()> {
    for directories in [scale.directories, 1] {
        let set = Set { files: scale.files, directories };
        for target in Target::ALL {
            stage.with(target, |_, files| phases(files, target, &set, results))?;
        }
    }
    for target in Target::ALL {
        stage.with(target, |_, files| two_threads(files, target, scale, results))?;
        stage.with(target, |stage, files| directory(stage, files, target, scale, results))?;
    }
    Ok(())
}

fn phases(files: &dyn Files, target: Target, set: &Set, results: &mut Results) -> Result<()> {
    for dir in 0..set.directories {
        files.mkdir(&format!("/d{dir:04}"))?;
    }
    files.sync()?;
    let mut phase = |what: &str, goal: f64, work: &dyn Fn() -> Result<()>| -> Result<()> {
        let Timed { seconds, cpu } = timed(|| {
            work()?;
            files.sync()
        })?;
        let place = if set.directories == 1 { "one directory" } else { "many directories" };
        let (name, count) = (format!("{what}, {place}"), set.files as f64);
        results.add((&name, "us of CPU", Better::Less, goal), target.name(), cpu * 1e6 / count);
        results.add((&name, "1/s", Better::More, goal), target.name(), count / seconds);
        Ok(())
    };
    phase("create", 4.0, &|| set.all(|path| files.create(path)))?;
    phase("stat in order", 3.0, &|| set.all(|path| files.stat(path)))?;
    phase("stat at random", 3.0, &|| set.shuffled(|path| files.stat(path)))?;
    phase("chmod at random", 1.0, &|| set.shuffled(|path| files.chmod(path, 0o600)))?;
    phase("rename", 3.0, &|| set.all(|path| files.rename(path, &format!("{path}.new"))))?;
    phase("unlink", 4.0, &|| set.all(|path| files.unlink(&format!("{path}.new"))))
}

/// Two threads, each in directories of its own, against one thread.
fn two_threads(
    files: &dyn Files,
    target: Target,
    scale: &Scale,
    results: &mut Results,
) -> Result<()> {
    let of_thread = scale.files / 4;
    let run = |threads: usize, what: &str, act: &(dyn Fn(&str) -> Result<()> + Sync)| {
        timed(|| {
            thread::scope(|scope| {
                let work = |thread: usize| {
                    move || {
                        let path = |file| format!("/{what}{threads}{thread}/file{file:07}");
                        (0..of_thread).try_for_each(|file| act(&path(file)))
                    }
                };
                let running: Vec<_> =
                    (0..threads).map(|thread| scope.spawn(work(thread))).collect();
                running.into_iter().try_for_each(|one| one.join().expect("a worker does not panic"))
            })?;
            files.sync()
        })
    };
    let mut one_and_two = Vec::new();
    for threads in [1, 2] {
        (0..threads).try_for_each(|thread| files.mkdir(&format!("/t{threads}{thread}")))?;
        files.sync()?;
        let created = run(threads, "t", &|path| files.create(path))?;
        let stated = run(threads, "t", &|path| files.stat(path))?;
        one_and_two.push((created.cpu / threads as f64, threads as f64 / stated.seconds));
    }
    let [(cpu_one, rate_one), (cpu_two, rate_two)] = one_and_two[..] else { return Ok(()) };
    let of_two = cpu_two / cpu_one.max(0.01);
    results.add(("create, CPU of two threads", "to one", Better::Less, 0.0), target.name(), of_two);
    let of_two = rate_two / rate_one;
    results.add(("stat, rate of two threads", "to one", Better::More, 0.0), target.name(), of_two);
    Ok(())
}

/// The rename of a directory with many files below it, against that of an empty one.
fn directory(
    stage: &Stage,
    files: &dyn Files,
    target: Target,
    scale: &Scale,
    results: &mut Results,
) -> Result<()> {
    let set = Set { files: scale.files, directories: 1 };
    files.mkdir("/d0000")?;
    set.all(|path| files.create(path))?;
    files.mkdir("/empty")?;
    files.sync()?;
    let mut rename = |from: &str, to: &str, name: &str| -> Result<()> {
        let before = stage.written()?;
        let took = timed(|| {
            files.rename(from, to)?;
            files.sync()
        })?;
        let blocks = (stage.written()? - before) as f64 / 4096.0;
        results.add((name, "us", Better::Less, 0.0), target.name(), took.seconds * 1e6);
        results.add((name, "blocks", Better::Less, 0.0), target.name(), blocks);
        Ok(())
    };
    rename("/empty", "/empty.new", "rename of an empty directory, synced")?;
    rename("/d0000", "/full.new", "rename of a full directory, synced")
}
