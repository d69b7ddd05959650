//! The sources that this module mounts.

use defuse_bound::KINDS;
use defuse_compose::{IN_OWN_PROGRAMS, IN_PROCESS, SourceRegistry};

/// The kinds of sources of this module.
pub static SOURCES: SourceRegistry = SourceRegistry::new(&[IN_PROCESS, IN_OWN_PROGRAMS, KINDS]);
