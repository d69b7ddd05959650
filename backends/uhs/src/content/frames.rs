//! Memory of pages: frames of a region, and the clock that chooses which frames are given back.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use defuse_block::{FRAME, FrameRun, MemoryRegion, MemorySegments};
use smallvec::SmallVec;

use super::{BlockPool, FileContent};

/// Frames of one run of new pages at most: 64 KiB, so that a page that stays keeps few others.
pub(crate) const RUN: usize = 16;

/// Frames of the region for records that are written.
const RECORDS: u32 = 256;

/// Frames that writes and reads have beside the cache.
const SPARE: usize = 1024;

/// The number of clock entries that a thread examines to keep the cache small.
const TURNS: usize = 64;

/// The bytes of a page: a frame of a run. The page shares the run with its neighbours, and shares
/// the frame with a group while the group writes it.
#[derive(Clone)]
pub(crate) struct PageFrame {
    run: Arc<FrameRun>,
    at: u16,
}

impl PageFrame {
    /// The frames of a run, each for a page. A long run is split into several, which are given back
    /// separately.
    pub(crate) fn split_run(run: FrameRun) -> impl Iterator<Item = PageFrame> {
        let mut rest = Some(run);
        let runs = std::iter::from_fn(move || {
            let mut run = rest.take()?;
            rest = (run.count() as usize > RUN).then(|| run.split_off(RUN as u32));
            Some(Arc::new(run))
        });
        runs.flat_map(|run| {
            (0..run.count() as u16).map(move |at| PageFrame { run: Arc::clone(&run), at })
        })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.run[usize::from(self.at) * FRAME..][..FRAME]
    }

    /// The bytes, to be changed. `None` while another owner has a frame of the run.
    pub(super) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let at = usize::from(self.at) * FRAME;
        Arc::get_mut(&mut self.run).map(|run| &mut run[at..][..FRAME])
    }

    /// True if no other owner has a frame of the run.
    pub(super) fn is_alone(&self) -> bool {
        Arc::strong_count(&self.run) == 1
    }

    /// The memory of an operation that writes these frames one after the other.
    pub(crate) fn segments<'a>(frames: impl IntoIterator<Item = &'a PageFrame>) -> MemorySegments {
        let mut pieces: Vec<defuse_block::OperationMemory> = Vec::new();
        let mut open: Option<(&PageFrame, usize)> = None;
        let memory = |(first, count): (&PageFrame, usize)| {
            let from = usize::from(first.at) * FRAME;
            defuse_block::OperationMemory::Shared(
                Arc::clone(&first.run),
                from..from + count * FRAME,
            )
        };
        for frame in frames {
            open = match open {
                Some((first, count))
                    if Arc::ptr_eq(&first.run, &frame.run)
                        && usize::from(first.at) + count == usize::from(frame.at) =>
                {
                    Some((first, count + 1))
                }
                other => {
                    pieces.extend(other.map(memory));
                    Some((frame, 1))
                }
            };
        }
        match (pieces.is_empty(), open) {
            (true, Some(only)) => MemorySegments::One(memory(only)),
            (_, last) => {
                pieces.extend(last.map(memory));
                MemorySegments::Many(pieces)
            }
        }
    }
}

/// Frames for a change of a content, taken while nothing is locked.
#[derive(Default)]
pub(crate) struct FrameSupply {
    /// For pages that are written whole, in order.
    whole: SmallVec<[FrameRun; 1]>,
    /// For pages that are changed in part.
    single: SmallVec<[FrameRun; 1]>,
}

/// The frames that a change needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FrameDemand {
    /// Neighbouring pages that are written whole.
    pub(crate) whole: usize,
    /// Pages that are changed in part.
    pub(crate) single: usize,
}

impl FrameSupply {
    /// True if the supply has the frames of `wanted`.
    pub(crate) fn has(&self, wanted: FrameDemand) -> bool {
        let whole: u32 = self.whole.iter().map(FrameRun::count).sum();
        whole as usize == wanted.whole && self.single.len() >= wanted.single
    }

