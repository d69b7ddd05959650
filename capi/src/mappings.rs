//! Memory mappings: the kernel's if a file system provides the descriptor of its data, otherwise
//! copies that are written back.
//!
//! A shared copy uses memory that can be mapped at several addresses. Another mapping of the same
//! part of the same file maps the same memory once more, by mremap(2) with a length of 0.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_direct::{FileDescription, Result};
use defuse_fs::{Errno, FileKind};
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, MsyncFlags, ProtFlags};

use crate::state::LibraryState;

/// A shared mapping that is a copy.
struct SharedCopy {
    len: usize,
    offset: u64,
    file: Arc<FileDescription>,
    /// Device and inode number of the file.
    id: (u64, u64),
    /// The mapping is written back.
    writes: bool,
}

/// All shared copies, by start address.
#[derive(Default)]
pub struct SharedCopies(Mutex<BTreeMap<usize, SharedCopy>>);

/// The arguments of mmap(2).
pub struct MmapArguments {
    /// The requested address; 0 for any.
    pub hint: usize,
    pub len: usize,
    pub protection: c_int,
    pub flags: c_int,
    pub offset: u64,
}

impl MmapArguments {
    /// Fails with `EINVAL` if the length is 0, if the offset is within a page, or for flags about
    /// memory that the program already has.
    fn check(&self) -> Result<()> {
        let kind = self.flags & libc::MAP_TYPE;
        let kinds = [libc::MAP_SHARED, libc::MAP_SHARED_VALIDATE, libc::MAP_PRIVATE];
        let not_here = libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;
        let page = rustix::param::page_size() as u64;
        let bad = self.len == 0
            || !self.offset.is_multiple_of(page)
            || !kinds.contains(&kind)
            || self.flags & not_here != 0;
        if bad { Err(Errno::EINVAL.into()) } else { Ok(()) }
    }

    fn is_shared(&self) -> bool {
        self.flags & libc::MAP_TYPE != libc::MAP_PRIVATE
    }

    fn writes(&self) -> bool {
        self.is_shared() && self.protection & libc::PROT_WRITE != 0
    }

    /// The flags without the type of mapping, which rustix handles separately.
    fn other_flags(&self) -> MapFlags {
        MapFlags::from_bits_retain((self.flags & !libc::MAP_TYPE) as u32)
    }
}

fn errno(errno: rustix::io::Errno) -> Errno {
    Errno::from_raw(errno.raw_os_error())
}

/// Checks whether `file` may be mapped like this. Fails with `EBADF`, `ENODEV` or `EACCES`.
fn check_allowed(file: &FileDescription, wanted: &MmapArguments) -> Result<()> {
    if file.is_path() {
        return Err(Errno::EBADF.into());
    }
    if file.kind() != FileKind::Regular {
        return Err(Errno::ENODEV.into());
    }
    match file.flags().0 as c_int & libc::O_ACCMODE {
        libc::O_WRONLY => Err(Errno::EACCES.into()),
        libc::O_RDONLY if wanted.writes() => Err(Errno::EACCES.into()),
        _ => Ok(()),
    }
}

impl SharedCopies {
    fn lock_copies(&self) -> MutexGuard<'_, BTreeMap<usize, SharedCopy>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// mmap(2).
    pub fn map(
        &self,
        state: &LibraryState,
        file: Arc<FileDescription>,
        wanted: &MmapArguments,
    ) -> Result<usize> {
        wanted.check()?;
        check_allowed(&file, wanted)?;
        let hint = wanted.hint as *mut c_void;
        let protection = ProtFlags::from_bits_retain(wanted.protection as u32);
        let kind = if wanted.is_shared() { MapFlags::SHARED } else { MapFlags::PRIVATE };
        if let Some(fd) = file.backing() {
            let flags = kind | wanted.other_flags();
            // SAFETY: a new mapping at a free address. That other users of the file may change its
            // bytes is, as with every mapping, the responsibility of C.
            let at =
                unsafe { rustix::mm::mmap(hint, wanted.len, protection, flags, fd, wanted.offset) };
            return Ok(at.map_err(errno)?.addr());
        }
        let stat = state.client.fstat(&state.task, &file)?;
        let id = (stat.dev, stat.attr.st_ino);
        let mut all = self.lock_copies();
        let same = all.iter().find_map(|(&at, copied)| {
            let from = usize::try_from(wanted.offset.checked_sub(copied.offset)?).ok()?;
            let fits = copied.id == id && from.checked_add(wanted.len)? <= copied.len;
            (fits && wanted.is_shared()).then_some(at + from)
        });
        let at = match same {
            // SAFETY: a length of 0 keeps the mapping at `from`, which is ours and shared, and maps
            // the same memory once more at a free address.
            Some(from) => unsafe {
                rustix::mm::mremap(from as *mut c_void, 0, wanted.len, MremapFlags::MAYMOVE)
            },
            None => {
                // Other mappings may contain modified data of this file, which must be visible
                // here.
                write_back(state, &all, (0, usize::MAX), Some(id))?;
                let all_of_it = ProtFlags::READ | ProtFlags::WRITE;
                let flags = kind | wanted.other_flags();
                // SAFETY: new memory at a free address.
                unsafe { rustix::mm::mmap_anonymous(hint, wanted.len, all_of_it, flags) }
            }
        };
        let at = at.map_err(errno)?;
        let prepare = || {
            if same.is_none() {
                // SAFETY: mapped just now with this length, and not yet known to others.
                let room = unsafe { std::slice::from_raw_parts_mut(at.cast(), wanted.len) };
                fill(state, &file, room, wanted.offset)?;
            }
            let protection = MprotectFlags::from_bits_retain(wanted.protection as u32);
            // SAFETY: as above.
            unsafe { rustix::mm::mprotect(at, wanted.len, protection) }.map_err(errno)?;
            Ok(())
        };
        if let Err(stop) = prepare() {
            // SAFETY: as above.
            let _ = unsafe { rustix::mm::munmap(at, wanted.len) };
            return Err(stop);
        }
        if wanted.is_shared() {
            let (len, offset, writes) = (wanted.len, wanted.offset, wanted.writes());
            if writes {
                register_exit();
            }
            all.insert(at.addr(), SharedCopy { len, offset, file, id, writes });
        }
        Ok(at.addr())
    }

