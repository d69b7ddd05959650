//! Numbers and strings in a row, for memory that one build of the project writes and reads.

use std::fmt;

/// The bytes are not in the form that this build writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedState;

impl fmt::Display for MalformedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it was written by another version: use program and library of one build")
    }
}

impl std::error::Error for MalformedState {}

/// Why the state of a run could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateError {
    /// It is of another version of its format.
    Version {
        /// The format, as SPEC.md names it.
        format: &'static str,
        /// The version that was found.
        found: u64,
        /// The version that this build reads.
        known: u64,
    },
    /// It is cut short, or makes no sense.
    Malformed,
}

impl StateError {
    /// `Ok` if `found` is the version that this build reads.
    pub(crate) fn check_version(
        format: &'static str,
        found: u64,
        known: u64,
    ) -> Result<(), StateError> {
        if found == known { Ok(()) } else { Err(StateError::Version { format, found, known }) }
    }
}

impl From<MalformedState> for StateError {
    fn from(_: MalformedState) -> Self {
        StateError::Malformed
    }
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateError::Version { format, found, known } => write!(
                f,
                "the {format} of this run has version {found}, and the library reads version {known}: \
                 use program and library of one build"
            ),
            StateError::Malformed => {
                f.write_str("the state of this run is damaged: start programs by `defuse run`")
            }
        }
    }
}

impl std::error::Error for StateError {}

/// Appends values.
#[derive(Default)]
pub(crate) struct ValueWriter {
    pub bytes: Vec<u8>,
}

impl ValueWriter {
    pub fn number(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub fn string(&mut self, value: &[u8]) {
        self.number(value.len() as u64);
        self.bytes.extend_from_slice(value);
    }
}

/// Takes values off the front.
pub(crate) struct ValueReader<'a> {
    pub bytes: &'a [u8],
}

impl<'a> ValueReader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], MalformedState> {
        let (head, rest) = self.bytes.split_at_checked(len).ok_or(MalformedState)?;
        self.bytes = rest;
        Ok(head)
    }

    pub fn number(&mut self) -> Result<u64, MalformedState> {
        let bytes = self.take(8)?.try_into().map_err(|_| MalformedState)?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub fn string(&mut self) -> Result<&'a [u8], MalformedState> {
        let len = self.number()?;
        self.take(usize::try_from(len).map_err(|_| MalformedState)?)
    }

    /// A length of a list whose elements take `least` bytes each.
    pub fn count(&mut self, least: usize) -> Result<usize, MalformedState> {
        let count = usize::try_from(self.number()?).map_err(|_| MalformedState)?;
        if count > self.bytes.len() / least { Err(MalformedState) } else { Ok(count) }
    }
}
