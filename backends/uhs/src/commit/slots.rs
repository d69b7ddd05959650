//! The slots of all chunks: what lies in each, and when it may be overwritten.

use crate::format::UNIT_BLOCKS;
use crate::format::superblock::Chunk;

/// No inode.
pub(super) const NOBODY: u64 = 0;

/// A slot. It is used again when it is neither live nor being written, and the group that freed it is
/// known to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The inode whose copy lies here, live or stale, or is on its way.
    pub(crate) owner: u64,
    /// The group that freed it; 0 where it never held anything that counts.
    pub(crate) freed: u64,
    /// Its content counts.
    pub(crate) live: bool,
    /// A write to it is not durable yet.
    pub(crate) writing: bool,
}

impl Slot {
    const EMPTY: Slot = Slot { owner: NOBODY, freed: 0, live: false, writing: false };

    /// The inode whose copy lies here.
    pub(crate) fn owner(&self) -> Option<u64> {
        (self.owner != NOBODY).then_some(self.owner)
    }

    fn is_free(&self, durable: u64) -> bool {
        !self.live && !self.writing && self.freed <= durable
    }
}

/// All slots, by the blocks in which they lie.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    chunks: Vec<Run>,
    /// Where the search for free slots goes on: a chunk and a slot of it. Free slots that follow each
    /// other are written together.
    cursor: (usize, usize),
    /// Slots that may be used, counted from the first.
    usable: usize,
}

#[derive(Debug)]
struct Run {
    first: u64,
    slots: Vec<Slot>,
}

impl Slots {
    /// The slots of `chunks`, all empty, of which `usable` may be used.
    pub(crate) fn new(chunks: &[Chunk], usable: usize) -> Self {
        let mut slots = Slots { usable, ..Slots::default() };
        chunks.iter().for_each(|chunk| slots.add(chunk));
        slots
    }

    /// Adds an empty chunk.
    pub(crate) fn add(&mut self, chunk: &Chunk) {
        let first = u64::from(chunk.first_unit) * UNIT_BLOCKS;
        let count = u64::from(chunk.units) * UNIT_BLOCKS;
        let run = Run { first, slots: vec![Slot::EMPTY; count as usize] };
        let at = self.chunks.partition_point(|other| other.first < first);
        self.chunks.insert(at, run);
        self.cursor = (at, 0);
    }

    /// The slot at `block`.
    ///
    /// # Panics
    ///
    /// When no chunk has this block.
    pub(crate) fn at(&mut self, block: u64) -> &mut Slot {
        let after = self.chunks.partition_point(|run| run.first <= block);
        let run = after.checked_sub(1).map(|at| &mut self.chunks[at]);
        run.and_then(|run| run.slots.get_mut((block - run.first) as usize))
            .unwrap_or_else(|| panic!("block {block} is no slot"))
    }

    /// The slot at `block`, to look at.
    ///
    /// # Panics
    ///
    /// When no chunk has this block.
    pub(crate) fn get(&self, block: u64) -> Slot {
        let after = self.chunks.partition_point(|run| run.first <= block);
        let run = after.checked_sub(1).map(|at| &self.chunks[at]);
        let slot = run.and_then(|run| run.slots.get((block - run.first) as usize));
        *slot.unwrap_or_else(|| panic!("block {block} is no slot"))
    }

    /// The blocks of `count` slots that may be overwritten when `durable` is the newest group that the
    /// device says is durable; fewer where there are not so many.
    pub(crate) fn find(&mut self, count: usize, durable: u64) -> Vec<u64> {
        let mut found = Vec::with_capacity(count);
        for _ in 0..self.count() {
            if found.len() == count {
                break;
            }
            let (chunk, at) = self.cursor;
            let run = &self.chunks[chunk];
            if run.slots[at].is_free(durable) {
                found.push(run.first + at as u64);
            }
            self.cursor = match at + 1 < run.slots.len().min(self.usable) {
                true => (chunk, at + 1),
                false => ((chunk + 1) % self.chunks.len(), 0),
            };
        }
        found
    }

    fn count(&self) -> usize {
        self.chunks.iter().map(|run| run.slots.len().min(self.usable)).sum()
    }
}
