//! Access times.

use crate::timestamp::Timestamp;

/// Seconds after which an access time is updated in any case.
const DAY: i64 = 24 * 60 * 60;

/// The rule by which reading changes the access time, mount(8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTimeRule {
    /// `relatime`: see [`access_time_is_due`].
    #[default]
    Relative,
    /// `strictatime`: each time.
    Strict,
    /// `noatime`: never.
    Never,
}

impl AccessTimeRule {
    /// True if reading at `now` changes the access time by this rule.
    pub fn is_due(self, access: Timestamp, newest_change: Timestamp, now: Timestamp) -> bool {
        match self {
            AccessTimeRule::Relative => access_time_is_due(access, newest_change, now),
            AccessTimeRule::Strict => true,
            AccessTimeRule::Never => false,
        }
    }
}

/// True if reading at `now` changes the access time, by the rule of `relatime` (mount(8)): it is
/// not later than the newest change, or a day old.
pub fn access_time_is_due(access: Timestamp, newest_change: Timestamp, now: Timestamp) -> bool {
    access <= newest_change || access.secs.saturating_add(DAY) <= now.secs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_read_after_a_change_and_one_a_day_change_the_access_time() {
        let at = |secs| Timestamp { secs, nanos: 0 };
        let due = |access, change, now| access_time_is_due(at(access), at(change), at(now));
        assert!(due(10, 10, 11) && due(9, 10, 11));
        assert!(!due(11, 10, 12) && !due(11, 10, 10 + DAY));
        assert!(due(11, 10, 11 + DAY) && !due(i64::MAX, 10, i64::MAX - 1));
        let by = |rule: AccessTimeRule| rule.is_due(at(11), at(10), at(12));
        let rules = [AccessTimeRule::Relative, AccessTimeRule::Strict, AccessTimeRule::Never];
        assert_eq!(rules.map(by), [false, true, false]);
    }
}
