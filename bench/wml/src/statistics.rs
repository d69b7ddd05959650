//! Counts and latencies. One thread writes, others may read at any time without locks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Buckets per power of two, which gives latencies to about 3 %.
const SUB: u64 = 32;
const SUB_BITS: u32 = SUB.trailing_zeros();
/// Latencies from 2^40 ns (18 minutes) on share the last bucket.
const LAST_POWER: u32 = 40;
const BUCKETS: usize = ((LAST_POWER - SUB_BITS + 1) as usize) * SUB as usize + 1;

fn bucket_of(ns: u64) -> usize {
    if ns < SUB {
        return ns as usize;
    }
    let power = ns.ilog2();
    if power >= LAST_POWER {
        return BUCKETS - 1;
    }
    let within = (ns >> (power - SUB_BITS)) & (SUB - 1);
    ((power - SUB_BITS + 1) as usize) * SUB as usize + within as usize
}

/// The lower bound of a bucket, and its width in ns.
fn bounds(bucket: usize) -> (u64, u64) {
    let (row, within) = (bucket as u64 / SUB, bucket as u64 % SUB);
    if row == 0 {
        return (within, 1);
    }
    let shift = (row - 1) as u32;
    ((SUB + within) << shift, 1 << shift)
}

/// The measurements of one thread for one flowop.
pub(crate) struct FlowopCell {
    count: AtomicU64,
    bytes: AtomicU64,
    sum_ns: AtomicU64,
    min_ns: AtomicU64,
    max_ns: AtomicU64,
    buckets: Box<[AtomicU64]>,
}

/// Adds without a locked instruction, because only one thread writes.
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

impl FlowopCell {
    pub fn new() -> Self {
        FlowopCell {
            count: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            min_ns: AtomicU64::new(u64::MAX),
            max_ns: AtomicU64::new(0),
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    #[inline]
    pub fn record(&self, ns: u64, bytes: u64) {
        add(&self.count, 1);
        add(&self.bytes, bytes);
        add(&self.sum_ns, ns);
        if ns < self.min_ns.load(Relaxed) {
            self.min_ns.store(ns, Relaxed);
        }
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
        add(&self.buckets[bucket_of(ns)], 1);
    }

    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Adds the measurements to `sum`.
    pub fn add_to(&self, sum: &mut FlowopHistogram) {
        sum.count += self.count();
        sum.bytes += self.bytes();
        sum.sum_ns += self.sum_ns.load(Relaxed);
        sum.min_ns = sum.min_ns.min(self.min_ns.load(Relaxed));
        sum.max_ns = sum.max_ns.max(self.max_ns.load(Relaxed));
        for (sum, bucket) in sum.buckets.iter_mut().zip(&self.buckets) {
            *sum += bucket.load(Relaxed);
        }
    }
}

/// Latencies of many operations, with 32 buckets per power of two.
#[derive(Clone, Debug)]
pub struct FlowopHistogram {
    /// Number of operations.
    pub count: u64,
    /// Bytes of data transferred.
    pub bytes: u64,
    /// Sum of all latencies, in ns.
    pub sum_ns: u64,
    min_ns: u64,
    max_ns: u64,
    buckets: Vec<u64>,
}

impl Default for FlowopHistogram {
    fn default() -> Self {
        let buckets = vec![0; BUCKETS];
        FlowopHistogram { count: 0, bytes: 0, sum_ns: 0, min_ns: u64::MAX, max_ns: 0, buckets }
    }
}

impl FlowopHistogram {
    /// Adds another histogram.
    pub fn merge(&mut self, other: &FlowopHistogram) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.sum_ns += other.sum_ns;
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
    }

    /// The operations after `earlier`. Minimum and maximum are then bounds of buckets.
    pub fn delta_since(&self, earlier: &FlowopHistogram) -> FlowopHistogram {
        let mut span = FlowopHistogram {
            count: self.count.saturating_sub(earlier.count),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
            ..FlowopHistogram::default()
        };
        let pairs = self.buckets.iter().zip(&earlier.buckets);
        for (out, (now, then)) in span.buckets.iter_mut().zip(pairs) {
            *out = now.saturating_sub(*then);
        }
        if let Some(first) = span.buckets.iter().position(|&count| count > 0) {
            span.min_ns = bounds(first).0.max(self.min_ns);
        }
        if let Some(last) = span.buckets.iter().rposition(|&count| count > 0) {
            let (low, wide) = bounds(last);
            span.max_ns = (low + wide - 1).min(self.max_ns);
        }
        span
    }

    /// The mean in ns; 0 if there is none.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.count).unwrap_or(0)
    }

