//! File sets: their trees, the choice of files, and their creation.

mod bits;
mod create;
mod pool;
mod tree;

pub(crate) use create::{check_room, create, make_path, remove};
pub(crate) use pool::{EntryChoice, EntryState};
pub(crate) use tree::RunFileset;
