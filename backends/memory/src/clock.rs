//! Timestamps for changes.
//!
//! Reading the exact time costs as much as copying a quarter of a page. A write therefore uses the
//! time of the last kernel tick, unless the attributes were read since the last change. Everything
//! else uses the exact time. An observer who reads the attributes before and after a change thus
//! sees different times. Linux does the same (multigrain timestamps, from 6.13 on).

use std::sync::atomic::{AtomicI64, Ordering};

use defuse_fs::Timestamp;
use rustix::time::{ClockId, clock_gettime};

/// The longest tick of a kernel is 10 ms. A larger difference means that the clock was set back.
const MOST_BEHIND_NS: i64 = 100_000_000;
const SECOND_NS: i64 = 1_000_000_000;

/// A clock that never goes backwards, unless the clock of the machine is set back.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// The latest exact time returned, in nanoseconds since 1970.
    floor_ns: AtomicI64,
}

impl Clock {
    /// The exact time.
    pub fn exact(&self) -> Timestamp {
        let now_ns = to_ns(Timestamp::now());
        let later = |floor_ns| Some(not_before(now_ns, floor_ns));
        let _ = self.floor_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
        from_ns(now_ns)
    }

    /// The time of the last tick, or the last exact time if that is later.
    pub fn coarse(&self) -> Timestamp {
        let tick = clock_gettime(ClockId::RealtimeCoarse);
        let tick_ns = tick.tv_sec.saturating_mul(SECOND_NS).saturating_add(tick.tv_nsec);
        from_ns(not_before(tick_ns, self.floor_ns.load(Ordering::Relaxed)))
    }
}

/// Returns the later time, unless `floor_ns` is later by more than a tick can explain.
fn not_before(now_ns: i64, floor_ns: i64) -> i64 {
    let behind = floor_ns.saturating_sub(now_ns);
    if (1..MOST_BEHIND_NS).contains(&behind) { floor_ns } else { now_ns }
}

/// Saturates at the years 1677 and 2262.
fn to_ns(time: Timestamp) -> i64 {
    time.secs.saturating_mul(SECOND_NS).saturating_add(i64::from(time.nanos))
}

fn from_ns(ns: i64) -> Timestamp {
    Timestamp { secs: ns.div_euclid(SECOND_NS), nanos: ns.rem_euclid(SECOND_NS) as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_of_both_kinds_never_go_back() {
        let clock = Clock::default();
        let mut last = clock.coarse();
        for number in 0..100_000 {
            let next = if number % 7 == 0 { clock.exact() } else { clock.coarse() };
            assert!(next >= last, "{next:?} after {last:?}");
            last = next;
        }
    }

    #[test]
    fn a_clock_that_was_set_back_is_followed() {
        assert_eq!(not_before(1_000, 1_500), 1_500);
        assert_eq!(not_before(1_500, 1_000), 1_500);
        assert_eq!(not_before(1_000, 3_600 * SECOND_NS), 1_000);
    }

    #[test]
    fn times_before_1970_have_positive_nanoseconds() {
        for ns in [0, -1, 1_700_000_000_123_456_789, -3 * SECOND_NS] {
            assert_eq!(to_ns(from_ns(ns)), ns);
        }
        assert_eq!(from_ns(-1), Timestamp { secs: -1, nanos: 999_999_999 });
    }
}
