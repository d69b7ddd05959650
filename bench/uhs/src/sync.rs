//! Files of 1 KiB that are written and synced one by one.

use std::thread;

use anyhow::Result;

use crate::files::TimedFiles;
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::{TargetStage, UhsBenchTarget};
use crate::{UhsBenchScale, time_work};

/// One round of all targets.
pub(crate) fn measure(
    stage: &mut TargetStage,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    for target in UhsBenchTarget::ALL {
        for threads in [1, 16] {
            stage.with(target, |stage, files| {
                let before = stage.bytes_written()?;
                let took = time_work(|| write_and_sync(files, threads, scale.synced))?;
                let written = (stage.bytes_written()? - before) as f64 / scale.synced as f64;
                let name = format!("create, write 1 KiB, fsync; {threads} threads");
                let (count, target) = (scale.synced as f64, target.name());
                results.add(
                    (&name, "1/s", FigureDirection::More, 2.0),
                    target,
                    count / took.seconds,
                );
                results.add(
                    (&name, "us of CPU", FigureDirection::Less, 0.0),
                    target,
                    took.cpu * 1e6 / count,
                );
                results.add((&name, "bytes", FigureDirection::Less, 1.0), target, written);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Makes, writes and syncs files, each by one of the threads.
pub(crate) fn write_and_sync(files: &dyn TimedFiles, threads: usize, count: usize) -> Result<()> {
    thread::scope(|scope| {
        let work = |thread: usize| {
            move || {
                for file in (thread..count).step_by(threads) {
                    let mut open = files.open(&format!("/file{file:06}"))?;
                    open.write(0, &[file as u8; 1024])?;
                    open.sync()?;
                }
                Ok(())
            }
        };
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(work(thread))).collect();
        running.into_iter().try_for_each(|one| one.join().expect("a worker does not panic"))
    })
}
