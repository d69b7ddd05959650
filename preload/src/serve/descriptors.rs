//! Numbers: close, dup, fcntl, limits.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use defuse_direct::LockFamily;
use defuse_fs::{Errno, Lock, LockType};

use crate::machine::descriptors;
use crate::machine::{pid, sys};
use crate::process::table::DescriptorEntry;
use crate::process::zone;
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::data;

pub fn close(call: &ProgramCall<'_>) -> CallResult {
    let fd = call.int(0);
    if call.process.is_reserved(fd) {
        return Err(Errno::EBADF.into());
    }
    // Before it is closed: the number may be ours the next moment.
    zone::set_of_program(call.process.floor, fd, false);
    if !call.table().has(fd) {
        return Err(CallFailure::Pass);
    }
    let view = call.process.view();
    let entry = view.table.remove(fd).ok_or(CallFailure::Pass)?;
    // The error of the file system's flush is the error of close, but the number is free in any
    // case.
    let flushed = if entry.backed { Ok(()) } else { entry.file().close(call.task()) };
    let value = call.kernel();
    flushed?;
    Ok(value)
}

pub fn close_range(call: &ProgramCall<'_>) -> CallResult {
    const UNSHARE: u64 = 2;
    const CLOEXEC: u64 = 4;
    let (first, last, flags) = (call.args[0] as u32, call.args[1] as u32, call.args[2]);
    if first > last || flags & !(UNSHARE | CLOEXEC) != 0 {
        return Err(CallFailure::Pass);
    }
    let floor = call.process.floor as u32;
    if flags & CLOEXEC == 0 {
        let view = call.process.view();
        for (fd, _) in view.table.list_entries() {
            if (first..=last).contains(&(fd as u32))
                && let Some(entry) = view.table.remove(fd)
                && !entry.backed
            {
                let _ = entry.file().close(call.task());
            }
        }
    }
    for fd in zone::list_program_numbers(call.process.floor, first, last) {
        if flags & CLOEXEC != 0 {
            let _ = sys::plain(
                libc::SYS_fcntl,
                fd as u64,
                libc::F_SETFD as u64,
                libc::FD_CLOEXEC as u64,
            );
        } else {
            zone::set_of_program(call.process.floor, fd, false);
            descriptors::close(fd);
        }
    }
    // Our own stay: the range is done in two parts around them.
    let range = |first: u32, last: u32| {
        if first > last {
            return Ok(0);
        }
        sys::plain(libc::SYS_close_range, u64::from(first), u64::from(last), flags)
    };
    let below = range(first, last.min(floor - 1))?;
    range(first.max(floor + 4096), last)?;
    Ok(below)
}

/// A number that the kernel gave out for one of ours.
fn add_duplicate(
    call: &ProgramCall<'_>,
    entry: &std::sync::Arc<DescriptorEntry>,
    value: i64,
) -> CallResult {
    if value < 0 {
        return Ok(value);
    }
    if value as u32 >= call.process.limit.load(Ordering::Relaxed) {
        descriptors::close(value as i32);
        return Err(Errno::EMFILE.into());
    }
    let view = call.process.view();
    let _ = view.table.set(value as i32, std::sync::Arc::clone(entry));
    Ok(value)
}

pub fn dup(call: &ProgramCall<'_>, _: &DescriptorEntry) -> CallResult {
    let entry = call.entry(0).ok_or(CallFailure::Pass)?;
    add_duplicate(call, &entry, call.kernel())
}

pub fn dup2(call: &ProgramCall<'_>) -> CallResult {
    replace(call)
}

pub fn dup3(call: &ProgramCall<'_>) -> CallResult {
    replace(call)
}

fn replace(call: &ProgramCall<'_>) -> CallResult {
    let (old, new) = (call.entry(0), call.int(1));
    let beyond = new as u32 >= call.process.limit.load(Ordering::Relaxed);
    if beyond || call.process.is_reserved(new) || call.process.is_reserved(call.int(0)) {
        return Err(Errno::EBADF.into());
    }
    if call.int(0) == new {
        return Err(CallFailure::Pass);
    }
    let value = call.kernel();
    if value < 0 {
        return Ok(value);
    }
    zone::set_of_program(call.process.floor, new, true);
    if old.is_none() && !call.table().has(new) {
        return Ok(value);
    }
    let view = call.process.view();
    let before = match old {
        Some(entry) => view.table.set(new, entry).unwrap_or(None),
        None => view.table.remove(new),
    };
    // dup2 closes without telling errors.
    if let Some(before) = before.filter(|before| !before.backed) {
        let _ = before.file().close(call.task());
    }
    Ok(value)
}

