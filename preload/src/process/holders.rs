//! The open files that each process has, so that the open files of a killed process can be used
//! again.
//!
//! A process owns a slot in the memory of the run, with one bit for every open file. It holds a
//! lock on the byte of that memory that has the slot's number, by a description that no other
//! process has: the kernel drops the lock when the process ends, and keeps it over execve(2). If
//! another process gets the lock of a taken slot, the owner is gone, and all open files of the slot
//! are released (`clean`). Every new process checks a few slots; all are checked when no open file
//! is free.
//!
//! An open file is free when no slot has its bit. A process that is killed between two steps may
//! leave a file in use without a bit; the check of all slots finds it.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use defuse_fs::Errno;
use defuse_preload_plan::layout;

use crate::machine::descriptors::{close, keep_above};
use crate::machine::lock::FutexLock;
use crate::machine::{pid, sys};
use crate::process::run_memory::RunMemory;

/// The open file is in use.
const TAKEN: u32 = 1;
/// More than one process has had it.
const SHARED: u32 = 2;
/// Added whenever the open file is released: a process that was about to release it, too, sees
/// another state.
const NEXT: u32 = 4;

/// No slot.
pub const NONE: u32 = u32::MAX;
/// The word of a slot that is taken.
const OCCUPIED: u32 = 1;
/// The word of a slot without a lock, because the memory could not be opened once more. The open
/// files of such a process stay in use if it is killed.
const UNLOCKED: u32 = 2;

/// A slot, and the descriptor that holds its lock.
pub struct HolderSlot {
    slot: AtomicU32,
    fd: AtomicI32,
}

/// The slot of this process.
static OWN: HolderSlot = HolderSlot::none();
/// The slot of the child that is being made.
static CHILD: HolderSlot = HolderSlot::none();
/// Held by the thread that looks for dead processes: locks belong to the description, and not to a
/// thread.
static SEARCH: FutexLock<()> = FutexLock::new(());

impl HolderSlot {
    const fn none() -> HolderSlot {
        HolderSlot { slot: AtomicU32::new(NONE), fd: AtomicI32::new(-1) }
    }

    fn get(&self) -> (u32, i32) {
        (self.slot.load(Ordering::Relaxed), self.fd.load(Ordering::Relaxed))
    }

    fn set(&self, (slot, fd): (u32, i32)) {
        self.slot.store(slot, Ordering::Relaxed);
        self.fd.store(fd, Ordering::Relaxed);
    }
}

/// Slot and descriptor of this process, for the next program.
pub fn own_slot() -> (u32, i32) {
    OWN.get()
}

/// Continues with the slot of the program before, or takes one; false if there is none.
pub fn begin(shared: &RunMemory, memory: i32, floor: i32, before: Option<(u32, i32)>) -> bool {
    let own = before.filter(|(slot, _)| *slot != NONE).or_else(|| acquire(shared, memory, floor));
    own.map(|own| OWN.set(own)).is_some()
}

/// Releases the open files of the program before that this one does not keep.
pub fn keep_only(shared: &RunMemory, kept: impl Fn(u32) -> bool) {
    let (slot, _) = OWN.get();
    for index in bits(shared, slot) {
        if !kept(index) {
            drop_bit(shared, slot, index, true);
        }
    }
}

/// Prepares the slot of a child, with all open files of this process. No other thread of ours runs.
/// False if there is no slot.
pub fn prepare_fork(shared: &RunMemory, memory: i32, floor: i32) -> bool {
    let Some(child) = acquire(shared, memory, floor) else { return false };
    copy(shared, OWN.get().0, child.0);
    CHILD.set(child);
    true
}

fn copy(shared: &RunMemory, from: u32, to: u32) {
    for index in bits(shared, from) {
        shared.states()[index as usize].fetch_or(SHARED, Ordering::SeqCst);
    }
    for (from, to) in shared.held_files(from).iter().zip(shared.held_files(to)) {
        let bits = from.load(Ordering::Relaxed);
        if bits != 0 {
            to.store(bits, Ordering::SeqCst);
        }
    }
}

