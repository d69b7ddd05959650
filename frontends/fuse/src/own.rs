//! What a client of this project says to a server of this project beside the requests of the kernel.
//!
//! IOCTL carries it: a server that does not know it answers as for any device control that it lacks.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The device control for [`TakeOver`], as `_IOW('D', 1, ...)` of the kernel would number it.
pub(crate) const TAKE_OVER: u32 =
    1 << 30 | (size_of::<TakeOver>() as u32) << 16 | (b'D' as u32) << 8 | 1;

/// The connection is the heir of another one, and takes over the inode of the request, and what is
/// said here.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct TakeOver {
    /// The handle, with [`TakeOver::OPEN`].
    pub(crate) fh: u64,
    /// The owner of the locks of that open file.
    pub(crate) owner: u64,
    /// Its flags of open(2), of which the access mode counts.
    pub(crate) open_flags: u64,
    pub(crate) flags: u64,
}

impl TakeOver {
    /// An open file or directory, and not the inode alone.
    pub(crate) const OPEN: u64 = 1;
    /// The record locks of the process on the inode stay.
    pub(crate) const PROCESS_LOCKS: u64 = 2;
    /// Nothing: from now on nothing is taken over.
    pub(crate) const SETTLE: u64 = 4;
}
