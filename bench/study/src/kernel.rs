//! Traces the requests of one cell in the kernel, if permitted.

use anyhow::Result;
use defuse_probe::StatsSnapshot;
use defuse_trace::{Collector, CollectorKind, CollectorOptions};

/// The method of measuring the kernel's queues, if any.
#[derive(Debug, Clone)]
pub struct KernelStages {
    wanted: bool,
    explanation: String,
}

/// Traces one cell until it is dropped.
#[derive(Default)]
pub struct CellTrace(Option<(u32, Collector)>);

/// The measurements in the kernel.
#[derive(Debug, Default)]
pub struct KernelMeasurement {
    /// Requests by type and queue.
    pub snapshot: Option<StatsSnapshot>,
    /// Measurements that were lost.
    pub remarks: Vec<String>,
}

impl KernelStages {
    /// Tries to trace, so that a reason against it is known before the start.
    pub fn probe(wanted: bool) -> KernelStages {
        if !wanted {
            return KernelStages { wanted, explanation: "not measured, as requested".into() };
        }
        match Collector::start(&CollectorOptions::default()) {
            Ok(collector) => {
                let how = match collector.kind() {
                    CollectorKind::Bpf => {
                        "measured by BPF: background, pending and processing queue"
                    }
                    CollectorKind::Tracefs => {
                        "measured by tracefs: from sending to the end only, without queues"
                    }
                };
                let notes = collector.notes().iter().map(|note| format!("; {note}"));
                KernelStages { wanted, explanation: how.to_owned() + &notes.collect::<String>() }
            }
            Err(error) => {
                KernelStages { wanted: false, explanation: format!("not measured: {error}") }
            }
        }
    }

    /// A description of the method.
    pub fn describe(&self) -> String {
        self.explanation.clone()
    }

    /// Starts tracing a connection.
    pub fn watch(&self, connection: u32) -> Result<CellTrace> {
        if !self.wanted {
            return Ok(CellTrace::default());
        }
        let wanted =
            CollectorOptions { connection: Some(connection), ..CollectorOptions::default() };
        Ok(CellTrace(Some((connection, Collector::start(&wanted)?))))
    }
}

impl CellTrace {
    /// Stops tracing, and returns the measurements.
    pub fn end(self) -> Result<KernelMeasurement> {
        let Some((connection, mut collector)) = self.0 else {
            return Ok(KernelMeasurement::default());
        };
        let snapshot = Some(collector.snapshot(connection)?);
        let remarks = collector.losses()?.describe().map(|lost| format!("kernel queues: {lost}"));
        Ok(KernelMeasurement { snapshot, remarks: remarks.into_iter().collect() })
    }
}
