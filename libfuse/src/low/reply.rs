//! `fuse_reply_*`: one message for each reply. All return 0 or a negated error number; `-ENOENT` if
//! the caller no longer waits, so that what the reply would have given is to be taken back. A
//! request that was answered before gives `-EINVAL`.

use std::ffi::{c_char, c_double, c_int, c_uint, c_void};
use std::io::IoSlice;

use defuse_fuse::abi as wire;
use defuse_wire::reply::CreateOut;
use libc::{iovec, off_t, stat, statfs, statvfs};
use zerocopy::IntoBytes;

use super::abi::{EntryParam, RequestPtr};
use super::dispatch::file_lock;
use super::port::LowPort;
use super::requests::{LowRequest, take};
use crate::abi::{FileInfoTwo, info_bits};
use crate::calls::{OpenInfo, RawInfo};
use crate::handle::text_of;
use crate::logging::error;

/// Most parts of one message, writev(2).
const PARTS_MOST: usize = 1024;
/// Bytes of the header.
const HEADER: usize = size_of::<wire::OutHeader>();

/// Sends a successful reply.
pub(crate) fn answer(port: &LowPort, unique: u64, parts: &[&[u8]]) -> Result<(), c_int> {
    send(port, unique, 0, parts)
}

/// Sends an error, or success without a body for 0. A reply that does not arrive is no error: the
/// caller is gone.
pub(crate) fn refuse(port: &LowPort, unique: u64, errno: c_int) {
    let _ = send(port, unique, errno, &[]);
}

fn send(port: &LowPort, unique: u64, errno: c_int, parts: &[&[u8]]) -> Result<(), c_int> {
    let len = parts.iter().fold(HEADER, |all, part| all.saturating_add(part.len()));
    let len = u32::try_from(len).map_err(|_| libc::EINVAL)?;
    let header = wire::OutHeader { len, error: -errno, unique };
    // Most replies have one part.
    if parts.len() < 3 {
        let mut slices = [IoSlice::new(header.as_bytes()), IoSlice::new(&[]), IoSlice::new(&[])];
        for (slice, part) in slices[1..].iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        return port.send(&slices[..=parts.len()]);
    }
    if parts.len() < PARTS_MOST {
        let header = IoSlice::new(header.as_bytes());
        let body = parts.iter().map(|part| IoSlice::new(part));
        return port.send(&std::iter::once(header).chain(body).collect::<Vec<_>>());
    }
    let body = parts.concat();
    port.send(&[IoSlice::new(header.as_bytes()), IoSlice::new(&body)])
}

/// Takes the request back from the program, and sends what `make` sends.
pub(crate) fn finish(
    req: RequestPtr,
    make: impl FnOnce(&LowRequest) -> Result<(), c_int>,
) -> c_int {
    let Some(request) = take(req) else {
        error("fuse: a reply to a request that was answered before, or whose session has ended");
        return -libc::EINVAL;
    };
    if !request.has_reply {
        return 0;
    }
    make(&request).map_or_else(|errno| -errno, |()| 0)
}

/// Sends a structure.
fn finish_with(req: RequestPtr, body: &(impl IntoBytes + zerocopy::Immutable)) -> c_int {
    finish(req, |request| answer(&request.port, request.unique, &[body.as_bytes()]))
}

/// Sends an error number, or success without a body for 0.
pub extern "C" fn fuse_reply_err(req: RequestPtr, errno: c_int) -> c_int {
    let is_valid = (0..1000).contains(&errno);
    if !is_valid {
        error(&format!("fuse: bad error value: {errno}"));
    }
    let errno = if is_valid { errno } else { libc::ERANGE };
    finish(req, |request| send(&request.port, request.unique, errno, &[]))
}

/// Ends a request that has no reply.
pub extern "C" fn fuse_reply_none(req: RequestPtr) {
    drop(take(req));
}

/// Seconds and nanoseconds of a time for which something is valid.
pub(crate) fn validity(seconds: c_double) -> (u64, u32) {
    if seconds.is_nan() || seconds <= 0.0 {
        return (0, 0);
    }
    // The conversion saturates.
    let whole = seconds as u64;
    let nanos = ((seconds - whole as f64) * 1e9) as u32;
    (whole, nanos.min(999_999_999))
}

