//! Mappings of files whose descriptor is a placeholder.
//!
//! If the file has a lower open file, the kernel maps that one, and this module does nothing more.
//!
//! If another process serves the mount, it has one memory for all shared mappings of a file, in all
//! processes. It keeps that memory and the results of read(2) and write(2) the same ([`Kind::Served`]).
//!
//! Otherwise a mapping is a copy that is written back ([`Kind::Copy`]). This requires that no other
//! process can have the file system (`--fork deny`), or that the file is not open for writing. A further
//! mapping of the same part of the file maps the same memory again, by mremap(2) with a length of 0. A
//! shared mapping of a file that is open for writing, and that another process may have, too, fails with
//! `ENODEV`: each process would have a copy, and the last one to write back would win.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::{Caller, Errno, File, Ino};
use defuse_preload_plan::ForkPolicy;

use crate::machine::sys;
use crate::process::compose::Relay;
use crate::process::state;
use crate::process::table::Entry;
use crate::serve::call::{Call, Fail, Served, is_regular};

/// A shared mapping.
struct Mapping {
    len: usize,
    offset: u64,
    // Dropped before the open file, by which the server knows the rights to map.
    kind: Kind,
    entry: Arc<Entry>,
    /// The file, by device and number.
    file: (u64, u64),
    /// The memory is writable.
    writes: bool,
}

/// The memory of a mapping.
#[derive(Clone)]
enum Kind {
    /// Memory of this process and its forked children. It is written back.
    Copy,
    /// Memory that all processes share.
    Served { _used: Arc<Use> },
}

/// A mapping that is registered with the server of the mount until its last part is unmapped.
struct Use {
    relay: Arc<Relay>,
    ino: Ino,
}

impl Drop for Use {
    fn drop(&mut self) {
        self.relay.unmap(caller(), self.ino);
    }
}

impl Mapping {
    /// The address of `len` bytes from `offset` of `file` in this mapping, which begins at `at`.
    fn find(&self, at: u64, file: (u64, u64), offset: u64, len: usize) -> Option<u64> {
        let from = offset.checked_sub(self.offset)?;
        let is_copy = matches!(self.kind, Kind::Copy);
        let fits = is_copy && self.file == file && from.checked_add(len as u64)? <= self.len as u64;
        fits.then_some(at + from)
    }
}

/// The user of this thread, for the server.
fn caller() -> Caller {
    let caller = state::get().map(|process| {
        let who = process.task().credentials();
        Caller { uid: who.uid, gid: who.gid, pid: who.pid }
    });
    caller.unwrap_or_default()
}

/// The shared mappings of this process, by first address.
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
    if offset % PAGE != 0 || len == 0 {
        return Err(Errno::EINVAL.into());
    }
    let reads = [libc::O_RDONLY, libc::O_RDWR].contains(&(access as i32));
    if !reads || writes && access == 0 {
        return Err(Errno::EACCES.into());
    }
    if let Some(lower) = &entry.lower {
        return map_lower(call, lower);
    }
    if shared && let Some(mapped) = map_served(call, entry)? {
        return Ok(mapped);
    }
    // Also a mapping that is not writable yet, because mprotect(2) is not intercepted.
    if shared && access != 0 && !is_alone(call, entry) {
        return Err(Errno::ENODEV.into());
    }
    let stat = call.client().fstat(call.task(), entry.file())?;
    let file = (stat.dev, stat.attr.st_ino);
    let known = |(&at, m): (&u64, &Mapping)| m.find(at, file, offset, len);
    let same = if shared { mappings().iter().find_map(known) } else { None };
    let at = match same {
        Some(from) => again(call, from, len)?,
        None => {
            // Other mappings have a part of it, and their changes must be visible here.
            write_back(call, 0, u64::MAX, Some(file))?;
            // Filled through a writable mapping, independent of the requested protection.
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
        let (entry, kind) = (Arc::clone(entry), Kind::Copy);
        let mapping = Mapping { len, offset, entry, file, writes, kind };
        mappings().insert(at, mapping);
    }
    Ok(at as i64)
}

