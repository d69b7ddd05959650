//! Extensions of the protocol between clients and servers of this project.
//!
//! [`TAKE_OVER`] is sent by IOCTL: other servers answer as for any unknown ioctl.
//! [`ConnectionNumbers`] are sent in fields of INIT that the kernel leaves zero.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{self, InitIn, StatxOut};

/// The maximum length of the data in one message over a socket. An unprivileged socket accepts up
/// to 208 KiB, and the kernel needs contiguous memory for longer messages.
pub const SOCKET_IO_MAX: usize = 128 * 1024;

/// The maximum length of the data in one message through shared memory.
pub const SHARED_IO_MAX: usize = 1024 * 1024;

/// The ioctl for the inodes and open files that the connection of the next program takes over. Its
/// argument is a [`TakeOver`] for each; its output is an error number or 0 for each, in 32 bits.
/// Numbered like the kernel's `_IO('D', 1)`.
pub const TAKE_OVER: u32 = (b'D' as u32) << 8 | 1;

/// The maximum number of [`TakeOver`] in one message.
pub const TAKE_OVER_MAX: usize = 2048;

/// An inode to take over, with one of its open files if there is one.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TakeOver {
    /// The inode.
    pub ino: u64,
    /// The handle, with [`TakeOver::OPEN`].
    pub fh: u64,
    /// The owner of the locks of that open file.
    pub owner: u64,
    /// The flags of open(2), of which only the access mode is used.
    pub open_flags: u64,
    /// [`TakeOver::OPEN`] and [`TakeOver::PROCESS_LOCKS`], or [`TakeOver::SETTLE`].
    pub flags: u64,
}

impl TakeOver {
    /// Flag: take over an open file or directory, in addition to the inode.
    pub const OPEN: u64 = 1;
    /// Flag: keep the record locks of the process on the inode.
    pub const PROCESS_LOCKS: u64 = 2;
    /// Flag: no inode, but the end of taking over.
    pub const SETTLE: u64 = 4;
}

/// The ioctl for a whole path from the directory of the request. Its argument is the path; its
/// output is a [`ResolveHead`], and a [`ResolveStep`] for each inode on the way. Numbered like the
/// kernel's `_IO('D', 2)`.
pub const RESOLVE: u32 = (b'D' as u32) << 8 | 2;

/// The ioctl for the names of the directory of the request. Its output is a [`ResolveStep`] for
/// each, followed by the name and zeros up to a multiple of eight bytes.
pub const NAMES: u32 = (b'D' as u32) << 8 | 3;

/// The maximum number of names in a reply to [`NAMES`].
pub const NAMES_MAX: usize = 256;

/// The ioctl that opens small files of the directory of the request, and closes files that it
/// opened earlier. Its argument is an [`OpenAhead`], and a [`AheadClose`] for each file to close.
/// Its output is an [`AheadEnd`], and an [`AheadFile`] for each opened file, followed by the reply
/// to an OPEN of the file with [`OPEN_HAS_BYTES`], and zeros up to a multiple of eight bytes. It
/// only opens files for reading. The client closes them, by this ioctl or by RELEASE.
pub const OPEN_AHEAD: u32 = (b'D' as u32) << 8 | 4;

/// The maximum number of files that [`OPEN_AHEAD`] opens, and of files that it closes.
pub const AHEAD_MAX: usize = 64;

/// The head of the argument of [`OPEN_AHEAD`].
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct OpenAhead {
    /// The position in the directory, [`AheadEnd::next`] of the request before; 0 for its begin.
    pub from: u64,
    /// The flags of open(2).
    pub flags: u32,
    /// The maximum number of files to open; 0 to only close files.
    pub most: u32,
}

/// A file to close in the argument of [`OPEN_AHEAD`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct AheadClose {
    /// Its inode.
    pub ino: u64,
    /// The handle.
    pub fh: u64,
    /// The flags of open(2).
    pub flags: u32,
    /// 1 if the client has read bytes in the reply to the open, and has sent no request for them.
    pub has_read: u32,
}

/// The head of the output of [`OPEN_AHEAD`].
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AheadEnd {
    /// The position after the last file; 0 at the end of the directory.
    pub next: u64,
}

