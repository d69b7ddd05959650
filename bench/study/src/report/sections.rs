//! The sections of the report.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use defuse_probe::{LatencyHistogram, RequestStage};

use super::analysis::{self, NATIVE, RowFigure};
use super::html::{self, escape, legend, line, wide_table};
use super::plot::{self, BarSegment};
use super::{table, verdict};
use crate::results::{CellMeasurement, StudyResults};
use crate::rows::{ChangeClass, PublishedRow, StackfsConfig};

/// The machine and the method.
pub fn write_facts(results: &StudyResults) -> String {
    let machine = &results.machine;
    let facts = [
        ("Machine", html::machine(machine)),
        ("Kernel", machine.kernel.clone()),
        ("Program", format!("defuse {}", results.program)),
        (
            "Device",
            format!(
                "{}; its image lies on {}",
                results.device.description, results.device.image_on
            ),
        ),
        ("Memory", results.memory.clone()),
        ("Kernel queues", results.kernel_stages.clone()),
        (
            "Scale",
            format!(
                "{}, {}, seed {}",
                results.scale.name(),
                analysis::describe_runs(results),
                results.seed
            ),
        ),
        ("Begun", html::date(results.started_unix_ms / 1000)),
    ];
    let mut facts: Vec<(&str, String)> = facts.into();
    for config in &results.configs {
        let how = serde_json::to_value(&config.kind).ok().and_then(|kind| {
            let words = kind.get("how")?.as_array()?.iter().filter_map(|word| word.as_str());
            Some(words.collect::<Vec<_>>().join(" "))
        });
        let how = how.filter(|how| !how.is_empty());
        let how = how.unwrap_or_else(|| {
            if config.name == NATIVE { "ext4 itself" } else { "as it is mounted by default" }.into()
        });
        facts.push((&config.name, how));
    }
    let mut text = html::fact_list(&facts);
    if let Some(caution) = analysis::list_doubts(results) {
        let _ = writeln!(text, "<p><strong>{}</strong></p>", escape(&caution));
    }
    if results.interrupted {
        text.push_str("<p><strong>The study was interrupted; what follows is what was measured.</strong></p>\n");
    }
    text
}

/// The verdicts, one item per family.
pub fn verdicts(results: &StudyResults) -> String {
    let mut text = "<ul class=\"verdicts\">\n".to_owned();
    for verdict in verdict::judge_all(results) {
        let name = verdict.family.name();
        let _ =
            writeln!(text, "<li><strong>{}</strong>: {}</li>", escape(name), escape(&verdict.text));
    }
    text + "</ul>\n"
}

/// Number of rows in each class, beside the published numbers for the same rows.
pub fn classes(results: &StudyResults) -> String {
    let media = table::media(results);
    let mut text = legend(&[
        ("green", "+ above -5 %"),
        ("yellow", "* -5 to -25 %"),
        ("orange", "# -25 to -50 %"),
        ("red", "! below -50 %"),
    ]);
    for config in analysis::compared_configs(results) {
        let ours: Vec<_> = analysis::changes(results, config).collect();
        text.push_str(&class_line(
            config,
            analysis::class_counts(ours.iter().map(|(_, change)| *change)),
        ));
        if let Some(stackfs) = StackfsConfig::from_name(config) {
            let published = ours.iter().filter_map(|(row, _)| {
                Some(PublishedRow::get(*row)?.published_results(media).change_pct(stackfs))
            });
            text.push_str(&class_line("published", analysis::class_counts(published)));
        }
    }
    text
}

fn class_line(name: &str, counts: [usize; 4]) -> String {
    let parts: Vec<BarSegment> = ChangeClass::ALL
        .iter()
        .zip(counts)
        .map(|(class, count)| BarSegment { value: count as f64, class: class.name() })
        .collect();
    let labels: Vec<String> = ChangeClass::ALL
        .iter()
        .zip(counts)
        .map(|(class, count)| format!("{count}{}", class.mark()))
        .collect();
    let label = format!("{name}: {}", labels.join(", "));
    let most = counts.iter().sum::<usize>() as f64;
    line(name, &plot::draw_stacked(&parts, most, &label), &labels.join(" "))
}

