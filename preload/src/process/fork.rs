//! Children: each has memory of its own, and finds out that it is one.
//!
//! posix_spawn(3), popen(3) and system(3) make a child that shares its parent's memory until it
//! executes a program (`CLONE_VM`). A file that such a child opened would be noted in the tables of
//! parent and child, so the flag is taken out: the child gets a copy, as by fork(2), and its parent
//! waits as before, by a pipe that closes at exec where other threads would have to wait with it.
//! The bytes that the child leaves on the stack for its parent go through that pipe ([`spawned`]).
//!
//! Before a process is made, all other threads leave our code, and they wait until it is there: the
//! child gets our locks and our heap unused. That is done around the very `syscall` instruction,
//! not by pthread_atfork(3): the C library takes the locks of malloc(3) in between, and a thread
//! that waits for the end of the fork in mmap(2) may hold one of them. Where the instruction is not
//! patched, handlers of pthread_atfork(3) have to do ([`follow_handlers`]).
//!
//! A child that was made in another way knows itself by a page that the kernel empties in children
//! (`MADV_WIPEONFORK`).

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use defuse_fs::Errno;
use defuse_preload_plan::layout::OnceMessage;

use crate::machine::inside::{self, InsideGuard};
use crate::machine::message::write_line;
use crate::machine::{heap, mode, sys};
use crate::process::compose::RelayFileSystem;
use crate::process::state::{self, RunProcess};
use crate::process::{credentials, holders, spawned};

static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

/// Makes the mark of this process.
pub fn mark() {
    let Ok(at) = sys::map(4096, libc::PROT_READ | libc::PROT_WRITE, 0) else { return };
    if sys::plain(libc::SYS_madvise, at, 4096, libc::MADV_WIPEONFORK as u64).is_err() {
        return;
    }
    let page = at as *mut AtomicU32;
    // SAFETY: the page was mapped just now, and zeros are a valid value.
    unsafe { (*page).store(1, Ordering::Relaxed) };
    MARK.store(page, Ordering::Release);
}

/// True, once, in a child that does not know yet that it is one.
#[inline]
pub fn is_new_child() -> bool {
    let page = MARK.load(Ordering::Acquire);
    // SAFETY: it is null or the page that `mark` mapped, which stays.
    let Some(mark) = (unsafe { page.as_ref() }) else { return false };
    mark.load(Ordering::Relaxed) == 0 && mark.swap(1, Ordering::Relaxed) == 0
}

/// Marks this process as a child that knows that it is one.
fn note_child() {
    let page = MARK.load(Ordering::Acquire);
    // SAFETY: as in `is_new_child`.
    if let Some(mark) = unsafe { page.as_ref() } {
        // Not read before: that would be one more fault on the page that the kernel has emptied.
        mark.store(1, Ordering::Relaxed);
    }
}

thread_local! {
    /// The process that this thread makes next is made by vfork(2), whose caller has its frame
    /// here; 0 for others.
    static VFORK: Cell<u64> = const { Cell::new(0) };
    /// The process that this thread makes next begins in a new user namespace.
    static NEW_USERS: Cell<bool> = const { Cell::new(false) };
    /// The child that this thread makes is to have no handlers, and the kernel leaves that to this
    /// library.
    static CLEARS_ACTIONS: Cell<bool> = const { Cell::new(false) };
}

/// vfork(2), by `fork`, which makes a child with memory of its own. `frame` is where the frame of
/// the caller begins.
pub fn as_vfork(frame: u64, fork: impl FnOnce() -> i32) -> i32 {
    VFORK.set(frame);
    let child = fork();
    VFORK.set(0);
    child
}

/// The flags of a clone(2) or clone3(2).
struct CloneFlags<'a> {
    args: &'a mut [u64; 6],
    is_clone3: bool,
}

impl CloneFlags<'_> {
    fn get(&self) -> Option<u64> {
        if self.is_clone3 { sys::load::<u64>(self.args[0]).ok() } else { Some(self.args[0]) }
    }

    fn take(&mut self, flag: i32) {
        self.change(|flags| flags & !(flag as u64));
    }

    fn give(&mut self, flag: i32) {
        self.change(|flags| flags | flag as u64);
    }

    fn change(&mut self, change: impl FnOnce(u64) -> u64) {
        let Some(flags) = self.get().map(change) else { return };
        if self.is_clone3 {
            // The record is the C library's, on its stack.
            let _ = sys::store(self.args[0], flags);
        } else {
            self.args[0] = flags;
        }
    }
}

