//! The directory of a case, and short forms of system calls.

use std::collections::BTreeSet;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::fs::{
    AtFlags, CWD, Dev, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, Stat, Timespec,
    Timestamps, Uid,
};
use rustix::{fs, io};

/// An empty directory for one case. All names are relative to its descriptor, so that a case can
/// also run as a user without search permission to the parent directories.
pub struct CaseDir {
    path: PathBuf,
    fd: OwnedFd,
}

/// The reason why a case cannot run here, as an error. Not a failure.
#[derive(Debug)]
pub struct SkipReason(pub String);

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SkipReason {}

/// An error with an errno that can be compared.
pub(super) trait HasErrno {
    fn errno(&self) -> Option<i32>;
}

impl HasErrno for io::Errno {
    fn errno(&self) -> Option<i32> {
        Some(self.raw_os_error())
    }
}

impl HasErrno for std::io::Error {
    fn errno(&self) -> Option<i32> {
        self.raw_os_error()
    }
}

/// Succeeds if `result` is the error `wanted`.
pub(super) fn expect_error<T, E: HasErrno + fmt::Debug>(
    result: std::result::Result<T, E>,
    wanted: io::Errno,
) -> Result<()> {
    match result {
        Err(error) if error.errno() == Some(wanted.raw_os_error()) => Ok(()),
        Err(error) => anyhow::bail!("got {error:?}, expected {wanted:?}"),
        Ok(_) => anyhow::bail!("succeeded, expected {wanted:?}"),
    }
}

/// Converts an error that means "not supported" to a [`SkipReason`] for `what`.
pub(super) fn skip_unsupported<T>(result: io::Result<T>, what: &str) -> Result<T> {
    match result {
        Err(io::Errno::OPNOTSUPP | io::Errno::NOSYS) => {
            Err(SkipReason(format!("no {what} here")).into())
        }
        other => Ok(other?),
    }
}

/// Calls `run` as another user without capabilities, with the groups `gid` and `groups`, on a new
/// thread: on Linux each thread has its own credentials.
pub(super) fn as_user<T: Send>(
    uid: u32,
    gid: u32,
    groups: &[u32],
    run: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let groups: Vec<Gid> = groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            rustix::thread::set_thread_groups(&groups)?;
            rustix::thread::set_thread_res_gid(Some(gid), Some(gid), Some(gid))?;
            rustix::thread::set_thread_res_uid(Some(uid), Some(uid), Some(uid))?;
            run()
        });
        thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("panicked")))
    })
}

pub(super) fn mode(bits: u32) -> Mode {
    Mode::from_bits_retain(bits)
}

impl CaseDir {
    /// Creates the directory `path` with permissions for all users.
    pub fn new(path: &Path) -> Result<CaseDir> {
        let show = || path.display().to_string();
        fs::mkdirat(CWD, path, mode(0o777)).with_context(show)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::openat(CWD, path, flags, Mode::empty()).with_context(show)?;
        fs::fchmod(&fd, mode(0o777))?;
        Ok(CaseDir { path: path.to_owned(), fd })
    }

