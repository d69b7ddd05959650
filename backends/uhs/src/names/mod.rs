//! Names and attributes in memory. This module does no I/O.
//!
//! Every inode has a record. A closed file whose newest state is on the device has nothing else:
//! its content is read again when it is needed. Three structures lead to records: their numbers
//! (`records.rs`), names (`index.rs`), and the stamps of the entries of a directory (`order.rs`). A
//! fourth leads from whole paths to directories (`paths.rs`).
//!
//! # Lock order
//!
//! 1. A handle of the running group, for every change.
//! 2. `NameStore::renames`, for a move of a directory between directories.
//! 3. `DirectoryState::entries`: several by inode number.
//! 4. A content. No thread that holds it waits for 2 and 3.
//! 5. Shards of the index: two in their order.
//! 6. A shard of records, one at a time.
//! 7. A change of directories (`paths.rs`), for which no thread waits.
//!
//! A lookup holds 5 while it verifies the name at the record. A change of a name holds 5 for
//! writing while it changes the records: so a lookup sees the whole change, or nothing of the
//! change.

mod attributes;
mod clock;
mod encode;
mod index;
mod links;
mod list;
mod load;
mod make;
mod order;
mod paths;
mod record;
mod records;
mod rename;
mod resolve;
mod snapshot;
mod xattrs;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_fs::posix::AccessTimeRule;
use defuse_fs::{AnswerLifetime, Attr, Entry, Errno, FileKind, Ino, Result, Timestamp};

use crate::content::{BlockPool, ContentSummary, FileContent, INODE_MEMORY, SharedContent};
use crate::format::BLOCK;
use crate::format::inode::{DiskExtent, DiskTime, InodeData};
use crate::group::GroupReadGuard;
use crate::locks::lock;
use crate::space::BlockRun;
use clock::ChangeClock;
use index::NameIndex;
use paths::PathCache;
use record::{
    ChangingRecord, DirectoryState, InodeRecord, LiveContent, RecordBody, RecordExtra, TimeKind,
};
use records::RecordTable;

pub(crate) use encode::{ClosingBody as Encoded, EncodedInode};
pub use load::LoadProblem;
pub(crate) use load::{InodeLoader, LoadedInode, fits, is_within_a_file};
pub(crate) use make::InodeCreation;
pub(crate) use snapshot::{SnapshotSlots, SnapshotWriter};

/// The root directory.
pub(crate) const ROOT: u64 = 1;

/// Names of an inode at most.
pub(crate) const LINK_MAX: usize = 65_000;

/// Slots that new inodes leave to changes and removals. Up to about half of these slots may hold
/// removals.
const KEEP_SLOTS: u64 = 1024;

/// The share of the free slots that one thread may have in a group.
const SHARE: u64 = 64;

/// Blocks of records that count as much as [`HEAVY`] inodes, so that a group is no larger than
/// memory.
const RECORDS: u64 = 32;
const HEAVY: usize = 8;

/// All names and attributes.
pub(crate) struct NameStore {
    pool: Arc<BlockPool>,
    records: RecordTable,
    index: NameIndex,
    paths: PathCache,
    renames: Mutex<()>,
    clock: ChangeClock,
    /// Reading does not update access times.
    access_times: AccessTimeRule,
    next_ino: AtomicU64,
    next_stamp: AtomicU64,
    /// Directories with newer times than their slots.
    waiting: Mutex<Vec<u64>>,
}

/// The content of an inode, as far as it is in memory.
pub(crate) enum ContentState {
    Here(Arc<Mutex<FileContent>>),
    /// The content is in the slot on the device.
    Stored,
}

impl From<Timestamp> for DiskTime {
    fn from(time: Timestamp) -> Self {
        DiskTime { sec: time.secs, nsec: time.nanos }
    }
}

impl From<DiskTime> for Timestamp {
    fn from(moment: DiskTime) -> Self {
        Timestamp { secs: moment.sec, nanos: moment.nsec }
    }
}

impl NameStore {
    fn new(pool: Arc<BlockPool>) -> Self {
        NameStore {
            records: RecordTable::new(Arc::clone(&pool)),
            pool,
            index: NameIndex::new(),
            paths: PathCache::default(),
            renames: Mutex::default(),
            clock: ChangeClock::default(),
            access_times: AccessTimeRule::Relative,
            next_ino: AtomicU64::new(ROOT + 1),
            // 1 and 2 are the positions of `.` and `..`.
            next_stamp: AtomicU64::new(3),
            waiting: Mutex::default(),
        }
    }

