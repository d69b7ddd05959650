//! The choice between polling for answers and sleeping until an interrupt.
//!
//! Polling finds an answer as soon as it is there, and takes a processor. A sleep gives the
//! processor away, and waking up costs some microseconds. So a wait begins with polling if answers
//! usually come soon. The time of a sleep includes waking up, and does not show if a controller has
//! become fast: now and then a wait polls nevertheless, and following waits do the same as long as
//! that succeeds.

use std::time::Duration;

/// The waiting time below which polling is cheaper than sleeping.
const LOOK: Duration = Duration::from_micros(20);

/// The longest waiting time that is learned: a single late answer does not end polling.
const LONGEST: Duration = Duration::from_micros(80);

/// The number of waits without polling after which polling is tried.
const TRIAL: u32 = 32;

/// The times of answers so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct PollingPolicy {
    /// A moving average of the waiting times for answers.
    usual: Duration,
    /// Waits without polling since the last polling.
    blind: u32,
}

impl PollingPolicy {
    /// A policy without knowledge: the first wait polls.
    pub(super) fn new() -> Self {
        PollingPolicy { usual: LOOK, blind: TRIAL }
    }

    /// The time for polling at the beginning of a wait.
    pub(super) fn polling_time(&self) -> Duration {
        if self.usual < LOOK {
            2 * self.usual
        } else if self.blind >= TRIAL {
            LOOK
        } else {
            Duration::ZERO
        }
    }

    /// Records that polling found an answer after this time. It may be longer than the time for
    /// polling: the processor had other work.
    pub(super) fn record_polled(&mut self, after: Duration) {
        self.blind = if after <= self.polling_time() { TRIAL } else { 0 };
        self.learn(after);
    }

    /// Records that polling, if there was any, has found nothing: the wait continues with a sleep.
    pub(super) fn record_wait(&mut self) {
        self.blind = if self.polling_time().is_zero() { self.blind + 1 } else { 0 };
    }

    /// Records that an answer came within a sleep, after this total waiting time.
    pub(super) fn record_sleep(&mut self, after: Duration) {
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
    /// The time after which a sleep finds an answer that came soon.
    const WOKEN: Duration = Duration::from_micros(40);

    /// Waits `count` times for answers that come after `time`, and returns how many of them slept.
    fn count_sleeps(patience: &mut PollingPolicy, time: Duration, count: u32) -> u32 {
        let mut sleeps = 0;
        for _ in 0..count {
            if time <= patience.polling_time() {
                patience.record_polled(time);
            } else {
                patience.record_wait();
                patience.record_sleep(time.max(WOKEN));
                sleeps += 1;
            }
        }
        sleeps
    }

    #[test]
    fn a_controller_that_becomes_fast_is_looked_at_although_waking_up_takes_longer_than_a_look() {
        let mut patience = PollingPolicy::new();
        assert_eq!(count_sleeps(&mut patience, LATE, 1000), 1000);
        assert!(patience.usual > LOOK && WOKEN > LOOK);
        let before = count_sleeps(&mut patience, SOON, 1000);
        assert!(before <= TRIAL, "{before}");
        assert_eq!(count_sleeps(&mut patience, SOON, 1000), 0);
    }

    #[test]
    fn one_wait_of_many_looks_where_answers_come_late() {
        let mut patience = PollingPolicy::new();
        count_sleeps(&mut patience, LATE, 1000);
        let mut looks = 0;
        for _ in 0..100 * (TRIAL + 1) {
            looks += u32::from(!patience.polling_time().is_zero());
            count_sleeps(&mut patience, LATE, 1);
        }
        assert_eq!(looks, 100);
    }

    /// A poller that loses its processor finds the answer late, although it came soon.
    #[test]
    fn where_processors_are_short_few_waits_look() {
        let mut patience = PollingPolicy::new();
        let mut looks = 0;
        for _ in 0..100 * (TRIAL + 1) {
            if patience.polling_time().is_zero() {
                patience.record_wait();
                patience.record_sleep(WOKEN);
            } else {
                patience.record_polled(Duration::from_millis(4));
                looks += 1;
            }
        }
        assert_eq!(looks, 100);
    }

    #[test]
    fn one_late_answer_does_not_end_looking_and_several_do() {
        let mut patience = PollingPolicy::new();
        count_sleeps(&mut patience, SOON, 100);
        assert_eq!(count_sleeps(&mut patience, Duration::from_secs(1), 1), 1);
        assert_eq!(count_sleeps(&mut patience, SOON, 10), 0);
        count_sleeps(&mut patience, LATE, 10);
        assert_eq!(patience.polling_time(), Duration::ZERO);
    }
}
