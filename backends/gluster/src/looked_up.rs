//! The names that a kernel has looked up a moment ago.
//!
//! libgfapi has one call to remove a name, for files and directories. A kernel has looked the name
//! up just before, and libgfapi still knows the inode of the name: then no further lookup is
//! necessary to know its kind.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::volume::Gfid;

/// Maximum number of names.
const KEPT: usize = 4096;

/// Children by directory and name.
type NamedChildren = HashMap<(Gfid, Box<[u8]>), LookedUpChild>;

/// The names with their inodes.
#[derive(Debug, Default)]
pub struct LookedUpNames(Mutex<NamedChildren>);

#[derive(Clone, Copy, Debug)]
struct LookedUpChild {
    gfid: Gfid,
    is_dir: bool,
    at: Instant,
}

impl LookedUpNames {
    /// Adds the answer to a lookup.
    pub fn add(&self, (dir, name): (Gfid, &[u8]), gfid: Gfid, is_dir: bool) {
        let mut names = self.lock();
        if names.len() >= KEPT {
            names.clear();
        }
        names.insert((dir, name.into()), LookedUpChild { gfid, is_dir, at: Instant::now() });
    }

    /// Removes a name. Returns its inode, and true if that is a directory, if it was looked up less
    /// than `valid` ago.
    pub fn take(&self, (dir, name): (Gfid, &[u8]), valid: Duration) -> Option<(Gfid, bool)> {
        let child = self.lock().remove(&(dir, Box::from(name)))?;
        (child.at.elapsed() < valid).then_some((child.gfid, child.is_dir))
    }

    fn lock(&self) -> MutexGuard<'_, NamedChildren> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_once_and_for_a_time_and_names_are_bounded() {
        let (names, long) = (LookedUpNames::default(), Duration::from_secs(1000));
        let place = ([1; 16], &b"a"[..]);
        names.add(place, [2; 16], false);
        names.add(place, [3; 16], true);
        assert_eq!(names.take(place, long), Some(([3; 16], true)));
        assert_eq!(names.take(place, long), None);
        names.add(place, [2; 16], false);
        assert_eq!(names.take(place, Duration::ZERO), None);
        for number in 0..2 * KEPT {
            names.add(([1; 16], number.to_string().as_bytes()), [2; 16], false);
        }
        assert!(names.lock().len() <= KEPT);
    }
}
