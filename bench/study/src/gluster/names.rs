//! Small files: a program whose threads create, list, look at, and remove files of one directory.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::cases::SmallFileOp;

/// Bytes in a file.
const FILE: usize = 4096;

/// The work of the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmallFileOrder {
    /// The directory.
    pub dir: PathBuf,
    /// The operation.
    pub op: SmallFileOp,
    /// Number of threads, each with its own files.
    pub threads: u32,
    /// Number of files.
    pub files: u32,
}

/// The measurement of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmallFileMeasurement {
    /// Number of operations.
    pub operations: u64,
    /// Their time in nanoseconds, from the start of the first thread to the end of the last.
    pub ns: u64,
    /// CPU time of this process meanwhile, in nanoseconds.
    pub app_ns: u64,
}

/// Does the work.
///
/// # Errors
///
/// The first error of an operation, with the name of the file; a listing that has not all files.
pub fn perform(order: &SmallFileOrder) -> Result<SmallFileMeasurement> {
    ensure!(order.threads > 0, "0 threads do nothing");
    let (ready, go) =
        (Barrier::new(order.threads as usize + 1), Barrier::new(order.threads as usize + 1));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..order.threads)
            .map(|thread| {
                let (ready, go) = (&ready, &go);
                scope.spawn(move || {
                    ready.wait();
                    go.wait();
                    work(order, thread)
                })
            })
            .collect();
        ready.wait();
        let (begun, cpu) = (Instant::now(), cpu_ns());
        go.wait();
        let done: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        let (ns, app_ns) = (begun.elapsed().as_nanos() as u64, cpu_ns() - cpu);
        let mut operations = 0;
        for result in done {
            operations += result.map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(SmallFileMeasurement { operations, ns, app_ns })
    })
}

/// The work of a thread. Returns the number of operations.
fn work(order: &SmallFileOrder, thread: u32) -> Result<u64> {
    let own = (thread..order.files).step_by(order.threads as usize);
    match order.op {
        SmallFileOp::Create => for_each(own, &order.dir, |path| {
            File::create_new(path).and_then(|mut file| file.write_all(&[0x5a; FILE]))
        }),
        SmallFileOp::Stat | SmallFileOp::Lookup => {
            for_each(own, &order.dir, |path| fs::symlink_metadata(path).map(drop))
        }
        SmallFileOp::Delete => for_each(own, &order.dir, |path| fs::remove_file(path)),
        SmallFileOp::List => list(order),
    }
}

fn for_each(
    files: impl Iterator<Item = u32>,
    dir: &Path,
    mut operation: impl FnMut(&Path) -> std::io::Result<()>,
) -> Result<u64> {
    let mut count = 0;
    for file in files {
        let path = dir.join(format!("file-{file:08}"));
        operation(&path).with_context(|| path.display().to_string())?;
        count += 1;
    }
    Ok(count)
}

fn list(order: &SmallFileOrder) -> Result<u64> {
    let of = || order.dir.display().to_string();
    let mut count = 0;
    for entry in fs::read_dir(&order.dir).with_context(of)? {
        let size = entry.and_then(|entry| entry.metadata()).with_context(of)?.len();
        ensure!(size == FILE as u64, "a file of {} has {size} bytes", of());
        count += 1;
    }
    ensure!(count == u64::from(order.files), "{} lists {count} of {} files", of(), order.files);
    Ok(count)
}

fn cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_made_listed_looked_at_and_removed() {
        let place = tempfile::tempdir().unwrap();
        let order =
            |op, threads| SmallFileOrder { dir: place.path().to_owned(), op, threads, files: 10 };
        for op in [SmallFileOp::Create, SmallFileOp::List, SmallFileOp::Stat, SmallFileOp::Lookup] {
            let threads = if op == SmallFileOp::List { 1 } else { 4 };
            let outcome = perform(&order(op, threads)).unwrap();
            assert_eq!(outcome.operations, 10, "{op:?}");
            assert!(outcome.ns > 0);
        }
        fs::remove_file(place.path().join("file-00000003")).unwrap();
        let error = format!("{:#}", perform(&order(SmallFileOp::List, 1)).unwrap_err());
        assert!(error.contains("9 of 10"), "{error}");
        let error = format!("{:#}", perform(&order(SmallFileOp::Delete, 4)).unwrap_err());
        assert!(error.contains("file-00000003"), "{error}");
    }
}
