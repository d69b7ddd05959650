//! What the operating system gives, as this library uses it: system calls, locks, a heap, threads that
//! are in our own code, messages to people, and descriptors of our own.
//!
//! It names no other layer.

#[allow(unsafe_code)]
pub mod heap;
#[allow(unsafe_code)]
pub mod inside;
#[allow(unsafe_code)]
pub mod lock;
pub mod state_pipe;
#[allow(unsafe_code)]
pub mod sys;
#[allow(unsafe_code)]
pub mod thread_exit;
