//! Pressure stall information: whether tasks wait for memory (Documentation/accounting/psi.rst).

use std::fs;
use std::path::Path;

/// From this share of time on, in percent over the last 10 s, in which some task waited for memory,
/// caches are released.
const HIGH_PERCENT: f64 = 10.0;

/// Reads `file`, which has the format of `/proc/pressure/memory`. False where it cannot be read, as
/// on kernels without psi.
pub(super) fn is_high(file: &Path) -> bool {
    fs::read_to_string(file).is_ok_and(|text| parse_some_avg10(&text) >= HIGH_PERCENT)
}

/// The value of `avg10` in the line `some`, in percent; 0 where it is not there.
fn parse_some_avg10(text: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix("some "));
    let fields = line.unwrap_or_default().split_ascii_whitespace();
    let value = fields.filter_map(|field| field.strip_prefix("avg10=")).next();
    value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pressure_is_the_share_of_time_in_which_some_task_waited() {
        let text = "some avg10=12.50 avg60=3.00 avg300=0.00 total=1\n\
                    full avg10=99.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(parse_some_avg10(text), 12.5);
        for other in ["", "full avg10=99.00", "some avg60=99", "some avg10=x"] {
            assert_eq!(parse_some_avg10(other), 0.0, "{other}");
        }
        assert!(!is_high(Path::new("/nonexistent")));
    }
}
