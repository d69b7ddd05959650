//! The traces.

mod mixes;
mod users;

use defuse_cache::{ExtentKey, ExtentUse};
use fastrand::Rng;
use serde::Serialize;

/// An extent of files that are larger.
pub(crate) const EXTENT: u64 = 64 << 10;
/// Processes of the traces with several.
const USERS: u32 = 8;

/// The uses of several processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum TraceOverlap {
    /// One process, or several that share nothing.
    None,
    /// Processes use the same files in part.
    Shared,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceStep {
    /// A use of an extent.
    Use(ExtentUse),
    /// An extent of a file that is removed.
    Gone(ExtentKey),
}

/// A sequence of events.
#[derive(Clone, Debug)]
pub struct ExtentTrace {
    /// The name, which describes the uses.
    pub name: &'static str,
    /// If processes use the same files.
    pub overlap: TraceOverlap,
    /// The bytes of which cache sizes are parts: the bytes of all files that are used again.
    pub bytes: u64,
    /// The events.
    pub steps: Vec<TraceStep>,
}

/// All traces, of about so many uses each.
pub fn make_all(uses: usize, seed: u64) -> Vec<ExtentTrace> {
    let makers: [fn(&mut TraceMaker); 14] = [
        users::zipf_flat,
        users::zipf_steep,
        users::shifting,
        users::add_scans,
        users::add_loops,
        users::add_loops_of_lengths,
        users::eight_apart,
        users::common_quarter,
        users::common_half,
        users::common_most,
        users::add_passes,
        users::walk_one_tree,
        mixes::webserver,
        mixes::varmail,
    ];
    let made = |(number, make): (usize, &fn(&mut TraceMaker))| {
        let mut maker = TraceMaker::new(uses, seed.wrapping_add(number as u64));
        make(&mut maker);
        maker.trace
    };
    makers.iter().enumerate().map(made).collect()
}

/// A trace that is being made.
struct TraceMaker {
    rng: Rng,
    uses: usize,
    trace: ExtentTrace,
}

impl TraceMaker {
    fn new(uses: usize, seed: u64) -> TraceMaker {
        let steps = Vec::with_capacity(uses);
        let trace = ExtentTrace { name: "", overlap: TraceOverlap::None, bytes: 0, steps };
        TraceMaker { rng: Rng::with_seed(seed), uses, trace }
    }

    fn is_short(&self) -> bool {
        self.trace.steps.len() < self.uses
    }

    /// Uses extent `index` of a file, of 64 KiB.
    fn use_extent(&mut self, user: u32, file: u64, index: u64) {
        self.use_extent_of_size(user, ExtentKey::new(file, index), EXTENT);
    }

    fn use_extent_of_size(&mut self, user: u32, key: ExtentKey, size: u64) {
        self.trace.steps.push(TraceStep::Use(ExtentUse { key, size, user }));
    }

    fn user(&mut self) -> u32 {
        self.rng.u32(..USERS)
    }

    /// The number of extents of a trace: each is used 16 times on average.
    fn extents(&self) -> u64 {
        (self.uses as u64 / 16).max(64)
    }

    fn set_name(&mut self, name: &'static str, overlap: TraceOverlap, extents: u64) {
        (self.trace.name, self.trace.overlap) = (name, overlap);
        self.trace.bytes = extents * EXTENT;
    }
}
