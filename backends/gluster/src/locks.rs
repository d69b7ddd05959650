//! POSIX locks, which the servers keep for all clients.
//!
//! A server identifies the owner of a lock by a key of the handle through which the lock was taken,
//! so that each owner has a handle of its own. flock(2) locks are kept in this process: GlusterFS
//! has none, and would mix them with POSIX locks of the same program.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_fs::locks::{LockQueue, OFFSET_MAX};
use defuse_fs::{Errno, Fh, Ino, Lock, LockOwner, LockRequest, LockType, LockWait, Result};

use crate::file::{GfapiHandle, position};

/// Maximum number of owners with locks.
const MAX_OWNERS: usize = 1 << 14;

/// Maximum number of lock waiters, for each of which the request is repeated periodically.
const MAX_WAITS: usize = 256;

/// Maximum number of owners, and of waiters, of one user other than root, so that no user takes
/// all.
const OWNERS_OF_USER: usize = MAX_OWNERS / 4;
const WAITS_OF_USER: usize = MAX_WAITS / 4;

/// Time between two requests for a lock waiter: the servers report a free lock only to a thread
/// that waits, and such a thread could not be interrupted.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// The locks of a file system.
#[derive(Default)]
pub(crate) struct VolumeLocks {
    owners: Mutex<HashMap<(Ino, LockOwner), LockOwnerHandle>>,
    /// flock(2).
    pub flocks: LockQueue,
    waits: Arc<LockPoller>,
}

struct LockOwnerHandle {
    handle: Arc<GfapiHandle>,
    /// The open file through which the owner took its first lock.
    fh: Fh,
    uid: u32,
}

/// The file of a request.
pub(crate) struct LockTarget<'a> {
    pub ino: Ino,
    pub fh: Fh,
    pub handle: &'a GfapiHandle,
    /// The user that requests the lock.
    pub uid: u32,
}

impl VolumeLocks {
    /// The first conflicting lock.
    pub fn conflict(&self, of: &LockTarget<'_>, request: &LockRequest) -> Result<Option<Lock>> {
        let handle = match self.find_handle(of.ino, request.owner) {
            Some(handle) => handle,
            None => Arc::new(new_owner(of.handle, request.owner)?),
        };
        let mut lock = to_c(&request.lock)?;
        handle.posix_lock(libc::F_GETLK, &mut lock)?;
        Ok(from_c(&lock))
    }

    /// Takes, changes or drops a lock. Fails with `EAGAIN`.
    pub fn set(&self, of: &LockTarget<'_>, request: &LockRequest) -> Result<()> {
        ask(&*self.handle_of(of, request)?, &request.lock)
    }

    /// Takes a lock as soon as it is free.
    pub fn wait(&self, of: &LockTarget<'_>, wait: LockWait) {
        let request = wait.request();
        match self.handle_of(of, &request) {
            Ok(handle) => self.waits.add(BlockedLock { wait, handle, lock: request.lock }),
            Err(errno) => wait.finish(Err(errno)),
        }
    }

    /// Drops all locks of an owner, because it closed a descriptor of the file. True if the owner
    /// had some.
    pub fn drop_owner(&self, ino: Ino, owner: LockOwner) -> Result<bool> {
        let dropped = self.lock().remove(&(ino, owner));
        match dropped {
            Some(owner) => {
                Arc::into_inner(owner.handle).map_or(Ok(()), GfapiHandle::close).map(|()| true)
            }
            None => Ok(false),
        }
    }

    /// Drops the locks that were taken through an open file.
    pub fn release(&self, ino: Ino, fh: Fh) {
        let mut owners = self.lock();
        if owners.is_empty() {
            return;
        }
        let gone: Vec<LockOwnerHandle> = owners
            .extract_if(|key, owner| key.0 == ino && owner.fh == fh)
            .map(|(_, o)| o)
            .collect();
        // Closing the handles sends requests to the servers.
        drop(owners);
        drop(gone);
    }

    fn find_handle(&self, ino: Ino, owner: LockOwner) -> Option<Arc<GfapiHandle>> {
        self.lock().get(&(ino, owner)).map(|owner| Arc::clone(&owner.handle))
    }

