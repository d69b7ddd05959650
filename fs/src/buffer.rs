//! Memory that operations own.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// Bytes of an operation that outlives the call that began it. A buffer of
/// [`new_aligned`](Buffer::new_aligned) begins at a page, so that a device can use them without a
/// copy (open(2), `O_DIRECT`).
#[derive(Default)]
pub struct Buffer {
    vec: Vec<u8>,
    /// The bytes of `vec` before the first one.
    start: usize,
}

impl Buffer {
    /// The alignment of [`new_aligned`](Buffer::new_aligned), in bytes.
    pub const ALIGNMENT: usize = 4096;

    /// `len` zeros.
    pub fn new_aligned(len: usize) -> Self {
        if len == 0 {
            return Buffer::default();
        }
        let mut vec = vec![0; len + Buffer::ALIGNMENT - 1];
        let start = vec.as_ptr().align_offset(Buffer::ALIGNMENT).min(Buffer::ALIGNMENT - 1);
        vec.truncate(start + len);
        Buffer { vec, start }
    }

    /// Makes it longer, by zeros, or shorter. It may not be aligned any more.
    pub fn resize(&mut self, len: usize) {
        self.vec.resize(self.start + len, 0);
    }

    /// Drops all bytes behind the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.vec.truncate(self.start + len);
    }

    /// Appends bytes.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.vec.extend_from_slice(bytes);
    }

    /// The bytes alone. Moves them where they are aligned.
    pub fn into_vec(mut self) -> Vec<u8> {
        self.vec.drain(..self.start);
        self.vec
    }

    /// The vector that holds the bytes, and the place of the first of them there.
    pub fn into_parts(self) -> (Vec<u8>, usize) {
        (self.vec, self.start)
    }

    /// The opposite of [`into_parts`](Buffer::into_parts). A `start` behind the end means no bytes.
    pub fn from_parts(vec: Vec<u8>, start: usize) -> Self {
        let start = start.min(vec.len());
        Buffer { vec, start }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(vec: Vec<u8>) -> Self {
        Buffer { vec, start: 0 }
    }
}

impl From<Buffer> for Vec<u8> {
    fn from(buffer: Buffer) -> Self {
        buffer.into_vec()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.vec[self.start..]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.vec[self.start..]
    }
}

impl PartialEq for Buffer {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: AsRef<[u8]> + ?Sized> PartialEq<T> for Buffer {
    fn eq(&self, other: &T) -> bool {
        **self == *other.as_ref()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aligned_buffer_stays_aligned_and_keeps_its_bytes() {
        for len in [0, 1, 4096, 65_536] {
            let mut buffer = Buffer::new_aligned(len);
            assert_eq!(buffer.len(), len);
            assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(Buffer::ALIGNMENT));
            buffer.fill(7);
            let (vec, start) = buffer.into_parts();
            let mut buffer = Buffer::from_parts(vec, start);
            assert!(len == 0 || (buffer.as_ptr() as usize).is_multiple_of(Buffer::ALIGNMENT));
            buffer.extend(&[8, 9]);
            buffer.resize(len + 3);
            assert_eq!(buffer[len..], [8, 9, 0]);
            buffer.truncate(len);
            assert_eq!(buffer.into_vec(), vec![7; len]);
        }
    }
}
