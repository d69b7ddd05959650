//! The subvolumes of a distributed volume: bricks, or groups of bricks with the same files, that
//! fail independently.
//!
//! A new file goes to the subvolume whose range contains the hash of its name; each directory has
//! ranges of its own. So one query for the ranges of a directory gives the subvolume of each name
//! in the directory without further requests. The ranges are wrong for a file that was renamed or
//! moved by a rebalance before this client met it; only a request for this file would return its
//! subvolume.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::volume::{Gfid, VolumeConnection};

/// Maximum number of directories with cached ranges.
const DIRECTORIES: usize = 8192;

/// Maximum number of ranges of all of them, 12 bytes each.
const RANGES: usize = 1 << 20;

/// Bytes of the longest name of a subvolume.
const LONGEST_NAME: usize = 255;

/// Maximum number of directories that wait for a query.
const WANTED: usize = 256;

/// Maximum number of subvolumes, and of ranges of a directory.
const MOST: usize = 4096;

/// Time after which the query about a directory in use is repeated: a rebalance gives it other
/// ranges.
const VALID_FOR: Duration = Duration::from_secs(600);

/// Time after which the query about a directory is repeated if it failed.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Time between two queries, so that they do not slow down a walk of many directories.
const PAUSE: Duration = Duration::from_millis(20);

/// A subvolume, by a number of this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubvolumeId(pub u16);

/// The beginning of the hash of a name, which determines the subvolume of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutHash(u32);

impl LayoutHash {
    /// Bits that [`prefix`](LayoutHash::prefix) leaves out.
    const LEFT_OUT: u32 = 17;

    /// The hash of a name, as GlusterFS's translator `cluster/distribute` computes it.
    pub fn from_name(name: &[u8]) -> LayoutHash {
        LayoutHash(davies_meyer(hashed_part(name)))
    }

    /// The first 15 bits of the hash. If the hash is at the edge of a range, the shortened hash may
    /// belong to the neighbouring range.
    pub fn prefix(self) -> u16 {
        (self.0 >> LayoutHash::LEFT_OUT) as u16
    }

    /// A hash with these first bits.
    pub fn from_short(short: u16) -> LayoutHash {
        LayoutHash(u32::from(short) << LayoutHash::LEFT_OUT)
    }
}

/// The ranges of hashes that a directory assigns to the subvolumes.
type LayoutRanges = Arc<[(u32, u32, SubvolumeId)]>;

/// The subvolumes of the names in directories that are in use.
#[derive(Debug, Default)]
pub struct SubvolumeMap {
    state: Mutex<SubvolumeMapState>,
    /// A directory waits for a query, or the thread must end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SubvolumeMapState {
    directories: HashMap<Gfid, DirectoryLayout>,
    /// Ranges of all directories.
    ranges: usize,
    /// The numbers of the subvolumes, by their names.
    parts: HashMap<String, SubvolumeId>,
    wanted: VecDeque<Gfid>,
    /// The volume has a single subvolume, as far as is known until this time.
    is_whole_until: Option<Instant>,
    has_ended: bool,
}

#[derive(Debug)]
struct DirectoryLayout {
    ranges: Option<LayoutRanges>,
    /// The time of the next query.
    until: Instant,
}

impl SubvolumeMap {
    /// The subvolume of names with this hash in a directory, if it is known. Otherwise a query
    /// about the directory follows.
    pub fn find(&self, dir: Gfid, hash: LayoutHash) -> Option<SubvolumeId> {
        let (mut state, now) = (self.lock(), Instant::now());
        if state.is_whole_until.is_some_and(|until| now < until) {
            return None;
        }
        let known = state.directories.get(&dir);
        let found = known.and_then(|known| known.ranges.as_ref()).and_then(|ranges| {
            let is_in =
                |(first, last, _): &&(u32, u32, SubvolumeId)| (*first..=*last).contains(&hash.0);
            ranges.iter().find(is_in).map(|(_, _, part)| *part)
        });
        let is_due = known.is_none_or(|known| now >= known.until);
        if is_due && state.wanted.len() < WANTED && !state.wanted.contains(&dir) {
            state.wanted.push_back(dir);
            self.changed.notify_one();
        }
        found
    }

