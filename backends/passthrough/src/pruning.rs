//! Inodes that frontends are requested to forget, so that their descriptors do not run out.
//!
//! Where a source has neither file handles nor constant birth times (overlayfs, network and FUSE file systems), each inode that a frontend
//! knows has a descriptor. A kernel remembers every file that was ever looked up, as long as it has memory for it. Beyond half of the limit
//! of descriptors, frontends are requested to forget the inodes that are unused. They do so while requests go on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use defuse_fs::{Errno, Ino, Name, Notify, Origin, Result};
use rustix::process::{Resource, getrlimit};

use crate::inode::LowerInode;
use crate::passthrough::Passthrough;
use crate::sys;

/// Inode numbers in one notification.
const BATCH: usize = 256;

/// The frontends that receive the requests, and the state of the request.
pub(crate) struct InodePruning {
    frontends: Mutex<Vec<(Origin, Arc<dyn Notify>)>>,
    /// Number of pins from which on frontends receive requests.
    most: usize,
    /// Number of pins at which they receive the next request: more than `most` if many inodes are in use.
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

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Origin, Arc<dyn Notify>)>> {
        self.frontends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InodePruning {
    /// Requests that the frontends forget the unused ones of `inodes`, and the names `absent`, which directories do not
    /// have. Frontends that forget only by name (before Linux 6.18) are left alone: they would forget inodes in use,
    /// too, and detach mounts. It may wait for operations, and is called by a thread that holds no locks.
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

impl Passthrough {
    /// Requests that the frontends forget inodes if many are pinned.
    pub(crate) fn prune_if_many(&self) {
        let pinned = self.inodes.pin_count();
        if pinned < self.pruning.most {
            self.pruning.next.store(self.pruning.most, Ordering::Relaxed);
        } else if pinned >= self.pruning.next.load(Ordering::Relaxed) {
            self.prune();
        }
    }

    /// Sends the requests on a thread of its own: the kernel takes locks of directories, which the calling operation
    /// may hold.
    fn prune(&self) {
        let frontends: Vec<_> =
            self.pruning.lock().iter().map(|(_, notify)| Arc::clone(notify)).collect();
        if frontends.is_empty() || self.pruning.is_asking.swap(true, Ordering::Acquire) {
            return;
        }
        let mut pinned: Vec<Arc<LowerInode>> = self.inodes.list_all();
        pinned.retain(|inode| inode.ino() != Ino::ROOT && inode.is_pinned());
        // If all are in use, the next question comes after some more.
        let next = pinned.len() + self.pruning.most / 8 + 1;
        self.pruning.next.store(next, Ordering::Relaxed);
        // Inodes in low slots are the oldest by and large. The younger half may be in use soon.
        pinned.sort_unstable_by_key(|inode| inode.number & u64::from(u32::MAX));
        pinned.truncate(pinned.len().div_ceil(2));
        let unused =
            pinned.iter().map(|inode| UnusedInode { ino: inode.ino(), place: inode.place() });
        let unused: Vec<_> = unused.collect();
        let is_asking = Arc::clone(&self.pruning.is_asking);
        let ask = move || {
            sys::take_no_signals();
            frontends.iter().for_each(|frontend| forget_unused(&**frontend, &unused));
            is_asking.store(false, Ordering::Release);
        };
        let started = std::thread::Builder::new().name("defuse-prune".into()).spawn(ask);
        if started.is_err() {
            self.pruning.is_asking.store(false, Ordering::Release);
        }
    }

    /// Repeats `open`, which failed for lack of descriptors, while frontends forget inodes.
    pub(crate) fn wait_for_pruning<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        const PAUSE: Duration = Duration::from_millis(5);
        const TRIES: usize = 200;
        for _ in 0..TRIES {
            if self.inodes.pin_count() < self.pruning.most / 2 || self.pruning.lock().is_empty() {
                break;
            }
            self.prune();
            std::thread::sleep(PAUSE);
            match open() {
                Err(Errno::EMFILE) => {}
                other => return other,
            }
        }
        Err(Errno::EMFILE)
    }
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
