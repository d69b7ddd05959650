//! Passes the text that one program leaves to the next: through a pipe, which has all of the text
//! before the next program begins.
//!
//! A pipe rather than a file in memory, because a limit of the size of files (`RLIMIT_FSIZE`) would
//! kill a process that writes such a file, and because programs that filter system calls know
//! pipes. A text that does not fit into a pipe goes into such a file.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use defuse_fs::Errno;

use crate::machine::descriptors::{keep_above, take_owned};
use crate::machine::sys;

/// Writes `text`; what comes back stays open at exec, and lies among our own numbers from `floor`
/// on. `EMFILE`, `ENFILE`, `ENOMEM`.
pub fn write(text: &str, floor: i32) -> Result<OwnedFd, Errno> {
    let text = format!("{}\n{text}", text.len());
    let fd = write_to_pipe(text.as_bytes()).or_else(|_| write_to_memory(text.as_bytes()))?;
    keep_above(fd.as_raw_fd(), floor, false).map(take_owned)
}

fn write_to_pipe(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    let mut ends = [0i32; 2];
    // The pipe of a user with many pipes is short: the write does not wait for room.
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let args = [ends.as_mut_ptr() as u64, flags, 0, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_pipe2 as u64, &args))?;
    let (from, to) = (take_owned(ends[0]), take_owned(ends[1]));
    let args = [to.as_raw_fd() as u64, bytes.as_ptr() as u64, bytes.len() as u64, 0, 0, 0];
    let written = sys::check(sys::pass(libc::SYS_write as u64, &args))?;
    if written as usize == bytes.len() { Ok(from) } else { Err(Errno::EAGAIN) }
}

fn write_to_memory(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    let args = [c"defuse-state".as_ptr() as u64, u64::from(libc::MFD_CLOEXEC), 0, 0, 0, 0];
    let fd = sys::check(sys::pass(libc::SYS_memfd_create as u64, &args))?;
    let mut file = File::from(take_owned(fd as i32));
    file.write_all(bytes)?;
    Ok(file.into())
}

/// Reads what [`write`] left in `fd`, and closes it. `None` if that is something else.
pub fn read(fd: i32) -> Option<String> {
    let mut file = File::from(take_owned(fd));
    // A pipe has no beginning to go back to.
    let _ = file.rewind();
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let len = file.read(&mut piece).ok()?;
        bytes.extend_from_slice(&piece[..len]);
        if let Some(text) = complete_text(&bytes) {
            return Some(text);
        }
        if len == 0 {
            return None;
        }
    }
}

/// The text, once it has arrived completely. It does not depend on the other end of the pipe being
/// closed: a child that was forked meanwhile has that end, too.
fn complete_text(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|&byte| byte == b'\n')?;
    let len: usize = std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()?;
    let text = bytes.get(end + 1..)?.get(..len)?;
    String::from_utf8(text.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_by_the_next_one() {
        for len in [0, 1, 4095, 60_000, 300_000] {
            let text = "x".repeat(len);
            let letter = write(&text, 100).unwrap();
            assert!(letter.as_raw_fd() >= 100);
            assert_eq!(read(std::os::fd::IntoRawFd::into_raw_fd(letter)), Some(text));
        }
    }

    #[test]
    fn what_is_no_letter_is_not_read() {
        let args = [c"x".as_ptr() as u64, 0, 0, 0, 0, 0];
        let fd = sys::pass(libc::SYS_memfd_create as u64, &args) as i32;
        let args = [fd as u64, c"12\nshort".as_ptr() as u64, 8, 0, 0, 0];
        sys::pass(libc::SYS_write as u64, &args);
        assert_eq!(read(fd), None);
    }
}
