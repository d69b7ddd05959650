//! The frame of the report: one file without anything from elsewhere, light and dark, from 360 pixels on.

use std::fmt::Write as _;

use super::sections;
use crate::results::Results;

const STYLE: &str = include_str!("style.css");

/// The whole report.
pub fn html(results: &Results) -> String {
    let parts = [
        ("verdicts", "What it costs", sections::verdicts(results)),
        ("classes", "How many rows in which class", sections::classes(results)),
        ("rows", "Throughput, row by row", sections::throughput(results)),
        ("requests", "Requests by type", sections::requests(results)),
        ("latency", "Latency by stage", sections::latency(results)),
        ("cpu", "CPU time of an operation", sections::cpu(results)),
        ("device", "Traffic of the block device", sections::device(results)),
        ("figures", "All figures", sections::figures(results)),
    ];
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>What user space costs: {} rows</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n",
        results.rows.len()
    );
    page.push_str("<header>\n<h1>What a file system in user space costs</h1>\n");
    page.push_str(&sections::facts(results));
    page.push_str("<nav aria-label=\"Sections\"><ul>");
    for (id, title, _) in &parts {
        let _ = write!(page, "<li><a href=\"#{id}\">{title}</a></li>");
    }
    page.push_str("</ul></nav>\n</header>\n<main>\n");
    for (id, title, content) in &parts {
        let _ = write!(page, "<section id=\"{id}\">\n<h2>{title}</h2>\n{content}</section>\n");
    }
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

/// Text for HTML, also within quotes.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}
