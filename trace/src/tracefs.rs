//! Traces requests by tracefs, if BPF is not permitted: only their sending and their end.
//!
//! It uses its own tracefs instance, which does not disturb other tracing and is removed at the
//! end. Times are whole microseconds, as tracefs prints them.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{process, thread};

use defuse_probe::{OpStats, RequestStage};

use crate::collector::ConnectionStats;
use crate::event::RequestNames;
use crate::opcode::op_of;
use crate::pseudo::PseudoFileSystem;
use crate::{
    CollectorOptions, CompletedRequest, EventFilter, InFlightState, LostMeasurements,
    RequestInFlight, TraceError,
};

const USUAL: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
/// Interval of the reader. The kernel buffers about 10,000 events per processor.
const PERIOD: Duration = Duration::from_millis(10);
/// Limits on the requests followed at once, and on the events kept.
const FLIGHTS_MAX: usize = 65_536;
const EVENTS_MAX: usize = 65_536;
/// Sizes of headers in the protocol: of a request, of a reply, of a WRITE.
const IN_HEADER: u32 = 40;
const OUT_HEADER: u32 = 16;
const WRITE_HEADER: u32 = IN_HEADER + 40;
const WRITE: u32 = 16;
const READ: u32 = 15;

#[derive(Debug)]
pub(crate) struct TracefsProbe {
    instance: PathBuf,
    shared: Arc<TracefsShared>,
    reader: Option<JoinHandle<()>>,
    _tracefs: PseudoFileSystem,
}

#[derive(Debug, Default)]
struct TracefsShared {
    state: Mutex<TracefsState>,
    stop: AtomicBool,
}

#[derive(Debug, Default)]
struct TracefsState {
    sent: HashMap<(u32, u64), SentRequest>,
    stats: HashMap<(u32, u8), OpStats>,
    filter: Option<EventFilter>,
    events: Vec<CompletedRequest>,
    losses: LostMeasurements,
}

#[derive(Clone, Debug)]
struct SentRequest {
    at_ns: u64,
    opcode: u32,
    len: u32,
    pid: u32,
    comm: String,
}

impl TracefsShared {
    fn lock(&self) -> MutexGuard<'_, TracefsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TracefsProbe {
    /// Creates an instance, and begins to read it.
    pub(crate) fn open(wanted: &CollectorOptions) -> Result<TracefsProbe, TraceError> {
        let is_there = |path: &Path| path.join("instances").is_dir();
        let tracefs = PseudoFileSystem::open("tracefs", &USUAL, is_there)?;
        // A number distinguishes several collectors of one process.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Relaxed);
        let mut name = format!("defuse-{}", process::id());
        if number > 0 {
            name = format!("{name}-{number}");
        }
        let instance = tracefs.root().join("instances").join(&name);
        remove_left_behind(&tracefs.root().join("instances"));
        let shown = PathBuf::from(USUAL[0]).join("instances").join(&name);
        let failed = |cause: io::Error| TraceError::File { path: shown.clone(), cause };
        fs::create_dir(&instance).map_err(failed)?;
        let shared = Arc::new(TracefsShared::default());
        shared.lock().filter = wanted.events.clone();
        // From here on, Drop removes the instance in case of an error.
        let mut probe = TracefsProbe { instance, shared, reader: None, _tracefs: tracefs };
        let pipe = probe.begin(wanted.connection).map_err(failed)?;
        let shared = Arc::clone(&probe.shared);
        let reader = thread::Builder::new().name("defuse-tracefs".to_owned());
        probe.reader = Some(reader.spawn(move || read_all(pipe, &shared)).map_err(failed)?);
        Ok(probe)
    }

    fn begin(&self, connection: Option<u32>) -> io::Result<File> {
        let at = |name: &str| self.instance.join(name);
        // CLOCK_MONOTONIC, as in the BPF program.
        fs::write(at("trace_clock"), "mono")?;
        for event in ["fuse_request_send", "fuse_request_end"] {
            if let Some(connection) = connection {
                let filter = format!("connection == {connection}");
                fs::write(at(&format!("events/fuse/{event}/filter")), filter)?;
            }
            fs::write(at(&format!("events/fuse/{event}/enable")), "1")?;
        }
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        OpenOptions::new().read(true).custom_flags(nonblocking).open(at("trace_pipe"))
    }

    pub(crate) fn read_counts(&mut self) -> Result<ConnectionStats, TraceError> {
        let state = self.shared.lock();
        Ok(state
            .stats
            .iter()
            .map(|((connection, _), stats)| (*connection, stats.clone()))
            .collect())
    }

    pub(crate) fn flights(&mut self) -> Result<Vec<RequestInFlight>, TraceError> {
        let state = self.shared.lock();
        let flights = state.sent.iter().map(|(&(connection, unique), sent)| RequestInFlight {
            unique,
            connection,
            op: op_of(sent.opcode),
            nodeid: 0,
            state: InFlightState::Pending,
            background: false,
            created_ns: None,
            sent_ns: sent.at_ns,
            taker: None,
        });
        Ok(flights.collect())
    }

