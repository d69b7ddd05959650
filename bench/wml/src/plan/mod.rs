//! The plan of a workload file: file sets, threads, and the order of actions.
//!
//! All errors that can be detected in advance are reported here, before anything is created.

mod attributes;
mod build;
mod flowops;
mod scale;
mod variables;

use std::path::PathBuf;

use crate::lang::ast::QuitMode;
use crate::random::RandomAmount;

pub use build::{LoadOptions, load};
pub use flowops::MAX_FD;
pub use scale::{MemoryShare, PlanScaling};

/// A set of files in a tree of directories.
#[derive(Clone, Debug)]
pub struct FilesetPlan {
    /// Name of the set and of its root directory.
    pub name: String,
    /// Parent directory of the root.
    pub path: PathBuf,
    /// Maximum number of files.
    pub entries: u64,
    /// Size of each file in bytes.
    pub size: RandomAmount,
    /// Shape of the gamma distribution of sizes; 0 for a fixed size.
    pub size_gamma: f64,
    /// Number of entries of a directory.
    pub dirwidth: RandomAmount,
    /// Shape of the gamma distribution of widths and depths; 0 if they are fixed.
    pub dirgamma: f64,
    /// Depth of the tree. By default it follows from entries and width.
    pub dirdepth: Option<RandomAmount>,
    /// Maximum number of empty directories.
    pub leafdirs: u64,
    /// Percentage of the files that are created before the run; `None` for none.
    pub prealloc: Option<u64>,
    /// Several threads create the files.
    pub paralloc: bool,
    /// Existing files are used.
    pub reuse: bool,
    /// Existing files are assumed to be correct without a check.
    pub trusttree: bool,
    /// Files are opened for reading only.
    pub readonly: bool,
    /// Files are opened for writing only.
    pub writeonly: bool,
    /// Files created before the run stay in the page cache.
    pub cached: bool,
}

/// Attributes that change how files are opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowopOpenFlags {
    /// O_DIRECT.
    pub direct: bool,
    /// O_SYNC.
    pub sync: bool,
    /// posix_fadvise(POSIX_FADV_RANDOM) after opening.
    pub no_readahead: bool,
}

/// The kind of a flowop.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of the language: docs/workloads.md")]
pub enum FlowopKind {
    CreateFile,
    OpenFile,
    CloseFile,
    Read,
    Write,
    ReadWholeFile,
    WriteWholeFile,
    AppendFile,
    AppendFileRand,
    DeleteFile,
    StatFile,
    Fsync,
    FsyncSet,
    MakeDir,
    RemoveDir,
    ListDir,
    EventLimit,
    BandwidthLimit,
    IoOpsLimit,
    OpsLimit,
    Hog,
    Delay,
    Block,
    Wakeup,
    SemBlock,
    SemPost,
    FinishOnCount,
    FinishOnBytes,
    /// Several flowops, one after the other.
    Composite(Vec<FlowopPlan>),
}

impl FlowopKind {
    /// True if it is an operation on a file system, which is included in the summary.
    pub fn is_io(&self) -> bool {
        use FlowopKind::*;
        matches!(
            self,
            CreateFile
                | OpenFile
                | CloseFile
                | Read
                | Write
                | ReadWholeFile
                | WriteWholeFile
                | AppendFile
                | AppendFileRand
                | DeleteFile
                | StatFile
                | Fsync
                | FsyncSet
                | MakeDir
                | RemoveDir
                | ListDir
        )
    }

    /// True if it reads data of files.
    pub fn reads(&self) -> bool {
        matches!(self, FlowopKind::Read | FlowopKind::ReadWholeFile)
    }

    /// True if it writes data of files.
    pub fn writes(&self) -> bool {
        use FlowopKind::*;
        matches!(self, Write | WriteWholeFile | AppendFile | AppendFileRand)
    }
}

