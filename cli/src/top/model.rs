//! The data of `defuse top`: every connection and every server, with its activity in the last
//! period.

use std::collections::BTreeMap;

use defuse_probe::{LatencyHistogram, Op, OpStats, RequestStage, StatsSnapshot};
use defuse_trace::{
    Collector, FuseConnection, FusectlMount, FusectlValues, InFlightState, RequestInFlight,
};
use serde::Serialize;

use super::servers::{ServerRow, ServerSamples};
use crate::error::{CommandFailure, Result};
use crate::{target, terminal};

/// The order of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SortOrder {
    /// Operations per second
    Ops,
    /// The 99th percentile of latencies
    P99,
    /// Waiting requests
    Waiting,
    /// Processor time of the daemon
    Cpu,
    /// Mount point
    Name,
}

impl SortOrder {
    /// The order that a key selects.
    pub fn from_key(key: char) -> Option<SortOrder> {
        match key {
            'o' => Some(SortOrder::Ops),
            'p' => Some(SortOrder::P99),
            'w' => Some(SortOrder::Waiting),
            'c' => Some(SortOrder::Cpu),
            'n' => Some(SortOrder::Name),
            _ => None,
        }
    }
}

/// One operation of a connection in the last period.
#[derive(Clone, Debug, Serialize)]
pub struct OpRow {
    /// The operation.
    pub op: Op,
    /// Requests that ended, per second.
    pub per_second: f64,
    /// Median latency in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latency in nanoseconds.
    pub p99_ns: u64,
    /// Mean time in the background queue in nanoseconds; `None` if no request was seen there.
    pub background_ns: Option<u64>,
    /// Mean time in the pending queue in nanoseconds; `None` if no request was seen there.
    pub pending_ns: Option<u64>,
    /// Mean time in the daemon in nanoseconds; `None` if no request was seen there.
    pub processing_ns: Option<u64>,
    /// Failed requests per second.
    pub errors_per_second: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
}

/// One connection.
#[derive(Clone, Debug, Serialize)]
pub struct ConnectionRow {
    /// The number of the connection.
    pub connection: u32,
    /// The mount point.
    pub mount: String,
    /// The type.
    pub fstype: String,
    /// The source.
    pub source: String,
    /// Requests that ended, per second.
    pub per_second: f64,
    /// Of all operations.
    pub p50_ns: u64,
    /// Of all operations.
    pub p99_ns: u64,
    /// Requests in the background queue, or waiting for room in it.
    pub in_background: u64,
    /// Requests in the pending queue.
    pub in_pending: u64,
    /// Requests that the daemon works on.
    pub in_processing: u64,
    /// Values of fusectl; `None` for a connection of another user.
    pub knobs: Option<FusectlValues>,
    /// The number of background requests has reached the congestion threshold.
    pub congested: bool,
    /// The processes of the daemon.
    pub pids: Vec<u32>,
    /// Their name.
    pub daemon: String,
    /// Their threads.
    pub threads: u32,
    /// Their use of processors: 100 is one of them.
    pub cpu_percent: f64,
    /// Its operations, the most frequent first.
    pub ops: Vec<OpRow>,
}

/// All connections and servers, now.
pub struct TopModel {
    /// `None` if the kernel cannot be traced; then there are only servers.
    collector: Option<Collector>,
    /// The reason.
    untraced: Option<String>,
    requested: ServerSamples,
    knobs: Option<FusectlMount>,
    before: BTreeMap<u32, StatsSnapshot>,
    cpu_before: BTreeMap<u32, u64>,
    last: std::time::Instant,
    sort: SortOrder,
    /// The connections, sorted.
    pub rows: Vec<ConnectionRow>,
    /// The servers, sorted.
    pub servers: Vec<ServerRow>,
    /// Notes about data that is unavailable or was lost.
    pub notes: Vec<String>,
}

impl TopModel {
    /// A model of the samples that `collector` takes from now on. Without one, there must be a
    /// server that answers.
    pub fn start(collector: Result<Collector>, sort: SortOrder) -> Result<TopModel> {
        let (collector, failure) = match collector {
            Ok(collector) => (Some(collector), None),
            Err(failure) => (None, Some(failure)),
        };
        let untraced = |failure| format!("FUSE connections are not shown: {failure}");
        let mut model = TopModel {
            collector,
            untraced: failure.as_ref().map(untraced),
            requested: ServerSamples::default(),
            knobs: FusectlMount::open().ok(),
            before: BTreeMap::new(),
            cpu_before: BTreeMap::new(),
            last: std::time::Instant::now(),
            sort,
            rows: Vec::new(),
            servers: Vec::new(),
            notes: Vec::new(),
        };
        model.look()?;
        match failure {
            Some(failure) if model.servers.is_empty() => Err(failure),
            _ => Ok(model),
        }
    }

