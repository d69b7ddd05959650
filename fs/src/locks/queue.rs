//! The lock manager behind a mutex, for the contract's [`LockWait`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{LockRequestOutcome, LockTable};
use crate::{Errno, Lock, LockKind, LockOwner, LockRequest, LockWait, Result};

/// The locks of one file system, for backends and frontends that keep locks by themselves. Files
/// are identified by inode number. Waits are answered after the mutex is released, because answers
/// run code of the frontend.
#[derive(Debug, Default)]
pub struct LockQueue {
    table: Arc<Mutex<LockTable<u64, LockWait>>>,
    /// False until the first lock. Most file systems never have one, and every close checks it.
    used: AtomicBool,
}

impl LockQueue {
    /// Returns the first lock that conflicts with `request`, or `None`.
    pub fn conflict(&self, ino: u64, request: &LockRequest) -> Result<Option<Lock>> {
        lock(&self.table).conflict(ino, request)
    }

    /// Takes, changes or drops a lock without waiting: see [`LockTable::set`].
    pub fn set(&self, ino: u64, request: &LockRequest) -> Result<()> {
        self.used.store(true, Ordering::Release);
        let mut granted = Vec::new();
        let result = lock(&self.table).set(ino, request, &mut granted);
        answer(granted);
        result
    }

    /// Takes the lock of `wait` on the file `ino`, or queues the wait until the lock is available
    /// or the wait is interrupted.
    pub fn wait(&self, ino: u64, wait: LockWait) {
        self.used.store(true, Ordering::Release);
        let token = Arc::clone(wait.interrupt());
        let (request, uid) = (wait.request(), wait.caller().uid);
        let mut granted = Vec::new();
        let waiting = lock(&self.table).wait((ino, uid), &request, wait, &mut granted);
        answer(granted);
        match waiting {
            LockRequestOutcome::Done(wait, result) => wait.finish(result),
            LockRequestOutcome::Queued(ticket) => {
                let table = Arc::clone(&self.table);
                // Runs at once if the wait is already interrupted.
                token.on_interrupt(move || {
                    let wait = lock(&table).cancel(ticket);
                    if let Some(wait) = wait {
                        wait.finish(Err(Errno::EINTR));
                    }
                });
            }
        }
    }

    /// Drops the locks of one kind that `owner` holds on the file.
    pub fn drop_owner(&self, ino: u64, kind: LockKind, owner: LockOwner) {
        if !self.used.load(Ordering::Acquire) {
            return;
        }
        let mut granted = Vec::new();
        lock(&self.table).drop_owner(ino, kind, owner, &mut granted);
        answer(granted);
    }

    /// Drops all locks of a file that is no longer open. Returns the remaining waits.
    pub fn take_file(&self, ino: u64) -> Vec<LockWait> {
        if self.used.load(Ordering::Acquire) {
            lock(&self.table).forget_file(ino)
        } else {
            Vec::new()
        }
    }

    /// Answers the waits for a removed file with `ESTALE`.
    pub fn refuse(&self, waiting: Vec<LockWait>) {
        for wait in waiting {
            wait.finish(Err(Errno::ESTALE));
        }
    }
}

fn answer(granted: Vec<LockWait>) {
    for wait in granted {
        wait.finish(Ok(()));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The table is valid after every statement, so that a panic does not corrupt it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::MAX_WAITS_OF_USER;
    use super::*;
    use crate::layer::testing::a_lock;
    use crate::{Caller, Fh, File, Ino, InterruptToken, LockType};

    #[test]
    fn the_waits_of_one_user_leave_room_for_others_and_end_with_their_interrupts() {
        let queue = LockQueue::default();
        let exclusive = |owner| {
            let request = a_lock();
            let lock = Lock { typ: LockType::Write, ..request.lock };
            LockRequest { owner: LockOwner(owner), lock, ..request }
        };
        queue.set(7, &exclusive(1)).unwrap();
        let (send, answers) = mpsc::channel();
        let wait = |uid, owner| {
            let (send, token) = (send.clone(), Arc::new(InterruptToken::default()));
            let answer = Box::new(move |result| send.send((uid, result)).unwrap());
            let file = (File { ino: Ino(7), fh: Fh(0) }, exclusive(owner));
            let caller = Caller { uid, gid: uid, pid: 1 };
            queue.wait(7, LockWait::new(file, caller, 1, Arc::clone(&token), answer));
            token
        };
        let own: Vec<_> = (0..MAX_WAITS_OF_USER as u64).map(|owner| wait(5, owner + 2)).collect();
        assert!(answers.try_recv().is_err());
        wait(5, 90_000);
        assert_eq!(answers.try_recv(), Ok((5, Err(Errno::ENOLCK))));
        let other = wait(6, 90_001);
        assert!(answers.try_recv().is_err());
        own.iter().chain([&other]).for_each(|token| token.trip());
        let ended = answers.try_iter().filter(|(_, result)| *result == Err(Errno::EINTR)).count();
        assert_eq!(ended, MAX_WAITS_OF_USER + 1);
        wait(5, 90_002);
        queue.drop_owner(7, LockKind::Posix, LockOwner(1));
        assert_eq!(answers.try_recv(), Ok((5, Ok(()))));
    }
}
