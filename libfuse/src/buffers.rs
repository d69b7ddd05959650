//! `fuse_buf_size`, `fuse_buf_copy`, and handles of poll(2).

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;

use defuse_fs::{Notify, PollHandle};
use rustix::io::Errno;

use crate::abi::{BUF_FD_RETRY, BUF_FD_SEEK, BUF_IS_FD, DataPart, DataParts};

/// Bytes that are copied between two files at once.
const STEP: usize = 1 << 17;

/// Returns the number of bytes of all parts.
///
/// # Safety
///
/// `parts` is a `struct fuse_bufvec` with its number of parts.
pub unsafe extern "C" fn fuse_buf_size(parts: *const DataParts) -> usize {
    // SAFETY: the caller's promise.
    let slice = unsafe {
        std::slice::from_raw_parts((&raw const (*parts).buf).cast::<DataPart>(), (*parts).count)
    };
    slice.iter().fold(0, |all: usize, part| all.saturating_add(part.size))
}

/// Copies from the present place of `src` to the present place of `dst`, until one of them ends.
/// Moves both places. Returns the number of bytes, or a negated error number if none was copied.
/// `flags` are wishes about splice(2) that change no result.
///
/// # Safety
///
/// Both are structures with their numbers of parts, in which each part that is no file has as many
/// bytes of memory as it says, which do not overlap.
pub unsafe extern "C" fn fuse_buf_copy(
    dst: *mut DataParts,
    src: *mut DataParts,
    _flags: c_int,
) -> isize {
    if std::ptr::eq(dst, src) {
        // SAFETY: the caller's promise.
        return unsafe { fuse_buf_size(dst) } as isize;
    }
    let mut copied = 0_isize;
    loop {
        // SAFETY: the caller's promise, for the parts at the present places.
        let (Some(to), Some(from)) = (unsafe { present(dst) }, unsafe { present(src) }) else {
            return copied;
        };
        let len = to.size.min(from.size);
        // SAFETY: `present` returns the rest of parts of the caller.
        match unsafe { copy_part(&to, &from, len) } {
            Ok(done) => {
                copied += done as isize;
                // SAFETY: both structures are the caller's, and no part was longer than its rest.
                let moved = unsafe { advance(dst, done) && advance(src, done) };
                if done < len || !moved {
                    return copied;
                }
            }
            Err(_) if copied > 0 => return copied,
            Err(errno) => return -(errno.raw_os_error() as isize),
        }
    }
}

/// The rest of the present part; `None` behind the last one.
///
/// # Safety
///
/// `parts` is a structure with its number of parts.
unsafe fn present(parts: *const DataParts) -> Option<DataPart> {
    // SAFETY: the caller's promise.
    let slice = unsafe {
        std::slice::from_raw_parts((&raw const (*parts).buf).cast::<DataPart>(), (*parts).count)
    };
    // SAFETY: the structure is the caller's.
    let (idx, off) = unsafe { ((*parts).idx, (*parts).off) };
    let mut part = *slice.get(idx)?;
    part.size = part.size.saturating_sub(off);
    if part.flags & BUF_IS_FD == 0 {
        part.mem = part.mem.cast::<u8>().wrapping_add(off).cast();
    } else {
        part.pos = part.pos.saturating_add(off as i64);
    }
    Some(part)
}

/// Moves the present place by `len` bytes of the present part. False behind the last part.
///
/// # Safety
///
/// `parts` is a structure with its number of parts, and the rest of the present one is not shorter
/// than `len`.
unsafe fn advance(parts: *mut DataParts, len: usize) -> bool {
    // SAFETY: the caller's promise, also for the part at `idx`, which `present` has returned.
    unsafe {
        let part = (&raw const (*parts).buf).cast::<DataPart>().add((*parts).idx);
        (*parts).off += len;
        if (*parts).off >= (*part).size {
            (*parts).idx += 1;
            (*parts).off = 0;
        }
        (*parts).idx < (*parts).count
    }
}

/// Copies `len` bytes. Returns fewer at the end of a file.
///
/// # Safety
///
/// Parts that are no files have `len` bytes of memory, which do not overlap.
unsafe fn copy_part(to: &DataPart, from: &DataPart, len: usize) -> Result<usize, Errno> {
    let (to_file, from_file) = (to.flags & BUF_IS_FD != 0, from.flags & BUF_IS_FD != 0);
    match (to_file, from_file) {
        (false, false) => {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy(from.mem.cast::<u8>(), to.mem.cast::<u8>(), len) };
            Ok(len)
        }
        (false, true) => {
            // SAFETY: the memory is the caller's, and has `len` bytes.
            let room = unsafe { std::slice::from_raw_parts_mut(to.mem.cast::<u8>(), len) };
            read_file(from, 0, room)
        }
        (true, false) => {
            // SAFETY: the memory is the caller's, and has `len` bytes.
            let bytes = unsafe { std::slice::from_raw_parts(from.mem.cast::<u8>(), len) };
            write_file(to, 0, bytes)
        }
        (true, true) => {
            let mut room = vec![0; len.min(STEP)];
            let mut done = 0;
            while done < len {
                let step = room.len().min(len - done);
                let got = read_file(from, done, &mut room[..step])?;
                let put = write_file(to, done, &room[..got])?;
                done += put;
                if put < step {
                    break;
                }
            }
            Ok(done)
        }
    }
}

