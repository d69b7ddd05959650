//! Pages that an asynchronous direct write leaves in the kernel's cache.
//!
//! The kernel drops the pages of a file before a direct write to it, and after a direct write that
//! it has waited for. After an asynchronous one it does not (`fuse_direct_IO` of `fs/fuse/file.c`).
//! A page that was filled meanwhile, by a read, a fault or a buffered write, would stay old for
//! good. So the session drops the pages of the range when such a write is done, and answers
//! afterwards, if the kernel may have pages of the inode at all.
//!
//! Dropping a page may wait for the reply to a READ that fills it. Therefore it is done on threads
//! that serve no requests.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use defuse_fs::Ino;

/// Words of the set of inodes.
const WORDS: usize = 1024;

/// Threads at most: each may wait for a part of the storage that does not answer.
const MOST: usize = 8;

/// Work that ends with an answer.
type PageJob = Box<dyn FnOnce() + Send>;

/// The inodes of which the kernel may have pages, and the threads that drop them.
pub(super) struct CachedPages {
    /// A bit for each set of inodes with the same hash. A bit that was set stays: too many pages
    /// may be dropped, and never too few.
    inodes: Box<[AtomicU64; WORDS]>,
    threads: Arc<PageThreads>,
}

#[derive(Default)]
struct PageThreads {
    state: Mutex<PageThreadState>,
    changed: Condvar,
}

#[derive(Default)]
struct PageThreadState {
    jobs: VecDeque<PageJob>,
    count: usize,
    idle: usize,
    ends: bool,
}

impl CachedPages {
    pub(super) fn new() -> Self {
        let inodes = Box::new([const { AtomicU64::new(0) }; WORDS]);
        CachedPages { inodes, threads: Arc::default() }
    }

    /// Records that pages of `ino` are being filled. Called before the file system reads their
    /// data.
    #[inline]
    pub(super) fn fill(&self, ino: Ino) {
        let (word, bit) = self.place(ino);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// True if the kernel may have pages of `ino`. Called after a write, so that a page that is
    /// filled later has its data.
    pub(super) fn may_have(&self, ino: Ino) -> bool {
        let (word, bit) = self.place(ino);
        word.load(Ordering::SeqCst) & bit != 0
    }

    fn place(&self, ino: Ino) -> (&AtomicU64, u64) {
        let hash = ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        (&self.inodes[(hash >> 6) as usize % WORDS], 1 << (hash & 63))
    }

    /// Runs `job` on a thread, or on this one if no thread can be started.
    pub(super) fn run(&self, job: PageJob) {
        let mut state = self.threads.lock();
        if state.jobs.len() >= state.idle && state.count < MOST {
            let threads = Arc::clone(&self.threads);
            let thread = thread::Builder::new().name("defuse-pages".to_owned());
            match thread.spawn(move || threads.serve()) {
                Ok(_) => state.count += 1,
                Err(error) => log::debug!("no further thread to drop pages: {error}"),
            }
        }
        if state.count == 0 {
            drop(state);
            return job();
        }
        state.jobs.push_back(job);
        drop(state);
        self.threads.changed.notify_one();
    }
}

impl PageThreads {
    fn lock(&self) -> MutexGuard<'_, PageThreadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
            } else if state.ends {
                return;
            } else {
                state.idle += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

impl Drop for CachedPages {
    /// The jobs have ended: each holds the session.
    fn drop(&mut self) {
        self.threads.lock().ends = true;
        self.threads.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn an_inode_has_pages_from_its_first_fill_on() {
        let pages = CachedPages::new();
        assert!(!(1..10_000).any(|ino| pages.may_have(Ino(ino))));
        pages.fill(Ino(77));
        assert!(pages.may_have(Ino(77)));
        let others = (1..10_000).filter(|ino| pages.may_have(Ino(*ino))).count();
        assert!(others < 10, "{others}");
    }

    #[test]
    fn jobs_that_wait_do_not_hold_up_others() {
        let pages = CachedPages::new();
        let (go, wait) = mpsc::channel::<()>();
        let (done, ended) = mpsc::channel();
        let last = done.clone();
        pages.run(Box::new(move || {
            wait.recv().unwrap();
            last.send("first").unwrap();
        }));
        pages.run(Box::new(move || done.send("second").unwrap()));
        assert_eq!(ended.recv(), Ok("second"));
        go.send(()).unwrap();
        assert_eq!(ended.recv(), Ok("first"));
    }
}