    /// The next run, for at most `pages` pages.
    pub(super) fn next_whole(&mut self, pages: u64) -> Option<FrameRun> {
        let fits = self.whole.first().is_some_and(|run| u64::from(run.count()) <= pages);
        fits.then(|| self.whole.remove(0))
    }

    pub(super) fn single(&mut self) -> Option<FrameRun> {
        self.single.pop()
    }
}

/// Pages of a content that came into memory together. Each page has the number of the entry, so
/// that no other entry keeps it.
struct CacheEntry {
    content: Weak<Mutex<FileContent>>,
    number: u64,
    first: u64,
    count: u64,
}

/// The frames of all contents.
pub(crate) struct FrameCache {
    region: Arc<MemoryRegion>,
    /// The number of frames in use at which the cache begins to drop pages that are on the device.
    limit: usize,
    clock: Mutex<VecDeque<CacheEntry>>,
    /// The number of the newest entry.
    newest: AtomicU64,
}

impl FrameCache {
    /// Memory for `cache` pages, and `dirty` pages beside them.
    pub(super) fn new(cache: usize, dirty: usize) -> defuse_block::Result<Self> {
        let frames = cache.saturating_add(dirty).saturating_add(SPARE);
        let region = MemoryRegion::new(u32::try_from(frames).unwrap_or(u32::MAX))?;
        Ok(FrameCache { region, limit: cache, clock: Mutex::default(), newest: AtomicU64::new(0) })
    }

    fn in_use(&self) -> usize {
        (self.region.frames() - self.region.free_frames()) as usize
    }

    fn clock(&self) -> MutexGuard<'_, VecDeque<CacheEntry>> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockPool {
    /// The region of the frames, so that devices can register it.
    pub(crate) fn region(&self) -> Option<&Arc<MemoryRegion>> {
        self.memory().map(|memory| &memory.region)
    }

    /// The number of frames in use, and the number at which the cache begins to drop pages that are
    /// on the device.
    pub(crate) fn frames_in_use(&self) -> (usize, usize) {
        self.memory().map_or((0, 0), |memory| (memory.in_use(), memory.limit))
    }

    /// Takes up to `count` neighbouring frames. Pages that are on the device may be dropped for
    /// them. `None` if all frames hold pages that are not on the device or are in use.
    pub(crate) fn frames(&self, count: usize) -> Option<FrameRun> {
        let memory = self.memory()?;
        while memory.in_use() + count > memory.limit && self.evict(memory, TURNS) > 0 {}
        let mut count = count as u32;
        loop {
            if let Some(frames) = memory.region.take(count) {
                return Some(frames);
            }
            // The free frames, if any, are not contiguous.
            if count > 1 {
                count /= 2;
            } else if self.evict(memory, usize::MAX) == 0 {
                return None;
            }
        }
    }

    /// Frames with these blocks of records, in memory of their own: a group needs them when the
    /// cache has none.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`MemoryRegion::new`].
    pub(crate) fn frames_of_records(
        &self,
        blocks: &[(u64, [u8; FRAME])],
    ) -> defuse_block::Result<Vec<PageFrame>> {
        let mut frames = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(RUN) {
            let mut run = self.record_frames(part.len() as u32)?;
            for ((_, bytes), out) in part.iter().zip(run.chunks_mut(FRAME)) {
                out.copy_from_slice(bytes);
            }
            frames.extend(PageFrame::split_run(run));
        }
        Ok(frames)
    }

    /// A run of frames for records: of a region that is kept, or else of a new one.
    fn record_frames(&self, count: u32) -> defuse_block::Result<FrameRun> {
        let new = MemoryRegion::new;
        let mut kept = self.records_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_none() {
            *kept = Some(new(RECORDS)?);
        }
        if let Some(run) = kept.as_ref().and_then(|region| region.take(count)) {
            return Ok(run);
        }
        drop(kept);
        new(count.next_power_of_two())?.take(count).ok_or(defuse_block::Errno::NOMEM)
    }

