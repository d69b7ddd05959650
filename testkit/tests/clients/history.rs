//! The values that one fact has had, with their times.

use std::time::{Duration, Instant};

/// A look by a client: its answer was true at some time between the start of the look and its end,
/// or a promise earlier.
#[derive(Clone, Copy, Debug)]
pub struct ClientLook {
    /// The client.
    pub by: usize,
    pub begun: Instant,
    pub ended: Instant,
    /// The longest time for which this client may not know of a change by another one.
    pub promise: Duration,
}

impl ClientLook {
    /// Returns this look, without a time for changes to arrive: of data, after the file was opened.
    pub fn without_delay(self) -> ClientLook {
        ClientLook { promise: Duration::ZERO, ..self }
    }
}

#[derive(Debug)]
struct FactVersion<T> {
    value: T,
    /// The start of the change that made it.
    from: Instant,
    /// The end of the change that replaced it, and the client of that change.
    until: Option<(Instant, usize)>,
}

/// The values of a fact, the oldest first. While a change runs, the value before and after it are
/// both true.
#[derive(Debug)]
pub struct FactHistory<T>(Vec<FactVersion<T>>);

impl<T: PartialEq> FactHistory<T> {
    pub fn new(value: T, from: Instant) -> FactHistory<T> {
        FactHistory(vec![FactVersion { value, from, until: None }])
    }

    /// A change to `value` begins.
    pub fn begin(&mut self, value: T, now: Instant) {
        self.0.push(FactVersion { value, from: now, until: None });
    }

    /// The change by a client has ended.
    pub fn end(&mut self, by: usize, now: Instant) {
        let (_, replaced) = self.0.split_last_mut().expect("there is a value");
        let open = replaced.iter_mut().filter(|version| version.until.is_none());
        open.for_each(|version| version.until = Some((now, by)));
    }

    /// The present value.
    pub fn latest_value(&self) -> &T {
        &self.0.last().expect("there is a value").value
    }

    /// The values that a look may have found. A client knows its own changes at once.
    pub fn visible_values(&self, look: ClientLook) -> impl Iterator<Item = &T> {
        let is_seen = move |version: &&FactVersion<T>| {
            let is_early = version.from <= look.ended;
            is_early
                && version.until.is_none_or(|(until, by)| {
                    let late = if by == look.by { Duration::ZERO } else { look.promise };
                    until + late >= look.begun
                })
        };
        self.0.iter().filter(is_seen).map(|version| &version.value)
    }

    /// All values until the end of a look.
    pub fn values_until(&self, look: ClientLook) -> impl Iterator<Item = &T> {
        self.0
            .iter()
            .filter(move |version| version.from <= look.ended)
            .map(|version| &version.value)
    }

    /// True if a look may have found `value`.
    pub fn has(&self, look: ClientLook, value: &T) -> bool {
        self.visible_values(look).any(|seen| seen == value)
    }

    /// The time since `value` is not true any more, if it ever was.
    pub fn age(&self, value: &T, now: Instant) -> Option<Duration> {
        let last = self.0.iter().rfind(|version| version.value == *value)?;
        Some(last.until.map_or(Duration::ZERO, |(until, _)| now.saturating_duration_since(until)))
    }
}

#[test]
fn a_replaced_value_may_be_seen_for_the_time_of_the_promise_and_never_by_who_replaced_it() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let mut fact = FactHistory::new('a', at(0));
    fact.begin('b', at(100));
    let look = |by, begun, ended| ClientLook {
        by,
        begun: at(begun),
        ended: at(ended),
        promise: Duration::from_millis(1000),
    };
    // The change runs.
    assert!(fact.has(look(1, 150, 160), &'a') && fact.has(look(1, 150, 160), &'b'));
    assert!(!fact.has(look(1, 10, 99), &'b'));
    fact.end(0, at(200));
    assert!(fact.has(look(1, 1200, 1300), &'a') && !fact.has(look(1, 1201, 1300), &'a'));
    assert!(fact.has(look(0, 200, 300), &'a') && !fact.has(look(0, 201, 300), &'a'));
    assert!(!fact.has(look(1, 201, 300).without_delay(), &'a'));
    assert_eq!(
        (fact.latest_value(), fact.age(&'a', at(300))),
        (&'b', Some(Duration::from_millis(100)))
    );
    assert_eq!((fact.age(&'b', at(300)), fact.age(&'c', at(300))), (Some(Duration::ZERO), None));
}
