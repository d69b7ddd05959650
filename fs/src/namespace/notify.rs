//! The notifier of a member: translates its numbers to those of the namespace.

use std::sync::Arc;
use std::time::Duration;

use crate::{Errno, Ino, Name, Notify, PollHandle, Recalled, Result};

use super::outer;

/// Notifies the frontend of changes in one file system.
pub(super) struct Inside {
    pub(super) notify: Arc<dyn Notify>,
    pub(super) index: usize,
}

impl Inside {
    /// Fails with `ENOENT` for a number that the frontend cannot know.
    fn map(&self, ino: Ino) -> Result<Ino> {
        outer(self.index, ino).ok_or(Errno::ENOENT)
    }
}

impl Notify for Inside {
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()> {
        self.notify.invalidate_inode(self.map(ino)?, range)
    }
    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, expire_only: bool) -> Result<()> {
        self.notify.invalidate_entry(self.map(parent)?, name, expire_only)
    }
    fn deleted(&self, parent: Ino, child: Ino, name: Name<'_>) -> Result<()> {
        self.notify.deleted(self.map(parent)?, self.map(child)?, name)
    }
    fn store(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        self.notify.store(self.map(ino)?, offset, data)
    }
    fn retrieve(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        done: Box<dyn FnOnce(Result<Vec<u8>>) + Send>,
    ) -> Result<()> {
        self.notify.retrieve(self.map(ino)?, offset, len, done)
    }
    fn poll_wake(&self, handle: PollHandle) -> Result<()> {
        self.notify.poll_wake(handle)
    }
    fn increment_epoch(&self) -> Result<()> {
        self.notify.increment_epoch()
    }
    fn prune(&self, inodes: &[Ino]) -> Result<()> {
        let inodes: Vec<_> = inodes.iter().filter_map(|ino| outer(self.index, *ino)).collect();
        self.notify.prune(&inodes)
    }
    fn recall(&self, ino: Ino, limit: Duration, done: Recalled) {
        match self.map(ino) {
            Ok(ino) => self.notify.recall(ino, limit, done),
            Err(errno) => done(Err(errno)),
        }
    }
}
