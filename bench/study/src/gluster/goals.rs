//! The goals, and whether they are met.

use defuse_measure::stats::Summary;

use super::cases::{Case, Engine, Names, Pattern, Place, Work};
use super::results::{Cell, Results};
use super::targets::{ADAPTIVE, ONE, RUN};
use crate::direct::goals::{Goal, Limit, goal};

/// All goals for which there are figures.
pub fn all(results: &Results) -> Vec<Goal> {
    let mut goals = Vec::new();
    graph(results, &mut goals);
    for place in [Place::Dist, Place::Repl] {
        data(results, place, &mut goals);
    }
    names(results, &mut goals);
    goals
}

fn io(place: Place, pattern: Pattern, block: u64, jobs: u32) -> Case {
    Case { place, work: Work::Io { pattern, block, engine: Engine::Sync }, jobs, depth: 1 }
}

/// The client alone, without servers.
fn graph(results: &Results, goals: &mut Vec<Goal>) {
    for (jobs, least) in [(32, 1.35), (1, 0.95)] {
        let case = io(Place::Graph, Pattern::RandRead, 4096, jobs);
        let figure = results.ratio(case, ADAPTIVE, ONE, Cell::rate);
        let what = format!("graph: 4K random read, {jobs} jobs, adaptive against one worker");
        goals.extend(figure.map(|figure| goal(what, "x", Limit::AtLeast(least), figure)));
    }
    let case = io(Place::Graph, Pattern::RandRead, 4096, 32);
    let figure = against_native(results, case, ADAPTIVE, Cell::cpu_ns);
    let what = "graph: 4K random read, 32 jobs, CPU time of a read against the native client";
    goals.extend(figure.map(|figure| goal(what.to_owned(), "x", Limit::AtMost(0.8), figure)));
}

/// Data on a volume with servers.
fn data(results: &Results, place: Place, goals: &mut Vec<Goal>) {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    let expected = [
        (Pattern::RandWrite, 4 * KIB, 1.5, 1.8),
        (Pattern::RandRead, 4 * KIB, 1.2, 1.5),
        (Pattern::Write, MIB, 1.0, 1.1),
        (Pattern::Read, MIB, 1.0, 1.1),
    ];
    let mut add = |case: Case, target: &str, least| {
        let figure = against_native(results, case, target, Cell::rate);
        let what = format!("{}: {}, {target} against the native client", place.name(), case.name());
        goals.extend(figure.map(|figure| goal(what, "x", Limit::AtLeast(least), figure)));
    };
    for (pattern, block, mount, run) in expected {
        let case = io(place, pattern, block, 32);
        add(case, ADAPTIVE, mount);
        add(case, RUN, run);
    }
    let work = Work::Io { pattern: Pattern::RandRead, block: 4 * KIB, engine: Engine::Libaio };
    add(Case { place, work, jobs: 16, depth: 32 }, ADAPTIVE, 2.0);
}

/// Names, and small files.
fn names(results: &Results, goals: &mut Vec<Goal>) {
    let expected = [
        (Names::Lookup, 6.0, [Place::Slow].as_slice()),
        (Names::Stat, 20.0, &[Place::Dist, Place::Repl]),
        (Names::Create, 1.5, &[Place::Dist, Place::Repl]),
        (Names::Delete, 1.5, &[Place::Dist, Place::Repl]),
    ];
    for (op, least, places) in expected {
        for &place in places {
            let case = Case { place, work: Work::Names(op), jobs: op.jobs(), depth: 1 };
            let figure = against_native(results, case, ADAPTIVE, Cell::rate);
            let what =
                format!("{}: {}, adaptive against the native client", place.name(), case.name());
            goals.extend(figure.map(|figure| goal(what, "x", Limit::AtLeast(least), figure)));
        }
    }
}

/// A figure relative to the native client with the number of readers that is best for the case.
pub fn against_native(
    results: &Results,
    case: Case,
    target: &str,
    figure: fn(&Cell) -> f64,
) -> Option<Summary> {
    results.ratio(case, target, results.best_native(case)?, figure)
}
