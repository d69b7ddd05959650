//! The functions of the C library that ours stand before.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::machine::sys;

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
type LibraryFunction = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i64;

/// A function of the libraries after ours.
pub struct NextFunction {
    name: &'static CStr,
    pub address: AtomicU64,
}

impl NextFunction {
    pub const fn new(name: &'static CStr) -> Self {
        NextFunction { name, address: AtomicU64::new(0) }
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
                // SAFETY: the address belongs to the function of this name; the function gets what
                // the program passed to us under the same name, in the same registers.
                let function = unsafe { std::mem::transmute::<u64, LibraryFunction>(address) };
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

/// The address of a function of the C library itself, also where another library has one of this
/// name; 0 if there is none. dlsym(3) finds such a one only in what dlopen(3) has returned, which
/// other libraries replace.
pub fn find_in_c_library(name: &CStr) -> u64 {
    // SAFETY: dlsym takes any name.
    let debug = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_r_debug".as_ptr()) } as u64;
    // `struct r_debug` and `struct link_map` of link.h: base, name, dynamic section, next.
    let mut map = sys::load(debug + 8).unwrap_or(0);
    while let Ok([base, path, dynamic, next]) = sys::load::<[u64; 4]>(map) {
        let file = sys::string(path).unwrap_or_default().rsplit(|byte| *byte == b'/').next();
        if file.is_some_and(|file| file.starts_with(b"libc.so.")) {
            return function(base, dynamic, name.to_bytes()).unwrap_or(0);
        }
        map = next;
    }
    0
}

/// The function of this name of the object at `base` with this dynamic section, by its hash table
/// (`DT_GNU_HASH`).
fn function(base: u64, dynamic: u64, name: &[u8]) -> Option<u64> {
    const STRINGS: u64 = 5;
    const SYMBOLS: u64 = 6;
    const HASH: u64 = 0x6fff_fef5;
    const SYMBOL: u64 = 24;
    let word = |at: u64| sys::load::<u32>(at).ok();
    let mut found = [0; 3];
    for at in (dynamic..).step_by(16) {
        let [tag, value] = sys::load::<[u64; 2]>(at).ok()?;
        match tag {
            0 => break,
            STRINGS => found[0] = value,
            SYMBOLS => found[1] = value,
            HASH => found[2] = value,
            _ => {}
        }
    }
    let [strings, symbols, table] = found;
    let [buckets, first, filters, _] = sys::load::<[u32; 4]>(table).ok()?;
    let hash =
        name.iter().fold(5381u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()));
    let buckets_at = table + 16 + u64::from(filters) * 8;
    let chains_at = buckets_at + u64::from(buckets) * 4;
    let mut symbol = word(buckets_at + u64::from(hash.checked_rem(buckets)?) * 4)?;
    loop {
        let other = word(chains_at + u64::from(symbol.checked_sub(first)?) * 4)?;
        let at = symbols + u64::from(symbol) * SYMBOL;
        if other | 1 == hash | 1 && sys::string(strings + u64::from(word(at)?)).ok()? == name {
            return Some(base + sys::load::<u64>(at + 8).ok()?);
        }
        if other & 1 != 0 {
            return None;
        }
        symbol += 1;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_the_c_library_are_found_by_its_table() {
        assert_eq!(find_in_c_library(c"getppid"), libc::getppid as *const () as u64);
        assert_eq!(find_in_c_library(c"no_such_function"), 0);
    }
}
