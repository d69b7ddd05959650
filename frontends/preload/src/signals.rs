//! Signals that arrive while our own code runs.

/// Whether a signal waits for the end of our code on this thread.
pub fn waits() -> bool {
    false
}

/// Delivers what had to wait.
#[inline]
pub fn deliver() {}
