//! The inodes that frontends know, by their numbers: an identity and a count each.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use defuse_fs::{Errno, Fh, Ino, Result};

use crate::held;
use crate::subvolumes::{LayoutHash, SubvolumeId, SubvolumeMap};
use crate::volume::Gfid;

/// All known inodes. Numbers are never used again.
#[derive(Debug)]
pub struct GlusterInodes {
    inner: Mutex<GlusterInodesState>,
    /// A time before anything that this client has made.
    begun: Instant,
    parts: Arc<SubvolumeMap>,
}

#[derive(Debug)]
struct GlusterInodesState {
    by_number: HashMap<u64, GlusterInode>,
    by_gfid: HashMap<Gfid, u64>,
    next: u64,
    /// Number of inodes that frontends keep for long, and its maximum.
    kept: usize,
    limit: usize,
    searched: Option<Instant>,
}

/// Time between two searches for inodes that are no longer kept.
const SEARCH_EVERY: Duration = Duration::from_secs(5);

/// A reference by which libgfapi keeps an inode. It costs more than a kilobyte.
pub type InodeReference = Box<dyn Any + Send + Sync>;

#[derive(Debug)]
struct UpcallReference {
    _reference: InodeReference,
    /// The time of the last query about the inode.
    queried: Instant,
    /// The attributes have changed since, and are not kept. Frontends may keep the name of the
    /// inode: the reference ensures that messages about it continue to arrive.
    reported: bool,
}

/// A known inode. It is small, because there may be millions of inodes.
#[derive(Debug)]
struct GlusterInode {
    gfid: Gfid,
    lookups: u64,
    /// The directory in which the last lookup found the inode; [`NOWHERE`] if none is known.
    parent: Gfid,
    /// Fields that few inodes need.
    more: Option<Box<RareInodeFields>>,
    /// The time when this client made the inode, if it has given it no extended attributes since.
    made: CreationTime,
    home: PackedSubvolume,
}

const _: () = assert!(size_of::<(u64, GlusterInode)>() <= 64);

/// A time, as 48 bits of a number of microseconds from a moment before the first one: enough for
/// eight years.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CreationTime([u8; 6]);

impl CreationTime {
    const NEVER: CreationTime = CreationTime([0; 6]);

    fn from_micros(micros: u64) -> CreationTime {
        let bytes = micros.max(1).to_le_bytes();
        CreationTime([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]])
    }

    fn micros(self) -> u64 {
        let CreationTime([a, b, c, d, e, f]) = self;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
    }
}

/// The subvolume of an inode, or the beginning of the hash of the name by which the inode got
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedSubvolume(u16);

/// A [`PackedSubvolume`] in full.
enum InodeSubvolume {
    Unknown,
    By(LayoutHash),
    In(SubvolumeId),
}

impl PackedSubvolume {
    const UNKNOWN: PackedSubvolume = PackedSubvolume(0);
    const BY_HASH: u16 = 1 << 15;

    fn from_hash(hash: LayoutHash) -> PackedSubvolume {
        PackedSubvolume(PackedSubvolume::BY_HASH | hash.prefix())
    }

    fn from_subvolume(part: SubvolumeId) -> PackedSubvolume {
        assert!(part.0 + 1 < PackedSubvolume::BY_HASH, "there are fewer parts");
        PackedSubvolume(part.0 + 1)
    }

    fn place(self) -> InodeSubvolume {
        match self.0 {
            0 => InodeSubvolume::Unknown,
            hash if hash & PackedSubvolume::BY_HASH != 0 => {
                InodeSubvolume::By(LayoutHash::from_short(hash & !PackedSubvolume::BY_HASH))
            }
            part => InodeSubvolume::In(SubvolumeId(part - 1)),
        }
    }
}

/// The identity of no inode.
const NOWHERE: Gfid = [0; 16];

