//! Admin commands whose answers the caller waits for.

use std::fmt;

use defuse_block::{Errno, QueuePriority};

use super::core::log_page;
use super::{ControllerState, NvmeController};
use crate::ring::QueuePair;
use crate::spec::{
    AdminOpcode as Opcode, CommandStatus, CompletionEntry, ControllerFacts, DataPointer,
    ErrorEntry, PAGE, SmartLog, SubmissionEntry,
};

impl NvmeController {
    /// Sends an admin command and waits for its completion.
    pub(crate) fn run(&self, command: SubmissionEntry) -> Result<CompletionEntry, AdminFailure> {
        let ticket = loop {
            if let Some(ticket) = self.send(command) {
                break ticket;
            }
            if self.state() != ControllerState::Running {
                return Err(AdminFailure::Lost);
            }
            self.step();
            self.pause();
        };
        loop {
            match self.take(ticket) {
                Some(Ok(completion)) if completion.status.is_ok() => return Ok(completion),
                Some(Ok(completion)) => return Err(AdminFailure::Status(completion.status)),
                Some(Err(_)) => return Err(AdminFailure::Lost),
                None => self.pause(),
            }
        }
    }

    /// Runs an admin command that fills memory, and returns its bytes.
    fn fetch(&self, command: SubmissionEntry, bytes: usize) -> Result<Vec<u8>, AdminFailure> {
        let memory = self.transport.allocate(bytes.next_multiple_of(PAGE));
        let memory = memory.map_err(AdminFailure::Memory)?;
        let second = if bytes > PAGE { memory.bus() + PAGE as u64 } else { 0 };
        self.run(command.data(DataPointer::Prp(memory.bus(), second)))?;
        let mut copy = vec![0; bytes];
        memory.copy_out(0, &mut copy);
        Ok(copy)
    }

    /// A structure of Identify.
    pub(crate) fn identify(&self, cns: u32, namespace: u32) -> Result<Vec<u8>, AdminFailure> {
        self.fetch(SubmissionEntry::admin(Opcode::Identify, namespace).dword(10, cns), PAGE)
    }

    /// The facts about the controller.
    pub(crate) fn controller_facts(&self) -> Result<ControllerFacts, AdminFailure> {
        Ok(ControllerFacts::parse(&self.identify(1, 0)?))
    }

    /// The SMART log page.
    pub(crate) fn smart(&self) -> Result<SmartLog, AdminFailure> {
        let bytes = self.fetch(log_page(2, u32::MAX, SmartLog::BYTES as u32), SmartLog::BYTES)?;
        Ok(SmartLog::parse(&bytes))
    }

    /// Entries of the error log, the newest first, up to 64.
    pub(crate) fn errors(&self, entries: u32) -> Result<Vec<ErrorEntry>, AdminFailure> {
        let bytes = entries.clamp(1, 64) as usize * ErrorEntry::BYTES;
        let bytes = self.fetch(log_page(1, u32::MAX, bytes as u32), bytes)?;
        Ok(ErrorEntry::parse_all(&bytes))
    }

    /// The commands that make a completion and a submission queue. A controller without priorities
    /// ignores the priority.
    pub(crate) fn creation(
        &self,
        ring: &QueuePair,
        vector: Option<u16>,
        priority: QueuePriority,
    ) -> [SubmissionEntry; 2] {
        let priority = match priority {
            _ if !self.capabilities.has_priorities() => 0,
            QueuePriority::High => 1,
            QueuePriority::Medium => 2,
            QueuePriority::Low => 3,
        };
        let size = u32::from(ring.number()) | (u32::from(ring.entries()) - 1) << 16;
        let interrupts = vector.map_or(0, |vector| 2 | u32::from(vector) << 16);
        let (submissions, completions) = ring.addresses();
        [
            SubmissionEntry::admin(Opcode::CreateCompletionQueue, 0)
                .data(DataPointer::Prp(completions, 0))
                .dword(10, size)
                .dword(11, 1 | interrupts),
            SubmissionEntry::admin(Opcode::CreateSubmissionQueue, 0)
                .data(DataPointer::Prp(submissions, 0))
                .dword(10, size)
                .dword(11, 1 | priority << 1 | u32::from(ring.number()) << 16),
        ]
    }

    /// Deletes a pair of queues.
    pub(crate) fn delete(&self, number: u16) {
        for opcode in [Opcode::DeleteSubmissionQueue, Opcode::DeleteCompletionQueue] {
            let _ = self.run(SubmissionEntry::admin(opcode, 0).dword(10, u32::from(number)));
        }
    }
}

/// A failure of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminFailure {
    /// The controller refused the command.
    Status(CommandStatus),
    /// The controller was reset meanwhile, or is not used any more.
    Lost,
    /// There was no memory for the data of the command.
    Memory(Errno),
}

impl fmt::Display for AdminFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdminFailure::Status(status) => write!(f, "{status}"),
            AdminFailure::Lost => write!(f, "the controller was reset or is gone"),
            AdminFailure::Memory(errno) => write!(f, "no memory: {errno}"),
        }
    }
}
