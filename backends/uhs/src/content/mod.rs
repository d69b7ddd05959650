//! The bytes of one file: inline, or pages and the extents that say where they lie.
//!
//! Nothing here knows a name, a permission or a time, and nothing does I/O. Others build on these rules:
//!
//! - A [`Content`] is the `Arc<Mutex<Content>>` of one inode. Names and attributes are in the tree, which
//!   keeps copies of size and blocks ([`Facts`]), so that stat(2) needs no content. Whoever changes a
//!   content takes the new [`Facts`] to the tree (`Tree::settle`) before it unlocks the content.
//! - Lock order: handle of the running group, content, tree, [`Pool`]. No lock is held while a device
//!   works: [`Content::missing`] says what to read, [`Content::fill`] takes it in.
//! - A method that changes a content is called with a handle of the running group (`Gate::enter`), and
//!   returns without waiting for anything.
//! - A closing group stops all handles and calls [`Content::place`] for each content with dirty pages:
//!   pages get their blocks, and their bytes are *shared* with the group. A later write to a shared page
//!   makes a copy ([`Arc::make_mut`]). So the group writes while everybody goes on.
//! - [`Content::end`] is called once, when the inode has neither names nor users. Later calls of other
//!   methods find an empty content.
//! - Blocks that a content gives up go to [`Pool::give_up`]: they are free when the group that no
//!   longer mentions them is durable.

pub(crate) mod extents;
mod pages;
mod place;
pub(crate) mod pool;

use std::collections::BTreeMap;

use crate::format::inode::{Data, Extent};
use crate::space::Run;
pub(crate) use pages::Bytes;
use pages::Page;
pub(crate) use pool::Pool;

/// The bytes of a file, the target of a symbolic link, or nothing.
#[derive(Default)]
pub(crate) struct Content {
    data: Data,
    size: u64,
    pages: BTreeMap<u64, Page>,
    /// Pages that differ from the device, and those that a block is promised to.
    dirty: u64,
    promised: u64,
    /// Blocks with records of the inode.
    records: Vec<Run>,
    /// The inode is gone.
    ended: bool,
}

/// The facts about a content that its inode repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Bytes.
    pub(crate) size: u64,
    /// Blocks that it has, or that are promised to it.
    pub(crate) blocks: u64,
    /// Pages wait to be written.
    pub(crate) dirty: bool,
}

impl Content {
    /// The content of an inode as the device has it.
    pub(crate) fn new(data: Data, size: u64, records: Vec<Run>) -> Self {
        Content { data, size, records, ..Content::default() }
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The data as the inode stores it.
    pub(crate) fn data(&self) -> &Data {
        &self.data
    }

    pub(crate) fn facts(&self) -> Facts {
        let kept: u64 = match &self.data {
            Data::Extents(extents) => extents.iter().map(|extent| u64::from(extent.count)).sum(),
            // Programs such as tar take a file without blocks for a hole.
            Data::Inline(bytes) => u64::from(!bytes.is_empty()),
            _ => 0,
        };
        Facts { size: self.size, blocks: kept + self.promised, dirty: self.dirty > 0 }
    }

    /// Replaces the blocks with records. The old ones are free when the running group is durable.
    pub(crate) fn replace_records(&mut self, pool: &Pool, records: Vec<Run>) {
        pool.give_up(std::mem::replace(&mut self.records, records));
    }

    /// Gives everything up.
    pub(crate) fn end(&mut self, pool: &Pool) {
        if let Data::Extents(extents) = std::mem::take(&mut self.data) {
            pool.give_up(extents.into_iter().map(Run::from));
        }
        pool.give_up(std::mem::take(&mut self.records));
        for page in std::mem::take(&mut self.pages).into_values() {
            self.forget_page(pool, &page);
        }
        self.size = 0;
        self.ended = true;
    }

    /// Drops everything that can be read again: pages, inline data, a target. Returns what is left to
    /// remember, which is at most one extent; `None` where more is needed.
    pub(crate) fn retire(&mut self, pool: &Pool) -> Option<Data> {
        if self.dirty + self.promised > 0 || !self.records.is_empty() {
            return None;
        }
        let left = match &self.data {
            Data::Nothing => Data::Nothing,
            Data::Inline(_) | Data::Target(_) => Data::Inline(Vec::new()),
            Data::Extents(extents) => match extents[..] {
                [Extent { page: 0, block, count }] => {
                    Data::Extents(vec![Extent { page: 0, block, count }])
                }
                _ => return None,
            },
        };
        for page in std::mem::take(&mut self.pages).into_values() {
            self.forget_page(pool, &page);
        }
        Some(left)
    }

    fn forget_page(&mut self, pool: &Pool, page: &Page) {
        self.dirty -= u64::from(page.dirty);
        self.promised -= u64::from(page.promised);
        pool.forget_page(page);
    }
}
