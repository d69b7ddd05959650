//! The registers, the clock and the queues of the modelled controller.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use defuse_block::model::SsdWork;
use defuse_block::{BlockDevice, BlockingQueue, DeviceProperties, Result};

use super::ModelProperties;
use super::arbiter::QueueArbiter;
use super::event_queue::{FetchedCommand, ModelEvent, ModelEventQueue};
use super::faults::{CandidateCommand, ControllerFault, FaultInjector};
use super::memory::ModelMemory;
use crate::spec::{COMPLETION, CommandStatus, SUBMISSION, SubmissionEntry, register};

/// The time from a change of CC.EN to the change of CSTS.RDY.
const READY_AFTER: Duration = Duration::from_millis(2);

pub(super) struct ControllerModelState {
    pub(super) shape: Arc<ModelProperties>,
    /// The range of times of a command, if no SSD determines its time.
    pub(super) latency_us: (u64, u64),
    pub(super) memory: ModelMemory,
    pub(super) line: BlockingQueue,
    pub(super) facts: DeviceProperties,
    pub(super) random: fastrand::Rng,
    pub(super) faults: FaultInjector,
    pub(super) now: Duration,
    /// The vectors of queues that have completions since they were delivered.
    pub(super) interrupts: Vec<u16>,
    pub(super) fetched: u64,
    pub(super) enabled: u64,
    pub(super) shut_down: u64,
    configuration: u32,
    status: u32,
    admin_sizes: u32,
    admin_addresses: [u64; 2],
    is_gone: bool,
    pub(super) arbiter: QueueArbiter,
    /// Commands of I/O queues that are worked on.
    busy: usize,
    pub(super) submissions: BTreeMap<u16, ModelSubmissionQueue>,
    pub(super) completions: BTreeMap<u16, ModelCompletionQueue>,
    agenda: ModelEventQueue,
    /// Commands that are never answered by themselves: (queue, number, can be aborted).
    pub(super) ignored: Vec<(u16, u16, bool)>,
    /// Numbers of requests for events.
    pub(super) event_requests: Vec<u16>,
}

pub(super) struct ModelSubmissionQueue {
    pub(super) base: u64,
    pub(super) entries: u16,
    pub(super) head: u16,
    /// The tail that was written to the doorbell.
    tail: u16,
    pub(super) completions: u16,
    pub(super) priority: u8,
}

impl ModelSubmissionQueue {
    pub(super) fn new(base: u64, entries: u16, completions: u16, priority: u8) -> Self {
        ModelSubmissionQueue { base, entries, head: 0, tail: 0, completions, priority }
    }
}

pub(super) struct ModelCompletionQueue {
    pub(super) base: u64,
    pub(super) entries: u16,
    pub(super) tail: u16,
    pub(super) phase: bool,
    /// `None` without interrupts.
    pub(super) vector: Option<u16>,
}

/// The outcome of a command: the result, or an error.
pub(super) type CommandResult = std::result::Result<u32, CommandStatus>;

impl ControllerModelState {
    pub(super) fn new(
        device: &dyn BlockDevice,
        seed: u64,
        shape: Arc<ModelProperties>,
    ) -> Result<Self> {
        Ok(ControllerModelState {
            latency_us: shape.latency_us,
            agenda: ModelEventQueue::new(shape.parts.as_ref()),
            shape,
            memory: ModelMemory::default(),
            line: BlockingQueue::new(device)?,
            facts: device.properties().clone(),
            random: fastrand::Rng::with_seed(seed),
            faults: FaultInjector::default(),
            now: Duration::ZERO,
            interrupts: Vec::new(),
            fetched: 0,
            enabled: 0,
            shut_down: 0,
            configuration: 0,
            status: 0,
            admin_sizes: 0,
            admin_addresses: [0; 2],
            is_gone: false,
            arbiter: QueueArbiter::default(),
            busy: 0,
            submissions: BTreeMap::new(),
            completions: BTreeMap::new(),
            ignored: Vec::new(),
            event_requests: Vec::new(),
        })
    }

    pub(super) fn read(&mut self, at: u32) -> u64 {
        if self.is_gone {
            return u64::MAX;
        }
        let value = match at {
            // 2 s, contiguous queues, NVM commands, pages of 4 KiB.
            register::CAP => {
                let priorities = u64::from(self.shape.priorities) << 17;
                u64::from(self.shape.entries - 1) | 1 << 16 | priorities | 4 << 24 | 1 << 37
            }
            register::VS => 0x0001_0400,
            register::CC => u64::from(self.configuration),
            register::CSTS => u64::from(self.status),
            register::AQA => u64::from(self.admin_sizes),
            register::ASQ => self.admin_addresses[0],
            register::ACQ => self.admin_addresses[1],
            _ => 0,
        };
        self.faults.register(value)
    }

