//! The table of ratios.

use std::fmt::Write;

use super::script::NAMES;
use super::{NATIVE, Results};

/// The results as a table in Markdown: native durations, and ratios to them with quartiles.
pub fn table(results: &Results) -> String {
    let others = &results.targets[1..];
    let mut text = format!(
        "{} files, {} rounds. Times relative to {NATIVE}: the median of the rounds, and the quartiles. After the slash: \
         system calls that the kernel executed.\n\n| program | {NATIVE} |",
        results.files, results.rounds
    );
    let rule = "|---".repeat(others.len() + 2);
    others.iter().for_each(|target| text += &format!(" {target} |"));
    let _ = writeln!(text, "\n{rule}|");
    for program in NAMES {
        let mut native = durations(results, program, NATIVE);
        native.sort_by(f64::total_cmp);
        let calls = calls(results, program, NATIVE);
        let _ = write!(text, "| {program} | {:.0} ms{calls} |", quantile(&native, 0.5) / 1e6);
        for target in others {
            let ratios = ratios(results, program, target);
            let [low, middle, high] = [0.25, 0.5, 0.75].map(|at| quantile(&ratios, at));
            let calls = self::calls(results, program, target);
            let _ = write!(text, " {middle:.2} ({low:.2}-{high:.2}){calls} |");
        }
        text += "\n";
    }
    text
}

/// The durations by round, in nanoseconds.
fn durations(results: &Results, program: &str, target: &str) -> Vec<f64> {
    let cells = results.cells.iter();
    let fits = cells.filter(|cell| cell.program == program && cell.target == target);
    let mut all: Vec<_> = fits.map(|cell| (cell.round, cell.ns as f64)).collect();
    all.sort_by_key(|(round, _)| *round);
    all.into_iter().map(|(_, ns)| ns).collect()
}

/// The ratios to the native target, each within a round, in order of size.
fn ratios(results: &Results, program: &str, target: &str) -> Vec<f64> {
    let native = durations(results, program, NATIVE);
    let own = durations(results, program, target);
    let mut all: Vec<f64> = own.iter().zip(&native).map(|(own, native)| own / native).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn quantile(sorted: &[f64], at: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    sorted[(at * last as f64).round() as usize]
}

fn calls(results: &Results, program: &str, target: &str) -> String {
    let found = results.system_calls.get(target).and_then(|counts| counts.get(program));
    found.map_or_else(String::new, |count| format!(" / {count}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Cell;
    use super::*;

    #[test]
    fn ratios_are_taken_within_rounds() {
        let cell = |target, round, ns| Cell { program: "make".into(), target, round, ns };
        let results = Results {
            schema: "",
            files: 1,
            rounds: 3,
            targets: vec![NATIVE, "memory"],
            cells: vec![
                cell("memory", 1, 40),
                cell(NATIVE, 0, 10),
                cell("memory", 0, 30),
                cell(NATIVE, 1, 20),
                cell("memory", 2, 50),
                cell(NATIVE, 2, 10),
            ],
            system_calls: BTreeMap::from([("memory".into(), BTreeMap::from([("make".into(), 7)]))]),
            interrupted: false,
        };
        assert_eq!(ratios(&results, "make", "memory"), [2.0, 3.0, 5.0]);
        assert!(table(&results).contains("3.00 (3.00-5.00) / 7 |"), "{}", table(&results));
    }
}
