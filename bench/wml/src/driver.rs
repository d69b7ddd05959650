//! The interface between flowops and a file system.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{self, AtFlags, CWD, Mode, OFlags, SeekFrom};
use rustix::io::retry_on_intr;

use crate::plan::FlowopOpenFlags;

/// Access mode of open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenAccess {
    /// Open for reading.
    pub read: bool,
    /// Open for writing.
    pub write: bool,
    /// Create the file if it does not exist (O_CREAT without O_EXCL).
    pub create: bool,
}

/// Capacity of a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceFigures {
    /// Total size.
    pub total: u64,
    /// Available space.
    pub available: u64,
}

/// The operations that flowops need of a file system. The engine uses nothing else.
///
/// Each method is one system call (or its equivalent without the kernel), except where noted
/// otherwise. All threads of a run call it concurrently. It returns the errors of the call.
pub trait WorkloadDriver: Sync {
    /// An open file with its own position. Dropping it closes it.
    type File: Send;

    /// open(2), with mode 0666 before the umask.
    fn open(
        &self,
        path: &Path,
        access: OpenAccess,
        flags: FlowopOpenFlags,
    ) -> io::Result<Self::File>;
    /// read(2) at the file position, which advances. 0 means the end of the file.
    fn read(&self, file: &mut Self::File, data: &mut [u8]) -> io::Result<usize>;
    /// pread(2).
    fn read_at(&self, file: &mut Self::File, data: &mut [u8], offset: u64) -> io::Result<usize>;
    /// write(2) at the file position, which advances. May write less.
    fn write(&self, file: &mut Self::File, data: &[u8]) -> io::Result<usize>;
    /// pwrite(2). May write less.
    fn write_at(&self, file: &mut Self::File, data: &[u8], offset: u64) -> io::Result<usize>;
    /// lseek(2) to the beginning.
    fn rewind(&self, file: &mut Self::File) -> io::Result<()>;
    /// lseek(2) to the end.
    fn seek_end(&self, file: &mut Self::File) -> io::Result<()>;
    /// fsync(2).
    fn fsync(&self, file: &mut Self::File) -> io::Result<()>;
    /// fstat(2): the size in bytes.
    fn size_of(&self, file: &mut Self::File) -> io::Result<u64>;
    /// ftruncate(2).
    fn truncate(&self, file: &mut Self::File, size: u64) -> io::Result<()>;
    /// Drops the pages of the file from the page cache, posix_fadvise(2). A hint only.
    fn forget_pages(&self, file: &mut Self::File);
    /// stat(2): the size in bytes.
    fn stat(&self, path: &Path) -> io::Result<u64>;
    /// unlink(2).
    fn unlink(&self, path: &Path) -> io::Result<()>;
    /// mkdir(2), mode 0755 before the umask.
    fn mkdir(&self, path: &Path) -> io::Result<()>;
    /// rmdir(2).
    fn rmdir(&self, path: &Path) -> io::Result<()>;
    /// statvfs(2); `None` if unknown.
    fn free_space(&self, path: &Path) -> io::Result<Option<SpaceFigures>> {
        let _ = path;
        Ok(None)
    }
    /// Calls `each` with every entry except `.` and `..`, and true if it is a directory: open(2),
    /// getdents64(2) until the end, close(2).
    fn list(&self, path: &Path, each: &mut dyn FnMut(&[u8], bool)) -> io::Result<()>;
}

/// The driver that makes system calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemCallDriver;

impl WorkloadDriver for SystemCallDriver {
    type File = OwnedFd;

    fn open(&self, path: &Path, access: OpenAccess, flags: FlowopOpenFlags) -> io::Result<OwnedFd> {
        let mut how = match (access.read, access.write) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        } | OFlags::CLOEXEC;
        how.set(OFlags::CREATE, access.create);
        how.set(OFlags::DIRECT, flags.direct);
        how.set(OFlags::SYNC, flags.sync);
        let mode = Mode::from_raw_mode(0o666);
        let file = retry_on_intr(|| fs::open(path, how, mode))?;
        if flags.no_readahead {
            fs::fadvise(&file, 0, None, fs::Advice::Random)?;
        }
        Ok(file)
    }

    #[inline]
    fn read(&self, file: &mut OwnedFd, data: &mut [u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::read(&*file, &mut *data))?)
    }

    #[inline]
    fn read_at(&self, file: &mut OwnedFd, data: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::pread(&*file, &mut *data, offset))?)
    }

    #[inline]
    fn write(&self, file: &mut OwnedFd, data: &[u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::write(&*file, data))?)
    }

    #[inline]
    fn write_at(&self, file: &mut OwnedFd, data: &[u8], offset: u64) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::pwrite(&*file, data, offset))?)
    }

    fn rewind(&self, file: &mut OwnedFd) -> io::Result<()> {
        fs::seek(&*file, SeekFrom::Start(0))?;
        Ok(())
    }

    fn seek_end(&self, file: &mut OwnedFd) -> io::Result<()> {
        fs::seek(&*file, SeekFrom::End(0))?;
        Ok(())
    }

    fn fsync(&self, file: &mut OwnedFd) -> io::Result<()> {
        Ok(retry_on_intr(|| fs::fsync(&*file))?)
    }

    fn size_of(&self, file: &mut OwnedFd) -> io::Result<u64> {
        Ok(u64::try_from(fs::fstat(&*file)?.st_size).unwrap_or(0))
    }

    fn truncate(&self, file: &mut OwnedFd, size: u64) -> io::Result<()> {
        Ok(retry_on_intr(|| fs::ftruncate(&*file, size))?)
    }

    fn forget_pages(&self, file: &mut OwnedFd) {
        // A file system without a page cache has nothing to drop.
        let _ = fs::fadvise(&*file, 0, None, fs::Advice::DontNeed);
    }

    fn stat(&self, path: &Path) -> io::Result<u64> {
        let found = retry_on_intr(|| fs::statat(CWD, path, AtFlags::empty()))?;
        Ok(u64::try_from(found.st_size).unwrap_or(0))
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        Ok(fs::unlink(path)?)
    }

    fn mkdir(&self, path: &Path) -> io::Result<()> {
        Ok(fs::mkdir(path, Mode::from_raw_mode(0o755))?)
    }

    fn rmdir(&self, path: &Path) -> io::Result<()> {
        Ok(fs::rmdir(path)?)
    }

    fn free_space(&self, path: &Path) -> io::Result<Option<SpaceFigures>> {
        let found = fs::statvfs(path)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        let room = SpaceFigures { total: bytes(found.f_blocks), available: bytes(found.f_bavail) };
        // Some file systems, such as network file systems, do not report it.
        Ok((room.total > 0).then_some(room))
    }

    fn list(&self, path: &Path, each: &mut dyn FnMut(&[u8], bool)) -> io::Result<()> {
        let how = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = retry_on_intr(|| fs::open(path, how, Mode::empty()))?;
        let mut buffer = Vec::with_capacity(32 << 10);
        let mut entries = fs::RawDir::new(directory, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                each(name, entry.file_type() == fs::FileType::Directory);
            }
        }
        Ok(())
    }
}
