//! Messages of servers about changes by other clients, until the upcall notifier takes them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::volume::Gfid;

/// Maximum number of inodes that wait to be passed on. Beyond it, all inodes count as changed.
const WAITING: usize = 1 << 16;

/// Number of places for the times of messages.
const PLACES: usize = 1024;

/// A moment in the order of all messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UpcallSequence(u64);

impl UpcallSequence {
    /// True if the last change of a place is newer than this moment.
    pub fn is_before(self, place: &AtomicU64) -> bool {
        place.load(Ordering::SeqCst) > self.0
    }
}

/// Messages that were not taken yet, and the moments when inodes were last in a message.
#[derive(Debug)]
pub struct UpcallInbox {
    state: Mutex<UpcallInboxState>,
    arrived: Condvar,
    /// Notified when messages are not needed any more.
    ended: Condvar,
    /// Number of messages.
    count: AtomicU64,
    /// The last message about any inode of a place. An inode that shares its place with a changed
    /// one counts as changed, which is correct but unnecessary.
    places: [AtomicU64; PLACES],
    /// The last message about all inodes.
    all: AtomicU64,
    /// Frontends know of the messages up to this one.
    passed_on: AtomicU64,
    /// The time when libgfapi was last polled for messages.
    turn: Mutex<Option<Instant>>,
    /// A request has come since the last call of [`is_used`](UpcallInbox::is_used).
    used: AtomicBool,
}

#[derive(Debug, Default)]
struct UpcallInboxState {
    reports: HashMap<Gfid, u64>,
    /// Names in directories.
    names: Vec<(Gfid, Box<[u8]>)>,
    lost: bool,
    ended: bool,
}

/// Messages that were taken.
#[derive(Debug, Default)]
pub struct UpcallBatch {
    /// Changed inodes, with the flags of all messages about them.
    pub reports: Vec<(Gfid, u64)>,
    /// Names in directories that frontends must not keep, although no inode has changed.
    pub names: Vec<(Gfid, Box<[u8]>)>,
    /// Any other inode may have changed, too.
    pub lost: bool,
    /// Messages are not needed any more.
    pub ended: bool,
    /// The moment when the messages were taken.
    pub until: UpcallSequence,
}

impl Default for UpcallInbox {
    fn default() -> Self {
        UpcallInbox {
            state: Mutex::default(),
            arrived: Condvar::new(),
            ended: Condvar::new(),
            count: AtomicU64::new(0),
            places: [const { AtomicU64::new(0) }; PLACES],
            all: AtomicU64::new(0),
            passed_on: AtomicU64::new(0),
            turn: Mutex::default(),
            used: AtomicBool::new(false),
        }
    }
}

impl UpcallInbox {
    /// Adds a message about an inode.
    pub fn put(&self, gfid: Gfid, flags: u64) {
        let mut state = self.lock();
        // The place is updated before the message can be taken: an answer that was recorded before
        // then is either seen as old, or recorded where the thread that takes the message finds it.
        self.places[place(gfid)].fetch_max(self.next(), Ordering::SeqCst);
        if state.reports.len() < WAITING || state.reports.contains_key(&gfid) {
            *state.reports.entry(gfid).or_default() |= flags;
        } else {
            state.lost = true;
            self.all.fetch_max(self.next(), Ordering::SeqCst);
        }
        drop(state);
        self.arrived.notify_one();
    }

    /// Adds a message about a name that this client has given to an inode.
    pub fn put_name(&self, dir: Gfid, name: &[u8]) {
        let mut state = self.lock();
        if state.names.len() < WAITING {
            state.names.push((dir, name.into()));
        } else {
            self.all.fetch_max(self.next(), Ordering::SeqCst);
            state.lost = true;
        }
        drop(state);
        self.arrived.notify_one();
    }

    /// Adds a message about all inodes.
    pub fn put_all(&self) {
        let mut state = self.lock();
        self.all.fetch_max(self.next(), Ordering::SeqCst);
        state.lost = true;
        drop(state);
        self.arrived.notify_one();
    }

    /// Takes all messages, after at most `wait`.
    pub fn take(&self, wait: Duration) -> UpcallBatch {
        let is_empty = |state: &mut UpcallInboxState| {
            state.reports.is_empty() && state.names.is_empty() && !state.lost && !state.ended
        };
        let waited = self.arrived.wait_timeout_while(self.lock(), wait, is_empty);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let (lost, ended) = (std::mem::take(&mut state.lost), state.ended);
        let (reports, names) = (state.reports.drain().collect(), std::mem::take(&mut state.names));
        UpcallBatch { reports, names, lost, ended, until: self.now() }
    }

    /// Records that frontends know of all messages until `until`.
    pub fn record_delivery(&self, until: UpcallSequence) {
        self.passed_on.store(until.0, Ordering::SeqCst);
    }

