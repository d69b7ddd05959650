//! A trace, and a policy.

use defuse_cache::PolicyKind;
use serde::Serialize;

use crate::results::percent_of;
use crate::traces::{ExtentTrace, TraceStep};

/// The outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplayOutcome {
    /// Uses that count: those after the first fifth of the trace, in which the cache fills.
    pub uses: u64,
    /// Uses of extents in the cache.
    pub hits: u64,
}

impl ReplayOutcome {
    /// Hits in percent of the uses.
    pub fn percent(&self) -> f64 {
        percent_of(self.hits, self.uses)
    }
}

/// The number of the first events, in which the cache fills, of so many.
pub(crate) fn warm(events: usize) -> usize {
    events / 5
}

/// Replays a trace with a cache of so many bytes.
pub fn replay(trace: &ExtentTrace, kind: PolicyKind, capacity: u64, seed: u64) -> ReplayOutcome {
    let mut policy = kind.make(capacity, seed);
    let (mut replayed, mut evicted) = (ReplayOutcome::default(), Vec::new());
    let warm = warm(trace.steps.len());
    for (number, step) in trace.steps.iter().enumerate() {
        match *step {
            TraceStep::Use(extent) => {
                let hit = policy.access(extent, &mut evicted);
                evicted.clear();
                let counts = number >= warm;
                replayed.uses += u64::from(counts);
                replayed.hits += u64::from(counts && hit);
            }
            TraceStep::Gone(key) => {
                policy.remove(key);
            }
        }
    }
    replayed
}