/// Maps the lower open file. The table does not contain such a mapping.
fn map_lower(call: &Call<'_>, lower: &OwnedFd) -> Served {
    let (at, len) = (call.args[0], call.args[1]);
    if call.int(3) & libc::MAP_FIXED != 0 {
        write_back(call, at, at.saturating_add(len), None)?;
    }
    let mut args = *call.args;
    args[4] = lower.as_raw_fd() as u64;
    let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))?;
    forget(at as u64, (at as u64).saturating_add(len));
    Ok(at)
}

/// True if no other process can have the file system.
fn is_alone(call: &Call<'_>, entry: &Entry) -> bool {
    let place = call.process.place_of(entry.file().mount());
    place.is_some_and(|place| call.process.mounts[place].fork == ForkPolicy::Deny)
}

/// Makes a shared mapping of a file whose mount another process serves. Returns `None` if that process
/// has no memory for it.
fn map_served(call: &Call<'_>, entry: &Arc<Entry>) -> Result<Option<i64>, Fail> {
    let (len, offset) = (call.args[1] as usize, call.args[5]);
    // A read-only mapping may become writable if the file is open for writing.
    let writes = entry.file().flags().0 & 3 == libc::O_RDWR as u32;
    let end = offset.checked_add(len as u64).ok_or(Errno::EOVERFLOW)?;
    let Some((used, memory)) = use_served(call, entry, offset..end, writes)? else {
        return Ok(None);
    };
    let mut args = *call.args;
    args[4] = memory.as_raw_fd() as u64;
    let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))? as u64;
    forget(at, at.saturating_add(len as u64));
    note(
        at,
        Mapping {
            len: len.next_multiple_of(PAGE as usize),
            offset,
            entry: Arc::clone(entry),
            file: (0, 0),
            writes,
            kind: Kind::Served { _used: used },
        },
    );
    Ok(Some(at as i64))
}

const PAGE: u64 = 4096;

fn note(at: u64, mapping: Mapping) {
    mappings().insert(at, mapping);
}

