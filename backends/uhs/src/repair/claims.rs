//! Blocks and their owners: the first claim of a block owns it.

use std::collections::BTreeMap;

use crate::format::inode::DiskExtent;

/// Blocks that have an owner: first block and end of each run. Runs do not touch each other.
#[derive(Debug, Default)]
pub(super) struct BlockClaims {
    runs: BTreeMap<u64, u64>,
    /// The blocks of the file system.
    blocks: u64,
}

impl BlockClaims {
    pub(super) fn new(blocks: u64) -> Self {
        BlockClaims { runs: BTreeMap::new(), blocks }
    }

    /// Claims `count` blocks from `block` on. Returns the parts without an earlier owner, as first
    /// block and end.
    ///
    /// Runs that a claim touches become one, so that all claims together take a time that grows
    /// with their number, whatever their lengths.
    pub(super) fn claim(&mut self, block: u64, count: u64) -> Vec<(u64, u64)> {
        let end = block.saturating_add(count).min(self.blocks);
        if block >= end {
            return Vec::new();
        }
        let (mut first, mut last, mut at) = (block, end, block);
        let mut free = Vec::new();
        if let Some((start, stop)) = self.runs.range(..block).next_back().map(|(a, b)| (*a, *b))
            && stop >= block
        {
            self.runs.remove(&start);
            (first, last, at) = (start, last.max(stop), stop.min(end));
        }
        while let Some((start, stop)) = self.runs.range(block..=end).next().map(|(a, b)| (*a, *b)) {
            self.runs.remove(&start);
            if at < start.min(end) {
                free.push((at, start.min(end)));
            }
            at = at.max(stop.min(end));
            last = last.max(stop);
        }
        if at < end {
            free.push((at, end));
        }
        self.runs.insert(first, last);
        free
    }

    /// Claims the blocks of `extents`. Returns the remaining extents, and the number of pages whose
    /// blocks have other owners.
    pub(super) fn claim_extents(&mut self, extents: &[DiskExtent]) -> (Vec<DiskExtent>, u64) {
        let (mut left, mut lost) = (Vec::new(), 0);
        for extent in extents {
            lost += u64::from(extent.count);
            for (start, end) in self.claim(extent.block, extent.count.into()) {
                let page = extent.page + (start - extent.block);
                lost -= end - start;
                left.push(DiskExtent {
                    page,
                    block: start,
                    count: (end - start) as u32,
                    ..*extent
                });
            }
        }
        (left, lost)
    }

    /// The runs: first block and end.
    pub(super) fn claimed_runs(&self) -> impl Iterator<Item = (u64, u64)> {
        self.runs.iter().map(|(start, end)| (*start, *end))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn claims_are_like_a_set_of_blocks() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut claims, mut model) = (BlockClaims::new(100), BTreeSet::new());
            for _ in 0..40 {
                let (block, count) = (random.u64(..110), random.u64(..20));
                let expected: Vec<u64> = (block..(block + count).min(100))
                    .filter(|block| !model.contains(block))
                    .collect();
                let free = claims.claim(block, count);
                assert_eq!(free.iter().flat_map(|(a, b)| *a..*b).collect::<Vec<_>>(), expected);
                model.extend(expected);
                let runs: Vec<(u64, u64)> = claims.claimed_runs().collect();
                assert!(runs.windows(2).all(|pair| pair[0].1 < pair[1].0), "{runs:?}");
                assert!(runs.iter().flat_map(|(a, b)| *a..*b).eq(model.iter().copied()));
            }
        }
    }

    #[test]
    fn numbers_at_the_end_do_not_overflow() {
        let mut claims = BlockClaims::new(1 << 40);
        assert_eq!(claims.claim(u64::MAX, u64::MAX), []);
        assert_eq!(claims.claim(5, u64::MAX), [(5, 1 << 40)]);
    }
}
