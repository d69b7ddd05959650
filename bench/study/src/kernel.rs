//! The kernel's side of the requests of one cell, where the kernel lets itself be looked into.

use anyhow::Result;
use defuse_probe::Snapshot;
use defuse_trace::{Collector, Kind, Wanted};

/// Whether and how the kernel's queues can be measured.
#[derive(Debug, Clone)]
pub struct KernelStages {
    wanted: bool,
    told: String,
}

/// One cell's worth of looking; ends when it is dropped.
#[derive(Default)]
pub struct Watch(Option<(u32, Collector)>);

/// What was seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// Requests by type and queue.
    pub snapshot: Option<Snapshot>,
    /// What could not be counted.
    pub remarks: Vec<String>,
}

impl KernelStages {
    /// Tries once, so that the reason is known before anything starts.
    pub fn probe(wanted: bool) -> KernelStages {
        if !wanted {
            return KernelStages { wanted, told: "not measured, as was asked".into() };
        }
        match Collector::start(&Wanted::default()) {
            Ok(collector) => {
                let how = match collector.kind() {
                    Kind::Bpf => "measured by BPF: background, pending and processing queue",
                    Kind::Tracefs => {
                        "measured by tracefs: from sending to the end only, without queues"
                    }
                };
                let notes = collector.notes().iter().map(|note| format!("; {note}"));
                KernelStages { wanted, told: how.to_owned() + &notes.collect::<String>() }
            }
            Err(error) => KernelStages { wanted: false, told: format!("not measured: {error}") },
        }
    }

    /// In words.
    pub fn describe(&self) -> String {
        self.told.clone()
    }

    /// Begins to look at a connection.
    pub fn watch(&self, connection: u32) -> Result<Watch> {
        if !self.wanted {
            return Ok(Watch::default());
        }
        let wanted = Wanted { connection: Some(connection), ..Wanted::default() };
        Ok(Watch(Some((connection, Collector::start(&wanted)?))))
    }
}

impl Watch {
    /// Ends, and tells what was seen.
    pub fn end(self) -> Result<Seen> {
        let Some((connection, mut collector)) = self.0 else { return Ok(Seen::default()) };
        let snapshot = Some(collector.snapshot(connection)?);
        let remarks = collector.losses()?.describe().map(|lost| format!("kernel queues: {lost}"));
        Ok(Seen { snapshot, remarks: remarks.into_iter().collect() })
    }
}
