//! The I/O commands of the modelled controller.

use defuse_block::model::SsdWork;
use defuse_block::{BlockOpKind, Errno, FRAME, MemoryRegion, MemorySegments};

use super::controller_state::{CommandResult, ControllerModelState};
use super::faults::ControllerFault;
use crate::spec::{CommandStatus, SubmissionEntry};

/// The bit of FUA in double word 12.
const FUA: u32 = 1 << 30;

impl ControllerModelState {
    /// The work of a command for the SSD, which has blocks of 4 KiB: a part of a block takes as
    /// long as the whole block. A command that will be refused only takes the time of the
    /// controller.
    pub(super) fn load(&self, command: &SubmissionEntry) -> SsdWork {
        let range = range(command);
        let moves = command.namespace() == 1 && self.bytes(range).is_ok();
        let (size, frame) = (u64::from(self.facts.block_size), FRAME as u64);
        let block = |at: u64| at * size / frame;
        let blocks = |(at, blocks): (u64, u64)| ((at + blocks) * size).div_ceil(frame) - block(at);
        match command.opcode() {
            0x00 => SsdWork::Flush,
            0x01 if moves => {
                SsdWork::Write { blocks: blocks(range), fua: command.get(12) & FUA != 0 }
            }
            0x02 if moves => SsdWork::Read { block: block(range.0), blocks: blocks(range) },
            0x05 if moves && self.shape.compares => {
                SsdWork::Read { block: block(range.0), blocks: blocks(range) }
            }
            _ => SsdWork::Table,
        }
    }

    pub(super) fn io(
        &mut self,
        command: &SubmissionEntry,
        fault: Option<ControllerFault>,
    ) -> CommandResult {
        if command.namespace() != 1 {
            return Err(CommandStatus(0x0b));
        }
        let (block, blocks) = range(command);
        match command.opcode() {
            0x00 => self.line.flush().map_err(status)?,
            0x01 => self.write_blocks(command, (block, blocks), fault)?,
            0x02 => self.read_blocks(command, (block, blocks))?,
            0x05 if self.shape.compares => self.compare_blocks(command, (block, blocks))?,
            0x08 if self.shape.writes_zeroes => {
                self.check((block, blocks))?;
                self.line.run(BlockOpKind::Zero { block, blocks }).map_err(status)?;
            }
            0x09 if self.facts.discard => self.deallocate(command)?,
            _ => return Err(CommandStatus::INVALID_OPCODE),
        }
        Ok(0)
    }

    fn check(&self, (block, blocks): (u64, u64)) -> Result<(), CommandStatus> {
        if self.facts.holds(block, blocks) { Ok(()) } else { Err(CommandStatus::OUT_OF_RANGE) }
    }

    /// Bytes of a transfer that is allowed.
    fn bytes(&self, range: (u64, u64)) -> Result<usize, CommandStatus> {
        self.check(range)?;
        let bytes = range.1 as usize * self.facts.block_size as usize;
        let largest = FRAME << self.shape.mdts;
        if self.shape.mdts > 0 && bytes > largest {
            Err(CommandStatus::INVALID_FIELD)
        } else {
            Ok(bytes)
        }
    }

    fn read_blocks(
        &mut self,
        command: &SubmissionEntry,
        range: (u64, u64),
    ) -> Result<(), CommandStatus> {
        let mut data = vec![0; self.bytes(range)?];
        self.line.read(range.0, &mut data).map_err(status)?;
        self.memory.write_data(command, &data).ok_or(CommandStatus::TRANSFER)
    }

    fn compare_blocks(
        &mut self,
        command: &SubmissionEntry,
        range: (u64, u64),
    ) -> Result<(), CommandStatus> {
        let mut data = vec![0; self.bytes(range)?];
        let expected = self.memory.take(command, data.len()).ok_or(CommandStatus::TRANSFER)?;
        self.line.read(range.0, &mut data).map_err(status)?;
        if data == expected { Ok(()) } else { Err(CommandStatus::DIFFERENT) }
    }

    fn write_blocks(
        &mut self,
        command: &SubmissionEntry,
        range: (u64, u64),
        fault: Option<ControllerFault>,
    ) -> Result<(), CommandStatus> {
        let bytes = self.bytes(range)?;
        let mut data = self.memory.take(command, bytes).ok_or(CommandStatus::TRANSFER)?;
        let block = match fault {
            Some(ControllerFault::Lose) => return Ok(()),
            Some(ControllerFault::Misdirect(block)) => block,
            _ => range.0,
        };
        if fault == Some(ControllerFault::Tear) {
            let unit = self.facts.block_size as usize;
            data.truncate(data.len() / unit / 2 * unit);
            self.line.write(block, &data).map_err(status)?;
            return Err(CommandStatus::WRITE_FAULT);
        }
        if command.get(12) & FUA == 0 {
            return self.line.write(block, &data).map_err(status);
        }
        // The data is in frames, so that the device below receives FUA, too.
        let frames = data.len().div_ceil(FRAME) as u32;
        let region = MemoryRegion::new(frames.next_power_of_two()).map_err(status)?;
        let mut run = region.take(frames).ok_or(CommandStatus::INTERNAL)?;
        run[..data.len()].copy_from_slice(&data);
        let memory = match data.len() % FRAME {
            0 => MemorySegments::from(run),
            _ => {
                let part =
                    defuse_block::OperationMemory::Shared(std::sync::Arc::new(run), 0..data.len());
                MemorySegments::One(part)
            }
        };
        self.line.run(BlockOpKind::Write { block, memory, fua: true }).map_err(status)
    }

    fn deallocate(&mut self, command: &SubmissionEntry) -> Result<(), CommandStatus> {
        let ranges = (command.get(10) & 0xff) as usize + 1;
        let bytes = self.memory.take(command, ranges * 16).ok_or(CommandStatus::TRANSFER)?;
        if command.get(11) & 1 << 2 == 0 {
            return Ok(());
        }
        for range in bytes.chunks_exact(16) {
            let number = |from: usize, to: usize| {
                range[from..to].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
            };
            let (blocks, block) = (number(4, 8), number(8, 16));
            self.check((block, blocks))?;
            self.line.run(BlockOpKind::Discard { block, blocks }).map_err(status)?;
        }
        Ok(())
    }
}

/// The first block and the number of blocks of a command that has blocks.
fn range(command: &SubmissionEntry) -> (u64, u64) {
    (command.0[5], u64::from(command.get(12) & 0xffff) + 1)
}

fn status(errno: Errno) -> CommandStatus {
    match errno {
        Errno::INVAL => CommandStatus::INVALID_FIELD,
        Errno::NOSPC => CommandStatus(0x81),
        _ => CommandStatus::INTERNAL,
    }
}
