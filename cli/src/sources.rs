//! The kinds of sources that this program links: the kinds of `compose/src/kinds.rs`, and its own.

use defuse_bound::KINDS;
use defuse_compose::{IN_OWN_PROGRAMS, IN_PROCESS, SourceRegistry};
use defuse_fs::source::SourceKind;

/// All kinds.
pub static SOURCES: SourceRegistry =
    SourceRegistry::new(&[IN_PROCESS, IN_OWN_PROGRAMS, KINDS, ONLY_HERE]);

/// Kinds that only this program links, because they bring a C library or anything else that has no
/// place inside of another program. `defuse run` serves them for its programs.
const ONLY_HERE: &[&dyn SourceKind] = &[&defuse_example::KIND];

/// True if the library that `defuse run` loads into programs links `kind`, too.
pub fn is_in_process(kind: &dyn SourceKind) -> bool {
    IN_PROCESS.iter().any(|known| known.facts().name == kind.facts().name)
}
