//! Submission queue entries.

/// Opcodes of the admin queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AdminOpcode {
    /// Delete I/O Submission Queue.
    DeleteSubmissionQueue = 0x00,
    /// Create I/O Submission Queue.
    CreateSubmissionQueue = 0x01,
    /// Get Log Page.
    GetLogPage = 0x02,
    /// Delete I/O Completion Queue.
    DeleteCompletionQueue = 0x04,
    /// Create I/O Completion Queue.
    CreateCompletionQueue = 0x05,
    /// Identify.
    Identify = 0x06,
    /// Abort.
    Abort = 0x08,
    /// Set Features.
    SetFeatures = 0x09,
    /// Asynchronous Event Request.
    AsyncEvent = 0x0c,
}

/// Opcodes of an I/O queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum IoOpcode {
    /// Flush.
    Flush = 0x00,
    /// Write.
    Write = 0x01,
    /// Read.
    Read = 0x02,
    /// Compare.
    Compare = 0x05,
    /// Write Zeroes.
    WriteZeroes = 0x08,
    /// Dataset Management, used to deallocate.
    DatasetManagement = 0x09,
}

/// The data of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointer {
    /// The address of the first page, and of the second or of a list.
    Prp(u64, u64),
    /// One SGL descriptor.
    Sgl([u64; 2]),
}

/// A submission queue entry, as the words that are written to memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubmissionEntry(pub [u64; 8]);

impl SubmissionEntry {
    /// A command of the admin queue. Its queue gives it a number.
    pub fn admin(opcode: AdminOpcode, namespace: u32) -> Self {
        SubmissionEntry::new(opcode as u8, namespace)
    }

    /// A command of an I/O queue.
    pub fn io(opcode: IoOpcode, namespace: u32) -> Self {
        SubmissionEntry::new(opcode as u8, namespace)
    }

    fn new(opcode: u8, namespace: u32) -> Self {
        let mut words = [0; 8];
        words[0] = u64::from(opcode) | u64::from(namespace) << 32;
        SubmissionEntry(words)
    }

    /// The command with the number `id`.
    #[must_use]
    pub fn id(mut self, id: u16) -> Self {
        self.0[0] = self.0[0] & !0xffff_0000 | u64::from(id) << 16;
        self
    }

    /// The command with its data.
    #[must_use]
    pub fn data(mut self, pointer: DataPointer) -> Self {
        match pointer {
            DataPointer::Prp(first, second) => (self.0[3], self.0[4]) = (first, second),
            DataPointer::Sgl(descriptor) => {
                self.0[0] |= 1 << 14;
                (self.0[3], self.0[4]) = (descriptor[0], descriptor[1]);
            }
        }
        self
    }

    /// The command with the value of the double word `number`, from 10 on.
    #[must_use]
    pub fn dword(mut self, number: usize, value: u32) -> Self {
        let word = &mut self.0[number / 2];
        let shift = number % 2 * 32;
        *word = *word & !(0xffff_ffff << shift) | u64::from(value) << shift;
        self
    }

    /// The command with a range of logical blocks, at most 65,536, in the fields of reads and
    /// writes.
    #[must_use]
    pub fn range(self, block: u64, blocks: u32) -> Self {
        let mut words = self.0;
        words[5] = block;
        SubmissionEntry(words).dword(12, blocks.saturating_sub(1) & 0xffff)
    }

    /// The opcode.
    pub fn opcode(&self) -> u8 {
        self.0[0] as u8
    }

    /// The number of the command.
    pub fn number(&self) -> u16 {
        (self.0[0] >> 16) as u16
    }

    /// The namespace.
    pub fn namespace(&self) -> u32 {
        (self.0[0] >> 32) as u32
    }

    /// The value of the double word `number`.
    pub fn get(&self, number: usize) -> u32 {
        (self.0[number / 2] >> (number % 2 * 32)) as u32
    }

    /// The data.
    pub fn pointer(&self) -> DataPointer {
        match self.0[0] >> 14 & 3 {
            0 => DataPointer::Prp(self.0[3], self.0[4]),
            _ => DataPointer::Sgl([self.0[3], self.0[4]]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_its_fields_where_the_specification_has_them() {
        let command = SubmissionEntry::io(IoOpcode::Write, 7).id(0x1234).range(0x1_0000_0002, 256);
        let command = command.dword(13, 0xdead).data(DataPointer::Prp(0x5000, 0x6000));
        let bytes: Vec<u8> = command.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes[..8], [1, 0, 0x34, 0x12, 7, 0, 0, 0]);
        assert_eq!((bytes[25], bytes[33]), (0x50, 0x60), "the data pointer begins at byte 24");
        assert_eq!(bytes[40..50], [2, 0, 0, 0, 1, 0, 0, 0, 255, 0]);
        assert_eq!(bytes[52..54], [0xad, 0xde]);
        let sgl = SubmissionEntry::io(IoOpcode::Read, 1).data(DataPointer::Sgl([1, 2]));
        assert_eq!((sgl.0[0] >> 14 & 3, sgl.pointer()), (1, DataPointer::Sgl([1, 2])));
    }
}