/// The rows with their changes, and the published changes.
pub fn throughput(results: &StudyResults) -> String {
    let media = table::media(results);
    let mut text = format!(
        "<p>The bar is the change against native, from -100 % on the left to +25 % on the right; the black or white tick is \
         the published change ({}).</p>\n",
        media.name().to_uppercase()
    );
    if results.runs > 1 {
        let _ = writeln!(
            text,
            "<p>Medians ({}); ±: half the distance of the best and the worst run. <em>(noise)</em>: runs here and \
             natively overlap, so the difference is not to be believed.</p>",
            analysis::describe_runs(results)
        );
    }
    for row in analysis::rows(results) {
        let native = RowFigure::find(results, row.number, NATIVE);
        let native = native.map_or("native was not measured".into(), |figure| {
            format!("native {} ops/s{}", plot::count(figure.ops_per_s), spread(&figure))
        });
        let _ = writeln!(
            text,
            "<h3>{} {} <span class=\"soft\">{native}</span></h3>",
            row.number,
            escape(&row.name)
        );
        for config in analysis::compared_configs(results) {
            text.push_str(&throughput_line(results, row, config));
        }
    }
    text
}

fn throughput_line(results: &StudyResults, row: &PublishedRow, config: &str) -> String {
    let Some(figure) = RowFigure::find(results, row.number, config) else {
        return line(config, "<span class=\"soft\">not measured</span>", "-");
    };
    let (Some(change), Some(class)) = (figure.change_pct, figure.class()) else {
        return line(config, "<span></span>", &format!("{} ops/s", plot::count(figure.ops_per_s)));
    };
    let published = StackfsConfig::from_name(config)
        .map(|stackfs| row.published_results(table::media(results)).change_pct(stackfs));
    let beside = published.map_or(String::new(), |published| format!(" ({published:+.0} %)"));
    let noise = if figure.noise { " (noise)" } else { "" };
    let value = format!("{} {change:+.0} %{}{noise}{beside}", class.mark(), spread(&figure));
    let labels =
        published.map_or(String::new(), |published| format!(", published {published:+.1} %"));
    let label = format!("{} {config}: {change:+.1} %, {}{labels}", row.name, class.name());
    line(config, &plot::change(change, class.name(), published, &label), &value)
}

fn spread(figure: &RowFigure) -> String {
    figure.spread_pct.map_or_else(String::new, |spread| format!(" ±{spread:.0} %"))
}

/// Requests per operation by type, beside the published ones.
pub fn requests(results: &StudyResults) -> String {
    let mut text = "<p>Requests for 1000 flow operations. Numbers in parentheses: the published runs on Linux 4.1, for as many \
                    operations. <em>bg</em>: share of those that went through the background queue.</p>\n"
        .to_owned();
    for row in analysis::rows(results) {
        let of_config = |config: &str, measured: &_| requests_of(results, row, config, measured);
        text.push_str(&foldable(results, row, String::new(), of_config));
    }
    text
}

/// The details of a row, which can be unfolded: `content`, and then each configuration.
fn foldable(
    results: &StudyResults,
    row: &PublishedRow,
    mut content: String,
    of_config: impl Fn(&str, &CellMeasurement) -> String,
) -> String {
    for config in analysis::compared_configs(results) {
        if let Some(measured) = analysis::median_cell(results, row.number, config) {
            content.push_str(&of_config(config, measured));
        }
    }
    if content.is_empty() {
        return content;
    }
    let open = if row.number == results.rows[0] { " open" } else { "" };
    let (number, name) = (row.number, escape(&row.name));
    format!("<details{open}><summary>{number} {name}</summary>\n{content}</details>\n")
}

fn requests_of(
    results: &StudyResults,
    row: &PublishedRow,
    config: &str,
    measured: &CellMeasurement,
) -> String {
    let media = table::media(results);
    let ours = measured.requests();
    let stackfs = StackfsConfig::from_name(config);
    let published =
        stackfs.map(|stackfs| row.published_requests(media, stackfs)).unwrap_or_default();
    let published_operations = row.published_operations(media) as f64 / 1000.0;
    let operations = measured.operations.max(1) as f64 / 1000.0;
    // Requests once per mount, which are not part of the workload.
    let once = ["INIT", "DESTROY", "GETXATTR", "STATFS", "INTERRUPT"];
    let names: BTreeSet<&str> =
        ours.keys().copied().chain(published.iter().map(|p| p.op.as_str())).collect();
    let of_published = |op: &str| {
        published.iter().find(|p| p.op == op).map(|p| p.pending as f64 / published_operations)
    };
    let rows: Vec<(&str, f64, Option<f64>)> = names
        .into_iter()
        .filter(|op| !once.contains(op))
        .map(|op| (op, ours.get(op).copied().unwrap_or(0) as f64 / operations, of_published(op)))
        .filter(|(_, ours, published)| *ours >= 0.005 || published.is_some_and(|p| p >= 0.005))
        .collect();
    let most = rows
        .iter()
        .map(|(_, ours, published)| ours.max(published.unwrap_or(0.0)))
        .fold(0.0, f64::max);
    let mut text = format!("<h3>{}</h3>\n", escape(config));
    if rows.is_empty() {
        text.push_str("<p>The daemon got no request.</p>\n");
    }
    for (op, ours, published) in rows {
        let beside = published.map_or(String::new(), |p| format!(" ({})", plot::count(p)));
        let value = format!("{}{beside}{}", plot::count(ours), background(measured, op));
        let label = format!("{op}: {value}");
        text.push_str(&line(
            op,
            &plot::draw_stacked(&[BarSegment { value: ours, class: "a" }], most, &label),
            &value,
        ));
    }
    text
}

