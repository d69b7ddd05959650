//! The time that measurements of a device use.

use std::fmt;
use std::time::{Duration, Instant};

/// A clock that never goes back. A model of a device has one of its own.
pub trait DeviceClock: Send + Sync + fmt::Debug {
    /// The time since some moment.
    fn now(&self) -> Duration;
}

/// The clock of the machine (`CLOCK_MONOTONIC`, clock_gettime(2)).
#[derive(Debug)]
pub struct MonotonicClock(Instant);

impl Default for MonotonicClock {
    fn default() -> Self {
        MonotonicClock(Instant::now())
    }
}

impl DeviceClock for MonotonicClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}
