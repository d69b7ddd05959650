//! A cache of the directories with a default access list, which replaces the umask of new files.
//!
//! The servers know no umask. Without the cache, each creation would first read the list of its
//! directory from the servers.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::volume::Gfid;

/// Maximum number of directories in the cache.
const KEPT: usize = 1024;

/// The answers of the servers.
#[derive(Debug, Default)]
pub struct DefaultAclCache {
    inner: Mutex<DefaultAclState>,
}

#[derive(Debug, Default)]
struct DefaultAclState {
    known: HashMap<Gfid, (Instant, bool)>,
    /// Number of changes by this client.
    changes: u64,
}

impl DefaultAclCache {
    /// True if the directory has a default access list: by an answer that is not older than
    /// `valid`, or by a call of `ask`.
    pub fn has(&self, dir: Gfid, valid: Duration, ask: impl FnOnce() -> bool) -> bool {
        let before = {
            let inner = self.lock();
            match inner.known.get(&dir) {
                Some((at, has)) if at.elapsed() < valid => return *has,
                _ => inner.changes,
            }
        };
        let queried = Instant::now();
        let has = ask();
        let mut inner = self.lock();
        // An answer that a change has overtaken is not valid after the change.
        if inner.changes == before && !valid.is_zero() {
            if inner.known.len() >= KEPT {
                inner.known.clear();
            }
            inner.known.insert(dir, (queried, has));
        }
        has
    }

    /// Records that this client has changed the list of a directory.
    pub fn record_change(&self, dir: Gfid) {
        let mut inner = self.lock();
        inner.changes += 1;
        inner.known.remove(&dir);
    }

    fn lock(&self) -> MutexGuard<'_, DefaultAclState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: Gfid = [1; 16];
    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn a_directory_is_asked_for_once_until_it_changes() {
        let defaults = DefaultAclCache::default();
        assert!(!defaults.has(D, LONG, || false));
        assert!(!defaults.has(D, LONG, || panic!("asked again")));
        defaults.record_change(D);
        assert!(defaults.has(D, LONG, || true) && defaults.has(D, LONG, || false));
        assert!(!defaults.has(D, Duration::ZERO, || false), "an answer that is old at once");
    }

    #[test]
    fn an_answer_that_a_change_overtakes_is_not_kept() {
        let defaults = DefaultAclCache::default();
        let answer = defaults.has(D, LONG, || {
            defaults.record_change(D);
            false
        });
        assert!(!answer && defaults.has(D, LONG, || true));
    }

    #[test]
    fn answers_are_bounded() {
        let defaults = DefaultAclCache::default();
        for number in 0..3 * KEPT as u128 {
            assert!(defaults.has(number.to_ne_bytes(), LONG, || true));
        }
        assert!(defaults.lock().known.len() <= KEPT);
    }
}
