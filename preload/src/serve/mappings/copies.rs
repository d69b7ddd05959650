//! Mappings that are copies: of a file system in this process.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use defuse_fs::Errno;

use super::table::{MappingKind, PAGE, ProgramMapping, forget, mappings, note};
use crate::machine::descriptors::memory;
use crate::machine::sys;
use crate::process::table::DescriptorEntry;
use crate::serve::call::{CallFailure, CallResult, ProgramCall};

/// The protection of a mapping while it is filled.
const FIRST: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;

/// Makes a shared mapping.
pub fn map_shared(call: &ProgramCall<'_>, entry: &Arc<DescriptorEntry>) -> CallResult {
    let (len, offset) = (call.args[1] as usize, call.args[5]);
    let (protection, flags) = (call.int(2), call.int(3));
    let stat = call.client().fstat(call.task(), entry.file())?;
    let file = (stat.dev, stat.attr.st_ino);
    let known = |(&at, m): (&u64, &ProgramMapping)| m.find(at, file, offset, len);
    let same = mappings().iter().find_map(known);
    let at = match same {
        Some(from) => map_again(call, from, len)?,
        None => {
            // Other mappings have a part of the file, and their changes must be visible here.
            write_back(call, 0, u64::MAX, Some(file))?;
            map_anonymous(call, entry, (flags & !libc::MAP_TYPE) | libc::MAP_SHARED)?
        }
    };
    if protection as u64 != FIRST || same.is_some() {
        sys::plain(libc::SYS_mprotect, at, len as u64, protection as u64)?;
    }
    let may_store = entry.file().flags().0 & 3 == libc::O_RDWR as u32;
    let stores = protection & libc::PROT_WRITE != 0;
    let (entry, kind) = (Arc::clone(entry), MappingKind::Copy);
    note(
        at,
        ProgramMapping { len, offset, entry, file, stores, may_store, kind, is_reported: false },
    );
    Ok(at as i64)
}

/// New memory with the bytes of the file, which can be written.
fn map_anonymous(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    flags: i32,
) -> Result<u64, CallFailure> {
    let (len, offset) = (call.args[1] as usize, call.args[5]);
    // Filled through a writable mapping, independent of the requested protection.
    let kind = (flags | libc::MAP_ANONYMOUS) as u64;
    let args = [call.args[0], len as u64, FIRST, kind, u64::MAX, 0];
    let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))? as u64;
    forget(at, at.saturating_add(len as u64));
    if let Err(fail) = fill(call, entry, at, len, offset) {
        let _ = sys::plain(libc::SYS_munmap, at, len as u64, 0);
        return Err(fail);
    }
    Ok(at)
}

/// Makes a private mapping of a copy that this process keeps, so that a page which the program
/// drops (`MADV_DONTNEED`) has the bytes of the file again.
pub fn map_private(call: &ProgramCall<'_>, entry: &Arc<DescriptorEntry>) -> CallResult {
    let (len, offset) = (call.args[1], call.args[5]);
    let size = call.client().fstat(call.task(), entry.file())?.attr.size;
    let there = size.saturating_sub(offset).min(len).next_multiple_of(PAGE);
    // Beyond a limit of the size of files the kernel would send SIGXFSZ.
    let limit = call.task().file_size_limit();
    if limit.is_some_and(|limit| there > limit) {
        let at = map_anonymous(call, entry, call.int(3))?;
        sys::plain(libc::SYS_mprotect, at, len, call.args[2])?;
        return Ok(at as i64);
    }
    let copy = memory(c"defuse-copy")?;
    let fd = copy.as_raw_fd() as u64;
    if there > 0 {
        sys::plain(libc::SYS_ftruncate, fd, there, 0)?;
        let args = [0, there, FIRST, libc::MAP_SHARED as u64, fd, 0];
        let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))? as u64;
        let filled = fill(call, entry, at, there as usize, offset);
        let _ = sys::plain(libc::SYS_munmap, at, there, 0);
        filled?;
    }
    let mut args = *call.args;
    (args[4], args[5]) = (fd, 0);
    let at = sys::check(sys::pass(libc::SYS_mmap as u64, &args))? as u64;
    forget(at, at.saturating_add(len));
    Ok(at as i64)
}

/// Maps the shared memory at `from` again, at the requested address.
fn map_again(call: &ProgramCall<'_>, from: u64, len: usize) -> Result<u64, CallFailure> {
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

/// Reads the bytes of the file into `at`.
fn fill(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    at: u64,
    len: usize,
    offset: u64,
) -> Result<(), CallFailure> {
    let room = sys::program_memory(at, len)?;
    let mut done = 0;
    while done < len {
        let from = offset + done as u64;
        match call.client().pread(call.task(), entry.file(), &mut room[done..], from)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(())
}

/// mremap(2). A mapping that grows is made again, by `map`, because the length of such memory is
/// fixed.
pub fn remap(
    call: &ProgramCall<'_>,
    map: fn(&ProgramCall<'_>, &Arc<DescriptorEntry>) -> CallResult,
) -> CallResult {
    let (from, old, new) = (call.args[0], call.args[1], call.args[2]);
    let Some(mapping) = mappings().get(&from).cloned() else { return Err(CallFailure::Pass) };
    write_back(call, from, from.saturating_add(old), None)?;
    let flags = call.int(3);
    if new <= old && flags & libc::MREMAP_FIXED == 0 {
        forget(from.saturating_add(new), from.saturating_add(old));
        return Err(CallFailure::Pass);
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return Err(Errno::ENOMEM.into());
    }
    let (at, fixed) = match flags & libc::MREMAP_FIXED {
        0 => (0, 0),
        _ => (call.args[4], libc::MAP_FIXED),
    };
    let write = if mapping.stores { libc::PROT_WRITE } else { 0 };
    let (protection, kind) = (libc::PROT_READ | write, libc::MAP_SHARED | fixed);
    let args = [at, new, protection as u64, kind as u64, 0, mapping.offset];
    let again = ProgramCall { process: call.process, number: call.number, args: &args };
    let moved = map(&again, &mapping.entry)?;
    sys::plain(libc::SYS_munmap, from, old, 0)?;
    forget(from, from.saturating_add(old));
    Ok(moved)
}

/// Writes back the mappings from `from` to `end`, of one file or of all.
pub fn write_back(
    call: &ProgramCall<'_>,
    from: u64,
    end: u64,
    file: Option<(u64, u64)>,
) -> Result<(), CallFailure> {
    for (&at, mapping) in mappings().iter() {
        let is_other = file.is_some_and(|file| file != mapping.file);
        if !matches!(mapping.kind, MappingKind::Copy) || !mapping.stores || is_other {
            continue;
        }
        let (first, last) = (at.max(from), (at + mapping.len as u64).min(end));
        if first >= last {
            continue;
        }
        let offset = mapping.offset + (first - at);
        let size = call.client().fstat(call.task(), mapping.entry.file())?.attr.size;
        // Bytes past the end of the file do not belong to the file.
        let len = (last - first).min(size.saturating_sub(offset)) as usize;
        write_all(call, &mapping.entry, sys::bytes(first, len)?, offset)?;
    }
    Ok(())
}

/// Writes all bytes. A file system that has space for some of them takes these, and refuses the
/// rest.
fn write_all(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    bytes: &[u8],
    offset: u64,
) -> Result<(), CallFailure> {
    let mut done = 0;
    while done < bytes.len() {
        let to = offset + done as u64;
        match call.client().pwrite(call.task(), entry.file(), &bytes[done..], to)? {
            0 => return Err(Errno::EIO.into()),
            count => done += count,
        }
    }
    Ok(())
}
