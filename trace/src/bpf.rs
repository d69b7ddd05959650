//! Loads, attaches and reads the BPF program.

use std::collections::{BTreeMap, HashMap as Table};
use std::{fmt, fs};

use aya::maps::{HashMap, Map, MapData, PerCpuArray, PerCpuHashMap, RingBuf};
use aya::programs::BtfTracePoint;
use aya::{Btf, Ebpf, EbpfLoader, include_bytes_aligned};
use defuse_probe::{OpStats, RequestStage};

use crate::collector::ConnectionStats;
use crate::opcode::{bits_of, op_of};
use crate::wire::{self, DaemonCells, FlightCells, FlightKey, HistogramCells, HistogramKey};
use crate::{
    CollectorOptions, CompletedRequest, InFlightState, LostMeasurements, RequestInFlight,
    TraceError, processes_of,
};

/// The compiled program, built from `bpf/stages.bpf.c` by `cargo xtask bpf`.
const OBJECT: &[u8] = include_bytes_aligned!("../bpf/stages.bpf.o");
const WHAT: &str = "tracing requests by BPF";
/// The initial pid namespace. Only there, process ids are the ids of the whole machine.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// If a request stays at the front of a queue for this long while later ones are read, its caller
/// has given it up.
const GIVEN_UP_NS: u64 = 1_000_000_000;

pub(crate) struct BpfProbe {
    ebpf: Ebpf,
    events: Option<RingBuf<MapData>>,
    connection: Option<u32>,
    /// The processes that the program knows of.
    daemons: BTreeMap<u32, DaemonCells>,
}

