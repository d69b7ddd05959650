//! An allocator for tables of many megabytes that are searched at random.
//!
//! Such a search misses the caches of the processor, and with pages of 4 KiB the TLB as well: in a
//! virtual machine the walk of two page tables then costs as much as the cache line itself.
//! [`HugePages`] takes memory from the kernel in aligned blocks of 2 MiB and requests large pages
//! (`MADV_HUGEPAGE`, madvise(2)), if the kernel has them and the machine permits them
//! (/sys/kernel/mm/transparent_hugepage/enabled). Elsewhere the memory has small pages, and nothing
//! else changes.
//!
//! Its memory is private, so that fork(2) copies it, and goes back to the kernel when it is freed.
//! It is no general allocator: allocations smaller than [`LEAST`] are served by the global one.
//!
//! [`SmallPage`] is for data: single pages from blocks of the same size, which are small to the
//! kernel, too. The C library takes 4 KiB from its heap, which it enlarges for each page by a
//! system call, and each page takes a page fault.

#![deny(unsafe_code)]

mod alloc;
mod blocks;
mod limit;
mod mapping;
mod page;
mod pool;

pub use alloc::HugePages;
/// Containers with an allocator.
pub use allocator_api2::vec::Vec;
pub use limit::memory_limit;
pub use page::SmallPage;

/// Bytes of a large page.
pub const HUGE: usize = 2 << 20;

/// Bytes of a page of the machine, to which all memory of mappings is aligned at least.
pub const PAGE: usize = 4096;

/// Bytes of the smallest allocation that comes from large pages.
pub const LEAST: usize = 32 << 10;
