//! A thread of the workload: its descriptors, its memory, and the loop over its flowops.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use quanta::Clock;
use rand::Rng;
use rustix::time::{ClockId, clock_gettime};

use super::control::{RunControl, ThreadCounters};
use super::failure::RunFailure;
use crate::driver::WorkloadDriver;
use crate::files::RunFileset;
use crate::lang::ast::QuitMode;
use crate::plan::{FlowopKind, FlowopPlan, MAX_FD, PlanNumber, ThreadPlan, WorkloadPlan};
use crate::random::{RandomGenerator, generator};

/// Alignment of memory for O_DIRECT.
const ALIGNMENT: usize = 4096;

/// Size of the random part of a thread's memory, which the rest repeats.
const NOISE: usize = 64 << 10;

/// The result of a flowop.
pub(super) enum FlowopOutcome {
    /// The next flowop follows.
    Done,
    /// There was no file for it.
    NoFile,
    /// A finish condition is met.
    Finished,
    /// The run ended while it waited.
    Over,
    /// It failed.
    Failed(RunFailure),
}

/// A descriptor of a thread.
pub(super) struct ThreadDescriptor<F> {
    /// The open file.
    pub file: Option<F>,
    /// The file and its set, which are known even after a close.
    pub entry: Option<(usize, u32)>,
}

impl<F> Default for ThreadDescriptor<F> {
    fn default() -> Self {
        ThreadDescriptor { file: None, entry: None }
    }
}

/// Memory for data, aligned for O_DIRECT.
pub(super) struct ThreadMemory {
    bytes: Vec<u8>,
    skip: usize,
    /// Size of the thread's own part, from which I/O takes random pieces.
    own: usize,
}

impl ThreadMemory {
    fn new(size: usize, random: &mut RandomGenerator) -> Self {
        let mut memory = ThreadMemory { bytes: Vec::new(), skip: 0, own: size };
        memory.grow(size, random);
        memory
    }

    fn grow(&mut self, size: usize, random: &mut RandomGenerator) {
        self.bytes = vec![0; size + ALIGNMENT];
        self.skip = self.bytes.as_ptr().align_offset(ALIGNMENT);
        // Data that file systems cannot compress, unless they deduplicate blocks.
        let noise = self.bytes.len().min(NOISE);
        random.fill(&mut self.bytes[..noise]);
        for at in (noise..self.bytes.len()).step_by(NOISE) {
            let length = noise.min(self.bytes.len() - at);
            self.bytes.copy_within(..length, at);
        }
    }

    /// `length` bytes: a random piece of the thread's memory, if it has its own.
    #[inline]
    pub fn piece(&mut self, length: usize, random: &mut RandomGenerator) -> &mut [u8] {
        if self.bytes.len() < length + ALIGNMENT {
            self.grow(length, random);
        }
        let mut at = self.skip;
        if self.own > length && length > 0 {
            // Multiples of the length keep its alignment.
            at += random.random_range(0..self.own / length) * length;
        }
        &mut self.bytes[at..at + length]
    }
}

/// A thread of the workload.
pub(super) struct WorkloadThread<'a, D: WorkloadDriver> {
    pub driver: &'a D,
    pub plan: &'a WorkloadPlan,
    pub thread: &'a ThreadPlan,
    pub number: usize,
    pub sets: &'a [RunFileset],
    pub control: &'a RunControl,
    pub counts: &'a ThreadCounters,
    pub descriptors: Vec<ThreadDescriptor<D::File>>,
    pub memory: ThreadMemory,
    pub random: RandomGenerator,
    /// The descriptor that the last flowop with `opennext` used.
    pub rotor: usize,
    /// The last values of rate limits, by row of the statistics.
    pub limits: Vec<Option<(u64, i128)>>,
    clock: Clock,
    /// End of the last operation, if nothing else happened since.
    last_end: Option<u64>,
}

impl<'a, D: WorkloadDriver> WorkloadThread<'a, D> {
    pub fn new(
        plan: &'a WorkloadPlan,
        thread: &'a ThreadPlan,
        number: usize,
        sets: &'a [RunFileset],
        driver: &'a D,
        control: &'a RunControl,
    ) -> Self {
        let mut random = generator(plan.seed, number as u64);
        WorkloadThread {
            driver,
            plan,
            thread,
            number,
            sets,
            control,
            counts: &control.threads[number],
            descriptors: (0..MAX_FD).map(|_| ThreadDescriptor::default()).collect(),
            memory: ThreadMemory::new(thread.memsize as usize, &mut random),
            random,
            rotor: MAX_FD,
            limits: vec![None; plan.rows.len()],
            clock: Clock::new(),
            last_end: None,
        }
    }

