//! Several requests in one message, COMPOUND: the links of a chain and their answers.
//!
//! The message is [`CompoundIn`] and the links, each a [`ChainLink`], a whole request, and zeros up
//! to a multiple of eight bytes. A link may use the inode, the open file, or the position in a
//! directory, in the reply to an earlier link. The server handles the links in their order, and
//! stops after the first that fails. The reply contains the whole reply to each link that was
//! handled, with zeros up to a multiple of eight bytes.
//!
//! Linux has no such request yet. It is discussed there as `FUSE_COMPOUND`, whose form differs from
//! one version of the proposal to the next. Only clients that have agreed on
//! [`COMPOUND`](crate::vendor::COMPOUND) send this one.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{InHeader, Opcode, OutHeader};

/// The maximum number of links of a chain.
pub const LINKS_MAX: usize = 8;

/// The structure of COMPOUND.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct CompoundIn {
    /// Bytes of the links.
    pub len: u32,
    /// 0.
    pub reserved: u32,
}

/// The head of a link.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ChainLink {
    /// [`ChainLink::INODE`], [`ChainLink::FILE`] and [`ChainLink::POSITION`]; 0 for a request that
    /// is complete.
    pub uses: u32,
    /// The link whose reply is used, from 0: an earlier one.
    pub of: u32,
}

impl ChainLink {
    /// Flag: the request uses the inode of the earlier link: the inode in its reply, or else the
    /// inode of its request.
    pub const INODE: u32 = 1;
    /// Flag: the first field of the request's structure is the handle in the earlier link's reply,
    /// or else in its request.
    pub const FILE: u32 = 2;
    /// Flag: the second field of the request's structure, a READDIR, is the position after the last
    /// entry of the earlier link's reply.
    pub const POSITION: u32 = 4;
}

const HEADER: usize = size_of::<InHeader>();

fn pad(len: usize) -> usize {
    len.next_multiple_of(8)
}

/// A chain under construction.
#[derive(Default)]
pub struct RequestChain {
    bytes: Vec<u8>,
}

impl RequestChain {
    /// Adds a link with a whole request, in parts.
    pub fn add(&mut self, link: ChainLink, parts: &[&[u8]]) {
        self.bytes.extend_from_slice(link.as_bytes());
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
        self.bytes.resize(pad(self.bytes.len()), 0);
    }

    /// The links.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A link, as it was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedLink<'a> {
    /// Its head.
    pub link: ChainLink,
    /// The opcode of the request.
    pub opcode: Opcode,
    /// The request.
    pub request: &'a [u8],
}

/// Splits `bytes` into links. `None` for anything but 1 to [`LINKS_MAX`] links of known opcodes,
/// each of which uses earlier ones only.
pub fn links(bytes: &[u8]) -> Option<Vec<ReceivedLink<'_>>> {
    let mut all = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (link, after) = ChainLink::read_from_prefix(rest).ok()?;
        let (header, _) = InHeader::read_from_prefix(after).ok()?;
        let len = header.len as usize;
        let request = after.get(..len).filter(|_| len >= HEADER)?;
        let known = ChainLink::INODE | ChainLink::FILE | ChainLink::POSITION;
        let is_earlier = link.uses == 0 || (link.of as usize) < all.len();
        if link.uses & !known != 0 || !is_earlier || all.len() == LINKS_MAX {
            return None;
        }
        let opcode = Opcode::from_u32(header.opcode)?;
        all.push(ReceivedLink { link, opcode, request });
        rest = after.get(pad(len)..)?;
    }
    (!all.is_empty()).then_some(all)
}

/// The values of a link for later links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkValues {
    /// The value for [`ChainLink::INODE`].
    pub inode: Option<u64>,
    /// The value for [`ChainLink::FILE`].
    pub handle: Option<u64>,
    /// The value for [`ChainLink::POSITION`].
    pub position: Option<u64>,
}

impl LinkValues {
    /// True if this has all that `link` uses.
    #[must_use]
    pub fn has(&self, link: ChainLink) -> bool {
        let LinkValues { inode, handle, position } = self;
        let all =
            [(ChainLink::INODE, inode), (ChainLink::FILE, handle), (ChainLink::POSITION, position)];
        all.iter().all(|(flag, value)| link.uses & flag == 0 || value.is_some())
    }
}

/// Puts the values of an earlier link into a request.
pub fn complete(request: &mut [u8], link: ChainLink, values: LinkValues) {
    let mut put = |at: usize, value: Option<u64>| {
        let value = value.unwrap_or_default();
        if let Some(place) = request.get_mut(at..at + 8) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
    };
    if link.uses & ChainLink::INODE != 0 {
        put(std::mem::offset_of!(InHeader, nodeid), values.inode);
    }
    if link.uses & ChainLink::FILE != 0 {
        put(HEADER, values.handle);
    }
    if link.uses & ChainLink::POSITION != 0 {
        put(HEADER + 8, values.position);
    }
}

/// Adds the answer to a link.
pub fn add_answer(out: &mut Vec<u8>, error: i32, body: &[u8]) {
    let len = (size_of::<OutHeader>() + body.len()) as u32;
    out.extend_from_slice(OutHeader { len, error, unique: 0 }.as_bytes());
    out.extend_from_slice(body);
    out.resize(pad(out.len()), 0);
}