pub(crate) fn attr_of(found: &stat) -> wire::Attr {
    wire::Attr {
        ino: found.st_ino,
        size: found.st_size as u64,
        blocks: found.st_blocks as u64,
        atime: found.st_atime as u64,
        mtime: found.st_mtime as u64,
        ctime: found.st_ctime as u64,
        atimensec: found.st_atime_nsec as u32,
        mtimensec: found.st_mtime_nsec as u32,
        ctimensec: found.st_ctime_nsec as u32,
        mode: found.st_mode,
        nlink: found.st_nlink as u32,
        uid: found.st_uid,
        gid: found.st_gid,
        rdev: found.st_rdev as u32,
        blksize: found.st_blksize as u32,
        flags: 0,
    }
}

pub(crate) fn entry_of(entry: &EntryParam) -> wire::EntryOut {
    let (entry_valid, entry_valid_nsec) = validity(entry.entry_timeout);
    let (attr_valid, attr_valid_nsec) = validity(entry.attr_timeout);
    wire::EntryOut {
        nodeid: entry.ino,
        generation: entry.generation,
        entry_valid,
        attr_valid,
        entry_valid_nsec,
        attr_valid_nsec,
        attr: attr_of(&entry.attr),
    }
}

fn open_of(info: &OpenInfo) -> wire::OpenOut {
    let flag = |bits, flag| if info.bits & bits != 0 { flag } else { 0 };
    let open_flags = flag(info_bits::DIRECT_IO, wire::FOPEN_DIRECT_IO)
        | flag(info_bits::KEEP_CACHE, wire::FOPEN_KEEP_CACHE)
        | flag(info_bits::CACHE_READDIR, wire::FOPEN_CACHE_DIR)
        | flag(info_bits::NONSEEKABLE, wire::FOPEN_NONSEEKABLE)
        | flag(info_bits::NOFLUSH, wire::FOPEN_NOFLUSH)
        | flag(info_bits::PARALLEL_WRITES, wire::FOPEN_PARALLEL_DIRECT_WRITES);
    wire::OpenOut { fh: info.fh, open_flags, backing_id: 0 }
}

/// Sends an entry.
///
/// # Safety
///
/// `entry` is a `struct fuse_entry_param`.
pub unsafe extern "C" fn fuse_reply_entry(req: RequestPtr, entry: *const EntryParam) -> c_int {
    // SAFETY: the caller's promise.
    let out = unsafe { entry_of(&*entry) };
    finish_with(req, &out)
}

/// Sends an entry with its open file.
///
/// # Safety
///
/// `entry` is a `struct fuse_entry_param`, and `info` a `struct fuse_file_info` of the version of
/// the session.
pub unsafe extern "C" fn fuse_reply_create(
    req: RequestPtr,
    entry: *const EntryParam,
    info: *const c_void,
) -> c_int {
    finish(req, |request| {
        // SAFETY: the caller's promise.
        let (entry, info) =
            unsafe { (entry_of(&*entry), RawInfo::at(request.session.version, info).read()) };
        let out = CreateOut { entry, open: open_of(&info) };
        answer(&request.port, request.unique, &[out.as_bytes()])
    })
}

/// Sends attributes.
///
/// # Safety
///
/// `attr` is a `struct stat`.
pub unsafe extern "C" fn fuse_reply_attr(
    req: RequestPtr,
    attr: *const stat,
    timeout: c_double,
) -> c_int {
    let (attr_valid, attr_valid_nsec) = validity(timeout);
    // SAFETY: the caller's promise.
    let attr = unsafe { attr_of(&*attr) };
    finish_with(req, &wire::AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr })
}

/// Sends the target of a symbolic link.
///
/// # Safety
///
/// `link` is a string.
pub unsafe extern "C" fn fuse_reply_readlink(req: RequestPtr, link: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let link = unsafe { text_of(link) }.to_bytes();
    finish(req, |request| answer(&request.port, request.unique, &[link]))
}

/// Sends an open file.
///
/// # Safety
///
/// `info` is a `struct fuse_file_info` of the version of the session.
pub unsafe extern "C" fn fuse_reply_open(req: RequestPtr, info: *const c_void) -> c_int {
    finish(req, |request| {
        // SAFETY: the caller's promise.
        let info = unsafe { RawInfo::at(request.session.version, info).read() };
        answer(&request.port, request.unique, &[open_of(&info).as_bytes()])
    })
}

