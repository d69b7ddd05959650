//! The results as a self-contained HTML file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use defuse_measure::stats::QuartileSummary;

use super::goals::{self, DirectGoal, GoalOutcome, size};
use super::places::{CLIENT, DIRECT, DUMMY, LIBFUSE, MEMORY, MOUNT, NATIVE, SERVED};
use super::results::{DirectCase, DirectCell, DirectResults, DirectTable, LowerFileSystem};
use super::table::{ratio, requests};
use super::worker::WorkerOp;
use crate::report::html::{self, ReportSection, escape, legend, line, wide_table};
use crate::report::plot::{self, BarSegment as BarPart};
use crate::results::write_atomically;

/// The name of the report in the directory of results.
const FILE: &str = "direct.html";

/// The colour of each target.
const COLOURS: &[(&str, &str)] = &[
    (NATIVE, "e"),
    (MOUNT, "d"),
    (LIBFUSE, "b"),
    (DIRECT, "a"),
    (SERVED, "c"),
    (MEMORY, "a"),
    (CLIENT, "c"),
    (DUMMY, "b"),
];

/// Writes the report into a directory, and returns its path.
///
/// # Errors
///
/// Fails if the directory cannot be written.
pub fn write(results: &DirectResults, dir: &Path) -> Result<PathBuf> {
    let path = dir.join(FILE);
    write_atomically(&path, html(results).as_bytes())?;
    Ok(path)
}

/// The complete report.
pub fn html(results: &DirectResults) -> String {
    let part = |id, title, content| ReportSection { id, title, content };
    let parts = [
        part("goals", "What was promised", goal_rows(&goals::judge_all(results))),
        part("writes", "Writes and context switches", write_write_section(results)),
        part("sequential", "Sequential writes and reads", sequential(results)),
        part("memory", "Files in memory", memory(results)),
        part("share", "The client's share of a call", share(results)),
        part("start", "Cost of a start", start(results)),
        part("figures", "All figures", figures(results)),
    ];
    let heading = "The benefit of leaving out the kernel";
    html::page(heading, heading, &write_facts(results), &parts)
}

fn write_facts(results: &DirectResults) -> String {
    let build = if results.optimised { "" } else { ", not optimised: its times are meaningless" };
    let mut facts: Vec<(&str, String)> = vec![
        ("Machine", html::machine(&results.machine)),
        ("Kernel", results.machine.kernel.clone()),
        ("Program", format!("defuse {}{build}", results.program)),
        ("Load", format!("{:.1} when it began", results.load)),
        ("Rounds", results.rounds.to_string()),
        ("Begun", html::date(results.started_unix_ms / 1000)),
    ];
    facts.extend(results.targets.iter().map(|target| (&*target.name, target.how.clone())));
    facts.extend(results.left_out.iter().map(|left_out| ("Left out", left_out.clone())));
    let mut text = html::fact_list(&facts);
    if results.interrupted {
        text.push_str("<p><strong>It was interrupted; the results are from the complete rounds.</strong></p>\n");
    }
    text
}

fn colour(target: &str) -> &'static str {
    COLOURS.iter().find(|(name, _)| *name == target).map_or("e", |(_, class)| class)
}

fn legend_of(targets: &[&str]) -> String {
    legend(&targets.iter().map(|target| (colour(target), *target)).collect::<Vec<_>>())
}

/// A table of goals.
pub(crate) fn goal_rows(goals: &[DirectGoal]) -> String {
    let mut body = String::new();
    for goal in goals {
        let class = match goal.outcome {
            GoalOutcome::Met => "green",
            GoalOutcome::WithinNoise => "yellow",
            GoalOutcome::Missed => "red",
        };
        let _ = writeln!(
            body,
            "<tr><td>{}</td><td>{} {}</td><td>{} {}</td><td class=\"{class}\">{}</td></tr>",
            escape(&goal.what),
            ratio(Some(goal.figure)),
            goal.unit,
            escape(&goal.required),
            goal.unit,
            goal.outcome.word()
        );
    }
    let head = ["", "measured", "required", ""];
    "<p>Medians over the rounds; after <em>~</em> half the interquartile range. Ratios are taken within a round.</p>\n"
        .to_owned()
        + &wide_table("Goals", &head, &body)
}

