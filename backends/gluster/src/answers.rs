//! The metadata cache: names and attributes that are kept in this process, for several frontends of
//! one client.
//!
//! Servers do not send a client messages about its own changes, so that its frontends, which do not
//! learn of each other's changes, cache nothing. All of their changes come through here. An answer
//! holds until this client begins or ends a change of its subject, until a server reports a change
//! by another client, and at most for the time for which servers report changes.
//!
//! No invalidation is necessary: an answer records a moment before its query, and holds while the
//! last change is older. It is only used for callers with the user and the groups of the original
//! caller.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::upcalls::{UpcallInbox, UpcallSequence};
use crate::volume::Gfid;

/// Maximum number of inodes, so that their references take at most 40 MB. Beyond it, inodes whose
/// answers do not hold any more are searched for, at most once in [`SEARCH_EVERY`].
const FILES: usize = 1 << 15;
/// Maximum number of names.
const NAMES: usize = 1 << 16;
const SEARCH_EVERY: Duration = Duration::from_secs(5);

/// Time for which attributes of a directory hold, and for which names in it hold without a check of
/// the directory: servers do not report every change of a directory.
pub(crate) const DIRECTORIES_HOLD: Duration = Duration::from_secs(1);

/// Number of places for the moments of own changes. Subjects that share a place seem to change
/// together.
const PLACES: usize = 1 << 15;

/// A caller, as the servers know it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallerIdentity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Arc<[u32]>,
}

/// The caller of a query, and a moment before the query.
#[derive(Clone, Debug)]
pub(crate) struct QueryContext {
    pub since: UpcallSequence,
    /// The same moment in the order of this client's changes.
    pub changes: u64,
    pub who: CallerIdentity,
}

/// A subject that this client changes.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum ChangeSubject<'a> {
    /// Attributes of an inode.
    Attributes(Gfid),
    /// The rights to use an inode.
    Rights(Gfid),
    /// A name in a directory.
    Name(Gfid, &'a [u8]),
}

/// The answers. An inode is kept with a reference `R`. libgfapi delivers messages about the inode
/// only while there is a reference.
pub(crate) struct MetadataCache<R> {
    inbox: Arc<UpcallInbox>,
    own: Arc<OwnChangeTimes>,
    kept: Mutex<CachedMetadata<R>>,
    /// Number of queries that were answered from the cache.
    answered: AtomicU64,
}

struct CachedMetadata<R> {
    files: HashMap<Gfid, CachedStat<R>>,
    dirs: HashMap<Gfid, CachedDirectory<R>>,
    /// Number of names.
    names: usize,
    searched: Option<Instant>,
}

struct CachedStat<R> {
    stat: libc::stat,
    lacks: AbsentXattrs,
    /// The directory whose listing contained the inode.
    listed_in: Option<Gfid>,
    query: QueryContext,
    until: Instant,
    _reference: R,
}

/// Extended attributes that programs often read, and that a file is known not to have.
#[derive(Clone, Default)]
struct AbsentXattrs {
    /// A bit for each of [`OFTEN_ASKED`].
    names: u8,
    /// A moment before the first of the queries.
    since: UpcallSequence,
    until: Option<Instant>,
}

