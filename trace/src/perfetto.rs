//! A timeline that opens in Perfetto and in chrome://tracing: the *Trace Event Format*, as JSON.
//!
//! Every connection is a process there. Each thread of its daemon has a track with the requests
//! that it served (complete events, `X`); requests that wait are asynchronous events (`b`, `e`)
//! beside them, one track for the background queue and one for the pending queue.

use std::collections::BTreeSet;
use std::io::{self, Write};

use serde_json::{Value, json};

use crate::{Connection, Event};

/// A timeline that is being written.
#[derive(Debug)]
pub struct Timeline<W: Write> {
    out: W,
    connection: u32,
    threads: BTreeSet<u32>,
    /// Times are counted from the first one, so that nothing is lost in a number of JSON.
    first_ns: Option<u64>,
    is_empty: bool,
}

/// The track of requests that nobody was seen to take.
const NO_THREAD: u32 = 0;

impl<W: Write> Timeline<W> {
    /// Begins it. Errors: those of writing.
    pub fn begin(out: W, connection: &Connection) -> io::Result<Timeline<W>> {
        let id = connection.id;
        let mut timeline = Timeline {
            out,
            connection: id,
            threads: BTreeSet::new(),
            first_ns: None,
            is_empty: true,
        };
        write!(timeline.out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        let name = format!("{} (connection {id})", connection.name());
        timeline.put(&json!({
            "ph": "M", "name": "process_name", "pid": id, "tid": NO_THREAD, "args": {"name": name},
        }))?;
        Ok(timeline)
    }

    /// Adds a request. `name` is what is known of its file. Errors: those of writing.
    pub fn add(&mut self, event: &Event, name: Option<&str>) -> io::Result<()> {
        let thread = event.taker.unwrap_or(NO_THREAD);
        if self.threads.insert(thread) {
            let label = match thread {
                NO_THREAD => "not seen to be taken".to_owned(),
                thread => format!("daemon thread {thread}"),
            };
            let (pid, args) = (self.connection, json!({"name": label}));
            self.put(&json!({
                "ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": args,
            }))?;
        }
        self.first_ns.get_or_insert_with(|| event.began_ns());
        if event.background_ns().is_some() {
            self.wait(event, "background", event.began_ns(), event.sent_ns)?;
        }
        if let Some(taken_ns) = event.taken_ns {
            self.wait(event, "pending", event.sent_ns, taken_ns)?;
        }
        self.serve(event, thread, name)
    }

    /// Ends it. Without this, the file is still read by Perfetto, but is no JSON. Errors: those of
    /// writing.
    pub fn end(mut self) -> io::Result<W> {
        write!(self.out, "\n]}}")?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// The time with the daemon, or of all stages where they are not known apart.
    fn serve(&mut self, event: &Event, thread: u32, name: Option<&str>) -> io::Result<()> {
        let from_ns = event.taken_ns.unwrap_or(event.sent_ns);
        let stage = if event.taken_ns.is_some() { "processing" } else { "pending+processing" };
        let (ts, dur) = (self.us(from_ns), event.ended_ns.saturating_sub(from_ns) as f64 / 1e3);
        self.put(&json!({
            "ph": "X", "cat": stage, "name": event.op.name(), "pid": self.connection,
            "tid": thread, "ts": ts, "dur": dur, "args": details(event, name),
        }))
    }

    fn wait(&mut self, event: &Event, stage: &str, from_ns: u64, to_ns: u64) -> io::Result<()> {
        for (phase, at_ns) in [("b", from_ns), ("e", to_ns)] {
            let (pid, ts) = (self.connection, self.us(at_ns));
            self.put(&json!({
                "ph": phase, "cat": stage, "name": format!("{stage} {}", event.op), "id": event.unique,
                "pid": pid, "tid": NO_THREAD, "ts": ts,
            }))?;
        }
        Ok(())
    }

    /// Microseconds since the first request; that may have begun later than one that ended later.
    fn us(&self, ns: u64) -> f64 {
        let first_ns = self.first_ns.unwrap_or(ns);
        (ns as f64 - first_ns as f64) / 1e3
    }

    fn put(&mut self, value: &Value) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.is_empty) { "" } else { "," };
        write!(self.out, "{comma}\n{value}")
    }
}

fn details(event: &Event, name: Option<&str>) -> Value {
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
    fn the_timeline_is_what_the_trace_event_format_wants() {
        let connection = Connection { id: 43, mounts: Vec::new(), processes: Vec::new() };
        let mut timeline = Timeline::begin(Vec::new(), &connection).unwrap();
        timeline.add(&example(), Some("a \"quoted\" name")).unwrap();
        let (background, taken_ns) = (true, None);
        timeline.add(&Event { background, taken_ns, taker: None, ..example() }, None).unwrap();
        let text = timeline.end().unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let mut open = Vec::new();
        for event in events {
            assert!(event["pid"].is_u64() && event["tid"].is_u64() && event["name"].is_string());
            match event["ph"].as_str().unwrap() {
                "M" => assert!(event["args"]["name"].is_string()),
                "X" => assert!(event["dur"].as_f64().unwrap() >= 0.0 && event["ts"].is_f64()),
                "b" => open.push((event["cat"].clone(), event["id"].clone())),
                "e" => {
                    let begun = open.pop().unwrap();
                    assert_eq!(begun, (event["cat"].clone(), event["id"].clone()));
                }
                other => panic!("{other}"),
            }
        }
        assert!(open.is_empty());
        let served: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!((served[0]["dur"].as_f64(), served[0]["tid"].as_u64()), (Some(6.0), Some(12)));
        assert_eq!(served[1]["cat"], "pending+processing");
    }
}
