//! Sets of pages of one file.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;

/// Pages of one word.
const WORD: u64 = u64::BITS as u64;

/// The numbers of some pages.
pub(super) type PageNumbers = SmallVec<[u64; 8]>;

/// A set of page numbers, in words of 64 neighbours. Pages of a file come in runs, which are added,
/// counted and taken out a word at a time.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PageSet {
    /// By the number of the first page divided by 64. No word is empty.
    words: BTreeMap<u64, u64>,
    len: usize,
}

/// The words of a range, each with a bit for each of its pages.
fn words(pages: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let mut at = pages.start;
    std::iter::from_fn(move || {
        if at >= pages.end {
            return None;
        }
        let (word, from) = (at / WORD, at % WORD);
        let count = (pages.end - at).min(WORD - from);
        at += count;
        Some((word, u64::MAX >> (WORD - count) << from))
    })
}

/// The pages of a word.
fn pages(word: u64, mut bits: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| u64::from(bits.trailing_zeros()))?;
        bits &= bits - 1;
        Some(word * WORD + bit)
    })
}

fn count_ones(bits: u64) -> usize {
    bits.count_ones() as usize
}

impl PageSet {
    pub(super) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn contains(&self, page: u64) -> bool {
        self.words.get(&(page / WORD)).is_some_and(|bits| bits >> (page % WORD) & 1 != 0)
    }

    /// Adds a page. True if it is new.
    pub(super) fn insert(&mut self, page: u64) -> bool {
        let before = self.len;
        self.insert_all(page..page + 1);
        self.len > before
    }

    /// Adds all pages of a range.
    pub(super) fn insert_all(&mut self, range: Range<u64>) {
        for (word, mask) in words(range) {
            let bits = self.words.entry(word).or_default();
            self.len += count_ones(mask & !*bits);
            *bits |= mask;
        }
    }

    pub(super) fn remove(&mut self, page: u64) {
        self.take_out(page..page + 1);
    }

    /// Takes a range out. Returns how many members it had.
    pub(super) fn take_out(&mut self, range: Range<u64>) -> usize {
        let before = self.len;
        let mut reached = range.start / WORD..range.end.div_ceil(WORD);
        while !reached.is_empty()
            && let Some((word, bits)) = self.words.range_mut(reached.clone()).next()
        {
            let (word, mask) = (*word, mask(*word, &range));
            self.len -= count_ones(*bits & mask);
            *bits &= !mask;
            if *bits == 0 {
                self.words.remove(&word);
            }
            reached.start = word + 1;
        }
        before - self.len
    }

    /// The number of members in a range.
    pub(super) fn count(&self, range: Range<u64>) -> usize {
        let reached = range.start / WORD..range.end.div_ceil(WORD);
        self.words.range(reached).map(|(word, bits)| count_ones(bits & mask(*word, &range))).sum()
    }

    /// The first member from `page` on.
    pub(super) fn next(&self, page: u64) -> Option<u64> {
        let rest = |(word, bits): (&u64, &u64)| {
            let bits = bits & mask(*word, &(page..u64::MAX));
            (bits != 0).then(|| *word * WORD + u64::from(bits.trailing_zeros()))
        };
        self.words.range(page / WORD..).find_map(rest)
    }

    /// The members in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        self.words.iter().flat_map(|(word, bits)| pages(*word, *bits))
    }

    /// Keeps the members that `other` has, too.
    pub(super) fn keep_those_of(&mut self, other: &PageSet) {
        self.words.retain(|word, bits| {
            *bits &= other.words.get(word).copied().unwrap_or(0);
            *bits != 0
        });
        self.len = self.words.values().copied().map(count_ones).sum();
    }

    /// Takes out all members that `other` does not have. Returns them in order.
    pub(super) fn take_all_but(&mut self, other: &PageSet) -> PageNumbers {
        // A set of few pages keeps the memory of its tree.
        if other.is_empty() && self.words.len() <= 1 {
            self.len = 0;
            return self
                .words
                .pop_first()
                .map_or_else(PageNumbers::new, |(word, bits)| pages(word, bits).collect());
        }
        let all = std::mem::take(self);
        if other.is_empty() {
            return all.iter().collect();
        }
        let (stay, go): (Vec<u64>, Vec<u64>) = all.iter().partition(|page| other.contains(*page));
        self.extend(stay);
        go.into()
    }

    /// Takes the members from `first` on out. Returns them in order.
    pub(super) fn split_off(&mut self, first: u64) -> Vec<u64> {
        let moved = self.iter().filter(|page| *page >= first).collect();
        self.take_out(first..u64::MAX);
        moved
    }
}

impl Extend<u64> for PageSet {
    fn extend<T: IntoIterator<Item = u64>>(&mut self, pages: T) {
        for page in pages {
            self.insert(page);
        }
    }
}

/// The bits of the pages of a word that are in a range.
fn mask(word: u64, range: &Range<u64>) -> u64 {
    let first = word * WORD;
    let from = range.start.saturating_sub(first).min(WORD);
    let to = range.end.saturating_sub(first).min(WORD);
    if from < to { u64::MAX >> (WORD - (to - from)) << from } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn ranges(random: &mut fastrand::Rng) -> Range<u64> {
        let start = random.u64(..300);
        match random.u32(..8) {
            0 => start..u64::MAX,
            1 => start..start,
            _ => start..start + random.u64(..200),
        }
    }

    #[test]
    fn a_set_of_pages_is_a_set() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut set, mut model) = (PageSet::default(), BTreeSet::new());
        let mut other = PageSet::default();
        other.extend((0..500).filter(|_| random.bool()));
        for round in 0..20_000 {
            let page = random.u64(..500);
            let range = ranges(&mut random);
            match random.u32(..9) {
                0..=2 => assert_eq!(set.insert(page), model.insert(page)),
                3 => {
                    set.remove(page);
                    model.remove(&page);
                }
                4 if range.end < u64::MAX => {
                    set.insert_all(range.clone());
                    model.extend(range.clone());
                }
                5 => {
                    let out: Vec<u64> = model.range(range.clone()).copied().collect();
                    assert_eq!(set.take_out(range.clone()), out.len());
                    out.iter().for_each(|page| assert!(model.remove(page)));
                }
                6 if round % 16 == 0 => {
                    set.keep_those_of(&other);
                    model.retain(|page| other.contains(*page));
                }
                7 if round % 16 == 0 => {
                    let go: Vec<u64> =
                        model.iter().copied().filter(|page| !other.contains(*page)).collect();
                    assert_eq!(set.take_all_but(&other).to_vec(), go);
                    model.retain(|page| other.contains(*page));
                }
                8 if round % 16 == 0 => {
                    let moved: Vec<u64> = model.split_off(&page).into_iter().collect();
                    assert_eq!(set.split_off(page), moved);
                }
                _ => {}
            }
            assert_eq!(set.contains(page), model.contains(&page));
            assert_eq!(set.next(page), model.range(page..).next().copied());
            assert_eq!(set.count(range.clone()), model.range(range).count());
            assert_eq!((set.len(), set.is_empty()), (model.len(), model.is_empty()));
            if round % 50 == 0 {
                assert!(set.iter().eq(model.iter().copied()));
            }
        }
    }
}