    pub(crate) fn losses(&self) -> LostMeasurements {
        self.shared.lock().losses
    }

    pub(crate) fn events(
        &mut self,
        each: &mut dyn FnMut(CompletedRequest),
    ) -> Result<(), TraceError> {
        let events = std::mem::take(&mut self.shared.lock().events);
        events.into_iter().for_each(each);
        Ok(())
    }
}

/// Removes the instances of collectors that were killed.
fn remove_left_behind(instances: &Path) {
    let Ok(dir) = fs::read_dir(instances) else { return };
    for entry in dir.flatten() {
        let owner = entry.file_name().to_str().and_then(owner);
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Another process may remove it first.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// The process that an instance belongs to; `None` for an instance of another program.
fn owner(instance: &str) -> Option<u32> {
    instance.strip_prefix("defuse-")?.split('-').next()?.parse().ok()
}

impl Drop for TracefsProbe {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        if let Some(reader) = self.reader.take() {
            // A reader that panicked has no result.
            let _ = reader.join();
        }
        // The pipe is closed, so nothing keeps the instance busy. An error here cannot be handled.
        let _ = fs::remove_dir(&self.instance);
    }
}

fn read_all(mut pipe: File, shared: &TracefsShared) {
    let mut buffer = vec![0; 64 << 10];
    let mut line = Vec::new();
    while !shared.stop.load(Relaxed) {
        match pipe.read(&mut buffer) {
            Ok(0) => thread::sleep(PERIOD),
            Ok(len) => {
                let mut state = shared.lock();
                for part in buffer[..len].split_inclusive(|byte| *byte == b'\n') {
                    line.extend_from_slice(part);
                    if part.ends_with(b"\n") {
                        state.take(&String::from_utf8_lossy(&line));
                        line.clear();
                    }
                }
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                thread::sleep(PERIOD);
            }
            Err(_) => return,
        }
    }
}

/// One line of trace_pipe.
#[derive(Debug, PartialEq, Eq)]
enum TracePipeLine<'a> {
    Sent {
        at_ns: u64,
        connection: u32,
        unique: u64,
        opcode: u32,
        len: u32,
        pid: u32,
        comm: &'a str,
    },
    Ended {
        at_ns: u64,
        connection: u32,
        unique: u64,
        len: u32,
        error: i32,
        pid: u32,
    },
    Lost(u64),
}

/// Parses a line; `None` if it is of no interest.
fn parse(line: &str) -> Option<TracePipeLine<'_>> {
    if let Some((_, rest)) = line.split_once("[LOST ") {
        return Some(TracePipeLine::Lost(rest.split(' ').next()?.parse().ok()?));
    }
    let (head, event, fields) =
        ["fuse_request_send", "fuse_request_end"].iter().find_map(|event| {
            let (head, fields) = line.split_once(&format!(": {event}: "))?;
            Some((head, *event, fields))
        })?;
    let at_ns = nanoseconds(head.rsplit(' ').next()?)?;
    // The name of the thread may contain any character, but the fields after it are regular.
    let (thread, _) = head.rsplit_once(" [")?;
    let (comm, pid) = thread.trim().rsplit_once('-')?;
    let pid = pid.trim().parse().ok()?;
    let value = |name: &str| {
        let words: Vec<&str> = fields.split_whitespace().collect();
        let place = words.iter().position(|word| *word == name)?;
        words.get(place + 1).copied()
    };
    let connection = value("connection")?.parse().ok()?;
    let unique = value("req")?.parse().ok()?;
    let len = value("len")?.parse().ok()?;
    Some(if event == "fuse_request_send" {
        let opcode = value("opcode")?.parse().ok()?;
        TracePipeLine::Sent { at_ns, connection, unique, opcode, len, pid, comm }
    } else {
        let error = value("error")?.parse().ok()?;
        TracePipeLine::Ended { at_ns, connection, unique, len, error, pid }
    })
}

/// Seconds with six decimal places.
fn nanoseconds(text: &str) -> Option<u64> {
    let (seconds, rest) = text.split_once('.')?;
    let micros: u64 = (rest.len() == 6).then(|| rest.parse().ok()).flatten()?;
    Some(seconds.parse::<u64>().ok()? * 1_000_000_000 + micros * 1_000)
}

