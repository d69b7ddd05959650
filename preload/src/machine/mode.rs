//! How the calls of this program are caught. The facts are set once, before the program begins.

use std::sync::atomic::{AtomicU8, Ordering};

/// Not 0 while system calls are dispatched in this process (`--dispatch`). Assembly reads it.
pub static DISPATCHED: AtomicU8 = AtomicU8::new(0);

/// Not 0 if the program is a static one, whose threads have TLS blocks of their own for our code.
/// Assembly reads it.
pub static STATIC: AtomicU8 = AtomicU8::new(0);

/// True while system calls are dispatched in this process.
#[inline]
pub fn is_dispatched() -> bool {
    DISPATCHED.load(Ordering::Relaxed) != 0
}

/// Sets what [`is_dispatched`] returns.
pub fn set_dispatched(dispatched: bool) {
    DISPATCHED.store(dispatched.into(), Ordering::Release);
}

/// True if the program is a static one.
#[inline]
pub fn is_static() -> bool {
    STATIC.load(Ordering::Relaxed) != 0
}

/// The program is a static one.
pub fn set_static() {
    STATIC.store(1, Ordering::Release);
}
