//! The life of a controller, in steps that never wait: reset, enabling, work, and the end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use defuse_block::Result;

use super::admin::{AdminQueue, CommandTicket};
use crate::spec::{
    AdminOpcode as Opcode, ControllerCapabilities, DataPointer, PAGE, SubmissionEntry, register,
};
use crate::{ControllerTransport, DmaMemory};

/// Resets within [`RESET_WINDOW`] at most. A controller that needs more is not used any more.
const MAX_RESETS: usize = 4;

/// See [`MAX_RESETS`].
const RESET_WINDOW: Duration = Duration::from_secs(600);

/// Requests for events at a time.
const EVENT_REQUESTS: u32 = 4;

/// The feature Arbitration: 16 commands of a queue of high priority for 4 of a medium and 1 of a
/// low one, each less one; and 8 commands of a queue at a time, as a power of two.
const ARBITRATION: u32 = 15 << 24 | 3 << 16 | 3;

/// Events that are kept until a caller takes them.
const MAX_EVENTS: usize = 64;

/// The state of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControllerPhase {
    /// The controller must stop being ready by this deadline.
    Disabling(Duration),
    /// The controller must become ready by this deadline.
    Enabling(Duration),
    /// The controller must answer how many queues it grants.
    Settings(CommandTicket),
    Running,
    Dead,
}

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerEvent {
    /// The type of the event: 0 is an error, 1 a warning about health, 2 a notice.
    pub kind: u8,
    /// Further information, by type.
    pub info: u8,
    /// The log page with the details.
    pub log: u8,
}

pub(crate) struct ControllerCore {
    pub(super) transport: Arc<dyn ControllerTransport>,
    capabilities: ControllerCapabilities,
    pub(super) admin: AdminQueue,
    pub(crate) phase: ControllerPhase,
    /// Counts how often the controller began to work.
    pub(super) generation: u64,
    pub(super) resets: VecDeque<Duration>,
    pub(super) events: VecDeque<ControllerEvent>,
    /// The number of all events so far.
    pub(super) events_seen: u64,
    /// A page for log pages that are read to enable further events.
    scratch: DmaMemory,
    /// The limit of an admin command.
    pub(super) limit: Duration,
    wanted_queues: u16,
    /// Pairs of I/O queues that the controller grants.
    pub(super) granted: u16,
    /// Unused numbers of queues.
    pub(super) free: Vec<u16>,
    /// Requests for events that the controller takes at a time, once known.
    pub(super) event_requests: u32,
}

impl ControllerCore {
    pub(super) fn new(
        transport: &Arc<dyn ControllerTransport>,
        capabilities: ControllerCapabilities,
        limit: Duration,
        wanted_queues: u16,
    ) -> Result<Self> {
        Ok(ControllerCore {
            admin: AdminQueue::new(transport, capabilities)?,
            scratch: transport.allocate(PAGE)?,
            transport: Arc::clone(transport),
            capabilities,
            phase: ControllerPhase::Dead,
            generation: 0,
            resets: VecDeque::new(),
            events: VecDeque::new(),
            events_seen: 0,
            limit,
            wanted_queues,
            granted: 0,
            free: Vec::new(),
            event_requests: 0,
        })
    }

    /// Begins a reset; the first one begins the life of the controller.
    pub(super) fn begin_reset(&mut self, why: &str) {
        let now = self.transport.now();
        if self.generation > 0 {
            while self.resets.front().is_some_and(|at| now.saturating_sub(*at) > RESET_WINDOW) {
                self.resets.pop_front();
            }
            if self.resets.len() == MAX_RESETS {
                self.die(&format!("{why}, after {MAX_RESETS} resets"));
                return;
            }
            self.resets.push_back(now);
            log::warn!("{}: {why}: it is reset", self.transport.name());
        }
        self.admin.lose();
        let configuration = self.transport.read32(register::CC);
        if configuration == register::GONE {
            self.die("it is gone");
            return;
        }
        self.transport
            .write32(register::CC, configuration & !(register::ENABLE | register::SHUTDOWN));
        self.phase = ControllerPhase::Disabling(now + self.capabilities.timeout());
    }

    /// Ends the use of the controller, which reaches no memory afterwards.
    pub(super) fn die(&mut self, why: &str) {
        if self.phase != ControllerPhase::Dead || self.generation == 0 {
            log::error!("{}: {why}: it is given up", self.transport.name());
        }
        self.transport.cut();
        self.admin.lose();
        self.phase = ControllerPhase::Dead;
    }

    /// Advances as far as possible without waiting.
    pub(super) fn advance(&mut self) {
        match self.phase {
            ControllerPhase::Disabling(until) => self.disable(until),
            ControllerPhase::Enabling(until) => self.enable(until),
            ControllerPhase::Settings(ticket) => {
                self.work();
                self.settle(ticket);
            }
            ControllerPhase::Running => self.work(),
            ControllerPhase::Dead => {}
        }
    }

