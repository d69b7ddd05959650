//! Children: each has memory of its own, and finds out that it is one.
//!
//! posix_spawn(3), popen(3) and system(3) make a child that shares its parent's memory until it
//! executes a program (`CLONE_VM`). What such a child opened would be noted in the tables of both, so
//! the flag is taken out: the child gets a copy, as by fork(2), and its parent waits as before. One
//! thing is different then: an execve(2) that fails is seen by the child alone, so that
//! posix_spawn(3) succeeds and the child ends with code 127. Its commonest reason, a program that is
//! not there, is looked for beforehand (`spawn.rs`).
//!
//! A child knows itself by a page that the kernel empties in children (`MADV_WIPEONFORK`).

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::sys;

static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

/// Makes the mark of this process.
pub fn mark() {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let args = [0, 4096, protection, kind, u64::MAX, 0];
    // SAFETY: a new mapping touches nothing that exists.
    let Ok(at) = sys::check(unsafe { sys::syscall(libc::SYS_mmap as u64, &args) }) else { return };
    if sys::plain(libc::SYS_madvise, at as u64, 4096, libc::MADV_WIPEONFORK as u64).is_err() {
        return;
    }
    let page = at as *mut AtomicU32;
    // SAFETY: the page was mapped just now, and zeros are a valid value.
    unsafe { (*page).store(1, Ordering::Relaxed) };
    MARK.store(page, Ordering::Release);
}

/// Whether this is a child that does not know it yet; says so once.
#[inline]
pub fn is_new_child() -> bool {
    let page = MARK.load(Ordering::Acquire);
    // SAFETY: it is null or the page that `mark` mapped, which stays.
    let Some(mark) = (unsafe { page.as_ref() }) else { return false };
    mark.load(Ordering::Relaxed) == 0 && mark.swap(1, Ordering::Relaxed) == 0
}

/// Takes `CLONE_VM` out of a clone(2) or clone3(2) that makes a process; returns whether it was one.
pub fn unshare_memory(number: u64, args: &mut [u64; 6]) -> bool {
    const BOTH: u64 = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    let change = |flags: u64| {
        let process = flags & BOTH == BOTH && flags & libc::CLONE_THREAD as u64 == 0;
        process.then_some(flags & !(libc::CLONE_VM as u64))
    };
    if number == libc::SYS_clone as u64 {
        let changed = change(args[0]);
        args[0] = changed.unwrap_or(args[0]);
        return changed.is_some();
    }
    let changed = sys::load::<u64>(args[0]).ok().and_then(change);
    changed.is_some_and(|flags| sys::store(args[0], flags).is_ok())
}
