//! Pages, versions and names under a checker that tries interleavings and the orders in which
//! processors may show stores: a client reads whole data, which is not older than a change that was
//! answered before.
//!
//! `cargo test -p defuse-ring --test orders`
//!
//! The checker (loom) knows the memory model of C11, also where this machine is stricter. The tests
//! run the code of `src/`, over memory of the checker. The checker sees a few words of this memory:
//! all numbers of the protocols, and two or three of the words that they protect. The other words
//! have one value each.
//!
//! It finds no load that a processor makes speculatively, before an earlier load has decided what
//! to store. It tries no schedule with more than [`SWITCHES`] involuntary switches of threads. The
//! locks and the files of the server are stand-ins in the test, so that errors in
//! `frontends/shared` are left to the tests of `testkit` (`lanes_pages.rs`, `versions.rs`,
//! `shared_names.rs`).

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use defuse_ring::names::{
    ATTRIBUTES, AttributeStamp, FoundName, NameReader, NameVersions, NameWriter,
};
use defuse_ring::pages::{PAGE, PageReader, PageWriter, bytes_of};
use defuse_ring::published::{ReadableMemory, WritableMemory};
use defuse_ring::versions::{VersionReader, VersionWriter, VersionedItem};
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

/// The maximum number of involuntary switches of threads in a schedule. Errors need few.
const SWITCHES: usize = 2;

/// Bytes in one `put` that is no page of a file.
const MOST_KEPT: usize = 256;

/// Memory in words of 64 bits, as the server or a client sees it.
#[derive(Clone)]
struct OrderedMemory {
    inner: Arc<OrderedWords>,
    /// A server does not load from `seen`, where it finds what it has stored itself. The checker,
    /// which looks only at the last access before a store, would take that load for the last access
    /// and miss the loads of clients.
    is_server: bool,
}

struct OrderedWords {
    /// The words that the checker sees.
    seen: BTreeMap<usize, AtomicU64>,
    /// All words, except the words of pages.
    stored: Mutex<HashMap<usize, u64>>,
}

impl OrderedMemory {
    /// A server's memory with these words, of which the checker sees those at `seen`.
    fn new(words: &HashMap<usize, u64>, seen: impl IntoIterator<Item = usize>) -> OrderedMemory {
        let word = |at: usize| (at, AtomicU64::new(words.get(&at).copied().unwrap_or(0)));
        let seen = seen.into_iter().map(word).collect();
        let inner = Arc::new(OrderedWords { seen, stored: Mutex::new(words.clone()) });
        OrderedMemory { inner, is_server: true }
    }

    /// Memory of which the checker sees nothing.
    fn new_unseen() -> OrderedMemory {
        OrderedMemory::new(&HashMap::new(), [])
    }

    /// Returns this memory for a client.
    fn share_with_client(&self) -> OrderedMemory {
        OrderedMemory { inner: Arc::clone(&self.inner), is_server: false }
    }

    /// The words that are there.
    fn words(&self) -> HashMap<usize, u64> {
        self.inner.stored.lock().unwrap().clone()
    }

    fn word(&self, at: usize, order: Ordering) -> u64 {
        assert!(at.is_multiple_of(8), "a word at {at}");
        match self.inner.seen.get(&at) {
            Some(word) if !self.is_server => word.load(order),
            _ => self.inner.stored.lock().unwrap().get(&at).copied().unwrap_or(0),
        }
    }

    fn set_word(&self, at: usize, value: u64, order: Ordering) {
        assert!(at.is_multiple_of(8), "a word at {at}");
        self.inner.stored.lock().unwrap().insert(at, value);
        if let Some(word) = self.inner.seen.get(&at) {
            word.store(value, order);
        }
    }
}

impl ReadableMemory for OrderedMemory {
    fn load64(&self, at: usize) -> u64 {
        self.word(at, Self::LOADS)
    }

    fn load32(&self, at: usize) -> u32 {
        let word = self.word(at / 8 * 8, Self::LOADS).to_ne_bytes();
        u32::from_ne_bytes(word[at % 8..at % 8 + 4].try_into().unwrap())
    }

    fn copy(&self, at: usize, out: &mut [u8]) {
        for (word, out) in (at..).step_by(8).zip(out.chunks_mut(8)) {
            out.copy_from_slice(&self.word(word, Ordering::Relaxed).to_ne_bytes()[..out.len()]);
        }
    }

    /// Memory of which the checker sees nothing is also used outside of the checker.
    fn fence(&self, order: Ordering) {
        if !self.inner.seen.is_empty() {
            fence(order);
        }
    }
}

