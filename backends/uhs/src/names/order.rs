//! The entries of a directory by their stamps, which are the positions in listings.
//!
//! Stamps only grow, so that a list stays sorted when it is appended to. A removal leaves a gap; when half
//! of the list is gaps, they go.

/// The place of an inode in the records.
pub(super) type Rid = u32;

/// No inode.
const GAP: Rid = Rid::MAX;

/// Gaps that are never worth a copy.
const FEW: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Order {
    stamps: Vec<u64>,
    rids: Vec<Rid>,
    gaps: usize,
}

impl Order {
    /// Adds an entry. Its stamp is larger than all others.
    pub(super) fn push(&mut self, stamp: u64, rid: Rid) {
        debug_assert!(self.stamps.last().is_none_or(|last| *last < stamp), "stamps grow");
        self.stamps.push(stamp);
        self.rids.push(rid);
    }

    pub(super) fn remove(&mut self, stamp: u64) {
        let Ok(at) = self.stamps.binary_search(&stamp) else { return };
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
        *self = Order { stamps, rids, gaps: 0 };
    }

    /// True where the directory has an entry with this stamp.
    pub(super) fn has(&self, stamp: u64) -> bool {
        self.stamps.binary_search(&stamp).is_ok_and(|at| self.rids[at] != GAP)
    }

    /// The entries from `stamp` on.
    pub(super) fn from(&self, stamp: u64) -> impl Iterator<Item = (u64, Rid)> {
        let at = self.stamps.partition_point(|other| *other < stamp);
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
        let (mut order, mut map) = (Order::default(), BTreeMap::new());
        for round in 0..5000_u32 {
            if random.u8(..10) < if round < 3000 { 6 } else { 2 } {
                let stamp = u64::from(round) * 3;
                order.push(stamp, round);
                map.insert(stamp, round);
            } else if let Some(stamp) = random.choice(map.keys().copied().collect::<Vec<_>>()) {
                order.remove(stamp);
                order.remove(stamp);
                map.remove(&stamp);
                assert!(!order.has(stamp));
            }
            assert!(order.stamps.len() <= 2 * map.len() + 4 * FEW, "gaps stay few");
            let from = random.u64(..16_000);
            let rest: Vec<(u64, Rid)> = map.range(from..).map(|(at, rid)| (*at, *rid)).collect();
            assert_eq!(order.from(from).collect::<Vec<_>>(), rest);
        }
    }
}
