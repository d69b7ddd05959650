//! The report in a real browser: everything is drawn, nothing is complained about, and it fits on a telephone.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use defuse_probe::{Op, OpStats, Recorder, Snapshot, Stage};
use defuse_study::options::{Config, Scale};
use defuse_study::report;
use defuse_study::results::*;
use defuse_study::rows::{Media, Row};

/// Results of all rows, made up: each figure is another one, so that a mix-up would show.
fn results() -> Results {
    let configs = ["native", "base", "opt"].map(|name| Config::named(name).unwrap()).to_vec();
    let mut cells = Vec::new();
    for row in Row::all() {
        for (place, config) in configs.iter().enumerate() {
            for run in 1..=2 {
                let measured = Some(measured(row.number, place as u64, run));
                let config = config.name.clone();
                cells.push(Cell { row: row.number, config, run, measured, error: None });
            }
        }
    }
    let error = Some("a reason with <angles> & \"quotes\"".to_owned());
    cells.push(Cell { row: 45, config: "opt".into(), run: 3, measured: None, error });
    Results {
        schema: SCHEMA.into(),
        program: "0".into(),
        started_unix_ms: 1_700_000_000_000,
        machine: Machine {
            kernel: "6.18".into(),
            cpu: "<processor>".into(),
            cpus: 2,
            memory_bytes: 1 << 34,
        },
        scale: Scale::Small,
        seed: 1,
        runs: 2,
        rows: Row::all().iter().map(|row| row.number).collect(),
        configs,
        device: DeviceFacts {
            description: "emulated SSD".into(),
            emulated: Some(Media::Ssd),
            limits: None,
            image_on: "ext4".into(),
        },
        memory: "limited by cgroup v2".into(),
        kernel_stages: "measured by BPF".into(),
        interrupted: false,
        cells,
    }
}

fn measured(row: u8, config: u64, run: u32) -> Measured {
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
    let stages = [Stage::Background, Stage::Pending, Stage::Processing, Stage::Total];
    let kernel =
        Snapshot { ops: stages.into_iter().flat_map(kernel_of).collect(), ..snapshot.clone() };
    let flowop = Flowop {
        name: "read".into(),
        kind: "read".into(),
        count: operations,
        bytes: 4096 * operations,
        mean_ns: 12_345.0,
        p50_ns: 11_000,
        p99_ns: 90_000,
        max_ns: 5_000_000,
    };
    Measured {
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
        ..Measured::default()
    }
}

#[test]
fn the_report_is_one_file_with_every_row_and_a_text_for_every_plot() {
    let html = report::html(&results());
    for row in Row::all() {
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

/// Labels of what is no plot.
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
    let of = |results: &Results, row: u8, config: &str, run: u32| {
        let found = |cell: &&Cell| (cell.row, cell.run) == (row, run) && cell.config == config;
        results.cells.iter().find(found).unwrap().measured.clone()
    };
    // Row 1 with base is as fast as native, run by run; row 30 is slower in every run.
    for run in 1..=2 {
        let native = of(&results, 1, "native", run);
        let cell = |cell: &&mut Cell| (cell.row, cell.run) == (1, run) && cell.config == "base";
        results.cells.iter_mut().find(cell).unwrap().measured = native;
    }
    let table = report::table(&results);
    let line = |name: &str| table.lines().find(|line| line.contains(name)).unwrap().to_owned();
    assert!(line("seq-rd-4KB-1th-1f").contains("+0.0%+?~"), "{}", line("seq-rd-4KB-1th-1f"));
    assert!(!line("rnd-wr-32KB-1th-1f").contains('?'), "{}", line("rnd-wr-32KB-1th-1f"));
    assert!(table.contains("2 runs: median"));
    assert!(!table.contains("throughput says nothing"));
    results.scale = Scale::Tiny;
    results.program += NOT_OPTIMISED;
    let table = report::table(&results);
    assert!(table.contains("without optimisation: throughput says nothing"), "{table}");
    results.runs = 1;
    results.cells.retain(|cell| cell.run == 1);
    let single = report::table(&results);
    assert!(!single.contains('?') && !single.contains('~'), "one run cannot tell: {single}");
}

#[test]
fn results_survive_being_written_and_another_schema_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let results = results();
    results.write(dir.path()).unwrap();
    assert_eq!(Results::read(dir.path()).unwrap(), results);
    let other = Results { schema: "defuse-study/999".into(), ..results };
    other.write(dir.path()).unwrap();
    let error = Results::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("defuse-study/999") && error.contains(SCHEMA), "{error}");
}