/// Sends an open file to a program of libfuse 2.4, whose structure ends before the handle.
///
/// # Safety
///
/// `info` is the structure of libfuse 2.4.
pub unsafe extern "C" fn fuse_reply_open_compat(req: RequestPtr, info: *const c_void) -> c_int {
    let info = info.cast::<FileInfoTwo>();
    // SAFETY: the caller's promise, for the fields up to the bits.
    let (flags, fh, bits) = unsafe { ((*info).flags, (*info).fh_old, (*info).bits << 1) };
    let out = open_of(&OpenInfo { flags, bits, fh, ..OpenInfo::default() });
    finish_with(req, &out)
}

/// Sends the number of written bytes.
pub extern "C" fn fuse_reply_write(req: RequestPtr, count: usize) -> c_int {
    finish(req, |request| {
        let long = wire::CopyFileRangeOut { bytes_copied: count as u64 };
        let short = wire::WriteOut { size: u32::try_from(count).unwrap_or(u32::MAX), padding: 0 };
        let body = if request.is_long_copy { long.as_bytes() } else { short.as_bytes() };
        answer(&request.port, request.unique, &[body])
    })
}

/// The bytes at a place of the program; none for a null pointer.
///
/// # Safety
///
/// `bytes` is null, or has `size` bytes.
unsafe fn bytes_at<'a>(bytes: *const c_char, size: usize) -> &'a [u8] {
    if bytes.is_null() || size == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), size) }
}

/// The parts of a list of the program.
///
/// # Safety
///
/// `list` has `count` structures, whose memory the program does not change meanwhile.
unsafe fn parts_at<'a>(list: *const iovec, count: usize) -> Vec<&'a [u8]> {
    if list.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe {
        let list = std::slice::from_raw_parts(list, count);
        list.iter().map(|part| bytes_at(part.iov_base.cast(), part.iov_len)).collect()
    }
}

/// Sends bytes.
///
/// # Safety
///
/// `bytes` is null, or has `size` bytes.
pub unsafe extern "C" fn fuse_reply_buf(
    req: RequestPtr,
    bytes: *const c_char,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let bytes = unsafe { bytes_at(bytes, size) };
    finish(req, |request| answer(&request.port, request.unique, &[bytes]))
}

/// Sends bytes of several places.
///
/// # Safety
///
/// `list` has `count` structures.
pub unsafe extern "C" fn fuse_reply_iov(
    req: RequestPtr,
    list: *const iovec,
    count: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let parts = unsafe { parts_at(list, usize::try_from(count).unwrap_or(0)) };
    finish(req, |request| answer(&request.port, request.unique, &parts))
}

/// Sends the sizes of the file system.
///
/// # Safety
///
/// `found` is a `struct statvfs`.
pub unsafe extern "C" fn fuse_reply_statfs(req: RequestPtr, found: *const statvfs) -> c_int {
    // SAFETY: the caller's promise.
    let found = unsafe { &*found };
    let st = wire::Kstatfs {
        blocks: found.f_blocks,
        bfree: found.f_bfree,
        bavail: found.f_bavail,
        files: found.f_files,
        ffree: found.f_ffree,
        bsize: found.f_bsize as u32,
        namelen: found.f_namemax as u32,
        frsize: found.f_frsize as u32,
        ..Default::default()
    };
    finish_with(req, &wire::StatfsOut { st })
}

/// Sends the sizes that a program of libfuse 2.4 has in another structure.
///
/// # Safety
///
/// `found` is a `struct statfs`.
pub unsafe extern "C" fn fuse_reply_statfs_compat(req: RequestPtr, found: *const statfs) -> c_int {
    // SAFETY: the caller's promise.
    let found = unsafe { &*found };
    let st = wire::Kstatfs {
        blocks: found.f_blocks,
        bfree: found.f_bfree,
        bavail: found.f_bavail,
        files: found.f_files,
        ffree: found.f_ffree,
        bsize: found.f_bsize as u32,
        namelen: found.f_namelen as u32,
        frsize: found.f_bsize as u32,
        ..Default::default()
    };
    finish_with(req, &wire::StatfsOut { st })
}

/// The sizes of a program without `statfs`, as libfuse has them.
pub(crate) fn reply_statfs_default(req: RequestPtr) {
    let st = wire::Kstatfs { namelen: 255, bsize: 512, ..Default::default() };
    finish_with(req, &wire::StatfsOut { st });
}