    /// Takes a sample. The period is the time since the last one.
    pub fn look(&mut self) -> Result {
        self.notes = self.untraced.iter().cloned().collect();
        self.look_at_connections()?;
        let (servers, notes) = self.requested.look();
        self.servers = servers;
        self.notes.extend(notes.iter().map(|note| terminal::escape_controls(note).into_owned()));
        self.sort_by(self.sort);
        Ok(())
    }

    fn look_at_connections(&mut self) -> Result {
        let Some(collector) = &mut self.collector else { return Ok(()) };
        collector.refresh().map_err(CommandFailure::from_error)?;
        let now = collector.snapshots().map_err(CommandFailure::from_error)?;
        let flights = collector.flights().map_err(CommandFailure::from_error)?;
        let losses = collector.losses().map_err(CommandFailure::from_error)?;
        let seconds = self.last.elapsed().as_secs_f64().max(1e-3);
        self.last = std::time::Instant::now();
        let connections = FuseConnection::list(&target::mounts());
        let mut rows = Vec::new();
        let mut cpu = BTreeMap::new();
        for connection in &connections {
            let id = connection.id;
            let new = match (now.get(&id), self.before.get(&id)) {
                (Some(now), Some(before)) => now.delta_since(before),
                (Some(now), None) => now.clone(),
                _ => StatsSnapshot::default(),
            };
            let knobs = self.knobs.as_ref().and_then(|knobs| knobs.values(id).ok());
            let used: u64 = connection.processes.iter().map(|process| process.cpu_ns).sum();
            let used_before = self.cpu_before.get(&id).copied().unwrap_or(used);
            cpu.insert(id, used);
            let cpu_percent = used.saturating_sub(used_before) as f64 / 1e7 / seconds;
            rows.push(ConnectionRow::from_samples(
                connection,
                &new,
                &flights,
                PeriodValues { knobs, cpu_percent, seconds },
            ));
        }
        (self.before, self.cpu_before, self.rows) = (now, cpu, rows);
        self.notes.extend_from_slice(collector.notes());
        self.notes.extend(losses.describe());
        Ok(())
    }

    /// Sorts now, and after each sample.
    pub fn sort_by(&mut self, sort: SortOrder) {
        self.sort = sort;
        sort_rows(&mut self.rows, sort);
        sort_rows(&mut self.servers, sort);
    }
}

fn sort_rows<R: SortableRow>(rows: &mut [R], sort: SortOrder) {
    rows.sort_by(|a, b| {
        let ((a, a_name), (b, b_name)) = (a.sort_key(sort), b.sort_key(sort));
        b.total_cmp(&a).then_with(|| a_name.cmp(b_name))
    });
}

/// A row that can be sorted.
trait SortableRow {
    /// Its value in a column, of which the highest comes first, and its name.
    fn sort_key(&self, sort: SortOrder) -> (f64, &str);
}

impl SortableRow for ConnectionRow {
    fn sort_key(&self, sort: SortOrder) -> (f64, &str) {
        let value = match sort {
            SortOrder::Ops => self.per_second,
            SortOrder::P99 => self.p99_ns as f64,
            SortOrder::Waiting => self.count_waiting() as f64,
            SortOrder::Cpu => self.cpu_percent,
            SortOrder::Name => 0.0,
        };
        (value, &self.mount)
    }
}

impl SortableRow for ServerRow {
    fn sort_key(&self, sort: SortOrder) -> (f64, &str) {
        let value = match sort {
            SortOrder::Ops => self.per_second,
            SortOrder::P99 => self.p99_ns as f64,
            SortOrder::Waiting => self.count_unanswered() as f64,
            SortOrder::Cpu => self.cpu_percent,
            SortOrder::Name => 0.0,
        };
        (value, &self.socket)
    }
}

/// Values of a row that are not counts.
struct PeriodValues {
    knobs: Option<FusectlValues>,
    cpu_percent: f64,
    seconds: f64,
}

impl ConnectionRow {
    /// Requests without an answer, in all stages.
    pub fn count_waiting(&self) -> u64 {
        let seen = self.in_background + self.in_pending + self.in_processing;
        self.knobs.map_or(seen, |knobs| knobs.waiting)
    }

