//! The registry of sources: from text to a file system.
//!
//! [`SourceRegistry`] has the kinds that a program links. It parses the source `KIND:REST` and
//! opens it. [`IN_PROCESS`] is the list of kinds that run inside any program, and
//! [`IN_OWN_PROGRAMS`] has those that run only inside programs written for it. A backend describes
//! its kinds in its own crate ([`defuse_fs::source`]); a new kind is one line in one of these
//! lists.
//!
//! The crate knows nothing of a kind but its description. It connects no file system with a
//! frontend, and knows no option of a mount or a session.

#![forbid(unsafe_code)]

mod kinds;
mod registry;
mod settings;

pub use defuse_fs::source::{SourceOpenError, SourceResult};
pub use kinds::{IN_OWN_PROGRAMS, IN_PROCESS};
pub use registry::{OpenSource, ParsedSource, SourceRegistry, WriteSwitch};
pub use settings::{SourceSettings, split};
