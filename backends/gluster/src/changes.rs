//! Changes that this client makes, and the attributes that the kernel got last.
//!
//! An answer of the servers holds as long as this client changes nothing. A write extends a known
//! size, as the kernel does by itself. So a change of attributes can be answered without another
//! question, and the contents that came with an open file are not read after this client has
//! changed them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use defuse_fs::{Attr, Timestamp};

use crate::upcalls::UpcallSequence;
use crate::volume::Gfid;

/// Number of places. Inodes that share a place seem to change together.
const PLACES: usize = 256;

/// Number of attributes in a place.
const KNOWN: usize = 32;

/// The changes of this client.
#[derive(Debug)]
pub struct ClientChanges {
    /// Number of beginnings and ends of changes.
    moments: AtomicU64,
    /// The last beginning or end of a rename, which changes attributes of inodes that this client
    /// may not know.
    renames: AtomicU64,
    places: [Mutex<ChangePlace>; PLACES],
}

#[derive(Debug, Default)]
struct ChangePlace {
    /// The last beginning or end of a change.
    last: u64,
    in_flight: u32,
    known: HashMap<Gfid, KnownAttributes>,
}

/// Attributes that the kernel got, by a query that began after `since`.
#[derive(Clone, Copy, Debug)]
struct KnownAttributes {
    attr: Attr,
    since: u64,
    /// The answer of the servers, if these are all of its attributes.
    answer: Option<ServerAnswer>,
}

/// An answer of the servers with attributes.
#[derive(Clone, Copy, Debug)]
struct ServerAnswer {
    at: Instant,
    /// A moment before the query, in the order of messages of servers.
    reported: UpcallSequence,
    /// The directory whose listing contained the inode.
    listed_in: Option<Gfid>,
}

/// Attributes as the servers have sent them, and the time since then.
#[derive(Clone, Copy, Debug)]
pub struct RecentAttributes {
    pub attr: Attr,
    pub age: Duration,
    /// A moment before the query, in the order of messages of servers.
    pub reported: UpcallSequence,
    /// The directory whose listing contained the inode: after a change in it, the attributes may be
    /// those of another one.
    pub listed_in: Option<Gfid>,
}

/// A change that this client makes, until it is dropped.
#[derive(Debug)]
pub struct ClientChange {
    changes: Arc<ClientChanges>,
    gfid: Gfid,
    begun: u64,
    /// The attributes before, if nothing else was changing them.
    before: Option<KnownAttributes>,
    /// The attributes after, if they are known.
    after: Option<(Attr, Option<ServerAnswer>)>,
}

/// A rename by this client, until it is dropped.
#[derive(Debug)]
pub struct ClientRename<'a>(&'a ClientChanges);

impl Drop for ClientRename<'_> {
    fn drop(&mut self) {
        self.0.record_rename();
    }
}

impl Default for ClientChanges {
    fn default() -> Self {
        let places = std::array::from_fn(|_| Mutex::default());
        ClientChanges { moments: AtomicU64::new(0), renames: AtomicU64::new(0), places }
    }
}

impl ClientChanges {
    /// This moment.
    pub fn now(&self) -> u64 {
        self.moments.load(Ordering::Acquire)
    }

    /// True if this client changes an inode, or has changed it after `since`.
    pub fn has_changed(&self, gfid: Gfid, since: u64) -> bool {
        self.place(gfid).has_changed(since)
    }

    /// Records attributes that the kernel gets, by a query that began after `since`, and after
    /// `reported` in the order of messages of servers, or from the listing of a directory.
    pub fn record_attributes(
        &self,
        gfid: Gfid,
        attr: &Attr,
        (since, reported, listed_in): (u64, UpcallSequence, Option<Gfid>),
    ) {
        let answer = Some(ServerAnswer { at: Instant::now(), reported, listed_in });
        let mut place = self.place(gfid);
        if place.has_changed(since) {
            place.known.remove(&gfid);
            return;
        }
        place.keep(gfid, KnownAttributes { attr: *attr, since, answer });
    }

    /// The attributes that the servers sent less than `valid` ago, if this client has changed
    /// nothing since.
    pub fn recent_attributes(&self, gfid: Gfid, valid: Duration) -> Option<RecentAttributes> {
        let known = self.place(gfid).known_attributes(gfid)?;
        let ServerAnswer { at, reported, listed_in } = known.answer?;
        let age = at.elapsed();
        let is_recent = age < valid && known.since >= self.renames.load(Ordering::Acquire);
        is_recent.then_some(RecentAttributes { attr: known.attr, age, reported, listed_in })
    }

