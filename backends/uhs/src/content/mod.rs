//! The bytes of one file: inline, or pages and the extents that locate them.
//!
//! This module knows no names, permissions or times, and does no I/O. Other modules rely on these
//! rules:
//!
//! - A [`FileContent`] is in the [`SharedContent`] of one inode. Names and attributes are in
//!   `names/`, which keeps copies of size and blocks ([`ContentSummary`]), so that stat(2) needs no
//!   content. A caller that changes a content passes the new [`ContentSummary`] to
//!   `NameStore::settle` before it unlocks the content.
//! - Lock order: handle of the running group, content, names, [`BlockPool`]. No lock is held while
//!   a device works: [`FileContent::find_missing`] returns the pages to read, [`FileContent::fill`]
//!   takes them in. Meanwhile, [`FileContent::begin_fetch`] makes other readers wait.
//! - A method that changes a content is called with a handle of the running group
//!   (`GroupLock::enter`), and returns without waiting for anything.
//! - A change needs pages and frames ([`ChangeDemand`]), which are read and taken while nothing is
//!   locked.
//! - A closing group stops all handles and calls [`FileContent::allocate_blocks`] for each content
//!   with dirty pages: pages get their blocks, and their frames are *shared* with the group. A
//!   later write to a shared page takes another frame. So changes go on while the group is written.
//! - [`FileContent::end`] is called once, when the inode has neither names nor users. Later calls
//!   of other methods find an empty content.
//! - Blocks that a content gives up go to [`BlockPool::give_up`]: they are free when the group that
//!   no longer mentions them is durable.

mod batches;
mod direct;
pub(crate) mod extents;
mod fetches;
mod frames;
mod growth;
mod moving;
mod page_set;
mod page_table;
mod pages;
mod place;
pub(crate) mod pool;
mod ranges;
mod readahead;
mod records;
#[cfg(test)]
mod tests;
mod tree;
mod write_errors;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use crate::commit::CommitRules;
use crate::format::inode::{DiskExtent, EXTENT_BYTES, INLINE, InodeData, RecordWriter};
use direct::DirectWrites;
pub(crate) use direct::{DirectSource, DirectTarget, whole_pages};
use extents::ExtentMap;
use fetches::FetchList;
pub(crate) use frames::{FrameDemand, FrameSupply, PageFrame};
use growth::FileGrowth;
use page_set::PageSet;
use page_table::PageTable;
pub(crate) use pages::ChangeDemand;
pub(crate) use pool::{BlockPool, INODE_MEMORY};
use readahead::ReadaheadState;
use records::OverflowRecords;
use tree::ExtentTree;

/// A content that its inode and its users share.
pub(crate) type SharedContent = Arc<Mutex<FileContent>>;

/// The bytes of a file, the target of a symbolic link, or nothing.
#[derive(Default)]
pub(crate) struct FileContent {
    /// All data but the extents.
    data: InodeData,
    extents: ExtentMap,
    size: u64,
    pages: PageTable,
    /// Pages that differ from the device.
    dirty: PageSet,
    /// Dirty pages that take a new block when they are written. The block is set aside for them.
    promised: PageSet,
    outside: OverflowRecords,
    tree: ExtentTree,
    /// Dirty pages that the device does not take.
    stuck: PageSet,
    /// Stuck pages that the group does not write.
    waits: PageSet,
    /// Pages whose blocks the last group wrote for the first time.
    placed: Vec<Range<u64>>,
    /// Pages that were written early since then, before the group that records their blocks.
    early: Vec<Range<u64>>,
    /// The batches of these pages.
    early_batches: BTreeSet<u64>,
    /// The blocks of pages that could not be written there, and that the group writes elsewhere.
    replaced: BTreeMap<u64, u64>,
    /// Stuck pages were given up, and no caller has received the error yet.
    has_failed_write: bool,
    /// Blocks that the durable inode may have were given up since the last group.
    lost_blocks: bool,
    /// From this page on blocks have moved since the last group: durable until this batch is, the
    /// inode has them elsewhere.
    shifted: Option<(u64, u64)>,
    /// The size and the changes of extents that the last group has recorded in the inode.
    recorded: (u64, u64),
    /// Changes with the blocks, and when dirty pages are written.
    version: u64,
    ahead: ReadaheadState,
    fetches: FetchList,
    growth: FileGrowth,
    direct: DirectWrites,
    /// The inode is gone.
    ended: bool,
    me: Weak<Mutex<FileContent>>,
}

/// The facts about a content that its inode repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContentSummary {
    /// Bytes.
    pub(crate) size: u64,
    /// Blocks that it has, or that are promised to it.
    pub(crate) blocks: u64,
    /// The next group has to place something.
    pub(crate) dirty: bool,
    /// Blocks that a copy of the records takes at most.
    pub(crate) records: u64,
}

