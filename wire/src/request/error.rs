//! Errors of decoding requests.

use crate::abi::{InHeader, Opcode};
use rustix::io::Errno;
use std::fmt;

/// A request that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeError {
    /// The opcode's number, if the header was complete.
    pub opcode: Option<u32>,
    /// The number for the reply, if the header was complete.
    pub unique: Option<u64>,
    /// The problem.
    pub problem: DecodeProblem,
}

/// A problem of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeProblem {
    /// The opcode is unknown.
    #[error("unknown opcode")]
    UnknownOpcode,
    /// A structure exceeds the remaining bytes.
    #[error("{need} bytes are needed, {have} are left")]
    Truncated {
        /// Size of the structure.
        need: usize,
        /// Bytes that are left.
        have: usize,
    },
    /// The header's length differs from the received length.
    #[error("the header says {header} bytes, but {read} were read")]
    Length {
        /// The length in the header.
        header: usize,
        /// The received length.
        read: usize,
    },
    /// A name has no NUL.
    #[error("a name does not end with NUL")]
    UnterminatedName,
    /// The length of the data differs from that in its structure.
    #[error("{declared} bytes of data are declared, but {present} are present")]
    DataLength {
        /// The length in the structure.
        declared: u64,
        /// The length of the data.
        present: usize,
    },
    /// There are bytes after the last argument.
    #[error("{0} bytes follow the last argument")]
    TrailingBytes(usize),
    /// The extensions of a creation are malformed.
    #[error("extension: {0}")]
    Extension(&'static str),
}

impl DecodeError {
    pub(super) fn new(header: &InHeader, problem: DecodeProblem) -> DecodeError {
        DecodeError { opcode: Some(header.opcode), unique: Some(header.unique), problem }
    }

    /// The reply, if the kernel waits for one. After ENOSYS the kernel no longer sends an unknown
    /// operation; EIO is for a malformed request.
    pub fn reply(&self) -> Option<(u64, Errno)> {
        let known = self.opcode.and_then(Opcode::from_u32);
        if known.is_some_and(|opcode| !opcode.has_reply()) {
            return None;
        }
        let errno = match self.problem {
            DecodeProblem::UnknownOpcode => Errno::NOSYS,
            _ => Errno::IO,
        };
        self.unique.map(|unique| (unique, errno))
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.opcode.map(|number| (number, Opcode::from_u32(number))) {
            Some((_, Some(opcode))) => write!(f, "request {}", opcode.name())?,
            Some((number, None)) => write!(f, "request with opcode {number}")?,
            None => write!(f, "request")?,
        }
        if let Some(unique) = self.unique {
            write!(f, " (unique {unique})")?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl std::error::Error for DecodeError {}
