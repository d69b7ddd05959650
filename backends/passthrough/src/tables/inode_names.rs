//! The names by which an inode without a file handle is found again (`reopen.rs`).

use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::Ino;

use crate::tables::inode::LowerInode;

/// Maximum number of names recorded for an inode. Only hard links have more than one.
const MOST_PLACES: usize = 4;

/// A name of an inode.
#[derive(Clone)]
pub(crate) struct KnownName {
    pub(crate) dir: Arc<LowerInode>,
    pub(crate) name: Box<[u8]>,
}

/// The names of an inode, the latest last. They may be outdated, so each use is checked.
#[derive(Default)]
pub(crate) struct InodeNames(Mutex<Vec<KnownName>>);

impl InodeNames {
    pub(crate) fn add(&self, dir: &Arc<LowerInode>, name: &[u8]) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |place: &KnownName| place.dir.number == dir.number && *place.name == *name;
        if places.last().is_some_and(is_it) {
            return;
        }
        let old = match places.iter().position(is_it) {
            Some(at) => Some(places.remove(at)),
            None if places.len() == MOST_PLACES => Some(places.remove(0)),
            None => None,
        };
        places.push(KnownName { dir: Arc::clone(dir), name: name.into() });
        drop(places);
        drop(old);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// The latest name, and its directory.
    fn latest_name(&self) -> Option<(Ino, Box<[u8]>)> {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.last().map(|place| (place.dir.ino(), place.name.clone()))
    }

    pub(crate) fn all_names(&self) -> Vec<KnownName> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take(&mut self) -> Vec<KnownName> {
        std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for InodeNames {
    /// Iterates instead of recursing: a chain of directories may be as deep as a path allows.
    fn drop(&mut self) {
        let mut left = self.take();
        while let Some(place) = left.pop() {
            if let Some(mut dir) = Arc::into_inner(place.dir)
                && let Some(places) = dir.places.as_mut()
            {
                left.extend(places.take());
            }
        }
    }
}

impl LowerInode {
    /// The latest name that is recorded, and its directory.
    pub(crate) fn place(&self) -> Option<(Ino, Box<[u8]>)> {
        self.places.as_ref()?.latest_name()
    }
}
