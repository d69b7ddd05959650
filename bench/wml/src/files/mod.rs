//! File sets: their trees, who picks which file, and how they are made.

mod bits;
mod create;
mod pool;
mod tree;

pub(crate) use create::{check_room, create, make_path, remove};
pub(crate) use pool::{Pick, State};
pub(crate) use tree::Fileset;