    fn handle_of(&self, of: &LockTarget<'_>, request: &LockRequest) -> Result<Arc<GfapiHandle>> {
        if let Some(handle) = self.find_handle(of.ino, request.owner) {
            return Ok(handle);
        }
        let handle = Arc::new(new_owner(of.handle, request.owner)?);
        let mut owners = self.lock();
        let of_user = || owners.values().filter(|owner| owner.uid == of.uid).count();
        let is_full = owners.len() >= OWNERS_OF_USER && of.uid != 0 && of_user() >= OWNERS_OF_USER;
        if is_full || owners.len() >= MAX_OWNERS {
            return Err(Errno::ENOLCK);
        }
        let new = LockOwnerHandle { handle, fh: of.fh, uid: of.uid };
        let owner = owners.entry((of.ino, request.owner)).or_insert(new);
        Ok(Arc::clone(&owner.handle))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(Ino, LockOwner), LockOwnerHandle>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn new_owner(handle: &GfapiHandle, owner: LockOwner) -> Result<GfapiHandle> {
    let handle = handle.duplicate()?;
    handle.set_lock_owner(owner.0)?;
    Ok(handle)
}

fn ask(handle: &GfapiHandle, lock: &Lock) -> Result<()> {
    match handle.posix_lock(libc::F_SETLK, &mut to_c(lock)?) {
        Err(Errno::EACCES) => Err(Errno::EAGAIN),
        queries => queries,
    }
}

/// The lock as `struct flock`.
fn to_c(lock: &Lock) -> Result<libc::flock> {
    let kind = match lock.typ {
        LockType::Read => libc::F_RDLCK,
        LockType::Write => libc::F_WRLCK,
        LockType::Unlock => libc::F_UNLCK,
    };
    let start = position(lock.start)?;
    let len = match lock.end {
        OFFSET_MAX.. => 0,
        end if end < lock.start => return Err(Errno::EINVAL),
        end => position(end - lock.start + 1)?,
    };
    let (l_type, l_whence) = (kind as i16, libc::SEEK_SET as i16);
    let l_pid = i32::try_from(lock.pid).unwrap_or(0);
    Ok(libc::flock { l_type, l_whence, l_start: start, l_len: len, l_pid })
}

/// The lock in an answer to F_GETLK; `None` if there is none.
fn from_c(lock: &libc::flock) -> Option<Lock> {
    let typ = match i32::from(lock.l_type) {
        libc::F_RDLCK => LockType::Read,
        libc::F_WRLCK => LockType::Write,
        _ => return None,
    };
    let start = lock.l_start.max(0) as u64;
    let end = match lock.l_len {
        ..=0 => OFFSET_MAX,
        len => start + len as u64 - 1,
    };
    // The process may run on another machine.
    Some(Lock { typ, start, end, pid: lock.l_pid.max(0) as u32 })
}

/// A lock waiter.
struct BlockedLock {
    wait: LockWait,
    handle: Arc<GfapiHandle>,
    lock: Lock,
}

/// True if `uid` may add a waiter to waiters of the users `waiting`.
fn may_wait(waiting: impl Iterator<Item = u32> + Clone, uid: u32) -> bool {
    let of_user = waiting.clone().filter(|&other| other == uid).count();
    waiting.count() < MAX_WAITS && (uid == 0 || of_user < WAITS_OF_USER)
}

/// The lock waiters.
#[derive(Default)]
struct BlockedLocks {
    /// Waiters without a request in progress.
    idle: Vec<BlockedLock>,
    /// The users of all waiters.
    users: Vec<u32>,
    /// The thread runs.
    running: bool,
}

/// All lock waiters, and the lock poller, which runs only while there are some.
#[derive(Default)]
struct LockPoller {
    state: Mutex<BlockedLocks>,
    woken: Condvar,
}

impl LockPoller {
    fn add(self: &Arc<Self>, waiting: BlockedLock) {
        let this = Arc::downgrade(self);
        let token = Arc::clone(waiting.wait.interrupt());
        let mut state = self.lock();
        let uid = waiting.wait.caller().uid;
        if !may_wait(state.users.iter().copied(), uid) {
            drop(state);
            return waiting.wait.finish(Err(Errno::ENOLCK));
        }
        state.idle.push(waiting);
        state.users.push(uid);
        if !state.running {
            let waits = Arc::clone(self);
            let asker = std::thread::Builder::new().name("gluster-locks".to_owned());
            state.running = asker.spawn(move || waits.run()).is_ok();
        }
        if !state.running {
            let failed = std::mem::take(&mut state.idle);
            state.users.clear();
            drop(state);
            failed.into_iter().for_each(|waiting| waiting.wait.finish(Err(Errno::ENOLCK)));
            return;
        }
        drop(state);
        token.on_interrupt(move || {
            if let Some(waits) = this.upgrade() {
                waits.woken.notify_all();
            }
        });
    }

    fn run(&self) {
        let mut queries = Vec::new();
        loop {
            let mut state = self.lock();
            queries.append(&mut state.idle);
            if queries.is_empty() {
                state.running = false;
                return;
            }
            drop(state);
            let left =
                std::mem::take(&mut queries).into_iter().filter_map(BlockedLock::ask).collect();
            let mut state = self.lock();
            let new = std::mem::replace(&mut state.idle, left);
            state.idle.extend(new);
            state.users = state.idle.iter().map(|waiting| waiting.wait.caller().uid).collect();
            let waited = self.woken.wait_timeout(state, ASK_EVERY);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn lock(&self) -> MutexGuard<'_, BlockedLocks> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockedLock {
    /// Requests the lock once. `None` if the wait has ended.
    fn ask(self) -> Option<BlockedLock> {
        use defuse_fs::InterruptCheck;
        if self.wait.interrupt().is_interrupted() {
            self.wait.finish(Err(Errno::EINTR));
            return None;
        }
        match ask(&self.handle, &self.lock) {
            Err(Errno::EAGAIN) => Some(self),
            result => {
                // The handle is closed here rather than by the answer, which may release the file.
                let BlockedLock { wait, handle, .. } = self;
                drop(handle);
                wait.finish(result);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_to_the_end_of_the_file_has_no_length() {
        let lock = |start, end| Lock { typ: LockType::Write, start, end, pid: 0 };
        for (start, end) in [(0, OFFSET_MAX), (5, 5), (7, 1 << 40)] {
            let c = to_c(&lock(start, end)).unwrap();
            assert_eq!(from_c(&c), Some(lock(start, end)));
        }
        assert_eq!(to_c(&lock(0, u64::MAX)).unwrap().l_len, 0);
        assert_eq!(to_c(&lock(9, 3)).err(), Some(Errno::EINVAL));
        assert!(from_c(&to_c(&Lock { typ: LockType::Unlock, ..lock(0, 1) }).unwrap()).is_none());
    }

    #[test]
    fn no_user_but_root_takes_all_waits() {
        let waiting = |uid, count| std::iter::repeat_n(uid, count);
        assert!(may_wait(waiting(7, WAITS_OF_USER - 1), 7));
        assert!(!may_wait(waiting(7, WAITS_OF_USER), 7));
        assert!(may_wait(waiting(7, WAITS_OF_USER), 8));
        assert!(may_wait(waiting(0, MAX_WAITS - 1), 0) && !may_wait(waiting(0, MAX_WAITS), 0));
    }
}
