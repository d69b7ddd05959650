//! The tables of *Direct-FUSE* (ROSS '18): what it brings to leave the kernel out.
//!
//! What it is: the same system calls on the native file system, through a mount, and within the program's own process
//! ([`run()`]), round after round and in turns, so that ratios stand however busy the machine is; context switches beside
//! them; what of a call is the client's own; what a start costs; and whether each goal is met ([`goals`]).

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

pub use measure::run;
pub use report::{html, write as write_report};
pub use table::table;

/// How much is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scale {
    /// Writes in the table of context switches.
    pub writes: u64,
    /// Bytes of the file of sequential reads and writes.
    pub file_bytes: u64,
    /// Blocks of the table of context switches, in bytes.
    pub write_blocks: Vec<u64>,
    /// Blocks of sequential reads and writes.
    pub blocks: Vec<u64>,
    /// Blocks of the calls whose share the client's part is.
    pub share_blocks: Vec<u64>,
    /// Starts in a round.
    pub starts: u32,
}

impl Scale {
    /// As the paper has it, but for the size of files, which is that of a processor's cache.
    pub fn full() -> Scale {
        Scale {
            writes: 1000,
            file_bytes: 8 << 20,
            write_blocks: [4, 16, 64, 256].map(kib).to_vec(),
            blocks: [4, 8, 16, 32, 64, 128, 256, 512, 1024].map(kib).to_vec(),
            share_blocks: [4, 16, 64, 256].map(kib).to_vec(),
            starts: 10,
        }
    }

    /// Everything once and small: to see that it works.
    pub fn tiny() -> Scale {
        Scale {
            writes: 100,
            file_bytes: 256 << 10,
            write_blocks: [4, 64].map(kib).to_vec(),
            blocks: [4, 64].map(kib).to_vec(),
            share_blocks: [4].map(kib).to_vec(),
            starts: 2,
        }
    }

    /// By its name.
    pub fn named(name: &str) -> Result<Scale, String> {
        match name {
            "full" => Ok(Scale::full()),
            "tiny" => Ok(Scale::tiny()),
            _ => Err(format!("there is no scale {name:?}: write full or tiny")),
        }
    }

    /// Bytes of the largest file.
    fn largest_file(&self) -> u64 {
        let writes = self.write_blocks.iter().map(|block| block * self.writes).max();
        writes.unwrap_or(0).max(self.file_bytes)
    }
}

fn kib(count: u64) -> u64 {
    count << 10
}

/// What was asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// How much.
    pub scale: Scale,
    /// How often everything is measured.
    pub rounds: u32,
    /// Where the image of ext4 and the mounts lie meanwhile.
    pub work: PathBuf,
    /// libfuse's passthrough_hp; `None` to look for it where `defuse-bench` puts it.
    pub libfuse: Option<PathBuf>,
    /// This program.
    pub program: PathBuf,
}
