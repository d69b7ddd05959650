//! The statistics of a server: all requests, each client, and each device of a manager.

use std::fmt;
use std::sync::Weak;

use defuse_fs::namespace::Namespace;
use defuse_probe::{BytesText, FigureStats, StatsSnapshot};
use defuse_shared::PagedFileSystem;
use defuse_socket::{ClientStatistics, ServerStatistics};
use serde::{Deserialize, Serialize};

use crate::manager::bind::{DeviceBinder, DeviceHolder};
use crate::servers::TreeDevice;
use crate::{registry, terminal};

/// The most clients in an answer. The others are counted.
const MOST_CLIENTS: usize = 1000;

/// The measurements of a server up to one moment, or between two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerMeasurements {
    /// All clients together, including ended ones.
    #[serde(flatten)]
    pub snapshot: StatsSnapshot,
    /// The clients, by number.
    pub clients: Vec<ClientRow>,
    /// The number of further clients, with no more requests than those.
    pub clients_left_out: u64,
    /// The devices of a manager.
    pub devices: Vec<DeviceFigures>,
}

/// A client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRow {
    /// The number of the connection.
    pub client: u64,
    /// The user whose rights it has.
    pub uid: u32,
    /// The process that connected; `None` in another PID namespace.
    pub pid: Option<u32>,
    /// The name of the program, which only the querying side sees. Processes name themselves.
    #[serde(default)]
    pub program: Option<String>,
    /// The time since it connected, in milliseconds.
    pub age_ms: u64,
    /// Lanes in shared memory by which requests came. A client without any sends messages.
    pub lanes: u64,
    /// Requests that came by lanes.
    pub lane_requests: u64,
    /// Requests by lanes that are not answered.
    pub lane_requests_unanswered: u64,
    /// Messages by which the client woke the server, as reported by the client.
    #[serde(default)]
    pub lane_bells: u64,
    /// Sleeps of its threads that waited for a reply, as reported by the client.
    #[serde(default)]
    pub lane_sleeps: u64,
    /// Its reads from cached pages, without a request, as reported by the client.
    #[serde(default)]
    pub page_reads: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Bytes of READ and WRITE.
    pub bytes: u64,
    /// Threads that work on its requests.
    pub workers_busy: u64,
    /// Requests that wait for a part of the storage.
    pub requests_held_back: u64,
    /// Lookups of inodes that it has not given back.
    pub inodes: u64,
    /// Open files and directories.
    pub open_files: u64,
    /// Locked ranges.
    pub locks: u64,
    /// Locks that it waits for.
    pub lock_waits: u64,
    /// Memory for mapped files.
    pub mapped_bytes: u64,
    /// Locks that it lost while it was stopped.
    pub locks_lost: u64,
}

/// The figures of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFigures {
    /// The path in the served tree, and the source.
    #[serde(flatten)]
    pub device: TreeDevice,
    /// The holder of the device, if applications may bind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<DeviceHolder>,
    /// The figures of its file system, and then the figures of its cached pages.
    pub figures: Vec<FigureStats>,
    /// Notes of the file system, see [`StatsSnapshot::notes`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The parts of a server that are looked at. It keeps none of them alive.
#[derive(Clone)]
pub struct ServerParts {
    pub server: Weak<defuse_socket::SocketServer>,
    pub devices: Vec<TreeDevice>,
    /// The file systems of `devices`.
    pub tree: Weak<Namespace>,
    pub binder: Weak<DeviceBinder>,
    pub paged: Weak<PagedFileSystem>,
}

impl ServerParts {
    /// The statistics; `None` after the end of the server.
    pub fn query(&self) -> Option<ServerMeasurements> {
        let ServerStatistics { all, clients } = self.server.upgrade()?.statistics();
        let (clients, clients_left_out) = most_active(clients);
        let clients = clients.iter().map(ClientRow::from).collect();
        Some(ServerMeasurements {
            snapshot: all,
            clients,
            clients_left_out,
            devices: self.devices(),
        })
    }

