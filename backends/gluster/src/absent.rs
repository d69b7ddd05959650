//! Extended attributes that a file was seen without a moment ago.
//!
//! Kernels and programs ask for some attributes of each file, which few files have: a kernel for
//! the capability, before it changes a file, and ls(1) for the access list.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::answers::bit_of;
use crate::volume::Gfid;

/// Maximum number of files.
const KEPT: usize = 8192;

/// The attributes that files were seen without.
#[derive(Debug, Default)]
pub struct AbsentAttributes {
    seen: Mutex<HashMap<Gfid, SeenWithout>>,
    /// Number of beginnings and ends of changes of extended attributes by this client.
    changes: AtomicU64,
}

/// A bit for each attribute, with a time before the first query for one, and the number of changes
/// then.
#[derive(Clone, Copy, Debug)]
struct SeenWithout {
    bits: u8,
    at: Instant,
    changes: u64,
}

impl AbsentAttributes {
    /// The number of changes by this client.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Records the beginning or the end of a change by this client.
    pub fn record_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// True if a file was seen without an attribute less than `valid` ago.
    pub fn lacks(&self, gfid: Gfid, name: &[u8], valid: Duration) -> bool {
        let Some(bit) = bit_of(name) else { return false };
        let seen = self.lock().get(&gfid).copied();
        seen.is_some_and(|seen| seen.bits & bit != 0 && self.holds(&seen, valid))
    }

    /// Records that a file has no such attribute, by an answer to a query at `at` after so many
    /// changes.
    pub fn add(&self, gfid: Gfid, name: &[u8], (at, changes): (Instant, u64), valid: Duration) {
        let Some(bit) = bit_of(name) else { return };
        let new = SeenWithout { bits: bit, at, changes };
        let mut all = self.lock();
        if all.len() >= KEPT {
            all.clear();
        }
        let seen = all.entry(gfid).or_insert(new);
        match self.holds(seen, valid) {
            // The time stays that of the first query.
            true => seen.bits |= bit,
            false => *seen = new,
        }
    }

    fn holds(&self, seen: &SeenWithout, valid: Duration) -> bool {
        seen.changes == self.changes() && seen.at.elapsed() < valid
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Gfid, SeenWithout>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_absent_for_a_time_and_until_this_client_changes_one() {
        const F: Gfid = [1; 16];
        const CAPABILITY: &[u8] = b"security.capability";
        const ACL: &[u8] = b"system.posix_acl_access";
        let (absent, long) = (AbsentAttributes::default(), Duration::from_secs(1000));
        let now = || (Instant::now(), absent.changes());
        absent.add(F, CAPABILITY, now(), long);
        absent.add(F, b"user.a", now(), long);
        assert!(absent.lacks(F, CAPABILITY, long) && !absent.lacks(F, ACL, long));
        assert!(!absent.lacks(F, CAPABILITY, Duration::ZERO) && !absent.lacks(F, b"user.a", long));
        absent.add(F, ACL, now(), long);
        assert!(absent.lacks(F, CAPABILITY, long) && absent.lacks(F, ACL, long));
        let before = now();
        absent.record_change();
        assert!(!absent.lacks(F, CAPABILITY, long));
        absent.add(F, CAPABILITY, before, long);
        assert!(!absent.lacks(F, CAPABILITY, long), "the query was before the change");
        for number in 0..2 * KEPT as u128 {
            absent.add(number.to_ne_bytes(), ACL, now(), long);
        }
        assert!(absent.lock().len() <= KEPT);
    }
}
