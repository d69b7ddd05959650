//! Requests for locks in the lower file system, which `tables/owner_locks.rs` keeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{
    Errno, File, Ino, Lock, LockKind, LockOwner, LockRequest, LockType, LockWait, Result,
};
use rustix::fs::{FlockOperation, OFlags};

use crate::passthrough::Passthrough;
use crate::tables::owner_locks::{attempt, ofd};

impl Passthrough {
    /// The descriptor for a lock request.
    fn lock_fd(&self, file: File, request: &LockRequest) -> Result<Arc<OwnedFd>> {
        let open = self.files.get(file.fh)?;
        if request.kind == LockKind::Flock {
            return Ok(Arc::clone(&open.fd));
        }
        if let Some(fd) = self.locks.find(file.ino, request.owner) {
            return Ok(fd);
        }
        // The owner's descriptor is open for reading and writing if permitted, so that it can hold
        // both kinds of lock.
        let inode = self.inodes.get(file.ino)?;
        let fd = match self.open_inode(&inode, OFlags::RDWR) {
            Err(Errno::EACCES | Errno::EROFS | Errno::EISDIR | Errno::ETXTBSY) => {
                self.open_inode(&inode, OFlags::RDONLY)?
            }
            other => other?,
        };
        let fd = self.place_descriptor(fd);
        Ok(self.locks.add_owner(file.ino, request.owner, fd))
    }

    pub(crate) fn getlk(&self, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        if request.kind == LockKind::Flock {
            return Err(Errno::EINVAL);
        }
        let fd = match self.locks.find(file.ino, request.owner) {
            Some(fd) => fd,
            None => Arc::clone(&self.files.get(file.fh)?.fd),
        };
        ofd(fd.as_fd(), libc::F_OFD_GETLK, &request.lock)
    }

    pub(crate) fn setlk(&self, file: File, request: &LockRequest) -> Result<()> {
        let unlock = request.lock.typ == LockType::Unlock;
        // An owner without a descriptor has no locks.
        let idle = unlock && request.kind == LockKind::Posix;
        if idle && self.locks.find(file.ino, request.owner).is_none() {
            return Ok(());
        }
        let fd = self.lock_fd(file, request)?;
        let result = attempt(fd.as_fd(), request);
        if result.is_ok() {
            // Downgrading a lock may let others in, too.
            self.locks.kick();
        }
        result
    }

    pub(crate) fn wait_for_lock(&self, wait: LockWait) {
        let (file, request) = (wait.file(), wait.request());
        match self.setlk(file, &request) {
            Err(Errno::EAGAIN) if request.wait && !self.is_inherited() => {}
            other => return wait.finish(other),
        }
        match self.lock_fd(file, &request) {
            Ok(fd) => self.locks.wait(wait, fd),
            Err(errno) => wait.finish(Err(errno)),
        }
    }

    pub(crate) fn drop_posix_locks(&self, ino: Ino, owner: LockOwner) {
        self.locks.drop_owner(ino, owner);
    }

    /// Releases the flock lock of an open file at its release, if no other process has the open
    /// file. Closing would release it, too, but possibly later: the frontend may hold the
    /// descriptor as a backing file.
    pub(crate) fn drop_flock(&self, fd: BorrowedFd<'_>) {
        let _ = rustix::fs::flock(fd, FlockOperation::Unlock);
        self.locks.kick();
    }
}
