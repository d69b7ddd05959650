//! Layers: file systems that wrap another one and change part of its behaviour.

mod delegate;
mod fault;
mod locking;
mod map;
mod method;
mod read_only;
mod subdir;
mod synchronous;
#[cfg(test)]
pub(crate) mod testing;

pub use fault::{FaultAction, FaultLayer, FaultRule, FaultTrigger};
pub use locking::LockingLayer;
pub use map::MapInos;
pub use method::{Method, Shortcut};
pub use read_only::ReadOnlyLayer;
pub use subdir::SubdirLayer;
pub use synchronous::SynchronousLayer;

use std::sync::Arc;

use crate::FileSystem;

impl<F: FileSystem + ?Sized> FileSystem for &F {
    crate::delegate!(deref);
}

impl<F: FileSystem + ?Sized> FileSystem for Arc<F> {
    crate::delegate!(deref);
}

impl<F: FileSystem + ?Sized> FileSystem for Box<F> {
    crate::delegate!(deref);
}