/// One step of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowopPlan {
    /// The kind.
    pub kind: FlowopKind,
    /// Its name in the statistics.
    pub name: String,
    /// Index of its row in the statistics. Composite flowops have none.
    pub statistics: usize,
    /// Its line in the file, for messages.
    pub line: u32,
    /// Its file set.
    pub fileset: Option<usize>,
    /// The number of its descriptor.
    pub fd: usize,
    /// The number of the descriptor whose file determines the size of a write.
    pub srcfd: usize,
    /// Each call uses the next descriptor.
    pub opennext: bool,
    /// Bytes per read or write; 0 means all.
    pub iosize: PlanNumber,
    /// Number of repetitions before the next flowop.
    pub iters: PlanNumber,
    /// Reads or writes at random offsets.
    pub random: bool,
    /// Index of the file in its set; `None` for the next one.
    pub indexed: Option<PlanNumber>,
    /// Size of the used part of a file in bytes; 0 means all.
    pub workingset: u64,
    /// Flags for opening files.
    pub open: FlowopOpenFlags,
    /// A number whose meaning depends on the kind.
    pub value: PlanNumber,
    /// The flowops that it refers to, as rows of the statistics.
    pub targets: Vec<usize>,
    /// Limit on how far a sempost may be ahead of its semblock.
    pub highwater: u64,
    /// A sempost waits for its semblock.
    pub blocking: bool,
}

/// A fixed number, or one of the random variables of a run.
///
/// Random variables cannot be compared, so they are referenced by index: tests compare plans of
/// flowops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanNumber {
    /// A fixed number.
    Fixed(u64),
    /// The next value of the random variable with this index in [`WorkloadPlan::variables`].
    Random(usize),
}

/// Threads with the same flowops.
#[derive(Clone, Debug)]
pub struct ThreadPlan {
    /// The name of their process.
    pub process: String,
    /// Their own name.
    pub name: String,
    /// Number of threads in all instances of the process.
    pub instances: u64,
    /// Memory of each thread for data, in bytes; 0 if flowops have their own buffers.
    pub memsize: u64,
    /// The niceness of their process.
    pub nice: i32,
    /// The flowops that each thread repeats.
    pub flowops: Vec<FlowopPlan>,
}

/// A row of the statistics: all flowops of one name and kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatisticsRow {
    /// The name of the flowops.
    pub name: String,
    /// Their kind, by its name in the language.
    pub kind: &'static str,
    /// It counts in the summary.
    pub io: bool,
    /// It reads data.
    pub reads: bool,
    /// It writes data.
    pub writes: bool,
}

/// One `run` or `psrun`.
#[derive(Clone, Debug)]
pub struct WorkloadRunPlan {
    /// Duration in seconds; `None` until the threads end.
    pub seconds: Option<u64>,
    /// Interval of statistics in seconds; 0 for never.
    pub period: u64,
    /// Statistics restart in each period.
    pub resets: bool,
    /// The condition that ends the run.
    pub quit: QuitMode,
    /// Rate of the event generator per second, if there is one.
    pub events: Option<u64>,
    /// Latency histograms are requested.
    pub histogram: bool,
    /// The threads.
    pub threads: Vec<ThreadPlan>,
}

/// An action of a workload.
#[derive(Clone, Debug)]
pub enum WorkloadAction {
    /// Create the file sets that do not exist yet.
    CreateFiles,
    /// Remove the file sets.
    RemoveFiles,
    /// Print a text.
    Echo(String),
    /// Run a shell command.
    System(String),
    /// Wait for this number of seconds.
    Sleep(u64),
    /// Run the workload.
    Run(WorkloadRunPlan),
}

/// A workload that can be run.
#[derive(Clone, Debug)]
pub struct WorkloadPlan {
    /// The name of the workload, which is the name of its file.
    pub name: String,
    /// The file sets.
    pub filesets: Vec<FilesetPlan>,
    /// The random variables that flowops use.
    pub variables: Vec<RandomAmount>,
    /// The rows of the statistics.
    pub rows: Vec<StatisticsRow>,
    /// The actions, in order.
    pub actions: Vec<WorkloadAction>,
    /// The changes by scaling.
    pub scaling: PlanScaling,
    /// The seed of all random numbers.
    pub seed: u64,
}

impl WorkloadPlan {
    /// Average size of all files together when all exist, in bytes.
    pub fn data_bytes(&self) -> u64 {
        self.filesets.iter().map(|set| set.entries as f64 * set.size.mean()).sum::<f64>() as u64
    }

    /// Memory that the threads of the largest run request (`memsize`), in bytes. It is in addition
    /// to the memory that [`MemoryShare`] leaves to the page cache.
    pub fn thread_memory(&self) -> u64 {
        let of_run =
            |run: &WorkloadRunPlan| run.threads.iter().map(|t| t.instances * t.memsize).sum();
        let runs = self.actions.iter().filter_map(|action| match action {
            WorkloadAction::Run(run) => Some(of_run(run)),
            _ => None,
        });
        runs.max().unwrap_or(0)
    }

    /// True if the file contains `run` or `psrun`.
    pub fn runs(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, WorkloadAction::Run(_)))
    }
}