    /// Repeats all flowops until the run ends or one finds no file.
    pub fn run(&mut self) {
        if self.thread.nice != 0
            && let Err(error) = rustix::process::setpriority_process(None, self.thread.nice)
        {
            let nice = self.thread.nice;
            self.control
                .fail(RunFailure::new(format!("niceness {nice} could not be set: {error}")));
            return;
        }
        let before = cpu_ns();
        let thread = self.thread;
        let control = self.control;
        'run: loop {
            for step in &thread.flowops {
                if control.is_finished() {
                    break 'run;
                }
                match self.repeat(step) {
                    FlowopOutcome::Done => {}
                    FlowopOutcome::NoFile => {
                        self.count_without_file(step);
                        break 'run;
                    }
                    FlowopOutcome::Finished => {
                        control.finish();
                        break 'run;
                    }
                    FlowopOutcome::Over => break 'run,
                    FlowopOutcome::Failed(failure) => {
                        control.fail(failure);
                        break 'run;
                    }
                }
            }
        }
        self.close_all();
        self.counts.cpu_ns.store(cpu_ns().saturating_sub(before), Relaxed);
    }

    fn count_without_file(&self, step: &FlowopPlan) {
        if self.control.is_over() {
            // The wait ended because the run has ended.
            return;
        }
        match self.control.quit {
            QuitMode::AllDone => {}
            QuitMode::FirstDone => self.control.finish(),
            QuitMode::Timeout => self.control.fail(RunFailure::no_file(step)),
        }
    }

    /// Performs one flowop as often as it specifies.
    fn repeat(&mut self, step: &FlowopPlan) -> FlowopOutcome {
        self.last_end = None;
        for _ in 0..self.number(step.iters) {
            let outcome = match &step.kind {
                FlowopKind::Composite(inner) => self.sequence(inner),
                _ => self.perform(step),
            };
            if !matches!(outcome, FlowopOutcome::Done) {
                return outcome;
            }
            if self.control.is_over() {
                return FlowopOutcome::Over;
            }
        }
        FlowopOutcome::Done
    }

    /// Performs the flowops of a composite flowop.
    fn sequence(&mut self, steps: &[FlowopPlan]) -> FlowopOutcome {
        for step in steps {
            let outcome = self.repeat(step);
            if !matches!(outcome, FlowopOutcome::Done) {
                return outcome;
            }
        }
        FlowopOutcome::Done
    }

    /// The value of a number.
    #[inline]
    pub fn number(&mut self, number: PlanNumber) -> u64 {
        match number {
            PlanNumber::Fixed(number) => number,
            PlanNumber::Random(place) => self.plan.variables[place].get(&mut self.random),
        }
    }

    /// The start time of an operation. If it directly follows another of the same flowop, that is
    /// the end of the other, so that the clock is read once per operation.
    #[inline]
    pub fn begin(&self) -> u64 {
        self.last_end.unwrap_or_else(|| self.clock.raw())
    }

    /// Counts an operation that began at `began` and transferred `bytes`.
    #[inline]
    pub fn end(&mut self, step: &FlowopPlan, began: u64, bytes: u64) {
        let now = self.clock.raw();
        self.last_end = Some(now);
        let ns = self.clock.delta_as_nanos(began, now);
        if let Some(cell) = &self.counts.cells[step.statistics] {
            cell.record(ns, bytes);
        }
        ThreadCounters::add(&self.counts.operations, 1);
        ThreadCounters::add(&self.counts.bytes, bytes);
        let row = &self.plan.rows[step.statistics];
        ThreadCounters::add(&self.counts.io, u64::from(row.io));
        ThreadCounters::add(&self.counts.data_io, u64::from(row.reads || row.writes));
    }

    /// The path of the file of a descriptor, for messages.
    pub fn path_of(&self, fd: usize) -> Option<PathBuf> {
        self.descriptors[fd].entry.map(|(set, file)| self.sets[set].file_path(file))
    }

    /// True if waiting is pointless because the run has ended.
    pub fn stop_condition(&self) -> impl Fn() -> bool + use<'a, D> {
        let control = self.control;
        move || control.is_over()
    }

    /// True if the run is finished, so that waiting for other threads would be in vain.
    pub fn finish_check(&self) -> impl Fn() -> bool + use<'a, D> {
        let control = self.control;
        move || control.is_finished()
    }

    fn close_all(&mut self) {
        for descriptor in &mut self.descriptors {
            if let ThreadDescriptor { file: Some(_), entry: Some((set, file)) } = descriptor {
                self.sets[*set].pool.release(*file, None, -1);
            }
            *descriptor = ThreadDescriptor::default();
        }
    }
}

/// CPU time of this thread, in ns.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
