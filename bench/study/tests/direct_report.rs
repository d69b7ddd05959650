//! The report and the tables of `defuse bench direct`, from invented figures.

mod browser;

use browser::{ReportMinimum, draws_everything_within_360_pixels};
use defuse_measure::switches::ContextSwitches;
use defuse_study::direct::goals::{self, GoalOutcome};
use defuse_study::direct::results::{
    DirectCase, DirectCell, DirectResults, DirectStudyTarget, DirectTable, LowerFileSystem, SCHEMA,
    StartTimes,
};
use defuse_study::direct::worker::WorkerOp;
use defuse_study::direct::{DirectScale, html, table};
use defuse_study::results::MachineFacts;

/// Results in which a call takes 10 us on the mount, 1 us natively and `direct_ns` with direct, for
/// any size.
fn results(direct_ns: u64) -> DirectResults {
    let names = ["native", "mount", "libfuse", "direct", "served", "memory", "client", "dummy"];
    let target =
        |name: &str| DirectStudyTarget { name: name.into(), how: "a <way> & \"quotes\"".into() };
    let mut results = DirectResults {
        schema: SCHEMA.into(),
        program: "0".into(),
        optimised: true,
        started_unix_ms: 1_700_000_000_000,
        machine: MachineFacts {
            kernel: "6.18".into(),
            cpu: "<processor>".into(),
            cpus: 2,
            memory_bytes: 1 << 34,
        },
        load: 0.5,
        rounds: 3,
        writes: 1000,
        file_bytes: 8 << 20,
        targets: names.map(target).to_vec(),
        left_out: vec!["what was <left out>".into()],
        interrupted: false,
        cells: Vec::new(),
        starts: Vec::new(),
    };
    for round in 1..=3 {
        for (case, target) in cases() {
            let ns = match target {
                "mount" | "libfuse" => 10_000,
                "native" | "client" => 1_000,
                "dummy" => 20,
                _ => direct_ns,
            };
            results.cells.push(cell(case, target, round, ns + u64::from(round)));
        }
        results.starts.push(StartTimes { round, plain_ns: 1_000_000, run_ns: 4_000_000 });
    }
    results
}

fn cases() -> Vec<(DirectCase, &'static str)> {
    let mut cases = Vec::new();
    let mut add = |table, lower, op, blocks: &[u64], targets: &[&'static str]| {
        for &block in blocks {
            cases.extend(
                targets.iter().map(|target| (DirectCase { table, lower, op, block }, *target)),
            );
        }
    };
    let scale = DirectScale::full();
    let all = ["native", "mount", "libfuse", "direct", "served"];
    add(DirectTable::Writes, LowerFileSystem::Tmpfs, WorkerOp::Write, &scale.write_blocks, &all);
    for op in [WorkerOp::Write, WorkerOp::Rewrite, WorkerOp::Read] {
        add(DirectTable::Sequential, LowerFileSystem::Tmpfs, op, &scale.blocks, &all);
        add(
            DirectTable::Sequential,
            LowerFileSystem::Ext4,
            op,
            &scale.blocks,
            &["native", "mount", "direct", "served"],
        );
    }
    for op in [WorkerOp::Rewrite, WorkerOp::Read] {
        add(DirectTable::Memory, LowerFileSystem::Tmpfs, op, &[4096], &["native", "memory"]);
        add(
            DirectTable::Share,
            LowerFileSystem::Tmpfs,
            op,
            &scale.share_blocks,
            &["client", "dummy"],
        );
    }
    cases
}

fn cell(case: DirectCase, target: &str, round: u32, ns: u64) -> DirectCell {
    let voluntary = if ["mount", "libfuse"].contains(&target) { 1000 } else { 0 };
    let switches = ContextSwitches { voluntary, involuntary: 1 };
    DirectCell {
        case,
        target: target.into(),
        round,
        passes: 1,
        calls: 1000,
        bytes: 1000 * case.block,
        ns: 1000 * ns,
        app: switches,
        server: switches,
        requests: (target == "mount").then_some(1000),
    }
}

fn outcome(results: &DirectResults, what: &str) -> GoalOutcome {
    let goals = goals::judge_all(results);
    goals
        .iter()
        .find(|goal| goal.what.contains(what))
        .unwrap_or_else(|| panic!("{what}: {goals:?}"))
        .outcome
}

#[test]
fn goals_are_met_by_fast_and_missed_by_slow_results() {
    let (fast, slow) = (results(300), results(2_000));
    for what in [
        "4K write of a new file, direct against the mount",
        "4K read, direct against native",
        "4K rewrite of memory:",
    ] {
        assert_eq!(outcome(&fast, what), GoalOutcome::Met, "{what}");
        assert_eq!(outcome(&slow, what), GoalOutcome::Missed, "{what}");
    }
    for what in ["voluntary", "the client's share of a 4K read", "a start within a run"] {
        assert_eq!(outcome(&slow, what), GoalOutcome::Met, "{what}");
    }
    let mut waiting = results(300);
    waiting.cells.iter_mut().for_each(|cell| cell.server.voluntary = 1);
    assert_eq!(outcome(&waiting, "voluntary"), GoalOutcome::Missed);
}

#[test]
fn ratios_are_taken_within_rounds() {
    let mut results = results(500);
    // A round in which everything took four times as long does not change ratios.
    results.cells.iter_mut().filter(|cell| cell.round == 2).for_each(|cell| cell.ns *= 4);
    let case = DirectCase {
        table: DirectTable::Memory,
        lower: LowerFileSystem::Tmpfs,
        op: WorkerOp::Read,
        block: 4096,
    };
    let speed = results.speed(case, "memory", "native").unwrap();
    assert!((1.9..2.1).contains(&speed.low) && (1.9..2.1).contains(&speed.high), "{speed:?}");
}

#[test]
fn the_tables_have_every_block_and_every_goal() {
    let results = results(300);
    let text = table(&results);
    for expected in [
        "256K libfuse",
        "sequential rewrite on ext4",
        "direct / libfuse",
        "1000 / 1",
        "what was <left out>",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    for goal in goals::judge_all(&results) {
        assert!(text.contains(&goal.what), "{}", goal.what);
    }
}

#[test]
fn the_report_is_one_file_with_a_text_for_every_plot() {
    let html = html(&results(300));
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside} in the report");
    }
    let plots = html.matches("<svg").count();
    let shown = html.matches("role=\"img\" aria-label=\"").count()
        + html.matches("<svg viewBox=\"0 0 10 10\" aria-hidden").count();
    assert_eq!(shown, plots);
    assert!(html.contains("&lt;way&gt; &amp; &quot;quotes&quot;") && !html.contains("<way>"));
}

#[test]
fn a_browser_draws_every_plot_within_360_pixels_without_errors() {
    let least = ReportMinimum { plots: 6 + 20 + 4 + 16 + 2, bars: 27 * 9 + 2 * 42, sections: 7 };
    draws_everything_within_360_pixels(&html(&results(300)), &least);
}
