//! The admin queue: commands with tickets, so that no thread has to wait for a command.

use std::sync::Arc;
use std::time::Duration;

use defuse_block::{Errno, Result};

use crate::ring::{NextCompletion, QueuePair};
use crate::spec::{CompletionEntry, ControllerCapabilities, SubmissionEntry};
use crate::{ControllerTransport, DmaMemory};

/// Entries of the admin queues.
const ENTRIES: u16 = 32;

/// Bits of a command's number that name its slot.
const SLOT_BITS: u32 = 5;

/// The claim of a caller to the completion of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandTicket {
    slot: usize,
    serial: u16,
}

/// The answer to a command: a completion with any status, or `EIO` if a reset discarded the
/// command.
pub(crate) type AdminResult = Result<CompletionEntry>;

pub(crate) struct AdminQueue {
    ring: QueuePair,
    slots: Vec<AdminSlot>,
}

#[derive(Default)]
struct AdminSlot {
    state: AdminSlotState,
    serial: u16,
    /// The deadline of the answer; `None` for an event request.
    deadline: Option<Duration>,
    /// Memory that the controller may use until it has answered.
    _keep: Option<DmaMemory>,
}

#[derive(Default)]
enum AdminSlotState {
    #[default]
    Free,
    Sent(CompletionUse),
    Answered(AdminResult),
}

/// The use of an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CompletionUse {
    Ticket,
    Nothing,
    Event,
}

/// The completions that were found at once.
#[derive(Default)]
pub(crate) struct ReapedCompletions {
    /// Results of Asynchronous Event Requests.
    pub(crate) events: Vec<u32>,
    /// A completion belonged to no command.
    pub(crate) invalid: bool,
}

impl AdminQueue {
    pub(crate) fn new(
        transport: &Arc<dyn ControllerTransport>,
        capabilities: ControllerCapabilities,
    ) -> Result<Self> {
        let entries = u32::from(ENTRIES).min(capabilities.max_entries()).max(2) as u16;
        let ring = QueuePair::new(transport, capabilities, 0, entries)?;
        let slots = (0..usize::from(entries) - 1).map(|_| AdminSlot::default()).collect();
        Ok(AdminQueue { ring, slots })
    }

    /// The register AQA, and the addresses of the admin queues.
    pub(crate) fn registers(&self) -> (u32, (u64, u64)) {
        let last = u32::from(self.ring.entries()) - 1;
        (last << 16 | last, self.ring.addresses())
    }

    /// Makes the queues empty, for a controller that is not enabled.
    pub(crate) fn clear(&mut self) {
        self.lose();
        self.ring.clear();
    }

    /// Answers all commands with an error, because the controller will not answer them.
    pub(crate) fn lose(&mut self) {
        for slot in &mut self.slots {
            if let AdminSlotState::Sent(wants) = slot.state {
                slot._keep = None;
                slot.state = match wants {
                    CompletionUse::Ticket => AdminSlotState::Answered(Err(Errno::IO)),
                    _ => AdminSlotState::Free,
                };
            }
        }
    }

    /// Sends a command, with memory that it uses. `None` where the queue is full.
    pub(crate) fn send(
        &mut self,
        command: SubmissionEntry,
        keep: Option<DmaMemory>,
        deadline: Duration,
    ) -> Option<CommandTicket> {
        self.submit(command, keep, Some(deadline), CompletionUse::Ticket)
    }

    /// Sends a command whose answer is not needed. False if the queue is full.
    pub(crate) fn send_off(
        &mut self,
        command: SubmissionEntry,
        keep: Option<DmaMemory>,
        deadline: Duration,
    ) -> bool {
        self.submit(command, keep, Some(deadline), CompletionUse::Nothing).is_some()
    }

    /// Sends a request for an event. Its answer may never come.
    pub(crate) fn send_event_request(&mut self, command: SubmissionEntry) -> bool {
        self.submit(command, None, None, CompletionUse::Event).is_some()
    }

    fn submit(
        &mut self,
        command: SubmissionEntry,
        keep: Option<DmaMemory>,
        deadline: Option<Duration>,
        wants: CompletionUse,
    ) -> Option<CommandTicket> {
        let at = self.slots.iter().position(|slot| matches!(slot.state, AdminSlotState::Free))?;
        let slot = &mut self.slots[at];
        let serial = slot.serial.wrapping_add(1) & (u16::MAX >> SLOT_BITS);
        *slot = AdminSlot { state: AdminSlotState::Sent(wants), serial, deadline, _keep: keep };
        self.ring.write_command(&command.id(at as u16 | serial << SLOT_BITS));
        self.ring.ring();
        Some(CommandTicket { slot: at, serial })
    }

    /// Takes the completions that there are.
    pub(crate) fn poll(&mut self) -> ReapedCompletions {
        let mut found = ReapedCompletions::default();
        for _ in 0..self.ring.entries() {
            let completion = match self.ring.next() {
                NextCompletion::Empty => break,
                NextCompletion::Done(completion) => completion,
                NextCompletion::Invalid => {
                    found.invalid = true;
                    continue;
                }
            };
            let at = usize::from(completion.id & ((1 << SLOT_BITS) - 1));
            let serial = completion.id >> SLOT_BITS;
            let slot = self.slots.get_mut(at).filter(|slot| slot.serial == serial);
            match slot {
                Some(slot) if matches!(slot.state, AdminSlotState::Sent(_)) => {
                    slot._keep = None;
                    let was = std::mem::take(&mut slot.state);
                    match was {
                        AdminSlotState::Sent(CompletionUse::Ticket) => {
                            slot.state = AdminSlotState::Answered(Ok(completion))
                        }
                        AdminSlotState::Sent(CompletionUse::Event) if completion.status.is_ok() => {
                            found.events.push(completion.result);
                        }
                        _ => {}
                    }
                }
                _ => found.invalid = true,
            }
        }
        self.ring.release();
        found
    }

    /// True if the deadline of a command is over.
    pub(crate) fn is_overdue(&self, now: Duration) -> bool {
        self.slots.iter().any(|slot| {
            matches!(slot.state, AdminSlotState::Sent(_))
                && slot.deadline.is_some_and(|until| now > until)
        })
    }

    /// Takes the answer to a command; `None` while there is none.
    pub(crate) fn take(&mut self, ticket: CommandTicket) -> Option<AdminResult> {
        let slot = &mut self.slots[ticket.slot];
        if slot.serial != ticket.serial {
            return Some(Err(Errno::IO));
        }
        match std::mem::take(&mut slot.state) {
            AdminSlotState::Answered(answer) => Some(answer),
            AdminSlotState::Free => Some(Err(Errno::IO)),
            sent => {
                slot.state = sent;
                None
            }
        }
    }
}
