//! The file systems that lie below the source, each with a descriptor by which its file handles
//! are opened.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use defuse_fs::{Denied, Errno, FileKind, Result};
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};

use crate::handle::{Handle, fs_type, is_local};
use crate::lower::{MountId, OrErrno, ProcPath, Stat};
use crate::options::{FileHandles, Granted};
use crate::sys;

/// How many mounts (and btrfs subvolumes) can be known at once: [`GROUPS`] of [`GROUP`].
const MAX_MOUNTS: usize = GROUPS * GROUP;
const GROUPS: usize = 64;
const GROUP: usize = 16;

/// One mount, or one subvolume of it: wherever mount id or device number differ.
pub(crate) struct Mount {
    pub(crate) id: MountId,
    /// Open for reading, as open_by_handle_at(2) wants it. `None` for the mount of something other
    /// than a directory. It keeps the mount busy for umount(8).
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) f_type: u64,
    /// File handles work.
    pub(crate) handles: bool,
    /// What it denies to the users of its files.
    pub(crate) denied: Denied,
    /// A handle can be made of a number alone ([`Handle::ext4`]), which spares a walk to the file.
    pub(crate) by_number: bool,
}

impl Mount {
    /// The mount that the directory `dir` lies on. With handles it is an error where they do not
    /// work, otherwise they are not used then.
    pub(crate) fn open(dir: BorrowedFd<'_>, want: FileHandles) -> Result<Self, MountError> {
        let stat = Stat::of(dir)?;
        let id = stat.mount_id();
        let (f_type, denied) = facts(dir)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(dir, c".", flags, Mode::empty()).or_errno()?;
        let works = probe(fd.as_fd());
        match (want, works) {
            // That says nothing about handles; the caller makes room and tries again.
            (_, Err(errno @ (Errno::EMFILE | Errno::ENFILE))) => Err(MountError::Other(errno)),
            (FileHandles::On, Err(errno)) => Err(MountError::NoHandles(errno)),
            (FileHandles::Off, _) | (_, Err(_)) => {
                let (handles, by_number) = (false, false);
                Ok(Mount { id, fd: Some(fd), f_type, handles, denied, by_number })
            }
            (_, Ok(())) => {
                let by_number = f_type == fs_type::EXT && opens_by_number(fd.as_fd(), &stat);
                Ok(Mount { id, fd: Some(fd), f_type, handles: true, denied, by_number })
            }
        }
    }

    /// True where the birth time of an inode never changes. Not so on overlayfs (copy up), and not
    /// to be relied on where a server answers.
    pub(crate) fn birth_is_constant(&self) -> bool {
        use fs_type::{BCACHEFS, BTRFS, EXT, F2FS, TMPFS, XFS};
        [EXT, TMPFS, XFS, BTRFS, F2FS, BCACHEFS].contains(&self.f_type)
    }

    /// True where close(2) has nothing to report.
    pub(crate) fn is_local(&self) -> bool {
        is_local(self.f_type)
    }
}

/// Why a mount cannot be used.
pub(crate) enum MountError {
    NoHandles(Errno),
    Other(Errno),
}

impl From<Errno> for MountError {
    fn from(errno: Errno) -> Self {
        MountError::Other(errno)
    }
}

/// A handle made and opened again shows at once whether the file system and the process can.
fn probe(dir: BorrowedFd<'_>) -> Result<()> {
    let handle = sys::name_to_handle(dir, c"")?;
    sys::open_by_handle(dir, &handle, OFlags::PATH.bits()).map(drop)
}

/// Whether `dir`, the inode of `stat`, is found by its number alone.
fn opens_by_number(dir: BorrowedFd<'_>, stat: &Stat) -> bool {
    let open = |handle| sys::open_by_handle(dir, &handle, OFlags::PATH.bits()).ok();
    let found = Handle::ext4(stat.ino(), 0).and_then(open);
    found.and_then(|fd| Stat::of(fd.as_fd()).ok()).is_some_and(|found| found.ino() == stat.ino())
}

/// The type of the file system, and what its mount denies.
fn facts(fd: BorrowedFd<'_>) -> Result<(u64, Denied)> {
    let stat = rustix::fs::fstatfs(fd).or_errno()?;
    // The kernel's number has 32 bits; some architectures sign-extend it.
    let f_type = stat.f_type as u64 & 0xffff_ffff;
    let flags = StatVfsMountFlags::from_bits_retain(stat.f_flags as u64);
    let denied = Denied {
        suid: flags.contains(StatVfsMountFlags::NOSUID),
        dev: flags.contains(StatVfsMountFlags::NODEV),
        exec: flags.contains(StatVfsMountFlags::NOEXEC),
    };
    Ok((f_type, denied))
}

