//! The number of waits for locks, in all and of each user.

use std::collections::HashMap;

use super::{MAX_WAITS, MAX_WAITS_OF_USER};

/// Counts waits, and bounds them in all and for each user.
#[derive(Debug, Default)]
pub struct WaitShares {
    waits: usize,
    of_user: HashMap<u32, usize>,
}

impl WaitShares {
    /// Number of waits.
    pub fn waits(&self) -> usize {
        self.waits
    }

    /// Counts a wait of the user `uid`. Returns false, and counts nothing, if there are
    /// [`MAX_WAITS`] already, or [`MAX_WAITS_OF_USER`] of a user other than root.
    #[must_use]
    pub fn take(&mut self, uid: u32) -> bool {
        let own = self.of_user.get(&uid).copied().unwrap_or(0);
        let is_full = self.waits >= MAX_WAITS || uid != 0 && own >= MAX_WAITS_OF_USER;
        if !is_full {
            self.waits += 1;
            self.of_user.insert(uid, own + 1);
        }
        !is_full
    }

    /// Returns a wait that [`take`](WaitShares::take) has counted.
    pub fn give_back(&mut self, uid: u32) {
        self.waits = self.waits.saturating_sub(1);
        if let Some(own) = self.of_user.get_mut(&uid) {
            *own -= 1;
            if *own == 0 {
                self.of_user.remove(&uid);
            }
        }
    }
}
