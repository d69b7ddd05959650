//! The results as a table for the terminal, like table 3 of the paper.

use std::fmt::Write as _;

use super::analysis::{self, NATIVE, RowFigure};
use super::verdict;
use crate::results::StudyResults;
use crate::rows::{ChangeClass, PublishedRow, StackfsConfig, StorageMedia};

/// The table, the numbers of rows per class beside the published ones, and the verdicts.
pub fn table(results: &StudyResults) -> String {
    let mut text = String::new();
    let media = media(results);
    let configs = analysis::compared_configs(results);
    let _ = writeln!(
        text,
        "{}; {}; scale {}",
        results.device.description,
        results.memory,
        results.scale.name()
    );
    if let Some(caution) = analysis::list_doubts(results) {
        let _ = writeln!(text, "{caution}");
    }
    let _ = write!(text, "{:>2} {:<21}{:>13}", "#", "workload", "native ops/s");
    for config in &configs {
        let published = StackfsConfig::from_name(config).map_or("", |_| "(paper)");
        let _ = write!(text, "  {config:>10} {published:>9}");
    }
    text.push('\n');
    for row in analysis::rows(results) {
        line(&mut text, results, row, &configs, media);
    }
    text.push('\n');
    for config in &configs {
        let _ = writeln!(text, "{}", format_counts_line(results, config, media));
    }
    let _ = writeln!(text, "\n+ above -5 %   * -5 to -25 %   # -25 to -50 %   ! below -50 %");
    if results.runs > 1 {
        let _ = writeln!(
            text,
            "{}: median; ~N: half the distance of the best and the worst is N % of it; ?: not to be told from \
             noise, as runs here and natively overlap",
            analysis::describe_runs(results)
        );
    }
    text.push('\n');
    for verdict in verdict::judge_all(results) {
        let _ = writeln!(text, "{}: {}\n", verdict.family.name(), verdict.text);
    }
    failures(&mut text, results);
    text
}

/// The device whose published figures are shown.
pub fn media(results: &StudyResults) -> StorageMedia {
    results.device.emulated.unwrap_or(StorageMedia::Ssd)
}

fn line(
    text: &mut String,
    results: &StudyResults,
    row: &PublishedRow,
    configs: &[&str],
    media: StorageMedia,
) {
    let native = RowFigure::find(results, row.number, NATIVE);
    let native =
        native.map_or("-".into(), |figure| format!("{:.1}{}", figure.ops_per_s, spread(&figure)));
    let _ = write!(text, "{:>2} {:<21}{native:>13}", row.number, row.name);
    for config in configs {
        let figure = RowFigure::find(results, row.number, config);
        let change = figure.as_ref().map_or("-".into(), |figure| {
            match (figure.change_pct, figure.class()) {
                (Some(change), Some(class)) => {
                    let noise = if figure.noise { "?" } else { "" };
                    format!("{change:+.1}%{}{noise}{}", class.mark(), spread(figure))
                }
                _ => format!("{:.1}", figure.ops_per_s),
            }
        });
        let published = StackfsConfig::from_name(config).map(|stackfs| {
            let change = row.published_results(media).change_pct(stackfs);
            format!("({change:+.1}{})", ChangeClass::classify(change).mark())
        });
        let _ = write!(text, "  {change:>10} {:>9}", published.unwrap_or_default());
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
}

fn spread(figure: &RowFigure) -> String {
    figure.spread_pct.map_or_else(String::new, |spread| format!("~{spread:.0}"))
}

/// Number of rows in each class, here and as published for the same rows.
pub fn format_counts_line(results: &StudyResults, config: &str, media: StorageMedia) -> String {
    let ours = analysis::class_counts(analysis::changes(results, config).map(|(_, change)| change));
    let mut text = format!("{config}: {}", format_counts(ours));
    if let Some(stackfs) = StackfsConfig::from_name(config) {
        let rows = analysis::changes(results, config).filter_map(|(row, _)| PublishedRow::get(row));
        let published = analysis::class_counts(
            rows.map(|row| row.published_results(media).change_pct(stackfs)),
        );
        let _ = write!(
            text,
            "; published for these rows ({}): {}",
            media.name(),
            format_counts(published)
        );
    }
    text
}

fn format_counts(counts: [usize; 4]) -> String {
    let part =
        |(class, count): (ChangeClass, usize)| format!("{count} {} {}", class.name(), class.mark());
    ChangeClass::ALL.into_iter().zip(counts).map(part).collect::<Vec<_>>().join(", ")
}

fn failures(text: &mut String, results: &StudyResults) {
    for cell in &results.cells {
        if let Some(error) = &cell.error {
            let _ =
                writeln!(text, "row {} {} run {} failed: {error}", cell.row, cell.config, cell.run);
        }
    }
    if results.interrupted {
        let _ = writeln!(text, "The study was interrupted: continue with --resume.");
    }
}
