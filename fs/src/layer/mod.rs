//! Layers: file systems that wrap another one and change a part of what it does.

mod delegate;
mod map;
mod method;

pub use map::MapInos;
pub use method::Method;

use std::sync::Arc;

use crate::FileSystem;

impl<F: FileSystem + ?Sized> FileSystem for Arc<F> {
    crate::delegate!(deref);
}

impl<F: FileSystem + ?Sized> FileSystem for Box<F> {
    crate::delegate!(deref);
}
