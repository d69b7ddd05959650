//! How commands look into the kernel: the way that is taken, and what is said where it is barred.

use defuse_trace::{Collector, Kind, Wanted};

use crate::error::{Failure, Result};

/// The option of every command that looks into the kernel.
#[derive(clap::Args)]
pub struct KernelArgs {
    /// How to look into the kernel, instead of the best way that is permitted
    #[arg(long, value_enum)]
    via: Option<Via>,
}

/// A way into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Via {
    /// A BPF program: every stage
    Bpf,
    /// Events of tracefs: from sending to the end alone, in whole microseconds
    Tracefs,
}

impl KernelArgs {
    /// Begins to look.
    pub fn start(&self, wanted: Wanted) -> Result<Collector> {
        let kind = self.via.map(|via| match via {
            Via::Bpf => Kind::Bpf,
            Via::Tracefs => Kind::Tracefs,
        });
        Collector::start(&Wanted { kind, ..wanted }).map_err(Failure::failed)
    }
}
