//! A mount inside of this process.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use defuse_direct::{ClientTask, DirectClient, FileDescription, OpenHow, WalkStart};
use defuse_fs::RenameFlags;
use defuse_wml::{RunFailure, RunObserver, RunReport, RunSettings, WorkloadPlan};
use defuse_wml_direct::DirectDriver;
use rustix::fs::OFlags;

use super::{FileOperation, PreparedPath, TimedFile, TimedFiles, in_flight};

/// The name of the mount.
pub(crate) const NAME: &[u8] = b"bench:";

pub(crate) struct InProcessFiles {
    client: Arc<DirectClient>,
    task: ClientTask,
    root: Arc<FileDescription>,
    workloads: DirectDriver,
}

impl InProcessFiles {
    pub(crate) fn new(client: Arc<DirectClient>) -> Result<Self> {
        let workloads = DirectDriver::new(Arc::clone(&client))?;
        let task = ClientTask::for_this_process()?;
        let flags = (OFlags::RDONLY | OFlags::DIRECTORY).bits();
        let how = OpenHow { flags, ..OpenHow::default() };
        let root = client.open(&task, WalkStart::Cwd, &[NAME, b"/"].concat(), how)?;
        Ok(InProcessFiles { client, task, root, workloads })
    }

    fn open(&self, name: &PreparedPath, flags: OFlags) -> Result<Arc<FileDescription>> {
        let how = OpenHow { flags: flags.bits(), mode: 0o644, ..OpenHow::default() };
        Ok(self.client.open(&self.task, WalkStart::Cwd, name.0.as_bytes(), how)?)
    }
}

impl TimedFiles for InProcessFiles {
    fn name(&self, path: &str) -> Result<PreparedPath> {
        Ok(PreparedPath(CString::new([NAME, path.as_bytes()].concat())?))
    }

    fn mkdir(&self, name: &PreparedPath) -> Result<()> {
        Ok(self.client.mkdir(&self.task, WalkStart::Cwd, name.0.as_bytes(), 0o755)?)
    }

    fn create(&self, name: &PreparedPath) -> Result<()> {
        let file = self.open(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
        Ok(file.close(&self.task)?)
    }

    fn stat(&self, name: &PreparedPath) -> Result<()> {
        self.client.stat(&self.task, WalkStart::Cwd, name.0.as_bytes(), true)?;
        Ok(())
    }

    fn chmod(&self, name: &PreparedPath, mode: u32) -> Result<()> {
        Ok(self.client.chmod(&self.task, WalkStart::Cwd, name.0.as_bytes(), mode, true)?)
    }

    fn rename(&self, from: &PreparedPath, to: &PreparedPath) -> Result<()> {
        let (from, to) = (from.0.as_bytes(), to.0.as_bytes());
        Ok(self.client.rename(
            &self.task,
            (WalkStart::Cwd, from),
            (WalkStart::Cwd, to),
            RenameFlags(0),
        )?)
    }

    fn unlink(&self, name: &PreparedPath) -> Result<()> {
        Ok(self.client.unlink(&self.task, WalkStart::Cwd, name.0.as_bytes())?)
    }

    fn open(&self, path: &str) -> Result<Box<dyn TimedFile + '_>> {
        let file = self.open(&self.name(path)?, OFlags::RDWR | OFlags::CREATE)?;
        Ok(Box::new(InProcessFile { inside: self, file }))
    }

    fn carry_out(&self, path: &str, _: u64, operations: Vec<FileOperation>) -> Result<()> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT;
        let file = self.open(&self.name(path)?, flags)?;
        in_flight::run_on_client(&self.client, &file, operations)?;
        self.client.fsync(&self.task, &file, false)?;
        Ok(file.close(&self.task)?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.client.syncfs(&self.task, &self.root)?)
    }

    fn root(&self) -> &Path {
        Path::new(OsStr::from_bytes(NAME))
    }

    fn execute(
        &self,
        plan: &WorkloadPlan,
        observer: &dyn RunObserver,
    ) -> Result<Vec<RunReport>, RunFailure> {
        defuse_wml::execute(plan, &self.workloads, RunSettings::default(), observer)
    }

    fn used_blocks(&self) -> Result<u64> {
        let found = self.client.fstatfs(&self.task, &self.root)?;
        Ok((found.blocks - found.blocks_free) * u64::from(found.frsize) / 4096)
    }
}

struct InProcessFile<'a> {
    inside: &'a InProcessFiles,
    file: Arc<FileDescription>,
}

impl TimedFile for InProcessFile<'_> {
    fn read(&mut self, at: u64, room: &mut [u8]) -> Result<usize> {
        Ok(self.inside.client.pread(&self.inside.task, &self.file, room, at)?)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let done = self.inside.client.pwrite(&self.inside.task, &self.file, bytes, at)?;
        anyhow::ensure!(done == bytes.len(), "a short write");
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(self.inside.client.fsync(&self.inside.task, &self.file, false)?)
    }
}

impl Drop for InProcessFile<'_> {
    fn drop(&mut self) {
        let _ = self.file.close(&self.inside.task);
    }
}
