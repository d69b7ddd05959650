//! The ranges of operations that have begun, to find operations that must wait for one another.

use std::collections::BTreeMap;

/// Ranges of blocks under numbers.
#[derive(Debug, Default)]
pub(super) struct BlockRanges {
    /// By first block and number: the block after the last one, and true if the operation changes
    /// the blocks.
    ranges: BTreeMap<(u64, u64), (u64, bool)>,
    /// No range is longer than this.
    longest: u64,
}

impl BlockRanges {
    /// True where an operation on the range must wait: a range overlaps it, and one of the two
    /// changes blocks.
    pub(super) fn conflict_with(&self, (block, blocks): (u64, u64), changes: bool) -> bool {
        let end = block.saturating_add(blocks);
        let first = block.saturating_sub(self.longest);
        let mut near = self.ranges.range((first, 0)..(end, 0));
        near.any(|(_, (other, other_changes))| *other > block && (changes || *other_changes))
    }

    pub(super) fn add(&mut self, number: u64, (block, blocks): (u64, u64), changes: bool) {
        self.longest = self.longest.max(blocks);
        self.ranges.insert((block, number), (block.saturating_add(blocks), changes));
    }

    pub(super) fn remove(&mut self, number: u64, block: u64) {
        self.ranges.remove(&(block, number));
        if self.ranges.is_empty() {
            self.longest = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_back_what_a_list_of_them_would() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut overlaps = BlockRanges::default();
        let mut list: Vec<(u64, (u64, u64), bool)> = Vec::new();
        for number in 0..5000 {
            let longest = if random.u8(..20) == 0 { 200 } else { 8 };
            let range = (random.u64(..300), random.u64(1..longest));
            let changes = random.bool();
            let expected = list.iter().any(|(_, other, other_changes)| {
                (changes || *other_changes)
                    && range.0 < other.0 + other.1
                    && other.0 < range.0 + range.1
            });
            assert_eq!(overlaps.conflict_with(range, changes), expected);
            if list.len() < 20 {
                overlaps.add(number, range, changes);
                list.push((number, range, changes));
            } else {
                let (number, range, _) = list.swap_remove(random.usize(..list.len()));
                overlaps.remove(number, range.0);
            }
        }
    }
}
