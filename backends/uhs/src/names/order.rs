//! The entries of a directory by their stamps, which are the positions in listings.
//!
//! Stamps only grow, so that a list stays sorted when entries are appended. A removal leaves a gap.
//! When half of the list is gaps, the gaps are removed.

/// The place of an inode in the records.
pub(super) type RecordId = u32;

/// No inode.
const GAP: RecordId = RecordId::MAX;

/// The number of gaps that are never worth a copy.
const FEW: usize = 16;

#[derive(Debug, Default)]
pub(super) struct EntryOrder {
    stamps: Vec<u64>,
    rids: Vec<RecordId>,
    gaps: usize,
}

impl EntryOrder {
    /// Adds an entry. Its stamp is larger than all others.
    pub(super) fn push(&mut self, stamp: u64, rid: RecordId) {
        debug_assert!(self.stamps.last().is_none_or(|last| *last < stamp), "stamps grow");
        self.stamps.push(stamp);
        self.rids.push(rid);
    }

    pub(super) fn remove(&mut self, stamp: u64) {
        let at = self.position(stamp);
        if self.stamps.get(at) != Some(&stamp) {
            return;
        }
        self.gaps += usize::from(self.rids[at] != GAP);
        self.rids[at] = GAP;
        if self.gaps > self.stamps.len() / 2 + FEW {
            self.close_gaps();
        }
    }

    fn close_gaps(&mut self) {
        let kept = self.rids.len() - self.gaps;
        let (mut stamps, mut rids) = (Vec::with_capacity(kept), Vec::with_capacity(kept));
        for (stamp, rid) in self.stamps.iter().zip(&self.rids).filter(|(_, rid)| **rid != GAP) {
            stamps.push(*stamp);
            rids.push(*rid);
        }
        *self = EntryOrder { stamps, rids, gaps: 0 };
    }

    /// The position of the first entry from `stamp` on, which may be a gap.
    ///
    /// Files are often made at an even pace, so that the stamp predicts the position approximately:
    /// this reads a line of the cache or two. From there the search takes steps that double, so
    /// that it is never longer than two binary searches.
    fn position(&self, stamp: u64) -> usize {
        let (Some(first), Some(last)) = (self.stamps.first(), self.stamps.last()) else { return 0 };
        if stamp <= *first {
            return 0;
        }
        if stamp > *last {
            return self.stamps.len();
        }
        let part = u128::from(stamp - first) * (self.stamps.len() - 1) as u128;
        let guess = (part / u128::from(last - first)) as usize;
        let (mut low, mut high, mut step) = (guess, guess + 1, 1);
        // The entry before `low` is older, and the entry at `high` is not.
        while low > 0 && self.stamps[low - 1] >= stamp {
            high = low;
            low = low.saturating_sub(step);
            step *= 2;
        }
        while high < self.stamps.len() && self.stamps[high] < stamp {
            low = high;
            high = (high + step).min(self.stamps.len());
            step *= 2;
        }
        low + self.stamps[low..high].partition_point(|other| *other < stamp)
    }

    /// True where the directory has an entry with this stamp.
    pub(super) fn has(&self, stamp: u64) -> bool {
        let at = self.position(stamp);
        self.stamps.get(at) == Some(&stamp) && self.rids[at] != GAP
    }

    /// The entries from `stamp` on.
    pub(super) fn from(&self, stamp: u64) -> impl Iterator<Item = (u64, RecordId)> {
        let at = self.position(stamp);
        let entries = self.stamps[at..].iter().copied().zip(self.rids[at..].iter().copied());
        entries.filter(|(_, rid)| *rid != GAP)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn an_order_is_like_a_sorted_map() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut order, mut map, mut stamp) = (EntryOrder::default(), BTreeMap::new(), 0);
        for round in 0..5000_u32 {
            if random.u8(..10) < if round < 3000 { 6 } else { 2 } {
                // Uneven steps, so that guesses are wrong.
                let most = 1 << random.u32(1..12);
                stamp += random.u64(1..most);
                order.push(stamp, round);
                map.insert(stamp, round);
            } else if let Some(stamp) = random.choice(map.keys().copied().collect::<Vec<_>>()) {
                order.remove(stamp);
                order.remove(stamp);
                map.remove(&stamp);
                assert!(!order.has(stamp));
            }
            assert!(order.stamps.len() <= 2 * map.len() + 4 * FEW, "gaps stay few");
            let from = random.u64(..stamp + 10);
            let rest: Vec<(u64, RecordId)> =
                map.range(from..).map(|(at, rid)| (*at, *rid)).collect();
            assert_eq!(order.from(from).collect::<Vec<_>>(), rest);
        }
    }
}
