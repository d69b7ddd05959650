//! One frontend: its notifier, and the mark for names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use crate::{Errno, Ino, Notify, Origin, Result};

/// Names were given since the last call of `increment_epoch` began.
const FRESH: u32 = 1;
/// Names were given since the last call of `increment_epoch` ended that no other was running with.
const HELD: u32 = 2;
/// One call of `increment_epoch` that is running. The remaining bits count them.
const DROPPING: u32 = 4;

pub(super) struct FrontendSlot {
    pub(super) origin: Origin,
    /// One bit, or none if the frontend caches nothing while there are others.
    mask: u64,
    notify: Arc<dyn Notify>,
    /// The frontend drops what a notification names.
    is_caching: AtomicBool,
    /// [`FRESH`], [`HELD`], and a number of [`DROPPING`].
    names: AtomicU32,
    /// It was the only frontend at some time, and counts as one that may cache everything.
    has_everything: AtomicBool,
}

impl FrontendSlot {
    pub(super) fn new(origin: Origin, bit: Option<u32>, notify: Arc<dyn Notify>) -> Self {
        FrontendSlot {
            origin,
            mask: bit.map_or(0, |bit| 1 << bit),
            notify,
            is_caching: AtomicBool::new(bit.is_some()),
            names: AtomicU32::new(0),
            has_everything: AtomicBool::new(false),
        }
    }

    pub(super) fn mask(&self) -> u64 {
        self.mask
    }

    pub(super) fn is_caching(&self) -> bool {
        self.is_caching.load(SeqCst)
    }

    pub(super) fn stop_caching(&self) {
        self.is_caching.store(false, SeqCst);
    }

    pub(super) fn has_everything(&self) -> bool {
        self.has_everything.load(SeqCst)
    }

    /// Another frontend comes.
    pub(super) fn mark_everything(&self) {
        self.has_everything.store(true, SeqCst);
    }

    /// Marks that names are given. Called before they are read.
    pub(super) fn mark_names(&self) {
        if self.names.load(SeqCst) & FRESH == 0 {
            self.names.fetch_or(FRESH | HELD, SeqCst);
        }
    }

    /// Drops the names, if there are any. When it returns, those are gone that were given before.
    pub(super) fn drop_names(&self) {
        if self.has_everything() {
            return self.check(self.notify.increment_epoch());
        }
        let begin = |names| (names & HELD != 0).then_some((names & !FRESH) + DROPPING);
        if self.names.fetch_update(SeqCst, SeqCst, begin).is_err() {
            return;
        }
        self.check(self.notify.increment_epoch());
        let end = |names: u32| {
            let left = names - DROPPING;
            // With another call running, some names may still be there.
            Some(if left < DROPPING && left & FRESH == 0 { left & !HELD } else { left })
        };
        let _ = self.names.fetch_update(SeqCst, SeqCst, end);
    }

    /// Drops the attributes of an inode.
    pub(super) fn drop_attributes(&self, ino: Ino) {
        self.check(self.notify.invalidate_inode(ino, None));
    }

    pub(super) fn reads_own_pages(&self) -> bool {
        self.notify.reads_own_pages()
    }

    /// Drops all names, and the data and attributes of `known`.
    pub(super) fn drop_all(&self, known: impl FnOnce() -> Vec<Ino>) {
        let dropped = self.notify.increment_epoch();
        if !self.is_caching() {
            // It keeps what it has until that expires, and may not even be listening.
            return;
        }
        self.check(dropped);
        for ino in known() {
            self.check(self.notify.invalidate_inode(ino, Some((0, 0))));
        }
    }

    /// Takes in that the frontend did not drop something: from now on, it is given nothing to
    /// cache.
    fn check(&self, dropped: Result<()>) {
        match dropped {
            // It does not know the inode, or has ended.
            Ok(()) | Err(Errno::ENOENT | Errno::ENOTCONN) => {}
            Err(_) => self.stop_caching(),
        }
    }
}
