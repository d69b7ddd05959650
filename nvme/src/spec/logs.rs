//! Log pages.

use super::{u16_at, u64_at, u128_at};

/// The SMART / Health Information log page (02h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmartLog {
    /// Bits of critical warnings.
    pub critical_warning: u8,
    /// Temperature in kelvins.
    pub temperature_k: u16,
    /// Spare capacity that is left, in percent.
    pub available_spare_percent: u8,
    /// The spare capacity below which the controller warns.
    pub spare_threshold_percent: u8,
    /// Estimate of the life that is used up, in percent; it can be over 100.
    pub used_percent: u8,
    /// Units of 512,000 bytes that were read.
    pub data_units_read: u128,
    /// Units of 512,000 bytes that were written.
    pub data_units_written: u128,
    /// Read commands.
    pub reads: u128,
    /// Write commands.
    pub writes: u128,
    /// Power cycles.
    pub power_cycles: u128,
    /// Hours with power.
    pub power_on_hours: u128,
    /// Shutdowns without notice.
    pub unsafe_shutdowns: u128,
    /// Errors of the media or of data integrity.
    pub media_errors: u128,
    /// Entries that the error log has had.
    pub error_log_entries: u128,
}

/// An entry of the Error Information log page (01h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorEntry {
    /// The number of errors before this one; 0 is no entry.
    pub count: u64,
    /// The queue of the command.
    pub queue: u16,
    /// The number of the command.
    pub command: u16,
    /// The status of the command.
    pub status: u16,
    /// The first block of the command.
    pub block: u64,
}

impl SmartLog {
    /// Bytes of the page.
    pub const BYTES: usize = 512;

    /// Reads the page.
    pub fn parse(bytes: &[u8]) -> Self {
        SmartLog {
            critical_warning: bytes[0],
            temperature_k: u16_at(bytes, 1),
            available_spare_percent: bytes[3],
            spare_threshold_percent: bytes[4],
            used_percent: bytes[5],
            data_units_read: u128_at(bytes, 32),
            data_units_written: u128_at(bytes, 48),
            reads: u128_at(bytes, 64),
            writes: u128_at(bytes, 80),
            power_cycles: u128_at(bytes, 112),
            power_on_hours: u128_at(bytes, 128),
            unsafe_shutdowns: u128_at(bytes, 144),
            media_errors: u128_at(bytes, 160),
            error_log_entries: u128_at(bytes, 176),
        }
    }
}

impl ErrorEntry {
    /// Bytes of an entry.
    pub const BYTES: usize = 64;

    /// Reads the entries of the page, the newest first.
    pub fn parse_all(bytes: &[u8]) -> Vec<Self> {
        let entry = |bytes: &[u8]| ErrorEntry {
            count: u64_at(bytes, 0),
            queue: u16_at(bytes, 8),
            command: u16_at(bytes, 10),
            status: u16_at(bytes, 12) >> 1,
            block: u64_at(bytes, 16),
        };
        let entries = bytes.chunks_exact(ErrorEntry::BYTES).map(entry);
        entries.take_while(|entry| entry.count != 0).collect()
    }
}
