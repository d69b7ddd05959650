//! The end of a command that watches: after a time, by a signal, or both.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::error::{CommandFailure, Result};

/// Time between two checks for a signal.
const LOOK: Duration = Duration::from_millis(20);

/// Time between two checks that the subject of the command is still there.
const SUBJECT_PERIOD: Duration = Duration::from_millis(500);

/// The end of a command that watches.
pub struct StopCondition {
    stopped: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl StopCondition {
    /// Ends `after` this time (`None`: never), and on SIGINT, SIGTERM and SIGHUP, which from now on
    /// end the command in an orderly way.
    pub fn new(after: Option<Duration>) -> Result<StopCondition> {
        let stopped = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stopped)).map_err(|error| {
                CommandFailure::Failed(format!("cannot wait for signals: {error}"))
            })?;
        }
        Ok(StopCondition { stopped, deadline: after.map(|after| Instant::now() + after) })
    }

    /// True after the end.
    pub fn is_over(&self) -> bool {
        self.stopped.load(Relaxed) || self.remaining() == Some(Duration::ZERO)
    }

    /// Sleeps for `period`, or until the end. Returns false at the end.
    pub fn sleep(&self, period: Duration) -> bool {
        let end = Instant::now() + period;
        loop {
            if self.is_over() {
                return false;
            }
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return true;
            }
            thread::sleep(rest.min(LOOK).min(self.remaining().unwrap_or(LOOK)));
        }
    }

    /// Sleeps until the end, or until `goes_on` returns false: what the command watches may be
    /// gone.
    pub fn wait_while(&self, goes_on: impl Fn() -> bool) {
        while self.sleep(SUBJECT_PERIOD) && goes_on() {}
    }

    fn remaining(&self) -> Option<Duration> {
        Some(self.deadline?.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_comes_with_the_time_limit() {
        let until = StopCondition::new(Some(Duration::from_millis(50))).unwrap();
        assert!(until.sleep(Duration::ZERO));
        assert!(!until.sleep(Duration::from_secs(3600)));
        assert!(until.is_over());
        until.stopped.store(false, Relaxed);
        let endless = StopCondition { deadline: None, ..until };
        assert!(!endless.is_over() && endless.sleep(Duration::from_millis(1)));
        endless.stopped.store(true, Relaxed);
        endless.wait_while(|| true);
        endless.stopped.store(false, Relaxed);
        endless.wait_while(|| false);
    }
}
