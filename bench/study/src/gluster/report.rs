//! The results as a self-contained HTML file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use defuse_measure::stats::QuartileSummary;
use defuse_measure::threads::ThreadUse;

use super::cases::{CaseWork, GlusterCase, VolumeKind};
use super::goals::{self, ratio_to_native};
use super::results::{GlusterCell, GlusterResults, is_reader};
use super::table::{rate_of, unit_of};
use super::targets::{ONE, PAPER};
use crate::direct::{goal_rows, ratio};
use crate::report::html::{self, ReportSection, legend, line, wide_table};
use crate::report::plot::{self, BarSegment as BarPart};
use crate::results::write_atomically;

/// The name of the report in the directory of results.
const FILE: &str = "gluster.html";

/// The colours of targets, in the order of [`Results::targets`]. Further ones begin again.
const COLOURS: [&str; 9] = ["e", "f", "g", "a", "b", "c", "d", "h", "i"];

/// The kinds of threads, with their colours.
const KINDS: [(&str, &str); 4] = [
    ("a", "receives requests"),
    ("b", "network (glfs_epoll)"),
    ("c", "translators (glfs_iotwr)"),
    ("e", "others"),
];

/// Writes the report into a directory, and returns its path.
///
/// # Errors
///
/// Fails if the directory cannot be written.
pub fn write(results: &GlusterResults, dir: &Path) -> Result<PathBuf> {
    let path = dir.join(FILE);
    write_atomically(&path, html(results).as_bytes())?;
    Ok(path)
}

/// The complete report.
pub fn html(results: &GlusterResults) -> String {
    let part = |id, title, content| ReportSection { id, title, content };
    let parts = [
        part("goals", "What was promised", goal_rows(&goals::judge_all(results))),
        part("rates", "Throughput by load", rates(results)),
        part("threads", "CPU time by threads", threads(results)),
        part("names", "Small files and lookups", names(results)),
        part("policy", "The policy of the paper", policy(results)),
        part("figures", "All figures", figures(results)),
    ];
    let heading = "GlusterFS: its own client and defuse";
    html::page(heading, heading, &write_facts(results), &parts)
}

fn write_facts(results: &GlusterResults) -> String {
    let build = if results.optimised { "" } else { ", not optimised: its times are meaningless" };
    let mut facts: Vec<(&str, String)> = vec![
        ("Machine", html::machine(&results.machine)),
        ("Kernel", results.machine.kernel.clone()),
        (
            "Programs",
            format!("defuse {}{build}, {}, {}", results.program, results.glusterfs, results.fio),
        ),
        ("Load", format!("{:.1} when it began", results.load)),
        ("Rounds", format!("{}, of {} ms for a case of fio", results.rounds, results.time_ms)),
        (
            "Files",
            format!(
                "{} for each job; {} small ones",
                plot::bytes(results.file_bytes as f64),
                results.files
            ),
        ),
        ("Begun", html::date(results.started_unix_ms / 1000)),
    ];
    facts.extend(results.targets.iter().map(|target| (&*target.name, target.how.clone())));
    facts.extend(results.left_out.iter().map(|left_out| ("Left out", left_out.clone())));
    let mut text = html::fact_list(&facts);
    if results.interrupted {
        text.push_str("<p><strong>It was interrupted; the results are from the complete cases.</strong></p>\n");
    }
    text
}

fn colour(results: &GlusterResults, target: &str) -> &'static str {
    let place = results.targets.iter().position(|known| known.name == target).unwrap_or(0);
    COLOURS[place % COLOURS.len()]
}

fn legend_of(results: &GlusterResults, targets: &[&str]) -> String {
    legend(&targets.iter().map(|target| (colour(results, target), *target)).collect::<Vec<_>>())
}

/// The cases of fio on a volume by their workload.
fn workloads(results: &GlusterResults, place: VolumeKind) -> Vec<Vec<GlusterCase>> {
    let mut groups: Vec<Vec<GlusterCase>> = Vec::new();
    for case in results.cases(place) {
        if matches!(case.work, CaseWork::Names(_)) {
            continue;
        }
        match groups.iter_mut().find(|group| group[0].workload() == case.workload()) {
            Some(group) => group.push(case),
            None => groups.push(vec![case]),
        }
    }
    groups
}

fn volumes(of: impl Fn(VolumeKind) -> String) -> String {
    let mut text = String::new();
    for place in VolumeKind::ALL {
        let content = of(place);
        if !content.is_empty() {
            let _ = write!(text, "<h3>{}: {}</h3>\n{content}", place.name(), place.title());
        }
    }
    if text.is_empty() { "<p>Not measured.</p>\n".to_owned() } else { text }
}

