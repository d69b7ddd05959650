//! Descriptors on file systems that are mounted below the source, which can be unmounted while they
//! are served.
//!
//! A descriptor keeps its mount busy for umount(8). Descriptors of the source's own mount may last.
//! On any other mount a descriptor outlives its operation only while it is used: a thread closes
//! descriptors that were unused for a second, and requests that frontends forget the inodes that
//! need a descriptor of their own (without file handles and birth times). The thread exists while
//! there is something to close. Afterwards a mount is opened again by the name at which it was
//! found.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use defuse_fs::{Errno, Ino, Result};

use crate::lower::StatxResult;
use crate::sys;
use crate::tables::fd_cache::FdCache;
use crate::tables::inode::LowerInode;
use crate::tables::pruning::InodePruning;

/// A descriptor that was unused for this time is closed.
const IDLE: Duration = Duration::from_secs(1);

/// The descriptors on foreign mounts, which the closing thread shares.
pub(crate) struct ForeignMounts(Arc<ForeignDescriptors>);

pub(crate) struct ForeignDescriptors {
    /// `O_PATH` descriptors of inodes, made when the first foreign mount is used.
    cache: OnceLock<FdCache>,
    capacity: usize,
    /// Roots of mounts by index, open for reading.
    roots: Mutex<HashMap<u32, MountRoot>>,
    /// Inodes that need their descriptors.
    pinned: Mutex<Vec<Weak<LowerInode>>>,
    /// Names that pinned directories do not have, and kernels know. Such a name keeps its directory
    /// in a kernel's memory.
    absent: Mutex<VecDeque<AbsentName>>,
    /// A pinned descriptor was used since the last look.
    is_pin_used: AtomicBool,
    pruning: Arc<InodePruning>,
    /// The process of the closing thread, or 0. A child of fork(2) has no thread.
    closer: AtomicU32,
    is_over: AtomicBool,
}

/// A name that a pinned directory did not have.
struct AbsentName {
    dir: Weak<LowerInode>,
    name: Box<[u8]>,
}

impl AbsentName {
    /// The name, if the directory does not have it now either. A kernel that forgets a name which
    /// was made meanwhile detaches what is mounted there.
    fn check_again(self) -> Option<(Ino, Box<[u8]>)> {
        let dir = self.dir.upgrade()?;
        let pin = dir.pin.load_full()?;
        let is_absent = matches!(StatxResult::read_at(pin.as_fd(), &self.name), Err(Errno::ENOENT));
        is_absent.then(|| (dir.ino(), self.name))
    }
}

/// Where a mount was found, and its root.
struct MountRoot {
    place: Option<MountPlace>,
    fd: Option<Arc<OwnedFd>>,
    is_used: bool,
}

/// The directory and name at which a mount was found.
#[derive(Clone)]
pub(crate) struct MountPlace {
    dir: Weak<LowerInode>,
    /// The inode, unless its descriptor keeps another foreign mount busy.
    kept: Option<Arc<LowerInode>>,
    pub(crate) name: Box<[u8]>,
}

impl MountPlace {
    /// The directory, if a frontend still knows it.
    pub(crate) fn dir(&self) -> Option<Arc<LowerInode>> {
        self.kept.clone().or_else(|| self.dir.upgrade())
    }
}

/// A root that is open, or where it is opened.
pub(crate) enum FoundRoot {
    Open(Arc<OwnedFd>),
    Closed(MountPlace),
}

impl ForeignMounts {
    pub(crate) fn new(capacity: usize, pruning: Arc<InodePruning>) -> Self {
        ForeignMounts(Arc::new(ForeignDescriptors {
            cache: OnceLock::new(),
            capacity,
            roots: Mutex::default(),
            pinned: Mutex::default(),
            absent: Mutex::default(),
            is_pin_used: AtomicBool::new(false),
            pruning,
            closer: AtomicU32::new(0),
            is_over: AtomicBool::new(false),
        }))
    }

    /// The cache of descriptors of inodes. A caller that adds one calls
    /// [`close_later`](Self::close_later) next.
    pub(crate) fn cache(&self) -> &FdCache {
        self.0.cache.get_or_init(|| FdCache::new(self.0.capacity))
    }

