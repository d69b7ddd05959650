//! Where C's pointers become Rust's references: all unsafe code of the library.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::io::{IoSlice, IoSliceMut};

use defuse_direct::Result;
use defuse_fs::Errno;

/// Sets `errno` of this thread.
pub(crate) fn set_errno(number: i32) {
    // SAFETY: __errno_location gives a valid pointer that belongs to this thread.
    unsafe { *libc::__errno_location() = number };
}

/// The bytes of a C string; `EFAULT` for NULL.
///
/// # Safety
///
/// Not NULL, it points to a string that ends with a NUL and stays as it is during the call.
pub(crate) unsafe fn text<'a>(path: *const c_char) -> Result<&'a [u8]> {
    if path.is_null() {
        return Err(Errno::EFAULT.into());
    }
    // SAFETY: the caller promises a string.
    Ok(unsafe { CStr::from_ptr(path) }.to_bytes())
}

/// Memory that is read; `EFAULT` for NULL with a length.
///
/// # Safety
///
/// `len` bytes from `start` can be read, and nobody changes them during the call.
pub(crate) unsafe fn bytes<'a>(start: *const c_void, len: usize) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if start.is_null() || len > isize::MAX as usize {
        return Err(Errno::EFAULT.into());
    }
    // SAFETY: the caller promises the bytes; the length fits.
    Ok(unsafe { std::slice::from_raw_parts(start.cast(), len) })
}

/// Memory that is written; `EFAULT` for NULL with a length.
///
/// # Safety
///
/// `len` bytes from `start` can be written, and nobody else uses them during the call.
pub(crate) unsafe fn room<'a>(start: *mut c_void, len: usize) -> Result<&'a mut [u8]> {
    if len == 0 {
        return Ok(&mut []);
    }
    if start.is_null() || len > isize::MAX as usize {
        return Err(Errno::EFAULT.into());
    }
    // SAFETY: the caller promises the memory, and that it is not shared; the length fits.
    Ok(unsafe { std::slice::from_raw_parts_mut(start.cast(), len) })
}

/// The pieces of a writev; `EINVAL` for more than 1024.
///
/// # Safety
///
/// `count` vectors from `start`, each of memory as [`bytes`] has it.
pub(crate) unsafe fn pieces<'a>(start: *const libc::iovec, count: i32) -> Result<Vec<IoSlice<'a>>> {
    // SAFETY: the caller promises the vectors and their memory.
    let each = |vector: &libc::iovec| unsafe { bytes(vector.iov_base, vector.iov_len) };
    // SAFETY: as above.
    let vectors = unsafe { vectors(start, count) }?;
    vectors.iter().map(|vector| Ok(IoSlice::new(each(vector)?))).collect()
}

/// The pieces of a readv; `EINVAL` for more than 1024.
///
/// # Safety
///
/// `count` vectors from `start`, each of memory as [`room`] has it, none of which overlap.
pub(crate) unsafe fn rooms<'a>(
    start: *const libc::iovec,
    count: i32,
) -> Result<Vec<IoSliceMut<'a>>> {
    // SAFETY: the caller promises the vectors and their memory.
    let each = |vector: &libc::iovec| unsafe { room(vector.iov_base, vector.iov_len) };
    // SAFETY: as above.
    let vectors = unsafe { vectors(start, count) }?;
    vectors.iter().map(|vector| Ok(IoSliceMut::new(each(vector)?))).collect()
}

/// # Safety
///
/// `count` vectors from `start` can be read.
unsafe fn vectors<'a>(start: *const libc::iovec, count: i32) -> Result<&'a [libc::iovec]> {
    let count = usize::try_from(count).ok().filter(|&count| count <= 1024).ok_or(Errno::EINVAL)?;
    if count == 0 {
        return Ok(&[]);
    }
    if start.is_null() {
        return Err(Errno::EFAULT.into());
    }
    // SAFETY: the caller promises them.
    Ok(unsafe { std::slice::from_raw_parts(start, count) })
}

/// Writes `value` where C wants it; `EFAULT` for NULL.
///
/// # Safety
///
/// Not NULL, it points to memory for a `T`.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Result<()> {
    if place.is_null() {
        return Err(Errno::EFAULT.into());
    }
    // SAFETY: the caller promises the memory; unaligned is fine for this way of writing.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// A `struct stat` of zeros.
pub(crate) fn empty_stat() -> libc::stat {
    // SAFETY: it is plain data, for which zeros are valid.
    unsafe { std::mem::zeroed() }
}
