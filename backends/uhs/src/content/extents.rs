//! The blocks of one file, by page. Pure, and fast with any number of extents.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included};
use std::ops::Range;

use super::tree::ExtentLeaf;
use crate::format::inode::DiskExtent;
use crate::space::BlockRun;

/// The extents of a file. They do not overlap. Neighbours are joined where the second continues the
/// first.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExtentMap {
    /// By first page.
    map: BTreeMap<u64, MappedExtent>,
    /// Blocks of all extents.
    blocks: u64,
    /// The leaves, if the records of extents lie in blocks of their own. Each key is the first page
    /// of a leaf; the leaf has the extents that begin from this page up to the key of the next
    /// leaf.
    leaves: BTreeMap<u64, ExtentLeaf>,
    /// The number of changes, of which some change nothing in the end.
    changes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MappedExtent {
    block: u64,
    count: u32,
    unwritten: bool,
}

impl MappedExtent {
    fn to_extent(self, page: u64) -> DiskExtent {
        let MappedExtent { block, count, unwritten } = self;
        DiskExtent { page, block, count, unwritten }
    }
}

/// The part of an extent that lies in `pages`, which intersect the extent.
fn part(extent: &DiskExtent, pages: &Range<u64>) -> DiskExtent {
    let (from, to) = (extent.page.max(pages.start), extent.end().min(pages.end));
    let block = extent.block + (from - extent.page);
    DiskExtent { page: from, block, count: (to - from) as u32, ..*extent }
}

impl FromIterator<DiskExtent> for ExtentMap {
    fn from_iter<T: IntoIterator<Item = DiskExtent>>(extents: T) -> Self {
        let mut all = ExtentMap::default();
        extents.into_iter().for_each(|extent| all.add(extent));
        all
    }
}

impl ExtentMap {
    /// All extents, by page.
    pub(crate) fn iter(&self) -> impl Iterator<Item = DiskExtent> {
        self.map.iter().map(|(page, piece)| piece.to_extent(*page))
    }

    /// Blocks of all extents.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// A number that is another one after each change.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The leaves, the first of which begins with page 0. If there are none, all leaves are written
    /// next time.
    pub(super) fn leaves_mut(&mut self) -> &mut BTreeMap<u64, ExtentLeaf> {
        &mut self.leaves
    }

    /// The number of extents that begin in `pages`.
    pub(super) fn count_in(&self, pages: Range<u64>) -> usize {
        self.map.range(pages).count()
    }

    /// The extents that begin in `pages`.
    pub(super) fn begin_in(&self, pages: Range<u64>) -> impl Iterator<Item = DiskExtent> {
        self.map.range(pages).map(|(page, piece)| piece.to_extent(*page))
    }

    /// Marks the leaf of the extent that begins with `page` as changed.
    fn touch(&mut self, page: u64) {
        if let Some((_, leaf)) = self.leaves.range_mut(..=page).next_back() {
            leaf.changed = true;
        }
    }

    /// The number of extents.
    pub(crate) fn count(&self) -> usize {
        self.map.len()
    }

    /// The last extent that begins before `page`, cut off at `page`.
    pub(crate) fn last_before(&self, page: u64) -> Option<DiskExtent> {
        let (first, piece) = self.map.range(..page).next_back()?;
        Some(part(&piece.to_extent(*first), &(0..page)))
    }

    /// The extent that holds `page`, from `page` on.
    pub(crate) fn find(&self, page: u64) -> Option<DiskExtent> {
        let (first, piece) = self.map.range(..=page).next_back()?;
        let extent = piece.to_extent(*first);
        (page < extent.end()).then(|| part(&extent, &(page..u64::MAX)))
    }

    /// The extents in `pages`, cut off at both ends.
    pub(crate) fn iter_range(&self, pages: Range<u64>) -> impl Iterator<Item = DiskExtent> {
        let before = self.map.range(..pages.start).next_back();
        let before = before.map(|(page, piece)| piece.to_extent(*page));
        let from = self.map.range(pages.start..pages.end.max(pages.start));
        let after = from.map(|(page, piece)| piece.to_extent(*page));
        let before = before.filter(move |extent| extent.end() > pages.start);
        let pages = pages.clone();
        before.into_iter().chain(after).map(move |extent| part(&extent, &pages))
    }

    /// The ranges of `pages` that no extent holds.
    pub(crate) fn holes(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        let mut holes = Vec::new();
        let mut at = pages.start;
        for extent in self.iter_range(pages.clone()) {
            if at < extent.page {
                holes.push(at..extent.page);
            }
            at = extent.end();
        }
        if at < pages.end {
            holes.push(at..pages.end);
        }
        holes
    }