/// In the parent after a fork, successful or not.
pub fn finish_fork(shared: &RunMemory, has_child: bool) {
    let (slot, fd) = CHILD.get();
    CHILD.set((NONE, -1));
    if slot == NONE {
        return;
    }
    if !has_child {
        clean(shared, slot);
        shared.processes()[slot as usize].store(0, Ordering::SeqCst);
    }
    if fd >= 0 {
        // The child has the lock with its own descriptor.
        close(fd);
    }
}

/// In a child.
pub fn begin_in_child(shared: &RunMemory, memory: i32, floor: i32) {
    let (parents, parents_fd) = OWN.get();
    let mut own = CHILD.get();
    if own.0 == NONE {
        // The fork went past this library.
        if let Some(made) = acquire(shared, memory, floor) {
            copy(shared, parents, made.0);
            own = made;
        }
    }
    CHILD.set((NONE, -1));
    OWN.set(own);
    if parents_fd >= 0 {
        // The parent's would not end with the parent.
        close(parents_fd);
    }
}

/// Takes a free open file for this process. `None` if all are in use.
pub fn take(shared: &RunMemory) -> Option<u32> {
    let (slot, fd) = OWN.get();
    if slot == NONE {
        return None;
    }
    take_for(shared, slot).or_else(|| {
        search(shared, fd, slot);
        take_for(shared, slot)
    })
}

fn take_for(shared: &RunMemory, slot: u32) -> Option<u32> {
    // Where to look first differs by process and time, so that processes do not follow each other.
    static NEXT_CELL: AtomicU32 = AtomicU32::new(0);
    let start = match NEXT_CELL.load(Ordering::Relaxed) {
        0 => pid::read_pid() as u32 * 64,
        next => next,
    };
    for step in 0..layout::CELLS as u32 {
        let index = start.wrapping_add(step) % layout::CELLS as u32;
        let state = &shared.states()[index as usize];
        let now = state.load(Ordering::SeqCst);
        if now & TAKEN != 0 {
            continue;
        }
        let (word, bit) = word_and_bit(shared, slot, index);
        // First the bit: an open file in use without one is lost.
        word.fetch_or(bit, Ordering::SeqCst);
        let taken = (now & !SHARED) | TAKEN;
        if state.compare_exchange(now, taken, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            NEXT_CELL.store(index + 1, Ordering::Relaxed);
            return Some(index);
        }
        drop_bit(shared, slot, index, true);
    }
    None
}

/// Releases an open file of this process.
pub fn give_back(shared: &RunMemory, index: u32) {
    let (slot, _) = OWN.get();
    if slot != NONE {
        drop_bit(shared, slot, index, false);
    }
}

fn word_and_bit(shared: &RunMemory, slot: u32, index: u32) -> (&'static AtomicU64, u64) {
    (&shared.held_files(slot)[index as usize / 64], 1 << (index % 64))
}

/// Clears a bit. The open file becomes free if no other slot has its bit; `looks` checks all slots
/// even if only this process seems to have had it.
fn drop_bit(shared: &RunMemory, slot: u32, index: u32, looks: bool) {
    let Some(state) = shared.states().get(index as usize) else { return };
    let now = state.load(Ordering::SeqCst);
    let (word, bit) = word_and_bit(shared, slot, index);
    word.fetch_and(!bit, Ordering::SeqCst);
    if now & TAKEN != 0 && (!looks && now & SHARED == 0 || !is_held(shared, index)) {
        free(state, now);
    }
}

fn free(state: &AtomicU32, now: u32) {
    let free = (now & !(TAKEN | SHARED)).wrapping_add(NEXT);
    // Otherwise another one was faster.
    let _ = state.compare_exchange(now, free, Ordering::SeqCst, Ordering::SeqCst);
}

fn slots(shared: &RunMemory) -> u32 {
    shared.high_water().load(Ordering::SeqCst).min(layout::SLOTS as u32)
}

fn is_held(shared: &RunMemory, index: u32) -> bool {
    (0..slots(shared)).any(|slot| {
        let (word, bit) = word_and_bit(shared, slot, index);
        word.load(Ordering::SeqCst) & bit != 0
    })
}

/// The open files of a slot.
fn bits(shared: &RunMemory, slot: u32) -> Vec<u32> {
    let mut all = Vec::new();
    if slot == NONE {
        return all;
    }
    for (at, word) in shared.held_files(slot).iter().enumerate() {
        let mut bits = word.load(Ordering::SeqCst);
        while bits != 0 {
            all.push(at as u32 * 64 + bits.trailing_zeros());
            bits &= bits - 1;
        }
    }
    all
}