    /// The minimum in ns; 0 if there is none.
    pub fn min_ns(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min_ns }
    }

    /// The maximum in ns; 0 if there is none.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The percentile `p` (0 to 1) in ns, to about 3 %.
    pub fn percentile_ns(&self, p: f64) -> u64 {
        let wanted = (p.clamp(0.0, 1.0) * self.count as f64).ceil().max(1.0) as u64;
        let mut before = 0;
        for (bucket, &count) in self.buckets.iter().enumerate() {
            before += count;
            if before >= wanted {
                let (low, wide) = bounds(bucket);
                return (low + wide / 2).clamp(self.min_ns(), self.max_ns);
            }
        }
        self.max_ns
    }

    /// Counts for each power of two of ns, without empty ones: the lower bound, and the number of
    /// latencies.
    pub fn powers(&self) -> Vec<(u64, u64)> {
        let mut found: Vec<(u64, u64)> = Vec::new();
        for (bucket, &count) in self.buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
            let power = 1u64 << bounds(bucket).0.max(1).ilog2();
            match found.last_mut() {
                Some(last) if last.0 == power => last.1 += count,
                _ => found.push((power, count)),
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_is_in_the_bucket_whose_bounds_hold_it() {
        let latencies = (0..5000).chain((5..40).flat_map(|p| [(1 << p) - 1, 1 << p, 3 << (p - 1)]));
        for ns in latencies {
            let (low, wide) = bounds(bucket_of(ns));
            assert!(low <= ns && ns < low + wide, "{ns}: {low} + {wide}");
            assert!(wide <= 1 + ns / SUB, "{ns}: {wide}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket_of((1 << LAST_POWER) - 1), BUCKETS - 2);
    }

    #[test]
    fn percentiles_are_right_to_three_per_cent() {
        let (cell, mut sum) = (FlowopCell::new(), FlowopHistogram::default());
        for ns in 1..=100_000 {
            cell.record(ns, 2);
        }
        cell.add_to(&mut sum);
        assert_eq!((sum.count, sum.bytes, sum.mean_ns()), (100_000, 200_000, 50_000));
        assert_eq!((sum.min_ns(), sum.max_ns()), (1, 100_000));
        for (p, exact) in [(0.01, 1e3), (0.5, 50e3), (0.99, 99e3), (1.0, 100e3)] {
            let found = sum.percentile_ns(p) as f64;
            assert!((found / exact - 1.0).abs() < 0.032, "{p}: {found}");
        }
        assert_eq!(sum.powers().iter().map(|(_, count)| count).sum::<u64>(), 100_000);
    }

    #[test]
    fn a_span_contains_only_later_operations() {
        let (cell, mut before, mut after) =
            (FlowopCell::new(), FlowopHistogram::default(), FlowopHistogram::default());
        cell.record(10, 1);
        cell.add_to(&mut before);
        cell.record(1000, 4);
        cell.add_to(&mut after);
        let span = after.delta_since(&before);
        assert_eq!((span.count, span.bytes, span.mean_ns()), (1, 4, 1000));
        assert!(span.min_ns() <= 1000 && span.min_ns() > 900);
        assert_eq!(before.delta_since(&before).percentile_ns(0.5), 0);
    }
}
