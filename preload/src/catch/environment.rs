//! The environment of the program, environ(7).

use std::ffi::{CStr, CString, c_char};
use std::sync::atomic::AtomicPtr;

// SAFETY: the C library's list of variables, declared as in environ(7).
unsafe extern "C" {
    static mut environ: *mut *mut c_char;
}

/// The program's variables, as execv(3) takes them.
pub fn variables() -> u64 {
    // SAFETY: the C library's own functions read it without a lock, too.
    unsafe { environ as u64 }
}

/// Leaves the list to a static program, which may overwrite it. The library itself sees no
/// variables from then on.
pub fn leave_to_program() {
    static NONE: [AtomicPtr<c_char>; 1] = [AtomicPtr::new(std::ptr::null_mut())];
    // SAFETY: before the program begins there is one thread. An empty list is never written, except
    // with NULL.
    unsafe { environ = NONE.as_ptr().cast_mut().cast() };
}

/// The value of a variable, which is taken out: the program is not to see it. Before `main`, so
/// that no other thread looks.
pub fn take(name: &str) -> Option<CString> {
    let mut found = None;
    edit(|text| {
        let text = text.to_bytes();
        match text.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) {
            Some(value) => {
                found = CString::new(value).ok();
                false
            }
            None => true,
        }
    });
    found
}

/// Takes the library out of LD_PRELOAD, and the variable where nothing else is in it.
pub fn clean_preload(library: &[u8]) {
    edit(|text| {
        let Some(value) = text.to_bytes().strip_prefix(b"LD_PRELOAD=") else { return true };
        let others: Vec<_> =
            value.split(|b| b": ".contains(b)).filter(|o| !o.is_empty() && *o != library).collect();
        if others.is_empty() {
            return false;
        }
        let rest = others.join(&b':');
        let start = text.as_ptr().cast_mut().wrapping_add(b"LD_PRELOAD=".len());
        // SAFETY: the rest is no longer than the value that it replaces, which lies in the
        // process's own environment block.
        unsafe {
            std::ptr::copy_nonoverlapping(rest.as_ptr(), start.cast(), rest.len());
            *start.add(rest.len()) = 0;
        }
        true
    });
}

/// Keeps the variables for which `keep` returns true.
fn edit(mut keep: impl FnMut(&CStr) -> bool) {
    // SAFETY: before `main` there is one thread, and the list is NULL-terminated.
    unsafe {
        let mut from = environ;
        if from.is_null() {
            return;
        }
        let mut to = from;
        while !(*from).is_null() {
            if keep(CStr::from_ptr(*from)) {
                *to = *from;
                to = to.add(1);
            }
            from = from.add(1);
        }
        *to = std::ptr::null_mut();
    }
}