    /// Adds the frames of `wanted` to a supply. False if there is no memory.
    pub(crate) fn supply(&self, wanted: FrameDemand, supply: &mut FrameSupply) -> bool {
        supply.whole.clear();
        let mut left = wanted.whole;
        while left > 0 {
            let Some(run) = self.frames(left.min(RUN)) else { return false };
            left -= run.count() as usize;
            supply.whole.push(run);
        }
        while supply.single.len() < wanted.single {
            let Some(run) = self.frames(1) else { return false };
            supply.single.push(run);
        }
        true
    }

    /// Drops pages that were not used since the clock last examined them, if up to `most` entries
    /// have some. Returns the number of dropped pages.
    fn evict(&self, memory: &FrameCache, most: usize) -> usize {
        let mut turns = memory.clock().len().saturating_mul(2).min(most);
        while turns > 0 {
            let mut clock = memory.clock();
            let count = clock.len().min(8);
            let some: SmallVec<[CacheEntry; 8]> = clock.drain(..count).collect();
            drop(clock);
            turns = turns.saturating_sub(count.max(1));
            let dropped = self.advance_clock(memory, some, None);
            if dropped > 0 {
                return dropped;
            }
        }
        0
    }

    /// Examines some entries. The caller has locked the content `mine`. Entries that keep pages go
    /// to the end of the clock.
    fn advance_clock(
        &self,
        memory: &FrameCache,
        entries: SmallVec<[CacheEntry; 8]>,
        mut mine: Option<&mut FileContent>,
    ) -> usize {
        let mut dropped = 0;
        for entry in entries {
            let own = mine.as_deref_mut().filter(|mine| mine.me.ptr_eq(&entry.content));
            let keep = match (own, entry.content.upgrade()) {
                // The pages of the caller's content stay: the caller is about to use some.
                (Some(own), _) => own.has_pages_of(entry.number, entry.first, entry.count),
                (None, None) => false,
                // A thread that waits for memory may have locked the content.
                (None, Some(content)) => match content.try_lock() {
                    Ok(mut content) => {
                        let pages = (entry.first, entry.count);
                        let (gone, kept) = content.evict(self, entry.number, pages);
                        dropped += gone;
                        kept
                    }
                    Err(_) => true,
                },
            };
            if keep {
                memory.clock().push_back(entry);
            }
        }
        dropped
    }

    /// Entries of the clock.
    #[cfg(test)]
    pub(crate) fn clock_entries(&self) -> usize {
        self.memory().map_or(0, |memory| memory.clock().len())
    }
}

impl FileContent {
    /// Records that pages came into memory. They leave memory in the runs that share their memory
    /// ([`PageFrame::split_run`]). The clock has at most twice as many entries as frames, and a few
    /// more.
    pub(super) fn remember(&mut self, pool: &BlockPool, first: u64, count: u64) {
        let Some(memory) = pool.memory() else { return };
        let mut new: SmallVec<[CacheEntry; 1]> = SmallVec::new();
        for before in (0..count).step_by(RUN) {
            let number = memory.newest.fetch_add(1, Ordering::Relaxed) + 1;
            let (first, count) = (first + before, (count - before).min(RUN as u64));
            self.pages.range_mut(first..first + count).for_each(|(_, page)| page.entry = number);
            new.push(CacheEntry { content: Weak::clone(&self.me), number, first, count });
        }
        let added = new.len();
        let mut clock = memory.clock();
        clock.extend(new);
        // Entries without pages do not accumulate: more entries are examined than added.
        let most = 2 * memory.region.frames() as usize;
        let excess = if clock.len() > most { (added + 8).min(clock.len()) } else { 0 };
        let old: SmallVec<[CacheEntry; 8]> = clock.drain(..excess).collect();
        drop(clock);
        pool.advance_clock(memory, old, Some(self));
    }
}
