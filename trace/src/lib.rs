//! Tracing in the kernel: the places where requests of any FUSE file system spend their time.
//!
//! This crate lists the FUSE connections of the machine and their daemons ([`FuseConnection`]) and
//! changes their settings ([`Knobs`]). A [`Collector`] follows requests through the kernel's queues
//! with a BPF program, or with the fewer events of tracefs if BPF is not permitted. It needs no
//! support from the file system and does not change it.
//!
//! It mounts no file system and prints nothing; the program does. It knows no frontend, so its
//! caller supplies the list of mounts ([`FuseMount`]).
//!
//! The BPF program is `bpf/stages.bpf.c`. The compiled object beside it is built in, so that the
//! build needs no BPF compiler. `cargo xtask bpf` compiles it again.

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

pub use collector::{Collector, CollectorKind, Wanted};
pub use connection::{FuseConnection, FuseMount, Process, processes_of};
pub use error::Error;
pub use event::{Event, Filter, Names, NodeNames};
pub use knobs::{Knob, Knobs, Values};
pub use opcode::{number_of, op_of};
pub use perfetto::Timeline;
pub use stages::{Flight, InFlight, Losses};
