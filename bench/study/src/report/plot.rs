//! Small plots as inline SVG. They contain no text. It is beside them in HTML, where it keeps its
//! size on a narrow screen. Each plot has a label with the same content as the picture.

use std::fmt::Write as _;

use defuse_probe::{BUCKETS, LatencyHistogram};

use super::html::escape;

/// A part of a bar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BarSegment {
    /// Its length, in the unit of the bar.
    pub value: f64,
    /// The style class of its colour.
    pub class: &'static str,
}

/// Opens an SVG that is stretched to the available width.
fn open(label: &str, width: u32, height: u32, class: &str) -> String {
    format!(
        "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"{}\">",
        escape(label)
    )
}

/// A change in per cent, from -100 to +25, as a bar from the line of no change, with a tick for the
/// published change.
pub fn change(change_pct: f64, class: &str, published_pct: Option<f64>, label: &str) -> String {
    let x = |pct: f64| 8.0 * (pct.clamp(-100.0, 25.0) + 100.0);
    let (zero, end) = (x(0.0), x(change_pct));
    let (left, width) = (zero.min(end), (zero - end).abs().max(3.0));
    let mut svg = open(label, 1000, 10, "bar");
    let _ = write!(svg, "<rect class=\"ground\" width=\"1000\" height=\"10\"/>");
    for limit in [-50.0, -25.0, -5.0] {
        let _ =
            write!(svg, "<rect class=\"grid\" x=\"{:.1}\" width=\"1.5\" height=\"10\"/>", x(limit));
    }
    let _ = write!(
        svg,
        "<rect class=\"{class}\" x=\"{left:.1}\" y=\"1\" width=\"{width:.1}\" height=\"8\"/>"
    );
    let _ = write!(svg, "<rect class=\"axis\" x=\"{:.1}\" width=\"2\" height=\"10\"/>", zero - 1.0);
    if let Some(published) = published_pct {
        let _ = write!(
            svg,
            "<rect class=\"tick\" x=\"{:.1}\" width=\"6\" height=\"10\"/>",
            x(published) - 3.0
        );
    }
    svg + "</svg>"
}

/// Adjacent parts, to the scale of the largest sum.
pub fn draw_stacked(parts: &[BarSegment], most: f64, label: &str) -> String {
    let mut svg = open(label, 1000, 10, "bar");
    let _ = write!(svg, "<rect class=\"ground\" width=\"1000\" height=\"10\"/>");
    let mut at = 0.0;
    for part in parts {
        let width = (1000.0 * part.value / most.max(1e-12)).clamp(0.0, 1000.0 - at);
        if width > 0.0 {
            let _ = write!(
                svg,
                "<rect class=\"{}\" x=\"{at:.1}\" y=\"1\" width=\"{width:.1}\" height=\"8\"/>",
                part.class
            );
        }
        at += width;
    }
    svg + "</svg>"
}