/// The extended attributes that programs read of each file: ls(1) and cp(1), and a kernel before a
/// write. Servers report their changes, because md-cache has registered for that.
const OFTEN_ASKED: [&[u8]; 3] =
    [b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default"];

/// The bit of an attribute that programs often read.
pub(crate) fn bit_of(name: &[u8]) -> Option<u8> {
    OFTEN_ASKED.iter().position(|often| *often == name).map(|at| 1 << at)
}

struct CachedDirectory<R> {
    names: HashMap<Box<[u8]>, CachedChild>,
    /// The last time when the attributes of the directory were fetched from the servers.
    looked: Instant,
    _reference: R,
}

struct CachedChild {
    /// The inode; `None` if there was none.
    gfid: Option<Gfid>,
    query: QueryContext,
    until: Instant,
}

/// The result of a search for a name.
pub(crate) enum LookupAnswer {
    /// The inode.
    Inode(Gfid, libc::stat),
    /// The answer holds if the directory has not changed, which the caller must check on the
    /// servers first.
    LookAtDirectory,
    /// None.
    Unknown,
}

impl<R> MetadataCache<R> {
    pub fn new(inbox: Arc<UpcallInbox>) -> MetadataCache<R> {
        let kept = CachedMetadata {
            files: HashMap::new(),
            dirs: HashMap::new(),
            names: 0,
            searched: None,
        };
        let places = (0..PLACES).map(|_| AtomicU64::new(0)).collect();
        let own = Arc::new(OwnChangeTimes { inbox: Arc::clone(&inbox), places });
        MetadataCache { inbox, own, kept: Mutex::new(kept), answered: AtomicU64::new(0) }
    }

    /// The inode of a name, for the caller `who`.
    pub fn name(&self, who: &CallerIdentity, dir: Gfid, name: &[u8], now: Instant) -> LookupAnswer {
        let kept = self.lock();
        let Some(known) = kept.dirs.get(&dir) else { return LookupAnswer::Unknown };
        let Some(child) = known.names.get(name) else { return LookupAnswer::Unknown };
        if !self.has_name(dir, name, child, now) || child.query.who != *who {
            return LookupAnswer::Unknown;
        }
        // Frontends get no negative answers from here.
        let Some(gfid) = child.gfid else { return LookupAnswer::Unknown };
        let Some(stat) = self.stat(&kept, who, gfid, now) else { return LookupAnswer::Unknown };
        if now.duration_since(known.looked) >= DIRECTORIES_HOLD {
            return LookupAnswer::LookAtDirectory;
        }
        self.answered.fetch_add(1, Ordering::Relaxed);
        LookupAnswer::Inode(gfid, stat)
    }

    /// The attributes of an inode, for the caller `who`.
    pub fn find_attributes(
        &self,
        who: &CallerIdentity,
        gfid: Gfid,
        now: Instant,
    ) -> Option<libc::stat> {
        let stat = self.stat(&self.lock(), who, gfid, now)?;
        self.answered.fetch_add(1, Ordering::Relaxed);
        Some(stat)
    }

    /// The inode of a name, and true if it is a directory, or `Some(None)` if the name is missing,
    /// for any caller; `None` if it is unknown.
    pub fn child(&self, dir: Gfid, name: &[u8], now: Instant) -> Option<Option<(Gfid, bool)>> {
        let kept = self.lock();
        let child = kept.dirs.get(&dir)?.names.get(name)?;
        if !self.has_name(dir, name, child, now) {
            return None;
        }
        let Some(gfid) = child.gfid else { return Some(None) };
        // The kind never changes, so that old attributes have it, too.
        let mode = kept.files.get(&gfid)?.stat.st_mode;
        Some(Some((gfid, mode & libc::S_IFMT == libc::S_IFDIR)))
    }

    /// Keeps attributes until `until`. Attributes from a listing hold only until another client
    /// changes the directory: that client may have begun the change before, and then they may
    /// belong to another inode.
    pub fn keep_attributes(
        &self,
        (gfid, stat, listed_in): (Gfid, &libc::stat, Option<Gfid>),
        query: &QueryContext,
        until: Instant,
        reference: R,
    ) {
        let mut kept = self.lock();
        let room = kept.files.len() < FILES || kept.files.contains_key(&gfid);
        let old = if room { None } else { self.make_room(&mut kept) };
        let (stat, query) = (*stat, query.clone());
        let lacks = kept.files.get(&gfid).map(|old| old.lacks.clone()).unwrap_or_default();
        let file = CachedStat { stat, lacks, listed_in, query, until, _reference: reference };
        let replaced = kept.files.insert(gfid, file);
        drop(kept);
        // The references are dropped outside of the lock, because they call libgfapi.
        drop((old, replaced));
    }

    /// True if an inode is known to lack an extended attribute.
    pub fn lacks(&self, gfid: Gfid, name: &[u8], now: Instant) -> bool {
        let Some(bit) = bit_of(name) else { return false };
        let kept = self.lock();
        let file = kept.files.get(&gfid);
        let lacks = file
            .is_some_and(|file| file.lacks.names & bit != 0 && self.holds(gfid, &file.lacks, now));
        if lacks {
            self.answered.fetch_add(1, Ordering::Relaxed);
        }
        lacks
    }

    /// Records that an inode, whose attributes are kept, has no extended attribute of this name, by
    /// an answer of the servers to a query after `since`.
    pub fn note_lack(&self, gfid: Gfid, name: &[u8], since: UpcallSequence, until: Instant) {
        let Some(bit) = bit_of(name) else { return };
        let mut kept = self.lock();
        let Some(file) = kept.files.get_mut(&gfid) else { return };
        let new = AbsentXattrs { names: bit, since, until: Some(until) };
        let known = &mut file.lacks;
        match self.holds(gfid, known, Instant::now()) {
            true => known.names |= bit,
            false => *known = new,
        }
    }

    fn holds(&self, gfid: Gfid, lacks: &AbsentXattrs, now: Instant) -> bool {
        lacks.until.is_some_and(|until| now < until)
            && !self.inbox.has_report_since(gfid, lacks.since)
            && !lacks.since.is_before(self.place(ChangeSubject::Attributes(gfid)))
    }

    /// Records that a directory was fetched from the servers. True if
    /// [`keep_dir`](MetadataCache::keep_dir) needs a reference to the directory before names in it
    /// can be kept.
    pub fn record_fetch(&self, dir: Gfid, now: Instant) -> bool {
        match self.lock().dirs.get_mut(&dir) {
            Some(dir) => {
                dir.looked = now;
                false
            }
            None => true,
        }
    }

    /// Keeps a directory, so that names in it can be kept.
    pub fn keep_dir(&self, dir: Gfid, now: Instant, reference: R) {
        let new = CachedDirectory { names: HashMap::new(), looked: now, _reference: reference };
        let mut kept = self.lock();
        let old = if kept.dirs.len() < FILES { None } else { self.make_room(&mut kept) };
        let replaced = kept.dirs.insert(dir, new);
        kept.names -= replaced.as_ref().map_or(0, |dir| dir.names.len());
        drop(kept);
        drop((old, replaced));
    }

    /// Keeps a name, or the fact that it is missing, until `until`, if the directory is kept.
    pub fn keep_name(
        &self,
        (dir, name): (Gfid, &[u8]),
        gfid: Option<Gfid>,
        query: &QueryContext,
        until: Instant,
    ) {
        let mut kept = self.lock();
        let old = if kept.names < NAMES { None } else { self.make_room(&mut kept) };
        if let Some(dir) = kept.dirs.get_mut(&dir) {
            let child = CachedChild { gfid, query: query.clone(), until };
            let is_new = dir.names.insert(name.into(), child).is_none();
            kept.names += usize::from(is_new);
        }
        drop(kept);
        drop(old);
    }

    /// Records that this client changes the subjects, until the result is dropped.
    pub fn begin_change<'a>(&self, things: Vec<ChangeSubject<'a>>) -> OwnChangeGuard<'a> {
        let change = OwnChangeGuard { own: Arc::clone(&self.own), things };
        change.mark();
        change
    }

    /// True if this client has changed an inode since the query.
    pub fn has_changed(&self, gfid: Gfid, query: &QueryContext) -> bool {
        query.since.is_before(self.place(ChangeSubject::Attributes(gfid)))
    }

    /// The numbers of inodes, of names, and of queries that were answered from the cache.
    pub fn counts(&self) -> [u64; 3] {
        let kept = self.lock();
        let (files, names) = (kept.files.len() as u64, kept.names as u64);
        [files, names, self.answered.load(Ordering::Relaxed)]
    }

    fn stat(
        &self,
        kept: &CachedMetadata<R>,
        who: &CallerIdentity,
        gfid: Gfid,
        now: Instant,
    ) -> Option<libc::stat> {
        let file = kept.files.get(&gfid)?;
        (self.has_attributes(gfid, file, now) && file.query.who == *who).then_some(file.stat)
    }

    fn has_attributes(&self, gfid: Gfid, file: &CachedStat<R>, now: Instant) -> bool {
        now < file.until
            && !self.inbox.has_report_since(gfid, file.query.since)
            && !file.listed_in.is_some_and(|dir| self.inbox.has_report_since(dir, file.query.since))
            && !file.query.since.is_before(self.place(ChangeSubject::Attributes(gfid)))
    }

    fn has_name(&self, dir: Gfid, name: &[u8], child: &CachedChild, now: Instant) -> bool {
        let since = child.query.since;
        now < child.until
            && !self.inbox.has_report_since(dir, since)
            && !child.gfid.is_some_and(|gfid| self.inbox.has_report_since(gfid, since))
            && !since.is_before(self.place(ChangeSubject::Name(dir, name)))
    }

    /// Removes answers that do not hold any more, or everything. Returns the removed references.
    fn make_room(&self, kept: &mut CachedMetadata<R>) -> Option<ReleasedReferences<R>> {
        let now = Instant::now();
        let mut removed = ReleasedReferences { files: Vec::new(), dirs: HashMap::new() };
        if kept.searched.is_none_or(|at| now.duration_since(at) >= SEARCH_EVERY) {
            kept.searched = Some(now);
            let old = kept.files.extract_if(|gfid, file| !self.has_attributes(*gfid, file, now));
            removed.files.extend(old.map(|(_, file)| file));
            for (dir, known) in &mut kept.dirs {
                known.names.retain(|name, child| self.has_name(*dir, name, child, now));
            }
            let old = kept.dirs.extract_if(|_, dir| dir.names.is_empty());
            removed.dirs.extend(old);
            kept.names = kept.dirs.values().map(|dir| dir.names.len()).sum();
        }
        if kept.files.len() >= FILES || kept.dirs.len() >= FILES || kept.names >= NAMES {
            removed.files.extend(kept.files.drain().map(|(_, file)| file));
            removed.dirs.extend(kept.dirs.drain());
            kept.names = 0;
        }
        Some(removed)
    }

    fn place(&self, thing: ChangeSubject<'_>) -> &AtomicU64 {
        self.own.place(thing)
    }

    fn lock(&self) -> MutexGuard<'_, CachedMetadata<R>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn hash(thing: ChangeSubject<'_>) -> usize {
    let mut hasher = DefaultHasher::new();
    thing.hash(&mut hasher);
    hasher.finish() as usize
}