pub fn fcntl(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    const SETLK: i32 = libc::F_SETLK;
    const SETSIG: i32 = 10;
    const GETSIG: i32 = 11;
    let command = call.int(1);
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            let entry = call.entry(0).ok_or(CallFailure::Pass)?;
            if call.args[2] >= u64::from(call.process.limit.load(Ordering::Relaxed)) {
                return Err(Errno::EINVAL.into());
            }
            add_duplicate(call, &entry, call.kernel())
        }
        libc::F_GETFD | libc::F_SETFD => Err(CallFailure::Pass),
        _ if entry.backed => Err(CallFailure::Pass),
        libc::F_GETFL => Ok(i64::from(entry.file().flags().0 | 0o100000)),
        _ if entry.file().is_path() => Err(Errno::EBADF.into()),
        libc::F_SETFL => {
            call.client().set_flags(call.task(), entry.file(), call.args[2] as u32)?;
            Ok(0)
        }
        libc::F_OFD_SETLK | libc::F_OFD_SETLKW | libc::F_OFD_GETLK if entry.lower.is_some() => {
            lock_of_open_file(call, entry)
        }
        libc::F_GETLK | libc::F_OFD_GETLK => test_lock(call, entry, command),
        SETLK | libc::F_SETLKW => set_lock(call, entry, LockFamily::Process, command != SETLK),
        libc::F_OFD_SETLK | libc::F_OFD_SETLKW => {
            set_lock(call, entry, LockFamily::OpenFile, command == libc::F_OFD_SETLKW)
        }
        // Owners of signals, leases, notification, pipes, seals: nothing that a file of ours has.
        libc::F_GETOWN | GETSIG | libc::F_SETOWN | SETSIG => Ok(0),
        _ => Err(Errno::EINVAL.into()),
    }
}

fn lock_of(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
) -> Result<(libc::flock, Lock), CallFailure> {
    let raw = sys::load::<libc::flock>(call.args[2])?;
    let typ = match i32::from(raw.l_type) {
        libc::F_RDLCK => LockType::Read,
        libc::F_WRLCK => LockType::Write,
        libc::F_UNLCK => LockType::Unlock,
        _ => return Err(Errno::EINVAL.into()),
    };
    let base = match i32::from(raw.l_whence) {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => entry.file().position() as i64,
        libc::SEEK_END => call.client().fstat(call.task(), entry.file())?.attr.size as i64,
        _ => return Err(Errno::EINVAL.into()),
    };
    let start = base.checked_add(raw.l_start).ok_or(Errno::EOVERFLOW)?;
    let (start, end) = match raw.l_len {
        0 => (start, i64::MAX),
        len if len > 0 => (start, start.checked_add(len - 1).ok_or(Errno::EOVERFLOW)?),
        len => (start + len, start - 1),
    };
    if start < 0 || end < start {
        return Err(Errno::EINVAL.into());
    }
    Ok((raw, Lock { typ, start: start as u64, end: end as u64, pid: 0 }))
}

/// A lock that belongs to the open file, by the kernel: other processes may have that, too.
fn lock_of_open_file(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    let mut raw = sys::load::<libc::flock>(call.args[2])?;
    // The position of the lower file differs from the program's position, and its end may differ,
    // too.
    if i32::from(raw.l_whence) != libc::SEEK_SET {
        let (_, lock) = lock_of(call, entry)?;
        raw.l_whence = libc::SEEK_SET as i16;
        raw.l_start = lock.start as i64;
        raw.l_len = match lock.end >= i64::MAX as u64 {
            true => 0,
            false => (lock.end - lock.start + 1) as i64,
        };
    }
    let entry = call.entry(0).ok_or(Errno::EBADF)?;
    if call.int(1) != libc::F_OFD_GETLK {
        return Err(CallFailure::Lower(entry, Some(raw)));
    }
    let fd = entry.lower.as_ref().ok_or(Errno::EBADF)?.as_raw_fd();
    let at = std::ptr::from_mut(&mut raw) as u64;
    sys::check(sys::pass(call.number, &[fd as u64, call.args[1], at, 0, 0, 0]))?;
    sys::store(call.args[2], raw)?;
    Ok(0)
}

