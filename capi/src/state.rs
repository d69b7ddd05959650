//! What the library keeps for its process: mounts, descriptors, who asks.

use std::sync::{Arc, OnceLock};

use defuse_direct::{
    At, Client, Description, Descriptors, FdFlags, Opened, Options, Result, Stop, Task,
};
use defuse_fs::Errno;

use crate::aio::Contexts;
use crate::mappings::Mappings;
use crate::memory;

/// One for the process.
pub struct State {
    pub client: Client,
    pub descriptors: Descriptors,
    pub task: Task,
    pub contexts: Contexts,
    pub mappings: Mappings,
}

static STATE: OnceLock<Option<State>> = OnceLock::new();

/// The state, made at the first call; `EIO` where the process cannot tell who it is.
fn state() -> Result<&'static State> {
    let make = || {
        Some(State {
            task: Task::of_this_process().ok()?,
            client: Client::new(Options::default()),
            descriptors: Descriptors::new(1 << 20),
            contexts: Contexts::default(),
            mappings: Mappings::default(),
        })
    };
    STATE.get_or_init(make).as_ref().ok_or(Stop::Errno(Errno::EIO))
}

/// What is to be done at the end of the program.
pub fn finish() {
    if STATE.get().is_some() {
        let _ = guarded(|state| {
            state.mappings.finish(state);
            Ok(())
        });
    }
}

/// What a function returns that can fail.
pub trait Returned {
    /// Where it has failed.
    const FAILED: Self;
}

impl Returned for i32 {
    const FAILED: i32 = -1;
}

impl Returned for i64 {
    const FAILED: i64 = -1;
}

impl Returned for isize {
    const FAILED: isize = -1;
}

impl<T> Returned for *mut T {
    const FAILED: *mut T = std::ptr::null_mut();
}

/// Runs a call; where it panics, that is `EIO`. Leaves `errno` as it was, whatever the file system did
/// to it: readdir(3) tells the end from an error by that.
fn guarded<T>(run: impl FnOnce(&'static State) -> Result<T>) -> Result<T, Errno> {
    let before = memory::errno();
    let run = std::panic::AssertUnwindSafe(|| run(state()?));
    let result = std::panic::catch_unwind(run).unwrap_or(Err(Stop::Errno(Errno::EIO)));
    memory::set_errno(before);
    result.map_err(|stop| stop.errno())
}

/// Runs a call; what fails sets `errno` and gives -1, or NULL.
pub fn call<T: Returned>(run: impl FnOnce(&'static State) -> Result<T>) -> T {
    guarded(run).unwrap_or_else(|errno| {
        memory::set_errno(errno.raw());
        T::FAILED
    })
}

/// Runs a call that gives 0.
pub fn done(run: impl FnOnce(&'static State) -> Result<()>) -> i32 {
    call(|state| run(state).map(|()| 0))
}

/// Runs a call that gives a number of bytes.
pub fn count(run: impl FnOnce(&'static State) -> Result<usize>) -> isize {
    call(|state| run(state).map(|count| count as isize))
}

/// Runs a call that returns the number of its error, and leaves `errno` alone.
pub fn number(run: impl FnOnce(&'static State) -> Result<()>) -> i32 {
    guarded(run).map_or_else(Errno::raw, |()| 0)
}

/// Where a path begins that is not absolute.
pub enum Start {
    Cwd,
    Dir(Opened),
    /// `AT_EMPTY_PATH`.
    Itself(Opened),
}

impl Start {
    /// As the client has it.
    pub fn at(&self) -> At<'_> {
        match self {
            Start::Cwd => At::Cwd,
            Start::Dir(dir) => At::Dir(dir),
            Start::Itself(file) => At::Itself(file),
        }
    }
}

impl State {
    /// The open file of a descriptor.
    pub fn file(&self, fd: i32) -> Result<Opened> {
        Ok(self.descriptors.get(fd)?)
    }

    /// A new descriptor.
    pub fn give(&self, file: Arc<Description>, cloexec: bool) -> Result<i32> {
        Ok(self.descriptors.insert(file, 0, FdFlags { cloexec })?)
    }

    /// Where `path` begins: at `dir`, a descriptor or `AT_FDCWD`, which does not matter for a path
    /// that is absolute. `flags` may have `AT_EMPTY_PATH`.
    pub fn start(&self, dir: i32, path: &[u8], flags: i32) -> Result<Start> {
        if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 && dir != libc::AT_FDCWD {
            return Ok(Start::Itself(self.file(dir)?));
        }
        if dir == libc::AT_FDCWD || path.starts_with(b"/") || self.client.may_be_inside(path) {
            return Ok(Start::Cwd);
        }
        Ok(Start::Dir(self.file(dir)?))
    }
}

/// Whether a link at the end is followed. `EINVAL` for flags that are not `allowed`.
pub fn follows(flags: i32, allowed: i32) -> Result<bool> {
    if flags & !allowed != 0 {
        return Err(Errno::EINVAL.into());
    }
    Ok(flags & libc::AT_SYMLINK_NOFOLLOW == 0)
}
