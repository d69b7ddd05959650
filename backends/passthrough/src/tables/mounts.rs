//! The file systems below the source, each with a descriptor for opening file handles.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use defuse_fs::source::GrantedEffects;
use defuse_fs::{Errno, FileKind, Result, SourceRestrictions};
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};

use crate::handle::{fs_type, is_local};
use crate::lower::{MAX_MOUNTS, MountId, OrErrno, PLACE_BITS, StatxResult, place_of};
use crate::options::FileHandles;
use crate::proc_path::ProcPath;
use crate::sys;

const GROUP: usize = 16;
const GROUPS: usize = MAX_MOUNTS / GROUP;

/// One mount, or one subvolume of a mount: a pair of mount id and device number.
pub(crate) struct LowerMount {
    pub(crate) id: MountId,
    /// Open for reading, as open_by_handle_at(2) requires. `None` for a mount below the source
    /// (`tables/foreign_mounts.rs`).
    pub(crate) fd: Option<Arc<OwnedFd>>,
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
        let id = StatxResult::read(dir)?.mount_id();
        let (f_type, denied) = facts(dir)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(dir, c".", flags, Mode::empty()).or_errno()?;
        let works = probe(fd.as_fd());
        let has_acls = has_acls(dir);
        let (fd, is_foreign) = (Some(Arc::new(fd)), false);
        let mount = LowerMount { id, fd, is_foreign, f_type, handles: true, denied, has_acls };
        match (want, works) {
            // A lack of descriptors does not show whether handles work. The caller makes room and
            // retries.
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

    /// True if numbers of inodes may change, or be those of several: on an overlay without file
    /// handles, and on a FUSE file system, which may be an overlay of its own (fuse-overlayfs).
    pub(crate) fn changes_numbers(&self) -> bool {
        !self.handles && [fs_type::OVERLAY, fs_type::FUSE].contains(&self.f_type)
    }

    /// True if inodes without handles are found again by name.
    pub(crate) fn reopens(&self) -> bool {
        !self.handles && self.birth_is_constant()
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

/// The last search for places that can be used again. It looks at all mounts and inodes, so that
/// lookups on a further mount must not begin one after the other.
#[derive(Default)]
pub(crate) struct PlaceSearch {
    pub(crate) ended: Option<Instant>,
    pub(crate) took: Duration,
}

impl PlaceSearch {
    /// True if searches would take more than a tenth of the time.
    pub(crate) fn is_too_soon(&self) -> bool {
        self.ended.is_some_and(|ended| ended.elapsed() < self.took * 9)
    }
}

/// A place in the table, and the number of mounts that have left it.
#[derive(Default)]
struct MountPlaceholder {
    mount: ArcSwapOption<IndexedMount>,
    generation: AtomicU32,
}

pub(crate) struct IndexedMount {
    index: u32,
    mount: LowerMount,
}

/// A mount of the table during an operation.
pub(crate) enum MountRef<'a> {
    First(&'a LowerMount),
    Other(Arc<IndexedMount>),
}

impl Deref for MountRef<'_> {
    type Target = LowerMount;

    fn deref(&self) -> &LowerMount {
        match self {
            MountRef::First(mount) => mount,
            MountRef::Other(indexed) => &indexed.mount,
        }
    }
}

type MountGroup = Box<[MountPlaceholder]>;

/// The mounts that were seen. A mount that no inode is on may leave its place to another one. An
/// index is a place and a generation, so that it is not taken for that of the next mount there.
/// Reading takes no lock.
pub(crate) struct MountTable {
    /// The source has the index 0, and stays.
    first: LowerMount,
    /// The others, in groups, because there is nearly always only one mount. The first place is not
    /// used.
    groups: Box<[OnceLock<MountGroup>]>,
    /// Number of places that were ever used.
    len: AtomicUsize,
    changes: Mutex<()>,
    /// The last search for free places.
    pub(crate) search: Mutex<PlaceSearch>,
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
        MountTable {
            first,
            groups,
            len: AtomicUsize::new(1),
            changes: Mutex::default(),
            search: Mutex::default(),
            want,
            granted,
            are_numbers_changing,
            warned: AtomicBool::new(false),
        }
    }

    /// The place with this number; `None` if it is beyond the table.
    fn place(&self, place: usize) -> Option<&MountPlaceholder> {
        let group = self.groups.get(place / GROUP)?;
        let group = group.get_or_init(|| (0..GROUP).map(|_| MountPlaceholder::default()).collect());
        group.get(place % GROUP)
    }

    /// The mount with this index. Fails with `ESTALE` if it has left the table.
    pub(crate) fn get(&self, index: u32) -> Result<MountRef<'_>> {
        if index == 0 {
            return Ok(MountRef::First(&self.first));
        }
        let place = place_of(index) as usize;
        let group = self.groups.get(place / GROUP).and_then(OnceLock::get).ok_or(Errno::ESTALE)?;
        let found = group[place % GROUP].mount.load_full();
        let found = found.filter(|found| found.index == index).ok_or(Errno::ESTALE)?;
        Ok(MountRef::Other(found))
    }

