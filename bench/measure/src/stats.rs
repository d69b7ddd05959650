//! Medians, spreads and verdicts.

use serde::{Deserialize, Serialize};

/// A median and its quartiles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct QuartileSummary {
    /// The median.
    pub median: f64,
    /// The lower quartile.
    pub low: f64,
    /// The upper quartile.
    pub high: f64,
}

impl QuartileSummary {
    /// Summarises values. Returns `None` if there is none, or one of them is not finite.
    pub fn from_values(values: &[f64]) -> Option<Self> {
        if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share| quantile(&sorted, share);
        Some(Self { median: at(0.5), low: at(0.25), high: at(0.75) })
    }

    /// Half the interquartile range, relative to the median.
    pub fn spread(&self) -> f64 {
        (self.high - self.low) / 2.0 / self.median
    }
}

/// A quantile of sorted values, interpolated between neighbours.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor())
}

/// Ratios of values measured in the same round. A disturbance of a round slows both values, so the
/// ratio cancels it.
pub fn paired_ratios(ours: &[Option<f64>], theirs: &[Option<f64>]) -> Vec<f64> {
    let pairs = ours.iter().zip(theirs);
    pairs
        .filter_map(|pair| if let (Some(a), Some(b)) = pair { Some(a / b) } else { None })
        .collect()
}

/// The comparison of our result with the required ratio to the better peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerVerdict {
    /// At or above the required ratio.
    Met,
    /// Below, but the upper quartile of the rounds reaches it: more rounds are needed to decide.
    WithinNoise,
    /// Below.
    Below,
}

impl PeerVerdict {
    /// Judges the ratio of our result to the better peer.
    pub fn judge(ratio: QuartileSummary, required: f64) -> Self {
        if ratio.median >= required {
            Self::Met
        } else if ratio.high >= required {
            Self::WithinNoise
        } else {
            Self::Below
        }
    }

    /// The verdict as a word, for tables.
    pub fn word(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::WithinNoise => "noise",
            Self::Below => "BELOW",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_quartiles() {
        let summary = QuartileSummary::from_values(&[5.0, 1.0, 3.0, 2.0, 4.0]).unwrap();
        assert_eq!((summary.low, summary.median, summary.high), (2.0, 3.0, 4.0));
        assert_eq!(QuartileSummary::from_values(&[1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(QuartileSummary::from_values(&[7.0]).unwrap().spread(), 0.0);
        assert_eq!(QuartileSummary::from_values(&[]), None);
        assert_eq!(QuartileSummary::from_values(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn ratios_need_both_values_of_a_round() {
        let ours = [Some(2.0), None, Some(9.0)];
        let theirs = [Some(1.0), Some(5.0), Some(3.0)];
        assert_eq!(paired_ratios(&ours, &theirs), [2.0, 3.0]);
    }

    #[test]
    fn verdicts() {
        let ratio = |low, median, high| QuartileSummary { median, low, high };
        assert_eq!(PeerVerdict::judge(ratio(0.9, 1.0, 1.1), 1.0), PeerVerdict::Met);
        assert_eq!(PeerVerdict::judge(ratio(0.9, 0.98, 1.1), 1.0), PeerVerdict::WithinNoise);
        assert_eq!(PeerVerdict::judge(ratio(0.9, 0.95, 0.99), 1.0), PeerVerdict::Below);
        assert_eq!(PeerVerdict::judge(ratio(1.3, 1.4, 1.45), 1.5), PeerVerdict::Below);
    }
}