impl FileContent {
    /// Makes the content of an inode from the data that the device has.
    pub(crate) fn new(mut data: InodeData, size: u64) -> SharedContent {
        let extents = match &mut data {
            InodeData::Extents(extents) => std::mem::take(extents).into_iter().collect(),
            _ => ExtentMap::default(),
        };
        Arc::new_cyclic(|me| {
            let me = Weak::clone(me);
            let recorded = (size, extents.changes());
            Mutex::new(FileContent { data, extents, size, recorded, me, ..FileContent::default() })
        })
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The data as the inode stores it.
    pub(crate) fn data(&self) -> Cow<'_, InodeData> {
        match &self.data {
            InodeData::Extents(_) => Cow::Owned(InodeData::Extents(self.extents.iter().collect())),
            data => Cow::Borrowed(data),
        }
    }

    /// The most bytes that the records of the data have.
    pub(crate) fn bytes_of_data(&self) -> usize {
        match &self.data {
            InodeData::Extents(_) => EXTENT_BYTES * (1 + self.extents.count()),
            data => data.bytes(),
        }
    }

    /// Adds the records of the data.
    pub(crate) fn encode_data(&self, out: &mut RecordWriter) {
        match &self.data {
            InodeData::Extents(_) => out.extents(self.extents.iter()),
            data => out.data(data),
        }
    }

    fn is_inline(&self) -> bool {
        matches!(self.data, InodeData::Inline(_))
    }

    pub(crate) fn summarize(&self) -> ContentSummary {
        let kept = match &self.data {
            // Programs such as tar take a file without blocks for a hole.
            InodeData::Inline(bytes) => u64::from(!bytes.is_empty()),
            _ => self.extents.blocks(),
        };
        // A page that moves has a block and a promise.
        let blocks = kept + self.promised.len() as u64;
        let dirty = !self.dirty.is_empty() || !self.early.is_empty() || self.is_shifting();
        ContentSummary { size: self.size, blocks, dirty, records: self.outside.copy_blocks() }
    }

    /// True if the group may leave the data to the next one: it has so many pages at least, and the
    /// inode on the device has no block that others may take when the group is durable.
    pub(crate) fn may_wait(&self, rules: CommitRules, least: usize) -> bool {
        let early: u64 = self.early.iter().map(|run| run.end - run.start).sum();
        let pages = self.dirty.len() + early as usize;
        let keeps = !self.lost_blocks || !rules.lost_blocks_do_not_wait;
        let is_whole = self.stuck.is_empty() && self.replaced.is_empty() && !self.is_shifting();
        pages >= least && keeps && is_whole
    }

    /// True if the data can be written in place, without a group: size and blocks are as the last
    /// group recorded them, and the data is little, so that others may wait for it.
    pub(crate) fn is_as_recorded(&self, pool: &BlockPool) -> bool {
        let rules = pool.commit_rules();
        let is_recorded = self.recorded == (self.size, self.extents.changes())
            || !rules.syncs_in_place_know_extents;
        is_recorded
            && matches!(self.data, InodeData::Extents(_))
            && self.promised.is_empty()
            && self.early.is_empty()
            && self.stuck.is_empty()
            && self.replaced.is_empty()
            && !self.is_shifting()
            && !self.is_overwriting()
            && self.dirty.len() < rules.pages_in_place
            && !self.dirty.iter().any(|page| self.is_unwritten(page))
    }

    fn is_unwritten(&self, page: u64) -> bool {
        self.extents.find(page).is_none_or(|extent| extent.unwritten)
    }

    /// Gives up all blocks and pages.
    pub(crate) fn end(&mut self, pool: &BlockPool) {
        self.drop_pages(pool, 0..u64::MAX);
        self.stop_growing(pool);
        self.end_records(pool);
        self.early.clear();
        self.early_batches.clear();
        self.data = InodeData::Nothing;
        self.size = 0;
        self.ended = true;
    }

    /// Drops everything that can be read again: pages, inline data, a target. Returns the data to
    /// remember, which is at most one extent; `None` if more is needed, or if the device does not
    /// have the content yet.
    pub(crate) fn retire(&mut self, pool: &BlockPool) -> Option<InodeData> {
        let mut extents = self.extents.iter();
        let left = match (&self.data, extents.next(), extents.next()) {
            (InodeData::Nothing, ..) => InodeData::Nothing,
            // With a longer one, another name may be more than the slot has room for.
            (InodeData::Target(target), ..) if target.len() > INLINE => return None,
            (InodeData::Inline(_) | InodeData::Target(_), ..) => InodeData::Inline(Vec::new()),
            (
                InodeData::Extents(_),
                Some(only @ DiskExtent { page: 0, unwritten: false, .. }),
                None,
            ) => InodeData::Extents(vec![only]),
            _ => return None,
        };
        let written = pool.newest_written();
        let waits = !self.dirty.is_empty() || self.shifted.is_some() || self.outside.is_used();
        let waits = waits || self.has_failed_write || !self.early.is_empty();
        if waits || self.pages.range(0..u64::MAX).any(|(_, page)| page.batch > written) {
            return None;
        }
        drop(extents);
        self.stop_growing(pool);
        self.pages.clear();
        Some(left)
    }
}
