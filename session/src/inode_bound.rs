//! A bound on the inodes that the kernel knows.
//!
//! The kernel remembers every file that was looked up for as long as it has memory, and so does a
//! file system that keeps something for each of them. Beyond the bound, the kernel is requested to
//! forget the oldest that are unused, by NOTIFY_PRUNE.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::{Ino, Notify};

/// The first protocol with NOTIFY_PRUNE: Linux 6.18.
pub(crate) const PRUNE_MINOR: u32 = 45;

/// Inode numbers in one notification.
const BATCH: usize = 256;

/// The inodes that the kernel knows, and the requests to forget some.
pub(crate) struct InodeBound {
    most: usize,
    notify: Arc<dyn Notify>,
    known: Mutex<KnownInodes>,
}

/// The account of the kernel's lookups.
#[derive(Default)]
struct KnownInodes {
    inodes: HashMap<Ino, InodeLookups>,
    /// The age of the next lookup.
    next_age: u64,
    /// The number of inodes at which the kernel is requested to forget some: more than the bound if
    /// many are in use.
    next_request: usize,
    /// A thread sends requests.
    is_asking: bool,
}

struct InodeLookups {
    lookups: u64,
    /// Less for an inode that was looked up or requested longer ago.
    age: u64,
}

impl InodeBound {
    /// A bound of `most` inodes for the kernel at the other end of `notify`.
    pub(crate) fn new(most: usize, notify: Arc<dyn Notify>) -> Arc<InodeBound> {
        let known = KnownInodes { next_request: most + 1, ..KnownInodes::default() };
        Arc::new(InodeBound { most, notify, known: Mutex::new(known) })
    }

    fn lock(&self) -> MutexGuard<'_, KnownInodes> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of inodes that the kernel knows, and the bound.
    pub(crate) fn figures(&self) -> (usize, usize) {
        (self.lock().inodes.len(), self.most)
    }

    /// Counts a lookup of `ino`, whose reply is about to be sent.
    pub(crate) fn record(self: &Arc<Self>, ino: Ino) {
        if ino == Ino::ROOT {
            return;
        }
        let mut known = self.lock();
        known.look_up(ino);
        if known.is_asking || !known.has_too_many() {
            return;
        }
        known.is_asking = true;
        drop(known);
        self.start_asking();
    }

    /// Takes back lookups that the kernel does not hold any more.
    pub(crate) fn forget(&self, ino: Ino, lookups: u64) {
        self.lock().forget(ino, lookups, self.most);
    }

    /// Sends the requests on a thread of its own: the kernel takes locks of directories, which the
    /// calling operation may hold.
    fn start_asking(self: &Arc<Self>) {
        let bound = Arc::clone(self);
        let started = std::thread::Builder::new().name("defuse-prune".into()).spawn(move || {
            while let Some(inodes) = bound.next_to_forget() {
                let asked = inodes.chunks(BATCH).try_for_each(|batch| bound.notify.prune(batch));
                if let Err(errno) = asked {
                    log::debug!("the kernel was not requested to forget inodes: {errno}");
                }
            }
        });
        if let Err(error) = started {
            log::debug!("no thread for requests to forget inodes: {error}");
            self.lock().is_asking = false;
        }
    }

    /// The inodes of the next request, or the end of the requests: lookups may have come while one
    /// was sent.
    fn next_to_forget(&self) -> Option<Vec<Ino>> {
        let mut known = self.lock();
        known.is_asking = known.has_too_many();
        known.is_asking.then(|| known.take_oldest(self.most))
    }
}

impl KnownInodes {
    fn has_too_many(&self) -> bool {
        self.inodes.len() >= self.next_request
    }

    fn look_up(&mut self, ino: Ino) {
        self.next_age += 1;
        let inode = self.inodes.entry(ino).or_insert(InodeLookups { lookups: 0, age: 0 });
        inode.lookups += 1;
        inode.age = self.next_age;
    }

    fn forget(&mut self, ino: Ino, lookups: u64, most: usize) {
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.lookups = inode.lookups.saturating_sub(lookups);
        if inode.lookups > 0 {
            return;
        }
        self.inodes.remove(&ino);
        if self.inodes.len() <= most {
            self.next_request = most + 1;
        }
    }

    /// The oldest inodes, a quarter of the bound more than the surplus. They count as young then:
    /// the kernel keeps those in use, and the next request is for others. If all are in use, it
    /// comes after some more lookups.
    fn take_oldest(&mut self, most: usize) -> Vec<Ino> {
        let wanted = self.inodes.len().saturating_sub(most) + most.div_ceil(4);
        let mut ages: Vec<(u64, Ino)> =
            self.inodes.iter().map(|(ino, inode)| (inode.age, *ino)).collect();
        if wanted < ages.len() {
            ages.select_nth_unstable(wanted);
            ages.truncate(wanted);
        }
        self.next_age += 1;
        for (_, ino) in &ages {
            if let Some(inode) = self.inodes.get_mut(ino) {
                inode.age = self.next_age;
            }
        }
        self.next_request = self.inodes.len() + most / 8 + 1;
        ages.into_iter().map(|(_, ino)| ino).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look_up_all(known: &mut KnownInodes, numbers: std::ops::Range<u64>) {
        numbers.for_each(|number| known.look_up(Ino(number)));
    }

    fn sort_numbers(mut inodes: Vec<Ino>) -> Vec<u64> {
        inodes.sort_unstable();
        inodes.into_iter().map(|ino| ino.0).collect()
    }

    #[test]
    fn the_oldest_are_requested_and_those_in_use_are_not_requested_again_at_once() {
        let mut known = KnownInodes { next_request: 9, ..KnownInodes::default() };
        look_up_all(&mut known, 10..20);
        known.look_up(Ino(10));
        assert_eq!(sort_numbers(known.take_oldest(8)), [11, 12, 13, 14]);
        assert_eq!(known.next_request, 12);
        // The kernel uses 11 and 12.
        known.forget(Ino(13), 1, 8);
        known.forget(Ino(14), 1, 8);
        assert_eq!(known.next_request, 9);
        look_up_all(&mut known, 20..22);
        assert_eq!(sort_numbers(known.take_oldest(8)), [15, 16, 17, 18]);
    }

    #[test]
    fn an_inode_is_known_until_all_its_lookups_are_forgotten() {
        let mut known = KnownInodes { next_request: 2, ..KnownInodes::default() };
        look_up_all(&mut known, 5..6);
        look_up_all(&mut known, 5..6);
        known.forget(Ino(5), 1, 1);
        assert_eq!(known.inodes.len(), 1);
        known.forget(Ino(5), 1, 1);
        known.forget(Ino(5), 1, 1);
        assert!(known.inodes.is_empty());
    }
}
