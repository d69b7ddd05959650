//! Writes a timeline for Perfetto and chrome://tracing, in the *Trace Event Format* (JSON).
//!
//! Every connection is a process there. Each thread of its daemon has a track with the requests
//! that it served (complete events, `X`). If it had several at once, it has further tracks, because
//! overlapping slices of one track are drawn as nested calls, or dropped. Waiting requests are
//! asynchronous events (`b`, `e`), on one track for the background queue and one for the pending
//! queue.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};

use crate::{CompletedRequest, FuseConnection};

/// A timeline being written.
#[derive(Debug)]
pub struct TraceTimeline<W: Write> {
    out: W,
    connection: u32,
    tracks: BTreeMap<u32, Vec<TimelineTrack>>,
    extra_tracks: u32,
    /// The origin of times: [`BEFORE_NS`] before the first request that ended.
    origin_ns: Option<u64>,
    is_empty: bool,
}

/// One row of slices: its number, and the end of its last slice.
#[derive(Debug)]
struct TimelineTrack {
    tid: u32,
    busy_until_ns: u64,
}

/// The thread of requests whose read was not observed.
const NO_THREAD: u32 = 0;

/// Number of the first extra track, beyond all thread ids (`PID_MAX_LIMIT`). Tracks never have the
/// number 0 either, which viewers take for the idle thread of the processor.
const FIRST_EXTRA_TRACK: u32 = 1 << 22;

/// The longest time that a request may have begun before the first one ended. Viewers refuse
/// negative times, and with this origin JSON numbers still resolve nanoseconds.
const BEFORE_NS: u64 = 86_400_000_000_000;

impl<W: Write> TraceTimeline<W> {
    /// Begins a timeline. Fails with the errors of writing.
    pub fn begin(out: W, connection: &FuseConnection) -> io::Result<TraceTimeline<W>> {
        let id = connection.id;
        let mut timeline = TraceTimeline {
            out,
            connection: id,
            tracks: BTreeMap::new(),
            extra_tracks: 0,
            origin_ns: None,
            is_empty: true,
        };
        write!(timeline.out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        let name = format!("{} (connection {id})", connection.name());
        timeline.write_value(&json!({
            "ph": "M", "name": "process_name", "pid": id, "tid": id, "args": {"name": name},
        }))?;
        Ok(timeline)
    }

    /// Adds a request. `name` is the name of its file, if known. Fails with the errors of writing.
    pub fn add(&mut self, event: &CompletedRequest, name: Option<&str>) -> io::Result<()> {
        self.origin_ns.get_or_insert_with(|| event.start_ns().saturating_sub(BEFORE_NS));
        if event.background_ns().is_some() {
            self.wait(event, "background", event.start_ns(), event.sent_ns)?;
        }
        if let Some(taken_ns) = event.taken_ns {
            self.wait(event, "pending", event.sent_ns, taken_ns)?;
        }
        self.serve(event, name)
    }

    /// Ends the timeline. Perfetto also reads a file without an end, but it is not valid JSON.
    /// Fails with the errors of writing.
    pub fn end(mut self) -> io::Result<W> {
        write!(self.out, "\n]}}")?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// Adds the time in the daemon, or of all stages if they are not known separately.
    fn serve(&mut self, event: &CompletedRequest, name: Option<&str>) -> io::Result<()> {
        let from_ns = event.taken_ns.unwrap_or(event.sent_ns);
        let thread = event.taker.unwrap_or(NO_THREAD);
        let track = self.track(thread, from_ns, from_ns.max(event.ended_ns))?;
        let stage = if event.taken_ns.is_some() { "processing" } else { "pending+processing" };
        let (ts, dur) =
            (self.microseconds(from_ns), event.ended_ns.saturating_sub(from_ns) as f64 / 1e3);
        self.write_value(&json!({
            "ph": "X", "cat": stage, "name": event.op.name(), "pid": self.connection,
            "tid": track, "ts": ts, "dur": dur, "args": details(event, name),
        }))
    }

    /// Returns a track of `thread` that is free from `from_ns` on. The number of tracks is at most
    /// the number of concurrent requests.
    fn track(&mut self, thread: u32, from_ns: u64, to_ns: u64) -> io::Result<u32> {
        let tracks = self.tracks.entry(thread).or_default();
        if let Some(free) = tracks.iter_mut().find(|track| track.busy_until_ns <= from_ns) {
            free.busy_until_ns = to_ns;
            return Ok(free.tid);
        }
        let number = tracks.len() + 1;
        let own = thread != NO_THREAD && number == 1;
        let tid = if own { thread } else { FIRST_EXTRA_TRACK + self.extra_tracks };
        self.extra_tracks += u32::from(!own);
        tracks.push(TimelineTrack { tid, busy_until_ns: to_ns });
        let mut label = match thread {
            NO_THREAD => "read not observed".to_owned(),
            thread => format!("daemon thread {thread}"),
        };
        if number > 1 {
            label += &format!(", {number} at once");
        }
        let (pid, args) = (self.connection, json!({"name": label}));
        let name = json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args});
        self.write_value(&name)?;
        Ok(tid)
    }

    fn wait(
        &mut self,
        event: &CompletedRequest,
        stage: &str,
        from_ns: u64,
        to_ns: u64,
    ) -> io::Result<()> {
        let id = format!("{:#x}", event.unique);
        for (phase, at_ns) in [("b", from_ns), ("e", to_ns.max(from_ns))] {
            let (pid, ts) = (self.connection, self.microseconds(at_ns));
            self.write_value(&json!({
                "ph": phase, "cat": stage, "name": format!("{stage} {}", event.op), "id": id,
                "pid": pid, "tid": pid, "ts": ts,
            }))?;
        }
        Ok(())
    }

    /// Microseconds since the origin.
    fn microseconds(&self, ns: u64) -> f64 {
        ns.saturating_sub(self.origin_ns.unwrap_or(ns)) as f64 / 1e3
    }

    fn write_value(&mut self, value: &Value) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.is_empty) { "" } else { "," };
        write!(self.out, "{comma}\n{value}")
    }
}

fn details(event: &CompletedRequest, name: Option<&str>) -> Value {
    json!({
        "unique": event.unique, "nodeid": event.nodeid, "name": name, "offset": event.offset,
        "size": event.size, "error": event.error, "pid": event.pid, "comm": event.comm,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::example;

    #[test]
    fn a_request_has_its_stages_and_details() {
        let connection = FuseConnection { id: 43, mounts: Vec::new(), processes: Vec::new() };
        let mut timeline = TraceTimeline::begin(Vec::new(), &connection).unwrap();
        timeline.add(&example(), Some("a \"quoted\" name")).unwrap();
        let (background, taken_ns) = (true, None);
        timeline
            .add(&CompletedRequest { background, taken_ns, taker: None, ..example() }, None)
            .unwrap();
        let text = timeline.end().unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let served: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!((served[0]["dur"].as_f64(), served[0]["tid"].as_u64()), (Some(6.0), Some(12)));
        assert_eq!(served[0]["args"]["name"], "a \"quoted\" name");
        assert_eq!(served[1]["cat"], "pending+processing");
        assert_eq!(served[1]["tid"], FIRST_EXTRA_TRACK);
    }
}