/// The end of the stack that a clone(2) or clone3(2) gives to what it makes; 0 if that is the one
/// of its maker.
pub fn stack_of_child(number: u64, args: &[u64; 6]) -> u64 {
    if number != libc::SYS_clone3 as u64 {
        return args[1];
    }
    let [stack, len] = sys::load::<[u64; 2]>(args[0] + 40).unwrap_or_default();
    if stack == 0 { 0 } else { stack + len }
}

/// In a child: true if its maker asked for a child without handlers, which are then to be cleared.
pub fn clears_actions() -> bool {
    CLEARS_ACTIONS.take()
}

/// Removes `flag` from the flags of a clone(2) or clone3(2).
pub fn remove_flag(number: u64, args: &mut [u64; 6], flag: i32) {
    CloneFlags { args, is_clone3: number == libc::SYS_clone3 as u64 }.take(flag);
}

/// True if fork(2) has to fail, because a file system is in the memory of this process. Then prints
/// a message.
pub fn is_refused() -> bool {
    let Some(process) = state::get() else { return false };
    match process.find_unshared() {
        None => false,
        Some(mount) => {
            write_line(&format!(
                "{}: its files are in the memory of this process, which a child would have a copy \
                 of: use --fork server or --fork reopen",
                String::from_utf8_lossy(&mount.target)
            ));
            true
        }
    }
}

/// Before a clone(2) or clone3(2): true if it makes a process, and is to be followed by
/// [`finish_clone`]; false for other calls, which make threads. `EAGAIN` if a
/// thread does not leave our code. `frame` is an address in the frame of the caller, or behind it.
pub fn prepare_clone(number: u64, args: &mut [u64; 6], frame: u64) -> Result<bool, Errno> {
    const THREAD: u64 = libc::CLONE_THREAD as u64;
    const MEMORY: u64 = libc::CLONE_VM as u64;
    const WAITS: u64 = libc::CLONE_VFORK as u64;
    const CLEAR_SIGHAND: u64 = 1 << 32;
    let Some(process) = state::get() else { return Ok(false) };
    let mut flags = CloneFlags { args, is_clone3: number == libc::SYS_clone3 as u64 };
    let Some(requested) = flags.get() else { return Ok(false) };
    if requested & THREAD != 0 || inside::is_inside() {
        return Ok(false);
    }
    if requested & (MEMORY | WAITS) == MEMORY {
        return refuse_shared_memory(process);
    }
    if requested & MEMORY != 0 {
        flags.take(libc::CLONE_VM);
    }
    let clears = flags.is_clone3 && mode::is_dispatched() && requested & CLEAR_SIGHAND != 0;
    CLEARS_ACTIONS.set(clears);
    if clears {
        flags.change(|flags| flags & !CLEAR_SIGHAND);
    }
    NEW_USERS.set(requested & libc::CLONE_NEWUSER as u64 != 0);
    let waits = {
        let _inside = InsideGuard::enter();
        let has_others = inside::has_others();
        let vfork = VFORK.take();
        let frame = if vfork == 0 { frame } else { vfork };
        if requested & WAITS != 0 || vfork != 0 {
            let has_pipe = spawned::begin(process, frame, has_others);
            if has_pipe && has_others {
                flags.take(libc::CLONE_VFORK);
            } else {
                flags.give(libc::CLONE_VFORK);
            }
        }
        // By a pipe, only this thread waits.
        flags.get().is_some_and(|flags| flags & WAITS != 0)
    };
    if inside::stop_others() {
        if share(process, waits) {
            return Ok(true);
        }
        inside::end_fork();
        let _inside = InsideGuard::enter();
        spawned::end();
        write_line("fork: the run has as many processes as it can have");
        return Err(Errno::EAGAIN);
    }
    let _inside = InsideGuard::enter();
    spawned::end();
    write_line("fork: a file system has not answered another thread for ten seconds");
    Err(Errno::EAGAIN)
}

