//! Recalls: invalidations that are answered when the kernel caches nothing of an inode any more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use defuse_fs::{Errno, RecallCallback, Result};

/// Most recalls that the kernel has not finished; each has a thread, and may wait for requests that
/// the file system answers later.
const RECALLS_MAX: usize = 64;

/// The recalls of a session.
#[derive(Default)]
pub(crate) struct RecallCount {
    running: Arc<AtomicUsize>,
}

/// Counts one recall until the kernel has finished it.
struct RunningRecall(Arc<AtomicUsize>);

impl Drop for RunningRecall {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl RecallCount {
    /// Runs `invalidate`, which blocks until the kernel is done, on a thread of its own, and
    /// answers by `done`: with its result, or `ETIMEDOUT` after `limit`. `EAGAIN` where too many
    /// recalls run.
    pub(crate) fn start(
        &self,
        limit: Duration,
        invalidate: impl FnOnce() -> Result<()> + Send + 'static,
        done: RecallCallback,
    ) {
        let running = RunningRecall(Arc::clone(&self.running));
        if self.running.fetch_add(1, Ordering::AcqRel) >= RECALLS_MAX {
            return done(Err(Errno::EAGAIN));
        }
        let (send, receive) = mpsc::channel();
        let ask = move || {
            let _running = running;
            // The receiver is gone after the time limit.
            let _ = send.send(invalidate());
        };
        let wait = move || {
            let answer = match receive.recv_timeout(limit) {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout) => Err(Errno::ETIMEDOUT),
                Err(RecvTimeoutError::Disconnected) => Err(Errno::EIO),
            };
            if catch_unwind(AssertUnwindSafe(|| done(answer))).is_err() {
                log::error!("the file system panicked at the end of a recall");
            }
        };
        let spawn = |run: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name("defuse-recall".into()).spawn(run).map(drop)
        };
        // The waiting thread answers for a thread that could not be started: its channel is closed.
        if let Err(error) = spawn(Box::new(wait)).and_then(|()| spawn(Box::new(ask))) {
            log::warn!("no thread for a recall: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recall(
        recalls: &RecallCount,
        limit: Duration,
        run: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> mpsc::Receiver<Result<()>> {
        let (send, receive) = mpsc::channel();
        recalls.start(limit, run, Box::new(move |answer| send.send(answer).unwrap()));
        receive
    }

    #[test]
    fn a_recall_is_answered_once_at_its_end_or_at_its_time_limit() {
        let recalls = RecallCount::default();
        let long = Duration::from_secs(60);
        assert_eq!(recall(&recalls, long, || Ok(())).recv(), Ok(Ok(())));
        assert_eq!(recall(&recalls, long, || Err(Errno::ENOENT)).recv(), Ok(Err(Errno::ENOENT)));
        assert_eq!(recall(&recalls, long, || panic!("on purpose")).recv(), Ok(Err(Errno::EIO)));
        let (go_on, gate) = mpsc::channel::<()>();
        let held = move || gate.recv().map_err(|_| Errno::EIO);
        let answers = recall(&recalls, Duration::from_millis(20), held);
        assert_eq!(answers.recv(), Ok(Err(Errno::ETIMEDOUT)));
        go_on.send(()).unwrap();
        assert!(answers.recv().is_err(), "there is no second answer");
    }

    #[test]
    fn no_more_recalls_run_than_there_may_be_threads() {
        let recalls = RecallCount::default();
        let gate = Arc::new(std::sync::Barrier::new(RECALLS_MAX + 1));
        let long = Duration::from_secs(60);
        let answers: Vec<_> = (0..RECALLS_MAX)
            .map(|_| {
                let gate = Arc::clone(&gate);
                recall(&recalls, long, move || {
                    gate.wait();
                    Ok(())
                })
            })
            .collect();
        assert_eq!(recall(&recalls, long, || Ok(())).recv(), Ok(Err(Errno::EAGAIN)));
        gate.wait();
        assert!(answers.iter().all(|answer| answer.recv() == Ok(Ok(()))));
    }
}