    /// True if numbers of inodes may change on one of the mounts.
    pub(crate) fn has_changing_numbers(&self) -> bool {
        self.are_numbers_changing.load(Ordering::Relaxed)
    }

    /// True if the tree has, or had, more than one mount or subvolume.
    pub(crate) fn has_several(&self) -> bool {
        self.len.load(Ordering::Acquire) > 1
    }

    /// All mounts but the source.
    fn other_mounts(&self) -> impl Iterator<Item = Arc<IndexedMount>> {
        let places = (1..self.len.load(Ordering::Acquire)).filter_map(|place| self.place(place));
        places.filter_map(|place| place.mount.load_full())
    }

    /// The indexes of all mounts.
    pub(crate) fn indexes(&self) -> Vec<u32> {
        std::iter::once(0).chain(self.other_mounts().map(|found| found.index)).collect()
    }

    /// Number of mounts with a lasting descriptor.
    pub(crate) fn descriptors(&self) -> usize {
        let others = self.other_mounts().filter(|found| found.mount.fd.is_some()).count();
        usize::from(self.first.fd.is_some()) + others
    }

    /// The index of the mount `id`, which is usually `likely`, the index of the parent's mount.
    pub(crate) fn find(&self, id: MountId, likely: u32) -> Option<u32> {
        if self.get(likely).is_ok_and(|mount| mount.id == id) {
            return Some(likely);
        }
        if self.first.id == id {
            return Some(0);
        }
        self.other_mounts().find(|found| found.mount.id == id).map(|found| found.index)
    }

    /// Takes the mounts out for which `is_unused` is true, given their index.
    pub(crate) fn remove_if(&self, is_unused: impl Fn(u32) -> bool) {
        let _changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        for found in self.other_mounts() {
            if is_unused(found.index)
                && let Some(place) = self.place(place_of(found.index) as usize)
            {
                place.generation.fetch_add(1, Ordering::Relaxed);
                place.mount.store(None);
            }
        }
    }

    /// Puts a mount into a free place. Returns its index, or `None` if there is no place.
    fn add(&self, mount: LowerMount) -> Option<u32> {
        let len = self.len.load(Ordering::Acquire);
        let free = |at: &usize| self.place(*at).is_some_and(|place| place.mount.load().is_none());
        let at = if len < MAX_MOUNTS { len } else { (1..len).find(free)? };
        let place = self.place(at)?;
        let index = place.generation.load(Ordering::Relaxed) << PLACE_BITS | at as u32;
        place.mount.store(Some(Arc::new(IndexedMount { index, mount })));
        self.len.fetch_max(at + 1, Ordering::Release);
        Some(index)
    }

    /// The index of the mount of `fd`. A new mount is added, and its root is returned if it is
    /// foreign. Fails with `ENFILE` if the table is full.
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
        mount.is_foreign = mount.id.mount != self.first.id.mount;
        let root = if mount.is_foreign { mount.fd.take().and_then(Arc::into_inner) } else { None };
        self.check(fd, mount.denied)?;
        let _changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = self.find(mount.id, 0) {
            return Ok((index, root));
        }
        if mount.changes_numbers() {
            self.are_numbers_changing.store(true, Ordering::Relaxed);
        }
        Ok((self.add(mount).ok_or(Errno::ENFILE)?, root))
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
