//! Inodes with versions of their attributes, about which one side has information while the version
//! stays. The other side has no access to them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of places. Of the inodes that share one, the last one is kept.
const PLACES: usize = 4096;

/// A set of inodes, each with a version. It allocates memory when the first one is added: most
/// programs end before.
#[derive(Default)]
pub struct InodeVersionSet(OnceLock<Box<[AtomicU64]>>);

impl InodeVersionSet {
    /// Adds an inode with this version, in place of another one.
    pub fn add(&self, ino: u64, version: u64) {
        let places = self.0.get_or_init(|| (0..PLACES).map(|_| AtomicU64::new(0)).collect());
        places[word_index(ino)].store(mark(ino, version), Ordering::Release);
    }

    /// True if the inode is there with this version.
    pub fn has(&self, ino: u64, version: u64) -> bool {
        let mark = mark(ino, version);
        self.0.get().is_some_and(|places| places[word_index(ino)].load(Ordering::Acquire) == mark)
    }
}

fn word_index(ino: u64) -> usize {
    ino as usize % PLACES
}

/// Returns the inode and the version in one number, which hardly any other pair has.
fn mark(ino: u64, version: u64) -> u64 {
    (ino ^ version.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_there_with_its_version_until_another_takes_its_place() {
        let marks = InodeVersionSet::default();
        marks.add(7, 1);
        marks.add(8, 1);
        assert!(marks.has(7, 1) && marks.has(8, 1));
        assert!(!marks.has(7, 2) && !marks.has(9, 1));
        marks.add(7 + PLACES as u64, 1);
        assert!(!marks.has(7, 1));
    }
}