/// Requests the memory of a file, filled for `range`, from the server of its mount.
fn use_served(
    call: &Call<'_>,
    entry: &Entry,
    range: Range<u64>,
    writes: bool,
) -> Result<Option<(Arc<Use>, OwnedFd)>, Fail> {
    let Some(relay) = call.process.relay_of(entry) else { return Ok(None) };
    let parcel = entry.file().exec_state();
    let Some(fh) = parcel.fh else { return Ok(None) };
    match relay.map(caller(), File { ino: parcel.ino, fh }, range, writes) {
        Ok(memory) => {
            let used = Use { relay: Arc::clone(relay), ino: parcel.ino };
            Ok(Some((Arc::new(used), memory)))
        }
        Err(Errno::ENOSYS) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The protection of a mapping while it is filled.
const FIRST: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;

/// Maps the shared memory at `from` again, at the requested address.
fn again(call: &Call<'_>, from: u64, len: usize) -> Result<u64, Fail> {
    let fixed = call.int(3) & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
    let mut flags = libc::MREMAP_MAYMOVE;
    if fixed {
        // An existing mapping there is replaced, or causes an error, as for every mapping.
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

/// munmap(2). Writes the part back first.
pub fn unmap(call: &Call<'_>) -> Served {
    let (from, end) = (call.args[0], call.args[0].saturating_add(call.args[1]));
    if mappings().is_empty() {
        return Err(Fail::Pass);
    }
    write_back(call, from, end, None)?;
    forget(from, end);
    Err(Fail::Pass)
}

/// mremap(2). A mapping that grows is made again, because the length of such memory is fixed.
pub fn remap(call: &Call<'_>) -> Served {
    let (from, old, new) = (call.args[0], call.args[1], call.args[2]);
    let known = match mappings().get(&from) {
        Some(mapping) => (Arc::clone(&mapping.entry), mapping.offset, mapping.writes),
        None => return Err(Fail::Pass),
    };
    if let Some(moved) = remap_served(call)? {
        return Ok(moved);
    }
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

/// mremap(2) of a server's memory, by the kernel. The server must have filled the additional part.
fn remap_served(call: &Call<'_>) -> Result<Option<i64>, Fail> {
    let (from, old, new) = (call.args[0], call.args[1], call.args[2]);
    let (entry, offset, file, writes) = match mappings().get(&from) {
        Some(Mapping { kind: Kind::Served { .. }, entry, offset, file, writes, .. }) => {
            (Arc::clone(entry), *offset, *file, *writes)
        }
        _ => return Ok(None),
    };
    let end = offset.checked_add(new).ok_or(Errno::EOVERFLOW)?;
    let Some((used, _memory)) = use_served(call, &entry, offset..end, writes)? else {
        return Ok(None);
    };
    let at = sys::check(sys::pass(call.number, call.args))? as u64;
    // An old length of 0 duplicates the mapping.
    forget(from, from.saturating_add(old));
    forget(at, at.saturating_add(new));
    let len = (new as usize).next_multiple_of(PAGE as usize);
    note(at, Mapping { len, offset, entry, file, writes, kind: Kind::Served { _used: used } });
    Ok(Some(at as i64))
}

/// msync(2).
pub fn sync(call: &Call<'_>) -> Served {
    if mappings().is_empty() {
        return Err(Fail::Pass);
    }
    let (from, end) = (call.args[0], call.args[0].saturating_add(call.args[1]));
    write_back(call, from, end, None)?;
    let is_served = |(at, m): &(&u64, &Mapping)| {
        matches!(m.kind, Kind::Served { .. })
            && m.writes
            && **at < end
            && **at + m.len as u64 > from
    };
    let served: Vec<_> =
        mappings().iter().filter(is_served).map(|(_, m)| Arc::clone(&m.entry)).collect();
    for entry in served {
        call.client().fsync(call.task(), entry.file(), true)?;
    }
    Err(Fail::Pass)
}

/// Writes back all mappings at the end of the program.
pub fn write_back_all(call: &Call<'_>) {
    let _ = write_back(call, 0, u64::MAX, None);
}

/// Writes back the mappings from `from` to `end`, of one file or of all.
fn write_back(call: &Call<'_>, from: u64, end: u64, file: Option<(u64, u64)>) -> Result<(), Fail> {
    for (&at, mapping) in mappings().iter() {
        if !matches!(mapping.kind, Kind::Copy)
            || !mapping.writes
            || file.is_some_and(|file| file != mapping.file)
        {
            continue;
        }
        let (first, last) = (at.max(from), (at + mapping.len as u64).min(end));
        if first >= last {
            continue;
        }
        let offset = mapping.offset + (first - at);
        let size = call.client().fstat(call.task(), mapping.entry.file())?.attr.size;
        // Bytes past the end of the file are not part of it.
        let len = (last - first).min(size.saturating_sub(offset)) as usize;
        let bytes = sys::bytes(first, len)?;
        call.client().pwrite(call.task(), mapping.entry.file(), bytes, offset)?;
    }
    Ok(())
}

/// Removes `from..end` from the mappings.
fn forget(from: u64, end: u64) {
    // Servers are notified after the lock is released.
    let mut gone = Vec::new();
    let mut all = mappings();
    let hit = |(&at, m): (&u64, &Mapping)| (at < end && at + m.len as u64 > from).then_some(at);
    let places: Vec<u64> = all.iter().filter_map(hit).collect();
    for at in places {
        let Some(mapping) = all.remove(&at) else { continue };
        let last = at + mapping.len as u64;
        if last > end {
            let (offset, entry) = (mapping.offset + (end - at), Arc::clone(&mapping.entry));
            let (len, kind) = ((last - end) as usize, mapping.kind.clone());
            all.insert(end, Mapping { len, offset, entry, kind, ..mapping });
        }
        if at < from {
            all.insert(at, Mapping { len: (from - at) as usize, ..mapping });
        } else {
            gone.push(mapping);
        }
    }
    drop(all);
}
