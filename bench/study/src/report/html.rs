//! The frame of the report: a self-contained file, light and dark, from 360 pixels on.

use std::fmt::Write as _;

use super::{plot, sections};
use crate::results::{MachineFacts, StudyResults};

const STYLE: &str = include_str!("style.css");

/// A section of a report.
#[derive(Debug)]
pub struct ReportSection {
    /// The fragment of links to it.
    pub id: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// Its HTML.
    pub content: String,
}

/// The complete report of a study.
pub fn html(results: &StudyResults) -> String {
    let part = |id, title, content| ReportSection { id, title, content };
    let parts = [
        part("verdicts", "What it costs", sections::verdicts(results)),
        part("classes", "How many rows in which class", sections::classes(results)),
        part("rows", "Throughput, row by row", sections::throughput(results)),
        part("requests", "Requests by type", sections::requests(results)),
        part("latency", "Latency by stage", sections::latency(results)),
        part("cpu", "CPU time of an operation", sections::cpu(results)),
        part("device", "Traffic of the block device", sections::device(results)),
        part("figures", "All figures", sections::figures(results)),
    ];
    let title = format!("What user space costs: {} rows", results.rows.len());
    let heading = "What a file system in user space costs";
    page(&title, heading, &sections::write_facts(results), &parts)
}

/// A report: the frame around sections. `facts` is HTML before the links to the sections.
pub fn page(title: &str, heading: &str, facts: &str, parts: &[ReportSection]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<header>\n<h1>{}</h1>\n",
        escape(title),
        escape(heading)
    );
    page.push_str(facts);
    page.push_str("<nav aria-label=\"Sections\"><ul>");
    for ReportSection { id, title, .. } in parts {
        let _ = write!(page, "<li><a href=\"#{id}\">{title}</a></li>");
    }
    page.push_str("</ul></nav>\n</header>\n<main>\n");
    for ReportSection { id, title, content } in parts {
        let _ = write!(page, "<section id=\"{id}\">\n<h2>{title}</h2>\n{content}</section>\n");
    }
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

/// A list of names and values.
pub fn fact_list(facts: &[(&str, String)]) -> String {
    let mut text = "<dl class=\"facts\">\n".to_owned();
    for (name, value) in facts {
        let _ = writeln!(text, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
    }
    text + "</dl>\n"
}

/// A machine in one line.
pub fn machine(machine: &MachineFacts) -> String {
    format!("{} × {}, {}", machine.cpus, machine.cpu, plot::bytes(machine.memory_bytes as f64))
}

/// A line with a name, a picture and a value.
pub fn line(name: &str, picture: &str, value: &str) -> String {
    let name = escape(name);
    format!(
        "<div class=\"line\"><span class=\"name\">{name}</span>{picture}<span class=\"value\">{}</span></div>\n",
        escape(value)
    )
}

/// The legend: style classes, and their meaning.
pub fn legend(entries: &[(&str, &str)]) -> String {
    let mut text = "<ul class=\"legend\">".to_owned();
    for (class, meaning) in entries {
        let _ = write!(
            text,
            "<li><svg viewBox=\"0 0 10 10\" aria-hidden=\"true\"><rect class=\"{class}\" width=\"10\" height=\"10\"/></svg>{}</li>",
            escape(meaning)
        );
    }
    text + "</ul>\n"
}

/// A table that scrolls sideways if it is too wide. `body` contains the rows.
pub fn wide_table(caption: &str, head: &[&str], body: &str) -> String {
    let head: String = head.iter().map(|name| format!("<th scope=\"col\">{name}</th>")).collect();
    format!(
        "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table><caption class=\"soft\">{caption}\
         </caption><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n"
    )
}

/// Escapes text for HTML, also within quotes.
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

/// A date and time in UTC, from seconds since 1970 UTC.
pub fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days are counted in eras of 400 years that begin in March, so that the leap day comes last.
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let place = (5 * day_of_year + 2) / 153;
    let (day, month) =
        (day_of_year - (153 * place + 2) / 5 + 1, if place < 10 { place + 3 } else { place - 9 });
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3600, rest / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_827_696), "2000-02-29 12:34 UTC");
        assert_eq!(date(1_704_067_199), "2023-12-31 23:59 UTC");
    }
}
