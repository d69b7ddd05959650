//! The servers of `defuse top`: their answers, and their activity between two of them.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use defuse_probe::{LatencyHistogram, RequestStage};
use defuse_trace::DaemonProcess;
use serde::Serialize;

use super::model::{OpRow, op_rows};
use crate::control;
use crate::error::Result;
use crate::served::{ClientRow, ServerMeasurements};
use crate::servers::{self, ServerEntry};

/// The time for the answer of a server. One that is stopped holds up the sample for no longer.
const PATIENCE: Duration = Duration::from_millis(500);
/// Servers that are queried at once, each by a thread.
const ASKED_AT_ONCE: usize = 32;

/// One server.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ServerRow {
    /// The path of its socket.
    pub socket: String,
    /// The source.
    pub source: String,
    /// The process.
    pub pid: u32,
    /// Requests that were answered, per second.
    pub per_second: f64,
    /// Of all operations.
    pub p50_ns: u64,
    /// Of all operations.
    pub p99_ns: u64,
    /// Bytes of READ and WRITE, per second.
    pub bytes_per_second: f64,
    /// Threads that work on requests.
    pub busy: u64,
    /// Requests that wait for a lock, or for a part of the storage.
    pub waiting: u64,
    /// Threads of the process.
    pub threads: u32,
    /// Its use of processors: 100 is one of them.
    pub cpu_percent: f64,
    /// Its operations, the most frequent first.
    pub ops: Vec<OpRow>,
    /// Its clients, with what they did in this period.
    pub clients: Vec<ClientRow>,
    /// Further clients.
    pub clients_left_out: u64,
}

/// A process, which no later one with its number equals.
type ProcessId = (u32, u64);

/// One answer of a server.
#[derive(Debug)]
struct ServerSample {
    served: ServerMeasurements,
    cpu_ns: u64,
    at: Instant,
}

/// The last answers.
#[derive(Debug, Default)]
pub struct ServerSamples {
    before: BTreeMap<ProcessId, ServerSample>,
}

impl ServerSamples {
    /// Queries all servers that are visible to this user. Returns their activity since the last
    /// time, and notes about those that did not answer.
    pub fn look(&mut self) -> (Vec<ServerRow>, Vec<String>) {
        let (mut rows, mut notes, mut now) = (Vec::new(), Vec::new(), BTreeMap::new());
        for (server, served) in ask(servers::list_all()) {
            let served = match served {
                Ok(served) => served.with_programs(),
                // One that has ended meanwhile is no longer shown.
                Err(_) if !server.is_alive() => continue,
                Err(failure) => {
                    notes.push(failure.to_string());
                    continue;
                }
            };
            let process = DaemonProcess::read(server.pid);
            let cpu_ns = process.as_ref().map_or(0, |process| process.cpu_ns);
            let answer = ServerSample { served, cpu_ns, at: Instant::now() };
            let id = (server.pid, server.pid_start);
            let row = ServerRow::from_samples(&server, &answer, self.before.get(&id));
            rows.push(ServerRow { threads: process.map_or(0, |process| process.threads), ..row });
            now.insert(id, answer);
        }
        self.before = now;
        (rows, notes)
    }
}

/// The answers of servers, each to a thread of its own.
fn ask(all: Vec<ServerEntry>) -> Vec<(ServerEntry, Result<ServerMeasurements>)> {
    let mut answers = Vec::with_capacity(all.len());
    for some in all.chunks(ASKED_AT_ONCE) {
        thread::scope(|scope| {
            let ask = |server| scope.spawn(move || control::stat_server_within(server, PATIENCE));
            let requested: Vec<_> = some.iter().map(ask).collect();
            for (server, thread) in some.iter().zip(requested) {
                if let Ok(served) = thread.join() {
                    answers.push((server.clone(), served));
                }
            }
        });
    }
    answers
}

impl ServerRow {
    /// Requests without an answer.
    pub fn count_unanswered(&self) -> u64 {
        self.busy + self.waiting
    }

    /// The activity since `before`; none without it, since the time of what was counted is not
    /// known.
    fn from_samples(
        server: &ServerEntry,
        now: &ServerSample,
        before: Option<&ServerSample>,
    ) -> ServerRow {
        let before = before.unwrap_or(now);
        let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
        let ServerMeasurements { snapshot, clients, clients_left_out, .. } =
            now.served.changes_since(&before.served);
        let mut all = LatencyHistogram::default();
        let mut bytes = 0;
        for stats in snapshot.ops.iter().filter(|stats| stats.stage == RequestStage::User) {
            all.merge(&stats.latency);
            bytes += stats.bytes;
        }
        let waits = |client: &ClientRow| client.requests_held_back + client.lock_waits;
        ServerRow {
            socket: server.socket.clone(),
            source: server.source.clone(),
            pid: server.pid,
            per_second: all.count as f64 / seconds,
            p50_ns: all.percentile_ns(0.5),
            p99_ns: all.percentile_ns(0.99),
            bytes_per_second: bytes as f64 / seconds,
            busy: clients.iter().map(|client| client.workers_busy).sum(),
            waiting: clients.iter().map(waits).sum(),
            threads: 0,
            cpu_percent: now.cpu_ns.saturating_sub(before.cpu_ns) as f64 / 1e7 / seconds,
            ops: op_rows(&snapshot, RequestStage::User, seconds),
            clients,
            clients_left_out,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::path::PathBuf;

    use defuse_probe::{Op, Recorder};

    use super::*;
    use crate::served::tests::example;

    /// A server with two clients, and 10 READs in two seconds.
    pub fn example_row() -> ServerRow {
        let server = ServerEntry {
            socket: "/run/x".into(),
            source: "memory:".into(),
            pid: 9,
            pid_start: 1,
            since_unix: 0,
            version: "1".into(),
            devices: Vec::new(),
            file: PathBuf::new(),
        };
        let recorder = Recorder::new();
        let record = |count| {
            (0..count).for_each(|_| recorder.cells().record(Op::READ, 10_000, true));
            ServerMeasurements { snapshot: recorder.snapshot(), ..example() }
        };
        let begun = Instant::now();
        let before = ServerSample { served: record(3), cpu_ns: 5_000_000_000, at: begun };
        let mut now = ServerSample {
            served: record(10),
            cpu_ns: 5_500_000_000,
            at: begun + Duration::from_secs(2),
        };
        now.served.clients[0].requests += 4;
        now.served.clients[0].workers_busy = 2;
        assert_eq!(
            ServerRow::from_samples(&server, &now, None).per_second,
            0.0,
            "nothing is known of before"
        );
        ServerRow::from_samples(&server, &now, Some(&before))
    }

    #[test]
    fn a_server_has_rates_of_the_period_and_states_of_its_end() {
        let row = example_row();
        assert_eq!((row.per_second, row.p50_ns, row.cpu_percent), (5.0, 10_000, 25.0));
        assert_eq!((row.busy, row.waiting, row.count_unanswered()), (2, 1, 3));
        assert_eq!((row.ops.len(), row.ops[0].processing_ns), (1, None));
        assert_eq!((row.clients[0].requests, row.clients_left_out), (4, 2));
    }
}
