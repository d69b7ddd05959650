//! Warnings about servers.

use defuse_fs::{Errno, Result};
use defuse_probe::WarningLimiter;
use defuse_wire::abi::Opcode;

/// Limits the warnings about servers, which can cause any number.
pub(crate) static LOG: WarningLimiter = WarningLimiter::new();

/// Returns the result of decoding a reply to a request of `opcode`, whose body has `len` bytes.
/// Logs an invalid reply.
pub(crate) fn log_decode_error<T>(opcode: Opcode, len: usize, decoded: Result<T>) -> Result<T> {
    decoded.inspect_err(|&errno| {
        if errno == Errno::EIO {
            LOG.warn(|| format!("{}: an invalid reply of {len} bytes: EIO", opcode.name()));
        }
    })
}
