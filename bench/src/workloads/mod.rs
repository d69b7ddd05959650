//! The workloads: plain system calls by a few threads, the same for every target.
//!
//! A [`BenchmarkCase`] prepares one [`BatchJob`] for each thread, unmeasured. The jobs are then
//! released together and measured. Workloads that use up files (create, unlink, cold caches) run in
//! batches, each newly prepared, until enough time has been measured. Other workloads run until the
//! time is over.

mod data;
mod fileset;
mod names;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;

pub use fileset::FilesetSizes;

/// The work of one thread in one batch. It returns the number of operations.
pub type BatchJob = Box<dyn FnOnce(&WorkDeadline) -> Result<u64> + Send>;

/// The time at which unlimited work stops.
#[derive(Debug, Clone, Copy)]
pub struct WorkDeadline(pub Instant);

impl WorkDeadline {
    /// True if it is time to stop.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}

/// The directories of a batch.
#[derive(Debug, Clone)]
pub struct BatchDirs {
    /// The served directory as seen through the target.
    pub root: PathBuf,
    /// This directory on the backing file system.
    pub below: PathBuf,
    /// Name of a directory in it for this batch alone, so that nothing about it is cached.
    pub own: String,
    /// Number of application threads.
    pub threads: usize,
    /// The sizes of all files.
    pub fileset: FilesetSizes,
    /// Process ids of all daemons, to wait for after caches were dropped.
    pub daemons: Vec<u32>,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct BenchmarkCase {
    /// Name on the command line and in the table.
    pub name: &'static str,
    /// Description of one operation.
    pub what: &'static str,
    /// Required ratio of defuse to the better peer.
    pub required: f64,
    kind: CaseKind,
}

#[derive(Debug, Clone, Copy)]
enum CaseKind {
    Create { bytes: usize },
    Stat { cold: bool },
    OpenReadClose { cold: bool },
    Unlink,
    ReadDir { cold: bool, stat: bool },
    Io(IoStream),
}

/// A stream of reads or writes.
#[derive(Debug, Clone, Copy)]
struct IoStream {
    write: bool,
    bytes: usize,
    direct: bool,
    random: bool,
    /// All threads use one file, instead of one file each.
    shared: bool,
}

const fn case(name: &'static str, what: &'static str, kind: CaseKind) -> BenchmarkCase {
    BenchmarkCase { name, what, required: 1.0, kind }
}

const fn sequential(write: bool, bytes: usize, direct: bool) -> CaseKind {
    CaseKind::Io(IoStream { write, bytes, direct, random: false, shared: false })
}

const fn random(write: bool, shared: bool) -> CaseKind {
    CaseKind::Io(IoStream { write, bytes: 4 << 10, direct: true, random: true, shared })
}

impl BenchmarkCase {
    /// Every workload, in the order of the table.
    pub const ALL: [BenchmarkCase; 21] = {
        let (k4, k128) = (4 << 10, 128 << 10);
        [
            case("create-4k", "create a file, write 4K, close", CaseKind::Create { bytes: k4 })
                .with_required_ratio(1.5),
            case("create-empty", "create a file, close", CaseKind::Create { bytes: 0 })
                .with_required_ratio(1.5),
            case("stat-cold", "stat of a name no cache knows", CaseKind::Stat { cold: true }),
            case("stat-warm", "stat of a name the kernel has", CaseKind::Stat { cold: false }),
            case(
                "open-read-close-cold",
                "4K file, no cache",
                CaseKind::OpenReadClose { cold: true },
            ),
            case(
                "open-read-close",
                "4K file, names cached",
                CaseKind::OpenReadClose { cold: false },
            ),
            case("unlink", "unlink of a name not seen before", CaseKind::Unlink),
            case("readdir", "1,000 names, cold", CaseKind::ReadDir { cold: true, stat: false }),
            case(
                "readdir-warm",
                "1,000 names again",
                CaseKind::ReadDir { cold: false, stat: false },
            ),
            case(
                "ls-l",
                "1,000 names and stats, cold",
                CaseKind::ReadDir { cold: true, stat: true },
            ),
            case("read-4k", "sequential, page cache cold", sequential(false, k4, false)),
            case("read-128k", "sequential, page cache cold", sequential(false, k128, false)),
            case("read-4k-direct", "sequential, O_DIRECT", sequential(false, k4, true)),
            case("read-128k-direct", "sequential, O_DIRECT", sequential(false, k128, true)),
            case("randread-4k-direct", "random, O_DIRECT", random(false, false)),
            case("randread-4k-shared", "random, O_DIRECT, one file", random(false, true)),
            case(
                "write-4k",
                "sequential into a new file, with its close",
                sequential(true, k4, false),
            )
            .with_required_ratio(1.5),
            case("write-128k", "the same in 128K", sequential(true, k128, false)),
            case("write-4k-direct", "overwrite, O_DIRECT", sequential(true, k4, true)),
            case("write-128k-direct", "overwrite, O_DIRECT", sequential(true, k128, true)),
            case("randwrite-4k-shared", "overwrite, O_DIRECT, one file", random(true, true)),
        ]
    };

    const fn with_required_ratio(mut self, ratio: f64) -> Self {
        self.required = ratio;
        self
    }

    /// True if the workload is meaningful with this number of threads.
    pub fn applies(&self, threads: usize) -> bool {
        threads > 1 || !matches!(self.kind, CaseKind::Io(IoStream { shared: true, .. }))
    }

    /// Prepares a batch, unmeasured: one job for each thread.
    pub fn jobs(&self, place: &BatchDirs) -> Result<Vec<BatchJob>> {
        match self.kind {
            CaseKind::Create { bytes } => names::create(place, bytes),
            CaseKind::Stat { cold } => names::stat(place, cold),
            CaseKind::OpenReadClose { cold } => names::open_read_close(place, cold),
            CaseKind::Unlink => names::unlink(place),
            CaseKind::ReadDir { cold, stat } => names::readdir(place, cold, stat),
            CaseKind::Io(io) => data::jobs(place, io),
        }
    }

    /// Removes the files of a batch through the target, so that the kernel forgets them, too.
    pub fn clean_up(&self, place: &BatchDirs) -> Result<()> {
        let own = place.root.join(&place.own);
        match std::fs::remove_dir_all(&own) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_strict_workloads_are_listed() {
        let names: std::collections::BTreeSet<_> =
            BenchmarkCase::ALL.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), BenchmarkCase::ALL.len());
        let strict: Vec<_> = BenchmarkCase::ALL
            .iter()
            .filter(|case| case.required > 1.0)
            .map(|case| case.name)
            .collect();
        assert_eq!(strict, ["create-4k", "create-empty", "write-4k"]);
    }

    #[test]
    fn shared_files_need_several_threads() {
        let shared =
            BenchmarkCase::ALL.iter().find(|case| case.name == "randread-4k-shared").unwrap();
        assert!(!shared.applies(1) && shared.applies(8));
    }
}