/// Reads from a part that is a file, `ahead` bytes behind its beginning.
fn read_file(part: &DataPart, ahead: usize, room: &mut [u8]) -> Result<usize, Errno> {
    let mut done = 0;
    while done < room.len() {
        let rest = &mut room[done..];
        let fd = descriptor(part)?;
        let got = match place(part, ahead + done)? {
            Some(offset) => rustix::io::pread(fd, rest, offset)?,
            None => rustix::io::read(fd, rest)?,
        };
        done += got;
        if got == 0 || part.flags & BUF_FD_RETRY == 0 {
            break;
        }
    }
    Ok(done)
}

/// Writes to a part that is a file, `ahead` bytes behind its beginning.
fn write_file(part: &DataPart, ahead: usize, bytes: &[u8]) -> Result<usize, Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        let fd = descriptor(part)?;
        let put = match place(part, ahead + done)? {
            Some(offset) => rustix::io::pwrite(fd, rest, offset)?,
            None => rustix::io::write(fd, rest)?,
        };
        done += put;
        if put == 0 || part.flags & BUF_FD_RETRY == 0 {
            break;
        }
    }
    Ok(done)
}

fn place(part: &DataPart, ahead: usize) -> Result<Option<u64>, Errno> {
    if part.flags & BUF_FD_SEEK == 0 {
        return Ok(None);
    }
    let offset = part.pos.checked_add(ahead as i64).and_then(|offset| u64::try_from(offset).ok());
    offset.map(Some).ok_or(Errno::INVAL)
}

fn descriptor(part: &DataPart) -> Result<BorrowedFd<'_>, Errno> {
    if part.fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the program names a descriptor that it keeps open during the call of `fuse_buf_copy`.
    Ok(unsafe { BorrowedFd::borrow_raw(part.fd) })
}

/// A `struct fuse_pollhandle`: the way to wake the processes that poll a file.
struct PollWaker {
    handle: PollHandle,
    notify: Arc<dyn Notify>,
}

/// The pointer for the program, which it gives to [`fuse_pollhandle_destroy`]; null for none.
pub(crate) fn poll_pointer(wake: Option<(PollHandle, Arc<dyn Notify>)>) -> *mut c_void {
    wake.map_or(null_mut(), |(handle, notify)| {
        Box::into_raw(Box::new(PollWaker { handle, notify })).cast()
    })
}

/// Wakes the processes that poll the file. Fails with a negated error number.
///
/// # Safety
///
/// `wake` is a handle that `poll` got and that is not destroyed.
pub unsafe extern "C" fn fuse_notify_poll(wake: *mut c_void) -> c_int {
    // SAFETY: the caller's promise; the pointer is from `poll_pointer`.
    let waker = unsafe { &*wake.cast::<PollWaker>() };
    waker.notify.poll_wake(waker.handle).map_or_else(|errno| -errno.raw(), |()| 0)
}

/// Frees a handle of `poll`; null is none.
///
/// # Safety
///
/// `wake` is null, or a handle that `poll` got and that is not destroyed.
pub unsafe extern "C" fn fuse_pollhandle_destroy(wake: *mut c_void) {
    if !wake.is_null() {
        // SAFETY: the caller's promise; the pointer is from `poll_pointer`.
        drop(unsafe { Box::from_raw(wake.cast::<PollWaker>()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};
    use std::os::fd::AsRawFd;

    fn memory(bytes: &mut [u8]) -> DataParts {
        let part = DataPart {
            size: bytes.len(),
            flags: 0,
            mem: bytes.as_mut_ptr().cast(),
            fd: -1,
            pos: 0,
        };
        DataParts { count: 1, idx: 0, off: 0, buf: [part] }
    }

    #[test]
    fn bytes_go_from_a_file_to_memory_and_back_until_one_side_ends() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        file.rewind().unwrap();
        let (fd, flags) = (file.as_raw_fd(), BUF_IS_FD | BUF_FD_SEEK | BUF_FD_RETRY);
        let part = DataPart { size: 100, flags, mem: null_mut(), fd, pos: 3 };
        let mut from = DataParts { count: 1, idx: 0, off: 0, buf: [part] };
        let mut room = [0; 20];
        let mut to = memory(&mut room);
        // SAFETY: both structures have one part, whose memory lives here.
        let copied = unsafe { fuse_buf_copy(&mut to, &mut from, 0) };
        assert_eq!((copied, &room[..8]), (7, &b"3456789\0"[..]));

        let mut bytes = *b"abc";
        let mut from = memory(&mut bytes);
        let part = DataPart { size: 100, flags, mem: null_mut(), fd, pos: 9 };
        let mut to = DataParts { count: 1, idx: 0, off: 0, buf: [part] };
        // SAFETY: both structures have one part, whose memory lives here.
        assert_eq!(unsafe { fuse_buf_copy(&mut to, &mut from, 0) }, 3);
        assert_eq!(file.metadata().unwrap().len(), 12);
    }

    #[test]
    fn a_file_that_is_not_open_is_an_error_only_before_the_first_byte() {
        let part = DataPart { size: 4, flags: BUF_IS_FD, mem: null_mut(), fd: -1, pos: 0 };
        let mut from = DataParts { count: 1, idx: 0, off: 0, buf: [part] };
        let mut room = [0; 4];
        let mut to = memory(&mut room);
        // SAFETY: both structures have one part, whose memory lives here.
        assert_eq!(unsafe { fuse_buf_copy(&mut to, &mut from, 0) }, -(libc::EBADF as isize));
    }
}
