//! The clock of all measurements: the processor's time-stamp counter if it is invariant, otherwise
//! `CLOCK_MONOTONIC`.
//!
//! Measured on an AMD EPYC guest (Linux 6.18): two readings and their difference cost 19 ns by the
//! counter, and 49 ns by `std::time::Instant`. Calibrating the counter takes 1 to 2 milliseconds
//! once per process, which is longer than many programs run. The system's clock is therefore used
//! until it has cost as much, or until a long-running process calls [`calibrate`]. The error of the
//! rate is about ten parts in a million.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, OnceLock};
use std::time::Instant;

/// The counter, its rate, and one moment by both clocks.
struct TimestampCounter {
    clock: quanta::Clock,
    raw: u64,
    system_ns: u64,
}

static COUNTER: OnceLock<TimestampCounter> = OnceLock::new();

/// The origin of times by the system's clock.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Number of readings of the system's clock so far.
static READINGS: AtomicU32 = AtomicU32::new(0);

/// After this number of readings of the system's clock, each of which costs 15 ns more, calibration
/// pays off.
const WORTH: u32 = 100_000;

/// Marks a [`ClockMoment`] by the system's clock, in nanoseconds. The counter would need a century
/// to reach this bit.
const SYSTEM: u64 = 1 << 63;

/// A moment, as the start of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockMoment(u64);

/// The current moment.
#[inline]
pub fn now() -> ClockMoment {
    match COUNTER.get() {
        Some(counter) => ClockMoment(counter.clock.raw()),
        None => read_system_clock(),
    }
}

#[cold]
fn read_system_clock() -> ClockMoment {
    // Exactly one thread gets this number; the others need not wait for it.
    if READINGS.fetch_add(1, Ordering::Relaxed) == WORTH {
        calibrate();
    }
    ClockMoment(system_ns() | SYSTEM)
}

fn system_ns() -> u64 {
    BEGAN.elapsed().as_nanos() as u64
}

impl ClockMoment {
    /// Nanoseconds from this moment to now.
    #[inline]
    pub fn elapsed_ns(self) -> u64 {
        self.ns_until(now())
    }

    /// Nanoseconds from this moment to `end`, or 0 if `end` is earlier.
    #[inline]
    pub fn ns_until(self, end: ClockMoment) -> u64 {
        match COUNTER.get() {
            Some(counter) if (self.0 | end.0) & SYSTEM == 0 => {
                counter.clock.delta_as_nanos(self.0, end.0)
            }
            counter => (end.system_ns(counter) - self.system_ns(counter)).max(0) as u64,
        }
    }

    /// The moment by the system's clock. Signed, because the counter may be slightly behind.
    #[cold]
    fn system_ns(self, counter: Option<&TimestampCounter>) -> i64 {
        match counter {
            Some(counter) if self.0 & SYSTEM == 0 => {
                let after = counter.clock.delta_as_nanos(counter.raw, self.0) as i64;
                let before = counter.clock.delta_as_nanos(self.0, counter.raw) as i64;
                counter.system_ns as i64 + after - before
            }
            _ => (self.0 & !SYSTEM) as i64,
        }
    }
}

/// Calibrates the counter now, so that no measurement waits for it. For long-running processes.
pub fn calibrate() {
    COUNTER.get_or_init(|| {
        let clock = quanta::Clock::new();
        TimestampCounter { raw: clock.raw(), system_ns: system_ns(), clock }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Compares moments by the system's clock with moments by the counter.
    #[test]
    fn moments_of_both_clocks_can_be_compared() {
        let before = ClockMoment(system_ns() | SYSTEM);
        calibrate();
        let (middle, reference) = (now(), Instant::now());
        assert_eq!(middle.0 & SYSTEM, 0, "the counter is read once its rate is known");
        std::thread::sleep(Duration::from_millis(20));
        let after = ClockMoment(system_ns() | SYSTEM);
        let slept = reference.elapsed().as_nanos() as u64;
        assert!(middle.ns_until(after).abs_diff(slept) < slept / 100 + 20_000_000);
        let sum = before.ns_until(middle) + middle.ns_until(after);
        assert!(before.ns_until(after).abs_diff(sum) < 1_000_000);
        assert_eq!((middle.ns_until(before), after.ns_until(middle)), (0, 0));
    }

    #[test]
    fn the_clock_agrees_with_the_system_clock_within_a_percent() {
        let (start, reference) = (now(), Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        let (ours, theirs) = (start.elapsed_ns(), reference.elapsed().as_nanos() as u64);
        // A thread that is preempted between the two readings makes them differ more, so the bound
        // is on the rate, with a wide allowance for preemption.
        assert!(ours.abs_diff(theirs) < theirs / 100 + 20_000_000, "{ours} and {theirs}");
    }

    #[test]
    fn time_never_runs_backwards() {
        calibrate();
        let later = now();
        let earlier = ClockMoment(later.0.saturating_sub(1_000_000));
        assert_eq!(later.ns_until(earlier), 0);
    }
}
