//! The tables of ratios: durations, and processor time.

use std::fmt::Write;

use super::script::NAMES;
use super::{NATIVE, ProgramsCell, ProgramsResults};

/// The results as tables in Markdown: native figures, and ratios to them with quartiles.
pub fn table(results: &ProgramsResults) -> String {
    let rounds = format!("{} files, {} rounds.", results.files, results.rounds);
    let of_others = "relative to native: the median of the rounds, and the quartiles.";
    let mut text = format!(
        "{rounds} Times {of_others} After the slash: system calls that the kernel executed.\n\n"
    );
    let show = |program: &str, target: &str| calls(results, program, target);
    write_table(&mut text, results, |cell| cell.ns as f64, show);
    text += &format!("\n{rounds} Processor time of the machine {of_others}\n\n");
    write_table(&mut text, results, |cell| cell.cpu_ns as f64, |_, _| String::new());
    text
}

/// Writes a table of one `figure` of the cells, with the text of `more` about a program on a
/// target.
fn write_table(
    text: &mut String,
    results: &ProgramsResults,
    figure: impl Fn(&ProgramsCell) -> f64 + Copy,
    more: impl Fn(&str, &str) -> String,
) {
    let others = &results.targets[1..];
    let _ = write!(text, "| program | {NATIVE} |");
    others.iter().for_each(|target| *text += &format!(" {target} |"));
    let _ = writeln!(text, "\n{}|", "|---".repeat(others.len() + 2));
    for program in NAMES {
        let mut native = figures(results, (program, NATIVE), figure);
        native.sort_by(f64::total_cmp);
        let middle = quantile(&native, 0.5) / 1e6;
        let _ = write!(text, "| {program} | {middle:.0} ms{} |", more(program, NATIVE));
        for target in others {
            let ratios = ratios(results, (program, target), figure);
            let [low, middle, high] = [0.25, 0.5, 0.75].map(|at| quantile(&ratios, at));
            let more = more(program, target);
            let _ = write!(text, " {middle:.2} ({low:.2}-{high:.2}){more} |");
        }
        *text += "\n";
    }
}

/// A figure of one program on one target, by round.
fn figures(
    results: &ProgramsResults,
    (program, target): (&str, &str),
    figure: impl Fn(&ProgramsCell) -> f64,
) -> Vec<f64> {
    let cells = results.cells.iter();
    let fits = cells.filter(|cell| cell.program == program && cell.target == target);
    let mut all: Vec<_> = fits.map(|cell| (cell.round, figure(cell))).collect();
    all.sort_by_key(|(round, _)| *round);
    all.into_iter().map(|(_, figure)| figure).collect()
}

/// The ratios to the native target, each within a round, in order of size. Rounds are left out
/// where the native figure is too short for the clock.
fn ratios(
    results: &ProgramsResults,
    (program, target): (&str, &str),
    figure: impl Fn(&ProgramsCell) -> f64 + Copy,
) -> Vec<f64> {
    let native = figures(results, (program, NATIVE), figure);
    let own = figures(results, (program, target), figure);
    let pairs = own.iter().zip(&native).filter(|(_, native)| **native > 0.0);
    let mut all: Vec<f64> = pairs.map(|(own, native)| own / native).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn quantile(sorted: &[f64], at: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    sorted[(at * last as f64).round() as usize]
}

fn calls(results: &ProgramsResults, program: &str, target: &str) -> String {
    let found = results.system_calls.get(target).and_then(|counts| counts.get(program));
    found.map_or_else(String::new, |count| format!(" / {count}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn ratios_are_taken_within_rounds() {
        let cell = |target, round, ns| ProgramsCell {
            program: "make".into(),
            target,
            round,
            ns,
            cpu_ns: 2 * ns * u64::from(round),
        };
        let results = ProgramsResults {
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
        let place = ("make", "memory");
        assert_eq!(ratios(&results, place, |cell| cell.ns as f64), [2.0, 3.0, 5.0]);
        // The first round took no tick natively.
        assert_eq!(ratios(&results, place, |cell| cell.cpu_ns as f64), [2.0, 5.0]);
        assert!(table(&results).contains("3.00 (3.00-5.00) / 7 |"), "{}", table(&results));
    }
}
