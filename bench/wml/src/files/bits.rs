//! A set of numbers with a fast search for the next one.

/// A set of numbers below a limit. It is a bit map with summaries: each level has one bit for every
/// 64 bits of the level below.
pub(crate) struct SummaryBitmap {
    levels: Vec<Vec<u64>>,
}

impl SummaryBitmap {
    /// Creates an empty set of numbers below `limit`.
    pub fn new(limit: u32) -> Self {
        let mut levels = Vec::new();
        let mut size = limit as usize;
        loop {
            size = size.div_ceil(64).max(1);
            levels.push(vec![0; size]);
            if size == 1 {
                return SummaryBitmap { levels };
            }
        }
    }

    /// Number of elements.
    #[cfg(test)]
    pub fn len(&self) -> u64 {
        self.levels[0].iter().map(|word| u64::from(word.count_ones())).sum()
    }

    pub fn has(&self, number: u32) -> bool {
        self.levels[0][number as usize / 64] & (1 << (number % 64)) != 0
    }

    pub fn insert(&mut self, number: u32) {
        if self.has(number) {
            return;
        }
        let mut at = number as usize;
        for level in &mut self.levels {
            level[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
    }

    pub fn remove(&mut self, number: u32) {
        if !self.has(number) {
            return;
        }
        let mut at = number as usize;
        for level in &mut self.levels {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// The smallest number not below `from`.
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut at = from as usize;
        let mut height = 0;
        // Up, until a word has a bit at or after the position.
        loop {
            let level = self.levels.get(height)?;
            let word = level.get(at / 64).map_or(0, |word| word & (u64::MAX << (at % 64)));
            if word != 0 {
                at = at / 64 * 64 + word.trailing_zeros() as usize;
                break;
            }
            at = at / 64 + 1;
            height += 1;
        }
        // Down, to the first bit below it.
        while height > 0 {
            height -= 1;
            at = at * 64 + self.levels[height][at].trailing_zeros() as usize;
        }
        u32::try_from(at).ok()
    }

    /// The smallest number not below `from`, or otherwise the smallest of all.
    pub fn next_around(&self, from: u32) -> Option<u32> {
        self.next(from).or_else(|| self.next(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_finds_the_same_numbers_as_a_tree(
            limit in 1u32..20_000,
            steps in prop::collection::vec((any::<u32>(), any::<bool>()), 1..200),
        ) {
            let (mut bits, mut tree) = (SummaryBitmap::new(limit), BTreeSet::new());
            for (number, insert) in steps {
                let number = number % limit;
                if insert {
                    bits.insert(number);
                    tree.insert(number);
                } else {
                    let at = bits.next_around(number).unwrap_or(number);
                    bits.remove(at);
                    tree.remove(&at);
                }
                prop_assert_eq!(bits.len(), tree.len() as u64);
                prop_assert_eq!(bits.next(number), tree.range(number..).next().copied());
                let around = tree.range(number..).next().or(tree.first()).copied();
                prop_assert_eq!(bits.next_around(number), around);
            }
        }
    }
}
