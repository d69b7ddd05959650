//! The ways by which calls of a program come here: patched instructions, exported functions,
//! dispatched calls and static programs; and the signals that arrive meanwhile.
//!
//! It names all other layers.

#[allow(unsafe_code)]
mod delivery;
#[allow(unsafe_code)]
mod dispatch;
#[allow(unsafe_code)]
mod entry;
#[allow(unsafe_code)]
mod environment;
#[allow(unsafe_code)]
mod frame;
#[allow(unsafe_code)]
mod go_entry;
#[allow(unsafe_code)]
mod next;
mod own_calls;
#[allow(unsafe_code)]
mod patch;
mod program_point;
#[allow(unsafe_code)]
mod signal_actions;
#[allow(unsafe_code)]
mod signal_state;
#[allow(unsafe_code)]
mod signals;
#[allow(unsafe_code)]
mod start;
#[allow(unsafe_code)]
mod statics;
#[allow(unsafe_code)]
pub mod symbols;
#[allow(unsafe_code)]
mod tls_block;
#[allow(unsafe_code)]
mod unwrapped;
#[allow(unsafe_code)]
mod user_dispatch;
#[allow(unsafe_code)]
mod users;