    fn devices(&self) -> Vec<DeviceFigures> {
        let Some(tree) = self.tree.upgrade() else { return Vec::new() };
        let (paged, binder) = (self.paged.upgrade(), self.binder.upgrade());
        let holder = |path: &str| Some(binder.as_ref()?.device(path)?.holder());
        let each = self.devices.iter().zip(tree.members()).enumerate();
        let figures = each.map(|(number, (device, member))| {
            let own = StatsSnapshot::default().with_figures(&*member.fs);
            let (mut figures, notes) = (own.figures, own.notes);
            let pages = paged.as_ref().map(|paged| paged.figures_of(number));
            figures.extend(pages.into_iter().flatten().map(FigureStats::from));
            DeviceFigures { device: device.clone(), holder: holder(&device.path), figures, notes }
        });
        figures.collect()
    }
}

/// The clients with the most requests, by number, and how many others there are.
fn most_active(mut clients: Vec<ClientStatistics>) -> (Vec<ClientStatistics>, u64) {
    let left_out = clients.len().saturating_sub(MOST_CLIENTS);
    if left_out > 0 {
        clients.sort_unstable_by_key(|client| std::cmp::Reverse(client.requests));
        clients.truncate(MOST_CLIENTS);
        clients.sort_unstable_by_key(|client| client.number);
    }
    (clients, left_out as u64)
}

impl From<&ClientStatistics> for ClientRow {
    fn from(client: &ClientStatistics) -> Self {
        let (held, lanes) = (client.holdings, client.lanes.unwrap_or_default());
        ClientRow {
            client: client.number,
            uid: client.uid,
            pid: u32::try_from(client.pid).ok().filter(|pid| *pid > 0),
            program: None,
            age_ms: client.age.as_millis() as u64,
            lanes: lanes.used.into(),
            lane_requests: lanes.requests,
            lane_requests_unanswered: lanes.unanswered,
            lane_bells: lanes.bells,
            lane_sleeps: lanes.sleeps,
            page_reads: lanes.page_reads,
            requests: client.requests,
            errors: client.errors,
            bytes: client.bytes,
            workers_busy: client.workers_busy,
            requests_held_back: client.requests_held_back,
            inodes: held.inodes,
            open_files: held.open_files,
            locks: held.locks,
            lock_waits: held.lock_waits,
            mapped_bytes: held.mapped_bytes,
            locks_lost: held.locks_lost,
        }
    }
}

impl ServerMeasurements {
    /// The measurements since `earlier`, an answer of the same server. States are the present ones.
    pub fn changes_since(&self, earlier: &ServerMeasurements) -> ServerMeasurements {
        let clients = self.clients.iter().map(|now| {
            let before = earlier.clients.iter().find(|before| before.client == now.client);
            before.map_or_else(|| now.clone(), |before| now.changes_since(before))
        });
        let devices = self.devices.iter().map(|now| {
            let same = |before: &&DeviceFigures| before.device == now.device;
            let before = earlier.devices.iter().find(same);
            let before = before.map_or(&[][..], |before| &before.figures);
            let figures = FigureStats::delta_since(&now.figures, before);
            DeviceFigures { figures, ..now.clone() }
        });
        ServerMeasurements {
            snapshot: self.snapshot.delta_since(&earlier.snapshot),
            clients: clients.collect(),
            clients_left_out: self.clients_left_out,
            devices: devices.collect(),
        }
    }

    /// Adds the names of the clients' programs, as far as this process sees them.
    #[must_use]
    pub fn with_programs(mut self) -> ServerMeasurements {
        for client in &mut self.clients {
            client.program = client.pid.and_then(|pid| program(pid, client.age_ms));
        }
        self
    }
}

impl ClientRow {
    fn changes_since(&self, before: &ClientRow) -> ClientRow {
        ClientRow {
            lane_requests: self.lane_requests.saturating_sub(before.lane_requests),
            lane_bells: self.lane_bells.saturating_sub(before.lane_bells),
            lane_sleeps: self.lane_sleeps.saturating_sub(before.lane_sleeps),
            page_reads: self.page_reads.saturating_sub(before.page_reads),
            requests: self.requests.saturating_sub(before.requests),
            errors: self.errors.saturating_sub(before.errors),
            bytes: self.bytes.saturating_sub(before.bytes),
            locks_lost: self.locks_lost.saturating_sub(before.locks_lost),
            ..self.clone()
        }
    }

