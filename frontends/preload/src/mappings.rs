//! Mappings of files whose bytes no descriptor has: copies in memory, and the way back.
//!
//! A shared mapping is memory that a forked child shares. Another mapping of the same part of the same
//! file is the same memory once more, by mremap(2) of a length of 0.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::Errno;

use crate::serve::{Call, Fail, Served, is_regular};
use crate::sys;
use crate::table::Entry;

/// A shared mapping.
struct Mapping {
    len: usize,
    offset: u64,
    entry: Arc<Entry>,
    /// The file, by device and number.
    file: (u64, u64),
    /// It is written back.
    writes: bool,
}

impl Mapping {
    /// Where `len` bytes from `offset` of `file` are in this mapping, which begins at `at`.
    fn find(&self, at: u64, file: (u64, u64), offset: u64, len: usize) -> Option<u64> {
        let from = offset.checked_sub(self.offset)?;
        let fits = self.file == file && from.checked_add(len as u64)? <= self.len as u64;
        fits.then_some(at + from)
    }
}

/// By first address.
static SHARED: Mutex<BTreeMap<u64, Mapping>> = Mutex::new(BTreeMap::new());

fn mappings() -> std::sync::MutexGuard<'static, BTreeMap<u64, Mapping>> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// mmap(2) of `entry`.
pub fn map(call: &Call<'_>, entry: &Arc<Entry>) -> Served {
    let (len, offset) = (call.args[1] as usize, call.args[5]);
    let (protection, flags) = (call.int(2), call.int(3));
    let shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    let writes = shared && protection & libc::PROT_WRITE != 0;
    let access = entry.file().flags().0 & 3;
    if !is_regular(entry) {
        return Err(Errno::ENODEV.into());
    }
    if access == 1 || writes && access == 0 {
        return Err(Errno::EACCES.into());
    }
    let stat = call.client().fstat(call.task(), entry.file())?;
    let file = (stat.dev, stat.attr.st_ino);
    let known = |(&at, m): (&u64, &Mapping)| m.find(at, file, offset, len);
    let same = if shared { mappings().iter().find_map(known) } else { None };
    let at = match same {
        Some(from) => again(call, from, len)?,
        None => {
            // Other mappings have a part of it: what was written there is to be seen here.
            write_back(call, 0, u64::MAX, Some(file))?;
            // Filled through a mapping that may be written, whatever the program asked for.
            let kind = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
            let kind = (flags & !libc::MAP_TYPE) | kind | libc::MAP_ANONYMOUS;
            let args = [call.args[0], len as u64, FIRST, kind as u64, u64::MAX, 0];
            let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))? as u64;
            forget(at, at.saturating_add(len as u64));
            fill(call, entry, at, len, offset)?;
            at
        }
    };
    if protection as u64 != FIRST || same.is_some() {
        sys::plain(libc::SYS_mprotect, at, len as u64, protection as u64)?;
    }
    if shared {
        let mapping = Mapping { len, offset, entry: Arc::clone(entry), file, writes };
        mappings().insert(at, mapping);
    }
    Ok(at as i64)
}

/// The protection of a mapping that is to be filled.
const FIRST: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;

/// Maps the shared memory at `from` once more, where the program wants it.
fn again(call: &Call<'_>, from: u64, len: usize) -> Result<u64, Fail> {
    let fixed = call.int(3) & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
    let mut flags = libc::MREMAP_MAYMOVE;
    if fixed {
        // What is there is replaced, or in the way, as of every mapping.
        let kind = (call.int(3) & !libc::MAP_TYPE) | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let none = libc::PROT_NONE as u64;
        let args = [call.args[0], len as u64, none, kind as u64, u64::MAX, 0];
        sys::check(sys::pass(libc::SYS_mmap as u64, &args))?;
        forget(call.args[0], call.args[0].saturating_add(len as u64));
        flags |= libc::MREMAP_FIXED;
    }
    let args = [from, 0, len as u64, flags as u64, call.args[0], 0];
    Ok(sys::check(sys::pass(libc::SYS_mremap as u64, &args))? as u64)
}

