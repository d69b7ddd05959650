//! The command line of the benchmark.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::workloads::BenchmarkCase;

/// A new build may be this much slower than the previous one; smaller differences are noise.
const NO_WORSE: f64 = 0.97;

/// Compares defuse with libfuse, fuser and the native directory, interleaved in one run.
#[derive(Debug, Clone, Parser)]
#[command(name = "defuse-bench", version)]
pub struct BenchmarkArgs {
    /// Rounds; each runs every cell on every target once.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// A quick overview instead of a result: two rounds, a tenth of a second per cell.
    #[arg(long)]
    pub quick: bool,
    /// Minimum measured time of one cell, in milliseconds.
    #[arg(long, default_value_t = 300, value_name = "MS")]
    pub min_time: u64,
    /// Only workloads with one of these names or prefixes.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub only: Vec<String>,
    /// Targets: native, libfuse, libfuse-xattr, fuser (both of fuser-1 and fuser-4), fuser-N,
    /// fuser-N-wb, defuse (over /dev/fuse), defuse-uring (over io_uring).
    #[arg(long, value_delimiter = ',', value_name = "NAME",
          default_values = ["native", "libfuse", "fuser", "defuse"])]
    pub targets: Vec<String>,
    /// Numbers of application threads.
    #[arg(long, value_delimiter = ',', value_name = "N", default_values_t = [1, 8])]
    pub threads: Vec<usize>,
    /// The program to measure [default: `defuse` beside this program].
    #[arg(long, value_name = "PATH")]
    pub defuse: Option<PathBuf>,
    /// An earlier build of `defuse` to measure beside the new one, as the target `defuse-before`.
    /// Every workload then requires 0.97 of the better peer; with `--targets native,defuse` the
    /// earlier build is the only one.
    #[arg(long, value_name = "PATH")]
    pub before: Option<PathBuf>,
    /// Additional mount options for defuse, as one comma-separated list.
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    pub defuse_options: Option<String>,
    /// A further defuse target with its own mount options, e.g. `splice=no_passthrough`.
    #[arg(long, value_name = "NAME=OPTIONS")]
    pub variant: Vec<String>,
    /// Validity time of entries and attributes for every target, in seconds; passthrough_hp
    /// supports only 86400 and 0.
    #[arg(long, default_value_t = 86400, value_name = "SECONDS")]
    pub timeout: u64,
    /// File system of the served directory.
    #[arg(long, value_enum, default_value_t = BackingKind::Ext4)]
    pub backing: BackingKind,
    /// Directory for the image and the mount points [default: /dev/shm, or the temporary
    /// directory].
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Write all measurements to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the section for docs/performance.md to this file.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Exit with 1 if defuse failed anywhere, or is below its required ratio.
    #[arg(long)]
    pub check: bool,
    /// List the workloads with descriptions, and exit.
    #[arg(long)]
    pub list: bool,
}

/// File system of the served directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackingKind {
    /// ext4 on a loop device over an image file.
    Ext4,
    /// A tmpfs.
    Tmpfs,
}

impl BenchmarkArgs {
    /// Number of rounds, limited by `--quick`.
    pub fn rounds(&self) -> usize {
        if self.quick { self.rounds.min(2) } else { self.rounds }.max(1)
    }

    /// Minimum measured time of a cell, limited by `--quick`.
    pub fn min_time(&self) -> Duration {
        Duration::from_millis(if self.quick { self.min_time.min(100) } else { self.min_time })
    }

    /// The required ratio of our result to the better peer in a workload.
    pub fn required_ratio(&self, case: &BenchmarkCase) -> f64 {
        if self.before.is_some() { NO_WORSE } else { case.required }
    }

    /// True if `--only` selects the workload.
    pub fn wants(&self, workload: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| workload.starts_with(wanted.as_str()))
    }

    /// The working directory: in memory if possible, because a fast device shows the overhead of
    /// the file system.
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
        let args = BenchmarkArgs::parse_from(["bench", "--only", "create,stat-cold"]);
        assert!(args.wants("create-4k") && args.wants("stat-cold"));
        assert!(!args.wants("stat-warm"));
        assert_eq!(args.threads, [1, 8]);
    }

    #[test]
    fn an_earlier_build_sets_the_required_ratio() {
        let case = BenchmarkCase::ALL.iter().find(|case| case.required > 1.0).unwrap();
        let args = BenchmarkArgs::parse_from(["bench"]);
        assert!(args.required_ratio(case) > 1.0);
        let args = BenchmarkArgs::parse_from(["bench", "--before", "/old/defuse"]);
        assert!(args.required_ratio(case) < 1.0);
    }

    #[test]
    fn quick_bounds_rounds_and_time() {
        let args = BenchmarkArgs::parse_from(["bench", "--quick"]);
        assert_eq!((args.rounds(), args.min_time()), (2, Duration::from_millis(100)));
    }
}