#[derive(Debug, Default)]
struct RareInodeFields {
    /// A frontend keeps its attributes, or names in it, for long.
    kept: Option<UpcallReference>,
    /// The inode's open files, through which it is reached after its last name was removed.
    open: Vec<Fh>,
}

impl GlusterInodes {
    /// Makes a table in which only the root is known.
    pub fn new(root: Gfid, parts: Arc<SubvolumeMap>) -> GlusterInodes {
        let by_number = HashMap::from([(Ino::ROOT.0, GlusterInode::new(root))]);
        let by_gfid = HashMap::from([(root, Ino::ROOT.0)]);
        GlusterInodes {
            inner: Mutex::new(GlusterInodesState {
                by_number,
                by_gfid,
                next: Ino::ROOT.0 + 1,
                kept: 0,
                limit: held::limit(),
                searched: None,
            }),
            begun: Instant::now(),
            parts,
        }
    }

    /// Adds a lookup of `gfid`, in the directory `parent` if there is one, by a name with this hash
    /// if it is a file.
    pub fn look_up(&self, gfid: Gfid, parent: Option<Gfid>, hash: Option<LayoutHash>) -> Ino {
        self.look_up_from(gfid, parent, hash).0
    }

    /// Adds a lookup, as [`GlusterInodes::look_up`] does. Returns the directory in which the inode
    /// was found before, if it was another directory.
    pub fn look_up_from(
        &self,
        gfid: Gfid,
        parent: Option<Gfid>,
        hash: Option<LayoutHash>,
    ) -> (Ino, Option<Gfid>) {
        let mut left = None;
        let mut inner = self.lock();
        let next = inner.next;
        let number = *inner.by_gfid.entry(gfid).or_insert(next);
        if number == next {
            inner.next += 1;
        }
        let node = inner.by_number.entry(number).or_insert_with(|| GlusterInode::new(gfid));
        if number != Ino::ROOT.0 {
            node.lookups += 1;
            if let Some(parent) = parent {
                left = Some(node.parent).filter(|&left| left != parent && left != NOWHERE);
                node.record_location(parent, hash, &self.parts);
            }
        }
        (Ino(number), left)
    }

    /// The subvolume that a file needs, as far as it is known.
    pub fn part(&self, ino: Ino) -> Option<SubvolumeId> {
        let (parent, home) = self.with(ino, |node| (node.parent, node.home)).ok()?;
        match home.place() {
            InodeSubvolume::Unknown => None,
            InodeSubvolume::By(hash) => self.parts.find(parent, hash),
            InodeSubvolume::In(part) => Some(part),
        }
    }

    /// The subvolume that a name of a file in a directory needs, as far as it is known.
    pub fn part_of_name(&self, dir: Ino, name: &[u8]) -> Option<SubvolumeId> {
        self.parts.find(self.gfid(dir).ok()?, LayoutHash::from_name(name))
    }

    /// Returns lookups. The inode is unknown after its last one: then its identity is the result.
    pub fn forget(&self, ino: Ino, lookups: u64) -> Option<Gfid> {
        let mut inner = self.lock();
        let node = inner.by_number.get_mut(&ino.0)?;
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 && ino != Ino::ROOT {
            let gfid = node.gfid;
            let mut removed = inner.by_number.remove(&ino.0);
            inner.by_gfid.remove(&gfid);
            let is_kept =
                removed.as_mut().is_some_and(|node| node.upcall_reference_mut().is_some());
            inner.kept -= usize::from(is_kept);
            drop(inner);
            // The reference is dropped outside of the lock, because that calls libgfapi.
            drop(removed);
            return Some(gfid);
        }
        None
    }

    /// The identity of an inode. Fails with `ESTALE` if it is unknown.
    pub fn gfid(&self, ino: Ino) -> Result<Gfid> {
        self.with(ino, |node| node.gfid)
    }

    /// The number of an identity, if it is known.
    pub fn ino(&self, gfid: Gfid) -> Option<Ino> {
        self.lock().by_gfid.get(&gfid).map(|&number| Ino(number))
    }