    fn disable(&mut self, until: Duration) {
        let status = self.transport.read32(register::CSTS);
        if status == register::GONE {
            self.die("it is gone");
        } else if status & register::READY == 0 {
            self.start();
        } else if self.transport.now() > until {
            self.die("it does not stop");
        }
    }

    fn start(&mut self) {
        self.admin.clear();
        let (sizes, (submissions, completions)) = self.admin.registers();
        let transport = &self.transport;
        transport.write32(register::AQA, sizes);
        transport.write64(register::ASQ, submissions);
        transport.write64(register::ACQ, completions);
        transport.write32(register::CC, self.capabilities.settings() | register::ENABLE);
        self.phase = ControllerPhase::Enabling(transport.now() + self.capabilities.timeout());
    }

    fn enable(&mut self, until: Duration) {
        let status = self.transport.read32(register::CSTS);
        if status == register::GONE {
            self.die("it is gone");
        } else if status & register::FATAL != 0 {
            self.die("it reports a fatal status");
        } else if status & register::READY != 0 {
            let queues = u32::from(self.wanted_queues) - 1;
            let command = features(0x07, queues << 16 | queues);
            match self.admin.send(command, None, self.transport.now() + self.limit) {
                Some(ticket) => self.phase = ControllerPhase::Settings(ticket),
                None => self.die("its admin queue has no room"),
            }
        } else if self.transport.now() > until {
            self.die("it does not become ready");
        }
    }

    fn settle(&mut self, ticket: CommandTicket) {
        if !matches!(self.phase, ControllerPhase::Settings(_)) {
            return;
        }
        match self.admin.take(ticket) {
            None => {}
            Some(Ok(completion)) if completion.status.is_ok() => {
                let granted = |part: u32| (part & 0xffff) as u16;
                let both = granted(completion.result).min(granted(completion.result >> 16));
                let granted = both.saturating_add(1).min(self.wanted_queues);
                if self.generation == 0 {
                    self.granted = granted;
                    self.free = (1..=granted).rev().collect();
                }
                self.generation += 1;
                self.phase = ControllerPhase::Running;
                // The events for errors, health, and namespaces that change.
                let deadline = self.transport.now() + self.limit;
                self.admin.send_off(features(0x0b, 0x11f), None, deadline);
                if self.capabilities.has_priorities() {
                    // A controller that refuses this uses weights of its own.
                    self.admin.send_off(features(0x01, ARBITRATION), None, deadline);
                }
                self.request_events();
            }
            Some(Ok(completion)) => {
                self.die(&format!("it grants no queues: {}", completion.status));
            }
            Some(Err(_)) => self.die("it does not answer"),
        }
    }

    pub(super) fn request_events(&mut self) {
        for _ in 0..self.event_requests.min(EVENT_REQUESTS) {
            self.admin.send_event_request(SubmissionEntry::admin(Opcode::AsyncEvent, 0));
        }
    }

    /// Takes completions of admin commands.
    fn work(&mut self) {
        let found = self.admin.poll();
        for result in found.events {
            self.note(ControllerEvent {
                kind: (result & 7) as u8,
                info: (result >> 8) as u8,
                log: (result >> 16) as u8,
            });
        }
        let late = self.admin.is_overdue(self.transport.now());
        let why = match (found.invalid, late) {
            (true, _) => "its admin queue has a completion of no command",
            (_, true) => "an admin command has no answer",
            _ => return,
        };
        match self.phase {
            ControllerPhase::Running => self.begin_reset(why),
            _ => self.die(why),
        }
    }

    /// Keeps an event, reads its log page, and requests the next event.
    fn note(&mut self, event: ControllerEvent) {
        self.events_seen += 1;
        if self.events_seen <= MAX_EVENTS as u64 {
            log::warn!("{}: event {event:?}", self.transport.name());
        }
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
        if event.log != 0 {
            let command =
                log_page(event.log, 0xffff_ffff, 512).data(DataPointer::Prp(self.scratch.bus(), 0));
            let deadline = self.transport.now() + self.limit;
            self.admin.send_off(command, Some(self.scratch.clone()), deadline);
        }
        self.admin.send_event_request(SubmissionEntry::admin(Opcode::AsyncEvent, 0));
    }
}

fn features(feature: u32, value: u32) -> SubmissionEntry {
    SubmissionEntry::admin(Opcode::SetFeatures, 0).dword(10, feature).dword(11, value)
}

/// The command that reads `bytes` bytes of a log page.
pub(super) fn log_page(log: u8, namespace: u32, bytes: u32) -> SubmissionEntry {
    let words = bytes / 4 - 1;
    let command = SubmissionEntry::admin(Opcode::GetLogPage, namespace);
    command.dword(10, u32::from(log) | (words & 0xffff) << 16).dword(11, words >> 16)
}
