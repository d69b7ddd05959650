//! The end of a thread: destructors of thread-local variables.
//!
//! The standard library registers them by the C library's `__cxa_thread_atexit_impl`, which takes
//! memory from the program's heap. That must not happen here: a signal handler may use such a
//! variable for the first time after it has interrupted malloc(3). So this library has its own
//! function of that name, which no other library sees. It notes the destructors in room that the
//! thread already has, and calls them by a key of pthread_key_create(3).

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

std::arch::global_asm!(
    ".globl __cxa_thread_atexit_impl",
    ".hidden __cxa_thread_atexit_impl",
    ".type __cxa_thread_atexit_impl,@function",
    "__cxa_thread_atexit_impl:",
    "jmp {note}",
    ".size __cxa_thread_atexit_impl, .-__cxa_thread_atexit_impl",
    note = sym note,
);

type ThreadDestructor = extern "C" fn(*mut u8);

/// How many variables with a destructor a thread can have: this library has a handful.
const ROOM: usize = 32;

/// No key.
const NONE: u32 = u32::MAX;

static KEY: AtomicU32 = AtomicU32::new(NONE);

/// A destructor, and the value that it destroys.
type NotedDestructor = Option<(ThreadDestructor, *mut u8)>;

thread_local! {
    static NOTED: [Cell<NotedDestructor>; ROOM] = const { [const { Cell::new(None) }; ROOM] };
    static COUNT: Cell<usize> = const { Cell::new(0) };
    /// How often the end of this thread has begun.
    static ENDS: Cell<u32> = const { Cell::new(0) };
}

/// How often the C library announces the end of a thread: four times at most
/// (`PTHREAD_DESTRUCTOR_ITERATIONS`), of which we leave one to others.
const LAST_END: u32 = 3;

/// Makes [`arm`] possible, before the program's first thread begins: the C library then calls
/// `at_end` at the end of every armed thread. A key among the first 32 costs no memory of the C
/// library's heap.
pub fn begin(at_end: extern "C" fn(*mut c_void)) {
    let mut key = 0;
    // SAFETY: the function is ours and stays.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(at_end)) } == 0 {
        KEY.store(key, Ordering::Release);
        // For what was noted before there was a key.
        arm();
    }
}

/// Has the end of this thread noticed.
pub fn arm() {
    let key = KEY.load(Ordering::Acquire);
    if key != NONE {
        // SAFETY: the key was made by `begin`; the value only has to be another than NULL.
        unsafe { libc::pthread_setspecific(key, std::ptr::dangling()) };
    }
}

extern "C" fn note(destructor: ThreadDestructor, object: *mut u8, _library: *mut c_void) -> c_int {
    let at = COUNT.get();
    // One that is not called leaks what the thread had: not more than that.
    if at < ROOM {
        COUNT.set(at + 1);
        NOTED.with(|noted| noted[at].set(Some((destructor, object))));
        arm();
    }
    0
}

/// Calls the destructors that were noted on this thread, and those that they note.
pub fn run_destructors() {
    NOTED.with(|noted| {
        while let Some(last) = COUNT.get().checked_sub(1) {
            COUNT.set(last);
            if let Some((destructor, object)) = noted[last].take() {
                destructor(object);
            }
        }
    });
}

/// The end of this thread has begun once more.
pub fn note_end() {
    ENDS.set(ENDS.get() + 1);
}

/// True once the C library has announced the end of this thread for the last time: nothing that the
/// thread gets from now on is given back.
pub fn has_ended() -> bool {
    ENDS.get() >= LAST_END
}
