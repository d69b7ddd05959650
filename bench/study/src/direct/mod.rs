//! The tables of *Direct-FUSE* (ROSS '18): the benefit of leaving out the kernel.
//!
//! Equal system calls run on the native file system, through a mount, and within the program's own
//! process ([`run()`]). They alternate in rounds, so that ratios are valid on a busy machine. The
//! tables also show context switches, the client's share of a call, the cost of starting a program,
//! and whether each goal is met ([`goals`]).

pub mod goals;
mod measure;
mod places;
mod report;
pub mod results;
mod startup;
mod table;
mod workers;

pub mod worker;

use std::path::PathBuf;

pub(crate) use measure::read_available_memory;
pub use measure::run;
pub(crate) use report::goal_rows;
pub use report::{html, write as write_report};
pub(crate) use table::ratio;
pub use table::table;

/// The amount of work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectScale {
    /// Number of writes in the table of context switches.
    pub writes: u64,
    /// File size of sequential reads and writes, in bytes.
    pub file_bytes: u64,
    /// Block sizes in the table of context switches, in bytes.
    pub write_blocks: Vec<u64>,
    /// Block sizes of sequential reads and writes, in bytes.
    pub blocks: Vec<u64>,
    /// Block sizes for the client's share of a call, in bytes.
    pub share_blocks: Vec<u64>,
    /// Number of program starts in a round.
    pub starts: u32,
}

impl DirectScale {
    /// The paper's amount of work, with files that fit into a processor's cache.
    pub fn full() -> DirectScale {
        DirectScale {
            writes: 1000,
            file_bytes: 8 << 20,
            write_blocks: [4, 16, 64, 256].map(kib).to_vec(),
            blocks: [4, 8, 16, 32, 64, 128, 256, 512, 1024].map(kib).to_vec(),
            share_blocks: [4, 16, 64, 256].map(kib).to_vec(),
            starts: 10,
        }
    }

    /// A minimal amount of work, to check that everything runs.
    pub fn tiny() -> DirectScale {
        DirectScale {
            writes: 100,
            file_bytes: 256 << 10,
            write_blocks: [4, 64].map(kib).to_vec(),
            blocks: [4, 64].map(kib).to_vec(),
            share_blocks: [4].map(kib).to_vec(),
            starts: 2,
        }
    }

    /// The amount of work by name.
    pub fn from_name(name: &str) -> Result<DirectScale, String> {
        match name {
            "full" => Ok(DirectScale::full()),
            "tiny" => Ok(DirectScale::tiny()),
            _ => Err(format!("there is no scale {name:?}: write full or tiny")),
        }
    }

    /// Size of the largest file in bytes.
    fn largest_file(&self) -> u64 {
        let writes = self.write_blocks.iter().map(|block| block * self.writes).max();
        writes.unwrap_or(0).max(self.file_bytes)
    }
}

fn kib(count: u64) -> u64 {
    count << 10
}

/// Options of the measurement.
#[derive(Debug, Clone)]
pub struct DirectOptions {
    /// The amount of work.
    pub scale: DirectScale,
    /// Maximum number of rounds.
    pub rounds: u32,
    /// Directory for the image of ext4 and for mounts.
    pub work: PathBuf,
    /// Path of libfuse's passthrough_hp; `None` to look where `defuse-bench` puts it.
    pub libfuse: Option<PathBuf>,
    /// The path of this program.
    pub program: PathBuf,
}
