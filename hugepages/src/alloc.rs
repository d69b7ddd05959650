//! The allocator.

#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use allocator_api2::alloc::{AllocError, Allocator, Global, Layout};

use crate::mapping::AnonymousMapping;
use crate::pool::HugePagePool;
use crate::{HUGE, LEAST, PAGE};

/// Memory in large pages. Clones share blocks of 2 MiB, which they divide among allocations of less
/// than that; a larger allocation is a mapping of its own.
///
/// The first blocks have small pages. An allocation beyond the last free memory of the machine
/// fails like the allocation of any table.
#[derive(Clone, Debug, Default)]
pub struct HugePages {
    pool: Arc<Mutex<HugePagePool>>,
}

/// The source of an allocation.
enum AllocationSource {
    Global,
    /// A run of the pool, with its number of units.
    Pool(usize),
    /// A mapping, with its number of bytes.
    Mapping(usize),
}

fn source(layout: Layout) -> AllocationSource {
    match layout.size() {
        _ if layout.align() > PAGE => AllocationSource::Global,
        0..LEAST => AllocationSource::Global,
        len @ LEAST..=HUGE => AllocationSource::Pool(len.div_ceil(LEAST)),
        // A layout has at most isize::MAX bytes.
        len => AllocationSource::Mapping(len.next_multiple_of(PAGE)),
    }
}

impl HugePages {
    fn pool(&self) -> MutexGuard<'_, HugePagePool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: memory of the pool and of mappings belongs to one allocation until it is given back, is
// aligned to a page, and has the length of its layout at least; the pool, which its clones share,
// lives as long as one of them. The source of an allocation depends on its layout alone.
unsafe impl Allocator for HugePages {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let start = match source(layout) {
            AllocationSource::Global => return Global.allocate(layout),
            AllocationSource::Pool(units) => self.pool().take(units),
            AllocationSource::Mapping(len) => {
                AnonymousMapping::new(len, true).map(AnonymousMapping::into_raw)
            }
        };
        Ok(NonNull::slice_from_raw_parts(start.ok_or(AllocError)?, layout.size()))
    }

    // SAFETY: the trait requires an allocation that was made here with this layout, and is given
    // up.
    unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
        match source(layout) {
            // SAFETY: an allocation with this layout came from there.
            AllocationSource::Global => unsafe { Global.deallocate(start, layout) },
            AllocationSource::Pool(units) => self.pool().give(start, units),
            AllocationSource::Mapping(len) => {
                // SAFETY: a mapping of this length was given up for the allocation, which ends.
                drop(unsafe { AnonymousMapping::from_raw(start, len) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Vec;

    #[test]
    fn vectors_of_all_sizes_hold_what_was_written() {
        let memory = HugePages::default();
        let mut random = fastrand::Rng::with_seed(5);
        let mut vectors: std::vec::Vec<Vec<u64, HugePages>> = std::vec::Vec::new();
        for round in 0..600_u64 {
            let mut vector = Vec::new_in(memory.clone());
            // Growing goes through all sources.
            vector.extend((0..1_u64 << random.u32(..20)).map(|at| at ^ round));
            vectors.push(vector);
            if vectors.len() > 20 {
                let vector = vectors.swap_remove(random.usize(..vectors.len()));
                let first = vector[0];
                assert!(vector.iter().enumerate().all(|(at, word)| word ^ first == at as u64));
            }
        }
        vectors.clear();
        assert!(memory.pool().bytes() <= HUGE, "all but one block went back");
    }

    /// The pages of a large table, as the kernel lists them (proc_pid_smaps(5)).
    #[test]
    fn a_large_table_is_advised_to_have_large_pages() {
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        if !enabled.is_ok_and(|text| !text.contains("[never]")) {
            return;
        }
        let mut table = Vec::<u8, HugePages>::with_capacity_in(8 * HUGE, HugePages::default());
        table.resize(8 * HUGE, 1);
        let start = table.as_ptr().addr();
        assert_eq!(start % HUGE, 0);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_table = |head: &str| {
            let range = head.split(' ').next().and_then(|range| range.split_once('-'));
            let parse = |text| usize::from_str_radix(text, 16).ok();
            range.and_then(|(from, to)| Some(parse(from)? <= start && start < parse(to)?))
        };
        let mut lines = maps.lines().skip_while(|line| of_table(line) != Some(true));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "hg"), "{flags}");
    }
}
