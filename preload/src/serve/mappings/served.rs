//! Mappings of the memory that the server of a mount has for a file.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{Errno, File};

use super::table::{
    self, MappingKind, MappingUse, PAGE, ProgramMapping, caller, forget, mappings, note,
};
use crate::machine::sys;
use crate::process::state;
use crate::process::table::DescriptorEntry;
use crate::serve::call::{CallFailure, CallResult, ProgramCall};

/// Makes a mapping of a file whose mount another process serves. Returns `None` if that process has
/// no memory for it, or not enough for a private mapping, which may as well be a copy.
pub fn map(
    call: &ProgramCall<'_>,
    entry: &Arc<DescriptorEntry>,
    shared: bool,
) -> Result<Option<i64>, CallFailure> {
    let (len, offset) = (call.args[1] as usize, call.args[5]);
    // A read-only mapping may become writable if the file is open for writing.
    let may_store = shared && entry.file().flags().0 & 3 == libc::O_RDWR as u32;
    let end = offset.checked_add(len as u64).ok_or(Errno::EOVERFLOW)?;
    let (used, memory) = match use_memory(call, entry, offset..end, may_store) {
        Ok(Some(found)) => found,
        Ok(None) => return Ok(None),
        Err(CallFailure::Errno(Errno::ENOMEM)) if !shared => return Ok(None),
        Err(fail) => return Err(fail),
    };
    let mut args = *call.args;
    args[4] = memory.as_raw_fd() as u64;
    let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))? as u64;
    forget(at, at.saturating_add(len as u64));
    let stores = may_store && call.int(2) & libc::PROT_WRITE != 0;
    let len = len.next_multiple_of(PAGE as usize);
    let (entry, kind) = (Arc::clone(entry), MappingKind::Served(used));
    note(
        at,
        ProgramMapping {
            len,
            offset,
            entry,
            file: (0, 0),
            stores,
            may_store,
            kind,
            is_reported: false,
        },
    );
    Ok(Some(at as i64))
}

/// Requests the memory of a file, filled for `range`, from the server of its mount.
fn use_memory(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    range: Range<u64>,
    writes: bool,
) -> Result<Option<(Arc<MappingUse>, OwnedFd)>, CallFailure> {
    let Some(relay) = call.process.relay_of(entry) else { return Ok(None) };
    let parcel = entry.file().exec_state();
    let Some(fh) = parcel.fh else { return Ok(None) };
    match relay.map(caller(), File { ino: parcel.ino, fh }, range, writes) {
        Ok(memory) => Ok(Some((MappingUse::new(relay, parcel.ino), memory))),
        Err(Errno::ENOSYS) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// mremap(2), by the kernel. The server must have filled the additional part.
pub fn remap(call: &ProgramCall<'_>) -> CallResult {
    let (from, old, new) = (call.args[0], call.args[1], call.args[2]);
    let Some(mapping) = mappings().get(&from).cloned() else { return Err(CallFailure::Pass) };
    let end = mapping.offset.checked_add(new).ok_or(Errno::EOVERFLOW)?;
    let range = mapping.offset..end;
    let (used, _memory) =
        use_memory(call, &mapping.entry, range, mapping.may_store)?.ok_or(Errno::ENOMEM)?;
    let at = sys::check(sys::pass(call.number, call.args))? as u64;
    let len = (new as usize).next_multiple_of(PAGE as usize);
    let moved = ProgramMapping { len, kind: MappingKind::Served(used), ..mapping };
    // An old length of 0 duplicates the mapping. The new one is there before the old one ends, so
    // that the server keeps the memory.
    forget(from, from.saturating_add(old));
    forget(at, at.saturating_add(new));
    note(at, moved);
    Ok(at as i64)
}

/// Has servers write to the files what this process has stored.
pub fn write_back_all() -> Result<(), CallFailure> {
    let Some(process) = state::get() else { return Ok(()) };
    for mapping in table::served_stores(0, u64::MAX) {
        let parcel = mapping.entry.file().exec_state();
        let relay = process.relay_of(&mapping.entry).filter(|relay| !relay.is_unused());
        if let (Some(relay), Some(fh)) = (relay, parcel.fh) {
            relay.write_back(caller(), File { ino: parcel.ino, fh })?;
        }
    }
    Ok(())
}