/// The targets of a case, with the median of a figure.
fn medians(
    results: &DirectResults,
    case: DirectCase,
    figure: fn(&DirectCell) -> f64,
) -> Vec<(&str, QuartileSummary)> {
    let targets = results.targets_of(case).into_iter();
    targets.filter_map(|name| Some((name, results.summary(case, name, figure)?))).collect()
}

/// A bar for each target, all to one scale.
fn draw_bars(rows: &[(&str, QuartileSummary)], what: &str, unit: impl Fn(f64) -> String) -> String {
    let most = rows.iter().map(|(_, summary)| summary.median).fold(0.0, f64::max);
    let mut text = String::new();
    for (target, summary) in rows {
        let value = format!("{} ±{:.0} %", unit(summary.median), 100.0 * summary.spread());
        let parts = [BarPart { value: summary.median, class: colour(target) }];
        let label = format!("{what}, {target}: {value}");
        text.push_str(&line(target, &plot::draw_stacked(&parts, most, &label), &value));
    }
    text
}

fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s / 1e6 {
        mb if mb < 1e4 => format!("{mb:.0} MB/s"),
        mb => format!("{:.1} GB/s", mb / 1e3),
    }
}

fn write_write_section(results: &DirectResults) -> String {
    let mut text = format!(
        "<p>{} writes of a new file on tmpfs: bandwidth, and how often threads of the application and of whoever serves it \
         (the daemon of a mount, the parent of a run) left their processor.</p>\n",
        results.writes
    );
    let mut body = String::new();
    for case in results.cases(DirectTable::Writes) {
        let block = size(case.block);
        let _ = writeln!(text, "<h3>{block}</h3>");
        text.push_str(&draw_bars(
            &medians(results, case, DirectCell::bytes_per_s),
            &format!("{block} writes"),
            rate,
        ));
        for target in results.targets_of(case) {
            let middle = |figure| {
                let summary = results.summary(case, target, figure);
                summary.map_or("-".to_owned(), |summary| plot::count(summary.median.round()))
            };
            let _ = writeln!(
                body,
                "<tr><td>{block} {target}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                middle(|cell| cell.app.voluntary as f64),
                middle(|cell| cell.app.involuntary as f64),
                middle(|cell| cell.server.voluntary as f64),
                middle(|cell| cell.server.involuntary as f64),
                requests(results, case, target).map_or("-".into(), plot::count)
            );
        }
    }
    let head = ["", "voluntary", "involuntary", "server: voluntary", "involuntary", "requests"];
    text + &wide_table("Context switches, and requests to the daemon", &head, &body)
}

fn sequential(results: &DirectResults) -> String {
    let cases = results.cases(DirectTable::Sequential);
    let file = plot::bytes(results.file_bytes as f64);
    let mut text = format!(
        "<p>A file of {file}, from its beginning to its end, by the size of the calls: the fastest of a round's passes.</p>\n"
    );
    for lower in [LowerFileSystem::Tmpfs, LowerFileSystem::Ext4] {
        let of_lower = || cases.iter().filter(move |case| case.lower == lower);
        let Some(first) = of_lower().next() else { continue };
        let targets = results.targets_of(*first);
        let _ = writeln!(
            text,
            "<h3>{}</h3>\n{}<div class=\"plots\">",
            lower.name(),
            legend_of(&targets)
        );
        for op in [WorkerOp::Write, WorkerOp::Rewrite, WorkerOp::Read] {
            let cases: Vec<DirectCase> = of_lower().filter(|case| case.op == op).copied().collect();
            text.push_str(&curves(results, &cases, &targets));
        }
        text.push_str("</div>\n");
    }
    text
}