    /// Queries the bricks for the ranges of directories that are wanted, until
    /// [`end`](SubvolumeMap::end).
    pub fn ask(&self, volume: &Arc<VolumeConnection>) {
        volume.act_as_process();
        while let Some(dir) = self.next() {
            let text = volume.object(dir).and_then(|dir| volume.path_info(&dir)).ok();
            self.answer(dir, text.as_deref(), Instant::now());
            std::thread::sleep(PAUSE);
        }
    }

    /// Ends the thread that sends the queries.
    pub fn end(&self) {
        self.lock().has_ended = true;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Gfid> {
        let mut state = self.lock();
        loop {
            if state.has_ended {
                return None;
            }
            if let Some(dir) = state.wanted.front() {
                return Some(*dir);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records the answer `text` of the bricks about a directory.
    pub fn answer(&self, dir: Gfid, text: Option<&str>, now: Instant) {
        let mut state = self.lock();
        state.wanted.retain(|&wanted| wanted != dir);
        let ranges = text.and_then(|text| state.ranges(text));
        // After a failure, the former ranges stay.
        let old = state.directories.remove(&dir).and_then(|known| known.ranges);
        let valid = if ranges.is_some() { VALID_FOR } else { RETRY_AFTER };
        let is_whole = ranges.is_some() && state.parts.len() == 1;
        state.is_whole_until = is_whole.then(|| now + VALID_FOR);
        let (gone, kept) = (old.as_ref().map_or(0, |old| old.len()), ranges.or(old));
        state.ranges += kept.as_ref().map_or(0, |kept| kept.len());
        state.ranges -= gone;
        if state.directories.len() >= DIRECTORIES || state.ranges > RANGES {
            state.directories.clear();
            state.ranges = kept.as_ref().map_or(0, |kept| kept.len());
        }
        let known = DirectoryLayout { ranges: kept, until: now + valid };
        state.directories.insert(dir, known);
    }

    fn lock(&self) -> MutexGuard<'_, SubvolumeMapState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SubvolumeMapState {
    /// The ranges in a text such as `(... (VOLUME-dht-layout (CLIENT 0 2147483646) (CLIENT
    /// 2147483647 4294967295)))`.
    fn ranges(&mut self, text: &str) -> Option<LayoutRanges> {
        let (_, layout) = text.split_once("-layout ")?;
        let mut ranges = Vec::new();
        for one in layout.split('(').skip(1).take(MOST) {
            let fields: Vec<&str> = one.split_once(')')?.0.split(' ').collect();
            let [name, first, last] = fields[..] else { return None };
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            ranges.push((first, last, self.part(name)?));
        }
        (!ranges.is_empty()).then(|| ranges.into())
    }

    fn part(&mut self, name: &str) -> Option<SubvolumeId> {
        if let Some(known) = self.parts.get(name) {
            return Some(*known);
        }
        let number = u16::try_from(self.parts.len()).ok()?;
        if usize::from(number) == MOST || name.len() > LONGEST_NAME {
            return None;
        }
        self.parts.insert(name.to_owned(), SubvolumeId(number));
        Some(SubvolumeId(number))
    }
}

/// The part of a name that determines the hash: `NAME` in `.NAME.SUFFIX`, the temporary names of
/// rsync, so that a rename moves no data.
fn hashed_part(name: &[u8]) -> &[u8] {
    let Some(rest) = name.strip_prefix(b".") else { return name };
    match rest.iter().rposition(|&byte| byte == b'.') {
        Some(dot) if dot > 0 && dot + 1 < rest.len() => &rest[..dot],
        _ => name,
    }
}

/// The hash of Davies and Meyer with the cipher TEA, of blocks of 16 bytes.
fn davies_meyer(text: &[u8]) -> u32 {
    let mut hash = (0x9464_a485, 0x542e_1a94);
    let (blocks, rest) = text.as_chunks::<16>();
    let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
    for block in blocks {
        let (words, _) = block.as_chunks::<4>();
        hash = mix(6, [0, 1, 2, 3].map(|at| word(&words[at])), hash);
    }
    let (words, bytes) = rest.as_chunks::<4>();
    let filler = (text.len() as u32 & 0xff) * 0x0101_0101;
    let mut last = [filler; 4];
    for (place, bytes) in last.iter_mut().zip(words) {
        *place = word(bytes);
    }
    // GlusterFS uses signed bytes.
    let add = |word: u32, byte: &u8| word << 8 | byte.cast_signed() as u32;
    last[words.len()] = bytes.iter().fold(filler, add);
    let hash = mix(10, last, hash);
    hash.0 ^ hash.1
}

fn mix(rounds: u32, key: [u32; 4], hash: (u32, u32)) -> (u32, u32) {
    let (mut left, mut right) = hash;
    let mut sum = 0_u32;
    let half = |value: u32, sum: u32, (low, high): (u32, u32)| {
        (value << 4).wrapping_add(low) ^ value.wrapping_add(sum) ^ (value >> 5).wrapping_add(high)
    };
    for _ in 0..rounds {
        sum = sum.wrapping_add(0x9e37_79b9);
        left = left.wrapping_add(half(right, sum, (key[0], key[1])));
        right = right.wrapping_add(half(left, sum, (key[2], key[3])));
    }
    (hash.0.wrapping_add(left), hash.1.wrapping_add(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Gfid = [3; 16];
    const TWO: &str = "((<DISTRIBUTE:v-dht> <POSIX(/b/1):h:/b/1/> <POSIX(/b/2):h:/b/2/>) (v-dht-layout \
                       (v-client-0 2147483647 4294967295) (v-client-1 0 2147483646)))";
    const ONE: &str = "((<DISTRIBUTE:r-dht> (<REPLICATE:r-replicate-0> <POSIX(/b/1):h:/b/1/>)) \
                       (r-dht-layout (r-replicate-0 0 4294967295)))";

    fn find(parts: &SubvolumeMap, name: &[u8]) -> Option<SubvolumeId> {
        parts.find(DIR, LayoutHash::from_name(name))
    }

    fn count_wanted(parts: &SubvolumeMap) -> usize {
        parts.lock().wanted.len()
    }

    /// Files of these names were on these bricks of a volume with the ranges `TWO`, and not on the
    /// opposite ones.
    #[test]
    fn names_are_where_the_ranges_say() {
        let parts = SubvolumeMap::default();
        assert_eq!((find(&parts, b"a"), find(&parts, b"b"), count_wanted(&parts)), (None, None, 1));
        parts.answer(DIR, Some(TWO), Instant::now());
        let long = b"very long name with many characters in it, more than sixteen";
        let first: [&[u8]; 4] = [b"file1", b"file2", b".tmp.abc123", long];
        for (number, names) in [&first[..], &[b"a", b"x.y"]].into_iter().enumerate() {
            for name in names {
                assert_eq!(find(&parts, name), Some(SubvolumeId(number as u16)), "{name:?}");
                let short = LayoutHash::from_short(LayoutHash::from_name(name).prefix());
                assert_eq!(parts.find(DIR, short), find(&parts, name));
            }
        }
        assert_eq!(count_wanted(&parts), 0);
    }

    #[test]
    fn temporary_names_have_the_place_of_the_final_ones() {
        for temporary in ["..x..q", ".x.q", ".x.y.Z1"] {
            let name = &temporary[1..temporary.rfind('.').unwrap()];
            assert_eq!(
                LayoutHash::from_name(temporary.as_bytes()),
                LayoutHash::from_name(name.as_bytes())
            );
        }
        for name in [".x", ".x.", "..x", "x.y", ".", "..", ""] {
            assert_eq!(hashed_part(name.as_bytes()), name.as_bytes());
        }
    }

    #[test]
    fn a_volume_of_one_part_is_asked_once() {
        let parts = SubvolumeMap::default();
        assert_eq!(find(&parts, b"a"), None);
        parts.answer(DIR, Some(ONE), Instant::now());
        assert_eq!(
            (find(&parts, b"a"), parts.find([4; 16], LayoutHash::from_name(b"a"))),
            (None, None)
        );
        assert_eq!(count_wanted(&parts), 0);
        // The knowledge of a single subvolume expires.
        let long_ago = Instant::now().checked_sub(VALID_FOR).unwrap();
        parts.answer(DIR, Some(ONE), long_ago);
        find(&parts, b"a");
        assert_eq!(count_wanted(&parts), 1);
    }

    #[test]
    fn old_ranges_hold_until_there_are_new_ones() {
        let parts = SubvolumeMap::default();
        let long_ago = Instant::now().checked_sub(VALID_FOR).unwrap();
        parts.answer(DIR, Some(TWO), long_ago);
        assert_eq!((find(&parts, b"a"), count_wanted(&parts)), (Some(SubvolumeId(1)), 1));
        parts.answer(DIR, None, Instant::now());
        assert_eq!((find(&parts, b"a"), count_wanted(&parts)), (Some(SubvolumeId(1)), 0));
        let other = TWO.replace("client-0", "client-2").replace("client-1", "client-0");
        parts.answer(DIR, Some(&other), Instant::now());
        assert_eq!(find(&parts, b"a"), Some(SubvolumeId(0)));
    }

    #[test]
    fn other_texts_tell_nothing() {
        let parts = SubvolumeMap::default();
        for text in ["", "(<POSIX(/b):h:/b/f>)", "x-layout ", "x-layout (a 1)", "x-layout (a 1 b)"]
        {
            parts.answer(DIR, Some(text), Instant::now());
            assert_eq!(find(&parts, b"a"), None, "{text}");
        }
        (0..=TWO.len()).for_each(|len| parts.answer(DIR, TWO.get(..len), Instant::now()));
        assert!(find(&parts, b"a").is_some());
    }

    #[test]
    fn directories_and_parts_are_bounded() {
        let parts = SubvolumeMap::default();
        let dir = |number: usize| (number as u128 + 1).to_ne_bytes();
        (0..2 * WANTED).for_each(|number| {
            assert_eq!(parts.find(dir(number), LayoutHash::from_name(b"a")), None)
        });
        assert_eq!(count_wanted(&parts), WANTED);
        for number in 0..DIRECTORIES + 9 {
            parts.answer(dir(number), Some(TWO), Instant::now());
        }
        assert!(parts.lock().directories.len() <= DIRECTORIES);
        let many: String =
            (0..=MOST).map(|number| format!("(p{number} {number} {number})")).collect();
        parts.answer(DIR, Some(&format!("x-layout {many}")), Instant::now());
        assert!(parts.lock().parts.len() <= MOST);
        // Many ranges in many directories, and names without an end, take bounded memory.
        let parts = SubvolumeMap::default();
        let many: String = (0..MOST).map(|number| format!("(p {number} {number})")).collect();
        for number in 0..2 * RANGES / MOST {
            parts.answer(dir(number), Some(&format!("x-layout {many}")), Instant::now());
            let state = parts.lock();
            let ranges = state.directories.values().filter_map(|known| known.ranges.as_ref());
            assert_eq!(state.ranges, ranges.map(|ranges| ranges.len()).sum::<usize>());
            assert!(state.ranges <= RANGES);
        }
        let long = format!("x-layout ({} 0 4294967295)", "p".repeat(LONGEST_NAME + 1));
        parts.answer(DIR, Some(&long), Instant::now());
        assert_eq!((find(&parts, b"a"), parts.lock().parts.len()), (None, 1));
    }

    #[test]
    fn the_thread_ends() {
        let parts = Arc::new(SubvolumeMap::default());
        let other = Arc::clone(&parts);
        let waits = std::thread::spawn(move || other.next());
        parts.end();
        assert_eq!(waits.join().unwrap(), None);
    }
}