/// Splits the reply to a chain into the replies to its links: the error (negative) or 0, and the
/// body. `None` if it is invalid, or has more than `count`.
pub fn split_reply(bytes: &[u8], count: usize) -> Option<Vec<(i32, &[u8])>> {
    let mut all = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (header, _) = OutHeader::read_from_prefix(rest).ok()?;
        let len = header.len as usize;
        let body = rest.get(size_of::<OutHeader>()..len)?;
        let is_fine = match header.error {
            0 => all.last().is_none_or(|(error, _)| *error == 0),
            // The range that the kernel accepts (fuse_dev_do_write), without a body.
            error => (-511..0).contains(&error) && body.is_empty(),
        };
        if !is_fine || all.len() == count {
            return None;
        }
        all.push((header.error, body));
        rest = rest.get(pad(len)..)?;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: Opcode, body: &[u8]) -> Vec<u8> {
        let len = (HEADER + body.len()) as u32;
        let header = InHeader { len, opcode: opcode as u32, nodeid: 1, ..InHeader::default() };
        [header.as_bytes(), body].concat()
    }

    fn chain(all: &[(ChainLink, &[u8])]) -> RequestChain {
        let mut chain = RequestChain::default();
        all.iter().for_each(|(link, bytes)| chain.add(*link, &[bytes]));
        chain
    }

    #[test]
    fn a_chain_arrives_as_it_was_made_and_no_part_of_it_is_one() {
        let (one, two) = (request(Opcode::Lookup, b"name\0"), request(Opcode::Open, &[0; 8]));
        let uses = ChainLink { uses: ChainLink::INODE, of: 0 };
        let made = chain(&[(ChainLink::default(), &one), (uses, &two)]);
        let all = links(made.as_bytes()).unwrap();
        assert_eq!(
            all[0],
            ReceivedLink { link: ChainLink::default(), opcode: Opcode::Lookup, request: &one }
        );
        assert_eq!(all[1], ReceivedLink { link: uses, opcode: Opcode::Open, request: &two });
        let first = 8 + pad(one.len());
        for len in (0..made.as_bytes().len()).filter(|len| *len != first) {
            assert_eq!(links(&made.as_bytes()[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn links_use_earlier_ones_and_are_few() {
        let one = request(Opcode::Open, &[0; 8]);
        for of in [0, 1, u32::MAX] {
            let itself = chain(&[(ChainLink { uses: ChainLink::FILE, of }, &one)]);
            assert_eq!(links(itself.as_bytes()), None);
        }
        let other = chain(&[(ChainLink { uses: 8, of: 0 }, &one)]);
        assert_eq!(links(other.as_bytes()), None);
        let many = |count| chain(&vec![(ChainLink::default(), &one[..]); count]);
        assert!(links(many(LINKS_MAX).as_bytes()).is_some());
        assert!(links(many(LINKS_MAX + 1).as_bytes()).is_none());
    }

    #[test]
    fn requests_are_completed_with_what_an_answer_tells() {
        let mut read = request(Opcode::Read, &[0; 40]);
        let values = LinkValues { inode: Some(7), handle: Some(9), position: None };
        complete(&mut read, ChainLink { uses: ChainLink::INODE | ChainLink::FILE, of: 0 }, values);
        assert_eq!(InHeader::read_from_prefix(&read).unwrap().0.nodeid, 7);
        assert_eq!(read[HEADER..HEADER + 8], 9u64.to_ne_bytes());
        // A request without room for a handle stays unchanged, and is refused as a request.
        let mut short = request(Opcode::Read, &[1; 4]);
        complete(&mut short, ChainLink { uses: ChainLink::FILE, of: 0 }, values);
        assert_eq!(short, request(Opcode::Read, &[1; 4]));
        let mut list = request(Opcode::Readdir, &[0; 40]);
        let values = LinkValues { position: Some(11), ..values };
        complete(&mut list, ChainLink { uses: ChainLink::POSITION, of: 0 }, values);
        assert_eq!(list[HEADER..HEADER + 16], [[0; 8], 11u64.to_ne_bytes()].concat());
        let uses = |uses| values.has(ChainLink { uses, of: 0 });
        assert!(uses(0) && uses(7) && !LinkValues::default().has(ChainLink { uses: 4, of: 0 }));
    }

    #[test]
    fn answers_end_with_the_first_error() {
        let mut out = Vec::new();
        add_answer(&mut out, 0, b"entry");
        add_answer(&mut out, -2, b"");
        assert_eq!(split_reply(&out, 2), Some(vec![(0, &b"entry"[..]), (-2, b"")]));
        assert_eq!(split_reply(&out, 1), None);
        add_answer(&mut out, 0, b"");
        assert_eq!(split_reply(&out, 3), None, "nothing comes after an error");
        let mut wrong = Vec::new();
        add_answer(&mut wrong, -2, b"body");
        assert_eq!(split_reply(&wrong, 1), None);
        assert_eq!(split_reply(&out[..10], 3), None);
    }
}
