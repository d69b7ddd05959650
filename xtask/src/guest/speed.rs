//! The figures of the guest: medians, and how the driver compares with the kernel's driver.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::median::median;

/// Numbers by what was measured.
type GuestFigures = BTreeMap<String, Vec<f64>>;

/// Prints what the job "speed" reported.
pub fn report(values: &[(String, String)]) {
    print!("{}", text(values));
}

fn text(values: &[(String, String)]) -> String {
    let (mut rates, mut cpu, mut small) =
        (GuestFigures::new(), GuestFigures::new(), GuestFigures::new());
    for (name, text) in values {
        let words: Vec<&str> = text.split(' ').collect();
        match (name.as_str(), &words[..]) {
            ("reads", [depth, driver, rate, time]) => {
                let key = format!("{driver} {depth}");
                add(&mut rates, &key, rate);
                add(&mut cpu, &key, time);
            }
            ("small", [kind, operation, time]) => {
                add(&mut small, &format!("{operation} {kind}"), time);
            }
            _ => {}
        }
    }
    let mut text = String::new();
    let of =
        |numbers: &GuestFigures, key: &str| middle(numbers.get(key).map_or(&[], Vec::as_slice));
    for depth in ["1", "32"] {
        let [driver, kernel] = ["driver", "kernel"].map(|who| format!("{who} {depth}"));
        let (ours, theirs) = (of(&rates, &driver), of(&rates, &kernel));
        let (our_cpu, their_cpu) = (of(&cpu, &driver), of(&cpu, &kernel));
        let _ = writeln!(
            text,
            "reads of 4 KiB at depth {depth}: driver {ours:.0}/s, {our_cpu:.0} ns of CPU; kernel {theirs:.0}/s, \
             {their_cpu:.0} ns; ratio of rates {:.2}",
            ours / theirs,
        );
    }
    for (key, all) in &small {
        let _ = writeln!(text, "{key}: {:.3} ms", middle(all));
    }
    text
}

fn add(numbers: &mut GuestFigures, key: &str, text: &str) {
    if let Ok(number) = text.parse() {
        numbers.entry(key.to_owned()).or_default().push(number);
    }
}

/// The median, or what is printed as no number.
fn middle(numbers: &[f64]) -> f64 {
    median(numbers).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_medians_and_ratios() {
        let values = [
            ("reads", "32 driver 300 10"),
            ("reads", "32 driver 100 30"),
            ("reads", "32 driver 200 20"),
            ("reads", "32 kernel 90 40"),
            ("reads", "32 kernel 110 50"),
            ("small", "ext4 fsync 2.5"),
            ("small", "ext4 fsync 1.5"),
            ("durable", "7"),
        ];
        let values: Vec<(String, String)> =
            values.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec();
        let text = text(&values);
        let line =
            "at depth 32: driver 200/s, 20 ns of CPU; kernel 100/s, 45 ns; ratio of rates 2.00";
        assert!(text.contains(line), "{text}");
        assert!(text.ends_with("fsync ext4: 2.000 ms\n"), "{text}");
    }
}
