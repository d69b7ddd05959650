//! Memory for devices: 4 KiB frames in one memfd, named by their index and never by a pointer.
//!
//! Being one memfd, a region can be registered with a device as a whole, and later be mapped by
//! other processes. A [`FrameRun`] has one owner at a time, so that memory is not read while a
//! device writes to it.
//!
//! Frames get memory in pages of 2 MiB when the first of 512 is taken, if the kernel has such pages
//! (`MADV_COLLAPSE`, Linux 6.1). Page by page that takes eight times as long, unless the kernel
//! must first make room for a large page, or the host of a virtual machine must. Then the 512
//! frames get small pages, all at once.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::{Errno, Result};

/// Bytes of a frame: a page of the machine and a block of most devices.
pub const FRAME: usize = 4096;

/// Runs have up to `1 << LARGEST` frames: 2 MiB.
const LARGEST: usize = 9;

/// A large page that takes longer than this costs more than small pages.
const SLOW: Duration = Duration::from_millis(2);

/// The number of blocks that get small pages after a slow large page.
const PAUSE: u32 = 15;

/// A region of frames.
pub struct MemoryRegion {
    id: u64,
    start: *mut u8,
    frames: u32,
    memory: OwnedFd,
    free: Mutex<FreeFrames>,
    /// The number of following blocks that get small pages.
    small_pages: AtomicU32,
}

// SAFETY: `start` leads to a mapping that lives as long as the region. Its bytes are only reached
// through `FrameRun`s, each of which owns its part exclusively.
unsafe impl Send for MemoryRegion {}
// SAFETY: bytes are only reached through `FrameRun`s, which own their parts; fields outside of the
// mutex are constant or atomic.
unsafe impl Sync for MemoryRegion {}

/// A run of frames with one owner. Dropping it gives it back to its region. It initially contains
/// whatever bytes lay there before.
pub struct FrameRun {
    region: Arc<MemoryRegion>,
    first: u32,
    count: u32,
}

impl MemoryRegion {
    /// A region of `frames` frames. Pages get memory when they are first used.
    ///
    /// # Errors
    ///
    /// `EINVAL` for no frames, and the errors of memfd_create(2) and mmap(2).
    pub fn new(frames: u32) -> Result<Arc<MemoryRegion>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let bytes = frames as usize * FRAME;
        if bytes == 0 {
            return Err(Errno::INVAL);
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create(c"defuse-frames", flags)?;
        rustix::fs::ftruncate(&memory, bytes as u64)?;
        // Other processes that map the memfd may rely on its length.
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
        let start = map(&memory, bytes)?;
        Ok(Arc::new(MemoryRegion {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            start,
            frames,
            memory,
            free: Mutex::new(FreeFrames::new(frames)),
            small_pages: AtomicU32::new(0),
        }))
    }

    /// Takes a run of `count` neighbouring frames (at most 512). `None` where no aligned block of
    /// that many frames, rounded up to a power of two, is free.
    pub fn take(self: &Arc<Self>, count: u32) -> Option<FrameRun> {
        let mut free = self.lock();
        let first = free.take(count)?;
        let is_new = free.begin(first);
        drop(free);
        let frames = FrameRun { region: Arc::clone(self), first, count };
        if is_new {
            self.give_memory(first);
        }
        Some(frames)
    }

    /// Gives memory to all frames in this part of the region, because it is about to be pinned.
    pub(crate) fn give_memory_to(&self, offset: usize, len: usize) {
        let first = (offset / FRAME) as u32 >> LARGEST << LARGEST;
        for first in (first..((offset + len) / FRAME) as u32).step_by(1 << LARGEST) {
            let is_new = self.lock().begin(first);
            if is_new {
                self.give_memory(first);
            }
        }
    }

    /// Makes one page of the 512 frames from `first` on, or else 512 pages, if all of them belong
    /// to the region. Otherwise they get memory one by one when they are used.
    fn give_memory(&self, first: u32) {
        let bytes = FRAME << LARGEST;
        let is_whole = first + (1 << LARGEST) <= self.frames;
        if !is_whole {
            return;
        }
        let start = self.start.wrapping_add(first as usize * FRAME);
        let advise = |len: usize, advice| {
            // SAFETY: the range is a part of the mapping. Neither advice changes any byte.
            let done = unsafe { libc::madvise(start.cast(), len, advice) };
            if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        let waits = |blocks: u32| blocks.checked_sub(1);
        let waits = self.small_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, waits);
        if waits.is_ok() {
            // Small pages at once cost less than one fault for each. An old kernel (before 5.14)
            // has faults.
            let _ = advise(bytes, libc::MADV_POPULATE_WRITE);
            return;
        }
        let begun = Instant::now();
        // A range without any memory is not made one page.
        let made = advise(FRAME, libc::MADV_POPULATE_WRITE)
            .and_then(|()| advise(bytes, libc::MADV_COLLAPSE));
        let pause = match made {
            // This kernel has no `MADV_COLLAPSE`.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => u32::MAX,
            Err(_) => PAUSE,
            Ok(()) if begun.elapsed() > SLOW => PAUSE,
            Ok(()) => return,
        };
        self.small_pages.store(pause, Ordering::Relaxed);
    }