    /// Takes the extents of `pages` out. Returns their blocks.
    pub(crate) fn cut(&mut self, pages: Range<u64>) -> Vec<BlockRun> {
        self.remove(pages).into_iter().map(BlockRun::from).collect()
    }

    fn remove(&mut self, pages: Range<u64>) -> Vec<DiskExtent> {
        if pages.is_empty() {
            return Vec::new();
        }
        self.split(pages.start);
        self.split(pages.end);
        let inside = self.map.range(pages).map(|(page, piece)| piece.to_extent(*page));
        let removed: Vec<DiskExtent> = inside.collect();
        self.changes += u64::from(!removed.is_empty());
        for extent in &removed {
            self.map.remove(&extent.page);
            self.touch(extent.page);
            self.blocks -= u64::from(extent.count);
        }
        removed
    }

    /// Splits an extent that continues from the page before `page` to `page`.
    fn split(&mut self, page: u64) {
        let Some((first, piece)) = self.map.range_mut(..page).next_back() else { return };
        let extent = piece.to_extent(*first);
        if page < extent.end() {
            piece.count = (page - extent.page) as u32;
            let DiskExtent { block, count, unwritten, .. } = part(&extent, &(page..u64::MAX));
            self.map.insert(page, MappedExtent { block, count, unwritten });
            self.touch(extent.page);
            self.touch(page);
        }
    }

    /// Adds an extent for pages that have none.
    pub(crate) fn add(&mut self, new: DiskExtent) {
        self.changes += 1;
        self.blocks += u64::from(new.count);
        let DiskExtent { page, block, count, unwritten } = new;
        self.map.insert(page, MappedExtent { block, count, unwritten });
        self.touch(page);
        self.join(new.end());
        self.join(page);
    }

    /// Joins the extents before and from `page` on, if the second continues the first.
    fn join(&mut self, page: u64) {
        let Some(second) = self.map.get(&page).copied() else { return };
        let Some((first, piece)) = self.map.range_mut(..page).next_back() else { return };
        let extent = piece.to_extent(*first);
        let goes_on = extent.end() == page
            && extent.block + u64::from(extent.count) == second.block
            && extent.unwritten == second.unwritten;
        if let Some(count) = piece.count.checked_add(second.count).filter(|_| goes_on) {
            piece.count = count;
            self.map.remove(&page);
            self.touch(extent.page);
            self.touch(page);
        }
    }

    /// Records that the blocks of `pages` hold data.
    pub(crate) fn mark_written(&mut self, pages: Range<u64>) {
        let unwritten = |extent: &DiskExtent| extent.unwritten;
        if !self.iter_range(pages.clone()).any(|extent| unwritten(&extent)) {
            return;
        }
        let extents = self.remove(pages);
        extents.into_iter().for_each(|extent| self.add(DiskExtent { unwritten: false, ..extent }));
    }

    /// Takes `pages` out, and moves all after them to their place. Returns the blocks that were
    /// taken out.
    pub(crate) fn collapse(&mut self, pages: Range<u64>) -> Vec<BlockRun> {
        let freed = self.cut(pages.clone());
        self.split(pages.end);
        let by = pages.end - pages.start;
        self.changes += 1;
        self.leaves.clear();
        let moved = self.map.split_off(&pages.end);
        self.map.extend(moved.into_iter().map(|(page, piece)| (page - by, piece)));
        self.join(pages.start);
        freed
    }

    /// Moves all extents from `page` on by `by` pages. These `by` pages are a hole then.
    pub(crate) fn insert(&mut self, page: u64, by: u64) {
        self.split(page);
        self.changes += 1;
        self.leaves.clear();
        let moved = self.map.split_off(&page);
        self.map.extend(moved.into_iter().map(|(page, piece)| (page + by, piece)));
    }

    /// The first page from `page` on that lies in an extent with data.
    pub(crate) fn next_data(&self, page: u64) -> Option<u64> {
        let here = self.find(page).filter(|extent| !extent.unwritten);
        let after = || self.map.range((Excluded(page), Included(u64::MAX)));
        let next = || after().find(|(_, piece)| !piece.unwritten).map(|(page, _)| *page);
        here.map(|_| page).or_else(next)
    }

