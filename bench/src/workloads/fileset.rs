//! The read-only files of the workloads, created once below all targets.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};

/// The sizes of all files. Totals are for all threads together, so that more threads do not mean
/// more work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilesetSizes {
    /// Number of directories with small files.
    pub small_dirs: usize,
    /// Number of small files in each.
    pub small_per_dir: usize,
    /// Number of directories to list.
    pub list_dirs: usize,
    /// Number of names in each.
    pub list_entries: usize,
    /// Number of files that a batch creates or unlinks.
    pub batch_files: usize,
    /// Bytes that a batch of buffered reads or writes transfers.
    pub stream_bytes: usize,
    /// Number of files for reads; at least as many as threads.
    pub data_files: usize,
}

/// Bytes in a small file.
pub const SMALL_BYTES: usize = 4 << 10;
/// Name of the directory of the read-only files in the served directory.
pub const SHARED: &str = "shared";

impl FilesetSizes {
    /// Sizes for measurements with up to this many threads.
    pub fn full(threads: usize) -> Self {
        Self {
            small_dirs: 8,
            small_per_dir: 500,
            list_dirs: 16,
            list_entries: 1000,
            batch_files: 2000,
            stream_bytes: 32 << 20,
            data_files: threads.max(1),
        }
    }

    /// Sizes for tests.
    pub fn tiny(threads: usize) -> Self {
        Self {
            small_dirs: 2,
            small_per_dir: 8,
            list_dirs: threads.max(1),
            list_entries: 10,
            batch_files: 16,
            stream_bytes: 1 << 20,
            data_files: threads.max(1),
        }
    }

    /// Creates the read-only files in `data`, the served directory on the backing file system.
    pub fn create(&self, data: &Path) -> Result<()> {
        let shared = data.join(SHARED);
        fs::create_dir(&shared).with_context(|| format!("create {}", shared.display()))?;
        let small = vec![0x5a_u8; SMALL_BYTES];
        for dir in 0..self.small_dirs {
            let dir = shared.join(small_dir(dir));
            fs::create_dir(&dir)?;
            for file in 0..self.small_per_dir {
                fs::write(dir.join(small_name(file)), &small)?;
            }
        }
        for dir in 0..self.list_dirs {
            let dir = shared.join(list_dir(dir));
            fs::create_dir(&dir)?;
            for entry in 0..self.list_entries {
                File::create(dir.join(format!("entry-{entry:04}")))?;
            }
        }
        for file in 0..self.data_files {
            fs::write(shared.join(data_file(file)), vec![0xa5_u8; self.stream_bytes])?;
        }
        rustix::fs::syncfs(File::open(&shared)?)?;
        Ok(())
    }
}

/// Name of a directory of small files.
pub fn small_dir(number: usize) -> String {
    format!("small-{number}")
}

/// Name of a small file.
pub fn small_name(number: usize) -> String {
    format!("file-{number:04}")
}

/// Name of a directory to list.
pub fn list_dir(number: usize) -> String {
    format!("list-{number}")
}

/// Name of a file to read.
pub fn data_file(number: usize) -> String {
    format!("data-{number}")
}