/// The share of requests that went through the background queue, as measured in the kernel.
fn background(measured: &CellMeasurement, op: &str) -> String {
    let Some((kernel, op)) = measured.kernel.as_ref().zip(defuse_probe::Op::parse(op)) else {
        return String::new();
    };
    let count = |stage| kernel.get_stage(stage, op).map_or(0, |stats| stats.latency.count);
    let (background, all) = (count(RequestStage::Background), count(RequestStage::Total));
    if background == 0 || all == 0 {
        String::new()
    } else {
        format!(", bg {:.0} %", 100.0 * background as f64 / all as f64)
    }
}

/// Histograms of the request that took most of the time of a row, by stage.
pub fn latency(results: &StudyResults) -> String {
    let mut text = "<p>For each row and configuration, the type of request that took most time, and where it spent it. A column \
                    is a power of two of nanoseconds; its height is the number of requests.</p>\n"
        .to_owned();
    for row in analysis::rows(results) {
        text.push_str(&foldable(results, row, flowops(results, row), histograms));
    }
    text
}

fn histograms(config: &str, measured: &CellMeasurement) -> String {
    let snapshot = measured.daemon.as_ref().or(measured.kernel.as_ref());
    let Some(op) = snapshot
        .and_then(|s| s.ops.iter().max_by_key(|stats| stats.latency.sum_ns))
        .map(|stats| stats.op)
    else {
        return String::new();
    };
    let stages = [
        RequestStage::Background,
        RequestStage::Pending,
        RequestStage::Processing,
        RequestStage::Unsplit,
        RequestStage::User,
    ];
    let found: Vec<(RequestStage, &LatencyHistogram)> = stages
        .into_iter()
        .filter_map(|stage| Some((stage, measured.latency(stage, op)?)))
        .filter(|(_, latency)| latency.count > 0)
        .collect();
    let Some(range) = plot::common_range(found.iter().map(|(_, latency)| *latency)) else {
        return String::new();
    };
    let edge = |bucket: usize| plot::time(2f64.powi(bucket as i32 + 1));
    let mut text = format!("<h3>{}: {op}</h3>\n<div class=\"plots\">\n", escape(config));
    for (stage, latency) in found {
        let labels = format!(
            "{stage}: mean {}, half below {}, 99 % below {}, {} requests",
            plot::time(latency.mean_ns() as f64),
            plot::time(latency.percentile_ns(0.5) as f64),
            plot::time(latency.percentile_ns(0.99) as f64),
            plot::count(latency.count as f64)
        );
        let _ = write!(
            text,
            "<figure><figcaption>{}</figcaption>{}<div class=\"scale\" aria-hidden=\"true\"><span>{}</span><span>{}</span></div></figure>",
            escape(&labels),
            plot::histogram(latency, range, &format!("{config} {op} {labels}")),
            edge(range.0),
            edge(range.1 + 1)
        );
    }
    text + "</div>\n"
}

/// Latencies as the application observed them.
fn flowops(results: &StudyResults, row: &PublishedRow) -> String {
    let mut text = String::new();
    for config in &results.configs {
        let Some(measured) = analysis::median_cell(results, row.number, &config.name) else {
            continue;
        };
        for flowop in measured.flowops.iter().filter(|flowop| flowop.count > 0) {
            let _ = writeln!(
                text,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                escape(&config.name),
                escape(&flowop.name),
                plot::count(flowop.count as f64),
                plot::time(flowop.mean_ns),
                plot::time(flowop.p50_ns as f64),
                plot::time(flowop.p99_ns as f64),
                plot::time(flowop.max_ns as f64)
            );
        }
    }
    let head = ["", "operation", "count", "mean", "p50", "p99", "max"];
    if text.is_empty() { text } else { wide_table("Latency of the application", &head, &text) }
}

