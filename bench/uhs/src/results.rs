//! Figures, their medians, and the goals.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

/// The figures of one target in one row, one for each round.
pub type RoundFigures = Vec<f64>;

/// The device without a file system, as a target.
pub const RAW: &str = "raw";

/// Everything that was measured: by row, by target.
#[derive(Clone, Debug, Default, Serialize)]
pub struct UhsBenchResults {
    /// The rows in order.
    pub rows: Vec<FigureRow>,
}

/// The direction of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum FigureDirection {
    /// Rates.
    More,
    /// Times and sizes.
    Less,
}

/// A figure of several targets.
#[derive(Clone, Debug, Serialize)]
pub struct FigureRow {
    /// The name, such as `create, 1000 directories`.
    pub name: String,
    /// The unit.
    pub unit: &'static str,
    /// The direction.
    pub better: FigureDirection,
    /// The [ratio](FigureRow::ratio) that is wanted; 0 for no goal.
    pub goal: f64,
    /// The figures by target.
    pub figures: BTreeMap<String, RoundFigures>,
}

impl UhsBenchResults {
    /// Adds a figure of `target`.
    pub fn add(
        &mut self,
        (name, unit, better, goal): (&str, &'static str, FigureDirection, f64),
        target: &str,
        figure: f64,
    ) {
        let at = self.rows.iter().position(|row| row.name == name && row.unit == unit);
        let at = at.unwrap_or_else(|| {
            let (name, figures) = (name.to_owned(), BTreeMap::new());
            self.rows.push(FigureRow { name, unit, better, goal, figures });
            self.rows.len() - 1
        });
        self.rows[at].figures.entry(target.to_owned()).or_default().push(figure);
    }
}

/// The table of some rows, for readers.
pub fn table(rows: &[FigureRow]) -> String {
    let mut text = String::new();
    for row in rows {
        let figures = row.figures.iter();
        let figures: Vec<String> = figures
            .map(|(target, figures)| format!("{target} {}", format_short(median(figures))))
            .collect();
        let (name, unit) = (&row.name, row.unit);
        let _ = write!(text, "{name:<44} {unit:<10} {}", figures.join("  "));
        if let Some(ratio) = row.ratio() {
            let _ = write!(text, "  ratio {ratio:.2}");
            if row.goal > 0.0 {
                let met = if ratio >= row.goal { "met" } else { "not met" };
                let _ = write!(text, " (goal {}: {met})", row.goal);
            }
        }
        text.push('\n');
    }
    text
}

impl FigureRow {
    /// The median over the rounds of uhs against the device in the same round, or the best of the
    /// others where that was not measured: above 1 where uhs is better. `None` without both.
    pub fn ratio(&self) -> Option<f64> {
        let ours = self.figures.get("uhs")?;
        let of_round = |(round, ours): (usize, &f64)| {
            let is_measure = |target: &str| match self.figures.contains_key(RAW) {
                true => target == RAW,
                false => target != "uhs",
            };
            let others = self.figures.iter().filter(|(target, _)| is_measure(target));
            let others = others.filter_map(|(_, figures)| figures.get(round).copied());
            match self.better {
                FigureDirection::More => others.reduce(f64::max).map(|best| ours / best),
                FigureDirection::Less => others.reduce(f64::min).map(|best| best / ours),
            }
        };
        let ratios: Option<Vec<f64>> = ours.iter().enumerate().map(of_round).collect();
        ratios.map(|ratios| median(&ratios))
    }
}

/// The middle of the figures, in order of size.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

fn format_short(figure: f64) -> String {
    match figure.abs() {
        large if large >= 1000.0 => format!("{figure:.0}"),
        middle if middle >= 10.0 => format!("{figure:.1}"),
        _ => format!("{figure:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_that_to_the_best_of_the_others_in_the_same_round() {
        let mut results = UhsBenchResults::default();
        let row = ("create", "us", FigureDirection::Less, 2.0);
        for (target, figures) in
            [("uhs", [1.0, 2.0, 1.0]), ("ext4", [8.0, 6.0, 9.0]), ("xfs", [4.0, 8.0, 3.0])]
        {
            figures.into_iter().for_each(|figure| results.add(row, target, figure));
        }
        assert_eq!(results.rows[0].ratio(), Some(3.0));
        let text = table(&results.rows);
        assert!(text.contains("ratio 3.00 (goal 2: met)"), "{text}");
    }

    #[test]
    fn rates_are_better_when_they_are_more() {
        let mut results = UhsBenchResults::default();
        let row = ("read", "MB/s", FigureDirection::More, 0.9);
        for (target, figure) in [("uhs", 80.0), (RAW, 100.0), ("ext4", 200.0)] {
            results.add(row, target, figure);
        }
        assert_eq!(results.rows[0].ratio(), Some(0.8));
        assert!(table(&results.rows).contains("not met"));
    }
}
