//! The section for docs/performance.md.

use std::fmt::Write;

use super::{BenchmarkResults, rows};

/// The table of ratios, with the information needed to repeat the run.
pub fn render(results: &BenchmarkResults) -> String {
    let mut out = String::from("## Against libfuse and fuser\n\n");
    let _ = writeln!(out, "```\n{}\n```\n", results.command);
    let _ = writeln!(
        out,
        "Linux {}, {} processors, {}, {} rounds in which every target ran every cell once, in rotating order.\n",
        results.kernel, results.processors, results.backing, results.rounds
    );
    for (name, version) in &results.targets {
        let _ = writeln!(out, "- `{name}`: {version}");
    }
    out.push_str(
        "\nA target's column is its operations per second relative to the native directory, and after the slash the CPU \
         time of application and daemon for one operation, also relative to native. Ratios are medians over the rounds, \
         each taken within a round. `ours/peer` is the first of ours over the better peer, with quartiles; `required` \
         is the least it must be. `system CPU` counts the whole machine, the kernel's own threads included.\n\n",
    );
    let rows = rows::make_rows(results);
    for (number, row) in rows.iter().enumerate() {
        let _ = writeln!(out, "| {} |", row.join(" | "));
        if number == 0 {
            let rule = vec!["---"; row.len()].join("|");
            let _ = writeln!(out, "|{rule}|");
        }
    }
    out.push_str(&results.failures());
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    #[test]
    fn the_section_names_command_versions_and_failures() {
        let mut results = results();
        results.cells[0].series[1].push(Err(anyhow::anyhow!("disk full")));
        let text = render(&results);
        assert!(text.contains("```\nrun\n```") && text.contains("`libfuse`: 3.14"));
        assert!(text.contains("| create-4k | 1 |") && text.contains("disk full"));
    }
}
