//! The kinds of sources of this crate.

use defuse_fs::source::SourceKind;

/// The kinds that make a program one of the processes of a manager. They open sources of
/// [`IN_OWN_PROGRAMS`](defuse_compose::IN_OWN_PROGRAMS), and run where those run.
pub static KINDS: &[&dyn SourceKind] = &[&crate::BOUND];
