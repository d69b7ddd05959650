//! A layer that adds locks to a file system without them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::locks::LockQueue;
use crate::{
    Caps, Context, Entry, Errno, File, FileSystem, Ino, Lock, LockKind, LockOwner, LockRequest,
    LockSupport, LockWait, Name, NewNode, OpenArgs, OpenFlags, OpenReply, ReleaseArgs, Result,
    Shortcuts, delegate,
};

/// The inner file system, with locks for all callers of this layer.
///
/// A frontend keeps locks by itself if the file system has none ([`LockSupport::Frontend`]). That
/// suffices if all callers use one frontend. A server with several clients puts this layer below
/// them, so that they exclude each other.
///
/// Locks belong to an inode. They end with the close by their owner, and at the latest when the
/// inode is no longer open.
#[derive(Debug)]
pub struct LockingLayer<F> {
    inner: F,
    locks: LockQueue,
    opens: Mutex<HashMap<Ino, u64>>,
}

impl<F: FileSystem> LockingLayer<F> {
    /// Adds locks to `inner`.
    pub fn new(inner: F) -> Self {
        LockingLayer { inner, locks: LockQueue::default(), opens: Mutex::default() }
    }

    fn record_open(&self, ino: Ino, opened: OpenReply) -> OpenReply {
        *self.lock_opens().entry(ino).or_default() += 1;
        // The frontend must not lock the lower open file.
        OpenReply { lower: None, ..opened }
    }

    fn record_close(&self, ino: Ino) {
        let waiting = {
            let mut opens = self.lock_opens();
            match opens.get_mut(&ino) {
                Some(count) if *count > 1 => {
                    *count -= 1;
                    return;
                }
                _ => opens.remove(&ino),
            };
            // The mutex of the counters is still held, so that the next open of the inode finds no
            // old lock.
            self.locks.take_file(ino.0)
        };
        self.locks.refuse(waiting);
    }

    fn lock_opens(&self) -> MutexGuard<'_, HashMap<Ino, u64>> {
        self.opens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: FileSystem> FileSystem for LockingLayer<F> {
    delegate!(to inner, except caps, setlkw, open, create, tmpfile, flush, release, getlk, setlk,
        opendir, releasedir);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn caps(&self) -> Caps {
        Caps { locks: LockSupport::FileSystem, ..self.inner.caps() }
    }

    fn setlkw(&self, wait: LockWait) {
        self.locks.wait(wait.file().ino.0, wait);
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let opened = self.inner.open(cx, ino, args)?;
        Ok(self.record_open(ino, opened))
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (entry, opened) = self.inner.create(cx, parent, name, node, args)?;
        let opened = self.record_open(entry.ino, opened);
        Ok((entry, opened))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (entry, opened) = self.inner.tmpfile(cx, parent, node, args)?;
        let opened = self.record_open(entry.ino, opened);
        Ok((entry, opened))
    }

    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        self.locks.drop_owner(file.ino.0, LockKind::Posix, owner);
        match self.inner.flush(cx, file, owner) {
            // After `ENOSYS` a frontend would no longer call flush.
            Err(Errno::ENOSYS) => Ok(()),
            flushed => flushed,
        }
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        if let Some(owner) = args.flock_owner {
            self.locks.drop_owner(file.ino.0, LockKind::Flock, owner);
        }
        self.record_close(file.ino);
        self.inner.release(cx, file, args)
    }

    fn getlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        self.locks.conflict(file.ino.0, request)
    }

    fn setlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        self.locks.set(file.ino.0, request)
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        let opened = self.inner.opendir(cx, ino, flags)?;
        Ok(self.record_open(ino, opened))
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        self.record_close(dir.ino);
        self.inner.releasedir(cx, dir)
    }
}

impl<F: FileSystem> Shortcuts for LockingLayer<F> {
    delegate!(to inner, only resolve, peek);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LockType;
    use crate::layer::testing::{self, cx, name};

    fn write_lock(kind: LockKind, owner: u64, typ: LockType) -> LockRequest {
        let lock = Lock { typ, start: 0, end: u64::MAX, pid: 1 };
        LockRequest { kind, owner: LockOwner(owner), lock, wait: false }
    }

    #[test]
    fn locks_exclude_each_other_and_end_with_the_close_of_their_owner() {
        let fs = LockingLayer::new(testing::tree());
        assert_eq!(fs.caps().locks, LockSupport::FileSystem);
        let dir = fs.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
        let ino = fs.lookup(&cx(), dir, name("file")).unwrap().ino;
        let open = || File { ino, fh: fs.open(&cx(), ino, OpenArgs::default()).unwrap().fh };
        for kind in [LockKind::Flock, LockKind::Posix] {
            let (one, other) = (open(), open());
            let set = |file, owner, typ| fs.setlk(&cx(), file, &write_lock(kind, owner, typ));
            assert_eq!(set(one, 1, LockType::Write), Ok(()));
            assert_eq!(set(other, 2, LockType::Write), Err(Errno::EAGAIN));
            let requested = write_lock(kind, 2, LockType::Read);
            assert!(fs.getlk(&cx(), other, &requested).unwrap().is_some());
            fs.flush(&cx(), one, LockOwner(1)).unwrap();
            let flock_owner = Some(LockOwner(1));
            let args = ReleaseArgs { flock_owner, ..ReleaseArgs::default() };
            fs.release(&cx(), one, args).unwrap();
            assert_eq!(set(other, 2, LockType::Write), Ok(()));
            // No call reports the end of an open file description's lock.
            fs.release(&cx(), other, ReleaseArgs::default()).unwrap();
            let last = open();
            assert_eq!(set(last, 3, LockType::Write), Ok(()));
            fs.release(&cx(), last, ReleaseArgs::default()).unwrap();
            assert!(fs.lock_opens().is_empty());
        }
    }
}
