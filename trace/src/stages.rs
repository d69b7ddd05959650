//! What a collector tells beside histograms: requests under way, and what could not be counted.

use defuse_probe::Op;
use serde::Serialize;

/// Where a request is that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InFlight {
    /// Sent, and not seen to be taken by the daemon.
    Pending,
    /// The daemon has it.
    Processing,
}

/// A request that has been sent and has not ended. Times are nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Flight {
    /// Its number within the connection.
    pub unique: u64,
    /// The connection.
    pub connection: u32,
    /// The operation.
    pub op: Op,
    /// The inode.
    pub nodeid: u64,
    /// Where it is.
    pub state: InFlight,
    /// Whether it went through the background queue.
    pub background: bool,
    /// When it was made, where that was seen.
    pub created_ns: Option<u64>,
    /// When it was sent.
    pub sent_ns: u64,
    /// The thread of the daemon that took it.
    pub taker: Option<u32>,
}

/// What a collector could not count as it should. All zero is the usual case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Losses {
    /// Requests that were not followed, because too many were under way.
    pub requests: u64,
    /// Latencies that had no room in the table of histograms.
    pub latencies: u64,
    /// Events that nobody fetched in time.
    pub events: u64,
    /// Background requests whose wait in the background queue was not seen.
    pub background_waits: u64,
}

impl Losses {
    /// Whether anything is missing.
    pub fn any(&self) -> bool {
        *self != Losses::default()
    }

    /// In words; `None` where nothing is missing.
    pub fn describe(&self) -> Option<String> {
        let parts = [
            (self.requests, "requests not followed (too many under way)"),
            (self.latencies, "latencies not counted (too many kinds)"),
            (self.events, "events lost (they came faster than they were read)"),
            (self.background_waits, "background requests whose wait was not seen"),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}
