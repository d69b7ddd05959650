//! The files that a sync wants.

use std::collections::HashSet;

/// The files whose data a sync makes durable, beside all other changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SyncedFiles {
    All,
    These(HashSet<u64>),
}

impl SyncedFiles {
    pub(crate) fn contains(&self, ino: u64) -> bool {
        match self {
            SyncedFiles::All => true,
            SyncedFiles::These(inos) => inos.contains(&ino),
        }
    }

    /// True if one of these files is wanted.
    pub(crate) fn meets(&self, files: &HashSet<u64>) -> bool {
        match self {
            SyncedFiles::All => true,
            SyncedFiles::These(inos) => !inos.is_disjoint(files),
        }
    }

    /// Adds a file, or all for `None`.
    pub(crate) fn add(&mut self, ino: Option<u64>) {
        match (&mut *self, ino) {
            (SyncedFiles::All, _) => {}
            (SyncedFiles::These(inos), Some(ino)) => drop(inos.insert(ino)),
            (SyncedFiles::These(_), None) => *self = SyncedFiles::All,
        }
    }
}

impl Default for SyncedFiles {
    fn default() -> Self {
        SyncedFiles::These(HashSet::new())
    }
}
