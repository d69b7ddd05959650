//! The threads that are *inside*, in our own code, and how a fork(2) waits for them.
//!
//! The calls of a thread that is inside are not intercepted, and its signals wait ([`pending`]). A
//! child gets a copy of our locks and of our heap, but none of the threads that hold them. So a
//! fork waits until no other thread is inside, and lets none in until it is done. To go in and out
//! costs two stores: membarrier(2) makes them visible to the fork.

use std::cell::Cell;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, compiler_fence};
use std::time::{Duration, Instant};

use crate::machine::lock::{self, FutexGuard, FutexLock};
use crate::machine::{mask, pending, stack, sys, thread_exit};

/// The thread is not in our code.
const OUTSIDE: u32 = 0;
/// The thread is in our code, and a fork waits for it.
const INSIDE: u32 = 1;
/// The thread is in our code, but holds nothing that a child would need: signals wait, and a fork
/// does not.
const AT_THE_GATE: u32 = 2;
/// The thread is in our code after its end has begun for the last time: it counts among [`LATE`].
const INSIDE_LATE: u32 = 3;

/// The variables of a thread. They are together, and [`InsideGuard`] keeps their address, because
/// each access to a variable of a thread from a library calls a function.
struct ThreadVariables {
    state: AtomicU32,
    /// True if it is among [`THREADS`].
    is_listed: Cell<bool>,
    /// True while it forks: it holds the lock of [`THREADS`], and no thread goes in.
    forks: Cell<bool>,
    /// The signals that were blocked before it forked.
    mask: Cell<u64>,
    /// Its `errno`; null before it is listed.
    errno: Cell<*mut i32>,
}

thread_local! {
    static OWN: ThreadVariables = const {
        ThreadVariables {
            state: AtomicU32::new(OUTSIDE),
            is_listed: Cell::new(false),
            forks: Cell::new(false),
            mask: Cell::new(0),
            errno: Cell::new(ptr::null_mut()),
        }
    };
}

/// Addresses of the states of all threads that were ever inside, and still live. A thread that
/// forks holds the lock until the fork is done: no thread begins or ends in between.
static THREADS: FutexLock<Vec<usize>> = FutexLock::new(Vec::new());

/// The count of [`THREADS`], for threads that must not wait for its lock: a fork that holds it
/// waits for them.
static LISTED: AtomicUsize = AtomicUsize::new(0);

/// How many threads are inside that are on no list any more: what an ending thread still calls may
/// bring it back (destructors of the program, and the C library itself, which unmaps stacks at the
/// very end), and then nothing would take it off the list. They are few, so they are counted by
/// what costs more and needs nothing of the thread.
static LATE: AtomicU32 = AtomicU32::new(0);

/// Not 0 while a fork is under way: no thread goes in.
static CLOSED: AtomicU32 = AtomicU32::new(0);

/// Our own code runs on this thread: its calls are not intercepted, and signals wait. At the end of
/// this value, `errno` has the value of its beginning: calls of our code set it, and a system call
/// that succeeds leaves it alone, on which programs rely.
pub struct InsideGuard {
    /// The variables of this thread, which does not end meanwhile. The pointer keeps this value on
    /// its thread.
    own: NonNull<ThreadVariables>,
    errno: *mut i32,
    value: i32,
}

/// The `errno` of this thread.
fn errno() -> *mut i32 {
    // SAFETY: it takes nothing and returns a pointer to a variable of this thread.
    unsafe { libc::__errno_location() }
}

/// Calls `begin`, after which `errno` has its former value: a program begins with 0.
pub fn keep_errno(begin: fn()) {
    let errno = errno();
    // SAFETY: the variable of this thread, which does not end meanwhile.
    let before = unsafe { errno.read() };
    begin();
    // SAFETY: as above.
    unsafe { errno.write(before) };
}

impl InsideGuard {
    /// Begins; `None` if this thread is inside already, so that the call is one of our own.
    #[inline]
    pub fn enter() -> Option<InsideGuard> {
        OWN.with(|own| {
            if own.state.load(Ordering::Relaxed) != OUTSIDE {
                return None;
            }
            let is_listed = own.is_listed.get();
            let inside = InsideGuard::new(own, if is_listed { own.errno.get() } else { errno() });
            if !is_listed && thread_exit::has_ended() {
                enter_late(own);
                return Some(inside);
            }
            if !is_listed {
                list(own);
            }
            enter_marked(own, OUTSIDE);
            Some(inside)
        })
    }