    pub(super) fn write(&mut self, at: u32, value: u64) {
        if self.is_gone {
            return;
        }
        match at {
            register::CC => self.configure(value as u32),
            register::AQA => self.admin_sizes = value as u32,
            register::ASQ => self.admin_addresses[0] = value,
            register::ACQ => self.admin_addresses[1] = value,
            register::DOORBELLS.. => self.doorbell(at - register::DOORBELLS, value as u16),
            _ => {}
        }
    }

    fn configure(&mut self, value: u32) {
        let before = std::mem::replace(&mut self.configuration, value);
        let enable = value & register::ENABLE != 0;
        if enable != (before & register::ENABLE != 0) {
            let weighted = value & register::WEIGHTED != 0;
            self.arbiter = QueueArbiter::new(weighted && self.shape.priorities);
            if !enable {
                self.stop();
                self.status &= !register::FATAL;
            }
            self.agenda.add(self.now + READY_AFTER, ModelEvent::Ready(enable));
        }
        if value & register::SHUTDOWN == register::SHUTDOWN_NORMAL {
            let done = self.line.flush().is_ok();
            self.shut_down += u64::from(done);
            self.status |= register::SHUTDOWN_DONE;
        }
    }

    /// Forgets all queues and commands.
    fn stop(&mut self) {
        self.submissions.clear();
        self.completions.clear();
        self.agenda.clear();
        self.busy = 0;
        self.ignored.clear();
        self.event_requests.clear();
    }

    pub(super) fn unplug(&mut self) {
        self.stop();
        self.is_gone = true;
    }

    pub(super) fn cut(&mut self) {
        self.stop();
        self.memory.cut();
    }

    fn become_ready(&mut self, ready: bool) {
        if !ready {
            self.status &= !(register::READY | register::SHUTDOWN_STATE);
            return;
        }
        let [submissions, completions] = self.admin_addresses;
        let entries = |shift: u32| (self.admin_sizes >> shift & 0xfff) as u16 + 1;
        let queue = ModelSubmissionQueue::new(submissions, entries(0), 0, 0);
        self.submissions.insert(0, queue);
        let vector = self.shape.interrupts.then_some(0);
        let queue = ModelCompletionQueue {
            base: completions,
            entries: entries(16),
            tail: 0,
            phase: true,
            vector,
        };
        self.completions.insert(0, queue);
        self.status |= register::READY;
        self.enabled += 1;
    }

    /// Lets time pass, with all that happens in it.
    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.agenda.next().is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// Advances to the next event that is visible to the host, or to the end of `timeout`. False if
    /// nothing will ever happen.
    pub(super) fn advance(&mut self, timeout: Option<Duration>) -> bool {
        let end = timeout.map(|timeout| self.now + timeout);
        while let Some(next) = self.agenda.next()
            && end.is_none_or(|end| next <= end)
        {
            if self.step() {
                // All events of the same time happen together.
                self.pass(Duration::ZERO);
                return true;
            }
        }
        self.now = end.unwrap_or(self.now);
        end.is_some()
    }

    /// Advances to the next event. False if the event is not visible to the host.
    fn step(&mut self) -> bool {
        self.now = self.agenda.next().map_or(self.now, |at| self.now.max(at));
        match self.agenda.take() {
            Some(ModelEvent::Ready(ready)) => self.become_ready(ready),
            Some(ModelEvent::Command(FetchedCommand { queue, command, fault })) => {
                self.busy -= usize::from(queue > 0);
                self.carry_out(queue, &command, fault);
                self.fetch_all();
            }
            None => return false,
        }
        true
    }

    fn doorbell(&mut self, offset: u32, value: u16) {
        let (queue, is_completion) = ((offset / 8) as u16, offset % 8 == 4);
        if is_completion {
            return;
        }
        let Some(submissions) = self.submissions.get_mut(&queue) else { return };
        if value < submissions.entries {
            submissions.tail = value;
        }
        self.fetch_all();
    }

