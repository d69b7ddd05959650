//! Traces in the manner of the personalities of Filebench, with popular files in place of equal
//! ones.

use std::collections::VecDeque;

use defuse_cache::ExtentKey;

use super::{EXTENT, TraceMaker, TraceOverlap, TraceStep, USERS};
use crate::random::{ZipfDistribution, gamma};

/// The mean size of a file, 16 KiB, as in Filebench.
const MEAN: f64 = 16384.0;
const LOGS: u64 = 1 << 32;
const PAGE: u64 = 4096;

/// Uses a whole file.
fn use_file(maker: &mut TraceMaker, user: u32, file: u64, size: u64) {
    for index in 0..size.div_ceil(EXTENT) {
        let size = (size - index * EXTENT).min(EXTENT);
        maker.use_extent_of_size(user, ExtentKey::new(file, index), size);
    }
}

/// The size of a new file, in whole pages.
fn size(maker: &mut TraceMaker) -> u64 {
    (gamma(&mut maker.rng, MEAN) as u64).max(1).next_multiple_of(PAGE)
}

/// Processes read whole files of all, ten and then an extent of a log, whose end moves on.
pub fn webserver(maker: &mut TraceMaker) {
    let files = maker.extents();
    let sizes: Vec<u64> = (0..files).map(|_| size(maker)).collect();
    maker.set_name("8 processes, webserver", TraceOverlap::Shared, 0);
    maker.trace.bytes = sizes.iter().sum();
    let zipf = ZipfDistribution::new(files as usize, 0.8);
    let mut logged = [0_u64; USERS as usize];
    while maker.is_short() {
        let user = maker.user();
        for _ in 0..10 {
            let file = zipf.draw(&mut maker.rng);
            use_file(maker, user, file, sizes[file as usize]);
        }
        let at = &mut logged[user as usize];
        *at += 16 << 10;
        let index = *at / EXTENT;
        maker.use_extent(user, LOGS + u64::from(user), index);
    }
}

/// Each process has a box of its own: mails are written, read soon, read again at times, and
/// removed.
pub fn varmail(maker: &mut TraceMaker) {
    let files = (maker.extents() / u64::from(USERS)).max(4) as usize;
    maker.set_name("8 processes, varmail", TraceOverlap::None, 0);
    let mut boxes: Vec<VecDeque<(u64, u64)>> = vec![VecDeque::new(); USERS as usize];
    let mut next = 0;
    while maker.is_short() {
        let user = maker.user();
        let mails = &mut boxes[user as usize];
        if mails.len() >= files {
            let at = maker.rng.usize(..mails.len());
            if let Some((file, size)) = mails.remove(at) {
                let gone = (0..size.div_ceil(EXTENT)).map(|index| ExtentKey::new(file, index));
                maker.trace.steps.extend(gone.map(TraceStep::Gone));
            }
        }
        let new = (next, size(maker));
        next += 1;
        boxes[user as usize].push_front(new);
        use_file(maker, user, new.0, new.1);
        let mails = &boxes[user as usize];
        // New mails are read more often than old ones.
        let recent = ZipfDistribution::new(mails.len(), 1.0);
        let read: Vec<_> = (0..3).map(|_| mails[recent.draw(&mut maker.rng) as usize]).collect();
        read.into_iter().for_each(|(file, size)| use_file(maker, user, file, size));
    }
    maker.trace.bytes = boxes.iter().flatten().map(|(_, size)| size).sum();
}
