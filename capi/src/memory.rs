//! Converts C pointers to Rust references.
//!
//! Only C creates the pointer types of this file: nothing here constructs one, and their fields are
//! private. The caller of a function promises what its manual page requires of the argument: it is
//! NULL or points to the type that its name states, and the memory stays unchanged (or unused by
//! others, if it is written) until the function returns. All uses of a pointer rely on that.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::io::{IoSlice, IoSliceMut};

use defuse_direct::Result;
use defuse_fs::Errno;

/// Maximum number of vectors of one call, `IOV_MAX`.
const VECTORS_MAX: usize = 1024;

/// Sets `errno` of this thread.
pub fn set_errno(number: i32) {
    // SAFETY: __errno_location returns a valid pointer that belongs to this thread.
    unsafe { *libc::__errno_location() = number };
}

/// Returns `errno` of this thread.
pub fn errno() -> i32 {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// A C string, or NULL.
#[repr(transparent)]
pub struct CStringArg(*const c_char);

impl CStringArg {
    /// The bytes without the NUL. Fails with `EFAULT` for NULL.
    pub fn get(&self) -> Result<&[u8]> {
        if self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises a valid string, see above.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// True for NULL.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// An input value, or NULL.
#[repr(transparent)]
pub struct InPointer<T>(*const T);

impl<T: Copy> InPointer<T> {
    /// The value. Fails with `EFAULT` for NULL.
    pub fn get(&self) -> Result<T> {
        self.nth(0)
    }

    /// An element of an array.
    pub fn nth(&self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises as many values as the documentation of the function requires.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// True for NULL.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// An output value, or NULL.
#[repr(transparent)]
pub struct OutPointer<T>(*mut T);

impl<T: Copy> OutPointer<T> {
    /// Writes the value. Fails with `EFAULT` for NULL.
    pub fn put(&self, value: T) -> Result<()> {
        self.put_nth(0, value)
    }

    /// Writes an element of an array, whose length the caller states.
    pub fn put_nth(&self, index: usize, value: T) -> Result<()> {
        if self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises the memory; unaligned writes are allowed.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// The address, for arguments that may also be a number.
    pub fn address(&self) -> usize {
        self.0.addr()
    }

    /// The current value, for arguments that are both input and output.
    pub fn get(&self) -> Result<T> {
        InPointer(self.0.cast_const()).get()
    }

    /// True for NULL.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// An input buffer, or NULL.
#[repr(transparent)]
pub struct InBuffer<T>(*const T);

impl<T> InBuffer<T> {
    /// The buffer. Fails with `EFAULT` for NULL with a length.
    ///
    /// # Safety
    ///
    /// `len` must be the length in bytes that C has stated.
    pub unsafe fn as_slice(&self, len: usize) -> Result<&[u8]> {
        if len == 0 {
            return Ok(&[]);
        }
        if self.0.is_null() || len > isize::MAX as usize {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises the bytes; the length fits.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast(), len) })
    }
}

/// An output buffer, or NULL.
#[repr(transparent)]
pub struct OutBuffer<T>(*mut T);

impl<T> OutBuffer<T> {
    /// The buffer. Fails with `EFAULT` for NULL with a length.
    ///
    /// # Safety
    ///
    /// `len` must be the length in bytes that C has stated.
    pub unsafe fn as_mut_slice(&mut self, len: usize) -> Result<&mut [u8]> {
        if len == 0 {
            return Ok(&mut []);
        }
        if self.0.is_null() || len > isize::MAX as usize {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises the memory, and that no other code uses it; the length fits.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), len) })
    }

    /// The pointer itself.
    pub fn start(&self) -> *mut T {
        self.0
    }
}

/// An array of `struct iovec`, or NULL.
#[repr(transparent)]
pub struct IovecArray(*const libc::iovec);

impl IovecArray {
    /// An array at an address inside of another argument.
    pub fn from_address(start: *const libc::iovec) -> Self {
        IovecArray(start)
    }

    /// A copy of the array. Fails with `EINVAL` for more than 1024 elements.
    ///
    /// # Safety
    ///
    /// `count` must be the length of the array that C has stated.
    pub unsafe fn copy_array(&self, count: i32) -> Result<IovecBuffers> {
        let count = usize::try_from(count).ok().filter(|&count| count <= VECTORS_MAX);
        let count = count.ok_or(Errno::EINVAL)?;
        if count > 0 && self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises the array.
        let each = |index| unsafe { self.0.add(index).read_unaligned() };
        IovecBuffers::new((0..count).map(each).collect())
    }
}

/// Several buffers of C, none of them NULL.
pub struct IovecBuffers(Vec<libc::iovec>);

// SAFETY: these are addresses; the functions that use them state their requirements.
unsafe impl Send for IovecBuffers {}

impl IovecBuffers {
    fn new(pieces: Vec<libc::iovec>) -> Result<Self> {
        let bad = |piece: &libc::iovec| {
            piece.iov_len > isize::MAX as usize || piece.iov_base.is_null() && piece.iov_len > 0
        };
        if pieces.iter().any(bad) {
            return Err(Errno::EFAULT.into());
        }
        Ok(IovecBuffers(pieces))
    }

    /// A single buffer. Fails with `EFAULT` for NULL with a length.
    pub fn from_buffer(start: *mut c_void, len: usize) -> Result<Self> {
        IovecBuffers::new(vec![libc::iovec { iov_base: start, iov_len: len }])
    }

    /// The buffers for reading from them.
    ///
    /// # Safety
    ///
    /// C must keep the memory valid as long as the result lives.
    pub unsafe fn slices(&self) -> Vec<IoSlice<'_>> {
        let each = |piece: &libc::iovec| match piece.iov_len {
            0 => IoSlice::new(&[]),
            len => {
                // SAFETY: checked on creation, and promised by C.
                IoSlice::new(unsafe { std::slice::from_raw_parts(piece.iov_base.cast(), len) })
            }
        };
        self.0.iter().map(each).collect()
    }

    /// The buffers for writing to them.
    ///
    /// # Safety
    ///
    /// As for [`slices`](IovecBuffers::slices). In addition, no other code may use the memory, and
    /// no two buffers may overlap.
    pub unsafe fn mut_slices(&mut self) -> Vec<IoSliceMut<'_>> {
        let each = |piece: &libc::iovec| match piece.iov_len {
            0 => IoSliceMut::new(&mut []),
            len => {
                let start = piece.iov_base.cast();
                // SAFETY: checked on creation, and promised by C.
                IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, len) })
            }
        };
        self.0.iter().map(each).collect()
    }
}