/// An open file in the output of [`OPEN_AHEAD`].
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AheadFile {
    /// Its inode, without a lookup.
    pub ino: u64,
    /// The version of its attributes, which has not changed since before the open.
    pub version: u64,
    /// The length of the following reply without the zeros.
    pub len: u32,
    /// Zero.
    pub reserved: u32,
}

/// The head of the output of [`RESOLVE`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ResolveHead {
    /// [`ResolveHead::FOUND`], [`ResolveHead::MISSING`] or [`ResolveHead::WALK`].
    pub end: u32,
    /// For a missing name: 1 if every user may search the directory.
    pub open_to_all: u32,
}

impl ResolveHead {
    /// The last step is the end of the path.
    pub const FOUND: u32 = 0;
    /// The name after the last step does not exist.
    pub const MISSING: u32 = 1;
    /// The name after the last step has to be looked up.
    pub const WALK: u32 = 2;
}

/// An inode in the output of [`RESOLVE`] and [`NAMES`], without a lookup.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ResolveStep {
    /// Its number.
    pub ino: u64,
    /// 1 if every user may search the directory in which it was found.
    pub open_to_all: u32,
    /// The length of its name, for [`NAMES`].
    pub name_len: u32,
    /// Its attributes.
    pub attr: StatxOut,
}

/// The code of the notification that offers lanes in shared memory, with [`LaneOffer`] and a
/// descriptor. It is sent before the reply to INIT. Clients without such lanes ignore it.
pub const OFFER: i32 = 1 << 16;

/// The body of the notification [`OFFER`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LaneOffer {
    /// The version of the format of the memory.
    pub version: u32,
    /// Number of lanes; 0 and no descriptor if this connection gets none.
    pub lanes: u32,
    /// Bytes of the memory.
    pub bytes: u64,
}

/// A flag of SETUPMAPPING: the reply has a descriptor of the file's cached pages, to read only.
/// Nothing ends it but the release of the open file.
pub const PAGES: u64 = 1 << 63;

/// A flag of SETUPMAPPING: the reply has a descriptor of the versions of names and attributes, to
/// read only. The request names no file.
pub const VERSIONS: u64 = 1 << 62;

/// A flag of SETUPMAPPING: the reply has a descriptor of the name memory for clients with the same
/// rights, to read only. The request names no file.
pub const TOLD_NAMES: u64 = 1 << 61;

/// Attributes beside a name in the memory of [`TOLD_NAMES`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PublishedAttr {
    /// The attributes of LOOKUP.
    pub attr: abi::Attr,
    /// The birth time, in seconds.
    pub btime: i64,
    /// Its nanoseconds.
    pub btime_nanos: u32,
    /// [`PublishedAttr::HAS_BTIME`] and [`PublishedAttr::NO_XATTRS`].
    pub flags: u32,
}

impl PublishedAttr {
    /// There is a birth time.
    pub const HAS_BTIME: u32 = 1;
    /// The inode has no extended attributes.
    pub const NO_XATTRS: u32 = 2;
}

/// A flag of the reply to OPEN, CREATE and TMPFILE: FLUSH of this file only ends locks, so that a
/// client that has none there need not send it. A client must still send it after a lock, unlike
/// with `FOPEN_NOFLUSH`. The kernel and other servers leave it zero.
pub const OPEN_FLUSH_ENDS_LOCKS: u32 = 1 << 31;

/// A flag of OPEN: the client requests the bytes of a small file with the reply.
pub const OPEN_WANTS_BYTES: u32 = 1 << 31;

/// A flag of the reply to OPEN: all bytes of the file follow, at most [`OPEN_BYTES_MAX`]. They hold
/// as long as the version of its attributes.
pub const OPEN_HAS_BYTES: u32 = 1 << 30;

/// A flag beside [`OPEN_HAS_BYTES`]: reading changes the access time, and the reply has not done
/// so. A client that reads those bytes reports the read by [`RELEASE_HAS_READ`], or reads by a
/// request.
pub const OPEN_READ_IS_DUE: u32 = 1 << 29;

/// The maximum number of bytes in a reply to OPEN.
pub const OPEN_BYTES_MAX: usize = 32 * 1024;