fn rates(results: &GlusterResults) -> String {
    let legend =
        legend_of(results, &results.targets.iter().map(|it| &*it.name).collect::<Vec<_>>());
    legend
        + &volumes(|place| {
            let groups = workloads(results, place);
            if groups.is_empty() {
                return String::new();
            }
            let curves: String = groups
                .iter()
                .map(|cases| curves(results, cases, &results.targets_on(place)))
                .collect();
            format!("<div class=\"plots\">{curves}</div>\n")
        })
}

/// The rate of each target, by jobs and their depth.
fn curves(results: &GlusterResults, cases: &[GlusterCase], targets: &[&str]) -> String {
    let (Some(&first), Some(&last)) = (cases.first(), cases.last()) else { return String::new() };
    let median = |case: GlusterCase, target: &str| {
        results.summary(case, target, GlusterCell::rate).map_or(0.0, |rate| rate.median)
    };
    let measured =
        targets.iter().filter(|target| cases.iter().any(|&case| median(case, target) > 0.0));
    let series: Vec<(&str, (&'static str, Vec<f64>))> = measured
        .map(|target| {
            let values = cases.iter().map(|&case| median(case, target)).collect();
            (*target, (colour(results, target), values))
        })
        .collect();
    let most = series.iter().flat_map(|(_, (_, values))| values).copied().fold(0.0, f64::max);
    let labels: Vec<String> = series
        .iter()
        .map(|(target, _)| {
            let ends = [first, last].map(|case| format_rate(case, median(case, target)));
            format!("{target} {} to {}", ends[0], ends[1])
        })
        .collect();
    let (name, from, to) = (first.workload(), first.load(), last.load());
    let label = format!("{name} from {from} to {to} jobs: {}", labels.join(", "));
    let series: Vec<(&'static str, Vec<f64>)> =
        series.into_iter().map(|(_, values)| values).collect();
    format!(
        "<figure><figcaption>{name}, up to {}</figcaption>{}<div class=\"scale\" aria-hidden=\"true\"><span>{from}</span>\
         <span>{to}</span></div></figure>\n",
        format_rate(first, most),
        plot::curves(&series, most, &label)
    )
}

fn format_rate(case: GlusterCase, rate: f64) -> String {
    format!("{} {}", rate_of(case, rate), unit_of(case))
}

/// CPU time of the client by kinds of threads, in per cent of a processor: receiving, network,
/// translators, others.
fn sum_by_kind(threads: &[ThreadUse], ns: u64) -> [f64; 4] {
    let mut kinds = [0.0; 4];
    for thread in threads {
        let kind = match thread.name.as_str() {
            name if is_reader(name) => 0,
            "glfs_epoll" => 1,
            "glfs_iotwr" => 2,
            _ => 3,
        };
        kinds[kind] += 100.0 * thread.ns as f64 / ns.max(1) as f64;
    }
    kinds
}

/// The medians of each kind; not of one round, but their sum is close to the sum of the median
/// round.
fn kinds(results: &GlusterResults, case: GlusterCase, target: &str) -> Option<[f64; 4]> {
    let is =
        |cell: &&GlusterCell| cell.error.is_none() && cell.case == case && cell.target == target;
    let cells: Vec<[f64; 4]> =
        results.cells.iter().filter(is).map(|cell| sum_by_kind(&cell.threads, cell.ns)).collect();
    let median = |kind: usize| {
        let values: Vec<f64> = cells.iter().map(|kinds| kinds[kind]).collect();
        QuartileSummary::from_values(&values).map(|summary| summary.median)
    };
    Some([median(0)?, median(1)?, median(2)?, median(3)?])
}

fn threads(results: &GlusterResults) -> String {
    let mut text = "<p>The threads of the client under the highest load, in per cent of one processor, as in figures 5.1 to 5.5 of \
                    the paper. The programs within a run do a part of the work by themselves.</p>\n"
        .to_owned();
    text.push_str(&legend(&KINDS));
    text + &volumes(|place| {
        let groups = workloads(results, place);
        groups
            .iter()
            .filter_map(|cases| cases.last())
            .map(|&case| draw_loads(results, case))
            .collect()
    })
}

/// A bar for each target, and its rate.
fn draw_loads(results: &GlusterResults, case: GlusterCase) -> String {
    let mut text = format!("<h4>{}</h4>\n", case.name());
    let targets = results.targets_on(case.place);
    let measured = targets.into_iter().filter_map(|target| {
        Some((
            target,
            kinds(results, case, target)?,
            results.summary(case, target, GlusterCell::rate)?,
        ))
    });
    let measured: Vec<_> = measured.collect();
    let sum = |kinds: &[f64; 4]| kinds.iter().sum::<f64>();
    let most = measured.iter().map(|(_, kinds, _)| sum(kinds)).fold(0.0, f64::max);
    for (target, kinds, rate) in measured {
        let parts = KINDS.iter().zip(kinds).map(|((class, _), value)| BarPart { value, class });
        let parts: Vec<BarPart> = parts.collect();
        let labels: Vec<String> = KINDS
            .iter()
            .zip(kinds)
            .map(|((_, name), value)| format!("{name} {value:.0} %"))
            .collect();
        let value = format!("{:.0} %, {}", sum(&kinds), format_rate(case, rate.median));
        let label = format!(
            "{}, {target}: {}; {}",
            case.name(),
            labels.join(", "),
            format_rate(case, rate.median)
        );
        text.push_str(&line(target, &plot::draw_stacked(&parts, most, &label), &value));
    }
    text
}

fn names(results: &GlusterResults) -> String {
    volumes(|place| {
        let cases = results.cases(place).into_iter();
        cases
            .filter(|case| matches!(case.work, CaseWork::Names(_)))
            .map(|case| draw_bars(results, case))
            .collect()
    })
}

/// A bar with the rate of each target.
fn draw_bars(results: &GlusterResults, case: GlusterCase) -> String {
    let mut text = format!("<h4>{}</h4>\n", case.name());
    let targets = results.targets_on(case.place).into_iter();
    let rates: Vec<_> = targets
        .filter_map(|name| Some((name, results.summary(case, name, GlusterCell::rate)?)))
        .collect();
    let most = rates.iter().map(|(_, rate)| rate.median).fold(0.0, f64::max);
    for (target, rate) in rates {
        let value = format!("{} ±{:.0} %", format_rate(case, rate.median), 100.0 * rate.spread());
        let parts = [BarPart { value: rate.median, class: colour(results, target) }];
        let label = format!("{}, {target}: {value}", case.name());
        text.push_str(&line(target, &plot::draw_stacked(&parts, most, &label), &value));
    }
    text
}

/// The gain of the policy beside the load of the only reader: without a bottleneck there, it cannot
/// gain.
fn policy(results: &GlusterResults) -> String {
    let mut body = String::new();
    for case in VolumeKind::ALL.into_iter().flat_map(|place| results.cases(place)) {
        let Some(gain) = results.ratio(case, PAPER, ONE, GlusterCell::rate) else { continue };
        let reader =
            results.summary(case, ONE, GlusterCell::reader_pct).map_or(0.0, |it| it.median);
        let reason = if reader >= 70.0 { "yes" } else { "no: the reader waits" };
        let _ = writeln!(
            body,
            "<tr><td>{} {}</td><td>{reader:.0} %</td><td>{reason}</td><td>{}</td></tr>",
            case.place.name(),
            case.name(),
            ratio(Some(gain))
        );
    }
    if body.is_empty() {
        return "<p>Not measured: the targets <em>one</em> and <em>paper</em> are needed.</p>\n"
            .to_owned();
    }
    let head = ["", "one worker: load of its reader", "a bottleneck", "paper / one"];
    "<p>The paper adds readers. This gains where the only one is a bottleneck, as on its machines (100 % in figure 5.1).</p>\n"
        .to_owned()
        + &wide_table("Readers and gain", &head, &body)
}

/// All figures in one table, for reference.
fn figures(results: &GlusterResults) -> String {
    let mut body = String::new();
    for case in VolumeKind::ALL.into_iter().flat_map(|place| results.cases(place)) {
        for target in results.targets_on(case.place) {
            let figure = |figure| results.summary(case, target, figure);
            let (Some(rate), Some(cpu), Some(client)) = (
                figure(GlusterCell::rate),
                figure(GlusterCell::cpu_ns),
                figure(GlusterCell::client_pct),
            ) else {
                continue;
            };
            let _ = writeln!(
                body,
                "<tr><td>{} {} {target}</td><td>{:.0}</td><td>{:.0}</td><td>{:.0}</td><td>{:.1}</td><td>{:.0}</td><td>{}</td></tr>",
                case.place.name(),
                case.name(),
                rate.low,
                rate.median,
                rate.high,
                cpu.median / 1e3,
                client.median,
                ratio(ratio_to_native(results, case, target, GlusterCell::rate))
            );
        }
    }
    let head = [
        "",
        "operations a second: lower quartile",
        "median",
        "upper",
        "µs of CPU for each",
        "client: % of a processor",
        "times the best native",
    ];
    wide_table("Every case, over all rounds", &head, &body)
}
