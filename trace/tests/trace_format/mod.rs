//! A strict check of the *Trace Event Format* and of further requirements of viewers: the fields
//! that each phase must and may have, their types, a begin for every end, names for all tracks, and
//! slices of one track that neither overlap nor go back in time.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

/// The required fields of a phase.
fn fields(phase: &str) -> &'static [&'static str] {
    match phase {
        "M" => &["args", "name", "ph", "pid", "tid"],
        "X" => &["args", "cat", "dur", "name", "ph", "pid", "tid", "ts"],
        "b" | "e" => &["cat", "id", "name", "ph", "pid", "tid", "ts"],
        other => panic!("a phase that is not used: {other:?}"),
    }
}

fn number(event: &Map<String, Value>, field: &str) -> f64 {
    let number = event[field].as_f64().unwrap_or_else(|| panic!("{field} of {event:?}"));
    assert!(number.is_finite() && number >= 0.0, "{field} of {event:?}");
    number
}

fn integer(event: &Map<String, Value>, field: &str) -> u64 {
    let number = event[field].as_u64().unwrap_or_else(|| panic!("{field} of {event:?}"));
    assert!(number > 0 && number <= u64::from(u32::MAX >> 1), "{field} of {event:?}");
    number
}

fn text<'a>(event: &'a Map<String, Value>, field: &str) -> &'a str {
    let text = event[field].as_str().unwrap_or_else(|| panic!("{field} of {event:?}"));
    assert!(!text.is_empty(), "{field} of {event:?}");
    text
}

/// Fails with the event that is wrong. Returns the number of slices.
pub fn check(file: &str) -> usize {
    let file: Value = serde_json::from_str(file).expect("the file is JSON");
    let file = file.as_object().expect("an object");
    let keys: Vec<&str> = file.keys().map(String::as_str).collect();
    assert_eq!(keys, ["displayTimeUnit", "traceEvents"]);
    assert!(["ms", "ns"].contains(&file["displayTimeUnit"].as_str().unwrap()));
    let mut process_names = BTreeMap::new();
    let mut tracks: BTreeMap<(u64, u64), String> = BTreeMap::new();
    let mut slices: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    let mut open: BTreeMap<(String, String), (String, f64)> = BTreeMap::new();
    let mut closed = BTreeSet::new();
    for event in file["traceEvents"].as_array().expect("an array") {
        let event = event.as_object().expect("an event is an object");
        let phase = text(event, "ph");
        let keys: Vec<&str> = event.keys().map(String::as_str).collect();
        assert_eq!(keys, fields(phase), "fields of {event:?}");
        let track = (integer(event, "pid"), integer(event, "tid"));
        let name = text(event, "name").to_owned();
        match phase {
            "M" => {
                let args = event["args"].as_object().unwrap();
                let given = text(args, "name").to_owned();
                assert_eq!(args.len(), 1, "{event:?}");
                let before = match name.as_str() {
                    "process_name" => process_names.insert(track.0, given),
                    "thread_name" => tracks.insert(track, given),
                    other => panic!("metadata {other}"),
                };
                assert!(before.is_none(), "named twice: {event:?}");
            }
            "X" => {
                assert!(event["args"].is_object());
                assert!(tracks.contains_key(&track), "a track without a name: {event:?}");
                text(event, "cat");
                let (ts, dur) = (number(event, "ts"), number(event, "dur"));
                slices.entry(track).or_default().push((ts, ts + dur));
            }
            _ => {
                let key = (text(event, "cat").to_owned(), text(event, "id").to_owned());
                assert!(key.1.starts_with("0x") && u64::from_str_radix(&key.1[2..], 16).is_ok());
                let ts = number(event, "ts");
                if phase == "b" {
                    assert!(!closed.contains(&key), "an id that is used again: {event:?}");
                    let twice = open.insert(key, (name, ts));
                    assert!(twice.is_none(), "begun twice: {event:?}");
                } else {
                    let begun = open.remove(&key);
                    let (begun, from) = begun.unwrap_or_else(|| panic!("no beginning: {event:?}"));
                    assert!(begun == name && from <= ts, "{event:?} began {begun} at {from}");
                    closed.insert(key);
                }
            }
        }
        assert!(process_names.contains_key(&track.0), "a process without a name: {event:?}");
    }
    assert!(open.is_empty(), "without an end: {open:?}");
    let labels: BTreeSet<&String> = tracks.values().collect();
    assert_eq!(labels.len(), tracks.len(), "two tracks of one name: {tracks:?}");
    // Allows a rounding error of a thousandth of a nanosecond.
    for (track, slices) in &slices {
        for pair in slices.windows(2) {
            let ((_, end), (next, _)) = (pair[0], pair[1]);
            assert!(next >= end - 1e-6, "slices of track {track:?} overlap: {pair:?}");
        }
    }
    slices.values().map(Vec::len).sum()
}