type Group = Box<[OnceLock<Mount>]>;

/// All mounts that were met. They are never removed, so that an index stays true and reading takes
/// no lock.
pub(crate) struct MountTable {
    /// In groups, because nearly always there is one mount.
    groups: Box<[OnceLock<Group>]>,
    len: Mutex<usize>,
    want: FileHandles,
    granted: Granted,
    /// Said once; users could fill the log otherwise.
    warned: AtomicBool,
}

impl MountTable {
    pub(crate) fn new(first: Mount, want: FileHandles, granted: Granted) -> Self {
        // Handles that are asked for are asked for at the source; what is mounted below it may be
        // any file system.
        let want = if want == FileHandles::Off { want } else { FileHandles::Auto };
        let groups = (0..GROUPS).map(|_| OnceLock::new()).collect();
        let table = MountTable {
            groups,
            len: Mutex::new(1),
            want,
            granted,
            warned: AtomicBool::new(false),
        };
        if let Some(place) = table.place(0) {
            let _ = place.set(first);
        }
        table
    }

    /// Where the mount of this index belongs; `None` beyond the table.
    fn place(&self, index: usize) -> Option<&OnceLock<Mount>> {
        let group = self.groups.get(index / GROUP)?;
        let group = group.get_or_init(|| (0..GROUP).map(|_| OnceLock::new()).collect());
        group.get(index % GROUP)
    }

    pub(crate) fn get(&self, index: u32) -> Result<&Mount> {
        let index = index as usize;
        let group = self.groups.get(index / GROUP).and_then(OnceLock::get).ok_or(Errno::EIO)?;
        group[index % GROUP].get().ok_or(Errno::EIO)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Mount> {
        let groups = self.groups.iter().map_while(OnceLock::get);
        groups.flat_map(|group| group.iter()).map_while(OnceLock::get)
    }

    /// The index of the mount `id`, which is most often that of the parent, `likely`.
    pub(crate) fn find(&self, id: MountId, likely: u32) -> Option<u32> {
        if self.get(likely).is_ok_and(|mount| mount.id == id) {
            return Some(likely);
        }
        self.iter().position(|mount| mount.id == id).map(|index| index as u32)
    }

    /// The index of the mount that `fd` lies on, which is entered where it is new.
    pub(crate) fn enter(&self, fd: BorrowedFd<'_>, stat: &Stat) -> Result<u32> {
        let mount = if stat.kind()? == FileKind::Directory {
            Mount::open(fd, self.want).map_err(|error| match error {
                MountError::NoHandles(errno) | MountError::Other(errno) => errno,
            })?
        } else {
            let (id, (f_type, denied)) = (stat.mount_id(), facts(fd)?);
            Mount { id, fd: None, f_type, handles: false, denied, by_number: false }
        };
        self.check(fd, mount.denied)?;
        let mut len = self.len.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = self.find(mount.id, 0) {
            return Ok(index);
        }
        let index = *len;
        let place = self.place(index).ok_or_else(|| {
            log::error!("more than {MAX_MOUNTS} file systems are mounted below the source");
            Errno::ENFILE
        })?;
        let _ = place.set(mount);
        *len += 1;
        Ok(index as u32)
    }
}

impl MountTable {
    /// `EACCES` for a mount below the source whose files must not have the effects that the frontend
    /// gives all of them: one mount of a frontend has one set of flags.
    fn check(&self, fd: BorrowedFd<'_>, denied: Denied) -> Result<()> {
        let flag = match (self.granted.suid && denied.suid, self.granted.dev && denied.dev) {
            (true, _) => "suid",
            (_, true) => "dev",
            _ => return Ok(()),
        };
        if self.warned.swap(true, Ordering::Relaxed) {
            return Err(Errno::EACCES);
        }
        let path = rustix::fs::readlink(ProcPath::new(fd).as_c_str(), Vec::new());
        let path = path.unwrap_or_default();
        let path = path.to_string_lossy();
        log::warn!(
            "{path} is mounted no{flag} and cannot be served with {flag}: leave the option {flag} \
             out, or serve it by itself"
        );
        Err(Errno::EACCES)
    }
}
