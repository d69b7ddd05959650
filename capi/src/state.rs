//! The state of the library in its process: mounts, descriptors, credentials.

use std::sync::{Arc, OnceLock};

use defuse_direct::{
    CallError, ClientOptions, ClientTask, DescriptorFile, DescriptorTable, DirectClient, FdFlags,
    FileDescription, Result, WalkStart,
};
use defuse_fs::Errno;

use crate::aio::AioContexts;
use crate::mappings::SharedCopies;
use crate::memory;

/// The state, one per process.
pub struct LibraryState {
    pub client: DirectClient,
    pub descriptors: DescriptorTable,
    pub task: ClientTask,
    pub contexts: AioContexts,
    pub mappings: SharedCopies,
}

static STATE: OnceLock<Option<LibraryState>> = OnceLock::new();

/// The state, created at the first call. Fails with `EIO` if the credentials of the process cannot
/// be read.
fn state() -> Result<&'static LibraryState> {
    let make = || {
        Some(LibraryState {
            task: ClientTask::for_this_process().ok()?,
            client: DirectClient::new(ClientOptions::default()),
            descriptors: DescriptorTable::new(1 << 20),
            contexts: AioContexts::default(),
            mappings: SharedCopies::default(),
        })
    };
    STATE.get_or_init(make).as_ref().ok_or(CallError::Errno(Errno::EIO))
}

/// Called at the exit of the program.
pub fn finish() {
    if STATE.get().is_some() {
        let _ = run_guarded(|state| {
            state.mappings.finish(state);
            Ok(())
        });
    }
}

/// The return type of a function that can fail.
pub trait ReturnValue {
    /// The value on failure.
    const FAILED: Self;
}

impl ReturnValue for i32 {
    const FAILED: i32 = -1;
}

impl ReturnValue for i64 {
    const FAILED: i64 = -1;
}

impl ReturnValue for isize {
    const FAILED: isize = -1;
}

impl<T> ReturnValue for *mut T {
    const FAILED: *mut T = std::ptr::null_mut();
}

/// Runs a call, and turns a panic into `EIO`. Restores `errno`, which the file system may have
/// changed: callers of readdir(3) use it to distinguish the end from an error.
fn run_guarded<T>(run: impl FnOnce(&'static LibraryState) -> Result<T>) -> Result<T, Errno> {
    let before = memory::errno();
    let run = std::panic::AssertUnwindSafe(|| run(state()?));
    let result = std::panic::catch_unwind(run).unwrap_or(Err(CallError::Errno(Errno::EIO)));
    memory::set_errno(before);
    result.map_err(|stop| stop.errno())
}

/// Runs a call. On failure, sets `errno` and returns -1, or NULL.
pub fn call<T: ReturnValue>(run: impl FnOnce(&'static LibraryState) -> Result<T>) -> T {
    run_guarded(run).unwrap_or_else(|errno| {
        memory::set_errno(errno.raw());
        T::FAILED
    })
}

/// Runs a call that returns 0 on success.
pub fn succeed(run: impl FnOnce(&'static LibraryState) -> Result<()>) -> i32 {
    call(|state| run(state).map(|()| 0))
}

/// Runs a call that returns a number of bytes.
pub fn count(run: impl FnOnce(&'static LibraryState) -> Result<usize>) -> isize {
    call(|state| run(state).map(|count| count as isize))
}

/// Runs a call that returns the error number, and leaves `errno` unchanged.
pub fn number(run: impl FnOnce(&'static LibraryState) -> Result<()>) -> i32 {
    run_guarded(run).map_or_else(Errno::raw, |()| 0)
}

/// The start of a relative path.
pub enum PathStart {
    Cwd,
    Dir(DescriptorFile),
    /// `AT_EMPTY_PATH`.
    Itself(DescriptorFile),
}

impl PathStart {
    /// The start as the client takes it.
    pub fn walk_start(&self) -> WalkStart<'_> {
        match self {
            PathStart::Cwd => WalkStart::Cwd,
            PathStart::Dir(dir) => WalkStart::Dir(dir),
            PathStart::Itself(file) => WalkStart::Itself(file),
        }
    }
}

impl LibraryState {
    /// The open file of a descriptor.
    pub fn file(&self, fd: i32) -> Result<DescriptorFile> {
        Ok(self.descriptors.get(fd)?)
    }

    /// Assigns a new descriptor.
    pub fn give(&self, file: Arc<FileDescription>, cloexec: bool) -> Result<i32> {
        Ok(self.descriptors.insert(file, 0, FdFlags { cloexec })?)
    }

    /// The start of `path`: `dir`, which is a descriptor or `AT_FDCWD`, and is ignored for an
    /// absolute path. `flags` may contain `AT_EMPTY_PATH`.
    pub fn start(&self, dir: i32, path: &[u8], flags: i32) -> Result<PathStart> {
        if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 && dir != libc::AT_FDCWD {
            return Ok(PathStart::Itself(self.file(dir)?));
        }
        if dir == libc::AT_FDCWD || path.starts_with(b"/") || self.client.may_be_inside(path) {
            return Ok(PathStart::Cwd);
        }
        Ok(PathStart::Dir(self.file(dir)?))
    }
}

/// True if a final link is followed. Fails with `EINVAL` for flags that are not `allowed`.
pub fn follows(flags: i32, allowed: i32) -> Result<bool> {
    if flags & !allowed != 0 {
        return Err(Errno::EINVAL.into());
    }
    Ok(flags & libc::AT_SYMLINK_NOFOLLOW == 0)
}
