//! The choice between looking for answers and sleeping until an interrupt.
//!
//! A look finds an answer as soon as it is there, and takes a processor. A sleep gives the processor away, and costs some
//! microseconds to wake up. So a wait begins with a look where answers usually come soon. A time that was slept includes
//! waking up, and says too little about a controller that has become fast: now and then a wait looks all the same, and
//! goes on with it as long as that succeeds.

use std::time::Duration;

/// Below this time of waiting, a look is cheaper than sleeping.
const LOOK: Duration = Duration::from_micros(20);

/// The longest wait that is learned from: a single late answer does not end looking.
const LONGEST: Duration = Duration::from_micros(80);

/// Waits without a look after which one is tried.
const TRIAL: u32 = 32;

/// The times of answers so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct PollingPolicy {
    /// A moving average of the time that an answer was waited for.
    usual: Duration,
    /// Waits without a look since the last one.
    blind: u32,
}

impl PollingPolicy {
    /// Knows nothing: the first wait looks.
    pub(super) fn new() -> Self {
        PollingPolicy { usual: LOOK, blind: TRIAL }
    }

    /// The time for a look at the beginning of a wait.
    pub(super) fn look(&self) -> Duration {
        if self.usual < LOOK {
            2 * self.usual
        } else if self.blind >= TRIAL {
            LOOK
        } else {
            Duration::ZERO
        }
    }

    /// An answer was found by a look, after this time. It may be longer than the look: the processor had other work.
    pub(super) fn seen(&mut self, after: Duration) {
        self.blind = if after <= self.look() { TRIAL } else { 0 };
        self.learn(after);
    }

    /// A look, if there was one, has found nothing: the wait goes on with a sleep.
    pub(super) fn sleeps(&mut self) {
        self.blind = if self.look().is_zero() { self.blind + 1 } else { 0 };
    }

    /// An answer came within a sleep, after this time of waiting in all.
    pub(super) fn slept(&mut self, after: Duration) {
        self.learn(after);
    }

    fn learn(&mut self, after: Duration) {
        self.usual = (self.usual * 7 + after.min(LONGEST)) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_micros(5);
    const LATE: Duration = Duration::from_micros(500);
    /// An answer that comes soon is found so late by a sleep.
    const WOKEN: Duration = Duration::from_micros(40);

    /// Waits `count` times for answers that come after `time`, and returns how many of them slept.
    fn sleeps(patience: &mut PollingPolicy, time: Duration, count: u32) -> u32 {
        let mut sleeps = 0;
        for _ in 0..count {
            if time <= patience.look() {
                patience.seen(time);
            } else {
                patience.sleeps();
                patience.slept(time.max(WOKEN));
                sleeps += 1;
            }
        }
        sleeps
    }

    #[test]
    fn a_controller_that_becomes_fast_is_looked_at_although_waking_up_takes_longer_than_a_look() {
        let mut patience = PollingPolicy::new();
        assert_eq!(sleeps(&mut patience, LATE, 1000), 1000);
        assert!(patience.usual > LOOK && WOKEN > LOOK);
        let before = sleeps(&mut patience, SOON, 1000);
        assert!(before <= TRIAL, "{before}");
        assert_eq!(sleeps(&mut patience, SOON, 1000), 0);
    }

    #[test]
    fn one_wait_of_many_looks_where_answers_come_late() {
        let mut patience = PollingPolicy::new();
        sleeps(&mut patience, LATE, 1000);
        let mut looks = 0;
        for _ in 0..100 * (TRIAL + 1) {
            looks += u32::from(!patience.look().is_zero());
            sleeps(&mut patience, LATE, 1);
        }
        assert_eq!(looks, 100);
    }

    /// A look that loses its processor finds the answer late, although it came soon.
    #[test]
    fn where_processors_are_short_few_waits_look() {
        let mut patience = PollingPolicy::new();
        let mut looks = 0;
        for _ in 0..100 * (TRIAL + 1) {
            if patience.look().is_zero() {
                patience.sleeps();
                patience.slept(WOKEN);
            } else {
                patience.seen(Duration::from_millis(4));
                looks += 1;
            }
        }
        assert_eq!(looks, 100);
    }

    #[test]
    fn one_late_answer_does_not_end_looking_and_several_do() {
        let mut patience = PollingPolicy::new();
        sleeps(&mut patience, SOON, 100);
        assert_eq!(sleeps(&mut patience, Duration::from_secs(1), 1), 1);
        assert_eq!(sleeps(&mut patience, SOON, 10), 0);
        sleeps(&mut patience, LATE, 10);
        assert_eq!(patience.look(), Duration::ZERO);
    }
}
