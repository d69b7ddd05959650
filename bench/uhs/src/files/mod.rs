//! Operations by path, as a program makes them: through the kernel, or through the client in this
//! process.

pub(crate) mod in_flight;
mod inside;
mod kernel;

use std::ffi::CString;
use std::path::Path;

use anyhow::Result;
use defuse_wml::{RunFailure, RunObserver, RunReport, WorkloadPlan};

pub(crate) use inside::{InProcessFiles, NAME};
pub(crate) use kernel::KernelFiles;

/// An operation of a file or a device: a write if true, from this block on, of so many blocks of 4
/// KiB.
pub(crate) type FileOperation = (bool, u64, u32);

/// Operations in flight, where many are.
pub(crate) const DEPTH: u32 = 32;

/// A path as the calls of a file system take it: made before time is taken.
pub(crate) struct PreparedPath(CString);

/// An open file.
pub(crate) trait TimedFile {
    fn read(&mut self, at: u64, room: &mut [u8]) -> Result<usize>;
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()>;
    fn sync(&mut self) -> Result<()>;
}

/// A file system. Paths begin with `/`.
pub(crate) trait TimedFiles: Sync {
    /// The name of a file for the operations below.
    fn name(&self, path: &str) -> Result<PreparedPath>;
    fn mkdir(&self, name: &PreparedPath) -> Result<()>;
    /// Makes an empty file: open(2) with O_CREAT and O_EXCL, and close(2).
    fn create(&self, name: &PreparedPath) -> Result<()>;
    fn stat(&self, name: &PreparedPath) -> Result<()>;
    fn chmod(&self, name: &PreparedPath, mode: u32) -> Result<()>;
    fn rename(&self, from: &PreparedPath, to: &PreparedPath) -> Result<()>;
    fn unlink(&self, name: &PreparedPath) -> Result<()>;
    /// Opens a file for reading and writing, and makes it where it is not there.
    fn open(&self, path: &str) -> Result<Box<dyn TimedFile + '_>>;
    /// Carries out operations of a file of `blocks` blocks past the cache (`O_DIRECT`), [`DEPTH`]
    /// at a time, and makes them durable. The file is made where it is not there.
    fn carry_out(&self, path: &str, blocks: u64, operations: Vec<FileOperation>) -> Result<()>;
    /// Makes everything durable.
    fn sync(&self) -> Result<()>;
    /// The name of the root, for the files of a workload.
    fn root(&self) -> &Path;
    /// Executes a workload.
    fn execute(
        &self,
        plan: &WorkloadPlan,
        observer: &dyn RunObserver,
    ) -> Result<Vec<RunReport>, RunFailure>;
    /// Blocks of 4 KiB in use.
    fn used_blocks(&self) -> Result<u64>;
}