fn set_lock(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    family: LockFamily,
    wait: bool,
) -> CallResult {
    let (_, lock) = lock_of(call, entry)?;
    data::take_lock(call, entry, family, lock, wait)
}

fn test_lock(call: &ProgramCall<'_>, entry: &DescriptorEntry, command: i32) -> CallResult {
    let (mut raw, lock) = lock_of(call, entry)?;
    let process = command == libc::F_GETLK;
    let family = if process { LockFamily::Process } else { LockFamily::OpenFile };
    match call.client().test_lock(call.task(), entry.file(), family, lock)? {
        None => raw.l_type = libc::F_UNLCK as i16,
        Some(found) => {
            let reads = found.typ == LockType::Read;
            raw.l_type = if reads { libc::F_RDLCK } else { libc::F_WRLCK } as i16;
            raw.l_whence = libc::SEEK_SET as i16;
            raw.l_start = found.start as i64;
            let endless = found.end >= i64::MAX as u64;
            raw.l_len = if endless { 0 } else { (found.end - found.start + 1) as i64 };
            raw.l_pid = if process { found.pid as i32 } else { -1 };
        }
    }
    sys::store(call.args[2], raw)?;
    Ok(0)
}

/// The limit of descriptors that the program sees and sets is its own; ours lie above it.
pub fn prlimit(call: &ProgramCall<'_>) -> CallResult {
    let own = call.int(0) == 0 || call.int(0) == pid::read_pid();
    if call.int(1) == libc::RLIMIT_FSIZE as i32 && own && call.args[2] != 0 {
        let value = call.kernel();
        let new = sys::load::<libc::rlimit>(call.args[2])?;
        let limit = (new.rlim_cur != libc::RLIM_INFINITY).then_some(new.rlim_cur);
        if value == 0 {
            call.process.task().set_file_size_limit(limit);
        }
        return Ok(value);
    }
    if !own || call.int(1) != libc::RLIMIT_NOFILE as i32 {
        return Err(CallFailure::Pass);
    }
    descriptors(call, call.args[2], call.args[3])
}

pub fn rlimit(call: &ProgramCall<'_>) -> CallResult {
    if call.int(0) != libc::RLIMIT_NOFILE as i32 {
        return Err(CallFailure::Pass);
    }
    match call.number as i64 {
        libc::SYS_setrlimit => descriptors(call, call.args[1], 0),
        _ => descriptors(call, 0, call.args[1]),
    }
}

fn descriptors(call: &ProgramCall<'_>, new: u64, old: u64) -> CallResult {
    let mut now: libc::rlimit = sys::zeroed();
    let args = [0, libc::RLIMIT_NOFILE as u64, 0, &raw mut now as u64, 0, 0];
    sys::check(sys::pass(libc::SYS_prlimit64 as u64, &args))?;
    let shown = u64::from(call.process.limit.load(Ordering::Relaxed));
    if new != 0 {
        let new = sys::load::<libc::rlimit>(new)?;
        let lowered = new.rlim_max < now.rlim_max;
        let allowed = new.rlim_max <= now.rlim_max || call.task().credentials().has(24);
        if new.rlim_cur > new.rlim_max {
            return Err(Errno::EINVAL.into());
        }
        if !allowed {
            return Err(Errno::EPERM.into());
        }
        // Ours have to stay possible: the kernel's limits are never lowered below them.
        let least = call.process.floor as u64 + 4096;
        let kernel = libc::rlimit {
            rlim_cur: new.rlim_cur.max(least).min(now.rlim_max),
            rlim_max: if lowered {
                new.rlim_max.max(least).min(now.rlim_max)
            } else {
                new.rlim_max
            },
        };
        let args = [0, libc::RLIMIT_NOFILE as u64, &raw const kernel as u64, 0, 0, 0];
        sys::check(sys::pass(libc::SYS_prlimit64 as u64, &args))?;
        call.process.limit.store(new.rlim_cur.min(u64::from(u32::MAX)) as u32, Ordering::Relaxed);
    }
    if old != 0 {
        sys::store(old, libc::rlimit { rlim_cur: shown, ..now })?;
    }
    Ok(0)
}
