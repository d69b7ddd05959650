//! Eyes in the kernel: where the requests of any FUSE file system spend their time.
//!
//! What it is: the FUSE connections of the machine and who serves them ([`Connection`]), their
//! knobs ([`Knobs`]), and a [`Collector`] that follows requests through the kernel's queues with
//! a BPF program, or sees as much of them as tracefs tells where BPF is not permitted. It needs
//! nothing of the file system and changes nothing about it.
//!
//! What it is not: it mounts no file system, draws nothing, and prints nothing: the program does.
//! It knows no frontend, so whoever uses it says what is mounted ([`Mount`]).
//!
//! The BPF program is `bpf/stages.bpf.c`, and the compiled object beside it is what is built in, so
//! that building needs no compiler for BPF; `cargo xtask bpf` makes it anew.

#![forbid(unsafe_code)]

mod bpf;
mod collector;
mod connection;
mod error;
mod event;
mod knobs;
mod opcode;
mod perfetto;
mod pseudo;
mod stages;
mod tracefs;
mod wire;

pub use collector::{Collector, Kind, Wanted};
pub use connection::{Connection, Mount, Process, processes_of};
pub use error::Error;
pub use event::{Event, Filter, Names, NodeNames};
pub use knobs::{Knob, Knobs, Values};
pub use opcode::{number_of, op_of};
pub use perfetto::Timeline;
pub use stages::{Flight, InFlight, Losses};