impl WritableMemory for OrderedMemory {
    fn store64(&self, at: usize, value: u64) {
        self.set_word(at, value, Self::STORES);
    }

    fn store32(&self, at: usize, value: u32) {
        let mut word = self.word(at / 8 * 8, Self::LOADS).to_ne_bytes();
        word[at % 8..at % 8 + 4].copy_from_slice(&value.to_ne_bytes());
        self.set_word(at / 8 * 8, u64::from_ne_bytes(word), Self::STORES);
    }

    fn add64(&self, at: usize, value: u64) {
        let sum = |sum: &mut u64| *sum = sum.wrapping_add(value);
        sum(self.inner.stored.lock().unwrap().entry(at).or_default());
        if let Some(word) = self.inner.seen.get(&at) {
            word.fetch_add(value, Self::ADDS);
        }
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        let value = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        for (word, seen) in self.inner.seen.range(at..at + bytes.len()) {
            seen.store(value(word - at), Ordering::Relaxed);
        }
        if bytes.len() <= MOST_KEPT {
            let words = (at..at + bytes.len()).step_by(8);
            self.inner.stored.lock().unwrap().extend(words.map(|word| (word, value(word - at))));
        }
    }

    fn give_back(&self, at: usize, len: usize) {
        for (_, seen) in self.inner.seen.range(at..at + len) {
            seen.store(0, Ordering::Relaxed);
        }
        self.inner.stored.lock().unwrap().retain(|word, _| !(at..at + len).contains(word));
    }
}

/// Tries all orders of `run`, and all schedules with few involuntary switches.
fn check(run: impl Fn() + Send + Sync + 'static) {
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = Some(SWITCHES);
    checker.check(run);
}

/// The fewest frames. Pages 0 and 16 share one.
const FRAMES: u32 = 16;
const STATE: usize = 64;
const SIZE: usize = 72;
const HEADS: usize = 4096;
/// Bytes that readers read: the two words of a page that the checker sees.
const READ: usize = 16;

/// Pages of a file of so many bytes, with page 0, and a reader.
fn pages(size: u64, first: [u64; 2]) -> (PageWriter<OrderedMemory>, PageReader<OrderedMemory>) {
    let frame = bytes_of(FRAMES) - FRAMES as usize * PAGE;
    let seen = [STATE, SIZE, HEADS, HEADS + 8, frame, frame + 8];
    let memory = OrderedMemory::new(&HashMap::new(), seen);
    let client = memory.share_with_client();
    let mut pages = PageWriter::from_memory(memory, FRAMES);
    pages.write_page(0, &page(first));
    pages.publish_length(size);
    (pages, PageReader::from_memory(client, FRAMES))
}

fn page(words: [u64; 2]) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    page[..8].copy_from_slice(&words[0].to_ne_bytes());
    page[8..READ].copy_from_slice(&words[1].to_ne_bytes());
    page
}

/// Reads two words of a page. Returns the number of bytes, too.
fn read(reader: &PageReader<OrderedMemory>, page: u64) -> Option<(usize, [u64; 2])> {
    let mut out = [0; READ];
    let len = reader.read(page * PAGE as u64, &mut out)?;
    Some((len, [0, 8].map(|at| u64::from_ne_bytes(out[at..at + 8].try_into().unwrap()))))
}

#[test]
fn a_page_is_read_whole_while_others_take_its_place() {
    check(|| {
        let (mut pages, reader) = pages(1 << 20, [1, 1]);
        let server = thread::spawn(move || {
            pages.write_page(0, &page([2, 2]));
            pages
        });
        if let Some((len, words)) = read(&reader, 0) {
            assert!(len == READ && (words == [1, 1] || words == [2, 2]), "{words:?}");
        }
        let _pages = server.join().unwrap();
        assert_eq!(read(&reader, 0), Some((READ, [2, 2])));
    });
}

#[test]
fn no_page_is_taken_for_another_one_in_its_frame() {
    check(|| {
        let (mut pages, reader) = pages(1 << 20, [1, 1]);
        let server = thread::spawn(move || {
            pages.write_page(FRAMES.into(), &page([2, 2]));
            pages
        });
        let [first, other] = [0, FRAMES.into()].map(|number| read(&reader, number));
        assert!(matches!(first, None | Some((READ, [1, 1]))), "{first:?}");
        assert!(matches!(other, None | Some((READ, [2, 2]))), "{other:?}");
        let _pages = server.join().unwrap();
        assert_eq!(read(&reader, 0), None);
    });
}

