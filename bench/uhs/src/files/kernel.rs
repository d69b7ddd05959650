//! A mount of the kernel.

use std::ffi::{CString, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use defuse_block::{DeviceAccess, FileDevice};
use defuse_wml::{RunFailure, RunObserver, RunReport, RunSettings, SystemCallDriver, WorkloadPlan};
use rustix::fs::{Mode, OFlags};

use super::{FileOperation, PreparedPath, TimedFile, TimedFiles, in_flight};

pub(crate) struct KernelFiles {
    base: PathBuf,
    root: OwnedFd,
}

impl KernelFiles {
    pub(crate) fn new(base: &Path) -> Result<Self> {
        let root = rustix::fs::open(base, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty())?;
        Ok(KernelFiles { base: base.to_owned(), root })
    }

    /// The path as a program names it.
    fn path(&self, path: &str) -> Result<CString> {
        let base = self.base.as_os_str().as_encoded_bytes();
        Ok(CString::new([base, path.as_bytes()].concat())?)
    }
}

impl TimedFiles for KernelFiles {
    fn name(&self, path: &str) -> Result<PreparedPath> {
        Ok(PreparedPath(self.path(path)?))
    }

    fn mkdir(&self, name: &PreparedPath) -> Result<()> {
        Ok(rustix::fs::mkdir(&name.0, Mode::from_raw_mode(0o755))?)
    }

    fn create(&self, name: &PreparedPath) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(&name.0, flags, Mode::from_raw_mode(0o644))?;
        Ok(())
    }

    fn stat(&self, name: &PreparedPath) -> Result<()> {
        rustix::fs::stat(&name.0)?;
        Ok(())
    }

    fn chmod(&self, name: &PreparedPath, mode: u32) -> Result<()> {
        Ok(rustix::fs::chmod(&name.0, Mode::from_raw_mode(mode))?)
    }

    fn rename(&self, from: &PreparedPath, to: &PreparedPath) -> Result<()> {
        Ok(rustix::fs::rename(&from.0, &to.0)?)
    }

    fn unlink(&self, name: &PreparedPath) -> Result<()> {
        Ok(rustix::fs::unlink(&name.0)?)
    }

    fn open(&self, path: &str) -> Result<Box<dyn TimedFile + '_>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o644);
        Ok(Box::new(KernelFile(rustix::fs::open(self.path(path)?, flags, mode)?)))
    }

    fn carry_out(&self, path: &str, blocks: u64, operations: Vec<FileOperation>) -> Result<()> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o644);
        let file = rustix::fs::open(self.path(path)?, flags, mode)?;
        rustix::fs::ftruncate(&file, blocks * 4096)?;
        drop(file);
        let path = PathBuf::from(OsStr::from_bytes(self.path(path)?.as_bytes()));
        let file = FileDevice::open(&path, DeviceAccess::ReadWrite)?;
        in_flight::run_on_device(&file, in_flight::DeviceMemory::Any, operations)
    }

    fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(&self.root)?)
    }

    fn root(&self) -> &Path {
        &self.base
    }

    fn execute(
        &self,
        plan: &WorkloadPlan,
        observer: &dyn RunObserver,
    ) -> Result<Vec<RunReport>, RunFailure> {
        defuse_wml::execute(plan, &SystemCallDriver, RunSettings::default(), observer)
    }

    fn used_blocks(&self) -> Result<u64> {
        let found = rustix::fs::fstatvfs(&self.root)?;
        Ok((found.f_blocks - found.f_bfree) * found.f_frsize / 4096)
    }
}

struct KernelFile(OwnedFd);

impl TimedFile for KernelFile {
    fn read(&mut self, at: u64, room: &mut [u8]) -> Result<usize> {
        Ok(rustix::io::pread(&self.0, room, at)?)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        anyhow::ensure!(rustix::io::pwrite(&self.0, bytes, at)? == bytes.len(), "a short write");
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(rustix::fs::fsync(&self.0)?)
    }
}
