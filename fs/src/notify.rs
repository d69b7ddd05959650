//! Notifications from a file system to its frontend.

use std::sync::Arc;
use std::time::Duration;

use crate::{Errno, Ino, Name, PollHandle, Result, Versions};

/// The access of a file system to the caches of its frontend, passed to
/// [`FileSystem::attach`](crate::FileSystem::attach).
///
/// A frontend without such a cache accepts an invalidation and does nothing. A call may block until
/// the frontend has dropped the page or name: never call it while holding a lock that an operation
/// on the same inode takes. Errors: `ENOENT` if the frontend does not know the inode (harmless),
/// `ENOSYS` if the kernel is too old, `ENOTCONN` after the frontend has ended.
///
/// A file system with several frontends notifies all frontends but the origin of a change
/// ([`Context::origin`](crate::Context)) before it answers: otherwise another frontend shows the
/// old name after that. [`invalidate_entry`](Notify::invalidate_entry) is not for that. The kernel
/// drops a name when all operations that change its directory are answered: two mounts, each with a
/// change in one directory, would wait for each other.
/// [`increment_epoch`](Notify::increment_epoch), and [`invalidate_inode`](Notify::invalidate_inode)
/// without a range, do not wait. [`Frontends`](crate::Frontends) uses these two, for frontends that
/// [drop at once](Notify::drops_at_once). To others, such a file system gives
/// [`versions`](Notify::versions), which are checked at each use, or lets nothing be cached.
pub trait Notify: Send + Sync {
    /// Drops cached attributes of `ino`, and the cached data in `range` (offset and length in
    /// bytes; a length of 0 means to the end); `None` keeps the data.
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()>;

