//! An allocator for tables of many megabytes that are searched at random.
//!
//! Such a search misses the caches of the processor, and with pages of 4 KiB the TLB as well: in a virtual machine the walk of
//! two page tables then costs as much as the line itself. [`HugePages`] takes memory from the kernel in aligned blocks of 2 MiB and
//! asks for large pages (`MADV_HUGEPAGE`, madvise(2)), where the kernel has them and the machine permits them
//! (/sys/kernel/mm/transparent_hugepage/enabled). Elsewhere the memory has small pages, and nothing else changes.
//!
//! Its memory is private, so that fork(2) copies it, and goes back to the kernel when it is freed. It is no general allocator: what
//! is smaller than [`LEAST`] comes from the global one.

#![deny(unsafe_code)]

mod alloc;
mod mapping;
mod pool;

pub use alloc::HugePages;
/// Containers with an allocator.
pub use allocator_api2::vec::Vec;

/// Bytes of a large page.
pub const HUGE: usize = 2 << 20;

/// Bytes of the smallest allocation that comes from large pages.
pub const LEAST: usize = 32 << 10;
