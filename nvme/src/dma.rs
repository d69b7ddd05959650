//! Memory that a controller may read and write at any time, independently of its commands.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use defuse_block::{Errno, FRAME, FrameRun, MemoryRegion, Result};

use crate::spec::PAGE;

/// A piece of memory with one range of addresses for the controller, on whole pages. Clones are the
/// same memory. This type gives out no references to the memory, because the controller may change
/// it at any time: words are atomic, and data is copied.
#[derive(Clone)]
pub struct DmaMemory {
    inner: Arc<DmaAllocation>,
}

/// Memory that may be gone.
#[derive(Clone, Debug)]
pub(crate) struct WeakDmaMemory(Weak<DmaAllocation>);

struct DmaAllocation {
    start: *mut u8,
    len: usize,
    bus: u64,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the memory lives as long as the owner (`DmaMemory::new`), and all access is atomic or a
// copy of raw bytes.
unsafe impl Send for DmaAllocation {}
// SAFETY: the memory lives as long as the owner (`DmaMemory::new`), and all access is atomic or a
// copy of raw bytes.
unsafe impl Sync for DmaAllocation {}

impl DmaMemory {
    /// The `len` bytes from `start` on. The controller reaches them from the address `bus` on.
    ///
    /// # Safety
    ///
    /// `start` is a multiple of 4096. The bytes stay mapped, readable and writable until `owner` is
    /// dropped, and no reference of Rust leads to them while they are accessed through this value.
    pub(crate) unsafe fn new(
        start: *mut u8,
        len: usize,
        bus: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        assert!(start.addr().is_multiple_of(PAGE), "memory for a controller begins on a page");
        DmaMemory { inner: Arc::new(DmaAllocation { start, len, bus, _owner: owner }) }
    }

    /// Zeroed memory of the heap, of whole pages, for controllers in this process.
    pub(crate) fn heap(bytes: usize, bus: u64) -> Result<Self> {
        let bytes = bytes.next_multiple_of(PAGE);
        let layout = Layout::from_size_align(bytes, PAGE).map_err(|_| Errno::NOMEM)?;
        if bytes == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(Errno::NOMEM);
        }
        let owner = Box::new(HeapAllocation { start, layout });
        // SAFETY: `HeapAllocation` keeps the allocation, which has this alignment, and nothing else
        // refers to it.
        Ok(unsafe { DmaMemory::new(start, bytes, bus, owner) })
    }

    /// All frames of `region`. The controller may access the frames of its commands, whose owners
    /// wait for the commands.
    ///
    /// `keep` is dropped before the region, and ends the access of the controller.
    pub(crate) fn region(
        region: &Arc<MemoryRegion>,
        bus: u64,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let owner = Box::new((keep, Arc::clone(region)));
        // SAFETY: the mapping of a region begins on a page and lives as long as the region. The
        // frames that are accessed belong to operations in flight, whose memory nothing else uses
        // (`defuse_block::OperationMemory`).
        unsafe { DmaMemory::new(region.start(), region.bytes(), bus, owner) }
    }

    /// The memory of `frames`. It belongs to the controller and the driver until the value is
    /// dropped.
    pub(crate) fn frames(frames: FrameRun, bus: u64) -> Self {
        let at = frames.index() as usize * FRAME;
        let (start, len) =
            (frames.region().start().wrapping_add(at), frames.count() as usize * FRAME);
        // SAFETY: the frames lie within the mapping of their region. Their owner is moved into the
        // value, and no reference is made from it.
        unsafe { DmaMemory::new(start, len, bus, Box::new(frames)) }
    }

    /// The length of the memory in bytes.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// True where it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// The address of the memory's first byte for the controller.
    pub fn bus(&self) -> u64 {
        self.inner.bus
    }

    /// The word of 32 bits at `at`, a multiple of 4. Everything that the controller wrote before it
    /// is visible, too.
    pub fn read32(&self, at: usize) -> u32 {
        u32::from_le(self.word32(at).load(Ordering::Acquire))
    }

    /// Sets the word of 32 bits at `at`.
    pub fn write32(&self, at: usize, value: u32) {
        self.word32(at).store(value.to_le(), Ordering::Release);
    }

