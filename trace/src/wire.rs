//! The data layouts that the BPF program and this crate share: the structures of `bpf/stages.h`, as
//! arrays of numbers.
//!
//! The program is compiled for 64-bit little-endian processors, and loaded on no other.

use defuse_probe::{BUCKETS, LatencyHistogram, RequestStage};

use crate::event::{CompletedRequest, RequestNames};
use crate::opcode::op_of;
use crate::stages::{InFlightState, RequestInFlight};

/// `struct histogram_key`: the connection in two halves, opcode, stage.
pub(crate) type HistogramKey = [u16; 4];
/// `struct histogram`: buckets, then errors, sum, minimum + 1, maximum, bytes.
pub(crate) type HistogramCells = [u64; BUCKETS + 5];
/// `struct flight_key`: number of the request, connection.
pub(crate) type FlightKey = [u64; 2];
/// `struct flight`: times of creation, sending and reading, inode, opcode and flags, thread of the
/// daemon.
pub(crate) type FlightCells = [u64; 6];
/// `struct daemon`: connections.
pub(crate) type DaemonCells = [u32; CONNECTIONS_OF_DAEMON];

/// Maximum number of connections that are followed for one process.
pub(crate) const CONNECTIONS_OF_DAEMON: usize = 8;
/// Number of kinds of losses (`enum loss`).
pub(crate) const LOSSES: u32 = 4;
/// `NAME_SIZE`: a name with its final NUL.
const NAME_SIZE: usize = 256;
/// Offset of the names in `struct event`.
const EVENT_HEAD: usize = 120;
const BACKGROUND: u32 = 1;

/// `enum stage`.
const STAGES: [RequestStage; 5] = [
    RequestStage::Background,
    RequestStage::Pending,
    RequestStage::Processing,
    RequestStage::Unsplit,
    RequestStage::Total,
];

/// The key of a histogram: connection, opcode, stage.
pub(crate) fn histogram_key(key: HistogramKey) -> Option<(u32, u32, RequestStage)> {
    let [low, high, opcode, stage] = key;
    let connection = u32::from(low) | u32::from(high) << 16;
    Some((connection, opcode.into(), *STAGES.get(usize::from(stage))?))
}

/// The latencies of one processor, and the bytes.
pub(crate) fn histogram(cells: &HistogramCells) -> (LatencyHistogram, u64) {
    let mut buckets = [0; BUCKETS];
    buckets.copy_from_slice(&cells[..BUCKETS]);
    let [errors, sum_ns, min_ns_1, max_ns, bytes] = cells[BUCKETS..] else { unreachable!() };
    let count = buckets.iter().sum();
    let min_ns = min_ns_1.saturating_sub(1);
    (LatencyHistogram { buckets, count, errors, sum_ns, min_ns, max_ns }, bytes)
}

/// A request in progress.
pub(crate) fn flight(key: FlightKey, cells: &FlightCells) -> RequestInFlight {
    let [created_ns, sent_ns, taken_ns, nodeid, opcode_flags, taker] = *cells;
    let state = if taken_ns > 0 { InFlightState::Processing } else { InFlightState::Pending };
    RequestInFlight {
        unique: key[0],
        connection: key[1] as u32,
        op: op_of(opcode_flags as u32),
        nodeid,
        state,
        background: (opcode_flags >> 32) as u32 & BACKGROUND != 0,
        created_ns: Some(created_ns).filter(|ns| *ns > 0),
        sent_ns,
        taker: (taken_ns > 0).then_some(taker as u32),
    }
}

/// A completed request (`struct event`); `None` if it is too short.
pub(crate) fn event(bytes: &[u8]) -> Option<CompletedRequest> {
    let head = bytes.get(..EVENT_HEAD)?;
    let u64_at =
        |place: usize| u64::from_le_bytes(head[place * 8..][..8].try_into().unwrap_or_default());
    let u32_at = |place: usize| {
        u32::from_le_bytes(head[64 + place * 4..][..4].try_into().unwrap_or_default())
    };
    let some = |ns: u64| Some(ns).filter(|ns| *ns > 0);
    let name = |place: usize| {
        let (start, end) = (EVENT_HEAD + place * NAME_SIZE, EVENT_HEAD + (place + 1) * NAME_SIZE);
        (place < u32_at(9) as usize).then(|| bytes.get(start..end).map(text)).flatten()
    };
    Some(CompletedRequest {
        unique: u64_at(0),
        nodeid: u64_at(1),
        child: some(u64_at(2)),
        offset: u64_at(3),
        created_ns: some(u64_at(4)),
        sent_ns: u64_at(5),
        taken_ns: some(u64_at(6)),
        ended_ns: u64_at(7),
        connection: u32_at(0),
        op: op_of(u32_at(1)),
        error: (u32_at(2) as i32).unsigned_abs() as i32,
        background: u32_at(3) & BACKGROUND != 0,
        request_len: u32_at(4),
        reply_len: u32_at(5),
        size: u32_at(6),
        pid: u32_at(7),
        taker: Some(u32_at(8)).filter(|thread| *thread > 0),
        comm: text(&head[104..120]),
        names: RequestNames { name: name(0), name2: name(1) },
    })
}

/// A C string, up to its final NUL.
fn text(bytes: &[u8]) -> String {
    let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_probe::Op;

    #[test]
    fn events_are_decoded_from_the_layout_of_the_bpf_program() {
        let mut bytes = Vec::new();
        for value in [4_u64, 1, 7, 4096, 900, 1_000, 4_000, 10_000] {
            bytes.extend(value.to_le_bytes());
        }
        let error = (-2_i32) as u32;
        for value in [43, 12, error, BACKGROUND, 42, 16, 512, 99, 12, 2] {
            bytes.extend(u32::to_le_bytes(value));
        }
        bytes.extend(b"cat\0............");
        assert_eq!(bytes.len(), EVENT_HEAD);
        for name in ["old", "new"] {
            let mut field = [0; NAME_SIZE];
            field[..name.len()].copy_from_slice(name.as_bytes());
            bytes.extend(field);
        }
        let found = event(&bytes).unwrap();
        assert_eq!((found.unique, found.nodeid, found.child), (4, 1, Some(7)));
        assert_eq!((found.op, found.error, found.background), (Op::RENAME, 2, true));
        assert_eq!((found.offset, found.size, found.comm.as_str()), (4096, 512, "cat"));
        assert_eq!((found.pid, found.taker, found.connection), (99, Some(12), 43));
        assert_eq!((found.background_ns(), found.pending_ns()), (Some(100), Some(3_000)));
        assert_eq!(found.names.name2.as_deref(), Some("new"));
        assert_eq!(event(&bytes[..EVENT_HEAD - 1]), None);
        assert_eq!(event(&bytes[..EVENT_HEAD]).unwrap().names.name, None);
    }

    #[test]
    fn kernel_histograms_have_the_format_of_the_probe() {
        let mut cells = [0; BUCKETS + 5];
        cells[LatencyHistogram::bucket_of(700)] = 2;
        cells[BUCKETS..].copy_from_slice(&[1, 1_400, 701, 700, 4096]);
        let (latency, bytes) = histogram(&cells);
        let mut expected = LatencyHistogram::default();
        expected.record(700, true);
        expected.record(700, false);
        assert_eq!((latency, bytes), (expected, 4096));
        assert_eq!(histogram_key([43, 1, 15, 4]), Some((65_579, 15, RequestStage::Total)));
        assert_eq!(histogram_key([43, 0, 15, 5]), None);
    }
}
