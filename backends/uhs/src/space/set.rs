//! A set of small numbers that finds the next member without a walk over all of them.

/// Numbers below a limit, as bits. In each further level, a bit is set if its word in the level
/// below is not empty.
#[derive(Clone, Debug)]
pub(super) struct NumberSet {
    levels: Vec<Vec<u64>>,
}

impl NumberSet {
    /// An empty set for numbers below `limit`.
    pub(super) fn new(limit: usize) -> Self {
        let mut levels = vec![vec![0; limit.div_ceil(64).max(1)]];
        while let Some(words) = levels.last().map(Vec::len).filter(|words| *words > 1) {
            levels.push(vec![0; words.div_ceil(64)]);
        }
        NumberSet { levels }
    }

    pub(super) fn contains(&self, at: usize) -> bool {
        self.levels[0].get(at / 64).is_some_and(|word| word & 1 << (at % 64) != 0)
    }

    pub(super) fn insert(&mut self, mut at: usize) {
        for words in &mut self.levels {
            let was_empty = words[at / 64] == 0;
            words[at / 64] |= 1 << (at % 64);
            if !was_empty {
                return;
            }
            at /= 64;
        }
    }

    pub(super) fn remove(&mut self, mut at: usize) {
        for words in &mut self.levels {
            words[at / 64] &= !(1 << (at % 64));
            if words[at / 64] != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// The first member from `from` on.
    pub(super) fn next(&self, from: usize) -> Option<usize> {
        let mut at = from;
        for (height, words) in self.levels.iter().enumerate() {
            let word = words.get(at / 64)? & u64::MAX << (at % 64);
            if word != 0 {
                let found = at / 64 * 64 + word.trailing_zeros() as usize;
                return Some(self.first_below(height, found));
            }
            at = at / 64 + 1;
        }
        None
    }

    /// The first member from `from` on, or the first of all.
    pub(super) fn next_around(&self, from: usize) -> Option<usize> {
        self.next(from).or_else(|| self.next(0))
    }

    /// The first member below bit `at` of a level.
    fn first_below(&self, height: usize, at: usize) -> usize {
        let first = |at: usize, words: &Vec<u64>| at * 64 + words[at].trailing_zeros() as usize;
        self.levels[..height].iter().rev().fold(at, first)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_next_member_is_that_of_a_sorted_set() {
        for limit in [1, 63, 64, 65, 4096, 300_000] {
            let mut random = fastrand::Rng::with_seed(limit as u64);
            let (mut set, mut model) = (NumberSet::new(limit), BTreeSet::new());
            for _ in 0..4000 {
                let at = random.usize(..limit);
                match random.u8(..3) {
                    0 => {
                        set.remove(at);
                        model.remove(&at);
                    }
                    1 => {
                        set.insert(at);
                        model.insert(at);
                    }
                    _ => {}
                }
                let from = random.usize(..limit + 70);
                assert_eq!(set.next(from), model.range(from..).next().copied());
                assert_eq!(set.contains(from), model.contains(&from));
                assert_eq!(set.next_around(from).is_none(), model.is_empty());
            }
        }
    }
}