    /// The directory in which the last lookup found an inode, as far as it is known.
    pub fn parent(&self, ino: Ino) -> Result<Option<Gfid>> {
        self.with(ino, |node| (node.parent != NOWHERE).then_some(node.parent))
    }

    /// Records that an inode was moved to `parent`.
    pub fn record_move(&self, gfid: Gfid, parent: Gfid) {
        let mut inner = self.lock();
        if let Some(number) = inner.by_gfid.get(&gfid).copied()
            && let Some(node) = inner.by_number.get_mut(&number)
        {
            node.record_location(parent, None, &self.parts);
        }
    }

    /// Records that a frontend is about to keep an inode for `long`, by a new reference if there is
    /// none. False without a reference, or if there are too many.
    pub fn keep(
        &self,
        ino: Ino,
        long: Duration,
        refer: impl FnOnce() -> Option<InodeReference>,
    ) -> bool {
        let queried = Instant::now();
        if let Ok(true) = self.with(ino, |node| node.record_query(queried)) {
            return true;
        }
        if !self.has_room(queried, long) {
            return false;
        }
        let Some(reference) = refer() else { return false };
        let mut inner = self.lock();
        let Some(node) = inner.by_number.get_mut(&ino.0) else { return false };
        let old = node.rare_fields_mut().kept.replace(UpcallReference {
            _reference: reference,
            queried,
            reported: false,
        });
        inner.kept += usize::from(old.is_none());
        drop(inner);
        true
    }

    /// True if a frontend keeps an inode for long.
    pub fn is_kept(&self, ino: Ino) -> bool {
        self.with(ino, |node| node.upcall_reference_mut().is_some_and(|kept| !kept.reported))
            .unwrap_or(false)
    }

    /// Ends the time for which frontends may keep attributes of an inode. True if a frontend kept
    /// some for long. Messages about the name of the inode still arrive: without a reference,
    /// libgfapi forgot the inode, and the message about its next rename was lost.
    pub fn take_attributes(&self, ino: Ino) -> bool {
        let take = |kept: &mut UpcallReference| !std::mem::replace(&mut kept.reported, true);
        self.with(ino, |node| node.upcall_reference_mut().is_some_and(take)).unwrap_or(false)
    }

    /// Ends the time for which frontends may keep an inode and its name. True if a frontend kept it
    /// for long.
    pub fn take_kept(&self, ino: Ino) -> bool {
        let mut inner = self.lock();
        let node = inner.by_number.get_mut(&ino.0);
        let taken = node.and_then(|node| node.take_kept(|_| true));
        inner.kept -= usize::from(taken.is_some());
        drop(inner);
        taken.is_some()
    }

    /// Ends the time for which frontends may keep inodes. Returns all inodes that frontends kept
    /// for long.
    pub fn take_all_kept(&self) -> Vec<Ino> {
        let taken = self.lock().take_kept(|_| true);
        taken.into_iter().map(|(ino, _)| ino).collect()
    }

    fn has_room(&self, now: Instant, long: Duration) -> bool {
        let mut inner = self.lock();
        let is_early = |searched: Instant| now.duration_since(searched) < SEARCH_EVERY;
        if inner.kept < inner.limit || inner.searched.is_some_and(is_early) {
            return inner.kept < inner.limit;
        }
        inner.searched = Some(now);
        let old = inner.take_kept(|kept| now.duration_since(kept.queried) > long);
        drop(inner);
        !old.is_empty()
    }

    /// Records that this client has made an inode at `now`.
    pub fn record_creation(&self, ino: Ino, now: Instant) {
        let at = self.to_micros(now);
        let _ = self.with(ino, |node| node.made = CreationTime::from_micros(at));
    }

    /// Records that this client may have given an inode extended attributes.
    pub fn has_attributes(&self, ino: Ino) {
        let _ = self.with(ino, |node| node.made = CreationTime::NEVER);
    }

