//! Traces of one process, and of processes with stated overlap.

use super::{TraceMaker, TraceOverlap, USERS};
use crate::random::ZipfDistribution;

/// The file of extents that all processes use; the extents of one process are in file 1 + its
/// number.
const COMMON: u64 = 0;
/// Files of extents that are used once.
const ONCE: u64 = 1 << 32;

fn zipf(maker: &mut TraceMaker, s: f64) {
    let zipf = ZipfDistribution::new(maker.extents() as usize, s);
    while maker.is_short() {
        let index = zipf.draw(&mut maker.rng);
        maker.use_extent(0, COMMON, index);
    }
}

pub fn zipf_flat(maker: &mut TraceMaker) {
    maker.set_name("one process, Zipf 0.7", TraceOverlap::None, maker.extents());
    zipf(maker, 0.7);
}

pub fn zipf_steep(maker: &mut TraceMaker) {
    maker.set_name("one process, Zipf 1.0", TraceOverlap::None, maker.extents());
    zipf(maker, 1.0);
}

/// Ten times, other extents become popular.
pub fn shifting(maker: &mut TraceMaker) {
    let extents = maker.extents();
    maker.set_name("one process, Zipf 0.9 that shifts", TraceOverlap::None, extents);
    let zipf = ZipfDistribution::new(extents as usize, 0.9);
    while maker.is_short() {
        let phase = (maker.trace.steps.len() * 10 / maker.uses) as u64;
        let index = (zipf.draw(&mut maker.rng) + phase * extents / 10) % extents;
        maker.use_extent(0, COMMON, index);
    }
}

/// Half of all uses belong to scans, which never come back.
pub fn add_scans(maker: &mut TraceMaker) {
    let extents = maker.extents();
    maker.set_name("one process, Zipf 0.9 and scans", TraceOverlap::None, extents);
    let zipf = ZipfDistribution::new(extents as usize, 0.9);
    let mut file = ONCE;
    while maker.is_short() {
        let len = maker.rng.u64(1..=extents / 8);
        for _ in 0..len {
            let index = zipf.draw(&mut maker.rng);
            maker.use_extent(0, COMMON, index);
        }
        (0..len).for_each(|index| maker.use_extent(0, file, index));
        file += 1;
    }
}

pub fn add_loops(maker: &mut TraceMaker) {
    let extents = maker.extents();
    maker.set_name("one process, a loop", TraceOverlap::None, extents);
    while maker.is_short() {
        (0..extents).for_each(|index| maker.use_extent(0, COMMON, index));
    }
}

/// Loops over files of a 64th, a 16th and a quarter of all extents, and random uses of the rest.
pub fn add_loops_of_lengths(maker: &mut TraceMaker) {
    let extents = maker.extents();
    maker.set_name("one process, loops of several lengths", TraceOverlap::None, extents);
    let lengths = [extents / 64, extents / 16, extents / 4].map(|length| length.max(1));
    let mut at = [0_u64; 3];
    let zipf = ZipfDistribution::new((extents - lengths.iter().sum::<u64>()) as usize, 0.8);
    while maker.is_short() {
        for (number, length) in lengths.iter().enumerate() {
            for _ in 0..length.min(&16) * 2 {
                maker.use_extent(0, 1 + number as u64, at[number] % length);
                at[number] += 1;
            }
        }
        for _ in 0..32 {
            let index = zipf.draw(&mut maker.rng);
            maker.use_extent(0, COMMON, index);
        }
    }
}

/// Each process uses its own files, and common ones with this probability.
fn add_overlapping(maker: &mut TraceMaker, common: f64) {
    let extents = maker.extents();
    let part = (extents as f64 * common) as usize;
    let own = (extents as usize - part) / USERS as usize;
    let (shared, own) =
        (ZipfDistribution::new(part.max(1), 0.9), ZipfDistribution::new(own.max(1), 0.9));
    while maker.is_short() {
        let user = maker.user();
        if maker.rng.f64() < common {
            let index = shared.draw(&mut maker.rng);
            maker.use_extent(user, COMMON, index);
        } else {
            let index = own.draw(&mut maker.rng);
            maker.use_extent(user, 1 + u64::from(user), index);
        }
    }
}

pub fn eight_apart(maker: &mut TraceMaker) {
    maker.set_name("8 processes, nothing in common", TraceOverlap::None, maker.extents());
    add_overlapping(maker, 0.0);
}

pub fn common_quarter(maker: &mut TraceMaker) {
    maker.set_name("8 processes, 25 % in common", TraceOverlap::Shared, maker.extents());
    add_overlapping(maker, 0.25);
}

pub fn common_half(maker: &mut TraceMaker) {
    maker.set_name("8 processes, 50 % in common", TraceOverlap::Shared, maker.extents());
    add_overlapping(maker, 0.5);
}

pub fn common_most(maker: &mut TraceMaker) {
    maker.set_name("8 processes, 75 % in common", TraceOverlap::Shared, maker.extents());
    add_overlapping(maker, 0.75);
}

/// The case of the paper: a process goes over an own file of 16 extents four times and never again,
/// while common files are read by one process after another.
pub fn add_passes(maker: &mut TraceMaker) {
    let extents = maker.extents();
    maker.set_name("8 processes, own files in passes, common ones", TraceOverlap::Shared, extents);
    let zipf = ZipfDistribution::new(extents as usize, 0.8);
    let mut file = ONCE;
    let mut at = [(0_u64, 0_u64); USERS as usize];
    while maker.is_short() {
        let user = maker.user();
        if maker.rng.f64() < 0.4 {
            let index = zipf.draw(&mut maker.rng);
            maker.use_extent(user, COMMON, index);
            continue;
        }
        let (own, step) = &mut at[user as usize];
        if *step == 0 {
            (*own, file) = (file, file + 1);
        }
        let (own, index) = (*own, *step % 16);
        *step = (*step + 1) % 64;
        maker.use_extent(user, own, index);
    }
}

/// All processes walk the same tree from different places, like builds of one project, and read and
/// write own files.
pub fn walk_one_tree(maker: &mut TraceMaker) {
    let extents = maker.extents();
    maker.set_name("8 processes, walks of one tree, own files", TraceOverlap::Shared, extents);
    let (tree, own) = (extents / 4, extents * 3 / 4 / u64::from(USERS));
    let zipf = ZipfDistribution::new(own.max(1) as usize, 0.8);
    let mut at: Vec<u64> = (0..USERS).map(|user| tree * u64::from(user) / 8).collect();
    while maker.is_short() {
        let user = maker.user();
        for _ in 0..8 {
            let place = &mut at[user as usize];
            *place = (*place + 1) % tree.max(1);
            let index = *place;
            maker.use_extent(user, COMMON, index);
        }
        for _ in 0..12 {
            let index = zipf.draw(&mut maker.rng);
            maker.use_extent(user, 1 + u64::from(user), index);
        }
    }
}