    fn from_samples(
        connection: &FuseConnection,
        new: &StatsSnapshot,
        flights: &[RequestInFlight],
        period: PeriodValues,
    ) -> ConnectionRow {
        let PeriodValues { knobs, cpu_percent, seconds } = period;
        let mount = connection.mounts.first();
        let own: Vec<&RequestInFlight> =
            flights.iter().filter(|flight| flight.connection == connection.id).collect();
        let in_state = |state| own.iter().filter(|flight| flight.state == state).count() as u64;
        let (in_pending, in_processing) =
            (in_state(InFlightState::Pending), in_state(InFlightState::Processing));
        let waiting = knobs.map_or(0, |knobs| knobs.waiting);
        let in_background = waiting.saturating_sub(in_pending + in_processing);
        let sent_background = own.iter().filter(|flight| flight.background).count() as u64;
        let congested = knobs
            .is_some_and(|knobs| in_background + sent_background >= knobs.congestion_threshold);
        let mut all = LatencyHistogram::default();
        let totals = new.ops.iter().filter(|stats| stats.stage == RequestStage::Total);
        totals.for_each(|stats| all.merge(&stats.latency));
        ConnectionRow {
            connection: connection.id,
            mount: connection.name(),
            fstype: mount.map(|mount| mount.fstype.clone()).unwrap_or_default(),
            source: mount.map(|mount| mount.source.clone()).unwrap_or_default(),
            per_second: all.count as f64 / seconds,
            p50_ns: all.percentile_ns(0.5),
            p99_ns: all.percentile_ns(0.99),
            in_background,
            in_pending,
            in_processing,
            knobs,
            congested,
            pids: connection.processes.iter().map(|process| process.pid).collect(),
            daemon: connection.processes.first().map(|p| p.comm.clone()).unwrap_or_default(),
            threads: connection.processes.iter().map(|process| process.threads).sum(),
            cpu_percent,
            ops: op_rows(new, RequestStage::Total, seconds),
        }
    }
}

/// The operations as seen in `stage`, with the times in the stages of the kernel.
pub fn op_rows(new: &StatsSnapshot, stage: RequestStage, seconds: f64) -> Vec<OpRow> {
    let mean = |stage, op| new.get_stage(stage, op).map(|stats| stats.latency.mean_ns());
    let row = |total: &OpStats| OpRow {
        op: total.op,
        per_second: total.latency.count as f64 / seconds,
        p50_ns: total.latency.percentile_ns(0.5),
        p99_ns: total.latency.percentile_ns(0.99),
        background_ns: mean(RequestStage::Background, total.op),
        pending_ns: mean(RequestStage::Pending, total.op),
        processing_ns: mean(RequestStage::Processing, total.op),
        errors_per_second: total.latency.errors as f64 / seconds,
        bytes_per_second: total.bytes as f64 / seconds,
    };
    let totals = new.ops.iter().filter(|stats| stats.stage == stage);
    let mut rows: Vec<OpRow> = totals.map(row).collect();
    rows.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
    rows
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use defuse_probe::Recorder;
    use defuse_trace::{DaemonProcess, FuseMount};

    /// A connection with some READs, one request under way and a full background queue.
    pub fn example(id: u32, mount: &str, reads: u64) -> ConnectionRow {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        for _ in 0..reads {
            cells.record_stage(RequestStage::Pending, Op::READ, 2_000, true);
            cells.record_stage(RequestStage::Processing, Op::READ, 8_000, true);
            cells.record_stage(RequestStage::Total, Op::READ, 10_000, true);
        }
        let mount_point = mount.into();
        let (fstype, source) = ("fuse.sshfs".to_owned(), "host:".to_owned());
        let mounts = vec![FuseMount { connection: id, mount_point, fstype, source }];
        let process = DaemonProcess { pid: 7, comm: "sshfs".into(), threads: 4, cpu_ns: 0 };
        let connection = FuseConnection { id, mounts, processes: vec![process] };
        let flight = RequestInFlight {
            unique: 2,
            connection: id,
            op: Op::READ,
            nodeid: 1,
            state: InFlightState::Processing,
            background: true,
            created_ns: None,
            sent_ns: 1,
            taker: Some(7),
        };
        let knobs = FusectlValues { waiting: 9, max_background: 12, congestion_threshold: 9 };
        let period = PeriodValues { knobs: Some(knobs), cpu_percent: 12.5, seconds: 2.0 };
        ConnectionRow::from_samples(&connection, &recorder.snapshot(), &[flight], period)
    }

    #[test]
    fn a_row_has_rates_queues_and_congestion() {
        let row = example(43, "/m", 10);
        assert_eq!((row.per_second, row.p50_ns, row.ops.len()), (5.0, 10_000, 1));
        assert_eq!((row.in_background, row.in_pending, row.in_processing), (8, 0, 1));
        assert!(row.congested);
        assert_eq!((row.ops[0].pending_ns, row.ops[0].background_ns), (Some(2_000), None));
    }

    #[test]
    fn rows_are_sorted_by_the_chosen_column() {
        let mut rows = vec![example(1, "/b", 1), example(2, "/c", 9), example(3, "/a", 1)];
        let order =
            |rows: &[ConnectionRow]| rows.iter().map(|row| row.connection).collect::<Vec<_>>();
        sort_rows(&mut rows, SortOrder::Ops);
        assert_eq!(order(&rows), [2, 3, 1]);
        sort_rows(&mut rows, SortOrder::Name);
        assert_eq!(order(&rows), [3, 1, 2]);
        let server =
            |socket: &str, busy| ServerRow { socket: socket.into(), busy, ..ServerRow::default() };
        let mut servers = vec![server("/a", 0), server("/c", 2), server("/b", 2)];
        sort_rows(&mut servers, SortOrder::Waiting);
        assert_eq!(
            servers.iter().map(|one| &one.socket[..]).collect::<Vec<_>>(),
            ["/b", "/c", "/a"]
        );
    }
}
