//! Memory of our own.
//!
//! A program's handler of a signal may call open(2) while the handler has interrupted malloc(3) of
//! the program: served from the C library's heap, such a call would wait for a lock that its own
//! thread holds. A fork(2) takes the locks of that heap, too. So nothing here uses it: all that
//! this library allocates comes from a heap of its own, which is only entered while signals wait
//! and forks stay out ([`InsideGuard`]).

use std::alloc::{GlobalAlloc, Layout};

use dlmalloc::{Allocator, Dlmalloc};

use crate::machine::{inside::InsideGuard, lock::FutexLock, sys};

/// Where the heap has its pages from: the kernel, without the C library between.
struct HeapPages;

// SAFETY: the allocator returns fresh mappings, page by page, which belong to the heap until it
// gives them back.
unsafe impl Allocator for HeapPages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        match sys::map(size, libc::PROT_READ | libc::PROT_WRITE, 0) {
            Ok(at) => (at as *mut u8, size, 0),
            Err(_) => (std::ptr::null_mut(), 0, 0),
        }
    }

    fn remap(&self, ptr: *mut u8, old: usize, new: usize, can_move: bool) -> *mut u8 {
        let flags = if can_move { libc::MREMAP_MAYMOVE as u64 } else { 0 };
        let args = [ptr as u64, old as u64, new as u64, flags, 0, 0];
        // SAFETY: the mapping is the heap's own, and the heap requests its move or change in
        // length.
        let moved = sys::check(unsafe { sys::syscall(libc::SYS_mremap as u64, &args) });
        moved.map_or(std::ptr::null_mut(), |at| at as *mut u8)
    }

    fn free_part(&self, ptr: *mut u8, old: usize, new: usize) -> bool {
        self.free(ptr.wrapping_add(new), old - new)
    }

    fn free(&self, ptr: *mut u8, size: usize) -> bool {
        sys::plain(libc::SYS_munmap, ptr as u64, size as u64, 0).is_ok()
    }

    fn can_release_part(&self, _: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

static HEAP: FutexLock<Dlmalloc<HeapPages>> =
    FutexLock::new(Dlmalloc::new_with_allocator(HeapPages));

/// Memory of so many bytes or more is a mapping of its own, of which the kernel provides the used
/// pages: the heap writes zeros to all memory that was requested with zeros.
const OWN_MAPPING: usize = 256 << 10;

/// True if memory of this layout has a mapping of its own.
fn has_mapping(layout: Layout) -> bool {
    layout.size() >= OWN_MAPPING && layout.align() <= 4096
}

fn pages(size: usize) -> usize {
    // The size of a layout is so far from the largest number that this cannot overflow.
    size.next_multiple_of(4096)
}

/// The heap, entered as every part of our own code.
struct LibraryHeap;

// SAFETY: Dlmalloc is an allocator; one thread at a time uses it, and no handler of a signal can
// run on a thread that holds its lock.
unsafe impl GlobalAlloc for LibraryHeap {
    // SAFETY: the trait's own promises.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if has_mapping(layout) {
            return HeapPages.alloc(pages(layout.size())).0;
        }
        let _inside = InsideGuard::enter();
        // SAFETY: the caller's promises are the promises that Dlmalloc requires.
        unsafe { HEAP.lock().malloc(layout.size(), layout.align()) }
    }

    // SAFETY: see `alloc`.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if has_mapping(layout) {
            return HeapPages.alloc(pages(layout.size())).0;
        }
        let _inside = InsideGuard::enter();
        // SAFETY: see `alloc`.
        unsafe { HEAP.lock().calloc(layout.size(), layout.align()) }
    }

    // SAFETY: see `alloc`.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if has_mapping(layout) {
            HeapPages.free(ptr, pages(layout.size()));
            return;
        }
        let _inside = InsideGuard::enter();
        // SAFETY: see `alloc`; the memory came from this heap, the only one there is.
        unsafe { HEAP.lock().free(ptr, layout.size(), layout.align()) }
    }

    // SAFETY: see `alloc`.
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        // SAFETY: the caller promises that the new size makes a layout.
        let after = unsafe { Layout::from_size_align_unchecked(new, layout.align()) };
        match (has_mapping(layout), has_mapping(after)) {
            (true, true) => return HeapPages.remap(ptr, pages(layout.size()), pages(new), true),
            (false, false) => {}
            _ => {
                // SAFETY: the caller passes these layouts; both have at least the smaller number of
                // bytes.
                return unsafe {
                    let moved = self.alloc(after);
                    if !moved.is_null() {
                        moved.copy_from_nonoverlapping(ptr, layout.size().min(new));
                        self.dealloc(ptr, layout);
                    }
                    moved
                };
            }
        }
        let _inside = InsideGuard::enter();
        // SAFETY: see `dealloc`.
        unsafe { HEAP.lock().realloc(ptr, layout.size(), layout.align(), new) }
    }
}

#[global_allocator]
static GLOBAL: LibraryHeap = LibraryHeap;

/// In a child with one thread: the heap is free, because no thread was in it when the process
/// forked.
pub fn reset() {
    HEAP.reset();
}

#[cfg(test)]
mod tests {
    #[test]
    fn memory_is_kept_grown_and_given_back() {
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                scope.spawn(move || {
                    let mut all = Vec::new();
                    for size in (0..2000usize).map(|at| at * 37 % 5000) {
                        let mut bytes = vec![thread; size];
                        bytes.extend_from_slice(&[thread; 100]);
                        all.push(bytes);
                        if size % 3 == 0 {
                            all.remove(0);
                        }
                    }
                    assert!(all.iter().flatten().all(|byte| *byte == thread));
                });
            }
        });
        let big = vec![0u64; 1 << 20];
        assert!(big.iter().all(|word| *word == 0));
    }

    #[test]
    fn large_memory_has_pages_when_it_is_used() {
        const LEN: usize = 1 << 20;
        let big = vec![0u8; LEN];
        let mut resident = [1u8; LEN / 4096];
        // SAFETY: the pages belong to `big`, and there is a byte for each.
        let rc = unsafe { libc::mincore(big.as_ptr() as *mut _, LEN, resident.as_mut_ptr()) };
        assert_eq!((rc, resident.iter().filter(|page| **page & 1 == 1).count()), (0, 0));
    }

    #[test]
    fn memory_keeps_its_bytes_when_it_becomes_large_and_small() {
        let mut bytes = Vec::new();
        for len in [10, 100_000, 300_000, 3_000_000, 200_000, 5] {
            let kept = bytes.len().min(len);
            bytes.resize(len, 7u8);
            bytes.shrink_to_fit();
            assert!(bytes.iter().take(kept).all(|byte| *byte == 7), "{len}");
        }
    }
}
