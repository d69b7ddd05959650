//! the working directory
//!
//! The calls of the library have their own working directory, which is that of the process until it
//! is changed. They do not change the kernel's.

use std::ffi::{c_char, c_int};

use defuse_direct::WorkDir;
use defuse_fs::Errno;

use super::mount::fill_text;
use crate::memory::{CStringArg, OutBuffer, allocate_copy};
use crate::state::{call, succeed};

/// Changes the working directory to a directory of a mount, chdir(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_chdir(path: CStringArg) -> c_int {
    succeed(|s| s.client.chdir(&s.task, path.get()?))
}

/// Changes the working directory to an open directory, fchdir(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fchdir(fd: c_int) -> c_int {
    succeed(|s| s.client.fchdir(&s.task, &*s.file(fd)?))
}

/// Returns the path of the working directory, getcwd(3): in `buf`, or if that is NULL, in memory
/// that the caller frees with free(3). Returns NULL with ERANGE if `size` is too small, and with
/// ENOENT if the directory was removed.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_getcwd(mut buf: OutBuffer<c_char>, size: usize) -> *mut c_char {
    call(|s| {
        let path = match &*s.task.cwd() {
            WorkDir::Outside(path) => path.clone(),
            WorkDir::Inside(_) => s.client.getcwd(&s.task)?,
        };
        if buf.start().is_null() {
            let fits = size == 0 || path.len() < size;
            return if fits { allocate_copy(&path) } else { Err(Errno::ERANGE.into()) };
        }
        if size == 0 {
            return Err(Errno::EINVAL.into());
        }
        // SAFETY: `size` is the length of `buf`.
        fill_text(unsafe { buf.as_mut_slice(size) }?, &path)?;
        Ok(buf.start())
    })
}
