//! The number of operations of each class that may be in flight, by the latency of small reads.

use std::time::Duration;

use super::class::{CLASSES, OperationClass};

/// Completions between two adjustments.
const ROUND: u32 = 64;

/// The factor by which small reads may be slower than the fastest recent one.
const TOLERANCE: f64 = 8.0;

/// The least cap.
const LEAST: f64 = 4.0;

/// The factor by which all other caps shrink at a time.
const SHRINK: f64 = 0.8;

/// The growth of the remembered fastest latency, each round.
const FADE: f64 = 1.01;

/// The caps of all classes. While small reads are slow, the other caps shrink by a factor;
/// otherwise all grow by one: additive increase and multiplicative decrease, as in TCP.
#[derive(Debug)]
pub(super) struct ClassCaps {
    caps: [f64; CLASSES],
    most: f64,
    in_flight: [u32; CLASSES],
    /// The fastest recent small read, in seconds.
    fastest: f64,
    /// Sum and number of latencies of small reads in this round.
    reads: (f64, u32),
    completions: u32,
    /// The caps follow the latency.
    adjusts: bool,
}

impl ClassCaps {
    pub(super) fn new(most: usize, adjusts: bool) -> Self {
        let most = most as f64;
        ClassCaps {
            caps: [most; CLASSES],
            most,
            in_flight: [0; CLASSES],
            fastest: f64::INFINITY,
            reads: (0.0, 0),
            completions: 0,
            adjusts,
        }
    }

    pub(super) fn allow(&self, class: OperationClass) -> bool {
        f64::from(self.in_flight[class.index()]) < self.caps[class.index()]
    }

    pub(super) fn record_begin(&mut self, class: OperationClass) {
        self.in_flight[class.index()] += 1;
    }

    pub(super) fn record_completion(&mut self, class: OperationClass, latency: Duration) {
        self.in_flight[class.index()] -= 1;
        if class == OperationClass::SmallRead {
            let latency = latency.as_secs_f64();
            self.fastest = self.fastest.min(latency);
            self.reads = (self.reads.0 + latency, self.reads.1 + 1);
        }
        self.completions += 1;
        if self.adjusts && self.completions == ROUND {
            self.adjust();
        }
    }

    fn adjust(&mut self) {
        self.completions = 0;
        let (sum, count) = std::mem::take(&mut self.reads);
        let slow = count > 0 && sum / f64::from(count) > self.fastest * TOLERANCE;
        self.fastest *= FADE;
        for (class, cap) in OperationClass::ALL.into_iter().zip(&mut self.caps) {
            *cap = match slow && class != OperationClass::SmallRead {
                true => (*cap * SHRINK).max(LEAST),
                false => (*cap + 1.0).min(self.most),
            };
        }
    }

    /// The cap of a class.
    pub(super) fn cap_of(&self, class: OperationClass) -> usize {
        self.caps[class.index()] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(caps: &mut ClassCaps, reads: u64) {
        for _ in 0..ROUND {
            caps.record_begin(OperationClass::SmallRead);
            caps.record_completion(OperationClass::SmallRead, Duration::from_micros(reads));
        }
    }

    #[test]
    fn writes_yield_while_small_reads_are_slow_and_come_back_afterwards() {
        let mut caps = ClassCaps::new(256, true);
        round(&mut caps, 80);
        assert_eq!(caps.cap_of(OperationClass::LargeWrite), 256);
        (0..100).for_each(|_| round(&mut caps, 2000));
        assert_eq!(caps.cap_of(OperationClass::LargeWrite), 4);
        assert_eq!(caps.cap_of(OperationClass::SmallRead), 256);
        (0..300).for_each(|_| round(&mut caps, 100));
        assert_eq!(caps.cap_of(OperationClass::LargeWrite), 256);
    }

    #[test]
    fn a_class_has_no_more_in_flight_than_its_cap() {
        let mut caps = ClassCaps::new(2, false);
        caps.record_begin(OperationClass::SmallWrite);
        assert!(caps.allow(OperationClass::SmallWrite));
        caps.record_begin(OperationClass::SmallWrite);
        assert!(!caps.allow(OperationClass::SmallWrite) && caps.allow(OperationClass::LargeRead));
        caps.record_completion(OperationClass::SmallWrite, Duration::ZERO);
        assert!(caps.allow(OperationClass::SmallWrite));
    }
}
