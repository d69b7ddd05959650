//! Record locks and flock: kept by the file system, or by its mount if it has none.

use std::sync::Arc;

use defuse_fs::{Errno, Lock, LockKind, LockOwner, LockRequest, LockType};
use defuse_probe::Op;

use crate::asynchronous::{AsyncCallback, OperationEnd, PendingOperation, prepare_wait, setlkw};
use crate::client::DirectClient;
use crate::description::FileDescription;
use crate::stop::Result;
use crate::task::ClientTask;

/// The owner of a lock, which decides when the lock ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockFamily {
    /// fcntl(2) `F_SETLK`: the process owns the lock, and loses it when it closes any descriptor of
    /// the file.
    Process,
    /// fcntl(2) `F_OFD_SETLK`: the open file owns the lock.
    OpenFile,
    /// flock(2): the open file owns the lock, which covers the whole file.
    Flock,
}

impl DirectClient {
    /// Sets, changes or releases a lock without waiting. Fails with `EAGAIN` if another lock
    /// conflicts, with `EBADF` if the file is not open for this access, and with `EINVAL` or
    /// `ENOLCK`.
    pub fn set_lock(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        family: LockFamily,
        lock: Lock,
    ) -> Result<()> {
        let open = file.file()?;
        let request = request(task, file, family, lock, false)?;
        let mount = file.mount();
        file.record_lock();
        let cx = task.context(mount.origin);
        Ok(mount.call(Op::SETLK, |fs| match mount.has_locks() {
            true => fs.setlk(&cx, open, &request),
            false => mount.locks.set(open.ino.0, &request),
        })?)
    }

    /// Sets a lock and waits for conflicting locks to end. [`PendingOperation::wait`] returns the
    /// answer. [`PendingOperation::cancel`] ends the wait with `EINTR`, as a signal does. Fails
    /// with `EDEADLK` if the wait would be a deadlock.
    pub fn wait_for_lock(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        family: LockFamily,
        lock: Lock,
    ) -> Result<PendingOperation> {
        self.wait_for_lock_then(task, file, family, lock, None)
    }

    /// Like [`wait_for_lock`](DirectClient::wait_for_lock), but calls `callback` with the reply, if
    /// there is a callback.
    pub fn wait_for_lock_then(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        family: LockFamily,
        lock: Lock,
        callback: Option<AsyncCallback>,
    ) -> Result<PendingOperation> {
        let open = file.file()?;
        let request = request(task, file, family, lock, true)?;
        let mount = file.mount();
        file.record_lock();
        let ending = OperationEnd { callback, file: Some(Arc::clone(file)) };
        let (pending, wait) = prepare_wait(task, mount, (open, request), ending);
        match mount.has_locks() {
            true => setlkw(file, wait),
            false => mount.locks.wait(open.ino.0, wait),
        }
        Ok(pending)
    }

    /// Converts the range of a `struct flock` to its first and last byte. `whence` is numbered as
    /// in C: 0 start, 1 position, 2 end of the file. A `len` of 0 extends to infinity; a negative
    /// one means the bytes before. Fails with `EINVAL` or `EOVERFLOW`.
    pub fn lock_range(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        whence: i32,
        (start, len): (i64, i64),
    ) -> Result<(u64, u64)> {
        let base = match whence {
            0 => 0,
            1 => file.position() as i64,
            2 => self.fstat(task, file)?.attr.size as i64,
            _ => return Err(Errno::EINVAL.into()),
        };
        let start = base.checked_add(start).ok_or(Errno::EOVERFLOW)?;
        let (start, end) = match len {
            0 => (start, i64::MAX),
            1.. => (start, start.checked_add(len - 1).ok_or(Errno::EOVERFLOW)?),
            _ => (start.checked_add(len).ok_or(Errno::EINVAL)?, start.saturating_sub(1)),
        };
        if start < 0 || end < start {
            return Err(Errno::EINVAL.into());
        }
        Ok((start as u64, end as u64))
    }

    /// The first lock that conflicts with `lock`, `F_GETLK`; `None` if there is none.
    pub fn test_lock(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        family: LockFamily,
        lock: Lock,
    ) -> Result<Option<Lock>> {
        let open = file.file()?;
        let request = LockRequest { wait: false, ..raw_request(task, file, family, lock, false) };
        let mount = file.mount();
        let cx = task.context(mount.origin);
        Ok(mount.call(Op::GETLK, |fs| match mount.has_locks() {
            true => fs.getlk(&cx, open, &request),
            false => mount.locks.conflict(open.ino.0, &request),
        })?)
    }
}

fn request(
    task: &ClientTask,
    file: &FileDescription,
    family: LockFamily,
    lock: Lock,
    wait: bool,
) -> Result<LockRequest, Errno> {
    let open_for = match lock.typ {
        LockType::Read => file.reads(),
        LockType::Write => file.writes(),
        LockType::Unlock => true,
    };
    if family != LockFamily::Flock && !open_for {
        return Err(Errno::EBADF);
    }
    Ok(raw_request(task, file, family, lock, wait))
}

fn raw_request(
    task: &ClientTask,
    file: &FileDescription,
    family: LockFamily,
    lock: Lock,
    wait: bool,
) -> LockRequest {
    let own = LockOwner(file.id());
    let (kind, owner) = match family {
        LockFamily::Process => (LockKind::Posix, task.lock_owner()),
        LockFamily::OpenFile => (LockKind::Posix, own),
        LockFamily::Flock => (LockKind::Flock, own),
    };
    let pid = task.caller().pid;
    let lock = match family {
        LockFamily::Flock => Lock { start: 0, end: u64::MAX, pid, ..lock },
        _ => Lock { pid, ..lock },
    };
    LockRequest { kind, owner, lock, wait }
}