/// Shows the report in a frame of a telephone's width, and writes down what is to be seen of it. The frame belongs to the
/// page, so that the page may look into it.
const PROBE: &str = r#"
addEventListener("load", () => {
  const page = document.getElementById("report").contentDocument;
  const size = e => { const r = e.getBoundingClientRect(); return [Math.round(r.width), Math.round(r.height)]; };
  const shown = [...page.querySelectorAll("svg")].filter(e => !e.closest("details:not([open])"));
  const flat = shown.filter(e => size(e)[0] < 8 || size(e)[1] < 8);
  const bars = shown.flatMap(e => [...e.querySelectorAll("rect")]);
  const thin = bars.filter(e => e.getBoundingClientRect().height < 1);
  const small = [...page.querySelectorAll("p,span,li,td,dd,summary")]
    .filter(e => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 11);
  const text = getComputedStyle(page.body).color, back = getComputedStyle(page.body).backgroundColor;
  document.getElementById("seen").textContent = JSON.stringify({
    width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth, plots: shown.length,
    flat: flat.length, bars: bars.length, thin: thin.length, small: small.length, sections: page.querySelectorAll("section h2").length,
    wide: [...page.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > page.documentElement.clientWidth + 0.5 && !e.closest(".wide table") && !e.closest("details:not([open])")).slice(0,3).map(e => e.outerHTML.slice(0,150)), text, back
  });
  console.log("looked at");
});
"#;

fn browser() -> Option<&'static str> {
    let there = |name: &&str| {
        Command::new(name)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok()
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(there)
}

fn look(browser: &str, dir: &Path, file: &Path, more: &[&str]) -> (String, String) {
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-sync",
        ])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--enable-logging=stderr",
        ])
        .args(["--virtual-time-budget=20000", "--dump-dom", "--window-size=1000,900"])
        .args(more)
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .env("HOME", dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn a_browser_draws_every_plot_within_360_pixels_without_a_complaint() {
    let Some(browser) = browser() else {
        println!("skipped: there is no chromium");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let html = report::html(&results()).replace('&', "&amp;").replace('"', "&quot;");
    let page = format!(
        "<!doctype html><meta charset=utf-8><link rel=icon href=data:,><iframe id=report width=360 height=800 \
         style=\"border:0\" srcdoc=\"{html}\"></iframe><pre id=seen></pre><script>{PROBE}</script>"
    );
    let file = dir.path().join("page.html");
    fs::write(&file, page).unwrap();
    let mut grounds = Vec::new();
    for dark in [false, true] {
        let scheme = if dark {
            "--blink-settings=preferredColorScheme=0"
        } else {
            "--blink-settings=preferredColorScheme=1"
        };
        let (dom, log) = look(browser, dir.path(), &file, &[scheme]);
        let console: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
        assert!(
            console.iter().any(|line| line.contains("looked at")),
            "the console is not seen:\n{log}"
        );
        assert!(console.iter().all(|line| line.contains("looked at")), "{console:?}");
        let seen = dom.split_once("<pre id=\"seen\">").unwrap().1.split_once("</pre>").unwrap().0;
        let seen: serde_json::Value = serde_json::from_str(&seen.replace("&quot;", "\"")).unwrap();
        let figure = |name: &str| seen[name].as_u64().unwrap();
        assert!(
            figure("width") <= 360 && figure("scroll") <= figure("width"),
            "it scrolls sideways: {seen}"
        );
        assert!(figure("plots") > 45 * 6 && figure("bars") > 2 * figure("plots"), "{seen}");
        assert_eq!((figure("flat"), figure("thin"), figure("small")), (0, 0, 0), "{seen}");
        assert_eq!(figure("sections"), 8);
        let (text, back) = (luminance(&seen["text"]), luminance(&seen["back"]));
        let contrast = (text.max(back) + 0.05) / (text.min(back) + 0.05);
        assert!(contrast >= 7.0, "contrast {contrast}: {seen}");
        grounds.push(back);
    }
    assert!(grounds[0] > 0.8 && grounds[1] < 0.1, "light and dark: {grounds:?}");
}

/// Relative luminance of `rgb(r, g, b)`, as WCAG has it.
fn luminance(color: &serde_json::Value) -> f64 {
    let digits = color.as_str().unwrap().trim_start_matches("rgb(").trim_end_matches(')');
    let channel = |text: &str| {
        let value = text.trim().parse::<f64>().unwrap() / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    let parts: Vec<f64> = digits.split(',').map(channel).collect();
    0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
}
