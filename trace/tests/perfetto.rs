//! Timelines follow the format for any requests.

mod trace_format;

use defuse_probe::Op;
use defuse_trace::{CompletedRequest, FuseConnection, RequestNames, TraceTimeline};
use proptest::prelude::*;

fn request() -> impl Strategy<Value = CompletedRequest> {
    let times = (0..3000u64, 0..500u64, 0..500u64, 0..2000u64);
    let who = (prop::option::of(1..4u32), any::<bool>(), prop::bool::weighted(0.8));
    (times, who, ".{0,12}").prop_map(|(times, (taker, background, seen), comm)| {
        let (created, waited, pending, served) = times;
        let sent_ns = 1_000_000 + created + waited;
        CompletedRequest {
            unique: 0,
            connection: 43,
            op: Op::READ,
            nodeid: 1,
            child: None,
            offset: 0,
            size: 4096,
            request_len: 80,
            reply_len: 16,
            error: 0,
            background,
            created_ns: seen.then_some(1_000_000 + created),
            sent_ns,
            taken_ns: taker.map(|_| sent_ns + pending),
            ended_ns: sent_ns + pending + served,
            pid: 1,
            comm,
            taker,
            names: RequestNames::default(),
        }
    })
}

fn timeline(events: &[CompletedRequest]) -> String {
    let connection = FuseConnection { id: 43, mounts: Vec::new(), processes: Vec::new() };
    let mut timeline = TraceTimeline::begin(Vec::new(), &connection).unwrap();
    for event in events {
        timeline.add(event, Some("name \"of\" a\nfile \u{1}")).unwrap();
    }
    String::from_utf8(timeline.end().unwrap()).unwrap()
}

proptest! {
    /// Covers several requests at once on one thread, requests without an observed read, and
    /// requests that began before the first end.
    #[test]
    fn every_event_is_well_formed_and_no_slices_of_a_track_overlap(
        mut events in prop::collection::vec(request(), 0..60)
    ) {
        events.sort_by_key(|event| event.ended_ns);
        for (number, event) in events.iter_mut().enumerate() {
            event.unique = 2 * number as u64 + 2;
        }
        prop_assert_eq!(trace_format::check(&timeline(&events)), events.len());
    }
}

#[test]
#[should_panic(expected = "overlap")]
fn the_check_detects_overlapping_slices() {
    let slice = |ts: u32| {
        format!(
            r#"{{"ph":"X","cat":"c","name":"READ","pid":1,"tid":2,"ts":{ts},"dur":5.0,"args":{{}}}}"#
        )
    };
    let name = |what: &str| {
        format!(r#"{{"ph":"M","name":"{what}","pid":1,"tid":2,"args":{{"name":"x"}}}}"#)
    };
    let events = [name("process_name"), name("thread_name"), slice(10), slice(12)].join(",");
    trace_format::check(&format!(r#"{{"displayTimeUnit":"ns","traceEvents":[{events}]}}"#));
}
