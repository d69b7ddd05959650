//! The memory that all processes of a run have in common (see `defuse_preload_plan::layout`).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use defuse_direct::OpenCells;
use defuse_preload_plan::{ProgramPlan, StateError, layout};

use crate::machine::sys;

/// The outcome of a call, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// It was served here.
    Served,
    /// The kernel got it.
    Passed,
    /// The kernel got it although it named a descriptor that is ours.
    Missed,
}

/// The mapping, which the process never removes.
#[derive(Clone, Copy)]
pub struct RunMemory {
    base: *const u8,
}

// SAFETY: all writes after the mapping was made are to atomics.
unsafe impl Send for RunMemory {}
// SAFETY: see above.
unsafe impl Sync for RunMemory {}

/// Maps all of a file; its address and length.
fn map_all(fd: i32, protection: i32) -> Option<(*const u8, usize)> {
    let len = usize::try_from(sys::plain(libc::SYS_lseek, fd as u64, 0, 2).ok()?).ok()?;
    let args = [0, len as u64, protection as u64, libc::MAP_SHARED as u64, fd as u64, 0];
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = sys::check(unsafe { sys::syscall(libc::SYS_mmap as u64, &args) }).ok()?;
    Some((base as *const u8, len))
}

impl RunMemory {
    /// Maps the memory behind `memory`, and reads the plan in `plan`. The number is where images
    /// begin behind the plan. An error where another version made them.
    pub fn map(memory: i32, plan: i32) -> Result<(RunMemory, ProgramPlan, u64), StateError> {
        let (at, len) = map_all(plan, libc::PROT_READ).ok_or(StateError::Malformed)?;
        // SAFETY: the mapping has this length, and the file is sealed.
        let bytes = unsafe { std::slice::from_raw_parts(at, len) };
        let decoded = layout::plan(bytes).and_then(|plan| {
            let images = layout::images_at(plan.len()) as u64;
            Ok((ProgramPlan::decode(plan)?, images))
        });
        let _ = sys::plain(libc::SYS_munmap, at as u64, len as u64, 0);
        let (plan, images) = decoded?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = map_all(memory, protection).filter(|(_, len)| *len >= layout::LEN);
        let (base, _) = mapped.ok_or(StateError::Malformed)?;
        let shared = RunMemory { base };
        layout::check_version(shared.words(0, 1)[0].load(Ordering::Relaxed))?;
        Ok((shared, plan, images))
    }

    fn words(&self, from: usize, count: usize) -> &'static [AtomicU32] {
        // SAFETY: callers name a table of the layout, which lies within the mapping (checked by
        // `map`), is aligned as the mapping is (to pages) and its offset (to 8), and is only used
        // through atomics.
        unsafe { std::slice::from_raw_parts(self.base.add(from).cast::<AtomicU32>(), count) }
    }

    /// The states of open files.
    pub fn states(&self) -> &'static [AtomicU32] {
        self.words(layout::STATES, layout::CELLS)
    }

    /// The words of processes.
    pub fn processes(&self) -> &'static [AtomicU32] {
        self.words(layout::PROCESSES, layout::SLOTS)
    }

    /// How many slots were ever taken.
    pub fn high_water(&self) -> &'static AtomicU32 {
        &self.words(layout::HIGH_WATER, 1)[0]
    }

    /// The open files that the process in `slot` has, a bit for each.
    pub fn held_files(&self, slot: u32) -> &'static [AtomicU64] {
        let slot = slot as usize % layout::SLOTS;
        let at = layout::HELD + slot * (layout::CELLS / 8);
        // SAFETY: as in `words`.
        unsafe {
            let at = self.base.add(at).cast::<AtomicU64>();
            std::slice::from_raw_parts(at, layout::CELLS / 64)
        }
    }

    fn cells(&self) -> &'static [OpenCells] {
        const { assert!(size_of::<OpenCells>() == layout::CELL) };
        // SAFETY: as in `words`; `OpenCells` consists of atomics, and zeros are a valid state of
        // `OpenCells`.
        unsafe {
            let at = self.base.add(layout::OPEN_FILES).cast::<OpenCells>();
            std::slice::from_raw_parts(at, layout::CELLS)
        }
    }

    /// Counts a call.
    #[inline]
    pub fn count(&self, number: u64, fate: CallOutcome) {
        let number = number as usize;
        if number < layout::CALLS {
            let at = layout::COUNTERS + number * 24 + fate as usize * 8;
            // SAFETY: as in `words`; the offset is a multiple of 8 below the table's end.
            let counter = unsafe { &*self.base.add(at).cast::<AtomicU64>() };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a call by the site that it came from: its place among the sites of all objects of the
    /// plan.
    pub fn count_site(&self, site: usize, fate: CallOutcome) {
        if site < layout::SITES {
            let at = layout::SITE_COUNTERS + site * 24 + fate as usize * 8;
            // SAFETY: as in `count`.
            let counter = unsafe { &*self.base.add(at).cast::<AtomicU64>() };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of cells that came from `Arena::take`.
    pub fn index(&self, cells: &OpenCells) -> u32 {
        let from = self.cells().as_ptr() as usize;
        ((std::ptr::from_ref(cells) as usize - from) / size_of::<OpenCells>()) as u32
    }

    /// The cells of this number; `None` beyond the table.
    pub fn cells_at(&self, index: u32) -> Option<&'static OpenCells> {
        self.cells().get(index as usize)
    }

    /// True for the first caller in a run: the message about this has not been printed yet.
    pub fn is_news(&self, what: layout::OnceMessage) -> bool {
        let bit = what as u32;
        let reported = &self.words(layout::REPORTED, 1)[0];
        reported.load(Ordering::Relaxed) & bit == 0
            && reported.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Counts calls of all processes that may have made a path lead to another directory.
    pub fn path_changes(&self) -> &'static AtomicU32 {
        &self.words(layout::PATH_CHANGES, 1)[0]
    }

    /// Notes the program with this mark, which is not 0. True if no process in this run has noted
    /// the mark yet, and there is room for one more.
    pub fn is_new_program(&self, mark: u64) -> bool {
        let marks = self.marks();
        let from = mark as usize % marks.len();
        for word in marks[from..].iter().chain(&marks[..from]) {
            match word.compare_exchange(0, mark, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(known) if known == mark => return false,
                Err(_) => {}
            }
        }
        false
    }

    /// True if the program with this mark is noted.
    pub fn is_known_program(&self, mark: u64) -> bool {
        let marks = self.marks();
        let from = mark as usize % marks.len();
        let words = marks[from..].iter().chain(&marks[..from]);
        let mut noted =
            words.map(|word| word.load(Ordering::Relaxed)).take_while(|word| *word != 0);
        noted.any(|noted| noted == mark)
    }

    fn marks(&self) -> &'static [AtomicU64] {
        // SAFETY: as in `words`; the table is aligned to 8.
        unsafe {
            let at = self.base.add(layout::PROGRAMS).cast::<AtomicU64>();
            std::slice::from_raw_parts(at, layout::PROGRAM_MARKS)
        }
    }

    /// Not 0 once a process of the run has made a directory of nodes.
    pub fn nodes(&self) -> &'static AtomicU32 {
        &self.words(layout::NODES, 1)[0]
    }
}