    /// The file system with nothing but a root directory.
    pub(crate) fn empty(
        pool: Arc<BlockPool>,
        handle: &GroupReadGuard<'_>,
        (perm, uid, gid): (u32, u32, u32),
    ) -> Result<Self> {
        let names = NameStore::new(pool);
        let mode = FileKind::Directory.mode_bits() | perm & 0o7777;
        let root = InodeRecord::new(ROOT, mode, (uid, gid), RecordBody::Directory(Arc::default()));
        names.records.insert(root);
        names.records.change(ROOT, |mut root| {
            let now = names.now().into();
            for time in
                [TimeKind::Access, TimeKind::Modification, TimeKind::Change, TimeKind::Birth]
            {
                root.set_time(time, now);
            }
            touch(handle, root.record);
            Ok(())
        })?;
        Ok(names)
    }

    /// Uses a clock that is independent of the machine's clock, for tests.
    pub(crate) fn step_time(&mut self) {
        self.clock = ChangeClock::new_stepped();
    }

    /// Uses the last tick of the kernel's clock, because the kernel dates changes, too.
    pub(crate) fn share_clock(&mut self) {
        self.clock = ChangeClock::new_shared();
    }

    pub(crate) fn set_access_times(&mut self, rule: AccessTimeRule) {
        self.access_times = rule;
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The attributes of an inode. They may be cached for `valid_for`.
    pub(crate) fn attr(&self, ino: u64, valid_for: Duration) -> Result<Attr> {
        self.records.with_inode(ino, |record, extra| Ok(self.attr_of(record, extra, valid_for)))
    }

    pub(crate) fn is_directory(&self, ino: u64) -> Result<bool> {
        self.records.with_inode(ino, |record, _| Ok(record.directory().is_some()))
    }

    /// The inodes that some frontend knows.
    pub(crate) fn list_known(&self) -> Vec<Ino> {
        let mut known = vec![Ino(ROOT)];
        self.records.for_each(|record, _| {
            if !record.lookups.is_none() && record.ino != ROOT {
                known.push(Ino(record.ino));
            }
        });
        known
    }

    fn attr_of(
        &self,
        record: &InodeRecord,
        extra: Option<&RecordExtra>,
        valid_for: Duration,
    ) -> Attr {
        let (mut size, mut nlink) = (record.size, u32::from(record.parent != 0));
        nlink += extra.map_or(0, |extra| extra.links.len()) as u32;
        let blocks = match &record.body {
            RecordBody::Blocks(run) => BlockRun::from(*run).count.into(),
            RecordBody::Live(live) => live.blocks.load(Ordering::Relaxed),
            RecordBody::Directory(dir) => {
                size = dir.count.load(Ordering::Relaxed) * 32;
                nlink = if dir.is_dead() { 0 } else { 2 + dir.subdirs.load(Ordering::Relaxed) };
                0
            }
            RecordBody::Stored => u64::from(size > 0 && record.kind() == FileKind::Regular),
            RecordBody::Device(_) => 0,
        };
        let time = |time| Timestamp::from(record.time(time, extra));
        Attr {
            st_ino: record.ino,
            kind: record.kind(),
            perm: record.perm(),
            nlink,
            uid: record.uid,
            gid: record.gid,
            rdev: record.rdev(),
            size,
            blocks: blocks * (BLOCK as u64 / 512),
            blksize: BLOCK as u32,
            atime: time(TimeKind::Access),
            mtime: time(TimeKind::Modification),
            ctime: time(TimeKind::Change),
            btime: Some(time(TimeKind::Birth)),
            valid_for,
        }
    }

    /// The inode, with one more lookup.
    fn entry(
        &self,
        record: &InodeRecord,
        extra: Option<&RecordExtra>,
        lifetime: AnswerLifetime,
    ) -> Entry {
        record.lookups.add();
        let attr = self.attr_of(record, extra, lifetime.attributes);
        Entry { ino: Ino(record.ino), generation: 0, attr, valid_for: lifetime.name }
    }

    /// Returns true if the inode has no lookups any more.
    pub(crate) fn forget(&self, ino: u64, lookups: u64) -> bool {
        let left = self.records.with_inode(ino, |record, _| {
            let is_last = record.lookups.give_back(lookups);
            Ok((is_last, is_last && record.is_unused()))
        });
        let (is_last, is_unused) = left.unwrap_or_default();
        if is_unused {
            self.end(self.records.remove_unused(ino));
        }
        is_last
    }

    pub(crate) fn record_open(&self, ino: u64) -> Result<()> {
        self.records.with_inode(ino, |record, _| {
            record.opens.add();
            Ok(())
        })
    }

    /// Records that an open file was released. True if the content may leave memory.
    pub(crate) fn record_close(&self, ino: u64) -> bool {
        let left = self.records.with_inode(ino, |record, _| {
            let unused = record.opens.give_back(1) && record.is_unused();
            let is_idle = !unused && record.opens.is_none();
            Ok((
                unused,
                is_idle && matches!(&record.body, RecordBody::Live(live) if live.recency.note()),
            ))
        });
        if let Ok((true, _)) = left {
            self.end(self.records.remove_unused(ino));
        }
        left.is_ok_and(|(_, to_list)| to_list)
    }

    /// True if the inode is open.
    pub(crate) fn is_open(&self, ino: u64) -> bool {
        self.records.with_inode(ino, |record, _| Ok(!record.opens.is_none())).unwrap_or(false)
    }

    /// Notes a use of the content of an inode, if it has one in memory. True if the caller is to
    /// put it into the list of contents that may leave memory ([`NameStore::retire`]).
    pub(crate) fn record_use(&self, ino: u64) -> bool {
        let used = self.records.with_inode(ino, |record, _| {
            Ok(matches!(&record.body, RecordBody::Live(live) if live.recency.note()))
        });
        used.unwrap_or(false)
    }

    /// Ends an unused inode without names. Its blocks are free once the running group is durable.
    fn end(&self, gone: Option<InodeRecord>) {
        let Some(record) = gone else { return };
        match record.body {
            RecordBody::Stored | RecordBody::Device(_) => {}
            RecordBody::Blocks(run) => self.pool.give_up([run.into()]),
            RecordBody::Live(live) => lock(&live.content).end(&self.pool),
            RecordBody::Directory(dir) => lock(&dir.content).end(&self.pool),
        }
    }

    fn directory(&self, ino: u64) -> Result<Arc<DirectoryState>> {
        self.records.with_inode(ino, |record, _| record.directory().cloned().ok_or(Errno::ENOTDIR))
    }

    /// Records that the names of a directory changed. Its slot follows later: after a crash the
    /// times come from the entries.
    fn record_name_change(&self, ino: u64, dir: &DirectoryState, now: Timestamp) {
        dir.record_name_change(now);
        if !dir.waits.swap(true, Ordering::AcqRel) {
            lock(&self.waiting).push(ino);
        }
    }

    /// Takes the directories whose times wait. The caller must pass them to
    /// [`write_times`](NameStore::write_times).
    pub(crate) fn take_waiting(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.waiting))
    }

    /// Adds a directory to the running group, if its times wait. True if they did.
    pub(crate) fn write_times_of(&self, handle: &GroupReadGuard<'_>, ino: u64) -> bool {
        let taken = {
            let mut waiting = lock(&self.waiting);
            // A directory that is synced has mostly changed last.
            let at = waiting.iter().rposition(|dir| *dir == ino);
            at.map(|at| waiting.swap_remove(at))
        };
        self.write_times(handle, taken.as_slice());
        taken.is_some()
    }

    /// Adds directories to the running group, with their times.
    pub(crate) fn write_times(&self, handle: &GroupReadGuard<'_>, dirs: &[u64]) {
        for ino in dirs.iter().copied() {
            let _ = self.records.change(ino, |changing| {
                if let Some(dir) = changing.record.directory() {
                    dir.waits.store(false, Ordering::Release);
                }
                touch(handle, changing.record);
                Ok(())
            });
        }
    }

    /// The content of an inode of any kind.
    pub(crate) fn content(&self, ino: u64) -> Result<ContentState> {
        self.records.with_inode(ino, |record, _| match &record.body {
            RecordBody::Live(live) => Ok(ContentState::Here(Arc::clone(&live.content))),
            RecordBody::Directory(dir) => Ok(ContentState::Here(Arc::clone(&dir.content))),
            _ => Ok(ContentState::Stored),
        })
    }
    /// Loads the content that the slot of the inode holds into memory; `stored` reads it if that is
    /// needed. Only one thread at a time reads for an inode.
    pub(crate) fn load_content(
        &self,
        ino: u64,
        stored: impl FnOnce() -> Result<InodeData>,
    ) -> Result<Arc<Mutex<FileContent>>> {
        if let ContentState::Here(content) = self.content(ino)? {
            return Ok(content);
        }
        let known = self.records.with_inode(ino, |record, _| Ok(data_in_record(record)))?;
        let read = if known.is_none() { Some(stored()?) } else { None };
        self.records.change(ino, |changing| {
            let record = changing.record;
            // A forged snapshot may contradict a slot.
            if read.as_ref().is_some_and(|data| !is_stored(record, data)) {
                return Err(Errno::EIO);
            }
            if let RecordBody::Live(live) = &record.body {
                return Ok(Arc::clone(&live.content));
            }
            let (data, rdev) = match data_in_record(record).or(read) {
                Some(data) => (data, record.rdev()),
                // The content has become one that must be read, although no other thread may change
                // this.
                None => return Err(Errno::EIO),
            };
            let content = FileContent::new(data, record.size);
            let blocks = lock(&content).summarize().blocks;
            let live = LiveContent::new(Arc::clone(&content), blocks, rdev);
            record.body = RecordBody::Live(Arc::new(live));
            Ok(content)
        })
    }

    /// Takes the content of an inode out of memory, if the device has the content, it is not in
    /// use, and it was not used since the last call. True if it stays in memory, and in the list of
    /// contents that may leave memory.
    pub(crate) fn retire(&self, ino: u64) -> bool {
        let stays = self.records.change(ino, |changing| {
            let extra = changing.extra().is_some_and(|extra| extra.may_be_large());
            let record = changing.record;
            let RecordBody::Live(live) = &mut record.body else { return Ok(false) };
            if live.recency.take() || extra || record.dirty || !record.opens.is_none() {
                return Ok(true);
            }
            let rdev = live.rdev;
            // Every other owner of the content obtained it under the lock of this shard. The clock
            // of the cache may examine it, which changes nothing.
            let content = Arc::get_mut(live).map(|live| &live.content);
            let content = content.filter(|content| Arc::strong_count(content) == 1);
            let held = content.and_then(|content| content.try_lock().ok());
            let left = held.and_then(|mut held| held.retire(&self.pool));
            let stays = left.is_none();
            if let Some(data) = left {
                record.body = RecordBody::from_data(&data, rdev);
            }
            Ok(stays)
        });
        stays.unwrap_or(false)
    }

    /// Copies the new summary of a content, which the caller has locked, to its inode.
    pub(crate) fn settle(
        &self,
        handle: &GroupReadGuard<'_>,
        ino: u64,
        facts: ContentSummary,
    ) -> Result<()> {
        self.records.change(ino, |mut changing| {
            settle(&mut changing, facts);
            if facts.dirty {
                list_data(handle, changing.record);
            }
            Ok(())
        })
    }

    /// `ENOSPC` where another inode would take a slot that is left to changes, or where the index
    /// has no memory for it.
    fn check_slots(&self) -> Result<()> {
        let has_room = self.pool.has_index_for(INODE_MEMORY);
        match has_room && self.pool.free_slots(true) >= KEEP_SLOTS {
            true => Ok(()),
            false => Err(Errno::ENOSPC),
        }
    }

    /// Adds an inode to the running group again. The caller has locked its content.
    pub(crate) fn write_again(
        &self,
        handle: &GroupReadGuard<'_>,
        ino: u64,
        facts: ContentSummary,
    ) -> Result<()> {
        self.records.change(ino, |mut changing| {
            settle(&mut changing, facts);
            list(handle, changing.record);
            Ok(())
        })
    }

    /// The content of a file in memory that is on the device, if nothing but data and times has
    /// changed since.
    pub(crate) fn changed_in_data(&self, ino: u64) -> Option<SharedContent> {
        let found = self.records.with_inode(ino, |record, _| match &record.body {
            RecordBody::Live(live) if !record.changed => Ok(Some(Arc::clone(&live.content))),
            _ => Ok(None),
        });
        found.ok()?
    }

    /// The weight of an inode in a group, if its changes may wait for the next one: it is on the
    /// device, and nothing but data of it has changed, of so many pages at least.
    pub(crate) fn data_may_wait(&self, ino: u64, least: usize) -> Option<usize> {
        let rules = self.pool.commit_rules();
        let found = self.records.with_inode(ino, |record, _| match &record.body {
            RecordBody::Live(live) if !record.changed || !rules.changes_do_not_wait => {
                Ok(Some((Arc::clone(&live.content), weight(record))))
            }
            _ => Ok(None),
        });
        let (content, weight) = found.ok()??;
        lock(&content).may_wait(rules, least).then_some(weight)
    }

    /// Adds an inode to the running group as it is, if it has a name.
    pub(crate) fn rewrite(&self, handle: &GroupReadGuard<'_>, ino: u64) -> Result<()> {
        self.records.change(ino, |changing| {
            touch(handle, changing.record);
            Ok(())
        })
    }

    /// Inodes that may have one of these blocks: inodes whose only extent has one, and all inodes
    /// whose content is in memory, with the content.
    pub(crate) fn owners(
        &self,
        meets: &dyn Fn(BlockRun) -> bool,
    ) -> Vec<(u64, Option<SharedContent>)> {
        let mut owners = Vec::new();
        self.records.for_each(|record, _| match &record.body {
            RecordBody::Blocks(run) if meets((*run).into()) => owners.push((record.ino, None)),
            RecordBody::Live(live) => owners.push((record.ino, Some(Arc::clone(&live.content)))),
            RecordBody::Directory(dir) if record.has_extra => {
                owners.push((record.ino, Some(Arc::clone(&dir.content))));
            }
            _ => {}
        });
        owners
    }

    /// The number of inodes, and how many more there can be.
    pub(crate) fn count(&self) -> (u64, u64) {
        let (bytes, limit) = self.pool.index_bytes();
        let slots = self.pool.free_slots(false).saturating_sub(KEEP_SLOTS);
        let free = slots.min(limit.saturating_sub(bytes) / INODE_MEMORY);
        (self.pool.inodes().load(Ordering::Relaxed), free)
    }

    /// The number of inodes that one thread may change in a group: together with the inodes of all
    /// other threads they find slots.
    pub(crate) fn max_changes_per_thread(&self) -> usize {
        usize::try_from(self.pool.free_slots(true) / SHARE).unwrap_or(usize::MAX).max(1)
    }
}

