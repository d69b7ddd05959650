//! One entry of a queue: the memory in which the kernel puts a request and finds the answer.

use zerocopy::{FromBytes, IntoBytes};

use crate::transport::{AlignedBuf, RequestMessage};
use defuse_wire::abi::{
    FUSE_URING_IN_OUT_HEADER_SZ as IN_OUT, FUSE_URING_OP_IN_OUT_SZ as OP, InHeader, OutHeader,
    UringEntInOut, UringReqHeader,
};
use defuse_wire::reply::HEADER_LEN;

/// The header has a page of its own, so that the payload after it begins on one.
const LEAD: usize = 4096;
/// The position of the entry's own words.
const WORDS: usize = IN_OUT + OP;

/// Memory of an entry that is in this program's hands: the kernel writes to it only within a call
/// that submits the entry or waits for it.
pub(crate) struct UringEntry {
    memory: AlignedBuf,
    capacity: usize,
    qid: u16,
}

impl UringEntry {
    /// An entry for the queue `qid` with `capacity` bytes of payload. Pages are touched only when
    /// used.
    pub(crate) fn new(qid: u16, capacity: usize) -> Self {
        UringEntry { memory: AlignedBuf::new(LEAD, capacity), capacity, qid }
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    /// The kernel's number of the request, which finds the entry again.
    pub(crate) fn commit_id(&self) -> u64 {
        self.words().commit_id
    }

    /// Opcode and number of the request.
    pub(crate) fn request(&self) -> InHeader {
        let (lead, _) = self.memory.split(0);
        InHeader::read_from_prefix(lead).map(|(header, _)| header).unwrap_or_default()
    }

    /// Bytes of payload that came with the request.
    pub(crate) fn payload_len(&self) -> usize {
        (self.words().payload_sz as usize).min(self.capacity)
    }

    /// Returns the request in place.
    pub(crate) fn message(&self) -> RequestMessage<'_> {
        let (lead, payload) = self.memory.split(self.payload_len());
        let (header, op) = (&lead[..size_of::<InHeader>()], &lead[IN_OUT..WORDS]);
        RequestMessage::Split { header, op, payload }
    }

    /// The first `len` bytes of the payload.
    ///
    /// # Panics
    ///
    /// Where that is more than there are: no answer is longer than was negotiated.
    pub(crate) fn payload_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.capacity, "an answer of {len} bytes where {} fit", self.capacity);
        self.memory.split_mut(len).1
    }

    /// Turns the request into its answer: the error number `errno` (positive), or for 0 success
    /// with the first `len` bytes of the payload.
    pub(crate) fn answer(&mut self, errno: i32, len: usize) {
        let header = OutHeader {
            len: (HEADER_LEN + len) as u32,
            error: -errno,
            unique: self.request().unique,
        };
        let words = UringEntInOut { payload_sz: len as u32, ..self.words() };
        let (lead, _) = self.memory.split_mut(0);
        lead[..HEADER_LEN].copy_from_slice(header.as_bytes());
        lead[WORDS..size_of::<UringReqHeader>()].copy_from_slice(words.as_bytes());
    }

    /// Returns header and payload as the vectors that are registered with the kernel.
    pub(super) fn iovecs(&mut self) -> [libc::iovec; 2] {
        let (lead, payload) = self.memory.split_mut(self.capacity);
        let iovec = |bytes: &mut [u8], len| libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: len,
        };
        let len = payload.len();
        [iovec(lead, size_of::<UringReqHeader>()), iovec(payload, len)]
    }

    fn words(&self) -> UringEntInOut {
        let (lead, _) = self.memory.split(0);
        UringEntInOut::read_from_prefix(&lead[WORDS..]).map(|(words, _)| words).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_wire::request::{DecodeOptions, RequestBody};

    /// Puts a LOOKUP into the entry as the kernel does.
    fn put_lookup(entry: &mut UringEntry, name: &[u8]) {
        let header = InHeader {
            len: (size_of::<InHeader>() + name.len()) as u32,
            opcode: defuse_wire::abi::Opcode::Lookup as u32,
            unique: 42,
            nodeid: 1,
            ..InHeader::default()
        };
        let words = UringEntInOut {
            commit_id: 42,
            payload_sz: name.len() as u32,
            ..UringEntInOut::default()
        };
        let (lead, payload) = entry.memory.split_mut(name.len());
        lead[..size_of::<InHeader>()].copy_from_slice(header.as_bytes());
        lead[WORDS..WORDS + size_of::<UringEntInOut>()].copy_from_slice(words.as_bytes());
        payload.copy_from_slice(name);
    }

    #[test]
    fn a_request_is_decoded_where_the_kernel_puts_it() {
        let mut entry = UringEntry::new(1, 8192);
        put_lookup(&mut entry, b"name\0");
        let request = entry.message().parse(&DecodeOptions::default()).unwrap();
        assert_eq!((request.unique, request.nodeid), (42, 1));
        assert!(matches!(request.body, RequestBody::Lookup { name: b"name" }));
        assert_eq!((entry.commit_id(), entry.payload_len()), (42, 5));
    }

    #[test]
    fn an_answer_lies_where_the_kernel_looks_for_it() {
        let mut entry = UringEntry::new(0, 8192);
        put_lookup(&mut entry, b"name\0");
        entry.payload_mut(3).copy_from_slice(b"abc");
        entry.answer(0, 3);
        let (lead, payload) = entry.memory.split(3);
        let out = OutHeader::read_from_prefix(lead).unwrap().0;
        assert_eq!(out, OutHeader { len: 19, error: 0, unique: 42 });
        assert_eq!((entry.words().payload_sz, entry.commit_id(), payload), (3, 42, &b"abc"[..]));
        put_lookup(&mut entry, b"name\0");
        entry.answer(libc::ENOENT, 0);
        let (lead, _) = entry.memory.split(0);
        let out = OutHeader::read_from_prefix(lead).unwrap().0;
        assert_eq!(out, OutHeader { len: 16, error: -libc::ENOENT, unique: 42 });
    }

    #[test]
    fn the_payload_begins_on_a_page() {
        let mut entry = UringEntry::new(0, 1 << 20);
        let [header, payload] = entry.iovecs();
        assert_eq!(payload.iov_base as usize % 4096, 0);
        assert_eq!((header.iov_len, payload.iov_len), (288, 1 << 20));
    }
}
