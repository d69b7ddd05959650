//! The time that inodes get.

use std::sync::atomic::{AtomicU64, Ordering};

use defuse_fs::Timestamp;

/// The clock of the machine, or one that tests step: then a seed repeats every byte on the device.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The next step of a stepped clock; 0 stands for the clock of the machine.
    step: AtomicU64,
}

impl Clock {
    /// A clock that is a millisecond later at every look.
    pub(super) fn stepped() -> Self {
        Clock { step: AtomicU64::new(1) }
    }

    pub(super) fn now(&self) -> Timestamp {
        if self.step.load(Ordering::Relaxed) == 0 {
            return Timestamp::now();
        }
        let step = self.step.fetch_add(1, Ordering::Relaxed);
        let nanos = (step % 1000) as u32 * 1_000_000;
        Timestamp { secs: (step / 1000) as i64, nanos }
    }
}