#[test]
fn memory_that_is_given_back_is_not_read_as_zeros() {
    check(|| {
        let (mut pages, reader) = pages(1 << 20, [1, 1]);
        let server = thread::spawn(move || {
            pages.give_back(0);
            pages
        });
        let found = read(&reader, 0);
        assert!(matches!(found, None | Some((READ, [1, 1]))), "{found:?}");
        let _pages = server.join().unwrap();
        assert_eq!(read(&reader, 0), None);
    });
}

#[test]
fn a_file_that_is_closed_for_the_last_time_is_not_read_as_zeros() {
    check(|| {
        let (pages, reader) = pages(1 << 20, [1, 1]);
        let server = thread::spawn(move || drop(pages));
        let found = read(&reader, 0);
        assert!(matches!(found, None | Some((READ, [1, 1]))), "{found:?}");
        server.join().unwrap();
        assert_eq!(read(&reader, 0), None);
    });
}

#[test]
fn a_file_that_becomes_shorter_is_not_read_with_bytes_of_both_lengths() {
    check(|| {
        let (mut pages, reader) = pages(READ as u64, [1, 1]);
        let answered = Arc::new(AtomicU64::new(0));
        let tells = Arc::clone(&answered);
        let server = thread::spawn(move || {
            pages.withdraw_length();
            pages.forget(0..u64::MAX);
            tells.store(1, Ordering::Release);
            pages.write_page(0, &page([1, 0]));
            pages.publish_length(8);
            pages
        });
        let is_shorter = answered.load(Ordering::Acquire) == 1;
        match read(&reader, 0) {
            Some((READ, words)) => assert!(words == [1, 1] && !is_shorter, "{words:?}"),
            Some((8, words)) => assert_eq!(words, [1, 0]),
            other => assert_eq!(other, None),
        }
        let _pages = server.join().unwrap();
        assert_eq!(read(&reader, 0), Some((8, [1, 0])));
    });
}

/// A file of one number, and its pages, as the server has them.
struct ServedFile {
    file: AtomicU64,
    pages: loom::sync::Mutex<(PageWriter<OrderedMemory>, ChangeCounts)>,
    answered: AtomicU64,
}

/// Changes that have begun, and those that run.
#[derive(Default)]
struct ChangeCounts {
    begun: u64,
    running: u64,
}

impl ServedFile {
    fn new(pages: PageWriter<OrderedMemory>) -> Arc<ServedFile> {
        let pages = loom::sync::Mutex::new((pages, ChangeCounts::default()));
        Arc::new(ServedFile { file: AtomicU64::new(1), pages, answered: AtomicU64::new(1) })
    }

    /// Changes the file on a client's request.
    fn change(&self, number: u64) {
        {
            let (pages, changes) = &mut *self.pages.lock().unwrap();
            changes.begun += 1;
            changes.running += 1;
            pages.forget(0..READ as u64);
        }
        self.file.store(number, Ordering::Release);
        self.pages.lock().unwrap().1.running -= 1;
        self.answered.store(number, Ordering::Release);
    }

    /// Fills the page, after a client did not find it.
    fn fill(&self) {
        let begun = {
            let (pages, changes) = &mut *self.pages.lock().unwrap();
            pages.show(0);
            if changes.running > 0 || pages.has(0) {
                return;
            }
            changes.begun
        };
        let number = self.file.load(Ordering::Acquire);
        let (pages, changes) = &mut *self.pages.lock().unwrap();
        if changes.begun == begun && !pages.has(0) {
            pages.write_page(0, &page([number, number]));
        }
    }
}

