//! The kernel's side of FUSE as data: structures, opcodes, flags.
//!
//! Source: `include/uapi/linux/fuse.h`, protocol 7.45 (Linux 6.18). This module has no logic.
//! Distributions ship older headers than the kernels they run on, so that this crate has its own
//! definitions; a test compares them with the installed header.
//!
//! Constants keep the kernel's names so that a search for one finds both sides; structures drop the
//! `fuse_` prefix (`fuse_write_in` is [`WriteIn`]).

mod flags;
#[cfg(test)]
mod layout_tests;
mod opcode;
mod structs;

pub use flags::*;
pub use opcode::{NotifyCode, Opcode};
pub use structs::*;

/// `FUSE_KERNEL_VERSION`: the only major version in use since 2005.
pub const FUSE_KERNEL_VERSION: u32 = 7;
/// `FUSE_KERNEL_MINOR_VERSION` that these definitions describe.
pub const FUSE_KERNEL_MINOR_VERSION: u32 = 45;
/// The oldest accepted minor version, used by Linux 5.10. Structures whose size changed in earlier
/// versions need one form only.
pub const MINOR_MIN: u32 = 31;
/// `FUSE_ROOT_ID`: the node id of the root.
pub const FUSE_ROOT_ID: u64 = 1;
/// `FUSE_MIN_READ_BUFFER`: the kernel refuses reads of the device with less.
pub const FUSE_MIN_READ_BUFFER: usize = 8192;
/// `FUSE_COMPAT_SETXATTR_IN_SIZE`: length of [`SetxattrIn`] unless [`FUSE_SETXATTR_EXT`] was
/// negotiated.
pub const FUSE_COMPAT_SETXATTR_IN_SIZE: usize = 8;
/// Length of [`InitIn`] from kernels before 7.36.
pub const INIT_IN_SIZE_7_35: usize = 16;
/// `CUSE_INIT_INFO_MAX`: the longest device information string.
pub const CUSE_INIT_INFO_MAX: usize = 4096;
/// `FUSE_IOCTL_MAX_IOV`: the maximum number of iovecs in one retry.
pub const FUSE_IOCTL_MAX_IOV: usize = 256;
/// `FUSE_INVALID_UIDGID`: the id of a caller that is not mapped on an idmapped mount.
pub const FUSE_INVALID_UIDGID: u32 = u32::MAX;
/// `FUSE_UNIQUE_RESEND`: set in [`InHeader::unique`] of a request sent again.
pub const FUSE_UNIQUE_RESEND: u64 = 1 << 63;
/// `FUSE_MAX_NR_SECCTX`: extension types up to this are a security context
/// count.
pub const FUSE_MAX_NR_SECCTX: u32 = 31;
/// `FUSE_EXT_GROUPS`: the extension is a [`SuppGroups`].
pub const FUSE_EXT_GROUPS: u32 = 32;
/// `FUSE_URING_IN_OUT_HEADER_SZ`: space for the in or out header in a ring entry.
pub const FUSE_URING_IN_OUT_HEADER_SZ: usize = 128;
/// `FUSE_URING_OP_IN_OUT_SZ`: space for the opcode's own structure in a ring entry.
pub const FUSE_URING_OP_IN_OUT_SZ: usize = 128;
/// `FUSE_IO_URING_CMD_REGISTER`: register a ring entry and fetch a request.
pub const FUSE_IO_URING_CMD_REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`: reply and fetch the next request.
pub const FUSE_IO_URING_CMD_COMMIT_AND_FETCH: u32 = 2;

/// `FUSE_DEV_IOC_CLONE`, `_IOR(229, 0, uint32_t)`: another device file for the
/// same connection.
pub const FUSE_DEV_IOC_CLONE: u32 = 0x8004_e500;
/// `FUSE_DEV_IOC_BACKING_OPEN`, `_IOW(229, 1, struct fuse_backing_map)`.
pub const FUSE_DEV_IOC_BACKING_OPEN: u32 = 0x4010_e501;
/// `FUSE_DEV_IOC_BACKING_CLOSE`, `_IOW(229, 2, uint32_t)`.
pub const FUSE_DEV_IOC_BACKING_CLOSE: u32 = 0x4004_e502;
/// `FUSE_DEV_IOC_SYNC_INIT`, `_IO(229, 3)`: INIT happens inside `mount(2)`.
pub const FUSE_DEV_IOC_SYNC_INIT: u32 = 0x0000_e503;

/// `FUSE_REC_ALIGN`: records of variable length start at multiples of 8.
pub const fn rec_align(len: usize) -> usize {
    len.next_multiple_of(8)
}