    /// True if this client has made an inode less than `time` before `now`, and has given it no
    /// extended attributes.
    pub fn is_new(&self, ino: Ino, time: Duration, now: Instant) -> bool {
        let now = self.to_micros(now);
        let is_early = |made: CreationTime| {
            made != CreationTime::NEVER
                && u128::from(now.saturating_sub(made.micros())) < time.as_micros()
        };
        self.with(ino, |node| is_early(node.made)).unwrap_or(false)
    }

    /// Records an open file.
    pub fn record_open(&self, ino: Ino, fh: Fh) {
        let _ = self.with(ino, |node| node.rare_fields_mut().open.push(fh));
    }

    /// Records that an open file was released.
    pub fn record_release(&self, ino: Ino, fh: Fh) {
        let _ = self.with(ino, |node| {
            if let Some(more) = &mut node.more {
                more.open.retain(|&open| open != fh);
            }
            node.shrink();
        });
    }

    /// The open files of an inode.
    pub fn open_files(&self, ino: Ino) -> Vec<Fh> {
        let open = |node: &mut GlusterInode| node.more.as_ref().map(|more| more.open.clone());
        self.with(ino, open).ok().flatten().unwrap_or_default()
    }

    /// An open file of the inode.
    pub fn find_open_file(&self, ino: Ino) -> Option<Fh> {
        self.with(ino, |node| node.more.as_ref()?.open.last().copied()).ok().flatten()
    }

    /// Number of known inodes, including the root.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.lock().by_number.len()
    }

    /// Microseconds from `begun` until `at`.
    fn to_micros(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.begun).as_micros() as u64
    }

    fn with<T>(&self, ino: Ino, run: impl FnOnce(&mut GlusterInode) -> T) -> Result<T> {
        self.lock().by_number.get_mut(&ino.0).map(run).ok_or(Errno::ESTALE)
    }

    fn lock(&self) -> MutexGuard<'_, GlusterInodesState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GlusterInodesState {
    fn take_kept(
        &mut self,
        is_wanted: impl Fn(&UpcallReference) -> bool,
    ) -> Vec<(Ino, UpcallReference)> {
        let nodes = self.by_number.iter_mut();
        let taken: Vec<_> = nodes
            .filter_map(|(&number, node)| Some((Ino(number), node.take_kept(&is_wanted)?)))
            .collect();
        self.kept -= taken.len();
        taken
    }
}

impl GlusterInode {
    fn new(gfid: Gfid) -> GlusterInode {
        let (made, home) = (CreationTime::NEVER, PackedSubvolume::UNKNOWN);
        GlusterInode { gfid, lookups: 0, parent: NOWHERE, more: None, made, home }
    }

    /// Records the directory `parent` of the inode, with the hash of its name there. A file stays
    /// in its subvolume when it is renamed.
    fn record_location(&mut self, parent: Gfid, hash: Option<LayoutHash>, parts: &SubvolumeMap) {
        let home = hash.map_or(PackedSubvolume::UNKNOWN, PackedSubvolume::from_hash);
        match self.home.place() {
            InodeSubvolume::Unknown => self.home = home,
            InodeSubvolume::By(hash) if self.parent != parent || self.home != home => {
                self.home =
                    parts.find(self.parent, hash).map_or(home, PackedSubvolume::from_subvolume);
            }
            InodeSubvolume::By(_) | InodeSubvolume::In(_) => {}
        }
        self.parent = parent;
    }

    fn rare_fields_mut(&mut self) -> &mut RareInodeFields {
        self.more.get_or_insert_default()
    }

    fn upcall_reference_mut(&mut self) -> Option<&mut UpcallReference> {
        self.more.as_mut()?.kept.as_mut()
    }

    fn take_kept(
        &mut self,
        is_wanted: impl Fn(&UpcallReference) -> bool,
    ) -> Option<UpcallReference> {
        let taken = self.more.as_mut()?.kept.take_if(|kept| is_wanted(kept));
        self.shrink();
        taken
    }

