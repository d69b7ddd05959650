//! The arbitration: it chooses the queue from which the modelled controller takes its next command.

/// The priority "urgent".
const URGENT: u8 = 0;

/// Round robin, or weighted round robin with an urgent class.
#[derive(Debug, Default)]
pub(super) struct QueueArbiter {
    weighted: bool,
    /// Commands of a round of the classes high, medium and low.
    weights: [u32; 3],
    /// Commands of this round that are left.
    left: [u32; 3],
    /// The queue of the last command.
    last: u16,
}

impl QueueArbiter {
    /// The arbitration of a controller that was just enabled.
    pub(super) fn new(weighted: bool) -> Self {
        QueueArbiter { weighted, weights: [1; 3], left: [1; 3], last: 0 }
    }

    /// Sets the value of the feature Arbitration.
    pub(super) fn set(&mut self, value: u32) {
        self.weights = [24, 16, 8].map(|shift| (value >> shift & 0xff) + 1);
        self.left = self.weights;
    }

    /// The weights, where there are any.
    pub(super) fn weights(&self) -> Option<[u32; 3]> {
        self.weighted.then_some(self.weights)
    }

    /// The queue that has the turn among `queues`, all of which have commands: numbers in ascending
    /// order, and priorities.
    pub(super) fn next(&mut self, queues: impl Iterator<Item = (u16, u8)>) -> Option<u16> {
        let queues: Vec<(u16, u8)> = queues.collect();
        if !self.weighted {
            return self.choose_next(queues.iter().map(|(number, _)| *number));
        }
        let of = |priority: u8| queues.iter().filter(move |queue| queue.1 == priority);
        if of(URGENT).next().is_some() {
            return self.choose_next(of(URGENT).map(|(number, _)| *number));
        }
        for _ in 0..2 {
            for class in 0..3 {
                let members = of(class as u8 + 1);
                if self.left[class] > 0
                    && let Some(queue) = self.choose_next(members.map(|(number, _)| *number))
                {
                    self.left[class] -= 1;
                    return Some(queue);
                }
            }
            // No class with commands may send more in this round.
            self.left = self.weights;
        }
        None
    }

    /// The next queue after the last one.
    fn choose_next(&mut self, queues: impl Iterator<Item = u16>) -> Option<u16> {
        let queues: Vec<u16> = queues.collect();
        let next = queues.iter().find(|number| **number > self.last).or(queues.first()).copied();
        self.last = next.unwrap_or(self.last);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(arbiter: &mut QueueArbiter, queues: &[(u16, u8)], count: usize) -> Vec<u16> {
        (0..count).map(|_| arbiter.next(queues.iter().copied()).unwrap()).collect()
    }

    #[test]
    fn queues_take_turns_and_classes_have_their_weights() {
        let queues = [(1, 3), (2, 1), (3, 1), (5, 2)];
        assert_eq!(order(&mut QueueArbiter::new(false), &queues, 6), [1, 2, 3, 5, 1, 2]);
        let mut arbiter = QueueArbiter::new(true);
        arbiter.set(3 << 24 | 1 << 16);
        assert_eq!(order(&mut arbiter, &queues, 8), [2, 3, 2, 3, 5, 5, 1, 2]);
        assert_eq!(order(&mut arbiter, &[(1, 3), (4, 0), (9, 0)], 4), [4, 9, 4, 9]);
        assert_eq!(order(&mut arbiter, &[(1, 3)], 3), [1, 1, 1], "alone, the lowest has all");
        assert_eq!(arbiter.next([].into_iter()), None);
    }
}
