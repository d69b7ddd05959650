//! All names and attributes as a snapshot, and back, on all processors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use defuse_fs::FileKind;

use super::load::{LoadedInode, fits};
use super::order::RecordId;
use super::record::{DirectoryState, InodeRecord, RecordBody, RecordExtra};
use super::{LINK_MAX, NameStore, ROOT};
use crate::content::BlockPool;
use crate::format::LAST;
use crate::format::inode::{DecodedBody, DiskInode, INLINE, InodeData, is_name};
use crate::format::snapshot::{
    SEGMENT, ShortData, ShortInode, SnapshotEntry, SnapshotSegment, entries,
};
use crate::locks::lock;
use crate::space::BlockRun;
use crate::store::snapshot::SnapshotContent;

/// The number of parts into which names are divided by directory.
const PARTS: usize = 16;

/// Segments that are worth a thread of their own.
const SHARE: usize = 2;

/// Puts entries into segments.
#[derive(Default)]
pub(crate) struct SnapshotWriter {
    segments: Vec<Vec<u8>>,
    inodes: u64,
    /// An entry is missing.
    incomplete: bool,
}

impl SnapshotWriter {
    /// Adds an entry. An entry that is too long makes the snapshot incomplete.
    pub(crate) fn add(&mut self, entry: &SnapshotEntry<'_>) {
        let bytes = entry.encode();
        self.incomplete |= bytes.len() > SEGMENT;
        match self.segments.last_mut() {
            Some(last) if last.len() + bytes.len() <= SEGMENT => last.extend(bytes),
            _ => self.segments.push(bytes),
        }
    }

    /// The whole; `None` if an entry is missing.
    pub(crate) fn finish(self) -> Option<SnapshotContent> {
        let SnapshotWriter { segments, inodes, incomplete } = self;
        (!incomplete).then_some(SnapshotContent { inodes, segments })
    }
}

/// The body of an inode with all records, and the blocks of these.
type WholeBody = (Vec<u8>, Vec<(u64, u32)>);

/// The state of slots in a snapshot.
#[derive(Default)]
pub(crate) struct SnapshotSlots {
    /// The slots of current copies: inode and block.
    pub(crate) live: Vec<(u64, u64)>,
    /// The slots of stale copies.
    pub(crate) stale: Vec<(u64, u64)>,
    pub(crate) removals: Vec<(u64, Vec<u64>)>,
}

/// A name that is not in its directory yet.
#[derive(Clone, Copy)]
struct PendingName {
    parent: u64,
    stamp: u64,
    rid: RecordId,
    is_dir: bool,
}

/// The findings of one thread.
#[derive(Default)]
struct LoadFindings {
    slots: SnapshotSlots,
    places: [Vec<PendingName>; PARTS],
    runs: Vec<BlockRun>,
    dirs: Vec<u64>,
    full: Vec<LoadedInode>,
}

impl NameStore {
    /// Adds all inodes with names; `slot` has the block of each. Everything must be durable.
    pub(crate) fn save(&self, slot: impl Fn(u64) -> Option<u64>, saving: &mut SnapshotWriter) {
        let mut full = Vec::new();
        self.records.for_each(|record, extra| {
            if !record.is_named() {
                return;
            }
            let Some(slot) = slot(record.ino) else {
                saving.incomplete = true;
                return;
            };
            saving.inodes += 1;
            match self.make_short(record, extra, slot) {
                Some(short) => saving.add(&SnapshotEntry::Short(short)),
                None => full.push((record.ino, slot)),
            }
        });
        for (ino, slot) in full {
            match self.encode_stored(ino) {
                Some((body, records)) => {
                    saving.add(&SnapshotEntry::Full { ino, slot, body: &body, records });
                }
                None => saving.incomplete = true,
            }
        }
    }

