//! The state that the threads of a run share: counters, and the end of the run.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::events::EventGenerator;
use super::failure::RunFailure;
use super::synchronization::RunSynchronization;
use crate::lang::ast::QuitMode;
use crate::plan::{WorkloadPlan, WorkloadRunPlan};
use crate::statistics::FlowopCell;

/// The counters of one thread, on separate cache lines.
#[repr(align(128))]
pub(super) struct ThreadCounters {
    /// All flowops, including those without I/O.
    pub operations: AtomicU64,
    /// Flowops with I/O.
    pub io: AtomicU64,
    /// Reads and writes.
    pub data_io: AtomicU64,
    /// Bytes of data.
    pub bytes: AtomicU64,
    /// CPU time in ns, set when the thread has ended.
    pub cpu_ns: AtomicU64,
    /// A cell for each row of the statistics that the thread uses.
    pub cells: Vec<Option<Box<FlowopCell>>>,
}

/// Interval at which a sleeping thread checks whether the run has ended.
const LOOK_AROUND: Duration = Duration::from_millis(20);

const GOES_ON: u8 = 0;
const FINISHED: u8 = 1;
const OVER: u8 = 2;

/// The state that the threads of a run share.
pub(super) struct RunControl {
    state: AtomicU8,
    failure: Mutex<Option<RunFailure>>,
    pub threads: Vec<ThreadCounters>,
    pub events: Option<EventGenerator>,
    pub meetings: RunSynchronization,
    /// The condition that ends the run.
    pub quit: QuitMode,
}

impl RunControl {
    pub fn new(plan: &WorkloadPlan, run: &WorkloadRunPlan) -> Self {
        let threads = run.threads.iter().flat_map(|thread| {
            (0..thread.instances).map(|_| {
                let mut cells: Vec<Option<Box<FlowopCell>>> = Vec::new();
                cells.resize_with(plan.rows.len(), || None);
                fill_cells(&thread.flowops, &mut cells);
                ThreadCounters::new(cells)
            })
        });
        RunControl {
            state: AtomicU8::new(GOES_ON),
            failure: Mutex::new(None),
            threads: threads.collect(),
            events: run.events.map(EventGenerator::new),
            meetings: RunSynchronization::new(plan.rows.len()),
            quit: run.quit,
        }
    }

    /// True if threads must end before their next flowop.
    #[inline]
    pub fn is_finished(&self) -> bool {
        self.state.load(Relaxed) != GOES_ON
    }

    /// True if threads must end between two iterations of a flowop, and stop waiting.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.state.load(Relaxed) == OVER
    }

    /// Makes every thread end after its flowop.
    pub fn finish(&self) {
        self.state.fetch_max(FINISHED, Relaxed);
        self.meetings.wake_all();
    }

    /// Ends the run at once.
    pub fn stop(&self) {
        self.state.store(OVER, Relaxed);
        self.meetings.wake_all();
    }

    /// Ends the run because of a failure. The first failure is kept.
    pub fn fail(&self, failure: RunFailure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.stop();
    }

    /// Sleeps for this number of seconds, or until the run ends.
    pub fn sleep(&self, seconds: u64) {
        let until = Instant::now() + Duration::from_secs(seconds.min(1 << 31));
        while !self.is_finished() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(LOOK_AROUND));
        }
    }

    pub fn take_failure(&self) -> Option<RunFailure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn sum(&self, of: impl Fn(&ThreadCounters) -> &AtomicU64) -> u64 {
        self.threads.iter().map(|thread| of(thread).load(Relaxed)).sum()
    }

    pub fn operations(&self) -> u64 {
        self.sum(|thread| &thread.operations)
    }

    pub fn io(&self) -> u64 {
        self.sum(|thread| &thread.io)
    }

    pub fn data_io(&self) -> u64 {
        self.sum(|thread| &thread.data_io)
    }

    pub fn bytes(&self) -> u64 {
        self.sum(|thread| &thread.bytes)
    }

    pub fn cpu_ns(&self) -> u64 {
        self.sum(|thread| &thread.cpu_ns)
    }
}

impl ThreadCounters {
    fn new(cells: Vec<Option<Box<FlowopCell>>>) -> Self {
        let zero = || AtomicU64::new(0);
        ThreadCounters {
            operations: zero(),
            io: zero(),
            data_io: zero(),
            bytes: zero(),
            cpu_ns: zero(),
            cells,
        }
    }

    /// Adds to a counter that no other thread writes.
    #[inline]
    pub fn add(counter: &AtomicU64, amount: u64) {
        counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
    }
}

fn fill_cells(steps: &[crate::plan::FlowopPlan], cells: &mut [Option<Box<FlowopCell>>]) {
    for step in steps {
        match &step.kind {
            crate::plan::FlowopKind::Composite(inner) => fill_cells(inner, cells),
            _ => {
                cells[step.statistics].get_or_insert_with(|| Box::new(FlowopCell::new()));
            }
        }
    }
}