    /// munmap(2). Writes the range back first; if that fails, it stays mapped.
    pub fn unmap(&self, state: &LibraryState, at: usize, len: usize) -> Result<()> {
        let end = at.checked_add(len).filter(|_| len > 0).ok_or(Errno::EINVAL)?;
        let mut all = self.lock_copies();
        write_back(state, &all, (at, end), None)?;
        // SAFETY: C states that it no longer uses this memory.
        unsafe { rustix::mm::munmap(at as *mut c_void, len) }.map_err(errno)?;
        forget(&mut all, at, end.next_multiple_of(rustix::param::page_size()));
        Ok(())
    }

    /// msync(2).
    pub fn sync(&self, state: &LibraryState, at: usize, len: usize, flags: c_int) -> Result<()> {
        let end = at.checked_add(len).ok_or(Errno::ENOMEM)?;
        let how = MsyncFlags::from_bits_retain(flags as u32);
        // The kernel first, which checks the arguments. SAFETY: changes no memory.
        unsafe { rustix::mm::msync(at as *mut c_void, len, how) }.map_err(errno)?;
        let all = self.lock_copies();
        write_back(state, &all, (at, end), None)?;
        if flags & libc::MS_SYNC != 0 {
            for copied in find_within(&all, (at, end)).filter(|(_, copied)| copied.writes) {
                state.client.fsync(&state.task, &copied.1.file, true)?;
            }
        }
        Ok(())
    }

    /// Writes back everything. A program that ends gets no error any more, but its user a message.
    pub fn finish(&self, state: &LibraryState) {
        if let Err(stop) = write_back(state, &self.lock_copies(), (0, usize::MAX), None) {
            eprintln!(
                "defuse: stores to a mapped file are lost at the end of the program: {}",
                stop.errno()
            );
        }
    }
}

/// The copies that overlap a range of addresses.
fn find_within(
    all: &BTreeMap<usize, SharedCopy>,
    (from, end): (usize, usize),
) -> impl Iterator<Item = (usize, &SharedCopy)> {
    let hit = move |&(&at, copied): &(&usize, &SharedCopy)| at < end && at + copied.len > from;
    all.iter().filter(hit).map(|(&at, copied)| (at, copied))
}

/// Registers the write-back at a regular exit of the program.
fn register_exit() {
    extern "C" fn write_all() {
        crate::state::finish();
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: a function of the right type, which stays loaded.
        let _ = unsafe { libc::atexit(write_all) };
    });
}

fn fill(state: &LibraryState, file: &FileDescription, room: &mut [u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while done < room.len() {
        let from = offset + done as u64;
        match state.client.pread(&state.task, file, &mut room[done..], from)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(())
}

/// Writes back the mappings in a range of addresses, of one file or of all. Data beyond the end of
/// a file is ignored.
fn write_back(
    state: &LibraryState,
    all: &BTreeMap<usize, SharedCopy>,
    (from, end): (usize, usize),
    id: Option<(u64, u64)>,
) -> Result<()> {
    for (at, copied) in find_within(all, (from, end)) {
        if !copied.writes || id.is_some_and(|id| id != copied.id) {
            continue;
        }
        let (first, last) = (at.max(from), (at + copied.len).min(end));
        let offset = copied.offset + (first - at) as u64;
        let size = state.client.fstat(&state.task, &copied.file)?.attr.size;
        let room = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
        // SAFETY: a mapping of ours, readable since it was made; C unmaps it through this library
        // only.
        let bytes =
            unsafe { std::slice::from_raw_parts(first as *const u8, (last - first).min(room)) };
        let mut done = 0;
        while done < bytes.len() {
            let to = offset + done as u64;
            match state.client.pwrite(&state.task, &copied.file, &bytes[done..], to)? {
                0 => return Err(Errno::EIO.into()),
                count => done += count,
            }
        }
    }
    Ok(())
}

/// Removes a range of addresses from the copies.
fn forget(all: &mut BTreeMap<usize, SharedCopy>, from: usize, end: usize) {
    let places: Vec<usize> = find_within(all, (from, end)).map(|(at, _)| at).collect();
    for at in places {
        let Some(copied) = all.remove(&at) else { continue };
        let last = at + copied.len;
        if last > end {
            let offset = copied.offset + (end - at) as u64;
            let file = Arc::clone(&copied.file);
            all.insert(end, SharedCopy { len: last - end, offset, file, ..copied });
        }
        if at < from {
            all.insert(at, SharedCopy { len: from - at, ..copied });
        }
    }
}
