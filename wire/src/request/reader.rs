//! Reads arguments from the front of a request.

use super::{DecodeProblem, RequestExtensions, RequestPayload};
use std::marker::PhantomData;
use zerocopy::{FromBytes, IntoBytes};

/// The rest of a request. The opcode's structure comes from `op` if the transport keeps it
/// separate, everything else from `rest`.
pub(super) struct ArgumentReader<'a> {
    op: &'a [u8],
    rest: &'a [u8],
    /// Length of the data that follows `rest` in a pipe.
    pipe: usize,
}

impl<'a> ArgumentReader<'a> {
    pub(super) fn contiguous(args: &'a [u8], pipe: usize) -> ArgumentReader<'a> {
        ArgumentReader { op: &[], rest: args, pipe }
    }

    pub(super) fn split(op: &'a [u8], payload: &'a [u8]) -> ArgumentReader<'a> {
        ArgumentReader { op, rest: payload, pipe: 0 }
    }

    /// Reads a structure. It is copied, because it may be unaligned.
    pub(super) fn read_fixed<T: FromBytes>(&mut self) -> Result<T, DecodeProblem> {
        let source = if self.op.is_empty() { &mut self.rest } else { &mut self.op };
        let truncated = DecodeProblem::Truncated { need: size_of::<T>(), have: source.len() };
        let (value, rest) = T::read_from_prefix(source).map_err(|_| truncated)?;
        *source = rest;
        Ok(value)
    }

    /// Reads the first `len` bytes of a structure. The other fields are zero.
    pub(super) fn prefix<T: FromBytes + IntoBytes>(
        &mut self,
        len: usize,
    ) -> Result<T, DecodeProblem> {
        let source = if self.op.is_empty() { &mut self.rest } else { &mut self.op };
        let truncated = DecodeProblem::Truncated { need: len, have: source.len() };
        let (bytes, rest) = source.split_at_checked(len).ok_or(truncated)?;
        let mut value = T::new_zeroed();
        value.as_mut_bytes()[..len].copy_from_slice(bytes);
        *source = rest;
        Ok(value)
    }

    /// Reads a structure that has grown from `min` bytes and may grow further: takes all remaining
    /// bytes, because newer kernels send unknown fields.
    pub(super) fn read_growing<T: FromBytes + IntoBytes>(
        &mut self,
        min: usize,
    ) -> Result<T, DecodeProblem> {
        let have = self.op.len().max(self.rest.len());
        let value = self.prefix(have.clamp(min, size_of::<T>()))?;
        (self.op, self.rest) = (&[], &[]);
        Ok(value)
    }

    /// Reads a name or link target, without its NUL.
    pub(super) fn name(&mut self) -> Result<&'a [u8], DecodeProblem> {
        let (name, rest) = split_nul(self.rest).ok_or(DecodeProblem::UnterminatedName)?;
        self.rest = rest;
        Ok(name)
    }

    /// Reads all remaining bytes, whose number must be `declared`.
    pub(super) fn data(&mut self, declared: u32) -> Result<&'a [u8], DecodeProblem> {
        let present = self.rest.len();
        if present != declared as usize {
            return Err(DecodeProblem::DataLength { declared: u64::from(declared), present });
        }
        Ok(std::mem::take(&mut self.rest))
    }

    /// Like [`ArgumentReader::data`], but the data may be in the pipe.
    pub(super) fn payload(&mut self, declared: u32) -> Result<RequestPayload<'a>, DecodeProblem> {
        if self.pipe == 0 {
            return self.data(declared).map(RequestPayload::Memory);
        }
        let present = self.rest.len() + self.pipe;
        if present != declared as usize {
            return Err(DecodeProblem::DataLength { declared: u64::from(declared), present });
        }
        if !self.rest.is_empty() {
            return Err(DecodeProblem::TrailingBytes(self.rest.len()));
        }
        Ok(RequestPayload::Pipe(std::mem::take(&mut self.pipe)))
    }

    /// Reads all remaining bytes as `count` structures.
    pub(super) fn records<T: FromBytes>(
        &mut self,
        count: u32,
    ) -> Result<PackedRecords<'a, T>, DecodeProblem> {
        let declared = u64::from(count) * size_of::<T>() as u64;
        let present = self.rest.len();
        if declared != present as u64 {
            return Err(DecodeProblem::DataLength { declared, present });
        }
        Ok(PackedRecords::new(std::mem::take(&mut self.rest)))
    }

    /// Cuts the extensions off the end, `total_extlen` units of 8 bytes.
    pub(super) fn extensions(
        &mut self,
        total_extlen: u16,
    ) -> Result<RequestExtensions<'a>, DecodeProblem> {
        if total_extlen == 0 {
            return Ok(RequestExtensions::default());
        }
        let len = usize::from(total_extlen) * 8;
        let at = self.rest.len().checked_sub(len);
        let at = at.ok_or(DecodeProblem::Truncated { need: len, have: self.rest.len() })?;
        let (rest, ext) = self.rest.split_at(at);
        self.rest = rest;
        RequestExtensions::parse(ext).map_err(DecodeProblem::Extension)
    }

    /// Checks that no bytes are left. The kernel sends only what was negotiated, so that a rest
    /// means a decoding error.
    pub(super) fn finish(self) -> Result<(), DecodeProblem> {
        match self.op.len() + self.rest.len() + self.pipe {
            0 => Ok(()),
            left => Err(DecodeProblem::TrailingBytes(left)),
        }
    }
}

/// Splits at the first NUL, and removes it.
pub(super) fn split_nul(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let nul = bytes.iter().position(|&byte| byte == 0)?;
    Some((&bytes[..nul], &bytes[nul + 1..]))
}

/// Structures in sequence, copied one by one because they may be unaligned.
#[derive(Clone, Copy, Debug)]
pub struct PackedRecords<'a, T> {
    bytes: &'a [u8],
    of: PhantomData<T>,
}

impl<T> Default for PackedRecords<'_, T> {
    fn default() -> Self {
        PackedRecords { bytes: &[], of: PhantomData }
    }
}

impl<'a, T> PackedRecords<'a, T> {
    /// The length of `bytes` must be a multiple of the structure's size.
    pub(super) fn new(bytes: &'a [u8]) -> PackedRecords<'a, T> {
        debug_assert!(bytes.len().is_multiple_of(size_of::<T>()));
        PackedRecords { bytes, of: PhantomData }
    }

    /// The bytes of the structures.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<T: FromBytes> Iterator for PackedRecords<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let (value, rest) = T::read_from_prefix(self.bytes).ok()?;
        self.bytes = rest;
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.bytes.len() / size_of::<T>();
        (left, Some(left))
    }
}

impl<T: FromBytes> ExactSizeIterator for PackedRecords<'_, T> {}