/// Sends the size of an attribute.
pub extern "C" fn fuse_reply_xattr(req: RequestPtr, count: usize) -> c_int {
    let size = u32::try_from(count).unwrap_or(u32::MAX);
    finish_with(req, &wire::GetxattrOut { size, padding: 0 })
}

/// Sends a lock.
///
/// # Safety
///
/// `lock` is a `struct flock`.
pub unsafe extern "C" fn fuse_reply_lock(req: RequestPtr, lock: *const libc::flock) -> c_int {
    // SAFETY: the caller's promise.
    let lk = unsafe { file_lock(&*lock) };
    finish_with(req, &wire::LkOut { lk })
}

/// Sends a block of the device.
pub extern "C" fn fuse_reply_bmap(req: RequestPtr, block: u64) -> c_int {
    finish_with(req, &wire::BmapOut { block })
}

/// Sends the events that are there.
pub extern "C" fn fuse_reply_poll(req: RequestPtr, revents: c_uint) -> c_int {
    finish_with(req, &wire::PollOut { revents, padding: 0 })
}

/// Sends a position.
pub extern "C" fn fuse_reply_lseek(req: RequestPtr, offset: off_t) -> c_int {
    finish_with(req, &wire::LseekOut { offset: offset as u64 })
}

/// Sends the result of ioctl(2) with its bytes.
///
/// # Safety
///
/// `bytes` is null, or has `size` bytes.
pub unsafe extern "C" fn fuse_reply_ioctl(
    req: RequestPtr,
    result: c_int,
    bytes: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let bytes = unsafe { bytes_at(bytes.cast(), size) };
    let out = wire::IoctlOut { result, ..Default::default() };
    finish(req, |request| answer(&request.port, request.unique, &[out.as_bytes(), bytes]))
}

/// Sends the result of ioctl(2) with bytes of several places.
///
/// # Safety
///
/// `list` has `count` structures.
pub unsafe extern "C" fn fuse_reply_ioctl_iov(
    req: RequestPtr,
    result: c_int,
    list: *const iovec,
    count: c_int,
) -> c_int {
    let out = wire::IoctlOut { result, ..Default::default() };
    // SAFETY: the caller's promise.
    let mut parts = unsafe { parts_at(list, usize::try_from(count).unwrap_or(0)) };
    parts.insert(0, out.as_bytes());
    finish(req, |request| answer(&request.port, request.unique, &parts))
}

/// Lets the kernel repeat an ioctl(2) with the bytes at these places of the caller, and room for
/// its results at those.
///
/// # Safety
///
/// `input` has `inputs` structures, and `output` has `outputs`.
pub unsafe extern "C" fn fuse_reply_ioctl_retry(
    req: RequestPtr,
    input: *const iovec,
    inputs: usize,
    output: *const iovec,
    outputs: usize,
) -> c_int {
    if inputs.saturating_add(outputs) > wire::FUSE_IOCTL_MAX_IOV {
        return fuse_reply_err(req, libc::ENOMEM);
    }
    let out = wire::IoctlOut {
        result: 0,
        flags: wire::FUSE_IOCTL_RETRY,
        in_iovs: inputs as u32,
        out_iovs: outputs as u32,
    };
    let mut places = Vec::new();
    for (list, count) in [(input, inputs), (output, outputs)].into_iter().filter(|(_, n)| *n > 0) {
        // SAFETY: the caller's promise.
        for place in unsafe { std::slice::from_raw_parts(list, count) } {
            let (base, len) = (place.iov_base.addr() as u64, place.iov_len as u64);
            places.push(wire::IoctlIovec { base, len });
        }
    }
    finish(req, |request| {
        answer(&request.port, request.unique, &[out.as_bytes(), places.as_bytes()])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_validity_are_neither_negative_nor_beyond_the_field() {
        assert_eq!(validity(1.5), (1, 500_000_000));
        assert_eq!((validity(-1.0), validity(f64::NAN)), ((0, 0), (0, 0)));
        assert_eq!(validity(1e300), (u64::MAX, 999_999_999));
        assert_eq!(validity(f64::INFINITY), (u64::MAX, 999_999_999));
    }

    #[test]
    fn a_reply_to_no_request_is_an_error() {
        let none = std::ptr::without_provenance_mut(16 << 40);
        assert_eq!(fuse_reply_err(none, 0), -libc::EINVAL);
        assert_eq!(fuse_reply_write(std::ptr::null_mut(), 1), -libc::EINVAL);
        fuse_reply_none(none);
    }
}
