//! The registry of sources: from text to a file system.
//!
//! What it is: [`Registry`], the kinds that a program links, which parses the source `KIND:REST` and opens
//! it; and [`IN_PROCESS`], the list of kinds that run inside any program. A backend describes its kinds
//! in its own crate ([`defuse_fs::source`]); a new kind is one line in that list.
//!
//! What it is not: it knows nothing of any kind but its description, connects no file system with a
//! frontend, and knows no option of a mount or a session.

#![forbid(unsafe_code)]

mod kinds;
mod registry;
mod settings;

pub use defuse_fs::source::{Error, Result};
pub use kinds::IN_PROCESS;
pub use registry::{Opened, Registry, Source, Switch};
pub use settings::{Settings, split};
