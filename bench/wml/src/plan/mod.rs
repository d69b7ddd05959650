//! What a workload file means: file sets, threads, and what is done in which order.
//!
//! Everything that can be known to be wrong is refused here, before anything is created.

mod attributes;
mod build;
mod flowops;
mod scale;
mod variables;

use std::path::PathBuf;

use crate::lang::ast::QuitMode;
use crate::random::Amount;

pub use build::{Options, load};
pub use flowops::MAX_FD;
pub use scale::{MemoryShare, Scaling};

/// A set of files in a tree of directories.
#[derive(Clone, Debug)]
pub struct FilesetPlan {
    /// Its name, which is also that of its root directory.
    pub name: String,
    /// The directory in which its root is.
    pub path: PathBuf,
    /// How many files there may be.
    pub entries: u64,
    /// The size of each, in bytes.
    pub size: Amount,
    /// The shape of the gamma distribution of sizes; 0 where sizes are not spread.
    pub size_gamma: f64,
    /// How many entries a directory has.
    pub dirwidth: Amount,
    /// The shape of the gamma distribution of widths and depths; 0 where they are fixed.
    pub dirgamma: f64,
    /// How deep the tree is; where it is not given, that follows from entries and width.
    pub dirdepth: Option<Amount>,
    /// How many empty directories there may be.
    pub leafdirs: u64,
    /// How many per cent of the files are made before the run; none where it is absent.
    pub prealloc: Option<u64>,
    /// Whether several threads make them.
    pub paralloc: bool,
    /// Whether files that are already there are used.
    pub reuse: bool,
    /// Whether files that should be there are not even looked at.
    pub trusttree: bool,
    /// Whether files are opened for reading only.
    pub readonly: bool,
    /// Whether files are opened for writing only.
    pub writeonly: bool,
    /// Whether the page cache keeps what is made before the run.
    pub cached: bool,
}

/// Attributes that change how files are opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// O_DIRECT.
    pub direct: bool,
    /// O_SYNC.
    pub sync: bool,
    /// posix_fadvise(POSIX_FADV_RANDOM) after opening.
    pub no_readahead: bool,
}

/// What a flowop does.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of the language: docs/workloads.md")]
pub enum Kind {
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

impl Kind {
    /// Whether it is an operation on a file system, and so part of the summary.
    pub fn is_io(&self) -> bool {
        use Kind::*;
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

    /// Whether it moves data of files towards the program.
    pub fn reads(&self) -> bool {
        matches!(self, Kind::Read | Kind::ReadWholeFile)
    }

    /// Whether it moves data of files away from the program.
    pub fn writes(&self) -> bool {
        use Kind::*;
        matches!(self, Write | WriteWholeFile | AppendFile | AppendFileRand)
    }
}

/// One step of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowopPlan {
    /// What it does.
    pub kind: Kind,
    /// Its name in the statistics.
    pub name: String,
    /// Which row of the statistics is its own; composite flowops have none.
    pub statistics: usize,
    /// Where it stands in the file, for messages.
    pub line: u32,
    /// The file set that it works on.
    pub fileset: Option<usize>,
    /// The number of its descriptor.
    pub fd: usize,
    /// The number of the descriptor whose file says how much is written.
    pub srcfd: usize,
    /// Whether each call uses the next descriptor.
    pub opennext: bool,
    /// How much is read or written at once, in bytes; 0 means all.
    pub iosize: Number,
    /// How often it is done before the next flowop.
    pub iters: Number,
    /// Whether it reads or writes at random places.
    pub random: bool,
    /// Which file of the set; the next one where it is absent.
    pub indexed: Option<Number>,
    /// How much of a file is used, in bytes; 0 means all.
    pub workingset: u64,
    /// How files are opened.
    pub open: OpenFlags,
    /// A number whose meaning depends on the kind.
    pub value: Number,
    /// The flowops that it is about: rows of the statistics.
    pub targets: Vec<usize>,
    /// How far a sempost may be ahead of its semblock.
    pub highwater: u64,
    /// Whether a sempost waits for its semblock.
    pub blocking: bool,
}

/// A number that is fixed, or one of the random variables of a run.
///
/// Plans of flowops are compared in tests, which random variables cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// Always the same.
    Fixed(u64),
    /// The next value of the random variable with that place in [`Plan::variables`].
    Random(usize),
}

/// Threads that all do the same.
#[derive(Clone, Debug)]
pub struct ThreadPlan {
    /// The name of their process.
    pub process: String,
    /// Their own name.
    pub name: String,
    /// How many there are, over all instances of the process.
    pub instances: u64,
    /// How much memory each uses for data, in bytes; 0 where flowops have buffers of their own.
    pub memsize: u64,
    /// The niceness of their process.
    pub nice: i32,
    /// What each does, over and over.
    pub flowops: Vec<FlowopPlan>,
}

/// A row of the statistics: all flowops of one name and kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatisticsRow {
    /// The name of the flowops.
    pub name: String,
    /// Their kind, by its name in the language.
    pub kind: &'static str,
    /// Whether it counts in the summary.
    pub io: bool,
    /// Whether it reads data.
    pub reads: bool,
    /// Whether it writes data.
    pub writes: bool,
}

/// One `run` or `psrun`.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// For how many seconds; until the threads end where it is absent.
    pub seconds: Option<u64>,
    /// How often statistics are shown, in seconds; 0 for never.
    pub period: u64,
    /// Whether statistics begin anew in each period.
    pub resets: bool,
    /// When the run ends.
    pub quit: QuitMode,
    /// Events a second of the event generator, where there is one.
    pub events: Option<u64>,
    /// Whether latency histograms are wanted.
    pub histogram: bool,
    /// Who does what.
    pub threads: Vec<ThreadPlan>,
}

/// What is done, in this order.
#[derive(Clone, Debug)]
pub enum Action {
    /// Make the file sets, as far as they are not made yet.
    CreateFiles,
    /// Remove them.
    RemoveFiles,
    /// Show a text.
    Echo(String),
    /// Run a command of the shell.
    System(String),
    /// Wait for so many seconds.
    Sleep(u64),
    /// Run the workload.
    Run(RunPlan),
}

/// A workload that can be run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its name: that of its file.
    pub name: String,
    /// The file sets.
    pub filesets: Vec<FilesetPlan>,
    /// The random variables that flowops use.
    pub variables: Vec<Amount>,
    /// The rows of the statistics.
    pub rows: Vec<StatisticsRow>,
    /// What is done.
    pub actions: Vec<Action>,
    /// What scaling has changed.
    pub scaling: Scaling,
    /// What everything random begins with.
    pub seed: u64,
}

impl Plan {
    /// How many bytes all files have when all exist, on average.
    pub fn data_bytes(&self) -> u64 {
        self.filesets.iter().map(|set| set.entries as f64 * set.size.mean()).sum::<f64>() as u64
    }

    /// How much memory the threads of the largest run ask for (`memsize`), in bytes. It comes on
    /// top of what [`MemoryShare`] leaves to the page cache.
    pub fn thread_memory(&self) -> u64 {
        let of_run = |run: &RunPlan| run.threads.iter().map(|t| t.instances * t.memsize).sum();
        let runs = self.actions.iter().filter_map(|action| match action {
            Action::Run(run) => Some(of_run(run)),
            _ => None,
        });
        runs.max().unwrap_or(0)
    }

    /// Whether the file says `run` or `psrun` anywhere.
    pub fn runs(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, Action::Run(_)))
    }
}
