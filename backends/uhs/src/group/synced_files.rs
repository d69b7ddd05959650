//! The files that a sync wants.

use std::collections::HashSet;

use smallvec::SmallVec;

/// The files whose data a sync makes durable, beside all other changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SyncedFiles {
    All,
    /// In order.
    These(SmallVec<[u64; 4]>),
}

impl SyncedFiles {
    pub(crate) fn contains(&self, ino: u64) -> bool {
        match self {
            SyncedFiles::All => true,
            SyncedFiles::These(inos) => inos.binary_search(&ino).is_ok(),
        }
    }

    /// True if one of these files is wanted.
    pub(crate) fn meets(&self, files: &HashSet<u64>) -> bool {
        match self {
            SyncedFiles::All => true,
            SyncedFiles::These(inos) => inos.iter().any(|ino| files.contains(ino)),
        }
    }

    /// Adds a file, or all for `None`.
    pub(crate) fn add(&mut self, ino: Option<u64>) {
        match (&mut *self, ino) {
            (SyncedFiles::All, _) => {}
            (SyncedFiles::These(inos), Some(ino)) => {
                if let Err(at) = inos.binary_search(&ino) {
                    inos.insert(at, ino);
                }
            }
            (SyncedFiles::These(_), None) => *self = SyncedFiles::All,
        }
    }
}

impl Default for SyncedFiles {
    fn default() -> Self {
        SyncedFiles::These(SmallVec::new())
    }
}