impl fmt::Debug for BpfProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Eyes").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl BpfProbe {
    /// Loads the program and attaches the parts that are needed. Missing parts are described in
    /// `notes`.
    pub(crate) fn open(
        wanted: &CollectorOptions,
        notes: &mut Vec<String>,
    ) -> Result<BpfProbe, TraceError> {
        if !cfg!(all(target_arch = "x86_64", target_endian = "little")) {
            let cause = "the BPF program supports x86-64 only".to_owned();
            return Err(TraceError::Unsupported { what: WHAT, cause });
        }
        let unsupported = |cause: String| TraceError::Unsupported { what: WHAT, cause };
        let btf = Btf::from_sys_fs()
            .map_err(|error| unsupported(format!("the kernel has no BTF: {error}")))?;
        let mut ebpf = load(wanted, &btf)?;
        for (program, tracepoint) in
            [("on_end", "fuse_request_end"), ("on_send", "fuse_request_send")]
        {
            attach(&mut ebpf, program, tracepoint, &btf)
                .map_err(|error| refusal(tracepoint, error))?;
        }
        let mut optional = |program, tracepoint, without: &str| {
            if let Err(error) = attach(&mut ebpf, program, tracepoint, &btf) {
                notes.push(format!("{without} ({tracepoint}: {error})"));
            }
        };
        optional("on_exit", "sys_exit", "pending and processing are one stage");
        optional("on_alloc", "kmem_cache_alloc", "the background queue is not measured");
        if uses_rings() {
            optional("on_ring", "io_uring_complete", "requests over io_uring have one stage");
        }
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        if namespace.as_os_str() != FIRST_PID_NAMESPACE {
            notes.push(
                "processes have other numbers in this container than in the kernel: pending and \
                 processing are one stage"
                    .to_owned(),
            );
        }
        let events = match &wanted.events {
            Some(_) => Some(take_ring(&mut ebpf)?),
            None => None,
        };
        let mut probe =
            BpfProbe { ebpf, events, connection: wanted.connection, daemons: BTreeMap::new() };
        probe.refresh()?;
        Ok(probe)
    }

    /// Updates the program's table of daemons.
    pub(crate) fn refresh(&mut self) -> Result<(), TraceError> {
        let mut now: BTreeMap<u32, DaemonCells> = BTreeMap::new();
        for (connection, pids) in processes_of(self.connection) {
            for pid in pids {
                let cells = now.entry(pid).or_default();
                if let Some(free) = cells.iter_mut().find(|cell| **cell == 0) {
                    *free = connection;
                }
            }
        }
        let mut map: HashMap<_, u32, DaemonCells> = map_of(&mut self.ebpf, "daemons")?;
        for (pid, cells) in &now {
            if self.daemons.get(pid) != Some(cells) {
                map.insert(pid, cells, 0).map_err(read_error)?;
            }
        }
        for pid in self.daemons.keys().filter(|pid| !now.contains_key(pid)) {
            // Removal fails only if the entry is gone already.
            let _ = map.remove(pid);
        }
        self.daemons = now;
        Ok(())
    }

    /// Reads all histograms.
    pub(crate) fn read_counts(&mut self) -> Result<ConnectionStats, TraceError> {
        let map: PerCpuHashMap<_, HistogramKey, HistogramCells> =
            map_of(&mut self.ebpf, "histograms")?;
        // Several opcodes may be one operation.
        let mut found: Table<(u32, RequestStage, u8), OpStats> = Table::new();
        for row in map.iter() {
            let (key, cells) = row.map_err(read_error)?;
            let Some((connection, opcode, stage)) = wire::histogram_key(key) else { continue };
            let op = op_of(opcode);
            let stats = found.entry((connection, stage, op as u8)).or_insert_with(|| OpStats {
                op,
                stage,
                bytes: 0,
                latency: Default::default(),
            });
            for one in cells.iter() {
                let (latency, bytes) = wire::histogram(one);
                stats.latency.merge(&latency);
                stats.bytes += bytes;
            }
        }
        let counted = found.into_iter().filter(|(_, stats)| stats.latency.count > 0);
        Ok(counted.map(|((connection, ..), stats)| (connection, stats)).collect())
    }

    /// All requests in progress. The program sees no end of requests that their callers gave up
    /// before they were read; these are removed here.
    pub(crate) fn flights(&mut self) -> Result<Vec<RequestInFlight>, TraceError> {
        let mut map: HashMap<_, FlightKey, FlightCells> = map_of(&mut self.ebpf, "flights")?;
        let rows: Vec<(FlightKey, FlightCells)> = map.iter().filter_map(Result::ok).collect();
        let mut flights: Vec<RequestInFlight> =
            rows.iter().map(|(key, cells)| wire::flight(*key, cells)).collect();
        for gone in find_overtaken(&flights) {
            let _ = map.remove(&[gone.0, u64::from(gone.1)]);
            flights.retain(|flight| (flight.unique, flight.connection) != gone);
        }
        Ok(flights)
    }

    pub(crate) fn losses(&mut self) -> Result<LostMeasurements, TraceError> {
        let map = self.ebpf.map_mut("losses").ok_or_else(|| TraceError::Map("no losses".into()))?;
        let map: PerCpuArray<_, u64> = PerCpuArray::try_from(map).map_err(read_error)?;
        let mut counts = [0; wire::LOSSES as usize];
        for (place, count) in (0..).zip(&mut counts) {
            *count = map.get(&place, 0).map_err(read_error)?.iter().sum();
        }
        let [requests, latencies, events, background_waits] = counts;
        Ok(LostMeasurements { requests, latencies, events, background_waits })
    }

    pub(crate) fn events(&mut self, each: &mut dyn FnMut(CompletedRequest)) {
        let Some(ring) = &mut self.events else { return };
        while let Some(bytes) = ring.next() {
            if let Some(event) = wire::event(&bytes) {
                each(event);
            }
        }
    }
}

/// Requests of the pending queue, which is first in, first out, that were passed over for long.
fn find_overtaken(flights: &[RequestInFlight]) -> Vec<(u64, u32)> {
    let latest = flights.iter().map(|flight| flight.sent_ns).max().unwrap_or(0);
    let is_passed = |flight: &&RequestInFlight| {
        let later = |other: &RequestInFlight| {
            other.connection == flight.connection
                && other.state == InFlightState::Processing
                && other.sent_ns > flight.sent_ns
        };
        flight.state == InFlightState::Pending
            && latest.saturating_sub(flight.sent_ns) > GIVEN_UP_NS
            && flights.iter().any(later)
    };
    let gone = flights.iter().filter(is_passed);
    gone.map(|flight| (flight.unique, flight.connection)).collect()
}