    /// The number of frames of the region.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// The number of frames without an owner.
    pub fn free_frames(&self) -> u32 {
        self.lock().frames
    }

    /// A number that no other region of the process has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The address of the region's first byte, for drivers that map it for a device. The bytes
    /// belong to the owners of the frames.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// The length of the region in bytes.
    pub fn bytes(&self) -> usize {
        self.frames as usize * FRAME
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeFrames> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Maps all of `memory`, at an address that can begin a page of 2 MiB if `memory` is at least as
/// large.
fn map(memory: &OwnedFd, bytes: usize) -> Result<*mut u8> {
    let align = FRAME << LARGEST;
    let room = if bytes < align { bytes } else { bytes + align };
    let (none, prot) = (ProtFlags::empty(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: the kernel chooses a free range of addresses.
    let start = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, none, flags)?.cast::<u8>()
    };
    let before = if bytes < align { 0 } else { start.align_offset(align) };
    let at = start.wrapping_add(before);
    // SAFETY: the range lies within the one above, which nothing else uses; the rest of that range
    // is unmapped.
    unsafe {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        if let Err(errno) = rustix::mm::mmap(at.cast(), bytes, prot, flags, memory, 0) {
            let _ = rustix::mm::munmap(start.cast(), room);
            return Err(errno);
        }
        let after = room - before - bytes;
        for (rest, len) in [(start, before), (at.wrapping_add(bytes), after)] {
            if len > 0 {
                let _ = rustix::mm::munmap(rest.cast(), len);
            }
        }
    }
    Ok(at)
}

impl AsFd for MemoryRegion {
    /// The memfd, for other processes.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: `new` has made the mapping. Every `FrameRun` keeps the region alive, so none is
        // left.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.bytes()) };
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} of {} frames free)", self.free_frames(), self.frames)
    }
}

impl FrameRun {
    /// The index of the first frame in its region.
    pub fn index(&self) -> u32 {
        self.first
    }

    /// The number of frames.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The region of the frames.
    pub fn region(&self) -> &Arc<MemoryRegion> {
        &self.region
    }

    /// Splits the run: returns the frames from number `at` on as a run of their own. Bytes stay
    /// where they are.
    ///
    /// # Panics
    ///
    /// Panics unless each part has frames.
    #[must_use]
    pub fn split_off(&mut self, at: u32) -> FrameRun {
        assert!(0 < at && at < self.count, "no frames on one side of {at} in {self:?}");
        let rest = FrameRun {
            region: Arc::clone(&self.region),
            first: self.first + at,
            count: self.count - at,
        };
        self.count = at;
        rest
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.region.start.wrapping_add(self.first as usize * FRAME)
    }
}

impl Deref for FrameRun {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the frames lie within the mapping (`FreeFrames::take`), which is zero or written
        // at all times, and have no other owner.
        unsafe { std::slice::from_raw_parts(self.start(), self.count as usize * FRAME) }
    }
}

impl DerefMut for FrameRun {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the frames lie within the mapping, as for `deref`; their only owner is borrowed
        // mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.count as usize * FRAME) }
    }
}

impl Drop for FrameRun {
    fn drop(&mut self) {
        self.region.lock().give(self.first, self.count);
    }
}

impl fmt::Debug for FrameRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frames({}+{})", self.first, self.count)
    }
}

/// The free frames: a buddy allocator with blocks of 1, 2, 4, ... 512 frames.
struct FreeFrames {
    frames: u32,
    /// For each size the first frames of free blocks.
    lists: [Vec<u32>; LARGEST + 1],
    /// For each frame that begins a free block: its size and its position in the list.
    begins: Vec<Option<(u8, u32)>>,
    /// For each of the largest blocks, true if no frame was taken from it yet.
    new: Vec<bool>,
}

impl FreeFrames {
    fn new(frames: u32) -> Self {
        let begins = vec![None; frames as usize];
        let new = vec![true; (frames as usize).div_ceil(1 << LARGEST)];
        let mut free =
            FreeFrames { frames: 0, lists: std::array::from_fn(|_| Vec::new()), begins, new };
        free.give(0, frames);
        free
    }

    fn take(&mut self, count: u32) -> Option<u32> {
        if count == 0 || count > 1 << LARGEST {
            return None;
        }
        let wanted = count.next_power_of_two().trailing_zeros() as usize;
        let found = (wanted..=LARGEST).find(|order| !self.lists[*order].is_empty())?;
        let first = *self.lists[found].last()?;
        self.remove(first);
        self.frames -= 1 << found;
        // The surplus goes back.
        self.give(first + count, (1 << found) - count);
        Some(first)
    }

