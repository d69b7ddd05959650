//! Record locks and flock: those of the file system, or of its mount where it keeps none.

use std::sync::Arc;

use defuse_fs::{Context, Errno, IoOp, Lock, LockKind, LockOwner, LockRequest, LockType};
use defuse_probe::Op;

use crate::asynchronous::{Callback, Ending, Pending, prepare, start};
use crate::client::Client;
use crate::description::Description;
use crate::stop::Result;
use crate::task::Task;

/// Whose a lock is, and so when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockFamily {
    /// fcntl(2) `F_SETLK`: of the process; dropped when it closes any descriptor of the file.
    Process,
    /// fcntl(2) `F_OFD_SETLK`: of the open file.
    OpenFile,
    /// flock(2): of the open file, and all of it.
    Flock,
}

impl Client {
    /// Takes, changes or drops a lock without waiting. `EAGAIN` where another stands against it,
    /// `EBADF` where the file is not open for it, `EINVAL`, `ENOLCK`.
    pub fn set_lock(
        &self,
        task: &Task,
        file: &Arc<Description>,
        family: LockFamily,
        lock: Lock,
    ) -> Result<()> {
        let open = file.file()?;
        let request = request(task, file, family, lock, false)?;
        let mount = file.mount();
        let cx = Context::new(task.caller());
        Ok(mount.call(Op::SETLK, |fs| match mount.has_locks() {
            true => fs.setlk(&cx, open, &request),
            false => mount.locks.set(open.ino.0, &request),
        })?)
    }

    /// Takes a lock, waiting for it: the answer comes to [`Pending::wait`], and
    /// [`Pending::cancel`] ends the wait with `EINTR`, as a signal does. `EDEADLK` where the wait
    /// could never end.
    pub fn wait_for_lock(
        &self,
        task: &Task,
        file: &Arc<Description>,
        family: LockFamily,
        lock: Lock,
    ) -> Result<Pending> {
        self.wait_for_lock_then(task, file, family, lock, None)
    }

    /// As [`wait_for_lock`](Client::wait_for_lock); with a callback, it gets the answer.
    pub fn wait_for_lock_then(
        &self,
        task: &Task,
        file: &Arc<Description>,
        family: LockFamily,
        lock: Lock,
        callback: Option<Callback>,
    ) -> Result<Pending> {
        let open = file.file()?;
        let request = request(task, file, family, lock, true)?;
        let op = IoOp::Lock { file: open, lock: request };
        let mount = file.mount();
        if mount.has_locks() {
            return Ok(start(task, file, op, Vec::new(), callback));
        }
        let ending = Ending { callback, file: Some(Arc::clone(file)) };
        let (pending, io) = prepare(task, mount.recorder(), op, Vec::new(), ending);
        mount.locks.wait(open.ino.0, &request, io);
        Ok(pending)
    }

    /// The bytes that a `struct flock` names: the first and the last. `whence` is in the numbers of C,
    /// 0 start, 1 position, 2 end of the file; a negative `len` means the bytes before, 0 all that
    /// follow. `EINVAL`, `EOVERFLOW`.
    pub fn lock_range(
        &self,
        task: &Task,
        file: &Description,
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

    /// The first lock that stands against `lock`, `F_GETLK`; `None` where it could be had.
    pub fn test_lock(
        &self,
        task: &Task,
        file: &Arc<Description>,
        family: LockFamily,
        lock: Lock,
    ) -> Result<Option<Lock>> {
        let open = file.file()?;
        let request = LockRequest { wait: false, ..raw_request(task, file, family, lock, false) };
        let mount = file.mount();
        let cx = Context::new(task.caller());
        Ok(mount.call(Op::GETLK, |fs| match mount.has_locks() {
            true => fs.getlk(&cx, open, &request),
            false => mount.locks.conflict(open.ino.0, &request),
        })?)
    }
}

fn request(
    task: &Task,
    file: &Description,
    family: LockFamily,
    lock: Lock,
    wait: bool,
) -> Result<LockRequest, Errno> {
    let open_for = match lock.typ {
        LockType::Read => file.access != 1,
        LockType::Write => file.access != 0,
        LockType::Unlock => true,
    };
    if family != LockFamily::Flock && !open_for {
        return Err(Errno::EBADF);
    }
    Ok(raw_request(task, file, family, lock, wait))
}

fn raw_request(
    task: &Task,
    file: &Description,
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
