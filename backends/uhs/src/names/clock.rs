//! The time that inodes get.

use std::sync::atomic::{AtomicU64, Ordering};

use defuse_fs::{DateFloor, Timestamp};
use rustix::time::{ClockId, clock_gettime};

/// The clock that dates changes.
#[derive(Debug, Default)]
pub(super) enum ChangeClock {
    /// The exact time of the machine.
    #[default]
    Exact,
    /// The last tick, by which a kernel with a write-back cache dates changes of data: an exact
    /// time would lie behind the date of a later write. No date is before the kernel's latest date.
    Shared(DateFloor),
    /// The next step of a clock for tests: a seed repeats every byte on the device.
    Stepped(AtomicU64),
}

impl ChangeClock {
    /// A clock that advances by a millisecond at every reading.
    pub(super) fn new_stepped() -> Self {
        ChangeClock::Stepped(AtomicU64::new(1))
    }

    pub(super) fn new_shared() -> Self {
        ChangeClock::Shared(DateFloor::default())
    }

    pub(super) fn now(&self) -> Timestamp {
        match self {
            ChangeClock::Exact => Timestamp::now(),
            ChangeClock::Shared(latest) => {
                let tick = clock_gettime(ClockId::RealtimeCoarse);
                latest.bound_below(Timestamp { secs: tick.tv_sec, nanos: tick.tv_nsec as u32 })
            }
            ChangeClock::Stepped(step) => {
                let step = step.fetch_add(1, Ordering::Relaxed);
                let nanos = (step % 1000) as u32 * 1_000_000;
                Timestamp { secs: (step / 1000) as i64, nanos }
            }
        }
    }

    /// Records a date from the kernel.
    pub(super) fn note(&self, date: Timestamp) {
        if let ChangeClock::Shared(latest) = self {
            latest.raise(date);
        }
    }
}
