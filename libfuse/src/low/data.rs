//! `fuse_reply_data`: bytes of memory and of files.

use std::cell::Cell;
use std::ffi::c_int;

use super::abi::RequestPtr;
use super::reply::{answer, finish, fuse_reply_err};
use crate::abi::{BUF_IS_FD, DataPart, DataParts};
use crate::buffers::{fuse_buf_copy, fuse_buf_size};

/// Bytes of the largest data that is put together: more than any reply has.
const MOST: usize = 1 << 28;

thread_local! {
    /// Memory for data of files, which a thread uses again.
    static ROOM: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Runs `use_data` with the bytes from the present place of `parts` on. Fails with an error number.
///
/// # Safety
///
/// `parts` is a `struct fuse_bufvec` with its number of parts, in which each part that is no file
/// has as many bytes as it says.
pub(crate) unsafe fn with_data<T>(
    parts: *mut DataParts,
    use_data: impl FnOnce(&[u8]) -> T,
) -> Result<T, c_int> {
    // SAFETY: the caller's promise.
    unsafe {
        if (*parts).count == 1 && (*parts).idx == 0 && (*parts).buf[0].flags & BUF_IS_FD == 0 {
            let DataPart { size, mem, .. } = (*parts).buf[0];
            let off = (*parts).off.min(size);
            if size == off || mem.is_null() {
                return Ok(use_data(&[]));
            }
            let place = mem.cast::<u8>().add(off);
            return Ok(use_data(std::slice::from_raw_parts(place, size - off)));
        }
        let len = fuse_buf_size(parts);
        if len > MOST {
            return Err(libc::EINVAL);
        }
        let mut room = ROOM.take();
        if room.len() < len {
            room.resize(len, 0);
        }
        let part = DataPart { size: len, flags: 0, mem: room.as_mut_ptr().cast(), fd: -1, pos: 0 };
        let mut to = DataParts { count: 1, idx: 0, off: 0, buf: [part] };
        let copied = fuse_buf_copy(&mut to, parts, 0);
        let result = usize::try_from(copied)
            .map(|copied| use_data(&room[..copied]))
            .map_err(|_| copied.unsigned_abs() as c_int);
        ROOM.set(room);
        result
    }
}

/// Sends the data. `flags` are hints about splice(2) that change no result.
///
/// # Safety
///
/// `parts` is a `struct fuse_bufvec` with its number of parts, in which each part that is no file
/// has as many bytes as it says.
pub unsafe extern "C" fn fuse_reply_data(
    req: RequestPtr,
    parts: *mut DataParts,
    _flags: c_int,
) -> c_int {
    let send = |data: &[u8]| finish(req, |request| answer(&request.port, request.unique, &[data]));
    // SAFETY: the caller's promise.
    match unsafe { with_data(parts, send) } {
        Ok(code) => code,
        Err(errno) => fuse_reply_err(req, errno),
    }
}
