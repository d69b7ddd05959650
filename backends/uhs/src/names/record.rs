//! An inode in memory: 128 bytes, and more only where it is in use.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use defuse_fs::posix::drop_set_id;
use defuse_fs::{FileKind, NAME_MAX, Timestamp};

use super::ROOT;
use super::order::EntryOrder;
use super::xattrs::XattrList;
use crate::content::FileContent;
use crate::format::inode::{DiskTime, InodeData, InodeLink, NAME_BYTES};
use crate::space::BlockRun;

/// The count of lookups or opens from which on it is never decreased: the inode stays until the
/// next mount.
const MANY: u32 = u32::MAX / 2;

/// An inode: two lines of the cache.
#[repr(align(64))]
pub(super) struct InodeRecord {
    pub(super) ino: u64,
    pub(super) size: u64,
    /// See [`TimeKind`].
    times: [i64; 4],
    /// The directory of the first name; 0 where there is none.
    pub(super) parent: u64,
    pub(super) stamp: u64,
    pub(super) name: ShortName,
    pub(super) body: RecordBody,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) lookups: UseCount,
    pub(super) opens: UseCount,
    mode: u16,
    /// The inode is in the list of the running group.
    pub(super) dirty: bool,
    /// More than the data of the file has changed since a group wrote it.
    pub(super) changed: bool,
    /// A file of O_TMPFILE without O_EXCL: its first name may come.
    pub(super) linkable: bool,
    /// The inode has a [`RecordExtra`].
    pub(super) has_extra: bool,
    /// Blocks of its records, in units of [`RECORDS`](super::RECORDS).
    pub(super) weight: u8,
}

/// The parts of a record that most inodes do not have. An inode with further links or extended
/// attributes is [`LiveContent`] or a directory.
#[derive(Default)]
pub(super) struct RecordExtra {
    /// All links but the first.
    pub(super) links: Vec<InodeLink>,
    pub(super) xattrs: XattrList,
    /// Times that do not fit into 64-bit nanoseconds.
    times: [Option<DiskTime>; 4],
}

impl RecordExtra {
    /// An extra that was read from a device.
    pub(super) fn from_loaded(links: &[InodeLink], xattrs: Vec<(Vec<u8>, Vec<u8>)>) -> Self {
        let (links, xattrs) =
            (links.get(1..).unwrap_or_default().to_vec(), XattrList::from_values(xattrs));
        RecordExtra { links, xattrs, times: [None; 4] }
    }

    pub(super) fn is_needed(&self) -> bool {
        !self.links.is_empty()
            || !self.xattrs.is_empty()
            || self.times.iter().any(|time| time.is_some())
    }

    /// Bytes of the records of all names but the first, and of extended attributes.
    pub(super) fn bytes(&self) -> usize {
        self.link_bytes() + self.xattrs.record_bytes()
    }

    /// Bytes of the records of all names but the first.
    pub(super) fn link_bytes(&self) -> usize {
        self.links.iter().map(|link| link_bytes(&link.name)).sum()
    }

    /// True if records may lie outside of the slot, so that the content in memory must record
    /// where.
    pub(super) fn may_be_large(&self) -> bool {
        !self.links.is_empty() || !self.xattrs.is_empty()
    }
}

/// Bytes of the record of a name.
pub(super) fn link_bytes(name: &[u8]) -> usize {
    NAME_BYTES - NAME_MAX + name.len()
}

/// The records with an [`RecordExtra`], by their place in the shard.
pub(super) type ExtraTable = HashMap<u32, Box<RecordExtra>>;

/// A time of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimeKind {
    Access,
    Modification,
    Change,
    Birth,
}

/// A time that is in the [`RecordExtra`].
const ELSEWHERE: i64 = i64::MIN;

/// The data of an inode, as far as it is in memory.
#[derive(Default)]
pub(super) enum RecordBody {
    /// All data is in the slot on the device (inline data, a target), or the inode has none.
    #[default]
    Stored,
    /// One extent from the first page on.
    Blocks(PackedRun),
    /// A device number.
    Device(u64),
    Live(Arc<LiveContent>),
    Directory(Arc<DirectoryState>),
}

