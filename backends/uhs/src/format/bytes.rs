//! Little-endian numbers in blocks.

/// Puts values one after the other.
#[derive(Debug, Default)]
pub(crate) struct ByteWriter {
    bytes: Vec<u8>,
}

impl ByteWriter {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        ByteWriter { bytes: Vec::with_capacity(bytes) }
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(value);
        self
    }

    /// Fills with zeros up to `len` bytes.
    pub(crate) fn pad(&mut self, len: usize) -> &mut Self {
        assert!(self.bytes.len() <= len, "{} bytes do not fit into {len}", self.bytes.len());
        self.bytes.resize(len, 0);
        self
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// The bytes so far.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes
    }
}

/// Takes values one after the other. Every method returns `None` at the end of the bytes, and its
/// behaviour does not depend on their content.
#[derive(Clone, Debug)]
pub(crate) struct ByteReader<'a> {
    rest: &'a [u8],
}

impl<'a> ByteReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        ByteReader { rest: bytes }
    }

    /// The number of bytes that were not taken.
    pub(crate) fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// True at the end.
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.rest.split_at_checked(len)?;
        self.rest = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn uuid(&mut self) -> Option<[u8; 16]> {
        self.array()
    }
}
