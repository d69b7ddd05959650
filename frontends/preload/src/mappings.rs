//! Mappings of files whose bytes no descriptor has: copies in memory, and the way back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::Errno;

use crate::serve::{Call, Fail, Served, is_regular};
use crate::sys;
use crate::table::Entry;

/// A mapping that is written back.
struct Mapping {
    len: usize,
    offset: u64,
    entry: Arc<Entry>,
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
    // Filled through a mapping that may be written, whatever the program asked for.
    let kind = (flags & !libc::MAP_TYPE) | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let first = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let args = [call.args[0], len as u64, first, kind as u64, u64::MAX, 0];
    let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))? as u64;
    fill(call, entry, at, len, offset)?;
    if protection as u64 != first {
        sys::plain(libc::SYS_mprotect, at, len as u64, protection as u64)?;
    }
    if writes {
        mappings().insert(at, Mapping { len, offset, entry: Arc::clone(entry) });
    }
    Ok(at as i64)
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
    write_back(call, from, end)?;
    forget(from, end);
    Err(Fail::Pass)
}

/// msync(2).
pub fn sync(call: &Call<'_>) -> Served {
    if mappings().is_empty() {
        return Err(Fail::Pass);
    }
    write_back(call, call.args[0], call.args[0].saturating_add(call.args[1]))?;
    Err(Fail::Pass)
}

/// Writes back all that is mapped, at the end of the program.
pub fn write_back_all(call: &Call<'_>) {
    let _ = write_back(call, 0, u64::MAX);
}

fn write_back(call: &Call<'_>, from: u64, end: u64) -> Result<(), Fail> {
    for (&at, mapping) in mappings().iter() {
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
            all.insert(end, Mapping { len: (last - end) as usize, offset, entry });
        }
        if at < from {
            all.insert(at, Mapping { len: (from - at) as usize, ..mapping });
        }
    }
}