fn fill(call: &Call<'_>, entry: &Entry, at: u64, len: usize, offset: u64) -> Result<(), Fail> {
    let room = sys::room(at, len)?;
    let mut done = 0;
    while done < len {
        let from = offset + done as u64;
        match call.client().pread(call.task(), entry.file(), &mut room[done..], from) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(stop) => {
                let _ = sys::plain(libc::SYS_munmap, at, len as u64, 0);
                return Err(stop.into());
            }
        }
    }
    Ok(())
}

/// munmap(2): what is unmapped is written back first.
pub fn unmap(call: &Call<'_>) -> Served {
    let (from, end) = (call.args[0], call.args[0].saturating_add(call.args[1]));
    if mappings().is_empty() {
        return Err(Fail::Pass);
    }
    write_back(call, from, end, None)?;
    forget(from, end);
    Err(Fail::Pass)
}

/// mremap(2): what grows is mapped anew, because memory of this kind has the length that it was made
/// with.
pub fn remap(call: &Call<'_>) -> Served {
    let (from, old, new) = (call.args[0], call.args[1], call.args[2]);
    let known = match mappings().get(&from) {
        Some(mapping) => (Arc::clone(&mapping.entry), mapping.offset, mapping.writes),
        None => return Err(Fail::Pass),
    };
    let (entry, offset, writes) = known;
    write_back(call, from, from.saturating_add(old), None)?;
    let flags = call.int(3);
    if new <= old && flags & libc::MREMAP_FIXED == 0 {
        forget(from.saturating_add(new), from.saturating_add(old));
        return Err(Fail::Pass);
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return Err(Errno::ENOMEM.into());
    }
    let (at, fixed) = match flags & libc::MREMAP_FIXED {
        0 => (0, 0),
        _ => (call.args[4], libc::MAP_FIXED),
    };
    let write = if writes { libc::PROT_WRITE } else { 0 };
    let (protection, kind) = (libc::PROT_READ | write, libc::MAP_SHARED | fixed);
    let args = [at, new, protection as u64, kind as u64, 0, offset];
    let moved = map(&Call { process: call.process, number: call.number, args: &args }, &entry)?;
    sys::plain(libc::SYS_munmap, from, old, 0)?;
    forget(from, from.saturating_add(old));
    Ok(moved)
}

/// msync(2).
pub fn sync(call: &Call<'_>) -> Served {
    if mappings().is_empty() {
        return Err(Fail::Pass);
    }
    write_back(call, call.args[0], call.args[0].saturating_add(call.args[1]), None)?;
    Err(Fail::Pass)
}

/// Writes back all that is mapped, at the end of the program.
pub fn write_back_all(call: &Call<'_>) {
    let _ = write_back(call, 0, u64::MAX, None);
}

/// Writes back what is mapped from `from` to `end`, of one file or of all.
fn write_back(call: &Call<'_>, from: u64, end: u64, file: Option<(u64, u64)>) -> Result<(), Fail> {
    for (&at, mapping) in mappings().iter() {
        if !mapping.writes || file.is_some_and(|file| file != mapping.file) {
            continue;
        }
        let (first, last) = (at.max(from), (at + mapping.len as u64).min(end));
        if first >= last {
            continue;
        }
        let offset = mapping.offset + (first - at);
        let size = call.client().fstat(call.task(), mapping.entry.file())?.attr.size;
        // Nothing beyond the end of the file is part of it.
        let len = (last - first).min(size.saturating_sub(offset)) as usize;
        let bytes = sys::bytes(first, len)?;
        call.client().pwrite(call.task(), mapping.entry.file(), bytes, offset)?;
    }
    Ok(())
}

/// Cuts `from..end` out of the mappings.
fn forget(from: u64, end: u64) {
    let mut all = mappings();
    let hit = |(&at, m): (&u64, &Mapping)| (at < end && at + m.len as u64 > from).then_some(at);
    let places: Vec<u64> = all.iter().filter_map(hit).collect();
    for at in places {
        let Some(mapping) = all.remove(&at) else { continue };
        let last = at + mapping.len as u64;
        if last > end {
            let (offset, entry) = (mapping.offset + (end - at), Arc::clone(&mapping.entry));
            all.insert(end, Mapping { len: (last - end) as usize, offset, entry, ..mapping });
        }
        if at < from {
            all.insert(at, Mapping { len: (from - at) as usize, ..mapping });
        }
    }
}
