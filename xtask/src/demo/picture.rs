//! The table of times as a picture (SVG): a bar for each program on each target.

use std::fmt::Write as _;

use super::TARGETS;
use super::programs::PROGRAMS;
use super::report::DemoReport;

/// The colours of the targets, which differ also in lightness.
const COLOURS: [&str; TARGETS.len()] = ["#1b1f24", "#0969da", "#bc4c00", "#8250df", "#2da44e"];

const WIDTH: usize = 900;
/// The bars begin here.
const LEFT: usize = 190;
/// The longest bar, which leaves room for its figure.
const LONGEST: f64 = 600.0;
const BAR: usize = 13;

/// A picture with all times relative to the native directory, or an empty one before a round.
pub fn draw(report: &DemoReport) -> String {
    let measured: Vec<usize> =
        (0..PROGRAMS.len()).filter(|program| report.seconds(*program, 0).is_some()).collect();
    let most = measured.iter().flat_map(|&program| ratios(report, program)).map(|(_, ratio)| ratio);
    let most = most.fold(1.0, f64::max);
    let block = BAR * TARGETS.len() + 14;
    let height = 64 + block * measured.len();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>Times of programs relative to the native directory</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"16\">Times relative to the native directory (less is faster)</text>\n"
    );
    for (place, (target, colour)) in TARGETS.iter().zip(COLOURS).enumerate() {
        let x = 12 + 110 * place;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"36\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{}\" y=\"45\">{target}</text>",
            x + 15
        );
    }
    for (place, &program) in measured.iter().enumerate() {
        let top = 62 + block * place;
        let _ = writeln!(
            svg,
            "<text x=\"12\" y=\"{}\">{}</text>",
            top + block / 2,
            escape(PROGRAMS[program].name)
        );
        for (target, ratio) in ratios(report, program) {
            let (y, width) = (top + BAR * target, LONGEST * ratio / most);
            let seconds = report.seconds(program, target).unwrap_or(f64::NAN);
            let _ = writeln!(
                svg,
                "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\" fill=\"{}\"/>\
                 <text x=\"{:.1}\" y=\"{}\" font-size=\"10\">{ratio:.2}x, {seconds:.3} s</text>",
                BAR - 2,
                COLOURS[target],
                LEFT as f64 + width + 5.0,
                y + BAR - 4
            );
        }
    }
    svg + "</svg>\n"
}

/// The targets of a program, with their times relative to the native directory.
fn ratios(report: &DemoReport, program: usize) -> Vec<(usize, f64)> {
    let ratio = |target| Some((target, report.ratio(program, target)?));
    (0..TARGETS.len()).filter_map(ratio).collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::super::report::DemoMeasurement;
    use super::*;

    fn report_of(times: &[f64]) -> DemoReport {
        let mut report = DemoReport::default();
        for (target, &seconds) in times.iter().enumerate() {
            let (said, requests) = (String::new(), Default::default());
            report.add(0, target, DemoMeasurement { seconds, said, requests });
        }
        report
    }

    #[test]
    fn each_target_has_a_bar_to_the_scale_of_the_slowest() {
        let svg = draw(&report_of(&[1.0, 2.0, 4.0, 2.0, 1.0]));
        let bars = |width: &str| svg.matches(&format!("width=\"{width}\" height=\"11\"")).count();
        assert_eq!([bars("150.0"), bars("300.0"), bars("600.0")], [2, 2, 1], "{svg}");
        assert!(svg.contains("4.00x, 4.000 s") && svg.contains(PROGRAMS[0].name), "{svg}");
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    }

    #[test]
    fn a_demo_without_a_round_has_a_picture_without_bars() {
        let svg = draw(&report_of(&[]));
        assert!(!svg.contains("font-size=\"10\"") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