    /// The first page from `page` on that lies in no extent with data.
    pub(crate) fn next_hole(&self, page: u64) -> u64 {
        let mut at = page;
        while let Some(extent) = self.find(at).filter(|extent| !extent.unwritten) {
            at = extent.end();
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each page its block, and whether it has data.
    type PageMapping = BTreeMap<u64, (u64, bool)>;

    fn blocks(runs: &[BlockRun]) -> Vec<u64> {
        let all = runs.iter().flat_map(|run| run.block..run.block + u64::from(run.count));
        let mut all: Vec<u64> = all.collect();
        all.sort_unstable();
        all
    }

    fn take_blocks(table: &mut PageMapping, pages: &Range<u64>) -> Vec<u64> {
        let out = pages.clone().filter_map(|page| table.remove(&page)).map(|(block, _)| block);
        let mut out: Vec<u64> = out.collect();
        out.sort_unstable();
        out
    }

    fn move_pages(table: &PageMapping, from: u64, by: impl Fn(u64) -> u64) -> PageMapping {
        table.iter().map(|(at, to)| (if *at >= from { by(*at) } else { *at }, *to)).collect()
    }

    fn compare(extents: &ExtentMap, table: &PageMapping) {
        for page in 0..400 {
            let here = extents.find(page);
            let found = here.map(|extent| (extent.block, extent.unwritten));
            assert_eq!(found, table.get(&page).copied(), "page {page}");
            let data = |at: &u64| table.get(at).is_some_and(|(_, unwritten)| !unwritten);
            assert_eq!(extents.next_data(page), (page..1000).find(data));
            assert_eq!(Some(extents.next_hole(page)), (page..1000).find(|at| !data(at)));
        }
        assert_eq!(extents.blocks(), table.len() as u64);
        let all: Vec<DiskExtent> = extents.iter().collect();
        for pair in all.windows(2) {
            let one = pair[0].end() == pair[1].page
                && pair[0].block + u64::from(pair[0].count) == pair[1].block
                && pair[0].unwritten == pair[1].unwritten;
            assert!(pair[0].end() <= pair[1].page && !one, "{pair:?}");
        }
    }

    #[test]
    fn extents_are_like_a_table_of_blocks() {
        let mut random = fastrand::Rng::with_seed(8);
        let (mut extents, mut table) = (ExtentMap::default(), PageMapping::new());
        let mut next = 1;
        for _ in 0..6000 {
            let first = random.u64(..200);
            let pages = first..first + random.u64(1..20);
            let by = pages.end - pages.start;
            match random.u8(..8) {
                0 if table.keys().next_back().is_none_or(|last| last + by < 400) => {
                    extents.insert(first, by);
                    table = move_pages(&table, first, |page| page + by);
                }
                0 | 1 => {
                    let freed = extents.collapse(pages.clone());
                    assert_eq!(blocks(&freed), take_blocks(&mut table, &pages));
                    table = move_pages(&table, pages.end, |page| page - by);
                }
                2 => {
                    extents.mark_written(pages.clone());
                    table.range_mut(pages).for_each(|(_, (_, unwritten))| *unwritten = false);
                }
                3 => {
                    let parts =
                        extents.iter_range(pages.clone()).flat_map(|part| part.page..part.end());
                    assert!(parts.eq(table.range(pages.clone()).map(|(page, _)| *page)));
                    let holes = extents.holes(pages.clone()).into_iter().flatten();
                    assert!(holes.eq(pages.filter(|page| !table.contains_key(page))));
                }
                4 => {
                    let freed = extents.cut(pages.clone());
                    assert_eq!(blocks(&freed), take_blocks(&mut table, &pages));
                }
                _ => {
                    let unwritten = random.u8(..3) == 0;
                    for hole in extents.holes(pages) {
                        let count = hole.end - hole.start;
                        let (page, block) = (hole.start, next);
                        extents.add(DiskExtent { page, block, count: count as u32, unwritten });
                        table.extend((0..count).map(|at| (page + at, (block + at, unwritten))));
                        next += count + random.u64(..2);
                    }
                }
            }
            compare(&extents, &table);
        }
        let same: ExtentMap = extents.iter().collect();
        assert_eq!((extents.map, extents.blocks), (same.map, same.blocks));
    }

    #[test]
    fn a_hundred_thousand_extents_take_no_longer_each() {
        let time = |count: u64| {
            let mut extents = ExtentMap::default();
            let start = std::time::Instant::now();
            let mut random = fastrand::Rng::with_seed(1);
            for block in 0..count {
                // No two of them are neighbours, so that each is an extent of its own.
                let page = random.u64(..1 << 24) * 2;
                extents.cut(page..page + 1);
                extents.add(DiskExtent { page, block: block * 2, count: 1, unwritten: false });
            }
            (start.elapsed().as_nanos() as u64 / count, extents.iter().count())
        };
        let ((few, _), (many, count)) = (time(1000), time(100_000));
        println!("{few} ns each of 1,000 extents, {many} of {count}");
        assert!(count > 99_000);
    }
}