/// Releases all open files of a slot. The caller holds its lock.
fn clean(shared: &RunMemory, slot: u32) {
    bits(shared, slot).into_iter().for_each(|index| drop_bit(shared, slot, index, true));
}

/// Takes or drops (`typ`) the kernel's lock on the byte of a slot, for the description of `fd`;
/// true on success.
fn lock(fd: i32, slot: u32, typ: i32) -> bool {
    let mut wanted: libc::flock = sys::zeroed();
    (wanted.l_type, wanted.l_whence) = (typ as i16, libc::SEEK_SET as i16);
    (wanted.l_start, wanted.l_len) = (i64::from(slot), 1);
    let at = std::ptr::from_ref(&wanted) as u64;
    let args = [fd as u64, libc::F_OFD_SETLK as u64, at, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_fcntl as u64, &args)).is_ok()
}

/// A slot for a process, and the descriptor that holds its lock; -1 if there is no lock.
fn acquire(shared: &RunMemory, memory: i32, floor: i32) -> Option<(u32, i32)> {
    match open_again(memory, floor) {
        Ok(fd) => {
            let found = find(shared, fd);
            if found.is_none() {
                close(fd);
            }
            found.map(|slot| (slot, fd))
        }
        Err(_) => find_unlocked(shared).map(|slot| (slot, -1)),
    }
}

/// Opens the memory once more; the descriptor stays open at exec.
fn open_again(memory: i32, floor: i32) -> Result<i32, Errno> {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{memory}")).unwrap_or_default();
    let flags = libc::O_RDWR as u64;
    let args = [libc::AT_FDCWD as u64, path.as_ptr() as u64, flags, 0, 0, 0];
    let fd = sys::check(sys::pass(libc::SYS_openat as u64, &args))? as i32;
    let kept = keep_above(fd, floor, false);
    close(fd);
    kept
}

/// The count of slots that every new process checks for dead owners.
const LOOKS: u32 = 4;

/// An empty slot; `fd` holds its lock.
fn find(shared: &RunMemory, fd: i32) -> Option<u32> {
    static NEXT_SLOT: AtomicU32 = AtomicU32::new(0);
    let words = shared.processes();
    let used = slots(shared);
    let take = |slot: u32| {
        let word = words[slot as usize].load(Ordering::SeqCst);
        if word == UNLOCKED || !lock(fd, slot, libc::F_WRLCK) {
            return false;
        }
        words[slot as usize].store(OCCUPIED, Ordering::SeqCst);
        shared.high_water().fetch_max(slot + 1, Ordering::SeqCst);
        clean(shared, slot);
        true
    };
    let first = NEXT_SLOT.fetch_add(LOOKS, Ordering::Relaxed);
    let looked = (0..LOOKS.min(used)).map(|step| first.wrapping_add(step) % used);
    let is_free = |slot: &u32| words[*slot as usize].load(Ordering::Relaxed) == 0;
    let all = 0..layout::SLOTS as u32;
    let mut likely = looked.chain(all.clone().filter(is_free)).chain(all);
    likely.find(|slot| take(*slot))
}

