//! Encodes replies and notifications, without I/O.
//!
//! A reply is a header and a body: one of the `*Out` structures of [`abi`](crate::abi), data, or
//! directory entries. Callers fill the structures; this module has the parts that follow rules.

mod dir;
mod notify;

pub use dir::{DirBufferFull, DirEncoder};
pub use notify::Notification;

use crate::abi::{EntryOut, OpenOut, OutHeader};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of [`OutHeader`].
pub const HEADER_LEN: usize = size_of::<OutHeader>();

/// The header of a successful reply whose body has `body_len` bytes.
///
/// # Panics
///
/// If the reply would be 4 GiB or more, which no negotiated size permits.
pub fn header(unique: u64, body_len: usize) -> OutHeader {
    let len = u32::try_from(HEADER_LEN + body_len).expect("replies are bounded by INIT's sizes");
    OutHeader { len, error: 0, unique }
}

/// A complete error reply. The kernel refuses errors with a body (`fuse_dev_do_write`).
pub fn error(unique: u64, errno: Errno) -> OutHeader {
    OutHeader { len: HEADER_LEN as u32, error: -errno.raw_os_error(), unique }
}

/// A complete reply without a body.
pub fn empty(unique: u64) -> OutHeader {
    header(unique, 0)
}

/// A header and one structure, in the layout for sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct StructReply<T> {
    /// The header.
    pub header: OutHeader,
    /// The body.
    pub body: T,
}

/// A successful reply whose body is one structure. Its bytes ([`IntoBytes::as_bytes`]) can be sent
/// unchanged.
pub fn from_struct<T: IntoBytes + Immutable>(unique: u64, body: T) -> StructReply<T> {
    StructReply { header: header(unique, size_of::<T>()), body }
}

/// The reply to CREATE and TMPFILE: the entry and the open file.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct CreateOut {
    /// Like the reply to LOOKUP.
    pub entry: EntryOut,
    /// Like the reply to OPEN.
    pub open: OpenOut,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{self, WriteOut};

    #[test]
    fn a_header_counts_itself() {
        assert_eq!(header(5, 24), OutHeader { len: 40, error: 0, unique: 5 });
        assert_eq!(empty(5).len, 16);
        assert_eq!(error(5, Errno::NOENT), OutHeader { len: 16, error: -2, unique: 5 });
    }

    #[test]
    fn a_reply_is_header_and_body_without_padding() {
        let reply = from_struct(9, WriteOut { size: 4096, padding: 0 });
        let bytes = reply.as_bytes();
        assert_eq!(bytes.len(), 24);
        let (header, body) = OutHeader::read_from_prefix(bytes).unwrap();
        assert_eq!((header.len, header.unique), (24, 9));
        assert_eq!(WriteOut::read_from_bytes(body).unwrap().size, 4096);
    }

    #[test]
    fn the_reply_to_a_creation_has_both_structures() {
        let open = abi::OpenOut { fh: 3, open_flags: abi::FOPEN_KEEP_CACHE, backing_id: 0 };
        let reply =
            from_struct(1, CreateOut { entry: EntryOut { nodeid: 2, ..Default::default() }, open });
        assert_eq!(reply.as_bytes().len(), 16 + 128 + 16);
        assert_eq!(reply.as_bytes()[16], 2);
        assert_eq!(reply.as_bytes()[16 + 128], 3);
    }
}
