//! The operating system as this library uses it: system calls, locks, a heap, threads that are in
//! our own code, messages to users, and descriptors of our own.
//!
//! It names no other layer.

#[allow(unsafe_code)]
pub mod descriptors;
#[allow(unsafe_code)]
pub mod heap;
#[allow(unsafe_code)]
pub mod inside;
#[allow(unsafe_code)]
pub mod lock;
#[allow(unsafe_code)]
pub mod mask;
pub mod message;
pub mod mode;
#[allow(unsafe_code)]
pub mod pending;
pub mod pid;
#[allow(unsafe_code)]
pub mod stack;
pub mod state_pipe;
#[allow(unsafe_code)]
pub mod sys;
#[allow(unsafe_code)]
pub mod thread_exit;
#[allow(unsafe_code)]
pub mod wait;
