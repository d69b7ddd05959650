//! The file systems below the source, each with a descriptor for opening file handles.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use defuse_fs::source::GrantedEffects;
use defuse_fs::{Errno, FileKind, Result, SourceRestrictions};
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};

use crate::handle::{fs_type, is_local};
use crate::lower::{MountId, OrErrno, ProcPath, StatxResult};
use crate::options::FileHandles;
use crate::sys;

/// Maximum number of mounts (and btrfs subvolumes): [`GROUPS`] of [`GROUP`].
const MAX_MOUNTS: usize = GROUPS * GROUP;
const GROUPS: usize = 64;
const GROUP: usize = 16;

/// One mount, or one subvolume of a mount: a pair of mount id and device number.
pub(crate) struct LowerMount {
    pub(crate) id: MountId,
    /// Open for reading, as open_by_handle_at(2) requires. `None` for a mount below the source (`foreign.rs`).
    pub(crate) fd: Option<OwnedFd>,
    /// It is mounted below the source: a descriptor on it keeps it busy for umount(8).
    pub(crate) is_foreign: bool,
    pub(crate) f_type: u64,
    /// File handles work on this mount.
    pub(crate) handles: bool,
    /// The mount options that restrict its files.
    pub(crate) denied: SourceRestrictions,
    /// Its files can have access lists.
    pub(crate) has_acls: bool,
}

impl LowerMount {
    /// The mount of the directory `dir`. If file handles do not work, that is an error with
    /// [`FileHandles::On`]; otherwise they are not used.
    pub(crate) fn open(dir: BorrowedFd<'_>, want: FileHandles) -> Result<Self, LowerMountError> {
        let id = StatxResult::of(dir)?.mount_id();
        let (f_type, denied) = facts(dir)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(dir, c".", flags, Mode::empty()).or_errno()?;
        let works = probe(fd.as_fd());
        let has_acls = has_acls(dir);
        let (fd, is_foreign) = (Some(fd), false);
        let mount = LowerMount { id, fd, is_foreign, f_type, handles: true, denied, has_acls };
        match (want, works) {
            // A lack of descriptors does not show whether handles work. The caller makes room and retries.
            (_, Err(errno @ (Errno::EMFILE | Errno::ENFILE))) => Err(LowerMountError::Other(errno)),
            (FileHandles::On, Err(errno)) => Err(LowerMountError::NoHandles(errno)),
            (FileHandles::Off, _) | (_, Err(_)) => Ok(LowerMount { handles: false, ..mount }),
            (_, Ok(())) => Ok(mount),
        }
    }

    /// True if the birth time of an inode never changes. It changes on overlayfs (copy up), and a
    /// network file system cannot guarantee it.
    pub(crate) fn birth_is_constant(&self) -> bool {
        use fs_type::{BCACHEFS, BTRFS, EXT, F2FS, TMPFS, XFS};
        [EXT, TMPFS, XFS, BTRFS, F2FS, BCACHEFS].contains(&self.f_type)
    }

    /// True if close(2) reports no errors.
    pub(crate) fn is_local(&self) -> bool {
        is_local(self.f_type)
    }
}

/// The reason why a mount cannot be used.
pub(crate) enum LowerMountError {
    NoHandles(Errno),
    Other(Errno),
}

impl From<Errno> for LowerMountError {
    fn from(errno: Errno) -> Self {
        LowerMountError::Other(errno)
    }
}

/// Makes a handle and opens it, to check that the file system and the process can do it.
fn probe(dir: BorrowedFd<'_>) -> Result<()> {
    let handle = sys::name_to_handle(dir, c"")?;
    sys::open_by_handle(dir, &handle, OFlags::PATH.bits()).map(drop)
}

/// The type of the file system, and the restrictions of its mount.
fn facts(fd: BorrowedFd<'_>) -> Result<(u64, SourceRestrictions)> {
    let stat = rustix::fs::fstatfs(fd).or_errno()?;
    // The kernel's number has 32 bits; some architectures sign-extend it.
    let f_type = stat.f_type as u64 & 0xffff_ffff;
    let flags = StatVfsMountFlags::from_bits_retain(stat.f_flags as u64);
    let denied = SourceRestrictions {
        suid: flags.contains(StatVfsMountFlags::NOSUID),
        dev: flags.contains(StatVfsMountFlags::NODEV),
        exec: flags.contains(StatVfsMountFlags::NOEXEC),
    };
    Ok((f_type, denied))
}

/// True if the file system of `fd` supports POSIX ACLs.
fn has_acls(fd: BorrowedFd<'_>) -> bool {
    let path = ProcPath::new(fd);
    let answer = rustix::fs::getxattr_query(path.as_c_str(), c"system.posix_acl_access");
    !matches!(answer, Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS))
}