    /// Fetches commands as long as there is room for them: commands of the admin queue first.
    fn fetch_all(&mut self) {
        loop {
            let waiting = |(_, queue): &(&u16, &ModelSubmissionQueue)| queue.head != queue.tail;
            let admin = self.submissions.get(&0).is_some_and(|queue| queue.head != queue.tail);
            let next = if admin {
                Some(0)
            } else if self.busy < self.shape.slots {
                let queues = self.submissions.iter().filter(|(number, _)| **number > 0);
                let queues =
                    queues.filter(waiting).filter(|(number, _)| self.agenda.takes(**number));
                self.arbiter.next(queues.map(|(number, queue)| (*number, queue.priority)))
            } else {
                None
            };
            let Some(queue) = next else { return };
            let Some(submissions) = self.submissions.get_mut(&queue) else { return };
            let at = submissions.base + u64::from(submissions.head) * SUBMISSION as u64;
            submissions.head = (submissions.head + 1) % submissions.entries;
            let mut command = SubmissionEntry::default();
            for (number, word) in command.0.iter_mut().enumerate() {
                let Some(read) = self.memory.read64(at + number as u64 * 8) else {
                    self.status |= register::FATAL;
                    return;
                };
                *word = read;
            }
            self.fetch(queue, command);
        }
    }

    fn fetch(&mut self, queue: u16, command: SubmissionEntry) {
        let mut fault = None;
        if queue > 0 {
            let (opcode, block) = (command.opcode(), command.0[5]);
            fault = self.faults.decide(&CandidateCommand {
                number: self.fetched,
                queue,
                opcode,
                block,
            });
            self.fetched += 1;
        }
        match fault {
            Some(ControllerFault::Ignore | ControllerFault::Forget) => {
                let can_abort = fault == Some(ControllerFault::Ignore);
                self.ignored.push((queue, command.number(), can_abort));
                return;
            }
            Some(ControllerFault::Break) => {
                self.stop();
                self.status |= register::FATAL;
                return;
            }
            Some(ControllerFault::Unplug) => {
                self.unplug();
                return;
            }
            _ => {}
        }
        self.busy += usize::from(queue > 0);
        let load = if queue > 0 { self.load(&command) } else { SsdWork::Table };
        let job = FetchedCommand { queue, command, fault };
        if let Err(job) = self.agenda.begin(job, load, self.now) {
            let (from, to) = self.latency_us;
            let after = Duration::from_micros(self.random.u64(from..=to));
            self.agenda.add(self.now + after, ModelEvent::Command(job));
        }
    }

    fn carry_out(&mut self, queue: u16, command: &SubmissionEntry, fault: Option<ControllerFault>) {
        let outcome = match fault {
            Some(ControllerFault::Refuse(status)) => Some(Err(status)),
            _ if queue == 0 => self.admin(command),
            _ => Some(self.io(command, fault)),
        };
        let Some(outcome) = outcome else { return };
        let number = command.number();
        let named = if fault == Some(ControllerFault::NameOtherQueue) { queue + 1 } else { queue };
        self.post(queue, named, number, outcome);
        match fault {
            Some(ControllerFault::AnswerTwice) => self.post(queue, named, number, outcome),
            Some(ControllerFault::Invent) => self.post(queue, named, number ^ 0x155, outcome),
            _ => {}
        }
    }

    /// Writes a completion to the queue that belongs to the submission queue `queue`.
    pub(super) fn post(&mut self, queue: u16, named: u16, number: u16, outcome: CommandResult) {
        let Some(submissions) = self.submissions.get(&queue) else { return };
        let (head, to) = (submissions.head, submissions.completions);
        let (result, status) = match outcome {
            Ok(result) => (result, CommandStatus::SUCCESS),
            Err(status) => (0, status),
        };
        let fields = u32::from(number) | u32::from(status.0) << 17;
        let words = [result, 0, u32::from(head) | u32::from(named) << 16, fields];
        let (words, times) = self.faults.completion(words);
        for _ in 0..times {
            let Some(completions) = self.completions.get_mut(&to) else { return };
            let at = completions.base + u64::from(completions.tail) * COMPLETION as u64;
            let last = words[3] ^ u32::from(completions.phase) << 16;
            let words = [words[0], words[1], words[2], last];
            completions.tail += 1;
            if completions.tail == completions.entries {
                (completions.tail, completions.phase) = (0, !completions.phase);
            }
            self.interrupts.extend(completions.vector);
            for (number, word) in words.iter().enumerate() {
                if self.memory.write32(at + number as u64 * 4, *word).is_none() {
                    self.status |= register::FATAL;
                }
            }
        }
    }
}
