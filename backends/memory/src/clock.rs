//! Timestamps for changes.
//!
//! Reading the exact time costs as much as copying a quarter of a page. A write therefore uses the
//! time of the last kernel tick, unless the attributes were read since the last change. Everything
//! else uses the exact time. An observer who reads the attributes before and after a change thus
//! sees different times. Linux does the same (multigrain timestamps, from 6.13 on).
//!
//! A kernel with a write-back cache dates the changes of data by itself, by its last tick.
//! Everything is dated so then: an exact time would lie behind the date of a later write.

use defuse_fs::{DateFloor, Timestamp};
use rustix::time::{ClockId, clock_gettime};

/// A clock that never goes backwards, unless the clock of the machine is set back.
#[derive(Debug, Default)]
pub(crate) struct DateClock {
    latest: DateFloor,
    /// The kernel dates changes, too.
    is_shared: bool,
}

impl DateClock {
    pub fn new(is_shared: bool) -> Self {
        DateClock { is_shared, ..DateClock::default() }
    }

    /// The exact time.
    pub fn exact(&self) -> Timestamp {
        if self.is_shared {
            return self.coarse();
        }
        let now = Timestamp::now();
        self.latest.raise(now);
        now
    }

    /// The time of the last tick, or the last exact time if that is later.
    pub fn coarse(&self) -> Timestamp {
        let tick = clock_gettime(ClockId::RealtimeCoarse);
        self.latest.bound_below(Timestamp { secs: tick.tv_sec, nanos: tick.tv_nsec as u32 })
    }

    /// Notes a date that the kernel has given.
    pub fn note(&self, date: Timestamp) {
        if self.is_shared {
            self.latest.raise(date);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_of_both_kinds_never_go_back() {
        for clock in [DateClock::default(), DateClock::new(true)] {
            let mut last = clock.coarse();
            for number in 0..100_000 {
                let next = if number % 7 == 0 { clock.exact() } else { clock.coarse() };
                assert!(next >= last, "{next:?} after {last:?}");
                last = next;
            }
        }
    }

    #[test]
    fn a_date_of_the_kernel_lies_behind_no_later_one() {
        let clock = DateClock::new(true);
        for _ in 0..1000 {
            let kernel = Timestamp::now();
            clock.note(kernel);
            assert!(clock.exact() >= kernel && clock.coarse() >= kernel);
        }
    }
}
