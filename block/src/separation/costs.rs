//! The choice of a queue: the matrices and the sum of equation (1) of the UHSFS paper.

use std::time::Duration;

use super::class::{CLASSES, ClassSet, OperationClass};

/// Weight of a new measurement in a mean.
const WEIGHT: f64 = 1.0 / 32.0;

/// Cost of an operation before the first measurement.
const GUESS: f64 = 20e-6;

/// The costs of all queues, in seconds.
#[derive(Debug)]
pub(super) struct CostMatrix {
    queues: Vec<QueueCost>,
}

/// One queue.
#[derive(Debug)]
struct QueueCost {
    /// Mean time that an operation of each class takes: r_qb and w_qb. Infinite where the queue is
    /// closed to the class.
    mean: [f64; CLASSES],
    /// True once an operation of the class was measured.
    measured: [bool; CLASSES],
    /// Operations of each class that were pushed to the queue and are not complete: a_b.
    waiting: [u32; CLASSES],
    /// The moment of the last completion.
    completed: Duration,
}

impl CostMatrix {
    /// Makes the costs of queues, each of which is open to a set of classes.
    pub(super) fn new(open: &[ClassSet]) -> Self {
        let cost = |open: &ClassSet, class| if open.has(class) { GUESS } else { f64::INFINITY };
        let queue = |open: &ClassSet| QueueCost {
            mean: OperationClass::ALL.map(|class| cost(open, class)),
            measured: [false; CLASSES],
            waiting: [0; CLASSES],
            completed: Duration::ZERO,
        };
        CostMatrix { queues: open.iter().map(queue).collect() }
    }

    /// The queue among `usable` that ends an operation of `class` soonest: the smallest t_q + r_qb
    /// (or w_qb). `None` if none of them is open to the class.
    pub(super) fn choose(
        &self,
        class: OperationClass,
        usable: impl Iterator<Item = usize>,
    ) -> Option<usize> {
        let end = |queue: usize| self.wait(queue) + self.queues[queue].mean[class.index()];
        let open = usable.map(|queue| (queue, end(queue))).filter(|(_, end)| end.is_finite());
        open.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(queue, _)| queue)
    }

    /// t_q: the work that waits in the queue.
    fn wait(&self, queue: usize) -> f64 {
        let QueueCost { mean, waiting, .. } = &self.queues[queue];
        let work = mean.iter().zip(waiting).filter(|(_, count)| **count > 0);
        work.map(|(mean, count)| mean * f64::from(*count)).sum()
    }

    pub(super) fn record_begin(&mut self, queue: usize, class: OperationClass) {
        self.queues[queue].waiting[class.index()] += 1;
    }

    /// Records the completion of an operation that began at `begun`. Its cost is the time since the
    /// completion before it, or since its own beginning: the part in which the queue worked on it.
    /// With `learns`, the mean follows.
    pub(super) fn record_completion(
        &mut self,
        queue: usize,
        class: OperationClass,
        (begun, now): (Duration, Duration),
        learns: bool,
    ) {
        let of = &mut self.queues[queue];
        let class = class.index();
        of.waiting[class] -= 1;
        let cost = now.saturating_sub(begun.max(of.completed)).as_secs_f64();
        of.completed = now;
        if learns && of.mean[class].is_finite() {
            let mean = &mut of.mean[class];
            let weight = if of.measured[class] { WEIGHT } else { 1.0 };
            *mean += (cost - *mean) * weight;
            of.measured[class] = true;
        }
    }

    /// The mean cost of a class in a queue; `None` if the queue is closed to it or nothing was
    /// measured.
    pub(super) fn mean(&self, queue: usize, class: OperationClass) -> Option<Duration> {
        let of = &self.queues[queue];
        of.measured[class.index()].then(|| Duration::from_secs_f64(of.mean[class.index()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn the_queue_that_ends_first_takes_the_operation() {
        let mut costs = CostMatrix::new(&[ClassSet::ALL; 2]);
        // Reads take 10 us in both queues; writes take 100 us in the first and 400 us in the
        // second.
        for (queue, class, cost) in [
            (0, OperationClass::SmallRead, 10),
            (1, OperationClass::SmallRead, 10),
            (0, OperationClass::SmallWrite, 100),
            (1, OperationClass::SmallWrite, 400),
        ] {
            costs.record_begin(queue, class);
            let begun = costs.queues[queue].completed;
            costs.record_completion(queue, class, (begun, begun + micros(cost)), true);
            assert_eq!(costs.mean(queue, class), Some(micros(cost)));
        }
        assert_eq!(costs.choose(OperationClass::SmallWrite, 0..2), Some(0));
        costs.record_begin(0, OperationClass::SmallWrite);
        // 100 + 100 in the first, 400 in the second; a read ends first where nothing waits.
        assert_eq!(costs.choose(OperationClass::SmallWrite, 0..2), Some(0));
        assert_eq!(costs.choose(OperationClass::SmallRead, 0..2), Some(1));
        for _ in 0..3 {
            costs.record_begin(0, OperationClass::SmallWrite);
        }
        assert_eq!(costs.choose(OperationClass::SmallWrite, 0..2), Some(1));
        assert_eq!(costs.choose(OperationClass::SmallWrite, std::iter::once(0)), Some(0));
    }

    #[test]
    fn a_queue_takes_only_the_classes_that_it_is_open_to() {
        let reads = ClassSet::from_classes(&[OperationClass::SmallRead, OperationClass::LargeRead]);
        let mut costs = CostMatrix::new(&[reads, ClassSet::ALL]);
        for _ in 0..100 {
            costs.record_begin(1, OperationClass::SmallWrite);
        }
        assert_eq!(costs.choose(OperationClass::SmallWrite, 0..2), Some(1));
        assert_eq!(costs.choose(OperationClass::LargeRead, 0..2), Some(0));
        assert_eq!(costs.choose(OperationClass::LargeWrite, std::iter::once(0)), None);
    }
}
