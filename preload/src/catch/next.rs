//! The functions of the C library that ours stand before.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static PATCHED: AtomicBool = AtomicBool::new(false);

/// Says whether the C library leads to us by itself.
pub fn set_patched(patched: bool) {
    PATCHED.store(patched, Ordering::Relaxed);
}

/// True if the C library leads to us by itself.
pub fn is_patched() -> bool {
    PATCHED.load(Ordering::Relaxed)
}

// SAFETY: the type of a function of the C library, called with what the program passed.
type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i64;

/// A function of the libraries after ours.
pub struct Next {
    name: &'static CStr,
    pub address: AtomicU64,
}

impl Next {
    pub const fn new(name: &'static CStr) -> Self {
        Next { name, address: AtomicU64::new(0) }
    }

    #[inline]
    pub fn address(&self) -> u64 {
        match self.address.load(Ordering::Relaxed) {
            0 => {
                let found = find(self.name);
                self.address.store(found, Ordering::Relaxed);
                found
            }
            found => found,
        }
    }

    /// Calls the function as the program called us. `ENOSYS` if there is none.
    #[inline]
    pub fn call(&self, a: &[u64; 6]) -> i64 {
        match self.address() {
            0 => result(-i64::from(libc::ENOSYS)),
            address => {
                // SAFETY: the address is that of the function of this name; it gets what the program
                // passed to us under the same name, in the same registers.
                let function = unsafe { std::mem::transmute::<u64, Function>(address) };
                // SAFETY: see above.
                unsafe { function(a[0], a[1], a[2], a[3], a[4], a[5]) }
            }
        }
    }
}

/// A name that ends with NUL.
pub const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!(),
    }
}

/// The address of a symbol in the libraries after ours; 0 if there is none.
pub fn find(name: &CStr) -> u64 {
    // SAFETY: dlsym takes any name.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) as u64 }
}

/// The C library's way of returning: -1, and the error in errno.
pub fn result(value: i64) -> i64 {
    if !(-4095..0).contains(&value) {
        return value;
    }
    // SAFETY: the C library gives every thread a place for errno.
    unsafe { *libc::__errno_location() = -value as c_int };
    -1
}
