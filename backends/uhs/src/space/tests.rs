use std::collections::BTreeSet;

use super::*;

/// All blocks of the runs.
fn blocks(runs: &[BlockRun]) -> BTreeSet<u64> {
    runs.iter().flat_map(|run| run.block..run.end()).collect()
}

#[test]
fn runs_never_overlap_and_empty_units_are_free_again() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut space = BlockSpace::new(20);
        space.reserve(3, 2);
        let mut held: Vec<BlockRun> = Vec::new();
        let mut used = BTreeSet::new();
        // The space fills up and empties in turn.
        for step in 0..3000 {
            if random.u32(..100) < if step / 500 % 2 == 0 { 70 } else { 40 } {
                let near = random.choice(&held).map(|run| run.end() - 1);
                let count = [1, 1, 3, 40, 512, 700][random.usize(..6)];
                match space.take(count, near, 1) {
                    Some(run) => {
                        assert!(run.count > 0 && run.count <= count);
                        for block in run.block..run.end() {
                            assert!(used.insert(block) && !(3..5).contains(&(block / UNIT_BLOCKS)));
                        }
                        held.push(run);
                    }
                    None => assert_eq!(space.free_blocks(), u64::from(space.free_units()) * 512),
                }
            } else if !held.is_empty() {
                let run = held.swap_remove(random.usize(..held.len()));
                // Sometimes only a part of the run is freed at first.
                let count = random.u32(1..=run.count);
                space.free(BlockRun { count, ..run });
                used.retain(|block| !(run.block..run.block + u64::from(count)).contains(block));
                if count < run.count {
                    let block = run.block + u64::from(count);
                    held.push(BlockRun { block, count: run.count - count });
                }
            }
            assert_eq!(space.free_blocks(), 18 * UNIT_BLOCKS - used.len() as u64);
            let empty = |unit: u64| used.range(unit * 512..(unit + 1) * 512).next().is_none();
            let free = (0..20).filter(|unit| !(3..5).contains(unit) && empty(*unit)).count();
            assert_eq!(space.free_units(), free as u32);
            let count = |unit: u64| used.range(unit * 512..(unit + 1) * 512).count();
            let full = (0..20).filter(|unit| count(*unit) == 512).count() as u64;
            let units = space.units();
            assert_eq!((units.full, units.slots), (full, 2));
            assert_eq!(units.small, 18 - full - free as u64);
            assert!(free >= 1, "a unit is kept");
        }
        assert_eq!(blocks(&held), used);
        held.into_iter().for_each(|run| space.free(run));
        assert_eq!((space.free_blocks(), space.free_units()), (18 * UNIT_BLOCKS, 18));
        assert_eq!(space.spare.len(), space.bits.len(), "no unit has bits");
    }
}

#[test]
fn a_block_has_one_owner() {
    let mut space = BlockSpace::new(8);
    space.reserve(0, 1);
    assert!(space.claim(BlockRun { block: 600, count: 10 }));
    assert!(space.claim(BlockRun { block: 2 * 512, count: 700 }));
    let full = (2 * 512 + 100, 1);
    for run in [(605, 1), (590, 20), (0, 1), full, (3 * 512, 1), (8 * 512, 1), (u64::MAX, 2)] {
        let before = space.free_blocks();
        assert!(!space.claim(BlockRun { block: run.0, count: run.1 }), "{run:?}");
        assert_eq!(space.free_blocks(), before);
    }
}

#[test]
fn blocks_lie_behind_those_of_the_same_file_or_side_by_side() {
    let mut space = BlockSpace::new(64);
    let first = space.take(10, None, 0).unwrap();
    let next = space.take(1, None, 0).unwrap();
    assert_eq!(next.block, first.end());
    // The place behind the first run is taken now; behind the second run it is free.
    assert_eq!(space.take(5, Some(next.block), 0).unwrap().block, next.end());
    let elsewhere = space.take(5, Some(first.end() - 1), 0).unwrap();
    assert_eq!(elsewhere.block / UNIT_BLOCKS, first.block / UNIT_BLOCKS, "the unit is the same");
    // A whole unit is taken where one is free, after the unit of the neighbour if possible.
    let unit = space.take(512, Some(40 * 512 + 511), 0).unwrap();
    assert_eq!((unit.block, unit.count), (41 * 512, 512));
    // Without a free unit the rests are used.
    let taken = std::iter::from_fn(|| space.take(512, None, 0)).collect::<Vec<_>>();
    assert!(taken.iter().filter(|run| run.count == 512).count() == 62);
    assert_eq!(space.free_blocks(), 0);
}

