//! Small traces, all policies.

use std::collections::{HashMap, HashSet};

use defuse_bench_cache::{SIZES, TraceOverlap, TraceStep, make_all, replay, run};
use defuse_cache::PolicyKind;

#[test]
fn all_policies_are_replayed_and_the_same_seed_gives_the_same_tables() {
    let results = run(2000, 3, &mut |_| ());
    assert_eq!(results.cells.len(), make_all(1000, 3).len() * SIZES.len() * PolicyKind::ALL.len());
    assert_eq!(results, run(2000, 3, &mut |_| ()));
    assert_ne!(results.cells, run(2000, 4, &mut |_| ()).cells);
    let rates = |policy| {
        let here = results.cells.iter().filter(move |cell| cell.case.policy == policy);
        here.map(|cell| cell.replayed.percent()).sum::<f64>()
    };
    let sums: Vec<f64> = PolicyKind::ALL.iter().map(|(name, _)| rates(*name)).collect();
    let count = results.cells.len() as f64 / sums.len() as f64;
    assert!(sums.iter().all(|sum| *sum > 0.0 && sum / count < 100.0), "{sums:?}");
    let table = results.table();
    assert!(table.starts_with("| trace | cache | lru | lfu | arc | s3-fifo | plain-e | e |"));
    assert_eq!(table.lines().filter(|line| line.contains("8 processes, varmail")).count(), 6);
    let json = serde_json::to_string(&results).unwrap();
    assert!(json.contains("\"thousandths\":250"), "{json}");
}

/// The traces are those that their names state.
#[test]
fn processes_share_files_in_traces_with_overlap_and_nowhere_else() {
    for trace in make_all(20_000, 3) {
        let mut users: HashMap<_, HashSet<u32>> = HashMap::new();
        for step in &trace.steps {
            if let TraceStep::Use(extent) = step {
                users.entry(extent.key).or_default().insert(extent.user);
            }
        }
        let is_shared = users.values().any(|users| users.len() > 1);
        assert_eq!(is_shared, trace.overlap == TraceOverlap::Shared, "{}", trace.name);
        assert!(trace.bytes > 0 && trace.steps.len() >= 20_000, "{}", trace.name);
    }
}

/// The goal, on traces long enough for E to learn from.
#[test]
fn e_is_not_below_the_best_where_nothing_is_shared() {
    let names = ["one process, Zipf 1.0", "one process, a loop", "8 processes, nothing in common"];
    for trace in make_all(60_000, 3).iter().filter(|trace| names.contains(&trace.name)) {
        let rate = |kind| replay(trace, kind, trace.bytes / 10, 3).percent();
        let others =
            [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Arc, PolicyKind::S3Fifo].map(rate);
        let best = others.into_iter().fold(0.0, f64::max);
        assert!(
            rate(PolicyKind::E) >= best * 0.98,
            "{}: {} {others:?}",
            trace.name,
            rate(PolicyKind::E)
        );
    }
}