impl RecordBody {
    /// The body of an inode without a content in memory; `data` is the remainder of a retired
    /// content.
    pub(super) fn from_data(data: &InodeData, rdev: u64) -> Self {
        match data {
            InodeData::Extents(extents) => extents.first().map_or(RecordBody::Stored, |extent| {
                RecordBody::Blocks(BlockRun::from(*extent).into())
            }),
            InodeData::Nothing if rdev != 0 => RecordBody::Device(rdev),
            _ => RecordBody::Stored,
        }
    }
}

/// A run of blocks in 12 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedRun {
    low: u32,
    high: u32,
    count: u32,
}

impl From<BlockRun> for PackedRun {
    fn from(run: BlockRun) -> Self {
        PackedRun { low: run.block as u32, high: (run.block >> 32) as u32, count: run.count }
    }
}

impl From<PackedRun> for BlockRun {
    fn from(run: PackedRun) -> Self {
        BlockRun { block: u64::from(run.high) << 32 | u64::from(run.low), count: run.count }
    }
}

/// A content in memory.
pub(super) struct LiveContent {
    pub(super) content: Arc<Mutex<FileContent>>,
    /// Blocks of the content.
    pub(super) blocks: AtomicU64,
    pub(super) rdev: u64,
    pub(super) recency: ContentRecency,
}

impl LiveContent {
    pub(super) fn new(content: Arc<Mutex<FileContent>>, blocks: u64, rdev: u64) -> LiveContent {
        LiveContent { content, blocks: blocks.into(), rdev, recency: ContentRecency::default() }
    }
}

/// Uses of a content, for the list of contents that may leave memory.
#[derive(Default)]
pub(super) struct ContentRecency {
    /// The content is in the list.
    is_listed: AtomicBool,
    /// The content was used since the clock last examined it.
    is_recent: AtomicBool,
}

impl ContentRecency {
    /// Records a use. True if the content is to be listed.
    pub(super) fn note(&self) -> bool {
        self.is_recent.store(true, Ordering::Relaxed);
        !self.is_listed.load(Ordering::Relaxed) && !self.is_listed.swap(true, Ordering::Relaxed)
    }

    /// True if there was a use since the last call.
    pub(super) fn take(&self) -> bool {
        self.is_recent.swap(false, Ordering::Relaxed)
    }
}

/// A directory. The numbers follow `entries`, for readers without its lock.
#[derive(Default)]
pub(super) struct DirectoryState {
    pub(super) entries: Mutex<EntryOrder>,
    pub(super) count: AtomicU64,
    pub(super) subdirs: AtomicU32,
    /// The directory was removed, and takes no names any more.
    pub(super) dead: AtomicBool,
    /// Nanoseconds since 1970 of the last change of a name, if the record does not know it.
    pub(super) names_changed_ns: AtomicI64,
    /// The directory is in the list of directories whose times wait.
    pub(super) waits: AtomicBool,
    /// The place of its records, where they do not fit into the slot.
    pub(super) content: Arc<Mutex<FileContent>>,
}

impl DirectoryState {
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn record_name_change(&self, now: Timestamp) {
        let ns = pack(now.into()).unwrap_or(0);
        self.names_changed_ns.store(ns, Ordering::Relaxed);
    }

    fn pending_time(&self) -> Option<DiskTime> {
        let ns = self.names_changed_ns.load(Ordering::Relaxed);
        (ns != 0).then(|| unpack(ns))
    }
}

/// A number of lookups or opens.
#[derive(Default)]
pub(super) struct UseCount(AtomicU32);

impl UseCount {
    pub(super) fn new_single() -> Self {
        UseCount(AtomicU32::new(1))
    }

