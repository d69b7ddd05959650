//! Inodes with versions of their attributes, of which something is known while the version stays.

use std::sync::atomic::{AtomicU64, Ordering};

use defuse_fs::Ino;

/// The number of places. Of the inodes that share one, the last one is kept.
const PLACES: usize = 4096;

/// A set of inodes, each with a version.
pub(super) struct Marks(Box<[AtomicU64]>);

impl Default for Marks {
    fn default() -> Self {
        Marks((0..PLACES).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Marks {
    fn place(&self, ino: Ino) -> &AtomicU64 {
        &self.0[ino.0 as usize % PLACES]
    }

    pub(super) fn add(&self, ino: Ino, version: u64) {
        self.place(ino).store(mark(ino, version), Ordering::Release);
    }

    pub(super) fn has(&self, ino: Ino, version: u64) -> bool {
        self.place(ino).load(Ordering::Acquire) == mark(ino, version)
    }
}

/// The inode and the version in one number, which hardly any other pair has.
fn mark(ino: Ino, version: u64) -> u64 {
    (ino.0 ^ version.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_there_with_its_version_until_another_takes_its_place() {
        let marks = Marks::default();
        marks.add(Ino(7), 1);
        marks.add(Ino(8), 1);
        assert!(marks.has(Ino(7), 1) && marks.has(Ino(8), 1));
        assert!(!marks.has(Ino(7), 2) && !marks.has(Ino(9), 1));
        marks.add(Ino(7 + PLACES as u64), 1);
        assert!(!marks.has(Ino(7), 1));
    }
}
