//! References to the directories that were used last.
//!
//! libgfapi forgets an inode when its last object is closed. At the next use, before each operation on a name, it looks
//! the inode up on all bricks.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::volume::Gfid;

/// Maximum number of directories. Each reference takes about a kilobyte.
const KEPT: usize = 1024;

/// The directories.
#[derive(Debug)]
pub struct RecentDirectories<T> {
    kept: Mutex<HashMap<Gfid, T>>,
}

impl<T> Default for RecentDirectories<T> {
    fn default() -> Self {
        RecentDirectories { kept: Mutex::default() }
    }
}

impl<T> RecentDirectories<T> {
    /// Keeps a directory by the reference that `refer` makes, if it is not kept already.
    pub fn keep(&self, dir: Gfid, refer: impl FnOnce() -> Option<T>) {
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if lock().contains_key(&dir) {
            return;
        }
        let Some(reference) = refer() else { return };
        let mut kept = lock();
        let old = if kept.len() >= KEPT { std::mem::take(&mut *kept) } else { HashMap::new() };
        let other = kept.insert(dir, reference);
        drop(kept);
        // The references are dropped outside of the lock, because they call libgfapi.
        drop((old, other));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_kept_once_and_bounded() {
        let recent = RecentDirectories::default();
        recent.keep([1; 16], || None);
        recent.keep([1; 16], || Some(1));
        recent.keep([1; 16], || panic!("it is kept"));
        for number in 0..3 * KEPT as u128 {
            recent.keep(number.to_ne_bytes(), || Some(2));
        }
        assert!(recent.kept.lock().unwrap().len() <= KEPT);
    }
}