fn load(wanted: &CollectorOptions, btf: &Btf) -> Result<Ebpf, TraceError> {
    let filter = wanted.events.clone().unwrap_or_default();
    let connection = wanted.connection.unwrap_or(0);
    let with_events = u8::from(wanted.events.is_some());
    let (errors, pid) = (u8::from(filter.errors), filter.pid.unwrap_or(0));
    let (ops, slower_than) = (bits_of(&filter.ops), filter.slower_than_ns);
    let cache = cache_name();
    let mut loader = EbpfLoader::new();
    loader
        .btf(Some(btf))
        .override_global("only_connection", &connection, true)
        .override_global("with_events", &with_events, true)
        .override_global("only_errors", &errors, true)
        .override_global("only_pid", &pid, true)
        .override_global("only_ops", &ops, true)
        .override_global("slower_than", &slower_than, true)
        .override_global("cache_name", &cache, true);
    if wanted.events.is_none() {
        // The minimum that the kernel accepts, since no program reads it.
        loader.map_max_entries("events", 4096).map_max_entries("details", 1);
    }
    loader.load(OBJECT).map_err(|error| refusal("bpf(2)", chain(&error)))
}

/// The name in sysfs of the slab cache of FUSE requests. The kernel may merge caches of one size;
/// the name is a link then.
fn cache_name() -> [u8; 32] {
    let path = "/sys/kernel/slab/fuse_request";
    let target = fs::read_link(path).ok();
    let name = target.as_ref().and_then(|target| target.file_name()?.to_str());
    let mut bytes = [0; 32];
    let name = name.unwrap_or("fuse_request").as_bytes();
    let len = name.len().min(bytes.len() - 1);
    bytes[..len].copy_from_slice(&name[..len]);
    bytes
}

/// True if FUSE over io_uring is enabled, so that its completions must be traced, too.
fn uses_rings() -> bool {
    let parameter = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    parameter.is_ok_and(|text| text.trim() == "Y")
}

fn attach(ebpf: &mut Ebpf, program: &str, tracepoint: &str, btf: &Btf) -> Result<(), String> {
    let program = ebpf.program_mut(program).ok_or("not in the object")?;
    let program: &mut BtfTracePoint = program.try_into().map_err(|error| chain(&error))?;
    program.load(tracepoint, btf).map_err(|error| chain(&error))?;
    program.attach().map_err(|error| chain(&error))?;
    Ok(())
}

fn take_ring(ebpf: &mut Ebpf) -> Result<RingBuf<MapData>, TraceError> {
    let map = ebpf.take_map("events").ok_or_else(|| TraceError::Map("no events".into()))?;
    RingBuf::try_from(map).map_err(read_error)
}

fn map_of<'a, M>(ebpf: &'a mut Ebpf, name: &str) -> Result<M, TraceError>
where
    M: TryFrom<&'a mut Map, Error = aya::maps::MapError>,
{
    let map = ebpf.map_mut(name).ok_or_else(|| TraceError::Map(format!("no {name}")))?;
    M::try_from(map).map_err(read_error)
}

fn read_error(error: aya::maps::MapError) -> TraceError {
    TraceError::Map(chain(&error))
}

/// An error with its causes: aya names the system call only in the outermost error.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    // The verifier's log has many lines.
    text.lines().next().unwrap_or_default().to_owned()
}

fn refusal(what: &str, cause: String) -> TraceError {
    let cause = format!("{what}: {cause}");
    // This is the text of EPERM, which root may get, too, without the capabilities. EACCES comes
    // from the verifier.
    let barred = cause.contains("Operation not permitted");
    if barred || !rustix::process::geteuid().is_root() {
        TraceError::NotPermitted { what: WHAT, cause }
    } else {
        TraceError::Unsupported { what: WHAT, cause }
    }
}