/// The test uses a device of 1 TiB whose second half is free, and whose first half has a free block
/// in each unit.
#[test]
fn a_block_is_found_without_a_walk_over_all_units() {
    const UNITS: u32 = 1 << 19;
    let mut space = BlockSpace::new(UNITS);
    for unit in 0..u64::from(UNITS) / 2 {
        space.claim(BlockRun { block: unit * 512, count: 511 });
    }
    let start = std::time::Instant::now();
    let rounds = 100_000;
    for _ in 0..rounds {
        let (small, large) = (space.take(1, None, 0).unwrap(), space.take(512, None, 0).unwrap());
        assert!((small.count, large.count) == (1, 512));
        space.free(large);
    }
    println!("{} ns for a small block, a unit, and its end", start.elapsed().as_nanos() / rounds);
    assert_eq!(space.free_units(), UNITS / 2);
}

#[test]
fn units_that_are_emptied_take_no_blocks_while_there_are_others() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut space = BlockSpace::new(12);
    space.reserve(1, 1);
    let all: Vec<BlockRun> = std::iter::from_fn(|| space.take(1, None, 0)).collect();
    let (gone, kept): (Vec<BlockRun>, Vec<BlockRun>) =
        all.into_iter().partition(|_| random.u8(..10) > 0);
    gone.iter().for_each(|run| space.free(*run));
    let free = space.free_blocks();
    // Units with copies of the superblock cannot be emptied.
    let leaving = space.find_emptiest(3, (1, 1 << 20), &BTreeSet::from([5]));
    assert_eq!(leaving.len(), 3);
    assert!(leaving.is_sorted() && leaving.iter().all(|unit| ![0, 1, 3, 5, 7].contains(unit)));
    space.close(&leaving);
    assert!(
        space
            .find_emptiest(12, (1, 1 << 20), &BTreeSet::new())
            .iter()
            .all(|unit| !leaving.contains(unit))
    );
    let is_leaving = |run: &BlockRun| leaving.contains(&((run.block / UNIT_BLOCKS) as usize));
    for run in kept.iter().filter(|run| is_leaving(run)) {
        let new = space.take(1, Some(run.block), 0).unwrap();
        assert!(!is_leaving(&new), "{new:?}");
        space.free(*run);
    }
    assert_eq!((space.free_units(), space.free_blocks()), (3, free));
    assert_eq!(space.reopen(&leaving), [0; 0]);
    // Promised blocks are available, also in units that are being emptied.
    let leaving = space.find_emptiest(2, (1, 1 << 20), &BTreeSet::new());
    space.close(&leaving);
    let mut taken = 0;
    while let Some(run) = space.take(512, None, 0) {
        taken += u64::from(run.count);
    }
    assert_eq!((taken, space.free_blocks()), (free, 0));
    assert_eq!(space.reopen(&leaving), leaving);
}

// Claims of a forged image that all fail looked at all units each.
#[test]
fn a_claim_that_fails_takes_what_is_free_before_so_that_the_next_one_ends_at_once() {
    let mut space = BlockSpace::new(1000);
    assert!(space.claim(BlockRun { block: 900 * 512 + 7, count: 1 }));
    let all = BlockRun { block: 0, count: 1000 * 512 };
    assert!(!space.claim_until_used(all));
    assert_eq!(space.free_blocks(), 100 * 512 - 1);
    assert!(
        !space.claim_until_used(all) && !space.claim_until_used(BlockRun { block: 512, ..all })
    );
    assert_eq!(space.free_blocks(), 100 * 512 - 1);
    assert!(space.claim_until_used(BlockRun { block: 900 * 512 + 8, count: 512 }));
    assert!(
        !space.claim_until_used(BlockRun { block: 999 * 512, count: 513 }),
        "there are no more"
    );
}
