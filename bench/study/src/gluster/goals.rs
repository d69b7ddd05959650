//! The goals, and whether they are met.

use defuse_measure::stats::QuartileSummary;

use super::cases::{CaseWork, FioEngine, GlusterCase, IoPattern, SmallFileOp, VolumeKind};
use super::results::{GlusterCell, GlusterResults};
use super::targets::{ADAPTIVE, ONE, RUN};
use crate::direct::goals::{DirectGoal, GoalLimit, goal};

/// All goals for which there are figures.
pub fn judge_all(results: &GlusterResults) -> Vec<DirectGoal> {
    let mut goals = Vec::new();
    graph(results, &mut goals);
    for place in [VolumeKind::Dist, VolumeKind::Repl] {
        data(results, place, &mut goals);
    }
    names(results, &mut goals);
    goals
}

fn io(place: VolumeKind, pattern: IoPattern, block: u64, jobs: u32) -> GlusterCase {
    GlusterCase {
        place,
        work: CaseWork::Io { pattern, block, engine: FioEngine::Sync },
        jobs,
        depth: 1,
    }
}

/// The client alone, without servers.
fn graph(results: &GlusterResults, goals: &mut Vec<DirectGoal>) {
    for (jobs, least) in [(32, 1.35), (1, 0.95)] {
        let case = io(VolumeKind::Graph, IoPattern::RandRead, 4096, jobs);
        let figure = results.ratio(case, ADAPTIVE, ONE, GlusterCell::rate);
        let what = format!("graph: 4K random read, {jobs} jobs, adaptive against one worker");
        goals.extend(figure.map(|figure| goal(what, "x", GoalLimit::AtLeast(least), figure)));
    }
    let case = io(VolumeKind::Graph, IoPattern::RandRead, 4096, 32);
    let figure = ratio_to_native(results, case, ADAPTIVE, GlusterCell::cpu_ns);
    let what = "graph: 4K random read, 32 jobs, CPU time of a read against the native client";
    goals.extend(figure.map(|figure| goal(what.to_owned(), "x", GoalLimit::AtMost(0.8), figure)));
}

/// Data on a volume with servers.
fn data(results: &GlusterResults, place: VolumeKind, goals: &mut Vec<DirectGoal>) {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    let expected = [
        (IoPattern::RandWrite, 4 * KIB, 1.5, 1.8),
        (IoPattern::RandRead, 4 * KIB, 1.2, 1.5),
        (IoPattern::Write, MIB, 1.0, 1.1),
        (IoPattern::Read, MIB, 1.0, 1.1),
    ];
    let mut add = |case: GlusterCase, target: &str, least| {
        let figure = ratio_to_native(results, case, target, GlusterCell::rate);
        let what = format!("{}: {}, {target} against the native client", place.name(), case.name());
        goals.extend(figure.map(|figure| goal(what, "x", GoalLimit::AtLeast(least), figure)));
    };
    for (pattern, block, mount, run) in expected {
        let case = io(place, pattern, block, 32);
        add(case, ADAPTIVE, mount);
        add(case, RUN, run);
    }
    let work =
        CaseWork::Io { pattern: IoPattern::RandRead, block: 4 * KIB, engine: FioEngine::Libaio };
    add(GlusterCase { place, work, jobs: 16, depth: 32 }, ADAPTIVE, 2.0);
}

/// Names, and small files.
fn names(results: &GlusterResults, goals: &mut Vec<DirectGoal>) {
    let expected = [
        (SmallFileOp::Lookup, 6.0, [VolumeKind::Slow].as_slice()),
        (SmallFileOp::Stat, 20.0, &[VolumeKind::Dist, VolumeKind::Repl]),
        (SmallFileOp::Create, 1.5, &[VolumeKind::Dist, VolumeKind::Repl]),
        (SmallFileOp::Delete, 1.5, &[VolumeKind::Dist, VolumeKind::Repl]),
    ];
    for (op, least, places) in expected {
        for &place in places {
            let case = GlusterCase { place, work: CaseWork::Names(op), jobs: op.jobs(), depth: 1 };
            let figure = ratio_to_native(results, case, ADAPTIVE, GlusterCell::rate);
            let what =
                format!("{}: {}, adaptive against the native client", place.name(), case.name());
            goals.extend(figure.map(|figure| goal(what, "x", GoalLimit::AtLeast(least), figure)));
        }
    }
}

/// A figure relative to the native client with the number of readers that is best for the case.
pub fn ratio_to_native(
    results: &GlusterResults,
    case: GlusterCase,
    target: &str,
    figure: fn(&GlusterCell) -> f64,
) -> Option<QuartileSummary> {
    results.ratio(case, target, results.best_native(case)?, figure)
}
