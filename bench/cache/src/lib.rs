//! Hit rates of the policies of `cache/` on generated traces: in a simulation, at five sizes of the
//! cache, and on servers with client processes ([`live`]).
//!
//! The traces follow from a seed, and so does everything in the simulation, in which no file system
//! takes part. No time is measured.

#![forbid(unsafe_code)]

pub mod live;
mod random;
mod replay;
mod results;
mod traces;

pub use replay::{ReplayOutcome, replay};
pub use results::{HitRateCell, HitRateGoal, HitRateResults, PolicyCase};
pub use traces::{ExtentTrace, TraceOverlap, TraceStep, make_all};

use defuse_cache::PolicyKind;

/// The sizes of the cache, in thousandths of the bytes of the trace.
pub const SIZES: [u64; 5] = [10, 25, 50, 100, 250];

/// Replays all traces of about so many uses each, with all policies. `say` receives a line for each
/// trace.
pub fn run(uses: usize, seed: u64, say: &mut dyn FnMut(String)) -> HitRateResults {
    let mut results = HitRateResults { uses, seed, cells: Vec::new() };
    for trace in make_all(uses, seed) {
        say(format!("{}: {} uses", trace.name, trace.steps.len()));
        for thousandths in SIZES {
            let capacity = (trace.bytes * thousandths / 1000).max(1);
            for (policy, kind) in PolicyKind::ALL {
                let replayed = replay(&trace, kind, capacity, seed);
                let (trace, overlap) = (trace.name, trace.overlap);
                let case = PolicyCase { trace, overlap, thousandths, policy };
                results.cells.push(HitRateCell { case, replayed });
            }
        }
    }
    results
}
