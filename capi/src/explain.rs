//! The text of the last error: the object, the error, and the next step.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use defuse_direct::{CallError, Result};
use defuse_fs::Errno;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Stores a text for [`last`].
pub fn say(text: impl Into<Vec<u8>>) {
    let mut text = text.into();
    text.retain(|&byte| byte != 0);
    LAST.set(CString::new(text).unwrap_or_default());
}

/// The last text of this thread, valid until the next one.
pub fn last() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

/// If a call on `path` failed, stores a text about it.
pub fn record_failure<T>(call: &str, path: &[u8], result: Result<T>) -> Result<T> {
    if let Err(stop) = &result {
        let shown = String::from_utf8_lossy(path);
        say(format!("{call} {shown}: {}; {}", stop.errno(), next_step(stop)));
    }
    result
}

fn next_step(stop: &CallError) -> &'static str {
    match stop.errno() {
        Errno::EXDEV => {
            "no mount of this process is there: mount one with defuse_mount, or use the call without \
             the prefix"
        }
        Errno::ENOENT => "check the name, or create it (O_CREAT, defuse_mkdir)",
        Errno::ENOTDIR => "a component of the path is no directory: check it with defuse_lstat",
        Errno::EISDIR => "it is a directory: open it with O_RDONLY, or with defuse_opendir",
        Errno::EEXIST => "remove it first, or open it without O_EXCL",
        Errno::EACCES => "check owner and mode of the file and its directories with defuse_stat",
        Errno::EPERM => "this requires the owner or a privileged process",
        Errno::EROFS => "the mount is read-only: mount it without the option ro",
        Errno::EBUSY => {
            "it is in use: close its files and leave its directories, unmount what is on it, or \
             unmount lazily"
        }
        Errno::EINVAL => {
            "a target is an absolute path, or a name with a colon (mem:); flags must be of open(2)"
        }
        Errno::ENXIO => {
            "fifos, sockets and devices belong to the kernel: open them with O_PATH only"
        }
        Errno::ELOOP => {
            "there is a loop of symbolic links, or O_NOFOLLOW was given: check it with defuse_lstat"
        }
        Errno::EMFILE | Errno::ENFILE => "close descriptors that are no longer needed",
        Errno::ENAMETOOLONG => "a name has at most 255 bytes, a path 4095",
        Errno::ENOSPC => "free space, or mount it with more (memory:,size=)",
        Errno::EFAULT => "give a pointer that is not NULL",
        _ => "errno(3) lists the error numbers",
    }
}
