//! The pages of files that a kernel has.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::upcalls::UpcallSequence;
use crate::volume::Gfid;

/// Maximum number of files.
const KEPT: usize = 1 << 14;

/// The last open of each file that dropped its pages in the kernel.
#[derive(Debug, Default)]
pub struct DroppedPages(Mutex<HashMap<Gfid, (Instant, UpcallSequence)>>);

impl DroppedPages {
    /// A moment before the last open that dropped the pages, if that was less than `long` ago.
    pub fn last_drop(&self, gfid: Gfid, long: Duration) -> Option<UpcallSequence> {
        let (at, since) = *self.lock().get(&gfid)?;
        (at.elapsed() < long).then_some(since)
    }

    /// Records that an open, which began after `since`, drops the pages.
    pub fn drop_at(&self, gfid: Gfid, since: UpcallSequence) {
        let mut all = self.lock();
        if all.len() >= KEPT {
            all.clear();
        }
        all.insert(gfid, (Instant::now(), since));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Gfid, (Instant, UpcallSequence)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upcalls::UpcallInbox;

    #[test]
    fn pages_are_known_for_a_time_and_files_are_bounded() {
        let (pages, inbox) = (DroppedPages::default(), UpcallInbox::default());
        assert!(pages.last_drop([1; 16], Duration::MAX).is_none());
        pages.drop_at([1; 16], inbox.now());
        assert!(pages.last_drop([1; 16], Duration::MAX).is_some());
        assert!(pages.last_drop([1; 16], Duration::ZERO).is_none());
        for number in 0..2 * KEPT as u128 {
            pages.drop_at(number.to_ne_bytes(), inbox.now());
        }
        assert!(pages.lock().len() <= KEPT);
    }
}
