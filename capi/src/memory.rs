//! Where C's pointers become Rust's references.
//!
//! Only C makes the pointer types of this file: nothing here constructs one, and their fields are
//! private. Whoever calls a function with one promises what its manual page says of the argument:
//! that it is NULL or points to what the type names, and that this stays as it is (or unused by
//! others, where it is written) until the function returns. All uses of a pointer rest on that.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::io::{IoSlice, IoSliceMut};

use defuse_direct::Result;
use defuse_fs::Errno;

/// Most vectors of one call, `IOV_MAX`.
const VECTORS_MAX: usize = 1024;

/// Sets `errno` of this thread.
pub fn set_errno(number: i32) {
    // SAFETY: __errno_location gives a valid pointer that belongs to this thread.
    unsafe { *libc::__errno_location() = number };
}

/// `errno` of this thread.
pub fn errno() -> i32 {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// A C string, or NULL.
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// The bytes without the NUL; `EFAULT` for NULL.
    pub fn get(&self) -> Result<&[u8]> {
        if self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises a string that stays, see above.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// True for NULL.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// A value that C gives, or NULL.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The value; `EFAULT` for NULL.
    pub fn get(&self) -> Result<T> {
        self.nth(0)
    }

    /// One of an array that the function takes.
    pub fn nth(&self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises as many values as the function is documented to take.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// True for NULL.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// Where C wants a value, or NULL.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Writes the value; `EFAULT` for NULL.
    pub fn put(&self, value: T) -> Result<()> {
        self.put_nth(0, value)
    }

    /// Writes one of an array, which has room for as many as the call says.
    pub fn put_nth(&self, index: usize, value: T) -> Result<()> {
        if self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises the memory; unaligned is fine for this way of writing.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// The address, for arguments that may be a number as well.
    pub fn address(&self) -> usize {
        self.0.addr()
    }

    /// What is there already, where C gives a value and wants another one in its place.
    pub fn get(&self) -> Result<T> {
        In(self.0.cast_const()).get()
    }

    /// True for NULL.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// Memory that is read, or NULL.
#[repr(transparent)]
pub struct Bytes<T>(*const T);

impl<T> Bytes<T> {
    /// The memory; `EFAULT` for NULL with a length.
    ///
    /// # Safety
    ///
    /// `len` is what C gave as the length in bytes.
    pub unsafe fn of(&self, len: usize) -> Result<&[u8]> {
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

/// Memory that is written, or NULL.
#[repr(transparent)]
pub struct Room<T>(*mut T);

impl<T> Room<T> {
    /// The memory; `EFAULT` for NULL with a length.
    ///
    /// # Safety
    ///
    /// `len` is what C gave as the length in bytes.
    pub unsafe fn of(&mut self, len: usize) -> Result<&mut [u8]> {
        if len == 0 {
            return Ok(&mut []);
        }
        if self.0.is_null() || len > isize::MAX as usize {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises the memory, and that nobody else uses it; the length fits.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), len) })
    }

    /// The pointer itself.
    pub fn start(&self) -> *mut T {
        self.0
    }
}

/// An array of `struct iovec`, or NULL.
#[repr(transparent)]
pub struct Vectors(*const libc::iovec);

impl Vectors {
    /// An array at an address that C gave inside of another argument.
    pub fn at(start: *const libc::iovec) -> Self {
        Vectors(start)
    }

    /// A copy of the array; `EINVAL` for more than 1024.
    ///
    /// # Safety
    ///
    /// `count` is what C gave as the length of the array.
    pub unsafe fn of(&self, count: i32) -> Result<Pieces> {
        let count = usize::try_from(count).ok().filter(|&count| count <= VECTORS_MAX);
        let count = count.ok_or(Errno::EINVAL)?;
        if count > 0 && self.0.is_null() {
            return Err(Errno::EFAULT.into());
        }
        // SAFETY: C promises the array.
        let each = |index| unsafe { self.0.add(index).read_unaligned() };
        Pieces::new((0..count).map(each).collect())
    }
}

/// Memory of C's in several pieces, none of them at NULL.
pub struct Pieces(Vec<libc::iovec>);

// SAFETY: these are addresses; the functions that use them say what the caller has to know.
unsafe impl Send for Pieces {}

impl Pieces {
    fn new(pieces: Vec<libc::iovec>) -> Result<Self> {
        let bad = |piece: &libc::iovec| {
            piece.iov_len > isize::MAX as usize || piece.iov_base.is_null() && piece.iov_len > 0
        };
        if pieces.iter().any(bad) {
            return Err(Errno::EFAULT.into());
        }
        Ok(Pieces(pieces))
    }

    /// One piece of memory; `EFAULT` for NULL with a length.
    pub fn one(start: *mut c_void, len: usize) -> Result<Self> {
        Pieces::new(vec![libc::iovec { iov_base: start, iov_len: len }])
    }

    /// To be read from.
    ///
    /// # Safety
    ///
    /// C promises the memory for as long as the result lives.
    pub unsafe fn slices(&self) -> Vec<IoSlice<'_>> {
        let each = |piece: &libc::iovec| match piece.iov_len {
            0 => IoSlice::new(&[]),
            len => {
                // SAFETY: checked when it was made, and promised by C.
                IoSlice::new(unsafe { std::slice::from_raw_parts(piece.iov_base.cast(), len) })
            }
        };
        self.0.iter().map(each).collect()
    }

    /// To be written to.
    ///
    /// # Safety
    ///
    /// As for [`slices`](Pieces::slices); nobody else uses the memory, and no two pieces overlap.
    pub unsafe fn rooms(&mut self) -> Vec<IoSliceMut<'_>> {
        let each = |piece: &libc::iovec| match piece.iov_len {
            0 => IoSliceMut::new(&mut []),
            len => {
                let start = piece.iov_base.cast();
                // SAFETY: checked when it was made, and promised by C.
                IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, len) })
            }
        };
        self.0.iter().map(each).collect()
    }
}

