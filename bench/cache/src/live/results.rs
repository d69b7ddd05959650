//! Hit rates on servers beside the hit rates of the simulation.

use serde::Serialize;

use crate::replay::ReplayOutcome;
use crate::results::{HitRateGoal, PolicyCase, head, percent_of, row};
use crate::traces::TraceOverlap;

/// The figures of a trace on a server. Figures without `all` in their names are of the uses that
/// count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LiveFigures {
    /// Uses that count: those after the first fifth of the trace, in which the cache fills.
    pub uses: u64,
    /// Reads of the device: a page in memory takes none.
    pub reads: u64,
    /// Groups that were to leave, and were hidden at first.
    pub hidden: u64,
    /// Hidden groups that a reader missed.
    pub missed: u64,
    /// Hidden groups that no reader missed, and that left.
    pub evicted: u64,
    /// Uses of the whole trace that readers have made.
    pub all_uses: u64,
    /// Reads of the device for them.
    pub all_reads: u64,
    /// Extents that the trace uses.
    pub extents: u64,
}

impl LiveFigures {
    /// Uses without a read of the device, in percent.
    pub fn percent(&self) -> f64 {
        percent_of(self.uses.saturating_sub(self.reads), self.uses)
    }
}

/// The hit rates of one policy on one trace. The size of the cache is the size of the memory for
/// pages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveCell {
    /// The policy and the trace.
    #[serde(flatten)]
    pub case: PolicyCase,
    /// The hits in the simulation, with as much memory.
    pub simulated: ReplayOutcome,
    /// The figures on a server.
    pub live: LiveFigures,
}

/// All hit rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveResults {
    /// Uses of each trace, about.
    pub uses: usize,
    /// The seed of the traces.
    pub seed: u64,
    /// The sizes.
    pub sizes: Vec<u64>,
    /// The figures.
    pub cells: Vec<LiveCell>,
}

impl LiveResults {
    fn cell(&self, trace: &str, thousandths: u64, policy: &str) -> Option<&LiveCell> {
        self.cells.iter().find(|cell| cell.case.is(trace, thousandths, policy))
    }

    fn list_traces(&self) -> Vec<(&'static str, TraceOverlap)> {
        PolicyCase::list_traces(self.cells.iter().map(|cell| cell.case))
    }

    /// The goals by trace, with the rates on servers.
    pub fn goals(&self) -> Vec<HitRateGoal> {
        let goal = |(trace, overlap)| {
            let rate = |size, policy: &str| {
                self.cell(trace, size, policy).map_or(0.0, |cell| cell.live.percent())
            };
            HitRateGoal::for_trace((trace, overlap), &self.sizes, &rate)
        };
        self.list_traces().into_iter().map(goal).collect()
    }

    /// The tables, in Markdown: the rate on a server, and in parentheses the rate of the
    /// simulation.
    pub fn table(&self) -> String {
        let both = |live: f64, simulated: f64| format!("{live:.1} ({simulated:.1})");
        let mut text = head();
        for (trace, _) in self.list_traces() {
            for &size in &self.sizes {
                text += &row(trace, size, |policy| match self.cell(trace, size, policy) {
                    Some(cell) => both(cell.live.percent(), cell.simulated.percent()),
                    None => "-".to_owned(),
                });
            }
        }
        for &size in &self.sizes {
            text += &row("mean of all", size, |policy| {
                let mean = |rate: fn(&LiveCell) -> f64| {
                    let traces = self.list_traces().into_iter();
                    let cells = traces.filter_map(|(trace, _)| self.cell(trace, size, policy));
                    let rates: Vec<f64> = cells.map(rate).collect();
                    rates.iter().sum::<f64>() / rates.len().max(1) as f64
                };
                both(mean(|cell| cell.live.percent()), mean(|cell| cell.simulated.percent()))
            });
        }
        text + &HitRateGoal::table(&self.goals())
    }
}