    /// The short form of an inode, if it has one.
    fn make_short<'a>(
        &self,
        record: &'a InodeRecord,
        extra: Option<&RecordExtra>,
        slot: u64,
    ) -> Option<ShortInode<'a>> {
        let data = match &record.body {
            _ if extra.is_some() => return None,
            RecordBody::Stored => ShortData::Stored,
            RecordBody::Device(number) => ShortData::Device(*number),
            RecordBody::Blocks(run) => {
                let BlockRun { block, count } = (*run).into();
                ShortData::Blocks { block, count }
            }
            RecordBody::Directory(dir) if !lock(&dir.content).has_records() => ShortData::Directory,
            RecordBody::Directory(_) => return None,
            RecordBody::Live(live) => {
                let left = lock(&live.content).retire(&self.pool)?;
                match RecordBody::from_data(&left, live.rdev) {
                    RecordBody::Stored => ShortData::Stored,
                    RecordBody::Device(number) => ShortData::Device(number),
                    RecordBody::Blocks(run) => {
                        let BlockRun { block, count } = run.into();
                        ShortData::Blocks { block, count }
                    }
                    RecordBody::Live(_) | RecordBody::Directory(_) => return None,
                }
            }
        };
        let is_dir = data == ShortData::Directory;
        Some(ShortInode {
            ino: record.ino,
            slot,
            mode: record.mode(),
            uid: record.uid,
            gid: record.gid,
            size: if is_dir { 0 } else { record.size },
            times: record.packed_times()?,
            parent: record.parent,
            stamp: record.stamp,
            name: record.name.as_bytes(),
            data,
        })
    }

    /// The body of an inode with all records, and the blocks of these.
    fn encode_stored(&self, ino: u64) -> Option<WholeBody> {
        let content = match self.content(ino).ok()? {
            super::ContentState::Here(content) => content,
            super::ContentState::Stored => return self.encode_changed(ino),
        };
        let held = lock(&content);
        if held.summarize().dirty {
            return None;
        }
        let body = self.encode_whole(ino, &held).ok()??.body;
        let records = held.record_runs().iter().map(|run| (run.block, run.count)).collect();
        Some((body, records))
    }

    /// The body of an inode that is unusual only in its times, and its blocks. Its data must be
    /// known.
    fn encode_changed(&self, ino: u64) -> Option<WholeBody> {
        match self.take_changed(ino)? {
            super::encode::ClosingBody::Whole { body, data_is_stored: false } => {
                Some((body, Vec::new()))
            }
            _ => None,
        }
    }

    /// The file system of a snapshot with these segments, and its slots. `read` reads a segment.
    /// `None` if anything is inconsistent. The result is as after loading an image without damage
    /// ([`InodeLoader`](super::load::InodeLoader)).
    pub(crate) fn restore(
        pool: Arc<BlockPool>,
        next_ino: u64,
        (inodes, segments): (u64, &[SnapshotSegment]),
        read: &(dyn Fn(&SnapshotSegment) -> Option<Vec<u8>> + Sync),
    ) -> Option<(NameStore, SnapshotSlots)> {
        let names = NameStore::new(Arc::clone(&pool));
        names.next_ino.fetch_max(next_ino, Ordering::Relaxed);
        names.records.reserve(inodes as usize);
        names.index.reserve(inodes as usize);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = LoadFindings::default();
            while let Some(segment) = segments.get(next.fetch_add(1, Ordering::Relaxed)) {
                names.take_segment(&read(segment)?, &mut found)?;
            }
            Some(found)
        };
        let threads = threads(segments.len());
        let mut found = run_on_threads(threads, work)?;
        names.take_blocks(&mut found)?;
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= PARTS {
                    return Some(());
                }
                let places = found.iter().flat_map(|part| part.places[at].iter().copied());
                names.fill_directories(places.collect())?;
            }
        };
        run_on_threads(threads, work)?;
        let dirs: Vec<u64> = found.iter().flat_map(|part| part.dirs.iter().copied()).collect();
        let whole = names.count().0 == inodes && names.is_tree(&dirs);
        let mut snapshot_slots = SnapshotSlots::default();
        for part in &mut found {
            snapshot_slots.live.append(&mut part.slots.live);
            snapshot_slots.stale.append(&mut part.slots.stale);
            snapshot_slots.removals.append(&mut part.slots.removals);
        }
        whole.then_some((names, snapshot_slots))
    }

    /// Claims all blocks, and adds the inodes that have a full form.
    fn take_blocks(&self, found: &mut [LoadFindings]) -> Option<()> {
        for part in found {
            let claim = |runs: &[BlockRun]| {
                let mut space = self.pool.space();
                runs.iter().all(|run| space.claim(*run)).then_some(())
            };
            claim(&part.runs)?;
            for loaded in std::mem::take(&mut part.full) {
                claim(&block_runs(&loaded))?;
                self.take_full(loaded, part)?;
            }
        }
        Some(())
    }

    /// True if there is a root, and all directories are below the root.
    fn is_tree(&self, dirs: &[u64]) -> bool {
        dirs.contains(&ROOT) && self.find_loops(dirs).is_empty()
    }

    fn take_segment(&self, bytes: &[u8], found: &mut LoadFindings) -> Option<()> {
        for entry in entries(bytes) {
            match entry? {
                SnapshotEntry::Short(short) => self.take_short(&short, found)?,
                SnapshotEntry::Full { ino, slot, body, records } => {
                    found.slots.live.push((ino, slot));
                    let DecodedBody::Whole(inode) = DiskInode::decode(body)? else { return None };
                    let records = records.into_iter();
                    let records = records.map(|(block, count)| BlockRun { block, count }).collect();
                    found.full.push(LoadedInode { ino, inode, records });
                }
                SnapshotEntry::Stale { ino, slot } => found.slots.stale.push((ino, slot)),
                SnapshotEntry::Removals { slot, inos } => found.slots.removals.push((slot, inos)),
            }
        }
        Some(())
    }

    fn take_short(&self, short: &ShortInode<'_>, found: &mut LoadFindings) -> Option<()> {
        let kind = FileKind::from_mode(short.mode)?;
        let body = match (kind, short.data) {
            (FileKind::Directory, ShortData::Directory) if short.size == 0 => {
                found.dirs.push(short.ino);
                RecordBody::Directory(Arc::new(DirectoryState::default()))
            }
            (FileKind::Regular, ShortData::Blocks { block, count }) => {
                let run = BlockRun { block, count };
                found.runs.push(run);
                (count > 0 && short.size <= i64::MAX as u64)
                    .then(|| RecordBody::Blocks(run.into()))?
            }
            (FileKind::Regular, ShortData::Stored) if short.size <= INLINE as u64 => {
                RecordBody::Stored
            }
            (FileKind::Symlink, ShortData::Stored) if (1..=INLINE as u64).contains(&short.size) => {
                RecordBody::Stored
            }
            (FileKind::Directory | FileKind::Regular | FileKind::Symlink, _) => return None,
            (_, ShortData::Stored) if short.size == 0 => RecordBody::Stored,
            (_, ShortData::Device(number)) if short.size == 0 => RecordBody::Device(number),
            _ => return None,
        };
        let is_root = (short.ino, kind) == (ROOT, FileKind::Directory);
        let named = short.parent != 0 && is_name(short.name);
        let nameless = short.parent == 0 && short.name.is_empty();
        if !(if is_root { nameless } else { named && short.ino != 0 && short.stamp < LAST }) {
            return None;
        }
        let mut record = InodeRecord::new(short.ino, short.mode, (short.uid, short.gid), body);
        record.size = short.size;
        (record.parent, record.stamp) = (short.parent, short.stamp);
        record.name = short.name.into();
        if !record.set_packed_times(short.times) {
            return None;
        }
        let rid = self.records.insert_new(record)?;
        found.slots.live.push((short.ino, short.slot));
        let place = PendingName {
            parent: short.parent,
            stamp: short.stamp,
            rid,
            is_dir: kind == FileKind::Directory,
        };
        if is_root { Some(()) } else { self.take_name(place, short.name, found) }
    }

    fn take_full(&self, loaded: LoadedInode, found: &mut LoadFindings) -> Option<()> {
        let LoadedInode { ino, inode, records } = loaded;
        let kind = FileKind::from_mode(inode.mode).filter(|kind| fits(*kind, &inode))?;
        let (is_dir, count) = (kind == FileKind::Directory, inode.links.len());
        if (ino == ROOT) != (count == 0)
            || count > if is_dir { 1 } else { LINK_MAX }
            || ino == ROOT && !is_dir
            || ino == 0
        {
            return None;
        }
        if self.records.find(ino).is_ok() {
            return None;
        }
        let links = inode.links.clone();
        found.dirs.extend(is_dir.then_some(ino));
        self.add_loaded(ino, inode, records);
        let rid = self.records.find(ino).ok()?;
        for link in links {
            let place = PendingName { parent: link.parent, stamp: link.stamp, rid, is_dir };
            self.take_name(place, &link.name, found)?;
        }
        Some(())
    }

    /// Enters a name into the index, and keeps it for its directory.
    fn take_name(&self, place: PendingName, name: &[u8], found: &mut LoadFindings) -> Option<()> {
        let key = self.index.key(place.parent, name);
        let mut part = self.index.write(key);
        // A name that occurs twice ends the restoration.
        if place.stamp >= LAST || self.find(&part, key, place.parent, name).is_some() {
            return None;
        }
        part.insert(key, place.rid);
        found.places[place.parent as usize % PARTS].push(place);
        Some(())
    }

    /// Enters names into their directories. No other thread has names of these directories.
    fn fill_directories(&self, mut places: Vec<PendingName>) -> Option<()> {
        // There are long runs in order already.
        places.sort_by_key(|place| (place.parent, place.stamp));
        for entries in places.chunk_by(|a, b| a.parent == b.parent) {
            let dir = self.directory(entries[0].parent).ok()?;
            if entries.windows(2).any(|pair| pair[0].stamp == pair[1].stamp) {
                return None;
            }
            let mut order = lock(&dir.entries);
            entries.iter().for_each(|place| order.push(place.stamp, place.rid));
            drop(order);
            let dirs = entries.iter().filter(|place| place.is_dir).count();
            dir.count.store(entries.len() as u64, Ordering::Relaxed);
            dir.subdirs.store(dirs as u32, Ordering::Relaxed);
            let last = entries.last().map_or(0, |place| place.stamp);
            self.next_stamp.fetch_max(last.saturating_add(1), Ordering::Relaxed);
        }
        Some(())
    }
}

/// All blocks of an inode.
fn block_runs(loaded: &LoadedInode) -> Vec<BlockRun> {
    let extents = match &loaded.inode.data {
        InodeData::Extents(extents) => &extents[..],
        _ => &[],
    };
    let extents = extents.iter().map(|extent| BlockRun::from(*extent));
    extents.chain(loaded.records.iter().copied()).collect()
}

fn threads(segments: usize) -> usize {
    match segments / SHARE {
        // The number of cores costs a dozen system calls.
        0 | 1 => 1,
        wanted => wanted.min(std::thread::available_parallelism().map_or(1, |cores| cores.get())),
    }
}

/// The results of `work` on so many threads; `None` if one has none.
fn run_on_threads<T: Send>(threads: usize, work: impl Fn() -> Option<T> + Sync) -> Option<Vec<T>> {
    if threads == 1 {
        return Some(vec![work()?]);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        // A panic is a bug, and the scan finds the same without it.
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect()
    })
}
