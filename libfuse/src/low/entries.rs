//! Entries of listings.

use std::ffi::c_char;

use defuse_fuse::abi as wire;
use libc::{off_t, stat};
use zerocopy::IntoBytes;

use super::abi::{EntryParam, RequestPtr};
use super::reply::entry_of;
use crate::handle::text_of;

/// Bytes of an entry with a name of so many bytes.
fn room_for(lead: usize, name: usize) -> usize {
    wire::rec_align(lead + name)
}

/// Writes an entry, if there is room for it. Returns its bytes.
///
/// # Safety
///
/// `room` is null, or has `size` bytes.
unsafe fn put(room: *mut c_char, size: usize, lead: &[u8], name: &[u8]) -> usize {
    let len = room_for(lead.len(), name.len());
    if room.is_null() || len > size {
        return len;
    }
    // SAFETY: the caller has room for `size` bytes, which are not fewer.
    let out = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), len) };
    let (head, rest) = out.split_at_mut(lead.len());
    head.copy_from_slice(lead);
    let (text, padding) = rest.split_at_mut(name.len());
    text.copy_from_slice(name);
    padding.fill(0);
    len
}

fn dirent(found: &stat, name: &[u8], off: off_t) -> wire::Dirent {
    let type_ = (found.st_mode & libc::S_IFMT) >> 12;
    wire::Dirent { ino: found.st_ino, off: off as u64, namelen: name.len() as u32, type_ }
}

/// Adds an entry to a listing, if there is room for it. Returns the bytes that it needs.
///
/// # Safety
///
/// `room` is null, or has `size` bytes; `name` is a string, and `found` a `struct stat`, unless
/// `room` is null.
pub unsafe extern "C" fn fuse_add_direntry(
    _req: RequestPtr,
    room: *mut c_char,
    size: usize,
    name: *const c_char,
    found: *const stat,
    off: off_t,
) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let name = text_of(name).to_bytes();
        if room.is_null() {
            return room_for(size_of::<wire::Dirent>(), name.len());
        }
        put(room, size, dirent(&*found, name, off).as_bytes(), name)
    }
}

/// Adds an entry with its attributes to a listing, if there is room for it. Returns the bytes that
/// it needs.
///
/// # Safety
///
/// `room` is null, or has `size` bytes; `name` is a string, and `entry` a
/// `struct fuse_entry_param`, unless `room` is null.
pub unsafe extern "C" fn fuse_add_direntry_plus(
    _req: RequestPtr,
    room: *mut c_char,
    size: usize,
    name: *const c_char,
    entry: *const EntryParam,
    off: off_t,
) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let name = text_of(name).to_bytes();
        if room.is_null() {
            return room_for(size_of::<wire::Direntplus>(), name.len());
        }
        let (entry_out, dirent) = (entry_of(&*entry), dirent(&(*entry).attr, name, off));
        put(room, size, wire::Direntplus { entry_out, dirent }.as_bytes(), name)
    }
}

/// Bytes of an entry with a name of so many bytes, for programs of libfuse 2.4.
pub extern "C" fn fuse_dirent_size(name: usize) -> usize {
    room_for(size_of::<wire::Dirent>(), name)
}

/// Adds an entry to a listing, and returns the place behind it, for programs of libfuse 2.4.
///
/// # Safety
///
/// `room` has the bytes of [`fuse_dirent_size`]; `name` is a string, and `found` a `struct stat`.
pub unsafe extern "C" fn fuse_add_dirent(
    room: *mut c_char,
    name: *const c_char,
    found: *const stat,
    off: off_t,
) -> *mut c_char {
    // SAFETY: the caller's promise.
    unsafe {
        let name = text_of(name).to_bytes();
        room.add(put(room, usize::MAX, dirent(&*found, name, off).as_bytes(), name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;
    use std::ptr::{null, null_mut};

    #[test]
    fn entries_are_added_while_there_is_room() {
        // SAFETY: all bytes of the structure may be zero.
        let mut found: stat = unsafe { MaybeUninit::zeroed().assume_init() };
        (found.st_ino, found.st_mode) = (7, libc::S_IFDIR | 0o755);
        let mut room = [0x55_u8; 64];
        let place = room.as_mut_ptr().cast();
        let none = null_mut();
        // SAFETY: the room has as many bytes as is said, and the others are a string and a
        // structure.
        unsafe {
            assert_eq!(fuse_add_direntry(none, null_mut(), 0, c"abc".as_ptr(), null(), 0), 32);
            assert_eq!(fuse_add_direntry(none, place, 31, c"abc".as_ptr(), &found, 9), 32);
            assert_eq!(room[0], 0x55);
            assert_eq!(fuse_add_direntry(none, place, 32, c"abc".as_ptr(), &found, 9), 32);
        }
        assert_eq!((room[0], room[8], room[16], room[20]), (7, 9, 3, 4));
        assert_eq!((&room[24..32], room[32]), (&b"abc\0\0\0\0\0"[..], 0x55));
        assert_eq!((fuse_dirent_size(8), fuse_dirent_size(9)), (32, 40));
    }
}
