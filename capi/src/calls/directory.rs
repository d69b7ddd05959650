//! read directories
//!
//! Several threads may use a stream, one at a time. The result of defuse_readdir() is valid until
//! the next call on the same stream.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_long};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_direct::{DirEntry, Result};
use defuse_fs::{DirItem, DirSink, Entry, Errno};

use crate::memory::{CStringArg, ObjectHandle, zeroed};
use crate::state::{LibraryState, call, succeed};

/// A directory stream, like DIR of opendir(3).
#[allow(non_camel_case_types)]
pub struct defuse_dir {
    fd: c_int,
    reading: Mutex<StreamState>,
}

/// Number of entries that are read at a time.
const AT_ONCE: usize = 256;

struct StreamState {
    ahead: VecDeque<DirEntry>,
    /// The position after the last entry returned.
    position: u64,
    shown: Box<libc::dirent>,
}

impl defuse_dir {
    fn lock_state(&self) -> MutexGuard<'_, StreamState> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a directory stream, opendir(3). Returns NULL on failure.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_opendir(path: CStringArg) -> *mut defuse_dir {
    call(|s| {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let fd = super::open::open(s, libc::AT_FDCWD, path.get()?, flags, 0)?;
        stream(s, fd)
    })
}

/// Makes a stream of a descriptor, which then belongs to the stream, fdopendir(3). Returns NULL
/// with ENOTDIR if it is no directory.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fdopendir(fd: c_int) -> *mut defuse_dir {
    call(|s| stream(s, fd))
}

fn stream(s: &LibraryState, fd: c_int) -> Result<*mut defuse_dir> {
    let dir = s.file(fd)?;
    let position = dir.position();
    // Fails if it is no directory.
    s.client.seek_dir(&dir, position)?;
    if dir.is_path() {
        return Err(Errno::EBADF.into());
    }
    let shown = Box::new(zeroed());
    let reading = Mutex::new(StreamState { ahead: VecDeque::new(), position, shown });
    Ok(ObjectHandle::give(defuse_dir { fd, reading }))
}

/// Returns the next entry, including "." and "..", readdir(3). Returns NULL at the end, with
/// `errno` unchanged, and on failure.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_readdir(dir: ObjectHandle<defuse_dir>) -> *mut libc::dirent {
    call(|s| {
        let dir = dir.get()?;
        let mut reading = dir.lock_state();
        if reading.ahead.is_empty() {
            let mut sink = ReadAheadSink { entries: &mut reading.ahead };
            s.client.getdents(&s.task, &*s.file(dir.fd)?, &mut sink)?;
        }
        let Some(entry) = reading.ahead.pop_front() else { return Ok(std::ptr::null_mut()) };
        reading.position = entry.next;
        show(&mut reading.shown, &entry);
        Ok(&raw mut *reading.shown)
    })
}

fn show(shown: &mut libc::dirent, entry: &DirEntry) {
    shown.d_ino = entry.ino;
    shown.d_off = entry.next as i64;
    shown.d_type = (entry.kind.mode_bits() >> 12) as u8;
    shown.d_reclen = size_of::<libc::dirent>() as u16;
    let len = entry.name.len().min(shown.d_name.len() - 1);
    for (place, &byte) in shown.d_name.iter_mut().zip(&entry.name[..len]) {
        *place = byte as c_char;
    }
    shown.d_name[len] = 0;
}

struct ReadAheadSink<'a> {
    entries: &'a mut VecDeque<DirEntry>,
}

impl DirSink for ReadAheadSink<'_> {
    fn wants_entries(&self) -> bool {
        false
    }

    fn fits(&self, _: usize) -> bool {
        self.entries.len() < AT_ONCE
    }

    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        let DirItem { ino, next, kind, name } = item;
        self.entries.push_back(DirEntry { ino, next, kind, name: name.to_vec() });
    }
}

/// The position of the stream, telldir(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_telldir(dir: ObjectHandle<defuse_dir>) -> c_long {
    call(|_| Ok(dir.get()?.lock_state().position as c_long))
}

/// Sets the position to a result of defuse_telldir(), seekdir(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_seekdir(dir: ObjectHandle<defuse_dir>, place: c_long) {
    succeed(|s| seek(s, dir.get()?, place as u64));
}

/// Sets the position to the start and re-reads the directory, rewinddir(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_rewinddir(dir: ObjectHandle<defuse_dir>) {
    succeed(|s| seek(s, dir.get()?, 0));
}

fn seek(s: &LibraryState, dir: &defuse_dir, place: u64) -> Result<()> {
    let mut reading = dir.lock_state();
    s.client.seek_dir(&*s.file(dir.fd)?, place)?;
    reading.ahead.clear();
    reading.position = place;
    Ok(())
}

/// The descriptor of a stream, dirfd(3). It can be used as a directory argument, and must not be
/// closed.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_dirfd(dir: ObjectHandle<defuse_dir>) -> c_int {
    call(|_| Ok(dir.get()?.fd))
}

/// Closes a stream and its descriptor, closedir(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_closedir(dir: ObjectHandle<defuse_dir>) -> c_int {
    succeed(|s| super::open::close(s, dir.take()?.fd))
}
