//! The formats of the NVM Express specification: registers, commands, completions, and the
//! structures by which a controller describes itself. No I/O.

mod command;
mod completion;
mod identify;
mod logs;
mod registers;

pub use command::{AdminOpcode, DataPointer, IoOpcode, SubmissionEntry};
pub use completion::{CommandStatus, CompletionEntry};
pub use identify::{BlockFormat, ControllerFacts, NamespaceFacts, UnsupportedNamespace};
pub use logs::{ErrorEntry, SmartLog};
pub use registers::{ControllerCapabilities, register};

/// Bytes of a page of the controller's memory, the only size that this driver uses.
pub const PAGE: usize = 4096;

/// Bytes of a submission queue entry.
pub const SUBMISSION: usize = 64;

/// Bytes of a completion queue entry.
pub const COMPLETION: usize = 16;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |part| u16::from_le_bytes([part[0], part[1]]))
}

/// The number of 32 bits at `at`; 0 where there are too few bytes.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn u128_at(bytes: &[u8], at: usize) -> u128 {
    u128::from(u64_at(bytes, at)) | u128::from(u64_at(bytes, at + 8)) << 64
}

/// The text of a field that is padded with spaces. Bytes that do not print become dots.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().rposition(|byte| !matches!(byte, b' ' | 0)).map_or(0, |at| at + 1);
    let shown = |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '.' };
    bytes[..end].iter().map(shown).collect()
}
