//! posix_spawn(3) and posix_spawnp(3): whether there is anything to execute.
//!
//! Their child has a copy of its parent's memory and not the memory itself (see [`crate::process::fork`]), so
//! that an execve(2) that fails there tells the parent nothing. What makes it fail most often can be
//! seen before: the program is not there, or nobody may execute it.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;

use defuse_fs::Errno;

use crate::machine::sys;
use crate::serve;

/// The error that execve(2) of `path` would return, as far as the path tells. If file actions may change
/// the directory first, only absolute paths are checked.
pub fn refusal(path: &[u8], has_actions: bool) -> Option<Errno> {
    if has_actions && !path.starts_with(b"/") {
        return None;
    }
    is_executable(path).err()
}

/// [`refusal`] of a program that is searched for as by execvp(3): in every directory of `dirs`, the
/// value of PATH, unless the name has a slash.
pub fn search_refusal(name: &[u8], dirs: &OsStr, has_actions: bool) -> Option<Errno> {
    if name.is_empty() {
        return Some(Errno::ENOENT);
    }
    if name.contains(&b'/') {
        return refusal(name, has_actions);
    }
    let mut refused = Errno::ENOENT;
    for dir in dirs.as_bytes().split(|byte| *byte == b':') {
        if has_actions && !dir.starts_with(b"/") {
            return None;
        }
        let path = if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() };
        match is_executable(&path) {
            Ok(()) => return None,
            Err(Errno::EACCES) => refused = Errno::EACCES,
            Err(_) => {}
        }
    }
    Some(refused)
}

fn is_executable(path: &[u8]) -> Result<(), Errno> {
    let path = CString::new(path).map_err(|_| Errno::ENOENT)?;
    let at = libc::AT_FDCWD as u64;
    let flags = libc::AT_EACCESS as u64;
    let args = [at, path.as_ptr() as u64, libc::X_OK as u64, flags, 0, 0];
    let number = libc::SYS_faccessat2 as u64;
    let value = serve::call(number, &args).unwrap_or_else(|| sys::pass(number, &args));
    match sys::check(value) {
        Ok(_) => Ok(()),
        // A kernel before 5.8 cannot tell, so the child will.
        Err(Errno::ENOSYS) => Ok(()),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_or_not_to_be_executed_is_refused() {
        assert_eq!(refusal(b"/bin/sh", true), None);
        assert_eq!(refusal(b"/nonexistent/sh", true), Some(Errno::ENOENT));
        assert_eq!(refusal(b"/etc/passwd", false), Some(Errno::EACCES));
        // Where it will be looked for is not known.
        assert_eq!(refusal(b"nonexistent", true), None);
    }

    #[test]
    fn programs_are_searched_for_as_by_execvp() {
        let dirs = OsStr::new("/nonexistent:/bin");
        assert_eq!(search_refusal(b"sh", dirs, false), None);
        assert_eq!(search_refusal(b"no-such-program", dirs, true), Some(Errno::ENOENT));
        assert_eq!(search_refusal(b"passwd", OsStr::new("/etc"), false), Some(Errno::EACCES));
        assert_eq!(search_refusal(b"", dirs, false), Some(Errno::ENOENT));
    }
}