    pub(super) fn add(&self) {
        if self.0.load(Ordering::Relaxed) < MANY {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Decreases the count. True if nothing is left.
    pub(super) fn give_back(&self, count: u64) -> bool {
        let less = |now: u32| match now < MANY {
            true => Some(now.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX))),
            false => None,
        };
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        self.is_none()
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// A name. Up to 22 bytes lie in place.
#[derive(Clone, Debug)]
pub(super) enum ShortName {
    Here(u8, [u8; 22]),
    Heap(Box<[u8]>),
}

impl ShortName {
    pub(super) const NONE: ShortName = ShortName::Here(0, [0; 22]);

    pub(super) fn as_bytes(&self) -> &[u8] {
        match self {
            ShortName::Here(len, bytes) => &bytes[..usize::from(*len)],
            ShortName::Heap(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for ShortName {
    fn from(name: &[u8]) -> Self {
        let mut bytes = [0; 22];
        match bytes.get_mut(..name.len()) {
            Some(place) => {
                place.copy_from_slice(name);
                ShortName::Here(name.len() as u8, bytes)
            }
            None => ShortName::Heap(name.into()),
        }
    }
}

fn pack(moment: DiskTime) -> Option<i64> {
    let ns = moment.sec.checked_mul(1_000_000_000)?.checked_add(moment.nsec.into())?;
    (ns != ELSEWHERE).then_some(ns)
}

fn unpack(ns: i64) -> DiskTime {
    let (sec, nsec) = (ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000));
    DiskTime { sec, nsec: nsec as u32 }
}

impl InodeRecord {
    pub(super) fn new(ino: u64, mode: u32, (uid, gid): (u32, u32), body: RecordBody) -> Self {
        InodeRecord {
            ino,
            size: 0,
            times: [0; 4],
            parent: 0,
            stamp: 0,
            name: ShortName::NONE,
            body,
            uid,
            gid,
            lookups: UseCount::default(),
            opens: UseCount::default(),
            mode: mode as u16,
            dirty: false,
            changed: false,
            linkable: false,
            has_extra: false,
            weight: 0,
        }
    }

    pub(super) fn mode(&self) -> u32 {
        self.mode.into()
    }

    pub(super) fn kind(&self) -> FileKind {
        FileKind::from_mode(self.mode()).unwrap_or(FileKind::Regular)
    }

    pub(super) fn perm(&self) -> u32 {
        self.mode() & 0o7777
    }

    pub(super) fn set_perm(&mut self, perm: u32) {
        self.mode = self.mode & !0o7777 | (perm & 0o7777) as u16;
    }

    pub(super) fn is_named(&self) -> bool {
        self.parent != 0 || self.ino == ROOT
    }

    pub(super) fn directory(&self) -> Option<&Arc<DirectoryState>> {
        match &self.body {
            RecordBody::Directory(dir) => Some(dir),
            _ => None,
        }
    }

    /// True if neither a name nor a frontend needs the inode.
    pub(super) fn is_unused(&self) -> bool {
        !self.is_named() && self.lookups.is_none() && self.opens.is_none()
    }

    pub(super) fn rdev(&self) -> u64 {
        match &self.body {
            RecordBody::Device(rdev) => *rdev,
            RecordBody::Live(live) => live.rdev,
            _ => 0,
        }
    }

    /// The times as nanoseconds; `None` where one does not fit.
    pub(super) fn packed_times(&self) -> Option<[i64; 4]> {
        let all = [TimeKind::Access, TimeKind::Modification, TimeKind::Change, TimeKind::Birth];
        let mut packed = [0; 4];
        for (time, packed) in all.into_iter().zip(&mut packed) {
            *packed = pack(self.time(time, None))?;
        }
        let elsewhere = self.times.contains(&ELSEWHERE);
        (!elsewhere).then_some(packed)
    }

    /// Sets all times from the result of [`packed_times`](InodeRecord::packed_times). False if a
    /// time is not in this form.
    pub(super) fn set_packed_times(&mut self, packed: [i64; 4]) -> bool {
        self.times = packed;
        !packed.contains(&ELSEWHERE)
    }

    pub(super) fn time(&self, time: TimeKind, extra: Option<&RecordExtra>) -> DiskTime {
        let kept = match self.times[time as usize] {
            ELSEWHERE => extra.and_then(|extra| extra.times[time as usize]).unwrap_or_default(),
            ns => unpack(ns),
        };
        match (time, self.directory().and_then(|dir| dir.pending_time())) {
            (TimeKind::Modification | TimeKind::Change, Some(pending)) => kept.max(pending),
            _ => kept,
        }
    }
}

/// A record that changes, with the extras of its shard.
pub(super) struct ChangingRecord<'a> {
    pub(super) record: &'a mut InodeRecord,
    pub(super) extras: &'a mut ExtraTable,
    pub(super) at: u32,
}

impl ChangingRecord<'_> {
    pub(super) fn extra(&self) -> Option<&RecordExtra> {
        self.extras.get(&self.at).map(|extra| &**extra)
    }

    pub(super) fn make_extra(&mut self) -> &mut RecordExtra {
        self.record.has_extra = true;
        self.extras.entry(self.at).or_default()
    }

    /// Drops the extra where it is empty.
    pub(super) fn drop_empty_extra(&mut self) {
        if self.record.has_extra && self.extra().is_none_or(|extra| !extra.is_needed()) {
            self.extras.remove(&self.at);
            self.record.has_extra = false;
        }
    }

    pub(super) fn set_time(&mut self, time: TimeKind, moment: DiskTime) {
        let packed = pack(moment);
        self.record.times[time as usize] = packed.unwrap_or(ELSEWHERE);
        if packed.is_none() || self.record.has_extra {
            self.make_extra().times[time as usize] = packed.is_none().then_some(moment);
            self.drop_empty_extra();
        }
    }

    /// Copies the time of the last change of a name from the directory.
    pub(super) fn settle_times(&mut self) {
        let Some(dir) = self.record.directory().cloned() else { return };
        if dir.pending_time().is_some() {
            for time in [TimeKind::Modification, TimeKind::Change] {
                let moment = self.record.time(time, self.extra());
                self.set_time(time, moment);
            }
            dir.names_changed_ns.store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn set_modified(&mut self, now: Timestamp) {
        self.set_time(TimeKind::Modification, now.into());
        self.set_time(TimeKind::Change, now.into());
    }

    /// Clears set-user-id and related bits, as a write without privilege and a change of owner do.
    pub(super) fn kill_suidgid(&mut self) {
        self.record.set_perm(drop_set_id(self.record.perm(), true));
        if self.record.has_extra {
            self.make_extra().xattrs.drop_capability();
            self.drop_empty_extra();
        }
    }

    /// Changes the permission bits, chmod(2), and the access ACL with them.
    pub(super) fn chmod(&mut self, perm: u32) {
        self.record.set_perm(perm);
        if self.record.has_extra {
            self.make_extra().xattrs.chmod(perm);
        }
    }

    pub(super) fn links(&self) -> usize {
        let more = self.extra().map_or(0, |extra| extra.links.len());
        usize::from(self.record.parent != 0) + more
    }

    pub(super) fn add_link(&mut self, parent: u64, stamp: u64, name: &[u8]) {
        if self.record.parent == 0 {
            (self.record.parent, self.record.stamp) = (parent, stamp);
            self.record.name = name.into();
        } else {
            let link = InodeLink { parent, stamp, name: name.to_vec() };
            self.make_extra().links.push(link);
        }
    }

    /// Removes a name. Returns its stamp.
    pub(super) fn remove_link(&mut self, parent: u64, name: &[u8]) -> Option<u64> {
        if self.record.parent == parent && self.record.name.as_bytes() == name {
            let stamp = self.record.stamp;
            let next = match self.record.has_extra {
                true => Some(&mut self.make_extra().links)
                    .and_then(|links| (!links.is_empty()).then(|| links.remove(0))),
                false => None,
            };
            (self.record.parent, self.record.stamp) =
                next.as_ref().map_or((0, 0), |link| (link.parent, link.stamp));
            self.record.name = next.map_or(ShortName::NONE, |link| link.name[..].into());
            self.drop_empty_extra();
            return Some(stamp);
        }
        let links = &mut self.extras.get_mut(&self.at)?.links;
        let at = links.iter().position(|link| link.parent == parent && link.name == name)?;
        let stamp = links.remove(at).stamp;
        self.drop_empty_extra();
        Some(stamp)
    }
}