    /// Records that the kernel is to request attributes again.
    pub fn expire_attributes(&self, gfid: Gfid) {
        if let Some(known) = self.place(gfid).known.get_mut(&gfid) {
            known.answer = None;
        }
    }

    /// Records that this client renames something, until the result is dropped.
    pub fn begin_rename(&self) -> ClientRename<'_> {
        self.record_rename();
        ClientRename(self)
    }

    fn record_rename(&self) {
        self.renames.fetch_max(self.advance(), Ordering::AcqRel);
    }

    /// True if the kernel still has the attributes `attr`, as far as they tell of a change of the
    /// data. Contents that are older than the attributes of the kernel would stay in its pages.
    pub fn still_has(&self, gfid: Gfid, attr: &Attr) -> bool {
        self.kernel_attributes(gfid).is_some_and(|known| has_same_data(&known, attr))
    }

    /// The attributes that the kernel has.
    pub fn kernel_attributes(&self, gfid: Gfid) -> Option<Attr> {
        self.place(gfid).kernel_attributes(gfid)
    }

    /// Records that this client changes an inode, until the result is dropped.
    pub fn begin(self: &Arc<Self>, gfid: Gfid) -> ClientChange {
        let mut place = self.place(gfid);
        let known = place.known_attributes(gfid);
        place.in_flight += 1;
        let begun = self.advance();
        place.last = begun;
        ClientChange { changes: Arc::clone(self), gfid, begun, before: known, after: None }
    }

    fn advance(&self) -> u64 {
        self.moments.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn place(&self, gfid: Gfid) -> MutexGuard<'_, ChangePlace> {
        let place = &self.places[usize::from(gfid[14]) % PLACES];
        place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if two answers about an inode tell of no change of its data between them.
fn has_same_data(one: &Attr, other: &Attr) -> bool {
    (one.size, one.mtime, one.ctime) == (other.size, other.mtime, other.ctime)
}

impl ChangePlace {
    fn has_changed(&self, since: u64) -> bool {
        self.in_flight > 0 || self.last > since
    }

    fn kernel_attributes(&self, gfid: Gfid) -> Option<Attr> {
        self.known_attributes(gfid).map(|known| known.attr)
    }

    fn known_attributes(&self, gfid: Gfid) -> Option<KnownAttributes> {
        let known = self.known.get(&gfid)?;
        (!self.has_changed(known.since)).then_some(*known)
    }

    fn keep(&mut self, gfid: Gfid, known: KnownAttributes) {
        if self.known.len() >= KNOWN && !self.known.contains_key(&gfid) {
            self.known.clear();
        }
        self.known.insert(gfid, known);
    }
}

impl ClientChange {
    /// The attributes before the change.
    pub fn previous_attributes(&self) -> Option<Attr> {
        self.before.map(|known| known.attr)
    }

    /// Ends a write of the bytes before `end`.
    pub fn finish_write(mut self, end: u64) {
        let extend = |known: KnownAttributes| Attr { size: known.attr.size.max(end), ..known.attr };
        self.after = self.before.map(|known| (extend(known), None));
    }

    /// Ends a change with attributes that the kernel gets.
    pub fn finish_with(mut self, attr: Attr) {
        self.after = Some((attr, None));
    }

    /// Ends a change of a directory, in which a file was made at `time`. Nothing else of the
    /// directory has changed.
    pub fn finish_file_made(mut self, time: Timestamp) {
        let later = |old: Timestamp| old.max(time);
        self.after = self.before.map(|KnownAttributes { attr, answer, .. }| {
            let times = Attr { mtime: later(attr.mtime), ctime: later(attr.ctime), ..attr };
            (times, answer)
        });
    }
}

impl Drop for ClientChange {
    fn drop(&mut self) {
        let mut place = self.changes.place(self.gfid);
        let is_alone = place.last == self.begun;
        let since = self.changes.advance();
        (place.last, place.in_flight) = (since, place.in_flight - 1);
        match self.after {
            Some((attr, answer)) if is_alone => {
                place.keep(self.gfid, KnownAttributes { attr, since, answer });
            }
            // The result is unknown.
            _ => drop(place.known.remove(&self.gfid)),
        }
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::{Caller, FileKind, Ino, NewNode};

    use super::*;

    const F: Gfid = [1; 16];
    /// Another inode in the same place.
    const SAME: Gfid = [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2];

    fn report_sequence() -> UpcallSequence {
        crate::upcalls::UpcallInbox::default().now()
    }

    fn file(size: u64) -> Attr {
        let node = NewNode::new(FileKind::Regular, 0o644, Caller::default());
        Attr { size, ..Attr::for_new(Ino(1), &node) }
    }

    fn sizes(changes: &ClientChanges) -> Option<u64> {
        changes.kernel_attributes(F).map(|attr| attr.size)
    }

    #[test]
    fn a_write_extends_a_known_size_and_hides_older_answers() {
        let changes = Arc::new(ClientChanges::default());
        let before = changes.now();
        changes.record_attributes(F, &file(10), (before, report_sequence(), None));
        assert_eq!(sizes(&changes), Some(10));
        let write = changes.begin(F);
        assert!(changes.has_changed(F, changes.now()) && sizes(&changes).is_none());
        let during = changes.now();
        write.finish_write(25);
        assert_eq!(sizes(&changes), Some(25));
        changes.begin(F).finish_write(3);
        assert_eq!(sizes(&changes), Some(25));
        changes.record_attributes(F, &file(10), (during, report_sequence(), None));
        assert_eq!(sizes(&changes), None, "an answer from before the end of the write");
        assert!(changes.has_changed(F, before) && !changes.has_changed(F, changes.now()));
    }

    #[test]
    fn nothing_is_known_after_a_change_with_another_one_at_the_same_time_or_without_a_result() {
        let changes = Arc::new(ClientChanges::default());
        changes.record_attributes(F, &file(10), (changes.now(), report_sequence(), None));
        drop(changes.begin(F));
        assert_eq!(sizes(&changes), None);
        changes.record_attributes(F, &file(10), (changes.now(), report_sequence(), None));
        let (first, second) = (changes.begin(F), changes.begin(SAME));
        first.finish_write(99);
        assert_eq!(sizes(&changes), None);
        drop(second);
        assert_eq!(sizes(&changes), None);
        let change = changes.begin(F);
        assert_eq!(change.previous_attributes().map(|attr| attr.size), None);
        change.finish_with(file(7));
        assert_eq!(sizes(&changes), Some(7));
    }

    /// Old contents were served to a kernel that had the new size, and stayed in its pages.
    #[test]
    fn a_kernel_that_got_other_attributes_has_no_use_for_older_contents() {
        let changes = Arc::new(ClientChanges::default());
        let old = file(10);
        assert!(!changes.still_has(F, &old));
        changes.record_attributes(F, &old, (changes.now(), report_sequence(), None));
        assert!(changes.still_has(F, &old) && !changes.still_has(F, &file(11)));
        changes.record_attributes(F, &file(12), (changes.now(), report_sequence(), None));
        assert!(!changes.still_has(F, &old));
    }

    #[test]
    fn known_attributes_are_bounded() {
        let changes = Arc::new(ClientChanges::default());
        for number in 0..3 * KNOWN {
            let mut gfid = F;
            gfid[0] = number as u8;
            changes.record_attributes(gfid, &file(1), (changes.now(), report_sequence(), None));
        }
        assert!(changes.place(F).known.len() <= KNOWN);
    }

    /// A kernel asks for attributes again after each read, and for a directory after each change in
    /// it.
    #[test]
    fn recent_answers_hold_until_a_change_and_a_new_file_gives_its_time_to_the_directory() {
        let (changes, long) = (Arc::new(ClientChanges::default()), Duration::from_secs(1000));
        let record =
            || changes.record_attributes(F, &file(10), (changes.now(), report_sequence(), None));
        let recent = || changes.recent_attributes(F, long);
        record();
        assert_eq!(recent().map(|recent| recent.attr.size), Some(10));
        assert!(changes.recent_attributes(F, Duration::ZERO).is_none());
        changes.begin(F).finish_write(20);
        assert!(recent().is_none(), "the time of a write is unknown");
        record();
        let time = Timestamp { secs: i64::MAX, nanos: 3 };
        changes.begin(F).finish_file_made(time);
        changes.begin(F).finish_file_made(Timestamp { secs: 1, nanos: 0 });
        let made = recent().unwrap().attr;
        assert_eq!((made.mtime, made.ctime, made.size), (time, time, 10));
        let rename = changes.begin_rename();
        assert!(recent().is_none());
        record();
        drop(rename);
        assert!(recent().is_none(), "the query was during a rename");
        record();
        changes.expire_attributes(F);
        assert!(recent().is_none() && sizes(&changes) == Some(10));
    }
}
