//! The report, the tables and the goals of `defuse bench gluster`, from invented figures.

mod browser;

use browser::{ReportMinimum, draws_everything_within_360_pixels};
use defuse_measure::threads::ThreadUse;
use defuse_study::direct::goals::GoalOutcome;
use defuse_study::gluster::cases::{CaseSelection, GlusterCase, VolumeKind};
use defuse_study::gluster::results::{GlusterCell, GlusterResults, SCHEMA};
use defuse_study::gluster::targets::{ALL, GlusterTargetSpec};
use defuse_study::gluster::{goals, html, table};
use defuse_study::results::MachineFacts;

fn choice() -> CaseSelection {
    let numbers = vec![1, 16, 32];
    CaseSelection {
        places: VolumeKind::ALL.to_vec(),
        jobs: numbers.clone(),
        depths: numbers,
        only: Vec::new(),
    }
}

/// Results in which the native clients make 1000 operations a second, more with more readers,
/// `ours` all mounts of ours, and twice as many a run.
fn results(ours: u64) -> GlusterResults {
    let mut results = GlusterResults {
        schema: SCHEMA.into(),
        program: "0".into(),
        optimised: true,
        glusterfs: "glusterfs <10>".into(),
        fio: "fio-3".into(),
        started_unix_ms: 1_700_000_000_000,
        machine: MachineFacts {
            kernel: "6.18".into(),
            cpu: "<processor>".into(),
            cpus: 2,
            memory_bytes: 1 << 34,
        },
        load: 0.5,
        rounds: 3,
        time_ms: 1000,
        file_bytes: 1 << 24,
        files: 2000,
        targets: ALL
            .iter()
            .map(|name| GlusterTargetSpec::from_name(name).unwrap().target())
            .collect(),
        left_out: vec!["what was <left out>".into()],
        interrupted: false,
        cells: Vec::new(),
    };
    for round in 1..=3 {
        for case in VolumeKind::ALL.into_iter().flat_map(|place| choice().cases(place)) {
            for target in ALL {
                let rate = match target {
                    "native-1" => 1000,
                    "native-2" => 1010,
                    "native-4" => 1020,
                    "one" => ours / 2,
                    "run" => 2 * ours,
                    _ => ours,
                };
                results.cells.push(cell(case, target, round, rate));
            }
        }
    }
    results
}

fn cell(case: GlusterCase, target: &str, round: u32, rate: u64) -> GlusterCell {
    let reader = if target.starts_with("native") { "glfs_fuseproc" } else { "defuse-worker" };
    let thread = |name: &str, ns| ThreadUse { name: name.into(), count: 1, ns, busiest_ns: ns };
    GlusterCell {
        case,
        target: target.into(),
        round,
        error: None,
        operations: rate + u64::from(round),
        bytes: 4096 * rate,
        ns: 1_000_000_000,
        app_ns: 100_000_000,
        client_ns: 900_000_000,
        threads: vec![
            thread(reader, 800_000_000),
            thread("glfs_epoll", 50_000_000),
            thread("glfs_iotwr", 40_000_000),
            thread("glfs_timer", 10_000_000),
        ],
        servers_ns: 500_000_000,
        latency: None,
    }
}

fn outcome(results: &GlusterResults, what: &str) -> GoalOutcome {
    let goals = goals::judge_all(results);
    let found = goals.iter().find(|goal| goal.what.starts_with(what));
    found.unwrap_or_else(|| panic!("{what}: {goals:#?}")).outcome
}

#[test]
fn goals_compare_with_the_best_native_client_and_with_one_worker() {
    let (fast, slow) = (results(1_600), results(700));
    for what in [
        "dist: randwrite-4k-sync-32, adaptive",
        "repl: randread-4k-sync-32, run",
        "graph: 4K random read, 32 jobs, CPU",
        "dist: create-16",
    ] {
        assert_eq!(outcome(&fast, what), GoalOutcome::Met, "{what}");
        assert_eq!(outcome(&slow, what), GoalOutcome::Missed, "{what}");
    }
    // Twice one worker.
    assert_eq!(outcome(&slow, "graph: 4K random read, 32 jobs, adaptive"), GoalOutcome::Met);
    // Better than one native client, not than the best.
    assert_eq!(
        outcome(&results(1_510), "dist: randwrite-4k-sync-32, adaptive"),
        GoalOutcome::Missed
    );
    assert_eq!(outcome(&results(1_540), "dist: randwrite-4k-sync-32, adaptive"), GoalOutcome::Met);
    assert_eq!(outcome(&fast, "slow: lookup-16"), GoalOutcome::Missed);
    assert_eq!(outcome(&results(6_500), "slow: lookup-16"), GoalOutcome::Met);
}

#[test]
fn a_failed_cell_is_no_figure() {
    let mut results = results(1_600);
    let failed = results.cells.iter_mut().find(|cell| cell.target == "adaptive").unwrap();
    failed.error = Some("it did not <start>".into());
    let (case, round) = (failed.case, failed.round);
    assert_eq!(
        results.figures_by_round(case, "adaptive", GlusterCell::rate)[round as usize - 1],
        None
    );
    assert!(table(&results).contains("adaptive round 1 failed: it did not <start>"));
}

#[test]
fn the_tables_have_every_case_and_every_goal() {
    let results = results(1_600);
    let text = table(&results);
    for case in VolumeKind::ALL.into_iter().flat_map(|place| choice().cases(place)) {
        assert!(text.contains(&case.name()), "{}", case.name());
    }
    for expected in ["what was <left out>", "1.57x", "3.13x", "80%"] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    for goal in goals::judge_all(&results) {
        assert!(text.contains(&goal.what), "{}", goal.what);
    }
}

#[test]
fn the_report_is_one_file_with_a_text_for_every_plot() {
    let html = html(&results(1_600));
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside} in the report");
    }
    let shown = html.matches("role=\"img\" aria-label=\"").count()
        + html.matches("<svg viewBox=\"0 0 10 10\" aria-hidden").count();
    assert_eq!(shown, html.matches("<svg").count());
    assert!(html.contains("&lt;left out&gt;") && !html.contains("<left out>"));
}

#[test]
fn a_browser_draws_every_plot_within_360_pixels_without_errors() {
    // Ten workloads on three volumes, and nine names; the legends.
    let least = ReportMinimum {
        plots: 30 + 30 * 9 + 9 * 9 + 9 + 4,
        bars: 30 * 9 * 3 + 30 * 9 * 4,
        sections: 6,
    };
    draws_everything_within_360_pixels(&html(&results(1_600)), &least);
}
