//! Hit rates, the goals, and their table.

use std::fmt::Write as _;

use defuse_cache::PolicyKind;
use serde::Serialize;

use crate::replay::ReplayOutcome;
use crate::traces::TraceOverlap;

/// Percent by which E may be below the best on a trace.
const BELOW: f64 = 2.0;
/// The policy that the goals are about.
const E: &str = "e";
/// The policies that it is compared with.
const OTHERS: [&str; 4] = ["lru", "lfu", "arc", "s3-fifo"];

/// A policy on a trace.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PolicyCase {
    /// The trace.
    pub trace: &'static str,
    /// If processes use the same files.
    pub overlap: TraceOverlap,
    /// The size of the cache, in thousandths of the bytes of the trace.
    pub thousandths: u64,
    /// The policy.
    pub policy: &'static str,
}

impl PolicyCase {
    /// True if it is this one.
    pub(crate) fn is(&self, trace: &str, thousandths: u64, policy: &str) -> bool {
        (self.trace, self.thousandths, self.policy) == (trace, thousandths, policy)
    }

    /// The traces of all cases, in their order.
    pub(crate) fn list_traces(
        all: impl Iterator<Item = PolicyCase>,
    ) -> Vec<(&'static str, TraceOverlap)> {
        let mut traces: Vec<_> = all.map(|case| (case.trace, case.overlap)).collect();
        traces.dedup();
        traces
    }
}

/// The hit rate of one policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HitRateCell {
    /// The policy and the trace.
    #[serde(flatten)]
    pub case: PolicyCase,
    /// The hits.
    pub replayed: ReplayOutcome,
}

/// All hit rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HitRateResults {
    /// Uses of each trace, about.
    pub uses: usize,
    /// The seed of the traces.
    pub seed: u64,
    /// The figures.
    pub cells: Vec<HitRateCell>,
}

/// E beside LRU, LFU, ARC and S3-FIFO, on one trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HitRateGoal {
    /// The trace.
    pub trace: &'static str,
    /// If processes use the same files.
    pub overlap: TraceOverlap,
    /// E against the best of the others at the size where it is least, in percent of that one.
    pub worst: f64,
    /// The mean over all sizes.
    pub mean: f64,
    /// Without overlap: nowhere below the best by more than 2 %. With overlap: better in the mean,
    /// and nowhere below by more than 2 %.
    pub is_met: bool,
}

/// The head of a table of rates, in Markdown.
pub(crate) fn head() -> String {
    let names = PolicyKind::ALL.map(|(name, _)| name);
    format!("| trace | cache | {} |\n|---|---|{}\n", names.join(" | "), "---|".repeat(names.len()))
}

/// A row of that table, with the text for each policy.
pub(crate) fn row(trace: &str, thousandths: u64, rate: impl Fn(&str) -> String) -> String {
    let rates = PolicyKind::ALL.map(|(policy, _)| rate(policy));
    format!("| {trace} | {} % | {} |\n", thousandths as f64 / 10.0, rates.join(" | "))
}

/// A part in percent.
pub(crate) fn percent_of(part: u64, all: u64) -> f64 {
    part as f64 * 100.0 / all.max(1) as f64
}

impl HitRateGoal {
    /// The goal for a trace whose hit rate at a size with a policy is `rate`.
    pub(crate) fn for_trace(
        (trace, overlap): (&'static str, TraceOverlap),
        sizes: &[u64],
        rate: &dyn Fn(u64, &str) -> f64,
    ) -> HitRateGoal {
        // Relative to the best, so that a low rate cannot hide a large loss.
        let against_best = |&size: &u64| {
            let best = OTHERS.iter().map(|other| rate(size, other)).fold(0.0, f64::max);
            if best == 0.0 { 0.0 } else { (rate(size, E) / best - 1.0) * 100.0 }
        };
        let ratios: Vec<f64> = sizes.iter().map(against_best).collect();
        let worst = ratios.iter().copied().fold(f64::MAX, f64::min);
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        let is_met = worst >= -BELOW && (overlap == TraceOverlap::None || mean > 0.0);
        HitRateGoal { trace, overlap, worst, mean, is_met }
    }

    /// The table of goals, in Markdown.
    pub(crate) fn table(goals: &[HitRateGoal]) -> String {
        let mut text = String::from(
            "\n| trace | E against the best of the others: least | mean | goal |\n|---|---|---|---|\n",
        );
        for goal in goals {
            let met = if goal.is_met { "met" } else { "not met" };
            let HitRateGoal { trace, worst, mean, .. } = goal;
            let _ = writeln!(text, "| {trace} | {worst:+.1} % | {mean:+.1} % | {met} |");
        }
        text
    }
}

impl HitRateResults {
    /// A hit rate in percent.
    fn rate(&self, trace: &str, thousandths: u64, policy: &str) -> f64 {
        let found = self.cells.iter().find(|cell| cell.case.is(trace, thousandths, policy));
        found.map_or(0.0, |cell| cell.replayed.percent())
    }

    fn list_traces(&self) -> Vec<(&'static str, TraceOverlap)> {
        PolicyCase::list_traces(self.cells.iter().map(|cell| cell.case))
    }

    /// The goals, by trace.
    pub fn goals(&self) -> Vec<HitRateGoal> {
        let goal = |(trace, overlap)| {
            let rate = |size, policy: &str| self.rate(trace, size, policy);
            HitRateGoal::for_trace((trace, overlap), &crate::SIZES, &rate)
        };
        self.list_traces().into_iter().map(goal).collect()
    }

    /// The tables, in Markdown.
    pub fn table(&self) -> String {
        let mut text = head();
        for (trace, _) in self.list_traces() {
            for size in crate::SIZES {
                text +=
                    &row(trace, size, |policy| format!("{:.1}", self.rate(trace, size, policy)));
            }
        }
        text + &HitRateGoal::table(&self.goals())
    }
}
