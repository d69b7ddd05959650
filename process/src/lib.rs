//! The number of this process, known without a system call, also in children of fork(2).
//!
//! The resources of a library in its process (threads, rings, connections, memory that a device
//! changes) do not go over fork(2) to the child. [`ProcessOwner`] distinguishes the process that
//! made it from its children, for the price of a load.
//!
//! It starts no processes, and does not notice execve(2), which leaves nothing of the program.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

/// The number of this process, in a page that the kernel empties in children; `None` if there is no
/// such page.
static KEPT: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// Keeps the number of this process for [`id`]. A child that shares its parent's memory must not
/// call it.
pub fn keep_id() {
    if let Some(kept) = KEPT.get_or_init(map_fork_detection_word) {
        kept.store(std::process::id(), Ordering::Relaxed);
    }
}

/// The number of this process: without a system call after [`keep_id`]. A child that shares its
/// parent's memory gets its parent's number.
#[inline]
pub fn id() -> u32 {
    match KEPT.get().copied().flatten().map_or(0, |kept| kept.load(Ordering::Relaxed)) {
        0 => std::process::id(),
        id => id,
    }
}

/// The process that something belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessOwner(u32);

impl ProcessOwner {
    /// This process. A child that shares its parent's memory must not call it.
    pub fn current() -> ProcessOwner {
        keep_id();
        ProcessOwner(id())
    }

    /// True in this process, and false in its children.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == id()
    }

    /// The number of the process.
    pub fn id(self) -> u32 {
        self.0
    }
}

/// A word in a page that stays mapped, and is zero in each child that has a copy of the memory.
fn map_fork_detection_word() -> Option<&'static AtomicU32> {
    let len = rustix::param::page_size();
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the kernel chooses where the new memory is, so that nothing else lies there.
    let page = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) }.ok()?;
    // SAFETY: the page was mapped just now, and no other code knows it.
    if unsafe { madvise(page, len, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::munmap(page, len) };
        return None;
    }
    // SAFETY: the page is never unmapped, is aligned to more than the word needs, and its zeros are
    // a valid value. It is reached through this reference alone, by atomic operations.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_not_taken_for_its_parent() {
        assert_eq!(id(), std::process::id());
        let owner = ProcessOwner::current();
        assert!(owner.is_here() && owner.id() == std::process::id());
        assert_eq!(id(), std::process::id());
        // SAFETY: the child makes no calls but getpid(2) and _exit(2).
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_right =
                id() == std::process::id() && !owner.is_here() && ProcessOwner::current().is_here();
            // SAFETY: it ends the child without running anything of the parent.
            unsafe { libc::_exit(if is_right { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the kernel writes the status to the variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(id(), std::process::id());
    }
}