    /// The fields of its row, in the order of [`COLUMNS`].
    pub fn fields(&self) -> [String; COLUMNS.len()] {
        let pid = self.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let program = self.program.as_deref().map_or("-".into(), terminal::escape_controls);
        let waiting = self.requests_held_back + self.lock_waits;
        [
            self.client.to_string(),
            self.uid.to_string(),
            pid,
            program.into_owned(),
            registry::describe_age(self.age_ms / 1000),
            self.workers_busy.to_string(),
            waiting.to_string(),
            self.requests.to_string(),
            self.lane_requests.to_string(),
            self.page_reads.to_string(),
            self.errors.to_string(),
            BytesText(self.bytes).to_string(),
            self.inodes.to_string(),
            self.open_files.to_string(),
            self.locks.to_string(),
            BytesText(self.mapped_bytes).to_string(),
            self.locks_lost.to_string(),
        ]
    }
}

/// The columns of the table of clients.
pub const COLUMNS: [&str; 17] = [
    "client", "user", "pid", "program", "age", "busy", "waiting", "requests", "by lanes",
    "by pages", "errors", "bytes", "inodes", "files", "locks", "mapped", "lost",
];

impl fmt::Display for ServerMeasurements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.snapshot)?;
        if !self.clients.is_empty() {
            writeln!(f)?;
        }
        write!(f, "{}", clients(&self.clients, self.clients_left_out))?;
        for DeviceFigures { device, holder, figures, notes } in &self.devices {
            let (path, source) = (
                terminal::escape_controls(&device.path),
                terminal::escape_controls(&device.source),
            );
            writeln!(f, "\n{path}  {source}")?;
            if let Some(holder) = holder {
                writeln!(f, "{}", terminal::escape_controls(&holder.to_string()))?;
            }
            figures.iter().try_for_each(|figure| writeln!(f, "{figure}"))?;
            notes
                .iter()
                .try_for_each(|note| writeln!(f, "note: {}", terminal::escape_controls(note)))?;
        }
        Ok(())
    }
}

/// The table of clients, and the number of others; nothing if there are none.
pub fn clients(clients: &[ClientRow], left_out: u64) -> String {
    let mut text = String::new();
    if !clients.is_empty() {
        let head = COLUMNS.map(str::to_owned);
        let rows: Vec<_> =
            std::iter::once(head).chain(clients.iter().map(ClientRow::fields)).collect();
        let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max();
        let widths: Vec<usize> = (0..COLUMNS.len()).filter_map(width).collect();
        for row in &rows {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
            text += &(cells.collect::<Vec<_>>().join("  ") + "\n");
        }
    }
    if left_out > 0 {
        text += &format!("and {left_out} further clients\n");
    }
    text
}

/// The name of the program of a process that has run for this time at least: another one with its
/// number is younger.
fn program(pid: u32, age_ms: u64) -> Option<String> {
    let name = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
    let age = registry::process_age(pid)?;
    let is_it = age.as_millis() >= u128::from(age_ms);
    is_it.then(|| String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned())
}

#[cfg(test)]
pub mod tests {
    use defuse_fs::Figure;
    use defuse_probe::{Op, Recorder};

    use super::*;

    /// A manager with a client and two devices.
    pub fn example() -> ServerMeasurements {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        (0..5).for_each(|_| cells.record(Op::READ, 2_000, true));
        let mut snapshot = recorder.snapshot();
        snapshot.span_ns = 9_000_000_000;
        snapshot.figures = vec![Figure::bytes("pages_limit", 1 << 20).into()];
        let device = |path: &str, groups| DeviceFigures {
            device: TreeDevice { path: path.into(), source: format!("uhs:/srv{path}") },
            holder: None,
            figures: vec![
                Figure::count("groups", groups).since_start().into(),
                Figure::bytes("pages_used", 65536).into(),
            ],
            notes: Vec::from_iter((groups == 3).then(|| "nobody tells:\n\"why\"".to_owned())),
        };
        let client = ClientRow {
            client: 7,
            uid: 1000,
            pid: Some(4711),
            program: Some("bad\u{1b}[2J\n".into()),
            age_ms: 65_000,
            lanes: 2,
            lane_requests: 4,
            lane_bells: 2,
            lane_sleeps: 3,
            page_reads: 900,
            requests: 5,
            errors: 1,
            bytes: 4096,
            open_files: 3,
            lock_waits: 1,
            ..ClientRow::default()
        };
        let plain = ClientRow { client: 8, uid: 0, requests: 2, ..ClientRow::default() };
        ServerMeasurements {
            snapshot,
            clients: vec![client, plain],
            clients_left_out: 2,
            devices: vec![device("/fast", 12), device("/a \"b\"", 3)],
        }
    }