    /// The path of `name` in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub(super) fn open(&self, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        self.open_mode(name, flags, 0o644)
    }

    pub(super) fn open_mode(&self, name: &str, flags: OFlags, bits: u32) -> io::Result<OwnedFd> {
        fs::openat(&self.fd, name, flags | OFlags::CLOEXEC, mode(bits))
    }

    /// Succeeds if `name` can be opened.
    pub(super) fn expect_open(&self, name: &str, flags: OFlags) -> Result<()> {
        Ok(self.open(name, flags).map(drop)?)
    }

    /// Creates a file with the contents `bytes`. Returns it open for reading and writing.
    pub(super) fn file(&self, name: &str, bytes: &[u8]) -> Result<OwnedFd> {
        let fd = self.open(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        write_all(&fd, 0, bytes)?;
        Ok(fd)
    }

    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>> {
        read_all(&self.open(name, OFlags::RDONLY)?)
    }

    /// lstat(2).
    pub(super) fn stat(&self, name: &str) -> io::Result<Stat> {
        fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Permission bits, 0 to 0o7777.
    pub(super) fn perm(&self, name: &str) -> io::Result<u32> {
        Ok(self.stat(name)?.st_mode & 0o7777)
    }

    pub(super) fn nlink(&self, name: &str) -> io::Result<u64> {
        #[allow(clippy::unnecessary_cast)] // The width differs between architectures.
        Ok(self.stat(name)?.st_nlink as u64)
    }

    pub(super) fn exists(&self, name: &str) -> bool {
        self.stat(name).is_ok()
    }

    pub(super) fn mkdir(&self, name: &str) -> io::Result<()> {
        fs::mkdirat(&self.fd, name, mode(0o755))
    }

    pub(super) fn mknod(&self, name: &str, kind: FileType, dev: Dev) -> io::Result<()> {
        fs::mknodat(&self.fd, name, kind, mode(0o644), dev)
    }

    pub(super) fn symlink(&self, target: &str, name: &str) -> io::Result<()> {
        fs::symlinkat(target, &self.fd, name)
    }

    pub(super) fn link(&self, old: &str, new: &str) -> io::Result<()> {
        fs::linkat(&self.fd, old, &self.fd, new, AtFlags::empty())
    }

    pub(super) fn unlink(&self, name: &str) -> io::Result<()> {
        fs::unlinkat(&self.fd, name, AtFlags::empty())
    }

    pub(super) fn rmdir(&self, name: &str) -> io::Result<()> {
        fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR)
    }

    pub(super) fn rename(&self, old: &str, new: &str) -> io::Result<()> {
        fs::renameat(&self.fd, old, &self.fd, new)
    }

    pub(super) fn rename_with(&self, old: &str, new: &str, flags: RenameFlags) -> io::Result<()> {
        fs::renameat_with(&self.fd, old, &self.fd, new, flags)
    }

    pub(super) fn chmod(&self, name: &str, bits: u32) -> io::Result<()> {
        fs::chmodat(&self.fd, name, mode(bits), AtFlags::empty())
    }

    /// lchown(2); `None` leaves an id unchanged.
    pub(super) fn chown(&self, name: &str, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        fs::chownat(&self.fd, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// utimensat(2) with access and modification time, without following a link.
    pub(super) fn utimens(&self, name: &str, atime: Timespec, mtime: Timespec) -> io::Result<()> {
        let times = Timestamps { last_access: atime, last_modification: mtime };
        fs::utimensat(&self.fd, name, &times, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// The names in the directory `name`, without `.` and `..`. Fails if a name occurs twice.
    pub(super) fn names(&self, name: &str) -> Result<BTreeSet<String>> {
        let fd = self.open(name, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let listed = list(&fd)?;
        let set: BTreeSet<String> = listed
            .iter()
            .map(|item| item.name.clone())
            .filter(|name| name != "." && name != "..")
            .collect();
        let dots = listed.len() - set.len();
        anyhow::ensure!(dots == 2, "{dots} of the listed names are `.`, `..` or there twice");
        Ok(set)
    }
}

/// One entry from getdents(2).
pub(super) struct GetdentsEntry {
    pub name: String,
    pub kind: FileType,
    pub ino: u64,
    /// The position after this entry.
    pub next: u64,
}

/// All entries from the position of `fd` to the end.
pub(super) fn list(fd: &OwnedFd) -> Result<Vec<GetdentsEntry>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut listing = RawDir::new(fd, &mut buffer);
    let mut all = Vec::new();
    while let Some(entry) = listing.next() {
        let entry = entry?;
        all.push(GetdentsEntry {
            name: entry.file_name().to_string_lossy().into_owned(),
            kind: entry.file_type(),
            ino: entry.ino(),
            next: entry.next_entry_cookie(),
        });
    }
    Ok(all)
}

/// Writes all of `bytes` at `offset`.
pub(super) fn write_all(fd: &OwnedFd, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let count = io::pwrite(fd, &bytes[done..], offset + done as u64)?;
        anyhow::ensure!(count > 0, "a write of nothing");
        done += count;
    }
    Ok(())
}

/// Reads up to `len` bytes at `offset`.
pub(super) fn read_at(fd: &OwnedFd, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; len];
    let mut done = 0;
    while done < len {
        match io::pread(fd, &mut bytes[done..], offset + done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// Reads a whole file.
pub(super) fn read_all(fd: &OwnedFd) -> Result<Vec<u8>> {
    let size = fs::fstat(fd)?.st_size as usize;
    read_at(fd, 0, size + 1)
}