fn find_unlocked(shared: &RunMemory) -> Option<u32> {
    let all = 0..layout::SLOTS as u32;
    let mut free = all.filter(|slot| {
        let word = &shared.processes()[*slot as usize];
        word.compare_exchange(0, UNLOCKED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    });
    let slot = free.next()?;
    shared.high_water().fetch_max(slot + 1, Ordering::SeqCst);
    Some(slot)
}

/// Releases the open files of dead processes, and those that no slot has.
fn search(shared: &RunMemory, fd: i32, own: u32) {
    let _alone = SEARCH.lock();
    let words = shared.processes();
    for slot in (0..slots(shared)).filter(|slot| *slot != own && fd >= 0) {
        if words[slot as usize].load(Ordering::SeqCst) == OCCUPIED && lock(fd, slot, libc::F_WRLCK)
        {
            clean(shared, slot);
            words[slot as usize].store(0, Ordering::SeqCst);
            lock(fd, slot, libc::F_UNLCK);
        }
    }
    for (index, state) in shared.states().iter().enumerate() {
        let now = state.load(Ordering::SeqCst);
        if now & TAKEN != 0 && !is_held(shared, index as u32) {
            free(state, now);
        }
    }
}

/// Frees the slot of a process that exits in order.
pub fn free_slot(shared: &RunMemory) {
    let (slot, _) = OWN.get();
    if slot != NONE && bits(shared, slot).is_empty() {
        shared.processes()[slot as usize].store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use super::*;

    fn run() -> (RunMemory, OwnedFd) {
        let owned = |name: &std::ffi::CStr| {
            let fd = sys::plain(libc::SYS_memfd_create, name.as_ptr() as u64, 0, 0).unwrap();
            crate::machine::descriptors::take_owned(fd as i32)
        };
        let (memory, plan) = (owned(c"memory"), owned(c"plan"));
        let mut file = std::fs::File::from(memory.try_clone().unwrap());
        std::io::Write::write_all(&mut file, &layout::VERSION.to_le_bytes()).unwrap();
        file.set_len(layout::LEN as u64).unwrap();
        let bytes = layout::with_head(&defuse_preload_plan::ProgramPlan::default().encode());
        let mut file = std::fs::File::from(plan);
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let (shared, ..) = RunMemory::map(memory.as_raw_fd(), file.as_raw_fd()).unwrap();
        (shared, memory)
    }

    fn count_used(shared: &RunMemory) -> usize {
        shared.states().iter().filter(|state| state.load(Ordering::Relaxed) & TAKEN != 0).count()
    }

    /// A process is its slot with a lock; that it is killed is the end of the description.
    #[test]
    fn what_processes_had_that_were_killed_can_be_had_again() {
        let (shared, memory) = run();
        let begin = || acquire(&shared, memory.as_raw_fd(), 3).unwrap();
        let (own, own_fd) = begin();
        let kept: Vec<u32> = (0..100).map(|_| take_for(&shared, own).unwrap()).collect();
        for round in 0..25_000 {
            let (slot, fd) = begin();
            if round % 3 == 0 {
                copy(&shared, own, slot);
            }
            for _ in 0..4 {
                assert!(take_for(&shared, slot).is_some(), "in round {round}");
            }
            close(fd);
        }
        assert!(slots(&shared) < 16, "{} slots for two processes", slots(&shared));
        search(&shared, own_fd, own);
        assert_eq!(count_used(&shared), kept.len(), "nothing else is had by anybody");
        kept.iter().for_each(|index| drop_bit(&shared, own, *index, false));
        assert_eq!(count_used(&shared), 0);
        close(own_fd);
    }

    #[test]
    fn an_open_file_is_free_when_the_last_process_has_given_it_back() {
        let (shared, memory) = run();
        let begin = || acquire(&shared, memory.as_raw_fd(), 3).unwrap();
        let (parent, child) = (begin(), begin());
        let both = take_for(&shared, parent.0).unwrap();
        copy(&shared, parent.0, child.0);
        drop_bit(&shared, parent.0, both, false);
        assert_eq!(count_used(&shared), 1);
        // One that is killed in the middle of giving back.
        let (word, bit) = word_and_bit(&shared, child.0, both);
        word.fetch_and(!bit, Ordering::SeqCst);
        search(&shared, parent.1, parent.0);
        assert_eq!(count_used(&shared), 0);
        close(parent.1);
        close(child.1);
    }

    #[test]
    fn all_open_files_are_taken_once_by_many_threads() {
        let (shared, memory) = run();
        let begin = || acquire(&shared, memory.as_raw_fd(), 3).unwrap();
        let taken: Vec<Vec<u32>> = std::thread::scope(|scope| {
            let work = || {
                let (slot, _) = begin();
                let (mut all, mut count) = (Vec::new(), 0);
                while let Some(index) = take_for(&shared, slot) {
                    all.push(index);
                    count += 1;
                    if count < 5000 && count % 5 == 0 {
                        drop_bit(&shared, slot, all.swap_remove(all.len() / 2), false);
                    }
                }
                all
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut all = taken.concat();
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!((count, all.len()), (layout::CELLS, layout::CELLS));
    }
}
