//! The pages of one file that are in memory, by their numbers.

use std::collections::BTreeMap;
use std::ops::Range;

use super::pages::CachedPage;

/// Pages of a group.
const GROUP: usize = 16;

/// Pages by number, in groups of neighbours. The tree of groups is small enough for the caches of
/// the processor; a tree of pages would not be.
#[derive(Default)]
pub(super) struct PageTable {
    /// By the number of the first page divided by [`GROUP`]. No group is empty.
    groups: BTreeMap<u64, Box<PageGroup>>,
}

#[derive(Default)]
struct PageGroup {
    pages: [Option<CachedPage>; GROUP],
    used: usize,
}

fn group_and_bit(page: u64) -> (u64, usize) {
    (page / GROUP as u64, (page % GROUP as u64) as usize)
}

/// The groups of a range of pages, and the places of the range in one of them.
fn groups(range: &Range<u64>) -> Range<u64> {
    range.start / GROUP as u64..range.end.div_ceil(GROUP as u64)
}

fn bits_in_group(group: u64, range: &Range<u64>) -> Range<usize> {
    let first = group * GROUP as u64;
    let inside = |page: u64| page.saturating_sub(first).min(GROUP as u64) as usize;
    inside(range.start)..inside(range.end).max(inside(range.start))
}

impl PageTable {
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    pub(super) fn contains(&self, page: u64) -> bool {
        self.get(page).is_some()
    }

    pub(super) fn get(&self, page: u64) -> Option<&CachedPage> {
        let (group, at) = group_and_bit(page);
        self.groups.get(&group)?.pages[at].as_ref()
    }

    pub(super) fn get_mut(&mut self, page: u64) -> Option<&mut CachedPage> {
        let (group, at) = group_and_bit(page);
        self.groups.get_mut(&group)?.pages[at].as_mut()
    }

    /// Adds a page. Returns the former page of this number.
    pub(super) fn insert(&mut self, page: u64, new: CachedPage) -> Option<CachedPage> {
        let (group, at) = group_and_bit(page);
        let group = self.groups.entry(group).or_default();
        let old = group.pages[at].replace(new);
        group.used += usize::from(old.is_none());
        old
    }

    /// Takes a range out, and calls `see` with each page.
    pub(super) fn take_out(&mut self, range: Range<u64>, mut see: impl FnMut(u64, CachedPage)) {
        let mut found = groups(&range);
        while !found.is_empty()
            && let Some((number, group)) = self.groups.range_mut(found.clone()).next()
        {
            let number = *number;
            found.start = number + 1;
            let places = bits_in_group(number, &range);
            for at in places {
                if let Some(page) = group.pages[at].take() {
                    group.used -= 1;
                    see(number * GROUP as u64 + at as u64, page);
                }
            }
            if group.used == 0 {
                self.groups.remove(&number);
            }
        }
    }

    /// The pages of a range in order.
    pub(super) fn range(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &CachedPage)> {
        let found = groups(&range);
        let found = found.start..found.end.max(found.start);
        self.groups.range(found).flat_map(move |(number, group)| {
            let places = bits_in_group(*number, &range);
            let first = *number * GROUP as u64 + places.start as u64;
            let pages = (first..).zip(&group.pages[places]);
            pages.filter_map(|(at, page)| Some((at, page.as_ref()?)))
        })
    }

    /// The pages of a range in order, to be changed.
    pub(super) fn range_mut(
        &mut self,
        range: Range<u64>,
    ) -> impl Iterator<Item = (u64, &mut CachedPage)> {
        let found = groups(&range);
        let found = found.start..found.end.max(found.start);
        self.groups.range_mut(found).flat_map(move |(number, group)| {
            let places = bits_in_group(*number, &range);
            let first = *number * GROUP as u64 + places.start as u64;
            let pages = (first..).zip(&mut group.pages[places]);
            pages.filter_map(|(at, page)| Some((at, page.as_mut()?)))
        })
    }

    pub(super) fn clear(&mut self) {
        self.groups.clear();
    }
}

#[cfg(test)]
mod tests {
    use defuse_block::MemoryRegion;

    use super::super::frames::PageFrame;
    use super::*;

    #[test]
    fn a_table_of_pages_is_a_map() {
        let region = MemoryRegion::new(1).unwrap();
        let frame = PageFrame::split_run(region.take(1).unwrap()).next().unwrap();
        let mut random = fastrand::Rng::with_seed(4);
        let (mut table, mut model) = (PageTable::default(), BTreeMap::new());
        for round in 0..10_000 {
            let (page, mark) = (random.u64(..100), round);
            let range = page..[u64::MAX, page, page + random.u64(..60)][random.usize(..3)];
            match random.u32(..4) {
                0 | 1 => {
                    let mut new = CachedPage::new(frame.clone());
                    new.batch = mark;
                    let old = table.insert(page, new).map(|old| old.batch);
                    assert_eq!(old, model.insert(page, mark));
                }
                2 if round % 4 == 0 => {
                    let mut out = Vec::new();
                    table.take_out(range.clone(), |page, old| out.push((page, old.batch)));
                    let expected: Vec<(u64, u64)> =
                        model.range(range.clone()).map(|(page, mark)| (*page, *mark)).collect();
                    expected.iter().for_each(|(page, _)| assert!(model.remove(page).is_some()));
                    assert_eq!(out, expected);
                }
                _ => {
                    let seen = table.range_mut(range.clone());
                    let seen: Vec<(u64, u64)> = seen.map(|(at, page)| (at, page.batch)).collect();
                    let expected = model.range(range.clone()).map(|(page, mark)| (*page, *mark));
                    assert!(seen.iter().copied().eq(expected), "round {round}");
                    let again = table.range(range).map(|(at, page)| (at, page.batch));
                    assert!(again.eq(seen));
                }
            }
            assert_eq!(table.contains(page), model.contains_key(&page));
            let held: usize = table.groups.values().map(|group| group.used).sum();
            assert_eq!(held, model.len());
            assert!(table.groups.values().all(|group| group.used > 0));
        }
    }
}
