//! The ways by which calls of a program come here: patched instructions, exported functions, dispatched
//! calls and static programs; and the signals that arrive meanwhile.
//!
//! It names all other layers.

#[allow(unsafe_code)]
pub mod delivery;
#[allow(unsafe_code)]
pub mod dispatch;
#[allow(unsafe_code)]
pub mod entry;
#[allow(unsafe_code)]
pub mod patch;
#[allow(unsafe_code)]
pub mod signals;
pub mod start;
#[allow(unsafe_code)]
pub mod statics;
#[allow(unsafe_code)]
pub mod symbols;
#[allow(unsafe_code)]
pub mod tls_block;
#[allow(unsafe_code)]
pub mod users;
