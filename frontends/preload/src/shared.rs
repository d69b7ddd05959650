//! The memory that all processes of a run have in common (see `defuse_preload_plan::layout`).

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use defuse_direct::{Arena, OpenCells};
use defuse_preload_plan::{Plan, layout};

use crate::sys;

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was served here.
    Served,
    /// The kernel got it.
    Passed,
    /// The kernel got it although it named a descriptor that is ours.
    Missed,
}

/// The mapping. It stays for as long as the process.
#[derive(Clone, Copy)]
pub struct Shared {
    base: *const u8,
    len: usize,
}

// SAFETY: what is written after the mapping was made are atomics.
unsafe impl Send for Shared {}
// SAFETY: see above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps the memory behind `fd`, without the images; `None` where that is not possible or another
    /// version made it. The number is where images begin.
    pub fn map(fd: i32) -> Option<(Shared, Plan, u64)> {
        let mut head = [0u8; 24];
        let args = [fd as u64, head.as_mut_ptr() as u64, head.len() as u64, 0, 0, 0];
        // SAFETY: the kernel fills the room.
        let read = sys::check(unsafe { sys::syscall(libc::SYS_pread64 as u64, &args) }).ok()?;
        let plan_len = layout::plan_len(&head).filter(|_| read as usize == head.len())?;
        let len = layout::PLAN.checked_add(plan_len)?;
        let real = sys::plain(libc::SYS_lseek, fd as u64, 0, libc::SEEK_END as u64).ok()?;
        if (real as u64) < len as u64 {
            return None;
        }
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let args = [0, len as u64, protection, libc::MAP_SHARED as u64, fd as u64, 0];
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = sys::check(unsafe { sys::syscall(libc::SYS_mmap as u64, &args) }).ok()?;
        let shared = Shared { base: base as *const u8, len };
        // SAFETY: the mapping has this length, and the plan in it is not changed once it is there.
        let bytes = unsafe { std::slice::from_raw_parts(shared.base, shared.len) };
        let plan = Plan::decode(layout::plan(bytes)?).ok()?;
        Some((shared, plan, layout::images_at(plan_len) as u64))
    }

    fn words(&self) -> &'static [AtomicU32] {
        // SAFETY: the table of references lies within the mapping (checked by `map`), is aligned as
        // the mapping is (to pages) and its offset (to 8), and is only used through atomics.
        unsafe {
            let at = self.base.add(layout::REFERENCES).cast::<AtomicU32>();
            std::slice::from_raw_parts(at, layout::CELLS)
        }
    }

    fn cells(&self) -> &'static [OpenCells] {
        const { assert!(size_of::<OpenCells>() == layout::CELL) };
        // SAFETY: as in `words`; `OpenCells` is made of atomics, and zeros are a valid state of it.
        unsafe {
            let at = self.base.add(layout::OPEN_FILES).cast::<OpenCells>();
            std::slice::from_raw_parts(at, layout::CELLS)
        }
    }

    /// Counts a call.
    #[inline]
    pub fn count(&self, number: u64, fate: Fate) {
        let number = number as usize;
        if number < layout::CALLS {
            let at = layout::COUNTERS + number * 24 + fate as usize * 8;
            // SAFETY: as in `words`; the offset is a multiple of 8 below the table's end.
            let counter = unsafe { &*self.base.add(at).cast::<AtomicU64>() };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a call by the site that it came from: its place among those of all objects of the plan.
    pub fn count_site(&self, site: usize, fate: Fate) {
        if site < layout::SITES {
            let at = layout::SITE_COUNTERS + site * 24 + fate as usize * 8;
            // SAFETY: as in `count`.
            let counter = unsafe { &*self.base.add(at).cast::<AtomicU64>() };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of cells that came from [`Arena::take`].
    pub fn index(&self, cells: &OpenCells) -> u32 {
        let from = self.cells().as_ptr() as usize;
        ((std::ptr::from_ref(cells) as usize - from) / size_of::<OpenCells>()) as u32
    }

    /// The cells of this number; `None` beyond the table.
    pub fn cells_at(&self, index: u32) -> Option<&'static OpenCells> {
        self.cells().get(index as usize)
    }

    /// A number that is the same in all processes of the run, and differs between runs.
    pub fn id(&self) -> u64 {
        // SAFETY: as in `words`; the word after the length of the plan was written before the run.
        unsafe { (*self.base.add(layout::RUN_ID).cast::<AtomicU64>()).load(Ordering::Relaxed) }
    }

    /// The next cells that this thread takes are these, which belong to an open file already.
    pub fn take_over(&self, index: u32) {
        TAKEN_OVER.set(Some(index));
    }

    /// From here on cells are new again; those that nobody took are given back.
    pub fn end_take_over(&self) {
        TAKEN_OVER.set(None);
    }

    /// One more process has the open file.
    pub fn share(&self, index: u32) {
        if let Some(word) = self.words().get(index as usize) {
            word.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One process less has it.
    pub fn unshare(&self, index: u32) {
        if let Some(word) = self.words().get(index as usize) {
            let _ = word.fetch_update(Ordering::Release, Ordering::Relaxed, |n| n.checked_sub(1));
        }
    }
}

thread_local! {
    static TAKEN_OVER: Cell<Option<u32>> = const { Cell::new(None) };
}

impl Arena for Shared {
    fn process(&self) -> u32 {
        let known = crate::process::get().map(|process| process.pid.load(Ordering::Relaxed));
        known.unwrap_or_else(crate::process::pid) as u32
    }

    /// One that has ended and that nobody has waited for counts as gone.
    fn is_alive(&self, process: u32) -> bool {
        match sys::plain(libc::SYS_pidfd_open, u64::from(process), 0, 0) {
            Ok(fd) => {
                let mut state = libc::pollfd { fd: fd as i32, events: libc::POLLIN, revents: 0 };
                let args = [&raw mut state as u64, 1, 0, 0, 0, 0];
                // SAFETY: the kernel writes to the structure.
                let ended = sys::check(unsafe { sys::syscall(libc::SYS_poll as u64, &args) });
                crate::process::close(fd as i32);
                ended != Ok(1)
            }
            Err(errno) => errno.raw() != libc::ESRCH,
        }
    }

    /// Every process of a run is registered for it, from its start on.
    fn barrier(&self) {
        crate::inside::barrier_for_all();
    }

    fn is_taken_over(&self, cells: &'static OpenCells) -> bool {
        TAKEN_OVER.get() == Some(self.index(cells))
    }

    fn take(&self) -> Option<&'static OpenCells> {
        if let Some(index) = TAKEN_OVER.get() {
            return self.cells_at(index);
        }
        // Where to look first differs by thread and time, so that processes do not follow each other.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let words = self.words();
        let start = match NEXT.load(Ordering::Relaxed) {
            0 => sys::plain(libc::SYS_getpid, 0, 0, 0).unwrap_or(0) as u32 * 64,
            next => next,
        };
        for step in 0..layout::CELLS as u32 {
            let index = start.wrapping_add(step) % layout::CELLS as u32;
            let word = &words[index as usize];
            if word.load(Ordering::Relaxed) == 0
                && word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                NEXT.store(index + 1, Ordering::Relaxed);
                return self.cells().get(index as usize);
            }
        }
        None
    }

    fn give_back(&self, cells: &'static OpenCells) {
        self.unshare(self.index(cells));
    }
}