/// An object of this library that C holds by a pointer, or NULL.
#[repr(transparent)]
pub struct ObjectHandle<T>(*mut T);

impl<T> ObjectHandle<T> {
    /// Passes the object to C.
    pub fn give(value: T) -> *mut T {
        Box::into_raw(Box::new(value))
    }

    /// The object. Fails with `EBADF` for NULL.
    pub fn get(&self) -> Result<&T> {
        // SAFETY: C promises a pointer from `give` that was not passed to `take`.
        unsafe { self.0.as_ref() }.ok_or(Errno::EBADF.into())
    }

    /// Takes the object back from C. Fails with `EBADF` for NULL.
    pub fn take(self) -> Result<Box<T>> {
        if self.0.is_null() {
            return Err(Errno::EBADF.into());
        }
        // SAFETY: as above; C promises not to use it again.
        Ok(unsafe { Box::from_raw(self.0) })
    }
}

/// A copy of `text` in memory of malloc(3), which C frees. Fails with `ENOMEM`.
pub fn allocate_copy(text: &[u8]) -> Result<*mut c_char> {
    // SAFETY: malloc takes only a length.
    let start = unsafe { libc::malloc(text.len() + 1) }.cast::<u8>();
    if start.is_null() {
        return Err(Errno::ENOMEM.into());
    }
    // SAFETY: the memory is new, and as long as the text and its NUL.
    unsafe {
        start.copy_from_nonoverlapping(text.as_ptr(), text.len());
        start.add(text.len()).write(0);
    }
    Ok(start.cast())
}

/// A C structure of zeros.
pub fn zeroed<T: PlainData>() -> T {
    // SAFETY: it is plain data, for which zeros are valid.
    unsafe { std::mem::zeroed() }
}

/// Plain C data, for which zeros are a valid value.
///
/// # Safety
///
/// No field may be a reference, a function or another type that is never zero.
pub unsafe trait PlainData {}

// SAFETY: numbers and arrays of numbers.
unsafe impl PlainData for libc::stat {}
// SAFETY: as above.
unsafe impl PlainData for libc::statx {}
// SAFETY: as above.
unsafe impl PlainData for libc::statfs64 {}
// SAFETY: as above.
unsafe impl PlainData for libc::statvfs {}
// SAFETY: as above.
unsafe impl PlainData for libc::dirent {}

/// Blocks all signals on this thread, so that the application's handlers run on its own threads.
pub fn block_signals() {
    // SAFETY: the set is initialized by sigfillset before it is used.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}