    /// The cache of descriptors, if it exists.
    pub(crate) fn existing_cache(&self) -> Option<&FdCache> {
        self.0.cache.get()
    }

    /// Number of roots that are open.
    pub(crate) fn open_roots(&self) -> usize {
        lock(&self.0.roots).values().filter(|root| root.fd.is_some()).count()
    }

    /// The indexes of the mounts whose places are known.
    pub(crate) fn indexes(&self) -> Vec<u32> {
        lock(&self.0.roots).keys().copied().collect()
    }

    /// Forgets the places of mounts that have left the table.
    pub(crate) fn forget_roots(&self, is_gone: impl Fn(u32) -> bool) {
        let gone: Vec<_> = lock(&self.0.roots).extract_if(|index, _| is_gone(*index)).collect();
        // Outside of the lock: closing may wait for the file system.
        drop(gone);
    }

    /// Notes that a descriptor of a pinned inode is used.
    pub(crate) fn note_pin_use(&self) {
        if !self.0.is_pin_used.load(Ordering::Relaxed) {
            self.0.is_pin_used.store(true, Ordering::Relaxed);
        }
    }

    /// Lets frontends forget the pinned inode when it is unused.
    pub(crate) fn add_pinned(&self, inode: &Arc<LowerInode>) {
        self.note_pin_use();
        let mut pinned = lock(&self.0.pinned);
        if pinned.len() == pinned.capacity() {
            pinned.retain(is_pinned);
            let len = pinned.len();
            pinned.reserve(len + 1);
        }
        pinned.push(Arc::downgrade(inode));
        drop(pinned);
        self.close_later();
    }

    /// Records that the pinned directory `dir` has no `name`, which a frontend may remember.
    pub(crate) fn add_absent(&self, dir: &Arc<LowerInode>, name: &[u8]) {
        /// Number of names. A directory with older ones stays longer.
        const MOST: usize = 4096;
        let mut absent = lock(&self.0.absent);
        if absent.len() == MOST {
            absent.pop_front();
        }
        absent.push_back(AbsentName { dir: Arc::downgrade(dir), name: name.into() });
    }

    /// Records that the root of the mount with this index was found as `name` in `dir`.
    pub(crate) fn note_place(&self, mount: u32, dir: &Arc<LowerInode>, name: &[u8]) {
        let mut roots = lock(&self.0.roots);
        let root = roots.entry(mount).or_insert_with(MountRoot::new);
        let is_it =
            |place: &MountPlace| place.dir.as_ptr() == Arc::as_ptr(dir) && *place.name == *name;
        if root.place.as_ref().is_some_and(is_it) {
            return;
        }
        let kept = (!dir.is_pinned() || dir.key.mount == 0).then(|| Arc::clone(dir));
        let place = MountPlace { dir: Arc::downgrade(dir), kept, name: name.into() };
        let old = root.place.replace(place);
        drop(roots);
        drop(old);
    }

    /// The place of the mount with this index.
    pub(crate) fn place(&self, mount: u32) -> Option<MountPlace> {
        lock(&self.0.roots).get(&mount)?.place.clone()
    }

    /// The root of the mount with this index, which the caller uses. Fails with `ESTALE` if its
    /// place is not known.
    pub(crate) fn find_root(&self, mount: u32) -> Result<FoundRoot> {
        let mut roots = lock(&self.0.roots);
        let root = roots.get_mut(&mount).ok_or(Errno::ESTALE)?;
        root.is_used = true;
        if let Some(fd) = &root.fd {
            return Ok(FoundRoot::Open(Arc::clone(fd)));
        }
        root.place.clone().map(FoundRoot::Closed).ok_or(Errno::ESTALE)
    }

    /// Keeps the root of the mount with this index open for a while.
    pub(crate) fn set_root(&self, mount: u32, fd: Arc<OwnedFd>) {
        let mut roots = lock(&self.0.roots);
        let root = roots.entry(mount).or_insert_with(MountRoot::new);
        let old = root.fd.replace(fd);
        root.is_used = true;
        drop(roots);
        drop(old);
        self.close_later();
    }

