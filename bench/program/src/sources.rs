//! The kinds of sources that are measured inside of this program.

use defuse_bound::KINDS;
use defuse_compose::{IN_OWN_PROGRAMS, IN_PROCESS, SourceRegistry};

/// All kinds.
pub static SOURCES: SourceRegistry = SourceRegistry::new(&[IN_PROCESS, IN_OWN_PROGRAMS, KINDS]);
