//! The kinds of sources that any program of this project can link.

use defuse_fs::source::SourceKind;

/// The kinds that run inside any program, also one that was not written for it: the library that
/// `defuse run` loads, and the library for C. They are Rust without a C library of their own, so
/// that they bring nothing into the program that loads them.
///
/// A kind that needs more goes into the list of the program `defuse`, which then serves it to the
/// programs of a run.
pub static IN_PROCESS: &[&dyn SourceKind] = &[
    &defuse_passthrough::KIND,
    &defuse_memory::KIND,
    &defuse_remote::SOCKET,
    &defuse_remote::SHARED,
    &defuse_remote::PROGRAM,
];

/// The kinds that run inside programs that were written for it. They have threads of their own, and
/// state that must be written when the program ends, neither of which survives what any program may
/// do (fork(2), execve(2), a kill). For the programs of a run, `defuse run` serves them.
pub static IN_OWN_PROGRAMS: &[&dyn SourceKind] = &[&defuse_uhs::KIND, &defuse_gluster::KIND];
