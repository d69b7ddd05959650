//! map files into memory
//!
//! Where the file system gives the descriptor of a file's bytes (a passthrough does), a mapping is
//! the kernel's. Otherwise it is a copy: a shared one is written back by defuse_msync(),
//! defuse_munmap() and at a regular end of the program, whole pages, up to the end of the file.
//! Mappings of one part of a file see each other at once; others see what was there when they were
//! made, and reads see what was written back. What is mapped without PROT_WRITE is not written back,
//! also after mprotect(2). Memory that was mapped here is unmapped here, and not by munmap(2).

use std::ffi::{c_int, c_void};

use crate::mappings::Wanted;
use crate::memory::Room;
use crate::state::{call, done};

/// The value of a mapping that has failed, `MAP_FAILED`.
struct Address(*mut c_void);

impl crate::state::Returned for Address {
    const FAILED: Address = Address(libc::MAP_FAILED);
}

/// Maps `length` bytes of an open file from `at` on, mmap(2); `address` is a wish. MAP_FAILED with
/// `errno`: EACCES, EBADF, EINVAL (also for MAP_ANONYMOUS and MAP_FIXED, which are for mmap(2)
/// itself), ENODEV, ENOMEM. The descriptor may be closed afterwards.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mmap(
    address: Room<c_void>,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    at: libc::off_t,
) -> *mut c_void {
    let mapped: Address = call(|s| {
        let offset = super::data::offset(at)?;
        let hint = address.start().addr();
        let wanted = Wanted { hint, len: length, protection, flags, offset };
        let start = s.mappings.map(s, s.file(fd)?.to_arc(), &wanted)?;
        Ok(Address(std::ptr::with_exposed_provenance_mut(start)))
    });
    mapped.0
}

/// Unmaps, munmap(2); what is shared is written back first, and stays where it is when that fails.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_munmap(address: Room<c_void>, length: usize) -> c_int {
    done(|s| s.mappings.unmap(s, address.start().addr(), length))
}

/// Writes a shared mapping back, msync(2); with MS_SYNC the data is durable then.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_msync(address: Room<c_void>, length: usize, flags: c_int) -> c_int {
    done(|s| s.mappings.sync(s, address.start().addr(), length, flags))
}
