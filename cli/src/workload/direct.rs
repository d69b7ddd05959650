//! A file system in this process as the target of a workload, without the kernel.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use defuse_compose::{Opened, Settings};
use defuse_direct::{At, Client, Description, How, MountArgs, Options, Stop, Task};
use defuse_fs::source::{Frontend, Threads};
use defuse_fs::{FileKind, OpenFlags};
use defuse_wml::plan::OpenFlags as Flags;
use defuse_wml::{Access, Driver, Plan, Room};
use rustix::fs::{Advice, OFlags, fadvise};

use crate::error::{Failure, Result};
use crate::sources::SOURCES;

/// `whence` of lseek(2).
const FROM_START: u32 = 0;
const FROM_END: u32 = 2;

/// A driver that calls a file system in this process through `defuse_direct`.
pub(super) struct Direct {
    client: Client,
    task: Arc<Task>,
}

impl Direct {
    /// Opens `source`, with options after commas, and mounts it for this process on the directory that
    /// all file sets of `plan` have in common.
    pub fn new(source: &OsString, plan: &Plan) -> Result<Self> {
        let target = common_directory(plan)?;
        let frontend = Frontend { threads: Threads::Application, ..Frontend::default() };
        let Opened { source, settings, fs } = SOURCES.open(source, Settings::of(frontend))?;
        let client = Client::new(Options { kernel_links: false, ..Options::default() });
        let source = source.text().to_string_lossy().into_owned();
        let args = MountArgs { read_only: settings.read_only, source, ..MountArgs::default() };
        let failed = |error: defuse_fs::Errno| {
            let target = target.display();
            Failure::Failed(format!("{} could not be mounted on {target}: {error}", args.source))
        };
        client.mount(target.as_os_str().as_bytes(), fs, &args).map_err(failed)?;
        let task = Task::of_this_process().map_err(failed)?;
        Ok(Direct { client, task: Arc::new(task) })
    }
}

/// The deepest directory above all file sets.
fn common_directory(plan: &Plan) -> Result<PathBuf> {
    let mut common: Option<PathBuf> = None;
    for set in &plan.filesets {
        let path = std::path::absolute(&set.path).map_err(Failure::failed)?;
        common = Some(match common {
            None => path,
            Some(before) => {
                before.ancestors().find(|one| path.starts_with(one)).map_or(path, Into::into)
            }
        });
    }
    common.filter(|path| path.parent().is_some()).ok_or_else(|| {
        let name = &plan.name;
        Failure::Usage(format!(
            "{name}: --direct needs all file sets in one directory other than /; set it with --dir"
        ))
    })
}

fn failed(stop: Stop) -> io::Error {
    match stop {
        Stop::Errno(errno) => errno.into(),
        Stop::Outside(_) => io::Error::other("the path is outside of the file system of --direct"),
    }
}

/// An open file, and its client.
pub(super) struct File {
    file: Arc<Description>,
    task: Arc<Task>,
}

impl Drop for File {
    fn drop(&mut self) {
        // As with close(2), whose errors the engine ignores, too.
        let _ = self.file.close(&self.task);
    }
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

impl Driver for Direct {
    type File = File;

    fn open(&self, path: &Path, access: Access, flags: Flags) -> io::Result<File> {
        let mut how = match (access.read, access.write) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        how.set(OFlags::CREATE, access.create);
        how.set(OFlags::DIRECT, flags.direct);
        how.set(OFlags::SYNC, flags.sync);
        let how = How { flags: how.bits(), mode: 0o666, ..How::default() };
        let file = self.client.open(&self.task, At::Cwd, bytes(path), how).map_err(failed)?;
        // Only the kernel reads ahead, and only in its own files.
        if let Some(backing) = file.backing().filter(|_| flags.no_readahead) {
            fadvise(backing, 0, None, Advice::Random)?;
        }
        Ok(File { file, task: Arc::clone(&self.task) })
    }

    #[inline]
    fn read(&self, file: &mut File, data: &mut [u8]) -> io::Result<usize> {
        self.client.read(&self.task, &file.file, data).map_err(failed)
    }

    #[inline]
    fn read_at(&self, file: &mut File, data: &mut [u8], offset: u64) -> io::Result<usize> {
        self.client.pread(&self.task, &file.file, data, offset).map_err(failed)
    }

    #[inline]
    fn write(&self, file: &mut File, data: &[u8]) -> io::Result<usize> {
        self.client.write(&self.task, &file.file, data).map_err(failed)
    }

    #[inline]
    fn write_at(&self, file: &mut File, data: &[u8], offset: u64) -> io::Result<usize> {
        self.client.pwrite(&self.task, &file.file, data, offset).map_err(failed)
    }

    fn rewind(&self, file: &mut File) -> io::Result<()> {
        self.client.lseek(&self.task, &file.file, 0, FROM_START).map(drop).map_err(failed)
    }

    fn seek_end(&self, file: &mut File) -> io::Result<()> {
        self.client.lseek(&self.task, &file.file, 0, FROM_END).map(drop).map_err(failed)
    }

    fn fsync(&self, file: &mut File) -> io::Result<()> {
        self.client.fsync(&self.task, &file.file, false).map_err(failed)
    }

    fn size_of(&self, file: &mut File) -> io::Result<u64> {
        self.client.fstat(&self.task, &file.file).map(|stat| stat.attr.size).map_err(failed)
    }

    fn truncate(&self, file: &mut File, size: u64) -> io::Result<()> {
        let size = i64::try_from(size).map_err(|_| defuse_fs::Errno::EFBIG)?;
        self.client.ftruncate(&self.task, &file.file, size).map_err(failed)
    }

    fn forget_pages(&self, file: &mut File) {
        // Without a file of the kernel there is no page cache to drop.
        if let Some(backing) = file.file.backing() {
            let _ = fadvise(backing, 0, None, Advice::DontNeed);
        }
    }

    fn stat(&self, path: &Path) -> io::Result<u64> {
        let stat = self.client.stat(&self.task, At::Cwd, bytes(path), true);
        stat.map(|stat| stat.attr.size).map_err(failed)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.client.unlink(&self.task, At::Cwd, bytes(path)).map_err(failed)
    }

    fn mkdir(&self, path: &Path) -> io::Result<()> {
        self.client.mkdir(&self.task, At::Cwd, bytes(path), 0o755).map_err(failed)
    }

    fn rmdir(&self, path: &Path) -> io::Result<()> {
        self.client.rmdir(&self.task, At::Cwd, bytes(path)).map_err(failed)
    }

    fn room(&self, path: &Path) -> io::Result<Option<Room>> {
        let found = self.client.statfs(&self.task, At::Cwd, bytes(path)).map_err(failed)?;
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(found.frsize));
        let room = Room { total: bytes(found.blocks), available: bytes(found.blocks_available) };
        Ok((room.total > 0).then_some(room))
    }

    fn list(&self, path: &Path, each: &mut dyn FnMut(&[u8], bool)) -> io::Result<()> {
        let how = How { flags: OpenFlags::DIRECTORY, ..How::default() };
        let directory = self.client.open(&self.task, At::Cwd, bytes(path), how).map_err(failed)?;
        for entry in self.client.read_dir(&self.task, &directory).map_err(failed)? {
            if entry.name != b"." && entry.name != b".." {
                each(&entry.name, entry.kind == FileKind::Directory);
            }
        }
        Ok(())
    }
}