/// One client changes a file, another one misses it, and a third one reads its page, which
/// `prepare` may have changed.
fn no_reader_sees_an_old_page(prepare: fn(&mut PageWriter<OrderedMemory>)) {
    check(move || {
        let (mut pages, reader) = pages(1 << 20, [1, 1]);
        prepare(&mut pages);
        let served = ServedFile::new(pages);
        let (one, other) = (Arc::clone(&served), Arc::clone(&served));
        let threads = [thread::spawn(move || one.change(2)), thread::spawn(move || other.fill())];
        let mut last = 0;
        for _ in 0..2 {
            let least = served.answered.load(Ordering::Acquire).max(last);
            if let Some((_, words)) = read(&reader, 0) {
                assert!(words[0] == words[1] && words[0] >= least, "{words:?} after {least}");
                last = words[0];
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn no_reader_sees_a_page_from_before_a_change_that_was_answered() {
    no_reader_sees_an_old_page(|_| {});
}

#[test]
fn no_reader_sees_a_page_that_was_changed_while_it_was_hidden() {
    no_reader_sees_an_old_page(|pages| pages.hide(0));
}

#[test]
fn no_reader_sees_a_page_that_is_filled_during_a_change() {
    no_reader_sees_an_old_page(|pages| pages.forget(0..READ as u64));
}

const NAME: VersionedItem<'static> = VersionedItem::Name(1, b"name");

/// Versions. The checker sees the versions of these items and the version of everything.
fn versions(
    things: &[VersionedItem<'_>],
) -> (VersionWriter<OrderedMemory>, VersionReader<OrderedMemory>) {
    let place = OrderedMemory::new_unseen();
    VersionWriter::from_memory(place.clone()).begin(things.iter().copied());
    let memory = OrderedMemory::new(&HashMap::new(), place.words().into_keys());
    let client = memory.share_with_client();
    (VersionWriter::from_memory(memory), VersionReader::from_memory(client))
}

/// Two clients change one item, each another bit, and a third one keeps the value that it read.
#[test]
fn nothing_is_used_that_was_kept_before_a_change_that_was_answered() {
    check(|| {
        let (versions, reader) = versions(&[NAME]);
        let versions = Arc::new(versions);
        let (state, answered) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let change = |bit: u64| {
            let (versions, state) = (Arc::clone(&versions), Arc::clone(&state));
            let answered = Arc::clone(&answered);
            thread::spawn(move || {
                versions.begin([NAME].into_iter());
                state.fetch_or(bit, Ordering::AcqRel);
                versions.end([NAME].into_iter());
                answered.fetch_or(bit, Ordering::Release);
            })
        };
        let threads = [change(1), change(2)];
        let all = reader.global_version();
        let stamps = state.load(Ordering::Acquire);
        let version = reader.version_of(NAME);
        let is_kept = all.is_some() && version.is_some() && reader.global_version() == all;
        let so_far = answered.load(Ordering::Acquire);
        if is_kept && reader.version_of(NAME) == version {
            assert_eq!(stamps & so_far, so_far, "a change is missing");
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let now = reader.version_of(NAME);
        assert!(now.is_some() && reader.global_version().is_some(), "no change runs");
        assert!(!is_kept || now != version || stamps == 3);
    });
}

/// Bytes of a slot.
const SLOT: usize = 256;
/// The places of the first tag and of the first slot.
const TAGS: usize = 4096;
const SLOTS: usize = 266_240;

fn make_found(ino: u64, version: u64) -> FoundName {
    let attributes = AttributeStamp { version: 4, at: 0 };
    let stamps = NameVersions { name: version, rights: 0, attributes };
    FoundName { stamps, open_to_all: true, inode: Some((ino, make_attributes(ino))) }
}

/// Attributes that begin with a number.
fn make_attributes(number: u64) -> [u8; ATTRIBUTES] {
    let mut all = [0; ATTRIBUTES];
    all[..8].copy_from_slice(&number.to_ne_bytes());
    all
}

/// The words of a slot: its number, the inode, the versions of the name and of the attributes, and
/// the begin of both.
const SEQUENCE: usize = 0;
const INO: usize = 24;
const NAME_VERSION: usize = 32;
const VERSION: usize = 48;
const BEGIN: usize = 64;
const TEXT: usize = 168;

/// Names with these words. The checker sees the number of one slot, and some other words of this
/// slot.
fn names(
    (words, place): &(HashMap<usize, u64>, u32),
    seen: [usize; 3],
) -> (NameWriter<OrderedMemory>, NameReader<OrderedMemory>) {
    let slot = SLOTS + *place as usize * SLOT;
    let memory = OrderedMemory::new(words, [SEQUENCE].into_iter().chain(seen).map(|at| slot + at));
    let client = memory.share_with_client();
    (NameWriter::from_memory(memory), NameReader::from_memory(client))
}

/// The words of memory in which `ino` has the name that has the place.
fn list_words(ino: u64) -> (HashMap<usize, u64>, u32) {
    let memory = OrderedMemory::new_unseen();
    let (place, _) =
        NameWriter::from_memory(memory.clone()).publish(1, b"name", &make_found(ino, 0));
    (memory.words(), place)
}

#[test]
fn a_name_is_found_whole_while_it_is_told_anew() {
    let before = list_words(1);
    let place = before.1;
    check(move || {
        let (names, reader) = names(&before, [INO, NAME_VERSION, BEGIN]);
        let server = thread::spawn(move || names.publish(1, b"name", &make_found(2, 3)));
        let seen = reader.find(1, b"name");
        assert!([None, Some(make_found(1, 0)), Some(make_found(2, 3))].contains(&seen), "{seen:?}");
        assert_eq!(server.join().unwrap(), (place, 1));
        assert_eq!(reader.find(1, b"name"), Some(make_found(2, 3)));
    });
}

#[test]
fn attributes_that_are_told_anew_have_their_version() {
    let before = list_words(1);
    let place = before.1;
    check(move || {
        let (names, reader) = names(&before, [INO, VERSION, BEGIN]);
        let moment = AttributeStamp { version: 50, at: 0 };
        let server = thread::spawn(move || {
            names.publish_attributes(place, 9, moment, &make_attributes(9));
            names.publish_attributes(place, 1, moment, &make_attributes(5));
        });
        let NameVersions { name, rights, .. } = make_found(1, 0).stamps;
        let stamps = NameVersions { name, rights, attributes: moment };
        let new = FoundName { stamps, inode: Some((1, make_attributes(5))), ..make_found(1, 0) };
        let seen = reader.find(1, b"name");
        assert!([None, Some(make_found(1, 0)), Some(new)].contains(&seen), "{seen:?}");
        server.join().unwrap();
        assert_eq!(reader.find(1, b"name"), Some(new));
    });
}

#[test]
fn a_name_whose_slot_another_one_takes_is_found_as_it_was_or_not_at_all() {
    // Every slot has a name, so that a new one takes the slot of another.
    let text = |number: u64| format!("{number:08}");
    let full = (TAGS..SLOTS).step_by(8).map(|at| (at, u64::MAX)).collect();
    let memory = OrderedMemory::new(&full, []);
    let all = NameWriter::from_memory(memory.clone());
    let (before, former, taker) = (1..)
        .find_map(|ino| {
            let words = memory.words();
            let (place, former) = all.publish(1, text(ino).as_bytes(), &make_found(ino, 0));
            (former != 0).then_some(((words, place), former, ino))
        })
        .unwrap();
    let place = before.1;
    check(move || {
        let (names, reader) = names(&before, [INO, BEGIN, TEXT]);
        let server =
            thread::spawn(move || names.publish(1, text(taker).as_bytes(), &make_found(taker, 0)));
        let seen = reader.find(1, text(former).as_bytes());
        assert!(seen.is_none() || seen == Some(make_found(former, 0)), "{seen:?}");
        assert_eq!(server.join().unwrap(), (place, former));
        assert_eq!(reader.find(1, text(former).as_bytes()), None);
        assert_eq!(reader.find(1, text(taker).as_bytes()), Some(make_found(taker, 0)));
    });
}

/// One client changes a name, the server reports it to another one, and a third one takes it from
/// memory while its version stays.
#[test]
fn no_name_holds_after_a_change_of_it_that_was_answered() {
    let before = list_words(1);
    check(move || {
        let (names, reader) = names(&before, [INO, NAME_VERSION, BEGIN]);
        let (versions, now) = versions(&[NAME]);
        let now = Arc::new(now);
        let other = Arc::clone(&now);
        let (leads_to, answered) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicU64::new(1)));
        let changes = {
            let leads_to = Arc::clone(&leads_to);
            let answered = Arc::clone(&answered);
            thread::spawn(move || {
                versions.begin([NAME].into_iter());
                leads_to.store(2, Ordering::Release);
                versions.end([NAME].into_iter());
                answered.store(2, Ordering::Release);
            })
        };
        let tells = thread::spawn(move || {
            if let Some(version) = other.version_of(NAME) {
                let ino = leads_to.load(Ordering::Acquire);
                names.publish(1, b"name", &make_found(ino, version));
            }
        });
        let least = answered.load(Ordering::Acquire);
        if let Some(found) = reader.find(1, b"name")
            && now.version_of(NAME) == Some(found.stamps.name)
        {
            let ino = found.inode.unwrap().0;
            assert!(ino >= least, "inode {ino} after {least}");
        }
        [changes, tells].into_iter().for_each(|thread| thread.join().unwrap());
        let found = reader.find(1, b"name").unwrap();
        let holds = now.version_of(NAME) == Some(found.stamps.name);
        assert!(!holds || found.inode.unwrap().0 == 2);
    });
}
