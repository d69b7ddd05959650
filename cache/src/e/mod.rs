//! The sharing-aware policies. The formula is in the documentation of the crate.

mod history;
mod learn;
mod plain;
mod queue;

pub use learn::{CHOICES, QueueE, SAMPLE};
pub use plain::PlainE;
pub use queue::PolicyWeights;

/// The bit of a process in a set of 64.
const fn bit(user: u32) -> u64 {
    1 << (user % 64)
}

/// Processes of the current and of the previous period.
#[derive(Debug, Default)]
struct ActiveProcesses {
    period: u64,
    now: u64,
    before: u64,
}

impl ActiveProcesses {
    /// Adds a process; returns their number, N.
    fn record_use(&mut self, user: u32, period: u64) -> u32 {
        if period != self.period {
            self.before = if period == self.period + 1 { self.now } else { 0 };
            (self.now, self.period) = (0, period);
        }
        self.now |= bit(user);
        self.count()
    }

    fn count(&self) -> u32 {
        (self.now | self.before).count_ones().max(1)
    }
}
