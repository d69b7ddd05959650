//! The uses of one extent.

use super::bit;
use super::queue::PolicyWeights;

/// Periods in which as many uses happen as there are extents.
pub(super) const PERIODS_OF_A_ROUND: u64 = 4;
/// The periods for which a process is remembered, at least; at most twice as many.
const REMEMBERED: u64 = 64;

/// The processes that used an extent, and how often: 72 bytes, however many processes there are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UseHistory {
    last: u64,
    /// The period of the last use, and the processes in it.
    period: u64,
    users: u64,
    /// The processes that are remembered: of the current stretch of periods, and of the one before.
    known: [u64; 2],
    stretch: u64,
    /// Uses by a process that was not remembered, and periods in which another process used it
    /// again. Both have faded until `period`.
    firsts: f64,
    repeats: f64,
}

impl UseHistory {
    /// Adds a use.
    pub(super) fn record_use(&mut self, user: u32, now: u64, period: u64, half_life: f64) {
        self.last = now;
        if self.period != period {
            self.begin(period, half_life);
        }
        if self.users & bit(user) != 0 {
            return;
        }
        let is_known = (self.known[0] | self.known[1]) & bit(user) != 0;
        *if is_known { &mut self.repeats } else { &mut self.firsts } += 1.0;
        self.users |= bit(user);
        self.known[0] |= bit(user);
    }

    /// The time of the last use.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// The weighted sum of processes, in a period that is not before the last use.
    pub(super) fn share(&self, weights: &PolicyWeights, period: u64) -> f64 {
        let sum = weights.beta * self.firsts + weights.again * self.repeats;
        sum * self.decayed_value(period, weights.half_life)
    }

    fn begin(&mut self, period: u64, half_life: f64) {
        let faded = self.decayed_value(period, half_life);
        (self.firsts, self.repeats) = (self.firsts * faded, self.repeats * faded);
        (self.period, self.users) = (period, 0);
        let stretch = period / REMEMBERED;
        if stretch != self.stretch {
            let follows = stretch == self.stretch + 1;
            self.known = [0, if follows { self.known[0] } else { 0 }];
            self.stretch = stretch;
        }
    }

    fn decayed_value(&self, period: u64, half_life: f64) -> f64 {
        f64::exp2(-((period - self.period) as f64) / half_life)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WEIGHTS: PolicyWeights =
        PolicyWeights { alpha: 0.0, beta: 1.0, again: 0.25, gamma: 0.0, half_life: 8.0 };

    /// The sum over all uses, from their list.
    fn naive(uses: &[(u32, u64)], period: u64) -> f64 {
        let weight = |(at, &(user, when)): (usize, &(u32, u64))| {
            let before = || uses[..at].iter().filter(|(other, _)| other % 64 == user % 64);
            let counted = before().any(|(_, other)| *other == when);
            // Remembered since the beginning of the previous stretch.
            let since = (when / REMEMBERED).saturating_sub(1) * REMEMBERED;
            let is_known = before().any(|(_, other)| *other >= since);
            let one = if is_known { WEIGHTS.again } else { WEIGHTS.beta };
            if counted { 0.0 } else { one * 0.5_f64.powf((period - when) as f64 / 8.0) }
        };
        uses.iter().enumerate().map(weight).sum()
    }

    proptest! {
        #[test]
        fn the_history_of_an_extent_is_the_sum_over_its_uses(
            steps in proptest::collection::vec((0..70_u32, 0..4_u8), 1..60),
        ) {
            let (mut history, mut uses, mut period) = (UseHistory::default(), Vec::new(), 0);
            for (user, step) in steps {
                period += [0, 1, 5, 90][usize::from(step)];
                history.record_use(user, period, period, WEIGHTS.half_life);
                uses.push((user, period));
                for later in [period, period + 3] {
                    let (is, expected) = (history.share(&WEIGHTS, later), naive(&uses, later));
                    prop_assert!((is - expected).abs() < 1e-9, "{is} {expected}");
                }
            }
        }
    }
}
