//! Statistics of the clients of a server.

use std::sync::Weak;
use std::time::{Duration, Instant};

use defuse_connection::ClientHoldings;
use defuse_probe::{RequestStage, StatsSnapshot};
use defuse_session::{RequestSource, ServerLaneCounts, SessionStatistics};

use crate::peer::FusePeer;

/// Gauges that count from the start on. The other gauges are states, which end with a connection.
const TOTALS: [&str; 2] = ["workers_started", "workers_retired"];

/// The measurements of a server up to one moment.
#[derive(Clone, Debug, Default)]
pub struct ServerStatistics {
    /// All connections together, including ended ones, and the figures of the file system.
    pub all: StatsSnapshot,
    /// The clients that are served, by number.
    pub clients: Vec<ClientStatistics>,
}

/// The measurements of one client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientStatistics {
    /// The number of the connection, which no other connection of the server has.
    pub number: u64,
    /// The user whose rights it has.
    pub uid: u32,
    /// The process that connected, maybe for its child. 0 if it is in another PID namespace.
    pub pid: i32,
    /// The time since it connected.
    pub age: Duration,
    /// Lanes in shared memory, if the client got some. It may still use messages.
    pub lanes: Option<ServerLaneCounts>,
    /// Requests that were answered, of all operations.
    pub requests: u64,
    /// The number of requests that failed.
    pub errors: u64,
    /// Bytes of READ and WRITE.
    pub bytes: u64,
    /// Threads of the server that work on its requests.
    pub workers_busy: u64,
    /// Requests that wait for a part of the storage that has not answered earlier requests.
    pub requests_held_back: u64,
    /// The objects that the client holds.
    pub holdings: ClientHoldings,
}

/// A client that is served, with the server's data about it.
#[derive(Clone)]
pub(crate) struct ServedClient {
    pub(crate) statistics: SessionStatistics,
    /// The peer ends with the session, even if statistics are taken meanwhile.
    pub(crate) peer: Weak<FusePeer>,
    pub(crate) source: Weak<dyn RequestSource>,
}

/// The beginning of a connection.
#[derive(Clone, Copy)]
pub(crate) struct ConnectionStart {
    pub(crate) number: u64,
    pub(crate) pid: i32,
    pub(crate) at: Instant,
}

impl ServedClient {
    /// The statistics of the client, and the counts of its session.
    pub(crate) fn read_statistics(
        &self,
        begun: ConnectionStart,
    ) -> (Option<ClientStatistics>, StatsSnapshot) {
        let snapshot = self.statistics.snapshot();
        let client = self.peer.upgrade().map(|peer| {
            let mut client = ClientStatistics {
                number: begun.number,
                uid: peer.connection.credentials().uid,
                pid: begun.pid,
                age: begun.at.elapsed(),
                lanes: self.source.upgrade().and_then(|source| source.lanes()),
                holdings: peer.connection.holdings(),
                ..ClientStatistics::default()
            };
            client.count(&snapshot);
            client
        });
        (client, snapshot)
    }
}

impl ClientStatistics {
    fn count(&mut self, snapshot: &StatsSnapshot) {
        for stats in snapshot.ops.iter().filter(|stats| stats.stage == RequestStage::User) {
            self.requests += stats.latency.count;
            self.errors += stats.latency.errors;
            self.bytes += stats.bytes;
        }
        let gauge = |name| snapshot.gauges.get(name).copied().unwrap_or_default();
        let resting = gauge("workers_idle") + gauge("workers_parked");
        self.workers_busy = gauge("workers").saturating_sub(resting);
        self.requests_held_back = gauge("requests_held_back");
    }
}

/// The counts of a session that has ended.
pub(crate) fn final_counts(statistics: &SessionStatistics) -> StatsSnapshot {
    let mut snapshot = statistics.snapshot();
    snapshot.gauges.retain(|name, _| TOTALS.contains(&name.as_str()));
    snapshot
}
