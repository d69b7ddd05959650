//! Places of mounts that are used again, so that a daemon meets any number of mounts in its life.
//!
//! A mount takes a place in the table when a lookup meets it, and keeps it. When the table is full,
//! the mounts that have gone leave, and then those that no inode is on. A kernel may know inodes of
//! a mount that has gone: `ESTALE` is the answer to operations on them from then on.

use std::collections::HashSet;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Once, PoisonError};
use std::time::Instant;

use defuse_fs::{Errno, Result};

use crate::lower::{MAX_MOUNTS, StatxResult};
use crate::passthrough::Passthrough;
use crate::tables::mounts::PlaceSearch;

impl Passthrough {
    /// The index of the mount of `fd`. A new mount is added, and its root is returned if it is
    /// foreign. Fails with `ENFILE` if all mounts of a full table are in use.
    pub(crate) fn enter_mount(
        &self,
        fd: BorrowedFd<'_>,
        stat: &StatxResult,
    ) -> Result<(u32, Option<OwnedFd>)> {
        let enter = || self.with_spare_fds(|| self.mounts.enter(fd, stat));
        let mut entered = enter();
        if !matches!(entered, Err(Errno::ENFILE)) {
            return entered;
        }
        let mut search = self.mounts.search.lock().unwrap_or_else(PoisonError::into_inner);
        if search.is_too_soon() {
            return entered;
        }
        let begun = Instant::now();
        for free in [Passthrough::free_ended_mounts, Passthrough::free_unused_mounts] {
            if !matches!(entered, Err(Errno::ENFILE)) {
                break;
            }
            free(self);
            entered = enter();
        }
        *search = PlaceSearch { ended: Some(Instant::now()), took: begun.elapsed() };
        drop(search);
        entered.inspect_err(|errno| {
            static SAID: Once = Once::new();
            if *errno == Errno::ENFILE {
                SAID.call_once(|| {
                    log::error!("more than {MAX_MOUNTS} file systems are mounted below the source");
                });
            }
        })
    }

    fn free_unused_mounts(&self) {
        let used: HashSet<u32> =
            self.inodes.list_all().iter().map(|inode| inode.key.mount).collect();
        // `syncfs` reaches only what is in the table.
        for index in self.mounts.indexes().into_iter().filter(|index| !used.contains(index)) {
            if let Ok(root) = self.root_fd(index) {
                let _ = rustix::fs::syncfs(root);
            }
        }
        self.mounts.remove_if(|index| !used.contains(&index));
        self.foreign.forget_roots(|index| self.mounts.get(index).is_err());
    }

    /// Mounts with a place where they are no longer. An inode that has a descriptor keeps its
    /// mount, which was detached while in use.
    fn free_ended_mounts(&self) {
        let used: HashSet<u32> = self
            .inodes
            .list_all()
            .iter()
            .filter(|inode| inode.is_pinned())
            .map(|inode| inode.key.mount)
            .collect();
        let ended: HashSet<u32> = self
            .foreign
            .indexes()
            .into_iter()
            .filter(|index| !used.contains(index))
            .filter(|index| self.has_ended(*index))
            .collect();
        self.mounts.remove_if(|index| ended.contains(&index));
        self.foreign.forget_roots(|index| ended.contains(&index));
    }
}
