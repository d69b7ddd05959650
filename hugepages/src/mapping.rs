//! Mappings that begin where a large page may.

#![allow(unsafe_code)]

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::HUGE;

/// Private memory of zeros, which is unmapped when it is dropped.
#[derive(Debug)]
pub(crate) struct AnonymousMapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: no other value refers to the mapping, and no thread owns it.
unsafe impl Send for AnonymousMapping {}

impl AnonymousMapping {
    /// Maps `len` bytes, a multiple of 4 KiB that is not 0. `None` if the kernel has no memory.
    pub(crate) fn new(len: usize, is_huge: bool) -> Option<AnonymousMapping> {
        assert!(len > 0 && len.is_multiple_of(4096), "{len} bytes are no pages");
        let room = len.checked_add(HUGE)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses a range that nothing uses.
        let all = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, prot, flags) };
        let all = all.ok()?.cast::<u8>();
        let before = all.align_offset(HUGE);
        let start = all.wrapping_add(before);
        for (rest, rest_len) in [(all, before), (start.wrapping_add(len), HUGE - before)] {
            if rest_len > 0 {
                // SAFETY: this part of the new range is outside of the mapping, and its address has
                // not been passed on.
                let _ = unsafe { rustix::mm::munmap(rest.cast(), rest_len) };
            }
        }
        if is_huge {
            // SAFETY: the range is the mapping. The advice changes no byte, and a kernel without
            // large pages refuses it.
            let _ = unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxHugepage) };
        }
        Some(AnonymousMapping { start: NonNull::new(start)?, len })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Gives up the mapping, which [`from_raw`](AnonymousMapping::from_raw) takes again.
    pub(crate) fn into_raw(self) -> NonNull<u8> {
        std::mem::ManuallyDrop::new(self).start
    }

    /// The mapping of `len` bytes at `start`.
    ///
    /// # Safety
    ///
    /// `start` is from [`into_raw`](AnonymousMapping::into_raw) of a mapping with this length,
    /// once, and its bytes are not used any more.
    pub(crate) unsafe fn from_raw(start: NonNull<u8>, len: usize) -> AnonymousMapping {
        AnonymousMapping { start, len }
    }
}

/// Has the kernel supply the memory of a range (`MADV_POPULATE_WRITE` of Linux 5.14). Otherwise it
/// does so page by page when they are written, also where it refuses this.
///
/// # Safety
///
/// The range lies within a mapping that stays meanwhile.
pub(crate) unsafe fn supply(start: NonNull<u8>, len: usize) {
    // SAFETY: the range is mapped. The advice changes no byte.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
}

impl Drop for AnonymousMapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, whose owner uses it no more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
