//! A submission queue with its completion queue, in memory of the controller.

use std::sync::Arc;

use defuse_block::Result;

use crate::spec::{
    COMPLETION, CommandStatus, CompletionEntry, ControllerCapabilities, PAGE, SUBMISSION,
    SubmissionEntry,
};
use crate::{ControllerTransport, DmaMemory};

/// The pair of queues of one number.
pub(crate) struct QueuePair {
    transport: Arc<dyn ControllerTransport>,
    submissions: DmaMemory,
    completions: DmaMemory,
    /// Entries of each queue. One remains unused.
    entries: u16,
    number: u16,
    submission_doorbell: u32,
    completion_doorbell: u32,
    tail: u16,
    /// The tail that was last written to the doorbell.
    published: u16,
    head: u16,
    /// Completions were taken, but not yet released by the doorbell.
    taken: bool,
    phase: bool,
}

/// The next entry of a completion queue.
#[derive(Debug)]
pub(crate) enum NextCompletion {
    /// Nothing.
    Empty,
    /// A completion.
    Done(CompletionEntry),
    /// A completion that cannot belong to this queue.
    Invalid,
}

impl QueuePair {
    /// Queues of `entries` entries. The controller does not know them yet.
    pub(crate) fn new(
        transport: &Arc<dyn ControllerTransport>,
        capabilities: ControllerCapabilities,
        number: u16,
        entries: u16,
    ) -> Result<Self> {
        let bytes = |size: usize| (usize::from(entries) * size).next_multiple_of(PAGE);
        Ok(QueuePair {
            submissions: transport.allocate(bytes(SUBMISSION))?,
            completions: transport.allocate(bytes(COMPLETION))?,
            transport: Arc::clone(transport),
            entries,
            number,
            submission_doorbell: capabilities.submission_doorbell(number),
            completion_doorbell: capabilities.completion_doorbell(number),
            tail: 0,
            published: 0,
            head: 0,
            taken: false,
            phase: true,
        })
    }

    /// Makes the queues empty, while the controller does not know them.
    pub(crate) fn clear(&mut self) {
        self.completions.clear();
        (self.tail, self.published, self.head) = (0, 0, 0);
        (self.phase, self.taken) = (true, false);
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    pub(crate) fn entries(&self) -> u16 {
        self.entries
    }

    /// Addresses of the submission and the completion queue.
    pub(crate) fn addresses(&self) -> (u64, u64) {
        (self.submissions.bus(), self.completions.bus())
    }

    /// Writes a command. The caller has fewer commands in flight than there are entries, less one.
    #[inline]
    pub(crate) fn write_command(&mut self, command: &SubmissionEntry) {
        let at = usize::from(self.tail) * SUBMISSION;
        for (number, word) in command.0.iter().enumerate() {
            self.submissions.write64(at + number * 8, *word);
        }
        self.tail = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
    }

    /// Rings the doorbell for all written commands.
    #[inline]
    pub(crate) fn ring(&mut self) {
        if self.published != self.tail {
            self.published = self.tail;
            self.transport.write32(self.submission_doorbell, u32::from(self.tail));
        }
    }

    /// Takes the next completion.
    #[inline]
    pub(crate) fn next(&mut self) -> NextCompletion {
        let at = usize::from(self.head) * COMPLETION;
        let last = self.completions.read32(at + 12);
        if (last >> 16 & 1 == 1) != self.phase {
            return NextCompletion::Empty;
        }
        let middle = self.completions.read32(at + 8);
        let completion = CompletionEntry {
            result: self.completions.read32(at),
            head: middle as u16,
            queue: (middle >> 16) as u16,
            id: last as u16,
            status: CommandStatus((last >> 17) as u16),
        };
        self.head += 1;
        self.taken = true;
        if self.head == self.entries {
            (self.head, self.phase) = (0, !self.phase);
        }
        match completion.queue == self.number && completion.head < self.entries {
            true => NextCompletion::Done(completion),
            false => NextCompletion::Invalid,
        }
    }

    /// Releases the completions that were taken, by the doorbell.
    #[inline]
    pub(crate) fn release(&mut self) {
        if self.taken {
            self.taken = false;
            self.transport.write32(self.completion_doorbell, u32::from(self.head));
        }
    }
}
