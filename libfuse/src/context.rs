//! The context of an operation, which a program asks for while one of its operations runs.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use defuse_fs::Context;
use libc::gid_t;

use crate::abi::FuseContext;

thread_local! {
    /// The structure that [`fuse_get_context`] returns to this thread.
    static CONTEXT: UnsafeCell<FuseContext> = const {
        UnsafeCell::new(FuseContext {
            fuse: null_mut(),
            uid: 0,
            gid: 0,
            pid: 0,
            private_data: null_mut(),
            umask: 0,
        })
    };
    /// The context of the operation that runs on this thread, or null.
    static CALL: Cell<*const c_void> = const { Cell::new(std::ptr::null()) };
}

/// The `struct fuse` of an operation, and the data of its program.
#[derive(Clone, Copy)]
pub struct ProgramPointers {
    /// The `struct fuse`.
    pub fuse: *mut c_void,
    /// The pointer that the program's `init` returned, or the data that it passed.
    pub private_data: *mut c_void,
}

// SAFETY: the pointers are only passed on to the program, whose functions libfuse calls from any
// thread.
unsafe impl Send for ProgramPointers {}
// SAFETY: as above; nothing here is read through them.
unsafe impl Sync for ProgramPointers {}

/// The time in which an operation runs on this thread. Dropping it ends the context.
pub struct CallScope {
    earlier: *const c_void,
}

impl CallScope {
    /// Begins an operation with `cx`, which must live longer than the scope.
    pub fn new(program: ProgramPointers, cx: &Context<'_>, umask: u32) -> CallScope {
        let (uid, gid, pid) = (cx.caller.uid, cx.caller.gid, cx.caller.pid as i32);
        set(FuseContext {
            fuse: program.fuse,
            uid,
            gid,
            pid,
            private_data: program.private_data,
            umask,
        });
        CallScope { earlier: CALL.replace((cx as *const Context<'_>).cast()) }
    }
}

impl Drop for CallScope {
    fn drop(&mut self) {
        CALL.set(self.earlier);
    }
}

/// Sets the context of `init` and `destroy`, which have no caller.
pub fn set_program(program: ProgramPointers) {
    let (fuse, private_data) = (program.fuse, program.private_data);
    set(FuseContext { fuse, uid: 0, gid: 0, pid: 0, private_data, umask: 0 });
}

fn set(context: FuseContext) {
    // SAFETY: no reference into the cell exists; a program that keeps the pointer reads it between
    // its own calls, on this thread.
    CONTEXT.with(|cell| unsafe { *cell.get() = context });
}

/// Returns the context of the operation on this thread. It is valid until the operation returns,
/// and zero outside of operations.
pub extern "C" fn fuse_get_context() -> *mut FuseContext {
    CONTEXT.with(UnsafeCell::get)
}

/// Runs `look` on the context of the operation on this thread.
fn with_call<T>(look: impl FnOnce(&Context<'_>) -> T) -> Option<T> {
    let call = CALL.get();
    // SAFETY: `CallScope` sets the pointer to a context that lives until the scope is dropped,
    // which resets it, on this thread.
    (!call.is_null()).then(|| look(unsafe { &*call.cast::<Context<'_>>() }))
}

/// Returns 1 if the caller of the operation on this thread no longer waits.
pub extern "C" fn fuse_interrupted() -> c_int {
    with_call(|cx| cx.is_interrupted()).map_or(0, c_int::from)
}

/// Writes at most `size` supplementary groups of the caller to `list`, and returns their number.
/// Fails with a negated error number; outside of operations with `-ENOSYS`.
///
/// # Safety
///
/// `list` has room for `size` groups.
pub unsafe extern "C" fn fuse_getgroups(size: c_int, list: *mut gid_t) -> c_int {
    let groups = match with_call(|cx| cx.supplementary_groups()) {
        None => return -libc::ENOSYS,
        Some(Err(errno)) => return -errno.raw(),
        Some(Ok(groups)) => groups,
    };
    let room = usize::try_from(size).unwrap_or(0);
    if !list.is_null() {
        for (place, &group) in groups.iter().take(room).enumerate() {
            // SAFETY: the caller has room for `size` groups.
            unsafe { list.add(place).write(group) };
        }
    }
    groups.len() as c_int
}
