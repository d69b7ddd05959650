//! Latency histograms with a bucket for every power of two.

use serde::{Deserialize, Serialize};

/// Number of buckets of a histogram.
pub const BUCKETS: usize = 32;

/// The latencies of one operation. Bucket N counts latencies of at least 2^(N+1) ns and less than
/// 2^(N+2) ns. Shorter ones are in bucket 0 and longer ones in bucket 31, which begins at 4.3 s
/// (*To FUSE or Not to FUSE*, FAST '17, section 3.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyHistogram {
    /// Number of latencies in each bucket.
    pub buckets: [u64; BUCKETS],
    /// Number of latencies.
    pub count: u64,
    /// Number of operations that failed.
    pub errors: u64,
    /// Sum of all latencies in nanoseconds.
    pub sum_ns: u64,
    /// The shortest latency in nanoseconds; 0 if there is none.
    pub min_ns: u64,
    /// The longest latency in nanoseconds; 0 if there is none.
    pub max_ns: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        LatencyHistogram {
            buckets: [0; BUCKETS],
            count: 0,
            errors: 0,
            sum_ns: 0,
            min_ns: 0,
            max_ns: 0,
        }
    }
}

impl LatencyHistogram {
    /// The bucket of a latency of `ns` nanoseconds.
    #[inline]
    pub const fn bucket_of(ns: u64) -> usize {
        let log2 = (ns | 1).ilog2() as usize;
        let bucket = log2.saturating_sub(1);
        if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
    }

    /// The shortest latency of `bucket`, in nanoseconds.
    pub const fn lower_ns(bucket: usize) -> u64 {
        if bucket == 0 { 0 } else { 1 << (bucket + 1) }
    }

    /// The upper bound of `bucket`, in nanoseconds, exclusive. The last bucket has none.
    pub const fn upper_ns(bucket: usize) -> u64 {
        if bucket + 1 < BUCKETS { 1 << (bucket + 2) } else { u64::MAX }
    }

    /// Counts one latency. `ok` is true if the operation succeeded.
    pub fn record(&mut self, ns: u64, ok: bool) {
        self.min_ns = if self.count == 0 { ns } else { self.min_ns.min(ns) };
        self.max_ns = self.max_ns.max(ns);
        self.buckets[Self::bucket_of(ns)] += 1;
        self.count += 1;
        self.errors += u64::from(!ok);
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Adds all latencies of `other`.
    pub fn merge(&mut self, other: &LatencyHistogram) {
        if other.count == 0 {
            return;
        }
        self.min_ns = if self.count == 0 { other.min_ns } else { self.min_ns.min(other.min_ns) };
        self.max_ns = self.max_ns.max(other.max_ns);
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
        self.errors += other.errors;
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// The mean in nanoseconds; 0 if there is no latency.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.count).unwrap_or(0)
    }

    /// Estimates the percentile `p` (0 to 1) in nanoseconds, assuming that the latencies of a
    /// bucket are spread evenly. The result is between the shortest and the longest latency.
    pub fn percentile_ns(&self, p: f64) -> u64 {
        let wanted = p.clamp(0.0, 1.0) * self.count as f64;
        let mut before = 0.0;
        for (bucket, &count) in self.buckets.iter().enumerate() {
            let share = count as f64;
            if count > 0 && before + share >= wanted {
                let lower = Self::lower_ns(bucket).max(self.min_ns) as f64;
                let upper = Self::upper_ns(bucket).min(self.max_ns) as f64;
                let within = (upper - lower).max(0.0) * (wanted - before) / share;
                return ((lower + within) as u64).clamp(self.min_ns, self.max_ns);
            }
            before += share;
        }
        self.max_ns
    }

    /// The latencies since `earlier`, a histogram of the same operation. The shortest and longest
    /// of that span are unknown; the bounds of the buckets that grew are used instead.
    pub fn delta_since(&self, earlier: &LatencyHistogram) -> LatencyHistogram {
        let mut span = LatencyHistogram {
            count: self.count.saturating_sub(earlier.count),
            errors: self.errors.saturating_sub(earlier.errors),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
            ..LatencyHistogram::default()
        };
        for (bucket, out) in span.buckets.iter_mut().enumerate() {
            *out = self.buckets[bucket].saturating_sub(earlier.buckets[bucket]);
        }
        if let Some(first) = span.buckets.iter().position(|&count| count > 0) {
            span.min_ns = Self::lower_ns(first).max(self.min_ns);
        }
        if let Some(last) = span.buckets.iter().rposition(|&count| count > 0) {
            span.max_ns = Self::upper_ns(last).min(self.max_ns);
        }
        span
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_n_holds_two_to_n_plus_one_up_to_two_to_n_plus_two() {
        for bucket in 1..BUCKETS - 1 {
            assert_eq!(LatencyHistogram::bucket_of(1 << (bucket + 1)), bucket);
            assert_eq!(LatencyHistogram::bucket_of((1 << (bucket + 2)) - 1), bucket);
            assert_eq!(LatencyHistogram::lower_ns(bucket), LatencyHistogram::upper_ns(bucket - 1));
        }
        for low in 0..4 {
            assert_eq!(LatencyHistogram::bucket_of(low), 0);
        }
        assert_eq!(LatencyHistogram::bucket_of(u64::MAX), 31);
        assert_eq!(LatencyHistogram::bucket_of(1 << 33), 31);
    }

    #[test]
    fn percentiles_lie_in_the_bucket_that_holds_them() {
        let mut histogram = LatencyHistogram::default();
        assert_eq!((histogram.percentile_ns(0.5), histogram.mean_ns()), (0, 0));
        for ns in 1..=10_000 {
            histogram.record(ns, true);
        }
        assert_eq!(histogram.mean_ns(), 5_000);
        // The latencies are spread evenly, as interpolation assumes.
        for (p, exact) in [(0.5, 5_000), (0.9, 9_000), (0.99, 9_900), (0.01, 100)] {
            let estimate = histogram.percentile_ns(p);
            assert!(estimate.abs_diff(exact) <= exact / 50, "p{p}: {estimate}");
        }
        assert_eq!(histogram.percentile_ns(1.0), 10_000);
        assert_eq!(histogram.percentile_ns(0.0), 1);
    }

    #[test]
    fn one_latency_is_all_of_its_percentiles() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(12_345, false);
        for p in [0.0, 0.5, 0.99, 1.0] {
            assert_eq!(histogram.percentile_ns(p), 12_345);
        }
        assert_eq!((histogram.errors, histogram.min_ns, histogram.max_ns), (1, 12_345, 12_345));
    }

    #[test]
    fn merge_and_since_are_inverse_except_for_the_extremes() {
        let (mut first, mut second) = (LatencyHistogram::default(), LatencyHistogram::default());
        first.record(5, true);
        first.record(700, true);
        second.record(3_000, false);
        let mut both = first.clone();
        both.merge(&second);
        assert_eq!((both.min_ns, both.max_ns, both.count, both.errors), (5, 3_000, 3, 1));
        let span = both.delta_since(&first);
        assert_eq!((span.buckets, span.count, span.sum_ns), (second.buckets, 1, 3_000));
        assert_eq!((span.min_ns, span.max_ns), (2_048, 3_000));
        assert_eq!(both.delta_since(&both), LatencyHistogram::default());
    }
}
