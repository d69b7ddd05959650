//! `fuse_daemonize`.

use std::ffi::{c_char, c_int};

use crate::connection;
use crate::logging::error;

/// Continues in the background unless `foreground` is set: in a child in a session of its own, with
/// / as the working directory and /dev/null as its standard files. The parent exits once that is
/// done. Returns -1 on an error, which was printed.
///
/// A program that serves a connection stays in the foreground: its parent waits for its end.
///
/// Called before the first thread starts, because fork(2) copies one thread only.
pub extern "C" fn fuse_daemonize(foreground: c_int) -> c_int {
    // SAFETY: system calls on descriptors that are opened here; after fork(2) the child has the one
    // thread of its parent, as described above.
    unsafe {
        if foreground != 0 || connection::is_given() {
            return libc::chdir(c"/".as_ptr());
        }
        let mut waiting = [0; 2];
        if libc::pipe2(waiting.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return report_failure("pipe");
        }
        match libc::fork() {
            -1 => return report_failure("fork"),
            0 => {}
            _ => {
                let mut done = 0_u8;
                libc::close(waiting[1]);
                let got = libc::read(waiting[0], (&raw mut done).cast(), 1);
                // The child has ended early if the pipe ends without its byte.
                libc::_exit(c_int::from(got != 1));
            }
        }
        libc::close(waiting[0]);
        if libc::setsid() == -1 {
            return report_failure("setsid");
        }
        let _ = libc::chdir(c"/".as_ptr());
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null != -1 {
            for standard in 0..3 {
                libc::dup2(null, standard);
            }
            if null > 2 {
                libc::close(null);
            }
        }
        let done = 1_u8;
        libc::write(waiting[1], (&raw const done).cast(), 1);
        libc::close(waiting[1]);
    }
    0
}

fn report_failure(call: &str) -> c_int {
    error(&format!("fuse_daemonize: {call}: {}", std::io::Error::last_os_error()));
    -1
}

/// The version of libfuse whose interface this is.
pub extern "C" fn version_three() -> c_int {
    314
}

/// The version of libfuse whose interface this is.
pub extern "C" fn version_two() -> c_int {
    29
}

/// The version of libfuse whose interface this is, as text.
pub extern "C" fn fuse_pkgversion() -> *const c_char {
    c"3.14.0".as_ptr()
}