/// Something of ours that C holds by a pointer, or NULL.
#[repr(transparent)]
pub struct Handle<T>(*mut T);

impl<T> Handle<T> {
    /// Gives it to C.
    pub fn give(value: T) -> *mut T {
        Box::into_raw(Box::new(value))
    }

    /// What it points to; `EBADF` for NULL.
    pub fn get(&self) -> Result<&T> {
        // SAFETY: C promises a pointer that `give` made and `take` has not had.
        unsafe { self.0.as_ref() }.ok_or(Errno::EBADF.into())
    }

    /// Takes it back from C; `EBADF` for NULL.
    pub fn take(self) -> Result<Box<T>> {
        if self.0.is_null() {
            return Err(Errno::EBADF.into());
        }
        // SAFETY: as above; C promises not to use it again.
        Ok(unsafe { Box::from_raw(self.0) })
    }
}

/// Text in memory of malloc(3), which C frees; `ENOMEM`.
pub fn allocated(text: &[u8]) -> Result<*mut c_char> {
    // SAFETY: a length is all that it takes.
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

/// A structure of C of zeros.
pub fn zeroed<T: Plain>() -> T {
    // SAFETY: it is plain data, for which zeros are valid.
    unsafe { std::mem::zeroed() }
}

/// Plain data of C, for which zeros are a valid value.
///
/// # Safety
///
/// No field is a reference, a function or anything else that is never zero.
pub unsafe trait Plain {}

// SAFETY: numbers and arrays of numbers.
unsafe impl Plain for libc::stat {}
// SAFETY: as above.
unsafe impl Plain for libc::statx {}
// SAFETY: as above.
unsafe impl Plain for libc::statfs64 {}
// SAFETY: as above.
unsafe impl Plain for libc::statvfs {}
// SAFETY: as above.
unsafe impl Plain for libc::dirent {}

/// Keeps the signals of the application from this thread, so that their handlers run on its own.
pub fn block_signals() {
    // SAFETY: the set is initialized by sigfillset before it is used.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}