/// A process that shares our memory and runs beside us (`CLONE_VM` without `CLONE_VFORK`): it would
/// use our connections, which belong to one process, and note its descriptors in our table. Where a
/// mount is served by another process that is refused; elsewhere the kernel makes it.
fn refuse_shared_memory(process: &'static RunProcess) -> Result<bool, Errno> {
    let Some(mount) = process.mounts.iter().find(|mount| mount.relay.is_some()) else {
        return Ok(false);
    };
    let _inside = InsideGuard::enter();
    if process.shared.is_news(OnceMessage::SharedMemory) {
        write_line(&format!(
            "clone: a process that shares the memory of its parent (CLONE_VM) cannot use {}, which \
             another process serves: EPERM",
            String::from_utf8_lossy(&mount.target)
        ));
    }
    Err(Errno::EPERM)
}

/// After a clone(2) that [`prepare_clone`] has prepared, in both processes: it returned `value`.
pub fn finish_clone(value: i64) {
    let Some(process) = state::get() else { return };
    if value == 0 {
        begin_in_child(process);
        return;
    }
    finish_share(process, value > 0);
    inside::end_fork();
    if value > 0 {
        spawned::wait();
    } else {
        let _inside = InsideGuard::enter();
        spawned::end();
    }
}

/// Counts all open files once more, for the child. No other thread of ours may run: a file that
/// such a thread opens or closes meanwhile would be counted wrongly. If the process `waits`, none
/// of its threads runs until the child has executed a program or ended.
///
/// False if the run can have no more processes.
fn share(process: &'static RunProcess, waits: bool) -> bool {
    let _inside = InsideGuard::enter();
    if !holders::prepare_fork(&process.shared, process.inherited.memory, process.floor) {
        return false;
    }
    process.relays().for_each(|relay| relay.prepare_fork(waits));
    true
}

/// In the parent, after [`share`]; without a child the counts are as before.
fn finish_share(process: &'static RunProcess, has_child: bool) {
    let _inside = InsideGuard::enter();
    process.relays().for_each(RelayFileSystem::finish_fork);
    holders::finish_fork(&process.shared, has_child);
}

/// Called first in a child that was made by a call of ours, before anything else of our code runs.
pub static IN_CHILD: OnceLock<fn()> = OnceLock::new();

/// This thread is the only one of the child. If the program forked in a way of its own, threads
/// that are not here may have held the heap and the list of threads.
fn begin_alone() {
    heap::reset();
    inside::reset_in_child();
}

/// Begins a child whose fork went past this library ([`is_new_child`]).
#[cold]
pub fn begin_unseen_child(process: &'static RunProcess) {
    begin_alone();
    let _inside = InsideGuard::enter();
    process.adopt();
    // How it was made is not known.
    credentials::record_change();
}

fn begin_in_child(process: &'static RunProcess) {
    note_child();
    if let Some(in_child) = IN_CHILD.get() {
        in_child();
    }
    begin_alone();
    let _inside = InsideGuard::enter();
    spawned::begin_in_child();
    process.adopt();
    if NEW_USERS.take() {
        process.enter_user_namespace();
    }
}

extern "C" fn prepare() {
    if let Some(process) = state::get() {
        inside::stop_others();
        // Without a slot for it, the child looks for one itself.
        let _ = share(process, false);
    }
}

extern "C" fn finish_in_parent() {
    if let Some(process) = state::get() {
        // The C library does not inform handlers whether there is a child.
        finish_share(process, true);
    }
    inside::end_fork();
}

extern "C" fn begin_child() {
    if let Some(process) = state::get() {
        begin_in_child(process);
    }
}

// SAFETY: pthread_atfork(3) in the form that the C library exports; the last argument names the
// owner of the handlers, and NULL means that they stay.
unsafe extern "C" {
    fn __register_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
        handle: *mut c_void,
    ) -> c_int;
}

/// True if forks are followed by the handlers of pthread_atfork(3).
static BY_HANDLERS: AtomicBool = AtomicBool::new(false);

/// Makes a process by `_Fork`, which calls no handlers.
pub fn call_without_handlers(make: impl FnOnce() -> i64) -> i64 {
    if !BY_HANDLERS.load(Ordering::Relaxed) {
        return make();
    }
    prepare();
    let child = make();
    if child == 0 {
        begin_child()
    } else {
        finish_in_parent()
    }
    child
}

/// Follows fork(3) by handlers, if its instruction is not patched.
pub fn follow_handlers() {
    BY_HANDLERS.store(true, Ordering::Relaxed);
    // SAFETY: the functions are ours and stay.
    unsafe {
        __register_atfork(
            Some(prepare),
            Some(finish_in_parent),
            Some(begin_child),
            std::ptr::null_mut(),
        );
    }
}
