//! The credentials of this process and of its threads, credentials(7).

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use defuse_direct::{ClientTask, TaskCredentials, WorkDir};

use crate::machine::inside::{self, InsideGuard};
use crate::machine::{pid, sys, thread_exit};
use crate::process::user_namespace;

/// How often a thread of this process has changed its credentials: each looks at its own when it
/// sees another number than before.
static CHANGES: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static SEEN: Cell<u32> = const { Cell::new(0) };
    /// The task of a thread whose credentials differed once from the process's credentials.
    static OWN: Cell<*const ClientTask> = const { Cell::new(std::ptr::null()) };
}

/// After a call that changes the credentials of its thread.
pub fn record_change() {
    CHANGES.fetch_add(1, Ordering::AcqRel);
}

/// The task of this thread: `of_process`, unless the thread has had other credentials.
#[inline]
pub fn task_of_thread(of_process: &'static ClientTask) -> &'static ClientTask {
    if CHANGES.load(Ordering::Acquire) != SEEN.get() {
        refresh(of_process);
    }
    // SAFETY: it is null, or the task that `refresh` made for this thread, which lives until the
    // thread ends; only this thread uses the reference.
    unsafe { OWN.get().as_ref() }.unwrap_or(of_process)
}

/// Takes note of what this thread may do now. The kernel has credentials for every thread; the C
/// library sees to it that all threads of a process change theirs together, so that most never
/// differ.
#[cold]
fn refresh(of_process: &'static ClientTask) {
    SEEN.set(CHANGES.load(Ordering::Acquire));
    let Some(now) = credentials() else { return };
    // SAFETY: as in `task_of_thread`.
    match unsafe { OWN.get().as_ref() } {
        Some(own) => own.set_credentials(now),
        None if now == *of_process.credentials() => {}
        None => OWN.set(Box::into_raw(Box::new(of_process.with_credentials(now)))),
    }
}

/// In a child: its number, in the task of this thread if it has its own.
pub fn set_pid(pid: u32) {
    // SAFETY: as in `task_of_thread`.
    if let Some(own) = unsafe { OWN.get().as_ref() } {
        own.set_pid(pid);
    }
}

/// At the end of this thread.
pub fn forget() {
    let own = OWN.replace(std::ptr::null()).cast_mut();
    // One that comes back looks again.
    SEEN.set(0);
    if !own.is_null() {
        // SAFETY: `refresh` made it by `Box::into_raw`, and no other code has the address; no call
        // is under way on this thread.
        drop(unsafe { Box::from_raw(own) });
    }
}

/// The end of a thread, for the C library to call; it calls again if a destructor has noted another
/// one.
pub extern "C" fn end_of_thread(_: *mut c_void) {
    let inside = InsideGuard::enter();
    thread_exit::run_destructors();
    if inside.is_some() {
        forget();
        drop(inside);
        inside::forget();
    }
}

/// The kernel's working directory of this process.
pub fn kernel_cwd() -> Option<Vec<u8>> {
    let mut room = [0u8; 4096];
    let args = [room.as_mut_ptr() as u64, room.len() as u64, 0, 0, 0, 0];
    // SAFETY: getcwd fills the room.
    let len = sys::check(unsafe { sys::syscall(libc::SYS_getcwd as u64, &args) }).ok()?;
    Some(room[..(len as usize).checked_sub(1)?].to_vec())
}

/// The task of a process that has just begun, with one thread.
pub fn task_at_start() -> Option<ClientTask> {
    let cwd = kernel_cwd().unwrap_or_else(|| b"/".to_vec());
    let task = ClientTask::new(credentials()?, WorkDir::Outside(cwd));
    // There is no other way to read it but a file of /proc, which takes a hundred times as long.
    let umask = sys::plain(libc::SYS_umask, 0o077, 0, 0).ok()?;
    let _ = sys::plain(libc::SYS_umask, umask as u64, 0, 0);
    task.set_umask(umask as u32);
    let mut limit: libc::rlimit = sys::zeroed();
    let args = [0, libc::RLIMIT_FSIZE as u64, 0, &raw mut limit as u64, 0, 0];
    // SAFETY: prlimit64 fills the record.
    let result = sys::check(unsafe { sys::syscall(libc::SYS_prlimit64 as u64, &args) });
    let is_limited = result.is_ok() && limit.rlim_cur != libc::RLIM_INFINITY;
    task.set_file_size_limit(is_limited.then_some(limit.rlim_cur));
    Some(task)
}

/// The credentials of this thread, credentials(7), by which the kernel decides about files: with
/// the file-system ids, which setfsuid(2) sets.
fn credentials() -> Option<TaskCredentials> {
    let three = |call: i64| {
        let mut ids = [0u32; 3];
        let at = ids.as_mut_ptr();
        let args = [at as u64, at.wrapping_add(1) as u64, at.wrapping_add(2) as u64, 0, 0, 0];
        // SAFETY: getresuid(2) and getresgid(2) write three numbers.
        sys::check(unsafe { sys::syscall(call as u64, &args) }).ok().map(|_| ids)
    };
    let (uids, gids) = (three(libc::SYS_getresuid)?, three(libc::SYS_getresgid)?);
    // For a number that is no id, these calls change nothing and return the present id.
    let present = |call| sys::plain(call, u64::from(u32::MAX), 0, 0).ok().map(|id| id as u32);
    let count = sys::plain(libc::SYS_getgroups, 0, 0, 0).ok()?;
    let mut groups = vec![0u32; count as usize];
    let room = [groups.len() as u64, groups.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes as many groups as there is room for.
    sys::check(unsafe { sys::syscall(libc::SYS_getgroups as u64, &room) }).ok()?;
    const VERSION_3: u64 = 0x2008_0522;
    let (header, mut caps) = ([VERSION_3, 0], [[0u32; 3]; 2]);
    let args = [header.as_ptr() as u64, caps.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel reads a version and a process (0: this thread), and writes two records.
    sys::check(unsafe { sys::syscall(libc::SYS_capget as u64, &args) }).ok()?;
    let own = TaskCredentials {
        uid: present(libc::SYS_setfsuid)?,
        gid: present(libc::SYS_setfsgid)?,
        real_uid: uids[0],
        real_gid: gids[0],
        groups: groups.into(),
        caps: u64::from(caps[0][0]) | u64::from(caps[1][0]) << 32,
        pid: pid::read_pid() as u32,
    };
    if !user_namespace::is_entered() {
        return Some(own);
    }
    if !user_namespace::is_mapped() {
        // Its maps may be written at any time.
        record_change();
    }
    Some(user_namespace::credentials(own))
}