    /// Frees fields that are not needed any more.
    fn shrink(&mut self) {
        self.more.take_if(|more| more.kept.is_none() && more.open.is_empty());
    }

    /// Records a new query, if the inode is kept. True if it is.
    fn record_query(&mut self, now: Instant) -> bool {
        self.upcall_reference_mut().is_some_and(|kept| {
            (kept.queried, kept.reported) = (now, false);
            true
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file stays in its subvolume under other names. A client that first met it by another name
    /// has no better information.
    #[test]
    fn a_file_keeps_its_part_when_it_is_renamed() {
        let (parts, [dir, other]) = (Arc::new(SubvolumeMap::default()), [[5; 16], [6; 16]]);
        let nodes = GlusterInodes::new([1; 16], Arc::clone(&parts));
        let [a, file1] = [b"a".as_slice(), b"file1"].map(|name| Some(LayoutHash::from_name(name)));
        let file = nodes.look_up([2; 16], Some(dir), a);
        let unknown = nodes.look_up([3; 16], None, None);
        assert_eq!((nodes.part(file), nodes.part(unknown)), (None, None));
        let text = "x-layout (p0 2147483647 4294967295) (p1 0 2147483646)";
        for dir in [dir, other] {
            parts.answer(dir, Some(text), Instant::now());
        }
        assert_eq!(nodes.part(file), Some(SubvolumeId(1)));
        nodes.look_up([2; 16], Some(dir), file1);
        assert_eq!(nodes.part(file), Some(SubvolumeId(1)));
        nodes.record_move([2; 16], other);
        nodes.look_up([2; 16], Some(other), file1);
        assert_eq!(nodes.part(file), Some(SubvolumeId(1)));
        let second = nodes.look_up([4; 16], Some(dir), file1);
        assert_eq!(nodes.part(second), Some(SubvolumeId(0)));
        nodes.record_move([4; 16], other);
        assert_eq!(
            (nodes.part(second), nodes.parent(second)),
            (Some(SubvolumeId(0)), Ok(Some(other)))
        );
        assert_eq!(nodes.part_of_name(Ino(99), b"a"), None);
    }

    #[test]
    fn an_inode_is_known_until_its_last_lookup_is_returned_and_its_number_never_comes_back() {
        let nodes = GlusterInodes::new([1; 16], Arc::default());
        let (a, b) =
            (nodes.look_up([2; 16], None, None), nodes.look_up([3; 16], Some([1; 16]), None));
        assert_eq!((nodes.look_up([2; 16], None, None), nodes.count()), (a, 3));
        nodes.forget(a, 1);
        assert_eq!((nodes.gfid(a), nodes.ino([2; 16])), (Ok([2; 16]), Some(a)));
        nodes.forget(a, 9);
        assert_eq!((nodes.gfid(a), nodes.ino([2; 16])), (Err(Errno::ESTALE), None));
        let again = nodes.look_up([2; 16], None, None);
        assert!(again != a && again != b);
        assert_eq!(nodes.parent(b), Ok(Some([1; 16])));
    }

    #[test]
    fn lookups_of_the_root_do_not_count() {
        let nodes = GlusterInodes::new([1; 16], Arc::default());
        assert_eq!(nodes.look_up([1; 16], Some([9; 16]), None), Ino::ROOT);
        nodes.forget(Ino::ROOT, 5);
        assert_eq!((nodes.gfid(Ino::ROOT), nodes.parent(Ino::ROOT)), (Ok([1; 16]), Ok(None)));
    }

    #[test]
    fn an_inode_is_new_for_a_time_and_until_it_has_attributes() {
        let nodes = GlusterInodes::new([1; 16], Arc::default());
        let (ino, other) = (nodes.look_up([2; 16], None, None), nodes.look_up([3; 16], None, None));
        // Times are kept in microseconds, and none is before the first one.
        let (now, time) = (Instant::now() + Duration::from_millis(1), Duration::from_secs(1));
        nodes.record_creation(ino, now);
        nodes.record_creation(other, now);
        assert!(nodes.is_new(ino, time, now) && !nodes.is_new(ino, time, now + time));
        nodes.has_attributes(ino);
        assert!(!nodes.is_new(ino, time, now) && nodes.is_new(other, time, now));
        assert!(!nodes.is_new(Ino::ROOT, time, now));
    }

    #[test]
    fn kept_inodes_are_bounded_and_old_ones_give_room() {
        const KEPT: usize = 100;
        let nodes = GlusterInodes::new([1; 16], Arc::default());
        nodes.lock().limit = KEPT;
        let all: Vec<Ino> = (0..=KEPT as u128)
            .map(|number| nodes.look_up((number + 9).to_ne_bytes(), None, None))
            .collect();
        let keep = |ino, long| nodes.keep(ino, long, || Some(Box::new(())));
        let long = Duration::from_secs(1000);
        assert!(all[..KEPT].iter().all(|&ino| keep(ino, long)));
        assert!(!keep(all[KEPT], long) && keep(all[0], long));
        assert!(nodes.take_kept(all[0]) && !nodes.take_kept(all[0]));
        assert!(keep(all[KEPT], long) && !keep(all[0], long));
        nodes.forget(all[KEPT], 1);
        assert!(keep(all[0], long));
        nodes.lock().searched = None;
        assert!(!nodes.take_kept(Ino::ROOT) && keep(Ino::ROOT, Duration::ZERO));
        let kept = nodes.lock().kept;
        assert_eq!((kept, nodes.take_all_kept()), (1, vec![Ino::ROOT]));
        assert_eq!(nodes.lock().kept, 0);
    }

    #[test]
    fn a_reference_stays_after_attributes_were_taken_back_and_ends_with_the_name() {
        let nodes = GlusterInodes::new([1; 16], Arc::default());
        let (ino, reference) = (nodes.look_up([2; 16], None, None), std::sync::Arc::new(()));
        let refer = || Some(Box::new(std::sync::Arc::clone(&reference)) as InodeReference);
        let is_held = || std::sync::Arc::strong_count(&reference) == 2;
        assert!(!nodes.is_kept(ino) && nodes.keep(ino, Duration::from_secs(9), refer));
        assert!(nodes.is_kept(ino) && nodes.take_attributes(ino) && is_held());
        assert!(!nodes.is_kept(ino) && !nodes.take_attributes(ino) && is_held());
        assert!(nodes.keep(ino, Duration::from_secs(9), || panic!("it has one")));
        assert!(nodes.is_kept(ino) && nodes.take_kept(ino) && !is_held());
        assert!(!nodes.is_kept(ino) && !nodes.take_attributes(ino));
    }

    #[test]
    fn an_inode_is_small_again_after_its_files_are_closed_and_nothing_of_it_is_kept() {
        let nodes = GlusterInodes::new([1; 16], Arc::default());
        let ino = nodes.look_up([2; 16], None, None);
        let is_small = || nodes.with(ino, |node| node.more.is_none()).unwrap();
        assert!(is_small());
        nodes.record_open(ino, Fh(1));
        assert!(nodes.keep(ino, Duration::from_secs(9), || Some(Box::new(()))));
        assert_eq!((nodes.open_files(ino), nodes.find_open_file(ino)), (vec![Fh(1)], Some(Fh(1))));
        nodes.record_release(ino, Fh(1));
        assert!(!is_small() && nodes.take_kept(ino) && is_small());
        assert_eq!((nodes.open_files(ino), nodes.find_open_file(ino)), (Vec::new(), None));
    }

    #[test]
    fn an_inode_without_a_reference_is_not_kept() {
        let nodes = GlusterInodes::new([1; 16], Arc::default());
        assert!(!nodes.keep(Ino::ROOT, Duration::ZERO, || None) && !nodes.take_kept(Ino::ROOT));
    }
}
