//! Lists of extents: by page, without overlaps.

use crate::format::inode::Extent;
use crate::space::Run;

/// The block that holds `page`.
pub(crate) fn block_of(extents: &[Extent], page: u64) -> Option<u64> {
    let after = extents.partition_point(|extent| extent.page <= page);
    let extent = &extents[after.checked_sub(1)?];
    let at = page - extent.page;
    (at < u64::from(extent.count)).then(|| extent.block + at)
}

/// Takes the pages from `first` to before `end` out of the list. Returns their blocks.
pub(crate) fn cut(extents: &mut Vec<Extent>, first: u64, end: u64) -> Vec<Run> {
    let mut freed = Vec::new();
    let mut kept = Vec::with_capacity(extents.len() + 1);
    for extent in extents.drain(..) {
        let (start, stop) = (extent.page, extent.page + u64::from(extent.count));
        let (from, to) = (start.max(first), stop.min(end));
        if from >= to {
            kept.push(extent);
            continue;
        }
        let part = |from: u64, to: u64| Extent {
            page: from,
            block: extent.block + (from - start),
            count: (to - from) as u32,
        };
        kept.extend((start < from).then(|| part(start, from)));
        freed.push(part(from, to).into());
        kept.extend((to < stop).then(|| part(to, stop)));
    }
    *extents = kept;
    freed
}

/// Adds an extent for pages that have none.
pub(crate) fn add(extents: &mut Vec<Extent>, new: Extent) {
    let at = extents.partition_point(|extent| extent.page < new.page);
    let follows = |a: &Extent, b: &Extent| {
        a.page + u64::from(a.count) == b.page
            && a.block + u64::from(a.count) == b.block
            && a.count.checked_add(b.count).is_some()
    };
    extents.insert(at, new);
    if extents.get(at + 1).is_some_and(|next| follows(&extents[at], next)) {
        extents[at].count += extents.remove(at + 1).count;
    }
    if at > 0 && follows(&extents[at - 1], &extents[at]) {
        extents[at - 1].count += extents.remove(at).count;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn extents_are_like_a_table_of_blocks() {
        let mut random = fastrand::Rng::with_seed(8);
        let mut extents = Vec::new();
        let mut table: BTreeMap<u64, u64> = BTreeMap::new();
        let mut next = 1;
        for _ in 0..3000 {
            let (page, count) = (random.u64(..200), random.u64(1..20));
            let freed = cut(&mut extents, page, page + count);
            let mut blocks: Vec<u64> =
                freed.iter().flat_map(|run| run.block..run.block + u64::from(run.count)).collect();
            let mut expected: Vec<u64> =
                (page..page + count).filter_map(|page| table.remove(&page)).collect();
            blocks.sort_unstable();
            expected.sort_unstable();
            assert_eq!(blocks, expected);
            if random.bool() {
                add(&mut extents, Extent { page, block: next, count: count as u32 });
                table.extend((0..count).map(|at| (page + at, next + at)));
                next += count + random.u64(..2);
            }
            assert!((0..230).all(|page| block_of(&extents, page) == table.get(&page).copied()));
            let sorted = extents
                .windows(2)
                .all(|pair| pair[0].page + u64::from(pair[0].count) <= pair[1].page);
            assert!(sorted);
        }
    }
}