/// Series over the same positions, from 0 to `most`: one line each, with a mark at every value.
pub fn curves(series: &[(&'static str, Vec<f64>)], most: f64, label: &str) -> String {
    const HEIGHT: f64 = 100.0;
    const STEP: f64 = 40.0;
    let places = series.iter().map(|(_, values)| values.len()).max().unwrap_or(0).max(1);
    let width = STEP * places as f64;
    let mut svg = open(label, width as u32, HEIGHT as u32, "curves");
    let _ = write!(svg, "<rect class=\"ground\" width=\"{width}\" height=\"{HEIGHT}\"/>");
    for quarter in 1..4 {
        let y = HEIGHT * f64::from(quarter) / 4.0;
        let _ = write!(svg, "<path class=\"grid\" d=\"M0 {y}H{width}\"/>");
    }
    for (class, values) in series {
        let at = |(place, value): (usize, &f64)| {
            let x = STEP * (place as f64 + 0.5);
            (x, 4.0 + (HEIGHT - 8.0) * (1.0 - (value / most.max(1e-12)).clamp(0.0, 1.0)))
        };
        let points: Vec<(f64, f64)> = values.iter().enumerate().map(at).collect();
        let line: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        let _ = write!(svg, "<path class=\"{class}\" d=\"M{}\"/>", line.join("L"));
        for (x, y) in points {
            let (x, y) = (x - 3.0, y - 1.5);
            let _ = write!(
                svg,
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"6\" height=\"3\"/>"
            );
        }
    }
    svg + "</svg>"
}

/// Latencies: a column for each power of two between the first and the last bucket given.
pub fn histogram(histogram: &LatencyHistogram, range: (usize, usize), label: &str) -> String {
    let (first, last) = range;
    let columns = last - first + 1;
    let most = histogram.buckets.iter().copied().max().unwrap_or(0).max(1) as f64;
    let mut svg = open(label, 10 * columns as u32, 50, "histogram");
    let _ = write!(svg, "<rect class=\"ground\" width=\"{}\" height=\"50\"/>", 10 * columns);
    for (place, &count) in histogram.buckets[first..=last].iter().enumerate() {
        if count > 0 {
            // A rare latency must be visible, too.
            let height = (48.0 * count as f64 / most).max(1.0);
            let _ = write!(
                svg,
                "<rect class=\"column\" x=\"{}\" y=\"{:.1}\" width=\"8\" height=\"{height:.1}\"/>",
                10 * place + 1,
                50.0 - height
            );
        }
    }
    svg + "</svg>"
}

/// The range of buckets that are not empty in any of these histograms.
pub fn common_range<'a>(
    histograms: impl Iterator<Item = &'a LatencyHistogram>,
) -> Option<(usize, usize)> {
    let mut range = None;
    for histogram in histograms {
        for bucket in (0..BUCKETS).filter(|&bucket| histogram.buckets[bucket] > 0) {
            let (first, last) = range.unwrap_or((bucket, bucket));
            range = Some((bucket.min(first), bucket.max(last)));
        }
    }
    range
}

/// Nanoseconds with a unit.
pub fn time(ns: f64) -> String {
    match ns {
        n if n < 1e3 => format!("{n:.0} ns"),
        n if n < 1e4 => format!("{:.1} µs", n / 1e3),
        n if n < 1e6 => format!("{:.0} µs", n / 1e3),
        n if n < 1e7 => format!("{:.1} ms", n / 1e6),
        n if n < 1e9 => format!("{:.0} ms", n / 1e6),
        n => format!("{:.1} s", n / 1e9),
    }
}

/// Bytes with a unit.
pub fn bytes(count: f64) -> String {
    match count {
        n if n < 1024.0 => format!("{n:.0} B"),
        n if n < 1048576.0 => format!("{:.1} KiB", n / 1024.0),
        n if n < 1073741824.0 => format!("{:.1} MiB", n / 1048576.0),
        n => format!("{:.2} GiB", n / 1073741824.0),
    }
}

/// A count in few digits.
pub fn count(value: f64) -> String {
    match value {
        n if n < 10.0 && n.fract() > 0.0 => format!("{n:.2}"),
        n if n < 1e5 => format!("{n:.0}"),
        n if n < 1e7 => format!("{:.0} k", n / 1e3),
        n => format!("{:.1} M", n / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_of_change_ends_at_its_value() {
        let svg = change(-50.0, "red", Some(-25.0), "a \"label\"");
        assert!(svg.contains("class=\"red\" x=\"400.0\" y=\"1\" width=\"400.0\""), "{svg}");
        assert!(svg.contains("class=\"tick\" x=\"597.0\""), "{svg}");
        assert!(svg.contains("aria-label=\"a &quot;label&quot;\""), "{svg}");
    }

    #[test]
    fn parts_do_not_leave_their_bar() {
        let part = |value| BarSegment { value, class: "a" };
        let svg = draw_stacked(&[part(1.0), part(1.0)], 1.0, "x");
        assert_eq!(svg.matches("class=\"a\"").count(), 1);
    }

    #[test]
    fn a_histogram_shows_every_bucket_that_is_not_empty() {
        let mut latencies = LatencyHistogram::default();
        latencies.record(1_000, true);
        (0..10_000).for_each(|_| latencies.record(100_000, true));
        let range = common_range([&latencies].into_iter()).unwrap();
        assert_eq!(histogram(&latencies, range, "x").matches("class=\"column\"").count(), 2);
        assert_eq!(common_range([&LatencyHistogram::default()].into_iter()), None);
    }

    #[test]
    fn a_curve_reaches_the_top_at_its_largest_value() {
        let svg = curves(&[("a", vec![0.0, 2.0]), ("b", vec![1.0])], 2.0, "x");
        assert!(svg.contains("class=\"a\" d=\"M20.0 96.0L60.0 4.0\""), "{svg}");
        assert_eq!(svg.matches("<rect class=\"a\"").count(), 2);
    }

    #[test]
    fn units() {
        assert_eq!(
            (time(999.0), time(1_500.0), time(2.5e9)),
            ("999 ns".into(), "1.5 µs".into(), "2.5 s".into())
        );
        assert_eq!((bytes(512.0), bytes(2048.0)), ("512 B".into(), "2.0 KiB".into()));
        assert_eq!(
            (count(0.25), count(3.0), count(2e6)),
            ("0.25".into(), "3".into(), "2000 k".into())
        );
    }
}