    /// The word of 64 bits at `at`, a multiple of 8.
    pub fn read64(&self, at: usize) -> u64 {
        u64::from_le(self.word64(at).load(Ordering::Relaxed))
    }

    /// Sets the word of 64 bits at `at`.
    pub fn write64(&self, at: usize, value: u64) {
        self.word64(at).store(value.to_le(), Ordering::Relaxed);
    }

    /// Copies the bytes from `at` on to `out`.
    pub fn copy_out(&self, at: usize, out: &mut [u8]) {
        self.check(at, out.len());
        // SAFETY: the range lies within the memory (`check`), and `out` is other memory: no
        // reference leads to this memory (`DmaMemory::new`). If the controller changes bytes
        // meanwhile, the copy has any values, but valid bytes.
        unsafe {
            let from = self.inner.start.add(at);
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
        }
    }

    /// Copies `data` to `at`.
    pub fn copy_in(&self, at: usize, data: &[u8]) {
        self.check(at, data.len());
        // SAFETY: the range lies within the memory (`check`), and `data` is other memory: no
        // reference leads to this memory (`DmaMemory::new`).
        unsafe {
            let to = self.inner.start.add(at);
            std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        }
    }

    /// Fills the whole memory with zeros.
    pub fn clear(&self) {
        (0..self.inner.len).step_by(8).for_each(|at| self.write64(at, 0));
    }

    /// A handle that does not keep the memory.
    pub(crate) fn weak(&self) -> WeakDmaMemory {
        WeakDmaMemory(Arc::downgrade(&self.inner))
    }

    fn check(&self, at: usize, len: usize) {
        let end = at.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.inner.len), "{len} bytes at {at} of {self:?}");
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        self.check(at, 4);
        assert!(at.is_multiple_of(4), "a word at {at}");
        // SAFETY: the word lies within the memory, is aligned, and all access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.inner.start.add(at).cast()) }
    }

    fn word64(&self, at: usize) -> &AtomicU64 {
        self.check(at, 8);
        assert!(at.is_multiple_of(8), "a word at {at}");
        // SAFETY: the word lies within the memory, is aligned, and all access to it is atomic.
        unsafe { AtomicU64::from_ptr(self.inner.start.add(at).cast()) }
    }
}

impl WeakDmaMemory {
    /// The memory, if its owner still exists.
    pub(crate) fn get(&self) -> Option<DmaMemory> {
        self.0.upgrade().map(|inner| DmaMemory { inner })
    }
}

impl fmt::Debug for DmaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dma({} bytes at {:#x})", self.inner.len, self.inner.bus)
    }
}

impl fmt::Debug for DmaAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.bus)
    }
}

/// Memory of the heap.
struct HeapAllocation {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: only the drop uses the pointer.
unsafe impl Send for HeapAllocation {}
// SAFETY: only the drop uses the pointer.
unsafe impl Sync for HeapAllocation {}

impl Drop for HeapAllocation {
    fn drop(&mut self) {
        // SAFETY: `DmaMemory::heap` has made the allocation, with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_little_endian_and_lie_among_the_bytes() {
        let dma = DmaMemory::heap(100, 0x1000).unwrap();
        assert_eq!((dma.len(), dma.bus()), (PAGE, 0x1000));
        dma.write64(8, 0x0102_0304_0506_0708);
        dma.write32(4, 0x0a0b_0c0d);
        let mut bytes = [0; 16];
        dma.copy_out(0, &mut bytes);
        assert_eq!(bytes, [0, 0, 0, 0, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1]);
        dma.copy_in(8, &[1; 4]);
        assert_eq!((dma.read32(8), dma.read64(8)), (0x0101_0101, 0x0102_0304_0101_0101));
        dma.clear();
        assert_eq!(dma.read64(8), 0);
        let weak = dma.weak();
        assert!(weak.get().is_some());
        drop(dma);
        assert!(weak.get().is_none());
    }

    #[test]
    #[should_panic(expected = "4 bytes at 4094")]
    fn nothing_outside_is_reached() {
        DmaMemory::heap(PAGE, 0).unwrap().copy_in(4094, &[0; 4]);
    }
}
