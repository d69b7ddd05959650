//! Points in time.

use std::time::{SystemTime, UNIX_EPOCH};

/// A point in time, like `struct timespec`: seconds since 1970 UTC (negative before), and
/// additional nanoseconds, 0 to 999,999,999.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    /// Whole seconds.
    pub secs: i64,
    /// Nanoseconds within the second.
    pub nanos: u32,
}

impl Timestamp {
    /// The time of the system clock.
    pub fn now() -> Self {
        match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => Timestamp { secs: since.as_secs() as i64, nanos: since.subsec_nanos() },
            Err(before) => {
                let ago = before.duration();
                let (secs, nanos) = (ago.as_secs() as i64, ago.subsec_nanos());
                if nanos == 0 {
                    Timestamp { secs: -secs, nanos: 0 }
                } else {
                    Timestamp { secs: -secs - 1, nanos: 1_000_000_000 - nanos }
                }
            }
        }
    }
}