/// The bandwidth of each target by block size.
fn curves(results: &DirectResults, cases: &[DirectCase], targets: &[&str]) -> String {
    let (Some(first), Some(last)) = (cases.first(), cases.last()) else { return String::new() };
    let of = |target: &str| -> Vec<f64> {
        let rates =
            cases.iter().map(|case| results.summary(*case, target, DirectCell::bytes_per_s));
        rates.map(|rate| rate.map_or(0.0, |rate| rate.median)).collect()
    };
    let series: Vec<(&'static str, Vec<f64>)> =
        targets.iter().map(|target| (colour(target), of(target))).collect();
    let most = series.iter().flat_map(|(_, values)| values).copied().fold(0.0, f64::max);
    let labels: Vec<String> = targets
        .iter()
        .zip(&series)
        .map(|(target, (_, values))| {
            let ends =
                [values.first(), values.last()].map(|rate_of| rate(*rate_of.unwrap_or(&0.0)));
            format!("{target} {} to {}", ends[0], ends[1])
        })
        .collect();
    let name = format!("{} on {}", first.op.name(), first.lower.name());
    let (from, to) = (size(first.block), size(last.block));
    let label = format!("{name} from {from} to {to}: {}", labels.join(", "));
    format!(
        "<figure><figcaption>{name}, up to {}</figcaption>{}<div class=\"scale\" aria-hidden=\"true\"><span>{from}</span>\
         <span>{to}</span></div></figure>\n",
        rate(most),
        plot::curves(&series, most, &label)
    )
}

fn memory(results: &DirectResults) -> String {
    let mut text =
        "<p>4K calls: <em>memory:</em> in the program itself, beside native tmpfs.</p>\n"
            .to_owned();
    for case in results.cases(DirectTable::Memory) {
        let faster = ratio(results.speed(case, MEMORY, NATIVE));
        let name = case.op.name();
        let _ =
            writeln!(text, "<h3>{name} <span class=\"soft\">{faster} times as fast</span></h3>");
        text.push_str(&draw_bars(
            &medians(results, case, DirectCell::ns_per_call),
            name,
            plot::time,
        ));
    }
    text
}

fn share(results: &DirectResults) -> String {
    let mut text = "<p>A call that returns as soon as it reaches the file system, beside a complete one on passthrough over \
                    tmpfs.</p>\n"
        .to_owned();
    for case in results.cases(DirectTable::Share) {
        let name = format!("{} {}", size(case.block), case.op.name());
        let share = ratio(goals::share_pct(results, case));
        let _ = writeln!(text, "<h3>{name} <span class=\"soft\">{share} %</span></h3>");
        text.push_str(&draw_bars(
            &medians(results, case, DirectCell::ns_per_call),
            &name,
            plot::time,
        ));
    }
    text
}

fn start(results: &DirectResults) -> String {
    let times = |of: fn(&super::results::StartTimes) -> u64| {
        QuartileSummary::from_values(
            &results.starts.iter().map(|start| of(start) as f64).collect::<Vec<_>>(),
        )
    };
    let rows: Vec<(&str, QuartileSummary)> =
        [("plain", times(|start| start.plain_ns)), ("defuse run", times(|start| start.run_ns))]
            .into_iter()
            .filter_map(|(name, summary)| Some((name, summary?)))
            .collect();
    let more = ratio(results.start_more_ms());
    format!("<p><code>true</code>, from its start to its end: {more} ms more within a run.</p>\n")
        + &draw_bars(&rows, "true", plot::time)
}

/// All figures in one table, for reference.
fn figures(results: &DirectResults) -> String {
    let mut body = String::new();
    let tables =
        [DirectTable::Writes, DirectTable::Sequential, DirectTable::Memory, DirectTable::Share];
    for case in tables.into_iter().flat_map(|table| results.cases(table)) {
        for target in results.targets_of(case) {
            let figure = |figure| results.summary(case, target, figure);
            let (Some(rate), Some(ns)) =
                (figure(DirectCell::bytes_per_s), figure(DirectCell::ns_per_call))
            else {
                continue;
            };
            let _ = writeln!(
                body,
                "<tr><td>{} {} {}</td><td>{target}</td><td>{:.1}</td><td>{:.1}</td><td>{:.1}</td><td>{:.0}</td><td>{}</td></tr>",
                case.lower.name(),
                size(case.block),
                case.op.name(),
                rate.low / 1e6,
                rate.median / 1e6,
                rate.high / 1e6,
                ns.median,
                ratio(results.speed(case, target, NATIVE))
            );
        }
    }
    let head = ["", "", "MB/s: lower quartile", "median", "upper", "ns a call", "times native"];
    wide_table("Every case, over all rounds", &head, &body)
}
