//! The goals, and whether they are met.

use defuse_measure::stats::QuartileSummary;
use serde::Serialize;

use super::places::{CLIENT, DIRECT, DUMMY, MEMORY, MOUNT, NATIVE};
use super::results::{DirectCase, DirectCell, DirectResults, DirectTable, LowerFileSystem};
use super::worker::WorkerOp;

/// The comparison of a figure with its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GoalOutcome {
    /// The limit is met.
    Met,
    /// The median misses the limit, but a quarter of the rounds meets it.
    WithinNoise,
    /// The limit is missed.
    Missed,
}

impl GoalOutcome {
    /// The outcome as a word, for tables.
    pub fn word(self) -> &'static str {
        match self {
            GoalOutcome::Met => "met",
            GoalOutcome::WithinNoise => "within noise",
            GoalOutcome::Missed => "MISSED",
        }
    }
}

/// A goal and its figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DirectGoal {
    /// The subject of the goal.
    pub what: String,
    /// The limit as text.
    pub required: String,
    /// The figure.
    pub figure: QuartileSummary,
    /// Its unit: `x`, `%`, `ms` or empty for a count.
    pub unit: &'static str,
    /// The outcome.
    pub outcome: GoalOutcome,
}

/// The limit of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum GoalLimit {
    AtLeast(f64),
    AtMost(f64),
    Below(f64),
    None,
}

/// All goals for which there are figures.
pub fn judge_all(results: &DirectResults) -> Vec<DirectGoal> {
    let mut goals = Vec::new();
    let mut add = |what: String, unit, limit, figure: Option<QuartileSummary>| {
        goals.extend(figure.map(|figure| goal(what, unit, limit, figure)));
    };
    let case = |table, op| DirectCase { table, lower: LowerFileSystem::Tmpfs, op, block: 4096 };
    for (op, least) in [(WorkerOp::Write, 12.0), (WorkerOp::Rewrite, 12.0), (WorkerOp::Read, 20.0)]
    {
        let what = format!("4K {}, direct against the mount", call(op));
        let speed = results.speed(case(DirectTable::Sequential, op), DIRECT, MOUNT);
        add(what, "x", GoalLimit::AtLeast(least), speed);
    }
    for op in [WorkerOp::Write, WorkerOp::Rewrite, WorkerOp::Read] {
        let what = format!("4K {}, direct against native tmpfs", call(op));
        let speed = results.speed(case(DirectTable::Sequential, op), DIRECT, NATIVE);
        add(what, "x", GoalLimit::AtLeast(0.9), speed);
    }
    let what = format!("voluntary context switches of {} writes, direct", results.writes);
    add(what, "", GoalLimit::None, most_context_switches(results));
    for (op, least) in [(WorkerOp::Read, 2.0), (WorkerOp::Rewrite, 3.0)] {
        let what = format!("4K {} of memory:, direct against native tmpfs", op.name());
        let speed = results.speed(case(DirectTable::Memory, op), MEMORY, NATIVE);
        add(what, "x", GoalLimit::AtLeast(least), speed);
    }
    for case in results.cases(DirectTable::Share) {
        let what = format!("the client's share of a {} {}", size(case.block), case.op.name());
        add(what, "%", GoalLimit::Below(3.0), share_pct(results, case));
    }
    let what = "additional time of a start within a run".to_owned();
    add(what, "ms", GoalLimit::Below(5.0), results.start_more_ms());
    goals
}

/// Description of a call. A write extends the file, which costs the lower file system more than
/// overwriting.
fn call(op: WorkerOp) -> &'static str {
    if op == WorkerOp::Write { "write of a new file" } else { op.name() }
}

/// Judges a figure.
pub(crate) fn goal(
    what: String,
    unit: &'static str,
    limit: GoalLimit,
    figure: QuartileSummary,
) -> DirectGoal {
    let (required, is_met, may_be) = match limit {
        GoalLimit::AtLeast(least) => {
            (format!("at least {least}"), figure.median >= least, figure.high >= least)
        }
        GoalLimit::AtMost(most) => {
            (format!("at most {most}"), figure.median <= most, figure.low <= most)
        }
        GoalLimit::Below(most) => {
            (format!("below {most}"), figure.median < most, figure.low < most)
        }
        GoalLimit::None => ("none".to_owned(), figure.median == 0.0, figure.low == 0.0),
    };
    let outcome = match (is_met, may_be) {
        (true, _) => GoalOutcome::Met,
        (false, true) => GoalOutcome::WithinNoise,
        (false, false) => GoalOutcome::Missed,
    };
    DirectGoal { what, required, figure, unit, outcome }
}

/// The time of a call on a file system that does nothing, in per cent of a complete call.
pub fn share_pct(results: &DirectResults, case: DirectCase) -> Option<QuartileSummary> {
    let speed = results.speed(case, CLIENT, DUMMY)?;
    let QuartileSummary { median, low, high } = speed;
    Some(QuartileSummary { median: 100.0 * median, low: 100.0 * low, high: 100.0 * high })
}

/// Voluntary context switches of application and parent, for the block size with most of them.
fn most_context_switches(results: &DirectResults) -> Option<QuartileSummary> {
    let switches = |cell: &DirectCell| (cell.app.voluntary + cell.server.voluntary) as f64;
    let cases = results.cases(DirectTable::Writes).into_iter();
    let all = cases.filter_map(|case| results.summary(case, DIRECT, switches));
    all.max_by(|a, b| a.median.total_cmp(&b.median))
}

/// A number of bytes as the name of a block size.
pub fn size(bytes: u64) -> String {
    if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) {
        format!("{}M", bytes >> 20)
    } else {
        format!("{}K", bytes >> 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_judged_by_its_median_and_quartiles() {
        let figure = |low, median, high| QuartileSummary { low, median, high };
        let outcome = |limit, figure| goal(String::new(), "x", limit, figure).outcome;
        assert_eq!(outcome(GoalLimit::AtLeast(3.0), figure(2.0, 3.0, 4.0)), GoalOutcome::Met);
        assert_eq!(
            outcome(GoalLimit::AtLeast(3.0), figure(2.0, 2.9, 3.0)),
            GoalOutcome::WithinNoise
        );
        assert_eq!(outcome(GoalLimit::AtLeast(3.0), figure(2.0, 2.5, 2.9)), GoalOutcome::Missed);
        assert_eq!(outcome(GoalLimit::Below(5.0), figure(1.0, 4.9, 9.0)), GoalOutcome::Met);
        assert_eq!(outcome(GoalLimit::Below(5.0), figure(4.0, 5.0, 6.0)), GoalOutcome::WithinNoise);
        assert_eq!(outcome(GoalLimit::AtMost(0.8), figure(0.7, 0.8, 0.9)), GoalOutcome::Met);
        assert_eq!(outcome(GoalLimit::AtMost(0.8), figure(0.81, 0.9, 0.9)), GoalOutcome::Missed);
        assert_eq!(outcome(GoalLimit::None, figure(0.0, 0.0, 1.0)), GoalOutcome::Met);
        assert_eq!(outcome(GoalLimit::None, figure(1.0, 1.0, 1.0)), GoalOutcome::Missed);
    }

    #[test]
    fn blocks_have_names() {
        assert_eq!([4096, 512 << 10, 1 << 20].map(size), ["4K", "512K", "1M"]);
    }
}
