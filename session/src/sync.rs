//! The synchronization that the worker pool is made of. Under the `shuttle` feature these are the
//! checker's own, so that its tests run the very code that serves mounts.

#[cfg(not(feature = "shuttle"))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};
