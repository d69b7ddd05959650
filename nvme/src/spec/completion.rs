//! Completion queue entries and their status.

use std::fmt;

use defuse_block::Errno;

/// A completion queue entry without its phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionEntry {
    /// The result of the command (DW0).
    pub result: u32,
    /// The head of the submission queue.
    pub head: u16,
    /// The submission queue.
    pub queue: u16,
    /// The number of the command.
    pub id: u16,
    /// The status.
    pub status: CommandStatus,
}

/// The status of a command: 15 bits. The lowest eight are a code, and the next three its type.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CommandStatus(pub u16);

impl CommandStatus {
    /// Success.
    pub const SUCCESS: CommandStatus = CommandStatus(0);
    /// Invalid Command Opcode.
    pub const INVALID_OPCODE: CommandStatus = CommandStatus(0x01);
    /// Invalid Field in Command.
    pub const INVALID_FIELD: CommandStatus = CommandStatus(0x02);
    /// Data Transfer Error.
    pub const TRANSFER: CommandStatus = CommandStatus(0x04);
    /// Internal Error.
    pub const INTERNAL: CommandStatus = CommandStatus(0x06);
    /// Command Abort Requested.
    pub const ABORTED: CommandStatus = CommandStatus(0x07);
    /// LBA Out of Range.
    pub const OUT_OF_RANGE: CommandStatus = CommandStatus(0x80);
    /// Namespace Not Ready.
    pub const NOT_READY: CommandStatus = CommandStatus(0x82);
    /// Invalid Queue Identifier.
    pub const INVALID_QUEUE: CommandStatus = CommandStatus(0x101);
    /// Invalid Log Page.
    pub const INVALID_LOG: CommandStatus = CommandStatus(0x109);
    /// Write Fault.
    pub const WRITE_FAULT: CommandStatus = CommandStatus(0x280);
    /// Unrecovered Read Error.
    pub const READ_ERROR: CommandStatus = CommandStatus(0x281);
    /// Compare Failure.
    pub const DIFFERENT: CommandStatus = CommandStatus(0x285);
    /// Retrying cannot help.
    pub const DO_NOT_RETRY: u16 = 1 << 14;

    /// True for success.
    pub fn is_ok(self) -> bool {
        self.code() == 0
    }

    /// The type and code, without the other bits.
    pub fn code(self) -> u16 {
        self.0 & 0x7ff
    }

    /// True where the same command can succeed a moment later.
    pub fn is_retryable(self) -> bool {
        let transient = matches!(self.code(), 0x04 | 0x06 | 0x08 | 0x82) || self.code() >> 8 == 3;
        transient && self.0 & CommandStatus::DO_NOT_RETRY == 0
    }

    /// The error for a user of the device.
    pub fn errno(self) -> Errno {
        match self.code() {
            0x01 | 0x0b => Errno::OPNOTSUPP,
            0x02 | 0x80 => Errno::INVAL,
            0x81 => Errno::NOSPC,
            0x20 => Errno::ROFS,
            0x182 => Errno::PERM,
            // The value of a miscompare, as for a compare of SCSI.
            0x285 => Errno::ILSEQ,
            0x286 => Errno::ACCESS,
            _ => Errno::IO,
        }
    }
}

impl fmt::Display for CommandStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.code() {
            0x00 => "success",
            0x01 => "invalid opcode",
            0x02 => "invalid field",
            0x04 => "data transfer error",
            0x05 => "power loss",
            0x06 => "internal error",
            0x07 => "aborted",
            0x08 => "aborted with its queue",
            0x0b => "invalid namespace or format",
            0x20 => "write-protected",
            0x80 => "block out of range",
            0x81 => "capacity exceeded",
            0x82 => "namespace not ready",
            0x101 => "invalid queue",
            0x109 => "invalid log page",
            0x280 => "write fault",
            0x281 => "unrecovered read error",
            0x285 => "blocks that differ",
            0x286 => "access denied",
            _ => "error",
        };
        write!(f, "{name} (status {:#x})", self.code())
    }
}

impl fmt::Debug for CommandStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