    /// True the first time for the largest block that this frame begins.
    fn begin(&mut self, first: u32) -> bool {
        let begins = first.is_multiple_of(1 << LARGEST);
        begins && std::mem::replace(&mut self.new[first as usize >> LARGEST], false)
    }

    /// Gives back any run, as the largest aligned blocks that it consists of.
    fn give(&mut self, mut first: u32, mut count: u32) {
        self.frames += count;
        while count > 0 {
            let aligned = if first == 0 { LARGEST as u32 } else { first.trailing_zeros() };
            let order = aligned.min(count.ilog2()).min(LARGEST as u32);
            self.merge(first, order as usize);
            first += 1 << order;
            count -= 1 << order;
        }
    }

    /// Adds a block, together with its buddies that are free.
    fn merge(&mut self, mut first: u32, mut order: usize) {
        debug_assert!(self.begins[first as usize].is_none(), "frame {first} is given back twice");
        while order < LARGEST {
            let buddy = first ^ (1 << order);
            match self.begins.get(buddy as usize) {
                Some(Some((free, _))) if usize::from(*free) == order => {
                    self.remove(buddy);
                    first = first.min(buddy);
                    order += 1;
                }
                _ => break,
            }
        }
        self.begins[first as usize] = Some((order as u8, self.lists[order].len() as u32));
        self.lists[order].push(first);
    }

    fn remove(&mut self, first: u32) {
        let Some((order, at)) = self.begins[first as usize].take() else { return };
        let list = &mut self.lists[usize::from(order)];
        list.swap_remove(at as usize);
        if let Some(moved) = list.get(at as usize) {
            self.begins[*moved as usize] = Some((order, at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_never_overlap_and_everything_comes_back() {
        let region = MemoryRegion::new(1500).unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        let mut held: Vec<FrameRun> = Vec::new();
        for round in 0..1000 {
            if random.bool() || held.is_empty() {
                let count = 1 + random.u32(..64);
                if let Some(mut run) = region.take(count) {
                    run.fill(round as u8);
                    held.push(run);
                }
            } else {
                let run = held.swap_remove(random.usize(..held.len()));
                assert!(run.iter().all(|byte| *byte == run[0]), "somebody wrote into {run:?}");
            }
            let owned: u32 = held.iter().map(FrameRun::count).sum();
            assert_eq!(region.free_frames(), 1500 - owned);
        }
        drop(held);
        let runs: Vec<FrameRun> = std::iter::from_fn(|| region.take(512)).collect();
        assert_eq!((region.free_frames(), runs.len()), (1500 - 1024, 2), "the pieces merged again");
    }

    /// If the kernel has no such pages, only the page size differs.
    #[test]
    fn memory_comes_in_large_pages_and_keeps_what_is_in_it() {
        let region = MemoryRegion::new(4 << LARGEST).unwrap();
        assert!(region.start().addr().is_multiple_of(FRAME << LARGEST));
        let mut one = region.take(3).unwrap();
        one.fill(7);
        region.give_memory_to(0, region.bytes());
        let mut others: Vec<FrameRun> = std::iter::from_fn(|| region.take(1)).collect();
        others.iter_mut().for_each(|frames| frames.fill(9));
        assert!(one.iter().all(|byte| *byte == 7));
        assert_eq!(others.len(), (4 << LARGEST) - 3);
        let large = || -> Option<u64> {
            let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
            let at = format!("{:x}-", region.start().addr());
            let mut lines = maps.lines().skip_while(|line| !line.starts_with(&at));
            let line = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
            line.trim().strip_suffix(" kB")?.parse().ok()
        };
        if region.small_pages.load(Ordering::Relaxed) == 0 {
            assert_eq!(large(), Some(4 << 11), "four pages of 2 MiB");
        }
    }

    #[test]
    fn both_parts_of_a_run_come_back_by_themselves() {
        let region = MemoryRegion::new(32).unwrap();
        let mut run = region.take(20).unwrap();
        (0..20).for_each(|at| run[at * FRAME] = at as u8);
        let mut rest = run.split_off(5);
        assert_eq!((run.count(), rest.count(), rest.index()), (5, 15, run.index() + 5));
        assert_eq!((run[4 * FRAME], rest[0], rest[14 * FRAME]), (4, 5, 19));
        drop(run);
        assert_eq!(region.free_frames(), 32 - 15);
        drop(rest.split_off(14));
        drop(rest);
        assert!(region.take(32).is_some());
    }

    #[test]
    fn more_than_a_run_or_than_there_is_cannot_be_taken() {
        let region = MemoryRegion::new(8).unwrap();
        assert!(region.take(0).is_none() && region.take(9).is_none() && region.take(513).is_none());
        let all = region.take(8).unwrap();
        assert!(region.take(1).is_none());
        drop(all);
        assert!(region.take(1).is_some());
        assert!(MemoryRegion::new(0).is_err());
    }
}
