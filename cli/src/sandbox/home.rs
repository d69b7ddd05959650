//! The mount namespace of the user, which a daemon can reach until it is ready.

use std::io;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

use crate::error::{CommandFailure, Result};

type HomeJob = Box<dyn FnOnce() + Send>;

/// A thread that stays in the namespace of the user while the others are in a new one. It mounts
/// and registers. It ends before the daemon is ready, so that no thread is left in that namespace.
pub struct HomeThread(Option<(Sender<HomeJob>, JoinHandle<()>)>);

impl HomeThread {
    /// For a daemon that stays in the namespace itself: no thread is needed.
    pub fn new_local() -> HomeThread {
        HomeThread(None)
    }

    /// Starts the thread in the present namespace of the calling thread.
    pub fn stay() -> io::Result<HomeThread> {
        let (jobs, queue) = mpsc::channel::<HomeJob>();
        let run = move || queue.into_iter().for_each(|job| job());
        let thread = thread::Builder::new().name("defuse-home".to_owned()).spawn(run)?;
        Ok(HomeThread(Some((jobs, thread))))
    }

    /// Runs `job` in the namespace of the user, and waits for its result.
    ///
    /// # Errors
    ///
    /// Fails if the thread has ended, after an internal error.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let Some((jobs, _)) = &self.0 else { return Ok(job()) };
        let (done, result) = mpsc::sync_channel(1);
        let job = move || drop(done.send(job()));
        let lost = || {
            CommandFailure::Failed(
                "the thread in the mount namespace of the user has ended: see the log".to_owned(),
            )
        };
        jobs.send(Box::new(job)).map_err(|_| lost())?;
        result.recv().map_err(|_| lost())
    }
}

impl Drop for HomeThread {
    fn drop(&mut self) {
        if let Some((jobs, thread)) = self.0.take() {
            drop(jobs);
            // Its internal error was logged.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_on_a_thread_of_their_own_and_a_panic_of_one_is_an_error() {
        let here = thread::current().id();
        assert_eq!(HomeThread::new_local().run(|| thread::current().id()), Ok(here));
        let home = HomeThread::stay().unwrap();
        assert_ne!(home.run(|| thread::current().id()), Ok(here));
        assert_eq!(home.run(|| 7), Ok(7));
        assert!(home.run(|| panic!("expected by the test")).is_err());
        assert!(home.run(|| 7).is_err());
    }
}
