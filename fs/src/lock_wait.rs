//! Waits for file locks.

use std::fmt;
use std::sync::Arc;

use crate::io::context;
use crate::{
    Caller, Context, Errno, File, InterruptToken, LockRequest, Origin, Result, SupplementaryGroups,
};

/// Receives the result of a [`LockWait`]. Called once, from any thread.
pub type LockAnswer = Box<dyn FnOnce(Result<()>) + Send>;

/// A wait for a lock, as passed to [`FileSystem::setlkw`](crate::FileSystem::setlkw). Any thread
/// may finish it at any time. If it is dropped without [`finish`](LockWait::finish), also by a
/// panic, it answers `EIO`.
pub struct LockWait {
    file: File,
    request: LockRequest,
    caller: Caller,
    unique: u64,
    origin: Origin,
    interrupt: Arc<InterruptToken>,
    groups: Option<Arc<dyn SupplementaryGroups>>,
    answer: Option<LockAnswer>,
}

impl LockWait {
    /// A wait by `caller` for the lock that `request` describes.
    pub fn new(
        (file, request): (File, LockRequest),
        caller: Caller,
        unique: u64,
        interrupt: Arc<InterruptToken>,
        answer: LockAnswer,
    ) -> Self {
        let answer = Some(answer);
        LockWait {
            file,
            request,
            caller,
            unique,
            origin: Origin::NONE,
            interrupt,
            groups: None,
            answer,
        }
    }

    /// Returns this wait with `origin` as its origin.
    #[must_use]
    pub fn from_origin(mut self, origin: Origin) -> Self {
        self.origin = origin;
        self
    }

    /// Returns this wait with `groups` as the source of the caller's supplementary groups.
    #[must_use]
    pub fn with_groups(mut self, groups: Arc<dyn SupplementaryGroups>) -> Self {
        self.groups = Some(groups);
        self
    }

    /// The open file.
    pub fn file(&self) -> File {
        self.file
    }

    /// The lock; its `wait` is set.
    pub fn request(&self) -> LockRequest {
        self.request
    }

    /// The waiting process.
    pub fn caller(&self) -> Caller {
        self.caller
    }

    /// The interrupt of this wait. A backend that queues the wait registers a wake that removes it
    /// from the queue and finishes it with `EINTR`.
    pub fn interrupt(&self) -> &Arc<InterruptToken> {
        &self.interrupt
    }

    /// Replaces the file by the result of `map`, for layers over a file system with other inode
    /// numbers or handles.
    #[must_use]
    pub fn map_file(mut self, map: impl FnOnce(File) -> File) -> Self {
        self.file = map(self.file);
        self
    }

    /// Replaces the request by the result of `map`, for layers over a file system that knows other
    /// owners.
    #[must_use]
    pub fn map_request(mut self, map: impl FnOnce(LockRequest) -> LockRequest) -> Self {
        self.request = map(self.request);
        self
    }

    /// Wraps the answer, for layers that observe or change it.
    #[must_use]
    pub fn map_answer(mut self, map: impl FnOnce(LockAnswer) -> LockAnswer) -> Self {
        self.answer = self.answer.take().map(map);
        self
    }

    /// Runs `run` with the context of this wait.
    pub fn with_context<T>(&self, run: impl FnOnce(&Context<'_>) -> T) -> T {
        run(&context(
            (self.caller, self.origin),
            self.unique,
            &self.interrupt,
            self.groups.as_deref(),
        ))
    }

    /// Finishes the wait: the lock was taken, or failed with an error of
    /// [`setlk`](crate::FileSystem::setlk).
    pub fn finish(mut self, result: Result<()>) {
        self.complete(result);
    }

    fn complete(&mut self, result: Result<()>) {
        if let Some(answer) = self.answer.take() {
            answer(result);
        }
    }
}

impl Drop for LockWait {
    fn drop(&mut self) {
        self.complete(Err(Errno::EIO));
    }
}

impl fmt::Debug for LockWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockWait")
            .field("file", &self.file)
            .field("request", &self.request)
            .field("unique", &self.unique)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::layer::testing::a_lock;
    use crate::{Fh, Ino};

    #[test]
    fn a_dropped_wait_answers_eio_and_a_finished_one_answers_once() {
        let (send, answers) = mpsc::channel();
        let wait = || {
            let send = send.clone();
            let answer = Box::new(move |result| send.send(result).unwrap());
            let file = File { ino: Ino(2), fh: Fh(1) };
            LockWait::new((file, a_lock()), Caller::default(), 1, Arc::default(), answer)
        };
        drop(wait());
        assert_eq!(answers.try_iter().collect::<Vec<_>>(), [Err(Errno::EIO)]);
        wait().map_file(|file| File { ino: Ino(3), ..file }).finish(Ok(()));
        assert_eq!(answers.try_iter().collect::<Vec<_>>(), [Ok(())]);
    }
}