    /// Starts the closing thread, unless there is one.
    pub(crate) fn close_later(&self) {
        let process = std::process::id();
        let before = self.0.closer.load(Ordering::SeqCst);
        let replace = |from| {
            self.0.closer.compare_exchange(from, process, Ordering::SeqCst, Ordering::SeqCst)
        };
        if before == process || replace(before).is_err() {
            return;
        }
        let descriptors = Arc::clone(&self.0);
        let close = move || {
            sys::take_no_signals();
            descriptors.close_unused();
        };
        if std::thread::Builder::new().name("defuse-foreign".into()).spawn(close).is_err() {
            // Without the thread nothing is kept. The next operation tries again.
            self.0.closer.store(0, Ordering::SeqCst);
            self.0.close_all();
        }
    }
}

impl Drop for ForeignMounts {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
        self.0.close_all();
    }
}

impl MountRoot {
    fn new() -> Self {
        MountRoot { place: None, fd: None, is_used: false }
    }

    /// The descriptor, if it was not used since the last call.
    fn take_unused(&mut self) -> Option<Arc<OwnedFd>> {
        if std::mem::take(&mut self.is_used) { None } else { self.fd.take() }
    }
}

impl ForeignDescriptors {
    /// The closing thread, until nothing is left to close.
    fn close_unused(&self) {
        let mut pause = ForgetPause::default();
        loop {
            std::thread::sleep(IDLE);
            if let Some(cache) = self.cache.get() {
                cache.sweep();
            }
            // Closed outside of the lock: closing may wait for the file system.
            let unused: Vec<_> =
                lock(&self.roots).values_mut().filter_map(MountRoot::take_unused).collect();
            drop(unused);
            let is_idle = !self.is_pin_used.swap(false, Ordering::Relaxed);
            if pause.is_over(is_idle) {
                self.prune();
            }
            if self.is_over.load(Ordering::SeqCst) {
                return self.close_all();
            }
            if !self.has_any() {
                self.closer.store(0, Ordering::SeqCst);
                // A descriptor that was added just before may have met this thread.
                let process = std::process::id();
                let go_on =
                    || self.closer.compare_exchange(0, process, Ordering::SeqCst, Ordering::SeqCst);
                if !self.has_any() || go_on().is_err() {
                    return;
                }
            }
        }
    }

    /// Requests that frontends forget the pinned inodes. Inodes in use stay.
    fn prune(&self) {
        let mut pinned = lock(&self.pinned);
        pinned.retain(is_pinned);
        // An inode in a directory was found after the directory, and goes first.
        let inodes: Vec<Ino> =
            pinned.iter().rev().filter_map(Weak::upgrade).map(|inode| inode.ino()).collect();
        drop(pinned);
        let absent = std::mem::take(&mut *lock(&self.absent));
        let absent: Vec<_> = absent.into_iter().filter_map(AbsentName::check_again).collect();
        if !inodes.is_empty() {
            self.pruning.ask_for(&absent, &inodes);
        }
    }

    fn has_any(&self) -> bool {
        self.cache.get().is_some_and(|cache| cache.counts().0 > 0)
            || lock(&self.roots).values().any(|root| root.fd.is_some())
            || !lock(&self.pinned).is_empty()
    }

    fn close_all(&self) {
        if let Some(cache) = self.cache.get() {
            cache.shrink(usize::MAX);
        }
        lock(&self.roots).values_mut().for_each(|root| root.fd = None);
        lock(&self.pinned).clear();
        lock(&self.absent).clear();
    }
}

/// The looks between two requests to forget, more and more: inodes may be in use for long.
#[derive(Default)]
struct ForgetPause {
    length: u32,
    left: u32,
}

impl ForgetPause {
    const MOST: u32 = 64;

    /// True if it is time for a request, where pins were unused (`is_idle`) since the last look.
    fn is_over(&mut self, is_idle: bool) -> bool {
        if !is_idle {
            *self = ForgetPause::default();
            return false;
        }
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        self.length = (self.length * 2).clamp(1, ForgetPause::MOST);
        self.left = self.length - 1;
        true
    }
}

fn is_pinned(inode: &Weak<LowerInode>) -> bool {
    inode.upgrade().is_some_and(|inode| inode.is_pinned())
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
