//! Results of a collector beside histograms: requests in progress, and lost measurements.

use defuse_probe::Op;
use serde::Serialize;

/// The state of a request in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InFlightState {
    /// Sent, and not seen to be read by the daemon.
    Pending,
    /// Read by the daemon.
    Processing,
}

/// A request that was sent and has not ended. Times are nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RequestInFlight {
    /// Number of the request within the connection.
    pub unique: u64,
    /// The connection.
    pub connection: u32,
    /// The operation.
    pub op: Op,
    /// The inode.
    pub nodeid: u64,
    /// The state of the request.
    pub state: InFlightState,
    /// The request went through the background queue.
    pub background: bool,
    /// Time of creation, if observed.
    pub created_ns: Option<u64>,
    /// Time of sending.
    pub sent_ns: u64,
    /// The thread of the daemon that read it.
    pub taker: Option<u32>,
}

/// Measurements that a collector lost. Usually all are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LostMeasurements {
    /// Requests that were not followed, because too many were in progress.
    pub requests: u64,
    /// Latencies that had no room in the table of histograms.
    pub latencies: u64,
    /// Events that were not fetched in time.
    pub events: u64,
    /// Background requests whose wait in the background queue was not observed.
    pub background_waits: u64,
}

impl LostMeasurements {
    /// True if anything was lost.
    pub fn has_any(&self) -> bool {
        *self != LostMeasurements::default()
    }

    /// A description of the losses; `None` if there are none.
    pub fn describe(&self) -> Option<String> {
        let parts = [
            (self.requests, "requests not followed (too many in progress)"),
            (self.latencies, "latencies not counted (too many kinds)"),
            (self.events, "events lost (the reader was too slow)"),
            (self.background_waits, "background requests whose wait was not observed"),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}
