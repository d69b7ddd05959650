//! The command line of the benchmark.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::workloads::Case;

/// A new build may be this much slower than the one before it: less cannot be told from noise.
const NO_WORSE: f64 = 0.97;

/// Compares defuse with libfuse, fuser and the native directory, interleaved in one run.
#[derive(Debug, Clone, Parser)]
#[command(name = "defuse-bench", version)]
pub struct Args {
    /// Rounds; each runs every cell on every target once.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// A look at everything rather than a result: two rounds, a tenth of a second a cell.
    #[arg(long)]
    pub quick: bool,
    /// Least measured time of one cell, in milliseconds.
    #[arg(long, default_value_t = 300, value_name = "MS")]
    pub min_time: u64,
    /// Workloads whose name is one of these or begins with one of these.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub only: Vec<String>,
    /// Targets: native, libfuse, libfuse-xattr, fuser (both of fuser-1 and fuser-4), fuser-N, fuser-N-wb, defuse (over /dev/fuse),
    /// defuse-uring (over io_uring).
    #[arg(long, value_delimiter = ',', value_name = "NAME",
          default_values = ["native", "libfuse", "fuser", "defuse"])]
    pub targets: Vec<String>,
    /// Numbers of application threads.
    #[arg(long, value_delimiter = ',', value_name = "N", default_values_t = [1, 8])]
    pub threads: Vec<usize>,
    /// The program to measure [default: `defuse` beside this program].
    #[arg(long, value_name = "PATH")]
    pub defuse: Option<PathBuf>,
    /// An earlier build of `defuse` to measure beside the new one, as the target `defuse-before`. Every workload then
    /// requires 0.97 of the better peer; with `--targets native,defuse` the earlier build is the only one.
    #[arg(long, value_name = "PATH")]
    pub before: Option<PathBuf>,
    /// Mount options for defuse, as one comma-separated list, in addition to the timeouts.
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    pub defuse_options: Option<String>,
    /// A further defuse target with mount options of its own, e.g. `splice=no_passthrough`.
    #[arg(long, value_name = "NAME=OPTIONS")]
    pub variant: Vec<String>,
    /// How long the kernel may keep entries and attributes, the same for every target; passthrough_hp knows only 86400
    /// and 0.
    #[arg(long, default_value_t = 86400, value_name = "SECONDS")]
    pub timeout: u64,
    /// What the served directory lies on.
    #[arg(long, value_enum, default_value_t = BackingKind::Ext4)]
    pub backing: BackingKind,
    /// Where the image and the mount points are put [default: /dev/shm, or the temporary directory].
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Write everything measured to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the section for docs/performance.md to this file.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Exit with 1 if defuse failed anywhere, or is below what is required of it.
    #[arg(long)]
    pub check: bool,
    /// List the workloads and what each one does, and leave.
    #[arg(long)]
    pub list: bool,
}

/// What the served directory lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackingKind {
    /// ext4 on a loop device over an image file.
    Ext4,
    /// A tmpfs.
    Tmpfs,
}

impl Args {
    /// Rounds to run, `--quick` considered.
    pub fn rounds(&self) -> usize {
        if self.quick { self.rounds.min(2) } else { self.rounds }.max(1)
    }

    /// Least measured time of a cell, `--quick` considered.
    pub fn min_time(&self) -> Duration {
        Duration::from_millis(if self.quick { self.min_time.min(100) } else { self.min_time })
    }

    /// The least that ours must be in a workload, as a multiple of the better peer.
    pub fn required(&self, case: &Case) -> f64 {
        if self.before.is_some() { NO_WORSE } else { case.required }
    }

    /// Whether `--only` lets a workload through.
    pub fn wants(&self, workload: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| workload.starts_with(wanted.as_str()))
    }

    /// The directory to work in: memory if there is some, because a fast device shows the cost of the way to it.
    pub fn work_dir(&self) -> PathBuf {
        let shm = PathBuf::from("/dev/shm");
        match &self.dir {
            Some(dir) => dir.clone(),
            None if shm.is_dir() => shm,
            None => std::env::temp_dir(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_selects_by_prefix() {
        let args = Args::parse_from(["bench", "--only", "create,stat-cold"]);
        assert!(args.wants("create-4k") && args.wants("stat-cold"));
        assert!(!args.wants("stat-warm"));
        assert_eq!(args.threads, [1, 8]);
    }

    #[test]
    fn an_earlier_build_is_what_the_new_one_is_held_against() {
        let case = Case::ALL.iter().find(|case| case.required > 1.0).unwrap();
        let args = Args::parse_from(["bench"]);
        assert!(args.required(case) > 1.0);
        let args = Args::parse_from(["bench", "--before", "/old/defuse"]);
        assert!(args.required(case) < 1.0);
    }

    #[test]
    fn quick_bounds_rounds_and_time() {
        let args = Args::parse_from(["bench", "--quick"]);
        assert_eq!((args.rounds(), args.min_time()), (2, Duration::from_millis(100)));
    }
}
