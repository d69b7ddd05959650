//! Recently read files, kept open for the next open: a program that reads the same small files
//! repeatedly causes no open and close of the lower file.
//!
//! A file stays open until [`trim`](RecentFiles::trim) finds it unused since the last call, until
//! its inode is forgotten, or until another file takes its slot. Only read-only descriptors are
//! kept. They neither prevent a program from being executed nor a file system from being remounted
//! read-only.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Slots that share a lock. A file can be in either of them.
const WAYS: usize = 2;

type RecentSet = [Option<RecentFile>; WAYS];

pub(crate) struct RecentFiles {
    /// Allocated on first use.
    sets: OnceLock<Box<[Mutex<RecentSet>]>>,
    count: usize,
    held: AtomicUsize,
}

struct RecentFile {
    /// The inode number of frontends.
    number: u64,
    fd: Arc<OwnedFd>,
    /// Released since the last trim.
    fresh: bool,
}

impl RecentFiles {
    /// Creates a cache of `capacity` files, at least two.
    pub(crate) fn new(capacity: usize) -> Self {
        let count = (capacity / WAYS).max(1);
        RecentFiles { sets: OnceLock::new(), count, held: AtomicUsize::new(0) }
    }

    fn sets(&self) -> &[Mutex<RecentSet>] {
        self.sets.get_or_init(|| (0..self.count).map(|_| Mutex::default()).collect())
    }

    /// Removes and returns the descriptor of an inode.
    pub(crate) fn take(&self, number: u64) -> Option<Arc<OwnedFd>> {
        if self.len() == 0 {
            return None;
        }
        let mut set = lock(self.set_of(number));
        let is_it = |recent: &mut RecentFile| recent.number == number;
        let taken = set.iter_mut().find_map(|place| place.take_if(is_it))?;
        self.held.fetch_sub(1, Ordering::Relaxed);
        Some(taken.fd)
    }

    /// Keeps one descriptor of an inode, possibly in place of another inode's.
    pub(crate) fn put(&self, number: u64, fd: Arc<OwnedFd>) {
        let mut set = lock(self.set_of(number));
        let known = |place: &Option<RecentFile>| place.as_ref().is_some_and(|r| r.number == number);
        let place = set.iter().position(known).or_else(|| set.iter().position(Option::is_none));
        // Without a free slot, the first is replaced, and the newest entry is the next to go.
        let at = place.unwrap_or(0);
        let victim = set[at].replace(RecentFile { number, fd, fresh: true });
        if place.is_none() {
            set.rotate_left(1);
        }
        if victim.is_none() {
            self.held.fetch_add(1, Ordering::Relaxed);
        }
        drop(set);
        // Closed outside of the lock.
        drop(victim);
    }

    /// Closes the descriptors that were not released since the last call.
    pub(crate) fn trim(&self) {
        self.drop_if(|recent| !std::mem::take(&mut recent.fresh));
    }

    /// Closes all descriptors, because the process has too many.
    pub(crate) fn clear(&self) {
        self.drop_if(|_| true);
    }

    /// Number of descriptors kept.
    pub(crate) fn len(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn drop_if(&self, mut unwanted: impl FnMut(&mut RecentFile) -> bool) {
        if self.len() == 0 {
            return;
        }
        for set in self.sets.get().into_iter().flatten() {
            for place in lock(set).iter_mut() {
                if place.take_if(&mut unwanted).is_some() {
                    self.held.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn set_of(&self, number: u64) -> &Mutex<RecentSet> {
        // Inode numbers differ in few bits; multiplication by the golden ratio spreads them.
        let spread = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let sets = self.sets();
        &sets[spread as usize % sets.len()]
    }
}

fn lock(set: &Mutex<RecentSet>) -> MutexGuard<'_, RecentSet> {
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> Arc<OwnedFd> {
        Arc::new(std::fs::File::open("/").unwrap().into())
    }

    #[test]
    fn a_file_is_kept_until_it_is_taken() {
        let recent = RecentFiles::new(64);
        let kept = fd();
        recent.put(7, Arc::clone(&kept));
        assert!(recent.take(8).is_none());
        assert!(recent.take(7).is_some_and(|fd| Arc::ptr_eq(&fd, &kept)));
        assert!(recent.take(7).is_none());
        assert_eq!(recent.len(), 0);
    }

    #[test]
    fn a_file_unused_between_two_trims_is_closed() {
        let recent = RecentFiles::new(64);
        recent.put(7, fd());
        recent.trim();
        assert_eq!(recent.len(), 1);
        let fd = recent.take(7).unwrap();
        recent.put(7, fd);
        recent.trim();
        assert_eq!(recent.len(), 1, "it was wanted");
        recent.trim();
        assert_eq!(recent.len(), 0);
    }

    #[test]
    fn no_more_files_are_kept_than_the_capacity() {
        let recent = RecentFiles::new(16);
        for number in 0..1000 {
            recent.put(number, fd());
        }
        assert!(recent.len() <= 16);
        recent.clear();
        assert_eq!(recent.len(), 0);
    }
}
