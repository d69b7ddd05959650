//! Mappings of files whose descriptor is a placeholder.
//!
//! If the file has a lower open file, the kernel maps that one, and this module does nothing more.
//!
//! If another process serves the mount, it has one memory for all mappings of a file, in all
//! processes. It keeps that memory and the results of read(2) and write(2) the same ([`served`]). A
//! private mapping is one of that memory, too.
//!
//! Otherwise a mapping is a copy. A shared one is written back ([`copies`]). This requires that no
//! other process can have the file system (`--fork deny`), or that the file is not open for
//! writing. A further mapping of the same part of the file maps the same memory again, by mremap(2)
//! with a length of 0. A shared mapping of a file that is open for writing, and that another
//! process may have, too, fails with `ENODEV`: each process would have a copy, and the last one to
//! write back would win.
//!
//! # Stores that find no space
//!
//! On a file system of the kernel a store into a hole takes space, and is a SIGBUS where there is
//! none. Here space is taken when the stores are written to the file system. Where that fails at
//! msync(2) or fsync(2), the call fails. At the end of a mapping no call could report it, so that
//! the program gets the SIGBUS then ([`lost`]).

mod copies;
mod lost;
mod served;
mod table;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::Errno;
use defuse_preload_plan::ForkPolicy;

use crate::machine::sys;
use crate::process::table::DescriptorEntry;
use crate::serve::call::{CallFailure, CallResult, ProgramCall, is_regular};
use lost::report_lost_store;
use table::{MappingKind, PAGE, forget, mappings};

/// mmap(2) of `entry`.
pub fn map(call: &ProgramCall<'_>, entry: &Arc<DescriptorEntry>) -> CallResult {
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
    if flags & libc::MAP_FIXED != 0 {
        write_back_part(call, call.args[0], call.args[0].saturating_add(call.args[1]));
    }
    if let Some(lower) = &entry.lower {
        return map_lower(call, lower);
    }
    if let Some(mapped) = served::map(call, entry, shared)? {
        return Ok(mapped);
    }
    if !shared {
        return copies::map_private(call, entry);
    }
    // Also a mapping that is not writable yet: it may become so.
    if access != 0 && !is_alone(call, entry) {
        return Err(Errno::ENODEV.into());
    }
    copies::map_shared(call, entry)
}

/// Maps the lower open file. The table does not contain such a mapping.
fn map_lower(call: &ProgramCall<'_>, lower: &OwnedFd) -> CallResult {
    let mut args = *call.args;
    args[4] = lower.as_raw_fd() as u64;
    let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))?;
    forget(at as u64, (at as u64).saturating_add(call.args[1]));
    Ok(at)
}

/// True if no other process can have the file system.
fn is_alone(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> bool {
    let place = call.process.index_of(entry.file().mount());
    place.is_some_and(|place| call.process.mounts[place].fork == ForkPolicy::Deny)
}

/// munmap(2), and the part of mmap(2) that replaces memory. Writes the part back first.
pub fn unmap(call: &ProgramCall<'_>) -> CallResult {
    let (from, end) = (call.args[0], call.args[0].saturating_add(call.args[1]));
    if mappings().is_empty() {
        return Err(CallFailure::Pass);
    }
    write_back_part(call, from, end);
    forget(from, end);
    Err(CallFailure::Pass)
}

/// Writes back the copies from `from` to `end`, which are about to go.
fn write_back_part(call: &ProgramCall<'_>, from: u64, end: u64) {
    if let Err(CallFailure::Errno(errno)) = copies::write_back(call, from, end, None)
        && !table::is_reported(from, end)
    {
        report_lost_store(errno, from, true);
    }
}

/// mremap(2). A copy that grows is made again, because the length of such memory is fixed.
pub fn remap(call: &ProgramCall<'_>) -> CallResult {
    let from = call.args[0];
    let kind = mappings().get(&from).map(|mapping| mapping.kind.clone());
    match kind {
        None => Err(CallFailure::Pass),
        Some(MappingKind::Served(_)) => served::remap(call),
        Some(MappingKind::Copy) => copies::remap(call, map),
    }
}

/// mprotect(2): a mapping that becomes writable has to be written back from then on.
pub fn protect(call: &ProgramCall<'_>) -> CallResult {
    let (from, end) = (call.args[0], call.args[0].saturating_add(call.args[1]));
    if call.int(2) & libc::PROT_WRITE != 0 {
        table::note_writable(from, end);
    }
    Err(CallFailure::Pass)
}

/// msync(2).
pub fn sync(call: &ProgramCall<'_>) -> CallResult {
    if mappings().is_empty() {
        return Err(CallFailure::Pass);
    }
    let (from, end) = (call.args[0], call.args[0].saturating_add(call.args[1]));
    let synced = sync_part(call, from, end);
    table::set_reported(from, end, synced.is_err());
    synced?;
    Err(CallFailure::Pass)
}

fn sync_part(call: &ProgramCall<'_>, from: u64, end: u64) -> Result<(), CallFailure> {
    copies::write_back(call, from, end, None)?;
    for mapping in table::served_stores(from, end) {
        call.client().fsync(call.task(), mapping.entry.file(), true)?;
    }
    Ok(())
}

/// Writes back the copies of all files.
pub fn write_back_all(call: &ProgramCall<'_>) -> Result<(), CallFailure> {
    copies::write_back(call, 0, u64::MAX, None)
}

/// fsync(2) of a file has failed, and the program knows it.
pub fn note_failed_sync(entry: &DescriptorEntry) {
    table::set_reported_of(entry);
}

/// Writes back the copies of a file, before its fsync(2).
pub fn write_back_file(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> Result<(), CallFailure> {
    if mappings().values().all(|mapping| matches!(mapping.kind, MappingKind::Served(_))) {
        return Ok(());
    }
    let stat = call.client().fstat(call.task(), entry.file())?;
    copies::write_back(call, 0, u64::MAX, Some((stat.dev, stat.attr.st_ino)))
}

/// Before execve(2), which ends all mappings: writes back what was stored. Where that fails, so
/// does execve(2), because no call could report it afterwards.
pub fn write_back_before_exec(call: &ProgramCall<'_>) -> Result<(), CallFailure> {
    copies::write_back(call, 0, u64::MAX, None)?;
    served::write_back_all()
}

/// Ends all mappings at the end of the program.
pub fn end_all(call: &ProgramCall<'_>) {
    write_back_part(call, 0, u64::MAX);
    // The server ends those that stored nothing together with the connection.
    let stored: Vec<_> = table::served_stores(0, u64::MAX);
    stored.into_iter().for_each(|mapping| forget(mapping.at, mapping.at + mapping.len as u64));
}
