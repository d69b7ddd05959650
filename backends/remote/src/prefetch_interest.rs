//! The decision to request optional data with the reply to an open, by whether such data was used
//! before.

use std::sync::atomic::{AtomicU32, Ordering};

/// After so many unused replies in a row, the data is rarely requested.
const UNUSED: u32 = 8;
/// Then one of so many opens requests the data.
const RARELY: u32 = 32;

/// The number of unused replies in a row, and after many of them the number of opens since then.
#[derive(Default)]
pub(super) struct PrefetchInterest(AtomicU32);

impl PrefetchInterest {
    /// True if this open requests the data.
    pub(super) fn should_request(&self) -> bool {
        let before = self.0.load(Ordering::Relaxed);
        if before < UNUSED {
            return true;
        }
        self.0.store(before.wrapping_add(1).max(UNUSED), Ordering::Relaxed);
        before.is_multiple_of(RARELY)
    }

    /// True if fewer than `UNUSED` replies in a row were unused.
    pub(super) fn is_worthwhile(&self) -> bool {
        self.0.load(Ordering::Relaxed) < UNUSED
    }

    /// Records at the close if optional data in the reply to the open was used.
    pub(super) fn note(&self, used: bool) {
        if used {
            self.0.store(0, Ordering::Relaxed);
        } else {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_uses_is_asked_for_rarely_until_it_is_used() {
        let interest = PrefetchInterest::default();
        let asks = |opens: u32| (0..opens).filter(|_| interest.should_request()).count();
        assert_eq!(asks(100), 100);
        (0..UNUSED).for_each(|_| interest.note(false));
        assert_eq!(asks(10 * RARELY), 10);
        interest.note(true);
        assert_eq!(asks(100), 100);
    }
}