/// A flag of RELEASE: the file was read without a request.
pub const RELEASE_HAS_READ: u32 = 1 << 31;

/// A flag of INIT: no attributes of this file system have a birth time, so that the attributes of a
/// lookup are complete. Clients offer it, and the kernel does not.
pub const NO_BIRTH_TIMES: u64 = 1 << 63;

/// A flag of INIT: the file system needs the groups of callers, because it checks access by itself.
/// Clients offer it, and add [`EXT_CALLER_GROUPS`] to requests for other users if the server
/// agrees.
pub const CALLER_GROUPS: u64 = 1 << 62;

/// A flag of INIT: operations on names look at them by themselves (`Caps::decides_on_names`).
/// Clients offer it.
pub const DECIDES_ON_NAMES: u64 = 1 << 60;

/// A flag of INIT: the server takes several requests in one message ([`chain`](crate::chain)).
/// Clients offer it.
pub const COMPOUND: u64 = 1 << 61;

/// The type of an extension of any request without data: all supplementary groups of the caller, in
/// the form of `FUSE_EXT_GROUPS`. A server believes root only.
pub const EXT_CALLER_GROUPS: u32 = 1 << 31;

/// Position of the connection numbers in [`InitIn::unused`].
const NAMES_AT: usize = 3;

/// The number of a connection at its server. It is random and secret, because it grants the rights
/// of the connection. 0 means none.
pub type ConnectionNumber = u128;

/// The opcode of the first message on a socket that is to be a copy of another connection;
/// [`ConnectionCopy`] follows the header. The server makes the copy at once and answers by a header
/// alone. It keeps the copy until the client sends INIT there, with the same number, or closes the
/// socket.
pub const COPY: u32 = 1 << 30;

/// The body of [`COPY`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ConnectionCopy {
    copy_of: [u8; 16],
    own: [u8; 16],
}

impl ConnectionCopy {
    /// A copy of the connection `copy_of` by the number `own`.
    #[must_use]
    pub fn new(copy_of: ConnectionNumber, own: ConnectionNumber) -> ConnectionCopy {
        ConnectionCopy { copy_of: copy_of.to_ne_bytes(), own: own.to_ne_bytes() }
    }

    /// The connection to copy.
    #[must_use]
    pub fn copy_of(&self) -> ConnectionNumber {
        ConnectionNumber::from_ne_bytes(self.copy_of)
    }

    /// The number of the copy.
    #[must_use]
    pub fn copy_number(&self) -> ConnectionNumber {
        ConnectionNumber::from_ne_bytes(self.own)
    }
}

/// The names of connections in a client's INIT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionNumbers {
    /// The connection from which this one takes over inodes and open files; this one begins with
    /// none.
    pub predecessor: ConnectionNumber,
    /// The connection itself.
    pub own: ConnectionNumber,
}

impl ConnectionNumbers {
    /// The names in the INIT of a client.
    pub fn from_init(init: &InitIn) -> ConnectionNumbers {
        let number = |words: &[u32]| {
            words.iter().fold(0, |all, &word| all << 32 | ConnectionNumber::from(word))
        };
        let (predecessor, own) = init.unused[NAMES_AT..].split_at(4);
        ConnectionNumbers { predecessor: number(predecessor), own: number(own) }
    }

    /// Stores the names in an INIT.
    pub fn store_in(&self, init: &mut InitIn) {
        let words = |number: ConnectionNumber| [96, 64, 32, 0].map(|bits| (number >> bits) as u32);
        init.unused[NAMES_AT..][..4].copy_from_slice(&words(self.predecessor));
        init.unused[NAMES_AT..][4..].copy_from_slice(&words(self.own));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_names_round_trip_through_init() {
        let numbers = [0, 1, u128::MAX, 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10];
        for (predecessor, own) in numbers.into_iter().zip(numbers.into_iter().rev()) {
            let names = ConnectionNumbers { predecessor, own };
            let mut init = InitIn::default();
            names.store_in(&mut init);
            assert_eq!(ConnectionNumbers::from_init(&init), names);
        }
        assert_eq!(ConnectionNumbers::from_init(&InitIn::default()), ConnectionNumbers::default());
    }
}
