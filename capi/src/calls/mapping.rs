//! map files into memory
//!
//! If the file system provides the descriptor of a file's data (as a passthrough does), the mapping
//! is the kernel's. Otherwise it is a copy. A shared copy is written back by defuse_msync(),
//! defuse_munmap() and at a regular exit of the program, in whole pages up to the end of the file.
//! Mappings of the same part of a file share their memory. Other mappings contain the data of the
//! time when they were made, and reads return data after it was written back. A mapping without
//! PROT_WRITE is not written back, even after mprotect(2). Mappings of this library must be
//! unmapped by it, not by munmap(2).

use std::ffi::{c_int, c_void};

use crate::mappings::MmapArguments;
use crate::memory::OutBuffer;
use crate::state::{call, succeed};

/// The return value of a failed mapping, `MAP_FAILED`.
struct MappingAddress(*mut c_void);

impl crate::state::ReturnValue for MappingAddress {
    const FAILED: MappingAddress = MappingAddress(libc::MAP_FAILED);
}

/// Maps `length` bytes of an open file from `at` on, mmap(2). `address` is a hint. Returns
/// MAP_FAILED with `errno` on failure: EACCES, EBADF, EINVAL (also for MAP_ANONYMOUS and MAP_FIXED,
/// for which mmap(2) itself can be used), ENODEV or ENOMEM. The descriptor may be closed
/// afterwards.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mmap(
    address: OutBuffer<c_void>,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    at: libc::off_t,
) -> *mut c_void {
    let mapped: MappingAddress = call(|s| {
        let offset = super::data::offset(at)?;
        let hint = address.start().addr();
        let wanted = MmapArguments { hint, len: length, protection, flags, offset };
        let start = s.mappings.map(s, s.file(fd)?.to_arc(), &wanted)?;
        Ok(MappingAddress(std::ptr::with_exposed_provenance_mut(start)))
    });
    mapped.0
}

/// Unmaps memory, munmap(2). A shared mapping is written back first; if that fails, it stays
/// mapped.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_munmap(address: OutBuffer<c_void>, length: usize) -> c_int {
    succeed(|s| s.mappings.unmap(s, address.start().addr(), length))
}

/// Writes a shared mapping back, msync(2). With MS_SYNC the data is durable afterwards.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_msync(address: OutBuffer<c_void>, length: usize, flags: c_int) -> c_int {
    succeed(|s| s.mappings.sync(s, address.start().addr(), length, flags))
}
