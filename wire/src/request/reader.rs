//! Taking arguments off a request, from its front.

use super::{Extensions, Payload, Problem};
use std::marker::PhantomData;
use zerocopy::{FromBytes, IntoBytes};

/// The rest of a request. The opcode's structure comes from `op` where the
/// transport keeps it apart, everything else from `rest`.
pub(super) struct Reader<'a> {
    op: &'a [u8],
    rest: &'a [u8],
    /// Bytes of data that follow `rest` but are not in memory.
    pipe: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn contiguous(args: &'a [u8], pipe: usize) -> Reader<'a> {
        Reader { op: &[], rest: args, pipe }
    }

    pub(super) fn split(op: &'a [u8], payload: &'a [u8]) -> Reader<'a> {
        Reader { op, rest: payload, pipe: 0 }
    }

    /// A structure. Copied, since nothing aligns it.
    pub(super) fn fixed<T: FromBytes>(&mut self) -> Result<T, Problem> {
        let source = if self.op.is_empty() { &mut self.rest } else { &mut self.op };
        let truncated = Problem::Truncated { need: size_of::<T>(), have: source.len() };
        let (value, rest) = T::read_from_prefix(source).map_err(|_| truncated)?;
        *source = rest;
        Ok(value)
    }

    /// The first `len` bytes of a structure; its other fields are zero.
    pub(super) fn prefix<T: FromBytes + IntoBytes>(&mut self, len: usize) -> Result<T, Problem> {
        let source = if self.op.is_empty() { &mut self.rest } else { &mut self.op };
        let truncated = Problem::Truncated { need: len, have: source.len() };
        let (bytes, rest) = source.split_at_checked(len).ok_or(truncated)?;
        let mut value = T::new_zeroed();
        value.as_mut_bytes()[..len].copy_from_slice(bytes);
        *source = rest;
        Ok(value)
    }

    /// A structure that grew from `min` bytes and may grow further: takes all
    /// there is, since newer kernels send more than we know.
    pub(super) fn growing<T: FromBytes + IntoBytes>(&mut self, min: usize) -> Result<T, Problem> {
        let have = self.op.len().max(self.rest.len());
        let value = self.prefix(have.clamp(min, size_of::<T>()))?;
        (self.op, self.rest) = (&[], &[]);
        Ok(value)
    }

    /// A name or link target, without its NUL.
    pub(super) fn name(&mut self) -> Result<&'a [u8], Problem> {
        let (name, rest) = split_nul(self.rest).ok_or(Problem::UnterminatedName)?;
        self.rest = rest;
        Ok(name)
    }

    /// All that is left, which must be as long as announced.
    pub(super) fn data(&mut self, declared: u32) -> Result<&'a [u8], Problem> {
        let present = self.rest.len();
        if present != declared as usize {
            return Err(Problem::DataLength { declared: u64::from(declared), present });
        }
        Ok(std::mem::take(&mut self.rest))
    }

    /// Like [`Reader::data`], but may be in the pipe as a whole.
    pub(super) fn payload(&mut self, declared: u32) -> Result<Payload<'a>, Problem> {
        if self.pipe == 0 {
            return self.data(declared).map(Payload::Memory);
        }
        let present = self.rest.len() + self.pipe;
        if present != declared as usize {
            return Err(Problem::DataLength { declared: u64::from(declared), present });
        }
        if !self.rest.is_empty() {
            return Err(Problem::TrailingBytes(self.rest.len()));
        }
        Ok(Payload::Pipe(std::mem::take(&mut self.pipe)))
    }

    /// All that is left, as `count` structures.
    pub(super) fn records<T: FromBytes>(&mut self, count: u32) -> Result<Records<'a, T>, Problem> {
        let declared = u64::from(count) * size_of::<T>() as u64;
        let present = self.rest.len();
        if declared != present as u64 {
            return Err(Problem::DataLength { declared, present });
        }
        Ok(Records::new(std::mem::take(&mut self.rest)))
    }

    /// The extensions at the end, `total_extlen` units of 8 bytes.
    pub(super) fn extensions(&mut self, total_extlen: u16) -> Result<Extensions<'a>, Problem> {
        if total_extlen == 0 {
            return Ok(Extensions::default());
        }
        let len = usize::from(total_extlen) * 8;
        let at = self.rest.len().checked_sub(len);
        let at = at.ok_or(Problem::Truncated { need: len, have: self.rest.len() })?;
        let (rest, ext) = self.rest.split_at(at);
        self.rest = rest;
        Extensions::parse(ext).map_err(Problem::Extension)
    }

    /// Nothing may be left: the kernel sends only what was negotiated, so a
    /// rest means that we misread what came before it.
    pub(super) fn finish(self) -> Result<(), Problem> {
        match self.op.len() + self.rest.len() + self.pipe {
            0 => Ok(()),
            left => Err(Problem::TrailingBytes(left)),
        }
    }
}

/// Splits at the first NUL, which is in neither part.
pub(super) fn split_nul(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let nul = bytes.iter().position(|&byte| byte == 0)?;
    Some((&bytes[..nul], &bytes[nul + 1..]))
}

/// Structures that follow one another in the buffer, copied out one by one
/// since nothing aligns them.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a, T> {
    bytes: &'a [u8],
    of: PhantomData<T>,
}

impl<T> Default for Records<'_, T> {
    fn default() -> Self {
        Records { bytes: &[], of: PhantomData }
    }
}

impl<'a, T> Records<'a, T> {
    /// `bytes` is a multiple of the structure's size.
    pub(super) fn new(bytes: &'a [u8]) -> Records<'a, T> {
        debug_assert!(bytes.len().is_multiple_of(size_of::<T>()));
        Records { bytes, of: PhantomData }
    }

    /// The bytes that the structures are in.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<T: FromBytes> Iterator for Records<'_, T> {
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

impl<T: FromBytes> ExactSizeIterator for Records<'_, T> {}
