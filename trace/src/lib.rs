//! Tracing in the kernel: the places where requests of any FUSE file system spend their time.
//!
//! This crate lists the FUSE connections of the machine and their daemons ([`FuseConnection`]) and
//! changes their settings ([`FusectlMount`]). A [`Collector`] follows requests through the kernel's
//! queues with a BPF program, or with the fewer events of tracefs if BPF is not permitted. It needs
//! no support from the file system and does not change it.
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
mod opcode;
mod perfetto;
mod pseudo;
mod settings;
mod stages;
mod tracefs;
mod wire;

pub use collector::{Collector, CollectorKind, CollectorOptions};
pub use connection::{DaemonProcess, FuseConnection, FuseMount, processes_of};
pub use error::TraceError;
pub use event::{CompletedRequest, EventFilter, NodeNames, RequestNames};
pub use opcode::{number_of, op_of};
pub use perfetto::TraceTimeline;
pub use settings::{FusectlMount, FusectlSetting, FusectlValues};
pub use stages::{InFlightState, LostMeasurements, RequestInFlight};