/// Copies the summary of a content to the record.
fn settle(changing: &mut ChangingRecord<'_>, facts: ContentSummary) {
    changing.record.weight = u8::try_from(facts.records / RECORDS).unwrap_or(u8::MAX);
    if let RecordBody::Live(live) = &changing.record.body {
        live.blocks.store(facts.blocks, Ordering::Relaxed);
        changing.record.size = facts.size;
    }
}

/// Makes the running group examine the inode.
fn list(handle: &GroupReadGuard<'_>, record: &mut InodeRecord) {
    record.changed = true;
    list_data(handle, record);
}

/// Makes the running group, or a later one, examine an inode of which nothing but data has changed.
fn list_data(handle: &GroupReadGuard<'_>, record: &mut InodeRecord) {
    if !record.dirty {
        record.dirty = true;
        handle.add_changed(record.ino, weight(record));
    }
}

/// The weight of an inode in a group.
fn weight(record: &InodeRecord) -> usize {
    1 + HEAVY * usize::from(record.weight)
}

/// Makes the running group write the inode. An inode without a name owns no slot.
fn touch(handle: &GroupReadGuard<'_>, record: &mut InodeRecord) {
    if record.is_named() {
        list(handle, record);
    }
}

/// True if `data` is valid in the slot of an inode without a content in memory.
fn is_stored(record: &InodeRecord, data: &InodeData) -> bool {
    match (record.kind(), data) {
        (FileKind::Regular, InodeData::Inline(bytes))
        | (FileKind::Symlink, InodeData::Target(bytes)) => bytes.len() as u64 == record.size,
        _ => false,
    }
}

/// The data of an inode, if it is known without reading the slot.
fn data_in_record(record: &InodeRecord) -> Option<InodeData> {
    match (&record.body, record.kind()) {
        (RecordBody::Blocks(run), _) => {
            let BlockRun { block, count } = (*run).into();
            Some(InodeData::Extents(vec![DiskExtent { page: 0, block, count, unwritten: false }]))
        }
        (RecordBody::Stored, FileKind::Regular) if record.size == 0 => {
            Some(InodeData::Inline(Vec::new()))
        }
        (RecordBody::Stored, FileKind::Regular | FileKind::Symlink) => None,
        _ => Some(InodeData::Nothing),
    }
}