    #[inline]
    fn new(own: &ThreadVariables, errno: *mut i32) -> InsideGuard {
        // SAFETY: a variable of this thread, to which no other reference exists.
        InsideGuard { own: NonNull::from(own), errno, value: unsafe { *errno } }
    }
}

impl Drop for InsideGuard {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: a variable of this thread, to which no other reference exists.
        unsafe { *self.errno = self.value };
        // SAFETY: variables of this thread, whose end has not come: it runs this.
        let own = unsafe { self.own.as_ref() };
        if own.state.load(Ordering::Relaxed) == INSIDE_LATE {
            LATE.fetch_sub(1, Ordering::SeqCst);
        }
        own.state.store(OUTSIDE, Ordering::Release);
        pending::deliver();
    }
}

/// True while this thread runs our own code.
#[inline]
pub fn is_inside() -> bool {
    OWN.with(|own| own.state.load(Ordering::Relaxed) != OUTSIDE)
}

/// Delivers the signal that waits, on the way out of our code, once its stack is free.
pub extern "C" fn deliver_outside() {
    if !is_inside() {
        pending::deliver();
    }
}

/// Marks this thread as inside; while a fork keeps threads out, it waits in the state `meanwhile`.
#[inline]
fn enter_marked(own: &ThreadVariables, meanwhile: u32) {
    own.state.store(INSIDE, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    while CLOSED.load(Ordering::Relaxed) != 0 && !own.forks.get() {
        own.state.store(meanwhile, Ordering::Relaxed);
        lock::wait(&CLOSED, 1);
        own.state.store(INSIDE, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }
}

#[cold]
fn enter_late(own: &ThreadVariables) {
    // Before it counts: a handler of a signal that came in between would wait for the fork, which
    // would wait for this thread.
    own.state.store(INSIDE_LATE, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    LATE.fetch_add(1, Ordering::SeqCst);
    while CLOSED.load(Ordering::SeqCst) != 0 && !own.forks.get() {
        LATE.fetch_sub(1, Ordering::SeqCst);
        lock::wait(&CLOSED, 1);
        LATE.fetch_add(1, Ordering::SeqCst);
    }
}

/// Lets a waiting fork happen: for a thread inside that waits for others itself, and that holds
/// nothing at this moment.
pub fn allow_forks() {
    if CLOSED.load(Ordering::Relaxed) != 0 {
        OWN.with(|own| {
            if own.state.load(Ordering::Relaxed) == INSIDE {
                own.state.store(AT_THE_GATE, Ordering::Release);
                enter_marked(own, AT_THE_GATE);
            }
        });
    }
}

/// Runs `wait`, for which no fork waits: it is a call of the kernel that needs nothing that a child
/// would need.
pub fn wait_without_forks<T>(wait: impl FnOnce() -> T) -> T {
    OWN.with(|own| {
        let is_inside = own.state.load(Ordering::Relaxed) == INSIDE;
        if is_inside {
            own.state.store(AT_THE_GATE, Ordering::Release);
        }
        let value = wait();
        if is_inside {
            enter_marked(own, AT_THE_GATE);
        }
        value
    })
}

#[cold]
fn list(own: &ThreadVariables) {
    // From here on nothing interrupts, so that the lock cannot be waited for by its own thread.
    own.state.store(AT_THE_GATE, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    own.is_listed.set(true);
    own.errno.set(errno());
    // The list may grow by memory of our heap, in which no thread forks while the lock is held.
    THREADS.lock().push(ptr::from_ref(&own.state) as usize);
    LISTED.fetch_add(1, Ordering::Relaxed);
    thread_exit::arm();
}

/// Takes this thread off the list, at its end: it is not inside.
pub fn forget() {
    thread_exit::note_end();
    if thread_exit::has_ended() {
        stack::drop_own();
    } else {
        // Whatever the thread does from here to there is forgotten then.
        thread_exit::arm();
    }
    OWN.with(|own| {
        own.state.store(AT_THE_GATE, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let address = ptr::from_ref(&own.state) as usize;
        THREADS.lock().retain(|other| *other != address);
        LISTED.fetch_sub(usize::from(own.is_listed.replace(false)), Ordering::Relaxed);
        own.state.store(OUTSIDE, Ordering::Release);
    });
    pending::deliver();
}

const MEMBARRIER_GLOBAL: u64 = 1 << 1;
const MEMBARRIER_REGISTER_GLOBAL: u64 = 1 << 2;
const MEMBARRIER_PRIVATE: u64 = 1 << 3;
const MEMBARRIER_REGISTER: u64 = 1 << 4;

/// Makes [`stop_others`] possible, and has this process take part in [`barrier_for_all`].
pub fn register() {
    for command in [MEMBARRIER_REGISTER, MEMBARRIER_REGISTER_GLOBAL] {
        let _ = sys::plain(libc::SYS_membarrier, command, 0, 0);
    }
}

/// Every thread of every process that has registered passes a memory barrier.
pub fn barrier_for_all() {
    let _ = sys::plain(libc::SYS_membarrier, MEMBARRIER_GLOBAL, 0, 0);
}

/// The longest time that a fork waits for a thread in a file system that does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until no other thread is inside, and keeps them out until [`let_others_go_on`]; signals
/// wait on this thread. False, and nothing has changed, if a thread did not come out.
pub fn stop_others() -> bool {
    if OWN.with(|own| own.forks.get()) {
        return true;
    }
    // A handler on this very thread would wait for the end of the fork.
    let mask = mask::change(libc::SIG_BLOCK, mask::CAN_WAIT);
    OWN.with(|own| own.mask.set(mask));
    let threads = THREADS.lock();
    CLOSED.store(1, Ordering::SeqCst);
    let _ = sys::plain(libc::SYS_membarrier, MEMBARRIER_PRIVATE, 0, 0);
    OWN.with(|own| own.forks.set(true));
    let own = OWN.with(|own| ptr::from_ref(&own.state) as usize);
    // SAFETY: a thread is taken off the list before its variables go, and it needs the list's lock
    // for that, which is held here.
    let state = |other: usize| unsafe { &*(other as *const AtomicU32) };
    let mut others = threads.iter().filter(|other| **other != own);
    let began = Instant::now();
    let is_empty = others
        .all(|other| is_left(began, || state(*other).load(Ordering::Acquire) != INSIDE))
        && is_left(began, || LATE.load(Ordering::SeqCst) == 0);
    threads.keep();
    if !is_empty {
        end_fork();
    }
    is_empty
}

/// Waits until `left` is true; false if it is not so [`PATIENCE`] after the fork `began`.
fn is_left(began: Instant, left: impl Fn() -> bool) -> bool {
    let mut looks = 0u32;
    while !left() {
        looks += 1;
        if looks < 1000 {
            let _ = sys::plain(libc::SYS_sched_yield, 0, 0, 0);
            continue;
        }
        if began.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Ends a fork: threads may go in again.
pub fn end_fork() {
    if !OWN.with(|own| own.forks.replace(false)) {
        return;
    }
    CLOSED.store(0, Ordering::SeqCst);
    lock::wake(&CLOSED, i32::MAX);
    FutexGuard::release_of(&THREADS);
    mask::change(libc::SIG_SETMASK, OWN.with(|own| own.mask.get()));
}

/// True if other threads have been inside and still live.
pub fn has_others() -> bool {
    LISTED.load(Ordering::Relaxed) > 1
}

/// Resets the state of this module in a child, in which no other thread exists.
pub fn reset_in_child() {
    // If the program forked in a way of its own, another thread may have held it.
    THREADS.reset();
    let own = OWN.with(|own| ptr::from_ref(&own.state) as usize);
    let forks = OWN.with(|own| own.forks.replace(false));
    CLOSED.store(0, Ordering::SeqCst);
    LATE.store(0, Ordering::SeqCst);
    let mut threads = THREADS.lock();
    threads.retain(|other| *other == own);
    LISTED.store(threads.len(), Ordering::Relaxed);
    drop(threads);
    if forks {
        mask::change(libc::SIG_SETMASK, OWN.with(|own| own.mask.get()));
    }
}
