//! The blocks of one unit.

use crate::format::UNIT_BLOCKS;

/// Blocks of a unit.
pub(super) const BLOCKS: u32 = UNIT_BLOCKS as u32;

/// A bit for each block of a unit, set if the block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockBitmap([u64; BLOCKS as usize / 64]);

impl BlockBitmap {
    pub(super) const FREE: BlockBitmap = BlockBitmap([0; BLOCKS as usize / 64]);
    pub(super) const FULL: BlockBitmap = BlockBitmap([u64::MAX; BLOCKS as usize / 64]);

    /// The words of the blocks from `from` to before `end`, each with a mask.
    fn masks(from: u32, end: u32) -> impl Iterator<Item = (usize, u64)> {
        (from / 64..end.div_ceil(64)).map(move |word| {
            let (low, high) = (from.max(word * 64) % 64, (end - word * 64).min(64));
            (word as usize, u64::MAX << low & u64::MAX >> (64 - high))
        })
    }

    /// True if none of the blocks is in use.
    pub(super) fn are_free(&self, from: u32, end: u32) -> bool {
        BlockBitmap::masks(from, end).all(|(word, mask)| self.0[word] & mask == 0)
    }

    /// True if all of the blocks are in use.
    pub(super) fn are_used(&self, from: u32, end: u32) -> bool {
        BlockBitmap::masks(from, end).all(|(word, mask)| self.0[word] & mask == mask)
    }

    pub(super) fn set(&mut self, from: u32, end: u32, used: bool) {
        for (word, mask) in BlockBitmap::masks(from, end) {
            match used {
                true => self.0[word] |= mask,
                false => self.0[word] &= !mask,
            }
        }
    }

    /// The first block from `from` on that is in use (`used`) or free; the end of the unit if there
    /// is none.
    fn next(&self, from: u32, used: bool) -> u32 {
        let flip = if used { 0 } else { u64::MAX };
        BlockBitmap::masks(from, BLOCKS)
            .find_map(|(word, mask)| {
                let found = (self.0[word] ^ flip) & mask;
                (found != 0).then(|| word as u32 * 64 + found.trailing_zeros())
            })
            .unwrap_or(BLOCKS)
    }

    /// The free blocks from `from` on up to the first that is in use: none where `from` is in use.
    pub(super) fn run_at(&self, from: u32) -> u32 {
        self.next(from, true) - from
    }

    /// The first run of at least `count` free blocks from `from` on, or else of the whole unit, or
    /// else the longest run: its first block and its length. `None` where no block is free.
    pub(super) fn fit(&self, count: u32, from: u32) -> Option<(u32, u32)> {
        let mut longest: Option<(u32, u32)> = None;
        for (mut at, end) in [(from, BLOCKS), (0, from)] {
            loop {
                at = self.next(at, false);
                if at >= end {
                    break;
                }
                let len = self.run_at(at);
                if len >= count {
                    return Some((at, len));
                }
                if longest.is_none_or(|(_, longest)| len > longest) {
                    longest = Some((at, len));
                }
                at += len;
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_those_of_a_list_of_blocks() {
        let mut random = fastrand::Rng::with_seed(5);
        let (mut bits, mut model) = (BlockBitmap::FREE, [false; BLOCKS as usize]);
        for _ in 0..5000 {
            let from = random.u32(..BLOCKS);
            let end = random.u32(from + 1..=(from + 90).min(BLOCKS));
            let used = random.bool();
            bits.set(from, end, used);
            model[from as usize..end as usize].fill(used);

            let from = random.u32(..BLOCKS);
            let end = random.u32(from + 1..=(from + 70).min(BLOCKS));
            let part = &model[from as usize..end as usize];
            assert_eq!(bits.are_used(from, end), part.iter().all(|used| *used));
            assert_eq!(bits.are_free(from, end), part.iter().all(|used| !used));

            let run = |at: usize| model[at..].iter().take_while(|used| !**used).count() as u32;
            assert_eq!(bits.run_at(from), run(from as usize));
            let count = random.u32(1..60);
            let begins =
                |at: &usize| !model[*at] && (*at == 0 || model[*at - 1] || *at as u32 == from);
            let longest = (0..BLOCKS as usize).filter(begins).map(run).max();
            match bits.fit(count, from) {
                None => assert!(model.iter().all(|used| *used)),
                Some((at, len)) => {
                    assert_eq!(len, run(at as usize));
                    assert!(len >= count || Some(len) == longest, "{at}+{len} of {longest:?}");
                }
            }
        }
    }
}
