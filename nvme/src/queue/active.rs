//! Active operations, and the commands that perform them.

use std::time::Duration;

use defuse_block::{BlockOp, BlockOpKind, Errno, Result};

use super::data::{BusRange, PointerListPage, prp};
use super::{NvmeQueue, bounce::BounceBuffers};
use crate::spec::{DataPointer, IoOpcode, PAGE, SubmissionEntry};

/// The place of an operation.
#[derive(Default)]
pub(super) struct CommandSlot {
    pub(super) flight: Option<ActiveOperation>,
    /// A part of the numbers of the slot's commands, so that an answer to an old command is
    /// noticed.
    pub(super) sequence: u16,
    /// The controller has a command of the operation.
    pub(super) sent: bool,
    /// The command did not come back in time.
    pub(super) late: bool,
    pub(super) deadline: Duration,
    pub(super) tries: u8,
}

pub(super) struct ActiveOperation {
    pub(super) tag: u64,
    pub(super) kind: BlockOpKind,
    /// Pages that stand in for the operation's memory.
    pub(super) pages: Vec<u32>,
    /// The first block that is not done, and the number of these blocks: zeroing and discarding
    /// take several commands.
    pub(super) block: u64,
    pub(super) left: u64,
    /// Blocks of the command that is in flight.
    pub(super) step: u64,
}

/// A command that can be sent now, or not.
pub(super) enum CommandReadiness {
    Yes(SubmissionEntry),
    /// Other operations have the pages that it needs.
    Later,
}

impl ActiveOperation {
    pub(super) fn new(op: BlockOp, block_size: u32) -> Self {
        let (block, left) = op.kind.range(block_size).unwrap_or_default();
        ActiveOperation { tag: op.tag, kind: op.kind, pages: Vec::new(), block, left, step: 0 }
    }

    /// Records that a command is done. True if the operation is, too.
    pub(super) fn advance(&mut self) -> bool {
        self.block += self.step;
        self.left = self.left.saturating_sub(self.step);
        self.left == 0
    }
}

impl NvmeQueue {
    /// The next command of the operation in `slot`.
    #[inline]
    pub(super) fn command(&mut self, slot: usize) -> Result<CommandReadiness> {
        let Some(mut flight) = self.slots[slot].flight.take() else {
            return Ok(CommandReadiness::Later);
        };
        let ready = self.command_of(slot, &mut flight);
        self.slots[slot].flight = Some(flight);
        ready
    }

    fn command_of(
        &mut self,
        slot: usize,
        flight: &mut ActiveOperation,
    ) -> Result<CommandReadiness> {
        let space = &self.space;
        let id = space.id;
        let (block, left) = (flight.block, flight.left);
        flight.step = left;
        let (opcode, fua) = match &flight.kind {
            BlockOpKind::Read { .. } => (IoOpcode::Read, false),
            BlockOpKind::Write { .. } if self.use_.compares => (IoOpcode::Compare, false),
            BlockOpKind::Write { fua, .. } => (IoOpcode::Write, *fua),
            BlockOpKind::Flush => {
                return Ok(CommandReadiness::Yes(SubmissionEntry::io(IoOpcode::Flush, id)));
            }
            BlockOpKind::Discard { .. } => {
                flight.step = left.min(space.max_discard);
                return Ok(CommandReadiness::Yes(self.deallocate(slot, block, flight.step as u32)));
            }
            BlockOpKind::Zero { .. } if space.writes_zeroes => {
                flight.step = left.min(space.max_zeroes);
                let command =
                    SubmissionEntry::io(IoOpcode::WriteZeroes, id).range(block, flight.step as u32);
                return Ok(CommandReadiness::Yes(command));
            }
            BlockOpKind::Zero { .. } => {
                let largest = self.space.facts.max_transfer / self.space.facts.block_size;
                flight.step = left.min(u64::from(largest));
                return self.write_of_zeros(slot, block, flight.step as u32);
            }
        };
        let Some(pointer) = self.pointer(slot, flight)? else { return Ok(CommandReadiness::Later) };
        let command = SubmissionEntry::io(opcode, id).range(block, left as u32).data(pointer);
        Ok(CommandReadiness::Yes(if fua {
            command.dword(12, command.get(12) | 1 << 30)
        } else {
            command
        }))
    }

    /// The pointer to the data of a read or write; `None` while other operations have the pages
    /// that it needs.
    #[inline]
    fn pointer(
        &mut self,
        slot: usize,
        flight: &mut ActiveOperation,
    ) -> Result<Option<DataPointer>> {
        let (BlockOpKind::Read { memory, .. } | BlockOpKind::Write { memory, .. }) = &flight.kind
        else {
            return Ok(None);
        };
        let list = PointerListPage { memory: &self.lists, at: slot * PAGE };
        if flight.pages.is_empty() {
            let direct = self.regions.pointer(memory, list, self.space.sgl, &mut self.ranges);
            if direct.is_some() {
                return Ok(direct);
            }
        }
        if self.bounce.is_none() {
            self.bounce = Some(BounceBuffers::new(&*self.controller.transport, self.bounce_pages)?);
        }
        let Some(bounce) = &mut self.bounce else { return Err(Errno::NOMEM) };
        let bytes = memory.bytes();
        if flight.pages.is_empty() {
            let Some(pages) = bounce.take(bytes) else { return Ok(None) };
            flight.pages = pages;
        }
        if let BlockOpKind::Write { memory, .. } = &flight.kind {
            bounce.fill(&flight.pages, memory);
        }
        bounce.ranges(&flight.pages, bytes, &mut self.ranges);
        Ok(Some(prp(&self.ranges, list)))
    }

    /// A Dataset Management command with one range, which lies in the page of the slot.
    fn deallocate(&self, slot: usize, block: u64, blocks: u32) -> SubmissionEntry {
        let list = PointerListPage { memory: &self.lists, at: slot * PAGE };
        list.memory.write64(list.at, u64::from(blocks) << 32);
        list.memory.write64(list.at + 8, block);
        let command = SubmissionEntry::io(IoOpcode::DatasetManagement, self.space.id);
        command.data(DataPointer::Prp(list.bus(), 0)).dword(11, 1 << 2)
    }

    /// A write of zeros: all its pages are the same page of zeros.
    fn write_of_zeros(&mut self, slot: usize, block: u64, blocks: u32) -> Result<CommandReadiness> {
        if self.zeros.is_none() {
            self.zeros = Some(self.controller.transport.allocate(PAGE)?);
        }
        let Some(zeros) = &self.zeros else { return Err(Errno::NOMEM) };
        let bytes = blocks as usize * self.space.facts.block_size as usize;
        self.ranges.clear();
        let lens = (0..bytes).step_by(PAGE).map(|at| PAGE.min(bytes - at));
        self.ranges.extend(lens.map(|len| -> BusRange { (zeros.bus(), len) }));
        let pointer = prp(&self.ranges, PointerListPage { memory: &self.lists, at: slot * PAGE });
        Ok(CommandReadiness::Yes(
            SubmissionEntry::io(IoOpcode::Write, self.space.id).range(block, blocks).data(pointer),
        ))
    }
}