/// CPU time per operation: application, daemon, and the rest of the machine.
pub fn cpu(results: &StudyResults) -> String {
    let entries = [("a", "application"), ("b", "daemon"), ("e", "rest of the system")];
    let mut text = legend(&entries);
    for row in analysis::rows(results) {
        let cells: Vec<(&str, [f64; 3])> = cells(results, row, |measured| {
            let (app, daemon) = (measured.cpu.app_ns, measured.cpu.daemon_ns.unwrap_or(0));
            let rest = measured.cpu.system_ns.saturating_sub(app + daemon);
            [app, daemon, rest].map(|ns| measured.microseconds_per_op(ns))
        });
        text.push_str(&draw_bars(
            row,
            &cells,
            ["a", "b", "e"],
            entries.map(|(_, name)| name),
            |us| plot::time(us * 1e3),
        ));
    }
    text
}

/// Bytes read from the device and written to it, including write-back after the end.
pub fn device(results: &StudyResults) -> String {
    let entries = [("c", "read"), ("d", "written"), ("e", "written after the end")];
    let mut text = legend(&entries);
    for row in analysis::rows(results) {
        let cells = cells(results, row, |measured| {
            let late =
                measured.device_synced.write_bytes.saturating_sub(measured.device.write_bytes);
            [measured.device.read_bytes, measured.device.write_bytes, late]
                .map(|bytes| bytes as f64)
        });
        text.push_str(&draw_bars(
            row,
            &cells,
            ["c", "d", "e"],
            entries.map(|(_, name)| name),
            plot::bytes,
        ));
    }
    text
}

fn cells<'a>(
    results: &'a StudyResults,
    row: &PublishedRow,
    of: impl Fn(&CellMeasurement) -> [f64; 3],
) -> Vec<(&'a str, [f64; 3])> {
    let configs = results.configs.iter();
    configs
        .filter_map(|config| {
            Some((
                config.name.as_str(),
                of(analysis::median_cell(results, row.number, &config.name)?),
            ))
        })
        .collect()
}

/// The bars of one row, to one scale.
fn draw_bars(
    row: &PublishedRow,
    cells: &[(&str, [f64; 3])],
    classes: [&'static str; 3],
    names: [&str; 3],
    unit: impl Fn(f64) -> String,
) -> String {
    if cells.is_empty() {
        return String::new();
    }
    let most = cells.iter().map(|(_, parts)| parts.iter().sum::<f64>()).fold(0.0, f64::max);
    let mut text = format!("<h3>{} {}</h3>\n", row.number, escape(&row.name));
    for (config, values) in cells {
        let parts: Vec<BarSegment> = classes
            .iter()
            .zip(values)
            .map(|(class, value)| BarSegment { value: *value, class })
            .collect();
        let labels: Vec<String> = names
            .iter()
            .zip(values)
            .map(|(name, value)| format!("{name} {}", unit(*value)))
            .collect();
        let label = format!("{} {config}: {}", row.name, labels.join(", "));
        text.push_str(&line(
            config,
            &plot::draw_stacked(&parts, most, &label),
            &unit(values.iter().sum()),
        ));
    }
    text
}

/// All figures in one table, for reference.
pub fn figures(results: &StudyResults) -> String {
    let mut body = String::new();
    for row in analysis::rows(results) {
        for config in &results.configs {
            let Some(measured) = analysis::median_cell(results, row.number, &config.name) else {
                continue;
            };
            let daemon = measured
                .cpu
                .daemon_ns
                .map_or("-".into(), |ns| format!("{:.1}", measured.microseconds_per_op(ns)));
            let memory = measured
                .memory_limit_bytes
                .map_or("not limited".into(), |limit| plot::bytes(limit as f64));
            let _ = writeln!(
                body,
                "<tr><td>{} {}</td><td>{}</td><td>{:.1}</td><td>{}</td><td>{:.2}</td><td>{:.1}</td><td>{daemon}</td><td>{:.1}</td>\
                 <td>{}</td><td>{}</td><td>{memory}</td></tr>",
                row.number,
                escape(&row.name),
                escape(&config.name),
                measured.ops_per_s(),
                measured.operations,
                measured.seconds,
                measured.microseconds_per_op(measured.cpu.app_ns),
                measured.microseconds_per_op(measured.cpu.system_ns),
                measured.device_synced.read_requests,
                measured.device_synced.write_requests,
            );
        }
    }
    let head = [
        "row",
        "",
        "ops/s",
        "operations",
        "s",
        "app µs/op",
        "daemon µs/op",
        "system µs/op",
        "reads",
        "writes",
        "memory",
    ];
    let mut text = wide_table("The run of median throughput of each cell", &head, &body);
    for cell in results.cells.iter().filter(|cell| cell.error.is_some()) {
        let error = cell.error.as_deref().unwrap_or_default();
        let _ = writeln!(
            text,
            "<p>Row {}, {}, run {} failed: {}</p>",
            cell.row,
            escape(&cell.config),
            cell.run,
            escape(error)
        );
    }
    text
}
