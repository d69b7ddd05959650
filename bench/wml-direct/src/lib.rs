//! Workloads on a file system in this process, without the kernel: the [`WorkloadDriver`] that
//! calls the in-process client ([`defuse_direct`]).
//!
//! It mounts nothing: the caller mounts file systems in the [`DirectClient`], and names them in the
//! paths of the workload.

#![forbid(unsafe_code)]

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use defuse_direct::{CallError, ClientTask, DirectClient, FileDescription, OpenHow, WalkStart};
use defuse_fs::{FileKind, OpenFlags};
use defuse_wml::plan::FlowopOpenFlags as Flags;
use defuse_wml::{OpenAccess, SpaceFigures, WorkloadDriver};
use rustix::fs::{Advice, OFlags, fadvise};

/// `whence` of lseek(2).
const FROM_START: u32 = 0;
const FROM_END: u32 = 2;

/// A driver that calls the file systems that a client has mounted in this process.
pub struct DirectDriver {
    client: Arc<DirectClient>,
    task: Arc<ClientTask>,
}

impl DirectDriver {
    /// A driver for the mounts of `client`, with the rights of this process.
    ///
    /// # Errors
    ///
    /// Fails if the credentials of this process cannot be read.
    pub fn new(client: Arc<DirectClient>) -> defuse_fs::Result<DirectDriver> {
        Ok(DirectDriver { client, task: Arc::new(ClientTask::for_this_process()?) })
    }
}

fn to_io_error(stop: CallError) -> io::Error {
    match stop {
        CallError::Errno(errno) => errno.into(),
        CallError::Outside(_) => {
            io::Error::other("the path is outside of the mounts of this process")
        }
    }
}

/// An open file.
pub struct DirectFile {
    file: Arc<FileDescription>,
    task: Arc<ClientTask>,
}

impl Drop for DirectFile {
    fn drop(&mut self) {
        // The error is ignored, as with close(2), whose errors the engine ignores, too.
        let _ = self.file.close(&self.task);
    }
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

impl WorkloadDriver for DirectDriver {
    type File = DirectFile;

    fn open(&self, path: &Path, access: OpenAccess, flags: Flags) -> io::Result<DirectFile> {
        let mut how = match (access.read, access.write) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        how.set(OFlags::CREATE, access.create);
        how.set(OFlags::DIRECT, flags.direct);
        how.set(OFlags::SYNC, flags.sync);
        let how = OpenHow { flags: how.bits(), mode: 0o666, ..OpenHow::default() };
        let file =
            self.client.open(&self.task, WalkStart::Cwd, bytes(path), how).map_err(to_io_error)?;
        // Only the kernel reads ahead, and only in its own files.
        if let Some(backing) = file.backing().filter(|_| flags.no_readahead) {
            fadvise(backing, 0, None, Advice::Random)?;
        }
        Ok(DirectFile { file, task: Arc::clone(&self.task) })
    }

    #[inline]
    fn read(&self, file: &mut DirectFile, data: &mut [u8]) -> io::Result<usize> {
        self.client.read(&self.task, &file.file, data).map_err(to_io_error)
    }

    #[inline]
    fn read_at(&self, file: &mut DirectFile, data: &mut [u8], offset: u64) -> io::Result<usize> {
        self.client.pread(&self.task, &file.file, data, offset).map_err(to_io_error)
    }

    #[inline]
    fn write(&self, file: &mut DirectFile, data: &[u8]) -> io::Result<usize> {
        self.client.write(&self.task, &file.file, data).map_err(to_io_error)
    }

    #[inline]
    fn write_at(&self, file: &mut DirectFile, data: &[u8], offset: u64) -> io::Result<usize> {
        self.client.pwrite(&self.task, &file.file, data, offset).map_err(to_io_error)
    }

    fn rewind(&self, file: &mut DirectFile) -> io::Result<()> {
        self.client.lseek(&self.task, &file.file, 0, FROM_START).map(drop).map_err(to_io_error)
    }

    fn seek_end(&self, file: &mut DirectFile) -> io::Result<()> {
        self.client.lseek(&self.task, &file.file, 0, FROM_END).map(drop).map_err(to_io_error)
    }

    fn fsync(&self, file: &mut DirectFile) -> io::Result<()> {
        self.client.fsync(&self.task, &file.file, false).map_err(to_io_error)
    }

    fn size_of(&self, file: &mut DirectFile) -> io::Result<u64> {
        self.client.fstat(&self.task, &file.file).map(|stat| stat.attr.size).map_err(to_io_error)
    }

    fn truncate(&self, file: &mut DirectFile, size: u64) -> io::Result<()> {
        let size = i64::try_from(size).map_err(|_| defuse_fs::Errno::EFBIG)?;
        self.client.ftruncate(&self.task, &file.file, size).map_err(to_io_error)
    }

    fn forget_pages(&self, file: &mut DirectFile) {
        // Without a file of the kernel there is no page cache to drop.
        if let Some(backing) = file.file.backing() {
            let _ = fadvise(backing, 0, None, Advice::DontNeed);
        }
    }

    fn stat(&self, path: &Path) -> io::Result<u64> {
        let stat = self.client.stat(&self.task, WalkStart::Cwd, bytes(path), true);
        stat.map(|stat| stat.attr.size).map_err(to_io_error)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.client.unlink(&self.task, WalkStart::Cwd, bytes(path)).map_err(to_io_error)
    }

    fn mkdir(&self, path: &Path) -> io::Result<()> {
        self.client.mkdir(&self.task, WalkStart::Cwd, bytes(path), 0o755).map_err(to_io_error)
    }

    fn rmdir(&self, path: &Path) -> io::Result<()> {
        self.client.rmdir(&self.task, WalkStart::Cwd, bytes(path)).map_err(to_io_error)
    }

    fn free_space(&self, path: &Path) -> io::Result<Option<SpaceFigures>> {
        let found =
            self.client.statfs(&self.task, WalkStart::Cwd, bytes(path)).map_err(to_io_error)?;
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(found.frsize));
        let room =
            SpaceFigures { total: bytes(found.blocks), available: bytes(found.blocks_available) };
        Ok((room.total > 0).then_some(room))
    }

    fn list(&self, path: &Path, each: &mut dyn FnMut(&[u8], bool)) -> io::Result<()> {
        let how = OpenHow { flags: OpenFlags::DIRECTORY, ..OpenHow::default() };
        let directory =
            self.client.open(&self.task, WalkStart::Cwd, bytes(path), how).map_err(to_io_error)?;
        for entry in self.client.read_dir(&self.task, &directory).map_err(to_io_error)? {
            if entry.name != b"." && entry.name != b".." {
                each(&entry.name, entry.kind == FileKind::Directory);
            }
        }
        Ok(())
    }
}
