//! Tracing of the kernel by commands: the choice of the method, and messages without permission.

use defuse_trace::{Collector, CollectorKind, CollectorOptions};

use crate::error::{CommandFailure, Result};

/// The option of every command that traces the kernel.
#[derive(clap::Args)]
pub struct KernelArgs {
    /// The method of tracing the kernel [default: the best one that is permitted]
    #[arg(long, value_enum)]
    via: Option<TraceMethod>,
}

/// A method of tracing the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TraceMethod {
    /// A BPF program: all stages
    Bpf,
    /// Events of tracefs: only the time from sending to the end, in whole microseconds
    Tracefs,
}

impl KernelArgs {
    /// Starts a collector.
    pub fn start(&self, wanted: CollectorOptions) -> Result<Collector> {
        let kind = self.via.map(|via| match via {
            TraceMethod::Bpf => CollectorKind::Bpf,
            TraceMethod::Tracefs => CollectorKind::Tracefs,
        });
        Collector::start(&CollectorOptions { kind, ..wanted }).map_err(CommandFailure::from_error)
    }
}