    #[test]
    fn an_answer_survives_a_round_trip_through_json() {
        let served = example();
        let json = serde_json::to_string(&served).unwrap();
        assert_eq!(serde_json::from_str::<ServerMeasurements>(&json).unwrap(), served);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["clients"][0]["open_files"], 3);
        assert_eq!(value["devices"][0]["path"], "/fast");
        assert_eq!(value["devices"][1]["figures"][0]["name"], "groups");
        // An answer of a mount has the same fields of requests.
        assert_eq!(value["ops"][0]["op"], "READ");
    }

    #[test]
    fn the_text_has_a_table_of_clients_and_a_section_for_each_device() {
        let text = example().to_string();
        let end = text.find("\npages_limit").unwrap();
        let expected = "
pages_limit                         1.0 MiB

client  user   pid         program    age  busy  waiting  requests  by lanes  by pages  errors    bytes  inodes  files  locks  mapped  lost
     7  1000  4711  bad\\u001b[2J\\n  1 min     0        1         5         4       900       1  4.0 KiB       0      3      0       -     0
     8     0     -               -    0 s     0        0         2         0         0       0        -       0      0      0       -     0
and 2 further clients

/fast  uhs:/srv/fast
groups                                   12
pages_used                         64.0 KiB

/a \"b\"  uhs:/srv/a \"b\"
groups                                    3
pages_used                         64.0 KiB
note: nobody tells:\\n\"why\"
";
        assert_eq!(&text[end..], expected);
        let alone = ServerMeasurements { clients: Vec::new(), clients_left_out: 0, ..example() };
        assert!(!alone.to_string().contains("client"));
    }

    #[test]
    fn a_period_has_what_was_added_and_the_states_of_its_end() {
        let (before, mut now) = (example(), example());
        now.clients[0].requests = 9;
        now.clients[0].open_files = 1;
        now.clients[1].client = 9;
        now.devices[0].figures[0].value = 20;
        let period = now.changes_since(&before);
        let first = &period.clients[0];
        assert_eq!((first.requests, first.errors, first.open_files, first.lanes), (4, 0, 1, 2));
        assert_eq!((period.clients[1].client, period.clients[1].requests), (9, 2));
        let figures = |device: usize| period.devices[device].figures.iter().map(|one| one.value);
        assert_eq!(figures(0).collect::<Vec<_>>(), [8, 65536]);
        assert_eq!(figures(1).collect::<Vec<_>>(), [0, 65536]);
        assert!(period.snapshot.ops.is_empty());
    }

    #[test]
    fn an_answer_has_a_bounded_number_of_clients_and_says_how_many_it_lacks() {
        let of = |number| ClientStatistics { number, requests: number % 7, ..Default::default() };
        let (clients, left_out) = most_active((0..1400).map(of).collect());
        assert_eq!((clients.len(), left_out), (MOST_CLIENTS, 400));
        assert!(clients.is_sorted_by_key(|client| client.number));
        assert!(clients.iter().all(|client| client.requests >= 2), "the idle ones are left out");
        assert_eq!(most_active((0..3).map(of).collect()).1, 0);
    }

    #[test]
    fn a_program_is_named_unless_another_process_may_have_its_number() {
        let own = std::fs::read_to_string("/proc/self/comm").unwrap();
        let pid = std::process::id();
        // Of the process, and not of this thread.
        let own = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or(own);
        assert_eq!(program(pid, 0).as_deref(), Some(own.trim_end()));
        assert_eq!(program(pid, u64::MAX), None, "it began after the connection");
        assert_eq!(program(u32::MAX, 0), None);
    }
}