    /// True if a message about an inode has arrived that frontends may not know yet.
    pub fn is_behind(&self, gfid: Gfid) -> bool {
        self.has_report_since(gfid, UpcallSequence(self.passed_on.load(Ordering::SeqCst)))
    }

    /// Records that a request has come.
    pub fn record_use(&self) {
        // If each thread wrote, the cache line would move between processors.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// True if a request has come since the last call.
    pub fn is_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    /// The right to poll libgfapi for messages. While a thread holds it, no other thread has a
    /// message that is not in the inbox yet.
    pub fn lock_polling(&self) -> MutexGuard<'_, Option<Instant>> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        *turn = Some(Instant::now());
        turn
    }

    /// True if no thread has polled libgfapi for messages in the last `time`.
    pub fn is_due(&self, time: Duration) -> bool {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        turn.is_none_or(|queried| queried.elapsed() >= time)
    }

    /// Ends the inbox: messages are not needed any more.
    pub fn end(&self) {
        self.lock().ended = true;
        self.arrived.notify_one();
        self.ended.notify_all();
    }

    /// True if the inbox ends within `wait`.
    pub fn ends_within(&self, wait: Duration) -> bool {
        let waited = self.ended.wait_timeout_while(self.lock(), wait, |state| !state.ended);
        waited.unwrap_or_else(PoisonError::into_inner).0.ended
    }

    /// Records a change by this client for which no frontend needs a notification.
    pub fn note(&self, place: &AtomicU64) {
        place.fetch_max(self.next(), Ordering::SeqCst);
    }

    /// Records that this client changes the rights to use an inode.
    pub fn note_rights(&self, gfid: Gfid) {
        self.note(&self.places[place(gfid)]);
    }

    /// A new moment.
    pub fn advance(&self) -> UpcallSequence {
        UpcallSequence(self.next())
    }

    /// The present moment.
    pub fn now(&self) -> UpcallSequence {
        UpcallSequence(self.count.load(Ordering::SeqCst))
    }

    /// True if the inode may have changed after `since`.
    pub fn has_report_since(&self, gfid: Gfid, since: UpcallSequence) -> bool {
        let last = self.places[place(gfid)].load(Ordering::SeqCst);
        last.max(self.all.load(Ordering::SeqCst)) > since.0
    }

    fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn lock(&self) -> MutexGuard<'_, UpcallInboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of an inode. Identities are random numbers.
fn place(gfid: Gfid) -> usize {
    (usize::from(gfid[14]) << 8 | usize::from(gfid[15])) % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_has_changed_after_each_moment_before_its_message() {
        let inbox = UpcallInbox::default();
        let (a, b) = ([1; 16], [2; 16]);
        let before = inbox.now();
        inbox.put(a, 1);
        assert!(inbox.has_report_since(a, before) && !inbox.has_report_since(b, before));
        assert!(!inbox.has_report_since(a, inbox.now()));
        inbox.put_all();
        assert!(inbox.has_report_since(b, before));
        assert!(!inbox.has_report_since(b, inbox.now()));
    }

    #[test]
    fn frontends_are_behind_until_a_message_was_passed_on() {
        let (inbox, a, b) = (UpcallInbox::default(), [1; 16], [2; 16]);
        inbox.put(a, 1);
        assert!(inbox.is_behind(a) && !inbox.is_behind(b));
        let taken = inbox.take(Duration::ZERO);
        inbox.put(b, 1);
        assert!(inbox.is_behind(a));
        inbox.record_delivery(taken.until);
        assert!(!inbox.is_behind(a) && inbox.is_behind(b));
        inbox.put_all();
        inbox.record_delivery(inbox.take(Duration::ZERO).until);
        assert!(!inbox.is_behind(a) && !inbox.is_behind(b));
    }

    #[test]
    fn messages_about_one_inode_are_taken_once() {
        let inbox = UpcallInbox::default();
        inbox.put([1; 16], 1);
        inbox.put([1; 16], 4);
        let taken = inbox.take(Duration::from_secs(60));
        assert_eq!((taken.reports, taken.lost, taken.ended), (vec![([1; 16], 5)], false, false));
        assert!(!inbox.ends_within(Duration::from_millis(1)));
        inbox.end();
        assert!(inbox.take(Duration::from_secs(60)).ended);
        assert!(inbox.ends_within(Duration::from_secs(60)));
    }

    #[test]
    fn more_messages_than_there_is_room_for_are_about_all_inodes() {
        let inbox = UpcallInbox::default();
        let before = inbox.now();
        for number in 0..=WAITING as u128 {
            inbox.put(number.to_be_bytes(), 1);
        }
        let taken = inbox.take(Duration::ZERO);
        assert_eq!((taken.reports.len(), taken.lost), (WAITING, true));
        assert!(inbox.has_report_since([9; 16], before));
    }
}
