//! The report of a study: one complete file, drawn by a real browser.

mod browser;

use browser::{ReportMinimum, draws_everything_within_360_pixels};
use defuse_probe::{Op, OpStats, Recorder, RequestStage, StatsSnapshot};
use defuse_study::options::{StudyConfig, StudyScale};
use defuse_study::report;
use defuse_study::results::*;
use defuse_study::rows::{PublishedRow, StorageMedia};

/// Invented results of all rows. All figures differ, so that a mix-up is detected.
fn results() -> StudyResults {
    let configs =
        ["native", "base", "opt"].map(|name| StudyConfig::from_name(name).unwrap()).to_vec();
    let mut cells = Vec::new();
    for row in PublishedRow::list() {
        for (place, config) in configs.iter().enumerate() {
            for run in 1..=2 {
                let measured = Some(make_measurement(row.number, place as u64, run));
                let config = config.name.clone();
                cells.push(StudyCell { row: row.number, config, run, measured, error: None });
            }
        }
    }
    let error = Some("a reason with <angles> & \"quotes\"".to_owned());
    cells.push(StudyCell { row: 45, config: "opt".into(), run: 3, measured: None, error });
    StudyResults {
        schema: SCHEMA.into(),
        program: "0".into(),
        started_unix_ms: 1_700_000_000_000,
        machine: MachineFacts {
            kernel: "6.18".into(),
            cpu: "<processor>".into(),
            cpus: 2,
            memory_bytes: 1 << 34,
        },
        scale: StudyScale::Small,
        seed: 1,
        runs: 2,
        rows: PublishedRow::list().iter().map(|row| row.number).collect(),
        configs,
        device: DeviceFacts {
            description: "emulated SSD".into(),
            emulated: Some(StorageMedia::Ssd),
            limits: None,
            image_on: "ext4".into(),
        },
        memory: "limited by cgroup v2".into(),
        kernel_stages: "measured by BPF".into(),
        interrupted: false,
        cells,
    }
}

fn make_measurement(row: u8, config: u64, run: u32) -> CellMeasurement {
    let operations = 10_000 + u64::from(row);
    let slower = 1.0 + config as f64 * f64::from(row) / 30.0;
    let recorder = Recorder::new();
    let cells = recorder.cells();
    for n in 0..500 {
        cells.record(
            if row.is_multiple_of(2) { Op::READ } else { Op::WRITE },
            2_000 + 997 * n,
            true,
        );
        cells.record(Op::LOOKUP, 900, true);
    }
    let snapshot = recorder.snapshot();
    let kernel_of =
        |stage| snapshot.ops.iter().map(move |stats| OpStats { stage, ..stats.clone() });
    let stages = [
        RequestStage::Background,
        RequestStage::Pending,
        RequestStage::Processing,
        RequestStage::Total,
    ];
    let kernel =
        StatsSnapshot { ops: stages.into_iter().flat_map(kernel_of).collect(), ..snapshot.clone() };
    let flowop = FlowopFigures {
        name: "read".into(),
        kind: "read".into(),
        count: operations,
        bytes: 4096 * operations,
        mean_ns: 12_345.0,
        p50_ns: 11_000,
        p99_ns: 90_000,
        max_ns: 5_000_000,
    };
    CellMeasurement {
        seconds: slower + f64::from(run) / 100.0,
        operations,
        flowops: vec![flowop],
        cpu: CpuUse {
            app_ns: 100_000_000,
            daemon_ns: (config > 0).then_some(60_000_000 * config),
            system_ns: 300_000_000 + 100_000_000 * config,
        },
        daemon: (config > 0).then(|| snapshot.clone()),
        kernel: (config > 0).then_some(kernel),
        ..CellMeasurement::default()
    }
}

#[test]
fn the_report_is_one_file_with_every_row_and_a_text_for_every_plot() {
    let html = report::html(&results());
    for row in PublishedRow::list() {
        assert!(html.contains(&row.name), "{}", row.name);
    }
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside} in the report");
    }
    let plots = html.matches("<svg").count();
    assert!(plots > 45 * 6, "{plots}");
    assert_eq!(
        html.matches("aria-label=\"").count() + html.matches("aria-hidden=\"true\"").count()
            - extra(&html),
        plots
    );
    assert!(html.contains("&lt;angles&gt; &amp; &quot;quotes&quot;") && !html.contains("<angles>"));
}

/// Labels of elements that are not plots.
fn extra(html: &str) -> usize {
    html.matches("<nav aria-label").count()
        + html.matches("role=\"region\" aria-label").count()
        + html.matches("class=\"scale\" aria-hidden").count()
}

#[test]
fn the_table_has_the_classes_and_the_published_counts() {
    let table = report::table(&results());
    for expected in
        ["files-cr-1th", "(-83.3!)", "29 green +, 4 yellow *, 7 orange #, 5 red !", "emulated SSD"]
    {
        assert!(table.contains(expected), "{expected:?} is not in\n{table}");
    }
}

#[test]
fn runs_that_overlap_with_native_ones_are_called_noise() {
    let mut results = results();
    let of = |results: &StudyResults, row: u8, config: &str, run: u32| {
        let found = |cell: &&StudyCell| (cell.row, cell.run) == (row, run) && cell.config == config;
        results.cells.iter().find(found).unwrap().measured.clone()
    };
    // Row 1 with base is as fast as native, run by run; row 30 is slower in every run.
    for run in 1..=2 {
        let native = of(&results, 1, "native", run);
        let cell =
            |cell: &&mut StudyCell| (cell.row, cell.run) == (1, run) && cell.config == "base";
        results.cells.iter_mut().find(cell).unwrap().measured = native;
    }
    let table = report::table(&results);
    let line = |name: &str| table.lines().find(|line| line.contains(name)).unwrap().to_owned();
    assert!(line("seq-rd-4KB-1th-1f").contains("+0.0%+?~"), "{}", line("seq-rd-4KB-1th-1f"));
    assert!(!line("rnd-wr-32KB-1th-1f").contains('?'), "{}", line("rnd-wr-32KB-1th-1f"));
    assert!(table.contains("2 runs: median"));
    assert!(!table.contains("throughput is meaningless"));
    let mut few = results.clone();
    few.cells.retain(|cell| cell.run == 1 || cell.row == 30);
    let text = "2 runs of rows 30, 1 run of others: median";
    assert!(report::table(&few).contains(text), "{}", report::table(&few));
    results.scale = StudyScale::Tiny;
    results.program += NOT_OPTIMISED;
    let table = report::table(&results);
    assert!(table.contains("without optimisation: throughput is meaningless"), "{table}");
    results.runs = 1;
    results.cells.retain(|cell| cell.run == 1);
    let single = report::table(&results);
    assert!(!single.contains('?') && !single.contains('~'), "one run cannot tell: {single}");
}

#[test]
fn results_survive_a_round_trip_and_another_schema_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let results = results();
    results.write(dir.path()).unwrap();
    assert_eq!(StudyResults::read(dir.path()).unwrap(), results);
    let other = StudyResults { schema: "defuse-study/999".into(), ..results };
    other.write(dir.path()).unwrap();
    let error = StudyResults::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("defuse-study/999") && error.contains(SCHEMA), "{error}");
}

#[test]
fn a_browser_draws_every_plot_within_360_pixels_without_errors() {
    let least = ReportMinimum { plots: 45 * 6 + 1, bars: 2 * 45 * 6, sections: 8 };
    draws_everything_within_360_pixels(&report::html(&results()), &least);
}