/// References to give back.
struct ReleasedReferences<R> {
    files: Vec<CachedStat<R>>,
    dirs: HashMap<Gfid, CachedDirectory<R>>,
}

/// The moments of changes by this client.
struct OwnChangeTimes {
    inbox: Arc<UpcallInbox>,
    /// The moment of the last change of any subject in a place.
    places: Box<[AtomicU64]>,
}

impl OwnChangeTimes {
    fn place(&self, thing: ChangeSubject<'_>) -> &AtomicU64 {
        &self.places[hash(thing) % PLACES]
    }
}

/// Subjects that this client is changing: the change may become visible at any time until the
/// answer.
pub(crate) struct OwnChangeGuard<'a> {
    own: Arc<OwnChangeTimes>,
    things: Vec<ChangeSubject<'a>>,
}

impl OwnChangeGuard<'_> {
    fn mark(&self) {
        let OwnChangeTimes { inbox, .. } = &*self.own;
        for &thing in &self.things {
            match thing {
                // A change of rights may also be a change of the permission to search a directory.
                ChangeSubject::Rights(gfid) => inbox.note_rights(gfid),
                _ => inbox.note(self.own.place(thing)),
            }
        }
    }
}

impl Drop for OwnChangeGuard<'_> {
    fn drop(&mut self) {
        self.mark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::zeroed_stat;

    const D: Gfid = [1; 16];
    const F: Gfid = [2; 16];
    const LONG: Duration = Duration::from_secs(60);

    /// Makes a cache with the name `f` of a file.
    fn make_answers() -> (MetadataCache<()>, QueryContext) {
        let inbox: Arc<UpcallInbox> = Arc::default();
        let query = QueryContext { since: inbox.now(), changes: 0, who: CallerIdentity::default() };
        let answers = MetadataCache::new(inbox);
        keep(&answers, &query);
        (answers, query)
    }

    fn keep(answers: &MetadataCache<()>, query: &QueryContext) {
        let now = Instant::now();
        if answers.record_fetch(D, now) {
            answers.keep_dir(D, now, ());
        }
        answers.keep_attributes((F, &zeroed_stat(), None), query, now + LONG, ());
        answers.keep_name((D, b"f"), Some(F), query, now + LONG);
    }

    fn has(answers: &MetadataCache<()>) -> (bool, bool) {
        let (who, now) = (CallerIdentity::default(), Instant::now());
        let name = matches!(answers.name(&who, D, b"f", now), LookupAnswer::Inode(F, _));
        (name, answers.find_attributes(&who, F, now).is_some())
    }

    #[test]
    fn a_file_is_known_to_lack_attributes_until_somebody_changes_it() {
        let (answers, query) = make_answers();
        let [capability, acl, own] =
            [&b"security.capability"[..], b"system.posix_acl_access", b"user.a"];
        let now = Instant::now();
        let lacks = |answers: &MetadataCache<()>| {
            [capability, acl, own].map(|name| answers.lacks(F, name, now))
        };
        let note = |name| answers.note_lack(F, name, answers.inbox.now(), now + LONG);
        note(capability);
        assert_eq!(lacks(&answers), [true, false, false]);
        note(acl);
        note(own);
        answers.note_lack(D, capability, answers.inbox.now(), now + LONG);
        assert!(!answers.lacks(D, capability, now), "nothing else is known of it");
        assert!(!answers.lacks(F, capability, now + LONG));
        // New attributes of the same file keep this knowledge.
        keep(&answers, &query);
        assert_eq!(lacks(&answers), [true, true, false]);
        let change = answers.begin_change(vec![ChangeSubject::Attributes(F)]);
        assert_eq!(lacks(&answers), [false; 3]);
        // An answer during the change may be older than the change.
        note(acl);
        drop(change);
        assert_eq!(lacks(&answers), [false; 3]);
        note(acl);
        assert_eq!(lacks(&answers), [false, true, false]);
        answers.inbox.put(F, 1);
        assert_eq!(lacks(&answers), [false; 3]);
    }

    #[test]
    fn an_answer_holds_until_this_client_begins_or_ends_a_change() {
        let (answers, _) = make_answers();
        assert_eq!((has(&answers), answers.counts()), ((true, true), [1, 1, 2]));
        drop(
            answers
                .begin_change(vec![ChangeSubject::Name(D, b"other"), ChangeSubject::Attributes(D)]),
        );
        assert_eq!(has(&answers), (true, true));
        let change = answers.begin_change(vec![ChangeSubject::Name(D, b"f")]);
        assert_eq!(has(&answers), (false, true));
        // An answer during the change may be older than the change.
        let query =
            QueryContext { since: answers.inbox.now(), changes: 0, who: CallerIdentity::default() };
        keep(&answers, &query);
        assert_eq!(has(&answers), (true, true));
        drop(change);
        assert_eq!(has(&answers), (false, true));
        drop(answers.begin_change(vec![ChangeSubject::Attributes(F)]));
        assert_eq!(has(&answers), (false, false));
    }

    #[test]
    fn an_answer_holds_until_a_server_tells_of_a_change() {
        for changed in [D, F] {
            let (answers, old) = make_answers();
            answers.inbox.put(changed, 1);
            assert_eq!(has(&answers), (false, changed == D));
            // The message has overtaken this answer.
            keep(&answers, &old);
            assert_eq!(has(&answers), (false, changed == D));
            let query = QueryContext {
                since: answers.inbox.now(),
                changes: 0,
                who: CallerIdentity::default(),
            };
            keep(&answers, &query);
            assert_eq!(has(&answers), (true, true));
            answers.inbox.put_all();
            assert_eq!(has(&answers), (false, false));
        }
    }

    #[test]
    fn a_name_holds_until_the_rights_to_its_directory_change() {
        let (answers, _) = make_answers();
        drop(answers.begin_change(vec![ChangeSubject::Rights(D)]));
        assert_eq!(has(&answers), (false, true));
    }

    #[test]
    fn attributes_of_a_listing_hold_until_another_client_changes_the_directory() {
        let (answers, query) = make_answers();
        let now = Instant::now();
        answers.inbox.put([7; 16], 0);
        assert_eq!(has(&answers), (true, true));
        answers.keep_attributes((F, &zeroed_stat(), Some([7; 16])), &query, now + LONG, ());
        assert_eq!(has(&answers), (false, false));
        let query = QueryContext { since: answers.inbox.now(), ..query };
        answers.keep_attributes((F, &zeroed_stat(), Some([7; 16])), &query, now + LONG, ());
        assert_eq!(has(&answers), (true, true));
    }

    #[test]
    fn an_answer_is_for_the_user_and_the_groups_who_asked() {
        let (answers, _) = make_answers();
        let now = Instant::now();
        let user = CallerIdentity { uid: 1, ..CallerIdentity::default() };
        for who in [user, CallerIdentity { groups: [1].into(), ..CallerIdentity::default() }] {
            assert!(answers.find_attributes(&who, F, now).is_none());
            assert!(matches!(answers.name(&who, D, b"f", now), LookupAnswer::Unknown));
        }
        // A change needs the inode of a name independently of the caller that found it.
        assert_eq!(answers.child(D, b"f", now), Some(Some((F, false))));
    }

    #[test]
    fn that_a_name_is_missing_is_known_until_it_is_made() {
        let (answers, query) = make_answers();
        let now = Instant::now();
        answers.keep_name((D, b"g"), None, &query, now + LONG);
        assert_eq!((answers.child(D, b"g", now), answers.child(D, b"h", now)), (Some(None), None));
        assert!(matches!(
            answers.name(&CallerIdentity::default(), D, b"g", now),
            LookupAnswer::Unknown
        ));
        drop(answers.begin_change(vec![ChangeSubject::Name(D, b"g")]));
        assert_eq!(answers.child(D, b"g", now), None);
    }

    #[test]
    fn names_hold_while_the_directory_is_looked_at_every_second() {
        let (answers, _) = make_answers();
        let (who, later) = (CallerIdentity::default(), Instant::now() + DIRECTORIES_HOLD);
        assert!(matches!(answers.name(&who, D, b"f", later), LookupAnswer::LookAtDirectory));
        assert!(!answers.record_fetch(D, later));
        assert!(matches!(answers.name(&who, D, b"f", later), LookupAnswer::Inode(..)));
        assert!(matches!(answers.name(&who, D, b"f", later + LONG), LookupAnswer::Unknown));
        assert!(answers.find_attributes(&who, F, later + LONG).is_none());
    }

    #[test]
    fn answers_are_bounded_and_old_ones_give_room() {
        let (answers, query) = make_answers();
        let now = Instant::now();
        let gfid = |number: usize| (number as u128 + 9).to_ne_bytes();
        for number in 0..2 * FILES {
            answers.keep_attributes((gfid(number), &zeroed_stat(), None), &query, now + LONG, ());
        }
        for number in 0..2 * NAMES {
            let name = number.to_ne_bytes();
            answers.keep_name((D, &name), Some(gfid(number)), &query, now + LONG);
        }
        let [files, names, _] = answers.counts();
        assert!(files <= FILES as u64 && names <= NAMES as u64, "{files} {names}");
    }
}
