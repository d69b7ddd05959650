//! Hit rates on servers beside those of the simulation.

use std::fmt::Write as _;

use defuse_cache::PolicyKind;
use serde::Serialize;

use crate::replay::Replayed;
use crate::results::{Goal, in_percent};
use crate::traces::Overlap;

/// The figures of a trace on a server. Those without `all` in their names are of the uses that count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// Uses that count: those after the first fifth of the trace, in which the cache fills.
    pub uses: u64,
    /// Reads of the device: a page in memory takes none.
    pub reads: u64,
    /// Groups that were to leave, and were hidden at first.
    pub hidden: u64,
    /// Hidden groups that somebody missed.
    pub missed: u64,
    /// Hidden groups that nobody missed, and that left.
    pub evicted: u64,
    /// Uses of the whole trace that readers have made.
    pub all_uses: u64,
    /// Reads of the device for them.
    pub all_reads: u64,
    /// Extents that the trace uses.
    pub extents: u64,
}

impl Figures {
    /// Uses without a read of the device, in percent.
    pub fn percent(&self) -> f64 {
        in_percent(self.uses.saturating_sub(self.reads), self.uses)
    }
}

/// The hit rates of one policy on one trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveCell {
    /// The trace.
    pub trace: &'static str,
    /// If processes use the same files.
    pub overlap: Overlap,
    /// The size of the memory for pages, in thousandths of the bytes of the trace.
    pub thousandths: u64,
    /// The policy.
    pub policy: &'static str,
    /// The hits in the simulation, with as much memory.
    pub simulated: Replayed,
    /// The figures on a server.
    pub live: Figures,
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
        self.cells.iter().find(|cell| {
            (cell.trace, cell.thousandths, cell.policy) == (trace, thousandths, policy)
        })
    }

    fn traces(&self) -> Vec<(&'static str, Overlap)> {
        let mut traces: Vec<_> = self.cells.iter().map(|cell| (cell.trace, cell.overlap)).collect();
        traces.dedup();
        traces
    }

    /// The goals by trace, with the rates on servers.
    pub fn goals(&self) -> Vec<Goal> {
        let goal = |(trace, overlap)| {
            let rate = |size, policy: &str| {
                self.cell(trace, size, policy).map_or(0.0, |cell| cell.live.percent())
            };
            Goal::of((trace, overlap), &self.sizes, &rate)
        };
        self.traces().into_iter().map(goal).collect()
    }

    /// The tables, in Markdown: the rate on a server, and in parentheses that of the simulation.
    pub fn table(&self) -> String {
        let names = PolicyKind::ALL.map(|(name, _)| name);
        let mut text = format!("| trace | cache | {} |\n|---|---|", names.join(" | "));
        text.push_str(&"---|".repeat(names.len()));
        text.push('\n');
        let row = |rates: &dyn Fn(&str) -> String| names.map(rates).join(" | ");
        for (trace, _) in self.traces() {
            for &thousandths in &self.sizes {
                let rates = row(&|policy| {
                    let Some(cell) = self.cell(trace, thousandths, policy) else {
                        return "-".to_owned();
                    };
                    let (live, simulated) = (cell.live.percent(), cell.simulated.percent());
                    format!("{live:.1} ({simulated:.1})")
                });
                let size = thousandths as f64 / 10.0;
                let _ = writeln!(text, "| {trace} | {size} % | {rates} |");
            }
        }
        for &thousandths in &self.sizes {
            let rates = row(&|policy| {
                let here =
                    |cell: &&LiveCell| (cell.thousandths, cell.policy) == (thousandths, policy);
                let mean = |rate: fn(&LiveCell) -> f64| {
                    let rates: Vec<f64> = self.cells.iter().filter(here).map(rate).collect();
                    rates.iter().sum::<f64>() / rates.len().max(1) as f64
                };
                let live = mean(|cell| cell.live.percent());
                format!("{live:.1} ({:.1})", mean(|cell| cell.simulated.percent()))
            });
            let size = thousandths as f64 / 10.0;
            let _ = writeln!(text, "| mean of all | {size} % | {rates} |");
        }
        text + &Goal::table(&self.goals())
    }
}
