//! One interface to all measurements in the kernel, by BPF or tracefs.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use defuse_probe::{OpStats, StatsSnapshot};

use crate::{
    CompletedRequest, EventFilter, LostMeasurements, RequestInFlight, TraceError, bpf, tracefs,
};

/// Options of a collector.
#[derive(Clone, Debug, Default)]
pub struct CollectorOptions {
    /// Trace only this connection.
    pub connection: Option<u32>,
    /// Report every matching request, in addition to counts.
    pub events: Option<EventFilter>,
    /// The mechanism; `None` for the best that is permitted.
    pub kind: Option<CollectorKind>,
}

/// The mechanism of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CollectorKind {
    /// A BPF program: every stage.
    Bpf,
    /// Events of tracefs: the total from sending to the end, without stages.
    Tracefs,
}

/// Traces the requests of all FUSE connections, or of one, until it is dropped.
#[derive(Debug)]
pub struct Collector {
    probe: KernelProbe,
    notes: Vec<String>,
    started: Instant,
    started_unix_ms: u64,
}

#[derive(Debug)]
enum KernelProbe {
    Bpf(Box<bpf::BpfProbe>),
    Tracefs(Box<tracefs::TracefsProbe>),
}

impl Collector {
    /// Starts tracing. If BPF is not permitted, it uses tracefs, and [`notes`](Collector::notes)
    /// contains the reason.
    ///
    /// Fails with the errors of the last mechanism tried. Each mechanism requires root.
    pub fn start(wanted: &CollectorOptions) -> Result<Collector, TraceError> {
        let mut notes = Vec::new();
        let probe = match wanted.kind {
            Some(CollectorKind::Tracefs) => {
                KernelProbe::Tracefs(tracefs::TracefsProbe::open(wanted)?.into())
            }
            Some(CollectorKind::Bpf) => {
                KernelProbe::Bpf(bpf::BpfProbe::open(wanted, &mut notes)?.into())
            }
            None => match bpf::BpfProbe::open(wanted, &mut notes) {
                Ok(probe) => KernelProbe::Bpf(probe.into()),
                Err(error) => {
                    let probe = tracefs::TracefsProbe::open(wanted)
                        .map_err(|second| combine(&error, second))?;
                    notes.push(format!(
                        "{error}; tracing by tracefs, which reports only the time from sending to the end"
                    ));
                    KernelProbe::Tracefs(probe.into())
                }
            },
        };
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started_unix_ms = unix.as_millis() as u64;
        Ok(Collector { probe, notes, started: Instant::now(), started_unix_ms })
    }

    /// The mechanism in use.
    pub fn kind(&self) -> CollectorKind {
        match self.probe {
            KernelProbe::Bpf(_) => CollectorKind::Bpf,
            KernelProbe::Tracefs(_) => CollectorKind::Tracefs,
        }
    }

    /// The limitations of this collector, as sentences for readers of the figures.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Updates the table of daemons. Call it from time to time if mounts may begin and end. Errors:
    /// [`TraceError::Map`].
    pub fn refresh(&mut self) -> Result<(), TraceError> {
        match &mut self.probe {
            KernelProbe::Bpf(probe) => probe.refresh(),
            KernelProbe::Tracefs(_) => Ok(()),
        }
    }

    /// The counts so far, by connection. Errors: [`TraceError::Map`], [`TraceError::File`].
    pub fn snapshots(&mut self) -> Result<BTreeMap<u32, StatsSnapshot>, TraceError> {
        let counted = match &mut self.probe {
            KernelProbe::Bpf(probe) => probe.read_counts()?,
            KernelProbe::Tracefs(probe) => probe.read_counts()?,
        };
        let mut snapshots: BTreeMap<u32, StatsSnapshot> = BTreeMap::new();
        for (connection, stats) in counted {
            snapshots.entry(connection).or_insert_with(|| self.empty()).ops.push(stats);
        }
        for snapshot in snapshots.values_mut() {
            snapshot.ops.sort_by_key(|stats| (stats.stage, stats.op));
        }
        Ok(snapshots)
    }

    /// The counts of one connection. Errors: like [`snapshots`](Collector::snapshots).
    pub fn snapshot(&mut self, connection: u32) -> Result<StatsSnapshot, TraceError> {
        let found = self.snapshots()?.remove(&connection);
        Ok(found.unwrap_or_else(|| self.empty()))
    }

    /// The requests in progress, the oldest first. Errors: [`TraceError::Map`].
    pub fn flights(&mut self) -> Result<Vec<RequestInFlight>, TraceError> {
        let mut flights = match &mut self.probe {
            KernelProbe::Bpf(probe) => probe.flights()?,
            KernelProbe::Tracefs(probe) => probe.flights()?,
        };
        flights.sort_by_key(|flight| flight.sent_ns);
        Ok(flights)
    }

    /// The measurements that were lost. Errors: [`TraceError::Map`].
    pub fn losses(&mut self) -> Result<LostMeasurements, TraceError> {
        match &mut self.probe {
            KernelProbe::Bpf(probe) => probe.losses(),
            KernelProbe::Tracefs(probe) => Ok(probe.losses()),
        }
    }

    /// Passes every request that has ended since the last call to `each`, in order of their ends as
    /// far as the kernel keeps it. Never waits. Without [`CollectorOptions::events`] there are
    /// none. Errors: [`TraceError::Map`], [`TraceError::File`].
    pub fn events(&mut self, each: &mut dyn FnMut(CompletedRequest)) -> Result<(), TraceError> {
        match &mut self.probe {
            KernelProbe::Bpf(probe) => {
                probe.events(each);
                Ok(())
            }
            KernelProbe::Tracefs(probe) => probe.events(each),
        }
    }

    fn empty(&self) -> StatsSnapshot {
        StatsSnapshot {
            started_unix_ms: self.started_unix_ms,
            span_ns: self.started.elapsed().as_nanos() as u64,
            ..StatsSnapshot::default()
        }
    }
}

/// Latencies, by connection.
pub(crate) type ConnectionStats = Vec<(u32, OpStats)>;

/// Combines two errors, so that a user who may use neither mechanism sees both.
fn combine(first: &TraceError, second: TraceError) -> TraceError {
    match second {
        TraceError::NotPermitted { what, cause } => TraceError::NotPermitted { what, cause },
        TraceError::File { path, cause }
            if cause.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            TraceError::NotPermitted {
                what: "tracing the kernel",
                cause: format!("{first}; {}: {cause}", path.display()),
            }
        }
        second => TraceError::Unsupported {
            what: "tracing the kernel",
            cause: format!("{first}; and without BPF: {second}"),
        },
    }
}