type MountGroup = Box<[OnceLock<LowerMount>]>;

/// All mounts that were seen. They are never removed, so that an index stays valid and reading
/// takes no lock.
pub(crate) struct MountTable {
    /// In groups, because there is nearly always only one mount.
    groups: Box<[OnceLock<MountGroup>]>,
    len: Mutex<usize>,
    want: FileHandles,
    granted: GrantedEffects,
    /// Numbers of inodes may change on one of the mounts.
    are_numbers_changing: AtomicBool,
    /// The warning is printed once; otherwise users could fill the log.
    warned: AtomicBool,
}

impl MountTable {
    pub(crate) fn new(first: LowerMount, want: FileHandles, granted: GrantedEffects) -> Self {
        // The setting On is checked for the source only. File systems mounted below it may be of
        // any type.
        let want = if want == FileHandles::Off { want } else { FileHandles::Auto };
        let groups = (0..GROUPS).map(|_| OnceLock::new()).collect();
        let are_numbers_changing = AtomicBool::new(first.changes_numbers());
        let table = MountTable {
            groups,
            len: Mutex::new(1),
            want,
            granted,
            are_numbers_changing,
            warned: AtomicBool::new(false),
        };
        if let Some(place) = table.place(0) {
            let _ = place.set(first);
        }
        table
    }

    /// The place of the mount with this index; `None` beyond the table.
    fn place(&self, index: usize) -> Option<&OnceLock<LowerMount>> {
        let group = self.groups.get(index / GROUP)?;
        let group = group.get_or_init(|| (0..GROUP).map(|_| OnceLock::new()).collect());
        group.get(index % GROUP)
    }

    pub(crate) fn get(&self, index: u32) -> Result<&LowerMount> {
        let index = index as usize;
        let group = self.groups.get(index / GROUP).and_then(OnceLock::get).ok_or(Errno::EIO)?;
        group[index % GROUP].get().ok_or(Errno::EIO)
    }

    /// True if numbers of inodes may change on one of the mounts.
    pub(crate) fn are_numbers_changing(&self) -> bool {
        self.are_numbers_changing.load(Ordering::Relaxed)
    }

    /// True if the tree has more than one mount or subvolume.
    pub(crate) fn are_several(&self) -> bool {
        self.get(1).is_ok()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &LowerMount> {
        let groups = self.groups.iter().map_while(OnceLock::get);
        groups.flat_map(|group| group.iter()).map_while(OnceLock::get)
    }

    /// The index of the mount `id`, which is usually `likely`, the index of the parent's mount.
    pub(crate) fn find(&self, id: MountId, likely: u32) -> Option<u32> {
        if self.get(likely).is_ok_and(|mount| mount.id == id) {
            return Some(likely);
        }
        self.iter().position(|mount| mount.id == id).map(|index| index as u32)
    }

    /// The index of the mount of `fd`. A new mount is added, and its root is returned if it is foreign.
    pub(crate) fn enter(
        &self,
        fd: BorrowedFd<'_>,
        stat: &StatxResult,
    ) -> Result<(u32, Option<OwnedFd>)> {
        let mut mount = if stat.kind()? == FileKind::Directory {
            LowerMount::open(fd, self.want).map_err(|error| match error {
                LowerMountError::NoHandles(errno) | LowerMountError::Other(errno) => errno,
            })?
        } else {
            let (id, (f_type, denied)) = (stat.mount_id(), facts(fd)?);
            let has_acls = has_acls(fd);
            let (fd, is_foreign) = (None, true);
            LowerMount { id, fd, is_foreign, f_type, handles: false, denied, has_acls }
        };
        // A subvolume of btrfs is on the mount of the source.
        mount.is_foreign = mount.id.mount != self.get(0)?.id.mount;
        let root = if mount.is_foreign { mount.fd.take() } else { None };
        self.check(fd, mount.denied)?;
        let mut len = self.len.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = self.find(mount.id, 0) {
            return Ok((index, root));
        }
        let index = *len;
        let place = self.place(index).ok_or_else(|| {
            log::error!("more than {MAX_MOUNTS} file systems are mounted below the source");
            Errno::ENFILE
        })?;
        if mount.changes_numbers() {
            self.are_numbers_changing.store(true, Ordering::Relaxed);
        }
        let _ = place.set(mount);
        *len += 1;
        Ok((index as u32, root))
    }
}

impl MountTable {
    /// Fails with `EACCES` for a mount below the source that denies an effect which the frontend
    /// grants to all files: a frontend has only one set of mount options.
    fn check(&self, fd: BorrowedFd<'_>, denied: SourceRestrictions) -> Result<()> {
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
