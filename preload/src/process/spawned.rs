//! A child that would share the memory of its parent, which waits until the child has executed a
//! program or ended: vfork(2) and posix_spawn(3).
//!
//! The child has a copy of the memory (see [`crate::process::fork`]), but what it leaves on the
//! stack of its parent is for the parent: posix_spawn(3) finds there that the child has failed, and
//! so do callers of vfork(2). So a child that ends writes the frames above its beginning to a pipe,
//! and the parent takes over the bytes that the child has changed.

use std::cell::Cell;

use defuse_fs::Errno;

use crate::machine::descriptors::{close, keep_above};
use crate::machine::inside::InsideGuard;
use crate::machine::lock::FutexLock;
use crate::machine::sys;
use crate::process::state::RunProcess;

/// The limit of the bytes of the stack that the child sends: less than a pipe holds.
const LEN: usize = 16 << 10;
/// No descriptor.
const NONE: i32 = -1;

/// The pipe of a child.
#[derive(Clone, Copy)]
struct ChildPipe {
    from_child: i32,
    to_parent: i32,
    /// The parent waits by the pipe, not by `CLONE_VFORK`.
    waits: bool,
}

thread_local! {
    /// The pipe of the child that this thread makes now. The child has a copy.
    static PIPE: Cell<Option<ChildPipe>> = const { Cell::new(None) };
}

/// The frames of a parent.
struct ParentFrames {
    /// The end of the pipe for reading, by which they are found. It is open.
    from_child: i32,
    /// The end for writing; [`NONE`] once it is closed.
    to_parent: i32,
    from: u64,
    /// Their bytes before there was a child.
    before: Vec<u8>,
    /// The bytes that the child has sent.
    after: Vec<u8>,
}

/// The frames of all threads that wait.
static FRAMES: FutexLock<Vec<ParentFrames>> = FutexLock::new(Vec::new());

/// In a child: the frames of its parent.
static OF_PARENT: FutexLock<Option<ParentFrames>> = FutexLock::new(None);

/// Before the clone(2): opens the pipe for a child that shares the frames from the address `from`
/// on. If the thread `waits` by the pipe, it does so for the end of the pipe as well. False if
/// there is none.
pub fn begin(process: &RunProcess, from: u64, waits: bool) -> bool {
    let mut ends = [0i32; 2];
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let args = [ends.as_mut_ptr() as u64, flags as u64, 0, 0, 0, 0];
    if sys::check(sys::pass(libc::SYS_pipe2 as u64, &args)).is_err() {
        return false;
    }
    // The program's numbers stay its own.
    let kept = ends.map(|fd| keep_above(fd, process.floor, true).unwrap_or(NONE));
    ends.into_iter().for_each(close);
    let [from_child, to_parent] = kept;
    if kept.contains(&NONE) {
        kept.into_iter().filter(|fd| *fd != NONE).for_each(close);
        return false;
    }
    PIPE.set(Some(ChildPipe { from_child, to_parent, waits }));
    // The kernel knows where the stack ends.
    let mut before = vec![0; LEN];
    let len = write(to_parent, from, LEN).and_then(|_| read(from_child, &mut before)).unwrap_or(0);
    before.truncate(len);
    FRAMES.lock().push(ParentFrames { from_child, to_parent, from, before, after: Vec::new() });
    true
}

/// Undoes [`begin`]: there is no child.
pub fn end() {
    if let Some(ChildPipe { from_child, to_parent, .. }) = PIPE.take() {
        take(from_child);
        [from_child, to_parent].into_iter().for_each(close);
    }
}

/// In the child.
pub fn begin_in_child() {
    let own = PIPE.take().and_then(|pipe| take(pipe.from_child));
    if let Some(frames) = &own {
        close(frames.from_child);
    }
    let before = std::mem::replace(&mut *OF_PARENT.lock(), own);
    // A parent waits for the end of these pipes, so they must not stay open in a child of another
    // thread, or of a child.
    before.into_iter().for_each(|frames| close(frames.to_parent));
    for frames in FRAMES.lock().drain(..) {
        close(frames.from_child);
        if frames.to_parent != NONE {
            close(frames.to_parent);
        }
    }
}

/// In a child that ends without a program: sends the frames to its parent.
pub fn send_to_parent() {
    if let Some(frames) = OF_PARENT.lock().take() {
        let _ = write(frames.to_parent, frames.from, frames.before.len());
    }
}

/// In the parent, outside of our code: waits until the child has executed a program or ended,
/// unless it has already, and takes over the bytes that the child has sent.
pub fn wait() {
    let Some(ChildPipe { from_child, to_parent, waits }) = PIPE.take() else { return };
    {
        // No other thread forks in between.
        let _inside = InsideGuard::enter();
        close(to_parent);
        with(from_child, |frames| frames.to_parent = NONE);
    }
    loop {
        if waits {
            // Neither signals nor forks of other threads wait meanwhile.
            let mut poll = libc::pollfd { fd: from_child, events: libc::POLLIN, revents: 0 };
            let args = [&raw mut poll as u64, 1, u64::MAX, 0, 0, 0];
            sys::pass(libc::SYS_poll as u64, &args);
        }
        let _inside = InsideGuard::enter();
        if is_reported(from_child, waits) {
            break;
        }
    }
    let _inside = InsideGuard::enter();
    close(from_child);
    let Some(ParentFrames { from, before, after, .. }) = take(from_child) else { return };
    for ((before, after), at) in before.iter().zip(&after).zip(from..) {
        if before != after {
            let _ = sys::store(at, *after);
        }
    }
}

/// Notes the bytes that the child has sent; true if there are no more.
fn is_reported(from_child: i32, waits: bool) -> bool {
    let mut piece = vec![0; LEN];
    match read(from_child, &mut piece) {
        Ok(0) => true,
        Ok(len) => {
            let mut reported_len = LEN;
            with(from_child, |frames| {
                frames.after.extend_from_slice(&piece[..len]);
                reported_len = frames.after.len();
            });
            // A child that writes more is not waited for.
            reported_len > LEN
        }
        Err(Errno::EINTR) => false,
        Err(Errno::EAGAIN) => !waits,
        Err(_) => true,
    }
}

fn with(from_child: i32, change: impl FnOnce(&mut ParentFrames)) {
    FRAMES.lock().iter_mut().find(|frames| frames.from_child == from_child).map(change);
}

fn take(from_child: i32) -> Option<ParentFrames> {
    let mut all = FRAMES.lock();
    let at = all.iter().position(|frames| frames.from_child == from_child)?;
    Some(all.swap_remove(at))
}

fn write(fd: i32, from: u64, len: usize) -> Result<usize, Errno> {
    let args = [fd as u64, from, len as u64, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_write as u64, &args)).map(|len| len as usize)
}

fn read(fd: i32, room: &mut [u8]) -> Result<usize, Errno> {
    let args = [fd as u64, room.as_mut_ptr() as u64, room.len() as u64, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_read as u64, &args)).map(|len| len as usize)
}
