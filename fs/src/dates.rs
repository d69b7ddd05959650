//! Dates that never go back, although they come from several clocks.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::Timestamp;

const SECOND_NS: i64 = 1_000_000_000;

/// The longest tick of a kernel is 10 ms. A larger difference means that the clock was set back.
const MOST_BEHIND_NS: i64 = 100_000_000;

/// The latest date that was given, below which no later one falls.
///
/// The clocks of a machine differ by up to a tick: the exact time, the time of the last tick, and
/// the time by which the kernel dates the changes in its write-back cache, which lies between them
/// (multigrain timestamps, Linux 6.13).
#[derive(Debug, Default)]
pub struct DateFloor {
    ns: AtomicI64,
}

impl DateFloor {
    /// Notes a date that was given.
    pub fn raise(&self, date: Timestamp) {
        let ns = to_ns(date);
        let later = |floor| Some(bound_below(ns, floor));
        let _ = self.ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    /// `date`, or the latest date that was given if that is later. A clock that was set back is
    /// followed.
    pub fn bound_below(&self, date: Timestamp) -> Timestamp {
        from_ns(bound_below(to_ns(date), self.ns.load(Ordering::Relaxed)))
    }
}

/// Returns the later time, unless `floor_ns` is later by more than a tick can explain.
fn bound_below(now_ns: i64, floor_ns: i64) -> i64 {
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
    fn a_clock_that_was_set_back_is_followed() {
        assert_eq!(bound_below(1_000, 1_500), 1_500);
        assert_eq!(bound_below(1_500, 1_000), 1_500);
        assert_eq!(bound_below(1_000, 3_600 * SECOND_NS), 1_000);
    }

    #[test]
    fn times_before_1970_have_positive_nanoseconds() {
        for ns in [0, -1, 1_700_000_000_123_456_789, -3 * SECOND_NS] {
            assert_eq!(to_ns(from_ns(ns)), ns);
        }
        assert_eq!(from_ns(-1), Timestamp { secs: -1, nanos: 999_999_999 });
    }
}