impl TracefsState {
    fn take(&mut self, line: &str) {
        match parse(line) {
            Some(TracePipeLine::Lost(count)) => self.losses.requests += count,
            Some(TracePipeLine::Sent { at_ns, connection, unique, opcode, len, pid, comm }) => {
                if self.sent.len() >= FLIGHTS_MAX {
                    self.losses.requests += 1;
                    return;
                }
                let sent = SentRequest { at_ns, opcode, len, pid, comm: comm.to_owned() };
                self.sent.insert((connection, unique), sent);
            }
            Some(TracePipeLine::Ended { at_ns, connection, unique, len, error, pid }) => {
                // The request may have been sent before tracing began.
                let Some(sent) = self.sent.remove(&(connection, unique)) else { return };
                self.end(connection, unique, &sent, EndedRequest { at_ns, len, error, pid });
            }
            None => {}
        }
    }

    fn end(&mut self, connection: u32, unique: u64, sent: &SentRequest, ended: EndedRequest) {
        let op = op_of(sent.opcode);
        let stats = self.stats.entry((connection, op as u8)).or_insert_with(|| OpStats {
            op,
            stage: RequestStage::Total,
            bytes: 0,
            latency: Default::default(),
        });
        stats.latency.record(ended.at_ns.saturating_sub(sent.at_ns), ended.error == 0);
        stats.bytes += match sent.opcode {
            WRITE if ended.error == 0 => sent.len.saturating_sub(WRITE_HEADER),
            READ if ended.error == 0 => ended.len.saturating_sub(OUT_HEADER),
            _ => 0,
        } as u64;
        if self.filter.is_none() {
            return;
        }
        let event = event_of(connection, unique, sent, &ended);
        if self.filter.as_ref().is_some_and(|filter| filter.wants(&event)) {
            if self.events.len() < EVENTS_MAX {
                self.events.push(event);
            } else {
                self.losses.events += 1;
            }
        }
    }
}

struct EndedRequest {
    at_ns: u64,
    len: u32,
    error: i32,
    pid: u32,
}

fn event_of(
    connection: u32,
    unique: u64,
    sent: &SentRequest,
    ended: &EndedRequest,
) -> CompletedRequest {
    let size = match sent.opcode {
        WRITE => sent.len.saturating_sub(WRITE_HEADER),
        READ => ended.len.saturating_sub(OUT_HEADER),
        _ => 0,
    };
    CompletedRequest {
        unique,
        connection,
        op: op_of(sent.opcode),
        nodeid: 0,
        child: None,
        offset: 0,
        size,
        request_len: sent.len,
        reply_len: ended.len,
        error: ended.error.abs(),
        background: false,
        created_ns: None,
        sent_ns: sent.at_ns,
        taken_ns: None,
        ended_ns: ended.at_ns,
        pid: sent.pid,
        comm: sent.comm.clone(),
        taker: Some(ended.pid),
        names: RequestNames::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_probe::Op;

    const SENT: &str = "  a - b: c [0]-12692   [001] ...1. 12727.623066: fuse_request_send: connection \
                        43 req 4 opcode 16 (FUSE_WRITE) len 4176 \n";
    const ENDED: &str = "          bindfs-12689   [001] ..... 12727.624069: fuse_request_end: \
                         connection 43 req 4 len 24 error 0\n";

    #[test]
    fn lines_are_parsed_for_any_thread_name() {
        let sent = TracePipeLine::Sent {
            at_ns: 12_727_623_066_000,
            connection: 43,
            unique: 4,
            opcode: 16,
            len: 4176,
            pid: 12_692,
            comm: "a - b: c [0]",
        };
        assert_eq!(parse(SENT), Some(sent));
        let (at_ns, pid) = (12_727_624_069_000, 12_689);
        let ended =
            TracePipeLine::Ended { at_ns, connection: 43, unique: 4, len: 24, error: 0, pid };
        assert_eq!(parse(ENDED), Some(ended));
        assert_eq!(parse("CPU:1 [LOST 123 EVENTS]\n"), Some(TracePipeLine::Lost(123)));
        for other in ["", "nonsense", "x: fuse_request_end: ", "# tracer: nop"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn the_name_of_an_instance_contains_its_owner() {
        assert_eq!((owner("defuse-12"), owner("defuse-12-1")), (Some(12), Some(12)));
        assert_eq!((owner("defuse-"), owner("perf-12"), owner("defuse-x")), (None, None, None));
    }

    #[test]
    fn a_request_is_timed_from_sending_to_its_end() {
        let mut state =
            TracefsState { filter: Some(EventFilter::default()), ..TracefsState::default() };
        state.take(ENDED);
        assert!(state.stats.is_empty(), "its sending was not observed");
        state.take(SENT);
        assert_eq!(state.sent.len(), 1);
        state.take(ENDED);
        let stats = &state.stats[&(43, Op::WRITE as u8)];
        assert_eq!((stats.stage, stats.bytes), (RequestStage::Total, 4096));
        assert_eq!((stats.latency.count, stats.latency.sum_ns), (1, 1_003_000));
        assert_eq!(state.events[0].unsplit_ns(), Some(1_003_000));
        assert!(state.sent.is_empty());
        state.take("CPU:1 [LOST 2 EVENTS]");
        assert_eq!(state.losses.requests, 2);
    }
}
