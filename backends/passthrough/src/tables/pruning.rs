//! Inodes that frontends are requested to forget, so that their descriptors do not run out.
//!
//! Where a source has neither file handles nor constant birth times (overlayfs, network and FUSE
//! file systems), each inode that a frontend knows has a descriptor. A kernel remembers every file
//! that was ever looked up, as long as it has memory for it. Beyond half of the limit of
//! descriptors, frontends are requested to forget the inodes that are unused. They do so while
//! requests go on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::{Errno, Ino, Name, Notify, Origin};
use rustix::process::{Resource, getrlimit};

use crate::sys;
use crate::tables::inode::LowerInode;

/// Inode numbers in one notification.
const BATCH: usize = 256;

/// The frontends that receive the requests, and the state of the request.
pub(crate) struct InodePruning {
    frontends: Mutex<Vec<(Origin, Arc<dyn Notify>)>>,
    /// Number of pins from which on frontends receive requests.
    most: usize,
    /// Number of pins at which they receive the next request: more than `most` if many inodes are
    /// in use.
    next: AtomicUsize,
    is_asking: Arc<AtomicBool>,
}

impl InodePruning {
    /// By the limit of descriptors that the process has now.
    pub(crate) fn new() -> Self {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(limit / 2).unwrap_or(usize::MAX);
        InodePruning {
            frontends: Mutex::default(),
            most,
            next: AtomicUsize::new(most),
            is_asking: Arc::default(),
        }
    }

    pub(crate) fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        self.lock().push((origin, notify));
    }

    pub(crate) fn detach(&self, origin: Origin) {
        self.lock().retain(|(attached, _)| *attached != origin);
    }

    /// Drops the attributes of `ino` that frontends have cached.
    pub(crate) fn drop_attributes(&self, ino: Ino) {
        let frontends: Vec<_> = self.lock().iter().map(|(_, notify)| Arc::clone(notify)).collect();
        for notify in frontends {
            // A frontend that is gone has none.
            let _ = notify.invalidate_inode(ino, None);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Origin, Arc<dyn Notify>)>> {
        self.frontends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InodePruning {
    /// True if so many inodes are pinned that frontends receive a request.
    pub(crate) fn is_due(&self, pinned: usize) -> bool {
        if pinned < self.most {
            self.next.store(self.most, Ordering::Relaxed);
        }
        pinned >= self.next.load(Ordering::Relaxed)
    }

    /// True if requests free no more descriptors: few inodes are pinned, or there is no frontend.
    pub(crate) fn is_useless(&self, pinned: usize) -> bool {
        pinned < self.most / 2 || self.lock().is_empty()
    }

    /// Requests that frontends forget the older half of the pinned ones of `inodes`, unless they
    /// are doing so. A thread of its own sends the requests: the kernel takes locks of directories,
    /// which the calling operation may hold.
    pub(crate) fn start(&self, inodes: impl FnOnce() -> Vec<Arc<LowerInode>>) {
        let frontends: Vec<_> = self.lock().iter().map(|(_, notify)| Arc::clone(notify)).collect();
        if frontends.is_empty() || self.is_asking.swap(true, Ordering::Acquire) {
            return;
        }
        let mut pinned = inodes();
        pinned.retain(|inode| inode.ino() != Ino::ROOT && inode.is_pinned());
        // If all are in use, the next question comes after some more.
        self.next.store(pinned.len() + self.most / 8 + 1, Ordering::Relaxed);
        // Inodes in low slots are the oldest by and large. The younger half may be in use soon.
        pinned.sort_unstable_by_key(|inode| inode.number & u64::from(u32::MAX));
        pinned.truncate(pinned.len().div_ceil(2));
        let unused =
            pinned.iter().map(|inode| UnusedInode { ino: inode.ino(), place: inode.place() });
        let unused: Vec<_> = unused.collect();
        let is_asking = Arc::clone(&self.is_asking);
        let ask = move || {
            sys::take_no_signals();
            frontends.iter().for_each(|frontend| forget_unused(&**frontend, &unused));
            is_asking.store(false, Ordering::Release);
        };
        let started = std::thread::Builder::new().name("defuse-prune".into()).spawn(ask);
        if started.is_err() {
            self.is_asking.store(false, Ordering::Release);
        }
    }

    /// Requests that the frontends forget the unused ones of `inodes`, and the names `absent`,
    /// which directories do not have. Frontends that forget only by name (before Linux 6.18) are
    /// left alone: they would forget inodes in use, too, and detach mounts. It may wait for
    /// operations, and is called by a thread that holds no locks.
    pub(crate) fn ask_for(&self, absent: &[(Ino, Box<[u8]>)], inodes: &[Ino]) {
        let frontends: Vec<_> = self.lock().iter().map(|(_, notify)| Arc::clone(notify)).collect();
        for frontend in frontends {
            let prune = || inodes.chunks(BATCH).try_for_each(|batch| frontend.prune(batch));
            if prune() == Err(Errno::ENOSYS) || absent.is_empty() {
                continue;
            }
            for (parent, name) in absent {
                if let Ok(name) = Name::new(name) {
                    let _ = frontend.invalidate_entry(*parent, name, false);
                }
            }
            let _ = prune();
        }
    }
}

/// An inode to forget, and its name for kernels that forget by name: before Linux 6.18.
struct UnusedInode {
    ino: Ino,
    place: Option<(Ino, Box<[u8]>)>,
}

/// Sends the requests to one frontend.
fn forget_unused(frontend: &dyn Notify, unused: &[UnusedInode]) {
    for batch in unused.chunks(BATCH) {
        let inodes: Vec<Ino> = batch.iter().map(|unused| unused.ino).collect();
        if frontend.prune(&inodes) != Err(Errno::ENOSYS) {
            continue;
        }
        for (parent, name) in batch.iter().filter_map(|unused| unused.place.as_ref()) {
            if let Ok(name) = Name::new(name) {
                let _ = frontend.invalidate_entry(*parent, name, false);
            }
        }
    }
}