    /// Drops the cached name `name` in `parent`. With `expire_only` the name is looked up again at
    /// its next use, and mounts and open files below it stay.
    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, expire_only: bool) -> Result<()>;

    /// Reports that another client has deleted `name` in `parent`, which was `child`.
    fn notify_delete(&self, parent: Ino, child: Ino, name: Name<'_>) -> Result<()>;

    /// Stores `data` in the page cache of `ino` at `offset`.
    fn store(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()>;

    /// Requests `len` cached bytes of `ino` from `offset`. `done` receives them, or fewer if the
    /// cache has a gap.
    fn retrieve(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        done: Box<dyn FnOnce(Result<Vec<u8>>) + Send>,
    ) -> Result<()>;

    /// Wakes the processes that poll the file for which `handle` was passed to
    /// [`FileSystem::poll`](crate::FileSystem::poll).
    fn poll_wake(&self, handle: PollHandle) -> Result<()>;

    /// Invalidates all cached names at once, also those in answers that are under way.
    fn increment_epoch(&self) -> Result<()>;

    /// True if names are really dropped when [`increment_epoch`](Notify::increment_epoch) returns,
    /// and attributes when [`invalidate_inode`](Notify::invalidate_inode) without a range does.
    /// Neither waits for an operation of the file system then. The names and attributes in answers
    /// that are under way are not used any more, with two exceptions: the entries of a listing, and
    /// attributes in answers to anything but `getattr`. These two are for a file system to avoid.
    ///
    /// A kernel mount does so since Linux 6.16. A socket does not report when the other process has
    /// received a notification.
    fn drops_at_once(&self) -> bool {
        false
    }

    /// True if the frontend answers reads from pages of its own, without a request: the kernel. A
    /// file system that keeps access times dates a file when it is opened for reading then.
    fn reads_own_pages(&self) -> bool {
        false
    }

    /// Requests that the frontend forget the unused ones of `inodes`.
    fn prune(&self, inodes: &[Ino]) -> Result<()>;

    /// Recalls what the frontend caches of `ino`: it writes changed data back, by ordinary
    /// operations, drops data and attributes, and then calls `done` once, from any thread.
    /// Operations that begin later may cache again. Returns at once; hold no lock that an operation
    /// on the inode takes until `done` was called.
    ///
    /// `done` receives `Ok` where nothing is held any more. After `limit` it receives `ETIMEDOUT`.
    /// The frontend may then still hold data, and write it back later: a file system that gives the
    /// inode to another client has to refuse that write. `ENOENT` where the frontend does not know
    /// the inode, so that it holds nothing; `EAGAIN` where too many recalls run; `ENOSYS` where the
    /// frontend does not learn when its cache is empty, such as a socket, whose protocol does not
    /// acknowledge notifications. A kernel mount does not report that a write-back failed; fsync(2)
    /// does.
    fn recall(&self, _ino: Ino, _limit: Duration, done: RecallCallback) {
        done(Err(Errno::ENOSYS));
    }

    /// Gives the frontend versions of names and attributes, which may then be cached for as long as
    /// their versions stay. Only a file system calls it whose inode numbers the frontend knows: a
    /// layer that changes numbers keeps the versions to itself, which is what this default does.
    fn versions(&self, _versions: Arc<dyn Versions>) {}
}

/// Receives the answer to a [recall](Notify::recall). Called once, from any thread.
pub type RecallCallback = Box<dyn FnOnce(Result<()>) + Send>;

/// The methods of a [`Notify`] whose frontend caches no data: it takes none, and has none to give.
#[macro_export]
macro_rules! caches_no_data {
    () => {
        fn store(&self, _: $crate::Ino, _: u64, _: &[u8]) -> $crate::Result<()> {
            Ok(())
        }
        fn retrieve(
            &self,
            _: $crate::Ino,
            _: u64,
            _: u32,
            _: Box<dyn FnOnce($crate::Result<Vec<u8>>) + Send>,
        ) -> $crate::Result<()> {
            Err($crate::Errno::ENOENT)
        }
    };
}

/// The notifier of a frontend that caches nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoNotify;

impl Notify for NoNotify {
    fn invalidate_inode(&self, _: Ino, _: Option<(u64, u64)>) -> Result<()> {
        Ok(())
    }
    fn invalidate_entry(&self, _: Ino, _: Name<'_>, _: bool) -> Result<()> {
        Ok(())
    }
    fn notify_delete(&self, _: Ino, _: Ino, _: Name<'_>) -> Result<()> {
        Ok(())
    }
    crate::caches_no_data!();
    fn poll_wake(&self, _: PollHandle) -> Result<()> {
        Ok(())
    }
    fn increment_epoch(&self) -> Result<()> {
        Ok(())
    }
    fn drops_at_once(&self) -> bool {
        true
    }
    fn prune(&self, _: &[Ino]) -> Result<()> {
        Ok(())
    }
    fn recall(&self, _: Ino, _: Duration, done: RecallCallback) {
        done(Ok(()));
    }
}

/// The notifier for an inner file system whose inodes have other numbers for the frontend.
pub struct RenumberedNotify<M> {
    notify: Arc<dyn Notify>,
    map: M,
}

impl<M: Fn(Ino) -> Option<Ino>> RenumberedNotify<M> {
    /// Passes notifications on to `notify`, with the numbers that `map` returns: `None` for an
    /// inode that the frontend cannot know.
    pub fn new(notify: Arc<dyn Notify>, map: M) -> Self {
        RenumberedNotify { notify, map }
    }

    /// Fails with `ENOENT` for an inode that the frontend cannot know.
    fn outer(&self, ino: Ino) -> Result<Ino> {
        (self.map)(ino).ok_or(Errno::ENOENT)
    }
}

impl<M: Fn(Ino) -> Option<Ino> + Send + Sync> Notify for RenumberedNotify<M> {
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()> {
        self.notify.invalidate_inode(self.outer(ino)?, range)
    }
    fn reads_own_pages(&self) -> bool {
        self.notify.reads_own_pages()
    }
    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, expire_only: bool) -> Result<()> {
        self.notify.invalidate_entry(self.outer(parent)?, name, expire_only)
    }
    fn notify_delete(&self, parent: Ino, child: Ino, name: Name<'_>) -> Result<()> {
        self.notify.notify_delete(self.outer(parent)?, self.outer(child)?, name)
    }
    fn store(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        self.notify.store(self.outer(ino)?, offset, data)
    }
    fn retrieve(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        done: Box<dyn FnOnce(Result<Vec<u8>>) + Send>,
    ) -> Result<()> {
        self.notify.retrieve(self.outer(ino)?, offset, len, done)
    }
    fn poll_wake(&self, handle: PollHandle) -> Result<()> {
        self.notify.poll_wake(handle)
    }
    fn increment_epoch(&self) -> Result<()> {
        self.notify.increment_epoch()
    }
    fn drops_at_once(&self) -> bool {
        self.notify.drops_at_once()
    }
    fn prune(&self, inodes: &[Ino]) -> Result<()> {
        // The root is never pruned.
        let known = inodes.iter().filter_map(|ino| (self.map)(*ino));
        let inodes: Vec<_> = known.filter(|ino| *ino != Ino::ROOT).collect();
        self.notify.prune(&inodes)
    }
    fn recall(&self, ino: Ino, limit: Duration, done: RecallCallback) {
        match self.outer(ino) {
            Ok(ino) => self.notify.recall(ino, limit, done),
            Err(errno) => done(Err(errno)),
        }
    }
}
