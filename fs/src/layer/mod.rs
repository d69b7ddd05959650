//! Layers: file systems that wrap another one and change part of its behaviour.

mod delegate;
mod fault;
mod locking;
mod map;
mod method;
mod read_only;
mod subdir;
#[cfg(test)]
pub(crate) mod testing;

pub use fault::{Action, Fault, Rule, When};
pub use locking::Locking;
pub use map::MapInos;
pub use method::Method;
pub use read_only::ReadOnly;
pub use subdir::Subdir;

use std::sync::Arc;

use crate::{
    Context, Entry, FileSystem, Ino, Name, NewNode, NormalPath, OpenArgs, Opened, Resolved, Result,
};

/// Implements the contract for a pointer, also the methods that layers leave to their defaults.
macro_rules! pointer {
    ($pointer:ty) => {
        impl<F: FileSystem + ?Sized> FileSystem for $pointer {
            crate::delegate!(deref);

            fn resolve_to_open(
                &self,
                cx: &Context<'_>,
                from: Ino,
                path: NormalPath<'_>,
                args: OpenArgs,
            ) -> Result<(Resolved, Option<Opened>)> {
                (**self).resolve_to_open(cx, from, path, args)
            }

            fn lookup_to_open(
                &self,
                cx: &Context<'_>,
                parent: Ino,
                name: Name<'_>,
                args: OpenArgs,
            ) -> Result<(Entry, Option<Opened>)> {
                (**self).lookup_to_open(cx, parent, name, args)
            }

            fn create_with(
                &self,
                cx: &Context<'_>,
                parent: Ino,
                name: Name<'_>,
                node: &NewNode<'_>,
                data: &[u8],
            ) -> Result<Entry> {
                (**self).create_with(cx, parent, name, node, data)
            }
        }
    };
}

pointer!(&F);
pointer!(Arc<F>);
pointer!(Box<F>);
