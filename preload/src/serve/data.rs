//! Data of open files: reading, writing, copying, mapping.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;

use defuse_direct::{IoFlags, LockFamily};
use defuse_fs::{Errno, FileKind, IoctlArgs, Lock, LockType, OpenFlags};

use crate::machine::{inside, pending, pid, sys};
use crate::process::table::DescriptorEntry;
use crate::serve::call::{
    AfterSignal, CallFailure, CallResult, ProgramCall, call_waiting_inside, is_directory,
    is_regular,
};
use crate::serve::mappings;

/// `RLIMIT_FSIZE` was hit: the kernel sends a signal beside the error.
pub fn raise_at_limit<T>(result: defuse_direct::Result<T>) -> Result<T, CallFailure> {
    result.map_err(|stop| {
        if stop.errno() == Errno::EFBIG {
            let (pid, tid) = (pid::read_pid(), sys::plain(libc::SYS_gettid, 0, 0, 0));
            let tid = tid.unwrap_or(0) as u64;
            let _ = sys::plain(libc::SYS_tgkill, pid as u64, tid, libc::SIGXFSZ as u64);
        }
        stop.into()
    })
}

pub fn read(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    let room = sys::program_memory(call.args[1], call.len(2))?;
    Ok(call.client().read(call.task(), entry.file(), room)? as i64)
}

pub fn write(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    let bytes = sys::bytes(call.args[1], call.len(2))?;
    Ok(raise_at_limit(call.client().write(call.task(), entry.file(), bytes))? as i64)
}

fn offset(value: u64) -> Result<u64, Errno> {
    if value > i64::MAX as u64 { Err(Errno::EINVAL) } else { Ok(value) }
}

pub fn pread(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    let (room, at) = (sys::program_memory(call.args[1], call.len(2))?, offset(call.args[3])?);
    Ok(call.client().pread(call.task(), entry.file(), room, at)? as i64)
}

pub fn pwrite(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    let (bytes, at) = (sys::bytes(call.args[1], call.len(2))?, offset(call.args[3])?);
    Ok(raise_at_limit(call.client().pwrite(call.task(), entry.file(), bytes, at))? as i64)
}

/// The pieces of a vectored call. `EINVAL` beyond `IOV_MAX`.
fn pieces(call: &ProgramCall<'_>) -> Result<Vec<libc::iovec>, Errno> {
    let count = call.args[2] as usize;
    if count > 1024 {
        return Err(Errno::EINVAL);
    }
    (0..count as u64).map(|at| sys::load(call.args[1] + at * 16)).collect()
}

fn transfer_vectors(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    at: Option<u64>,
    flags: u32,
    writes: bool,
) -> CallResult {
    let pieces = pieces(call)?;
    let (client, task, flags) = (call.client(), call.task(), IoFlags(flags));
    if writes {
        let slice = |piece: &libc::iovec| sys::bytes(piece.iov_base as u64, piece.iov_len);
        let slices = pieces.iter().map(|piece| slice(piece).map(IoSlice::new));
        let slices = slices.collect::<Result<Vec<_>, _>>()?;
        return Ok(raise_at_limit(client.pwritev2(task, entry.file(), &slices, at, flags))? as i64);
    }
    let slice = |piece: &libc::iovec| sys::program_memory(piece.iov_base as u64, piece.iov_len);
    let slices = pieces.iter().map(|piece| slice(piece).map(IoSliceMut::new));
    let mut slices = slices.collect::<Result<Vec<_>, _>>()?;
    Ok(client.preadv2(task, entry.file(), &mut slices, at, flags)? as i64)
}

pub fn readv(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    transfer_vectors(call, entry, None, 0, false)
}

pub fn writev(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    transfer_vectors(call, entry, None, 0, true)
}

pub fn preadv(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    transfer_vectors(call, entry, Some(offset(call.args[3])?), 0, false)
}

pub fn pwritev(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    transfer_vectors(call, entry, Some(offset(call.args[3])?), 0, true)
}

/// The offset of the second generation: -1 stands for the position.
fn optional(value: u64) -> Result<Option<u64>, Errno> {
    if value == u64::MAX { Ok(None) } else { offset(value).map(Some) }
}

pub fn preadv2(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    transfer_vectors(call, entry, optional(call.args[3])?, call.args[5] as u32, false)
}

pub fn pwritev2(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    transfer_vectors(call, entry, optional(call.args[3])?, call.args[5] as u32, true)
}

pub fn lseek(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    let to =
        call.client().lseek(call.task(), entry.file(), call.args[1] as i64, call.args[2] as u32)?;
    Ok(to as i64)
}

/// The kernel begins reads and writes that finish later. It can do nothing with a placeholder, and
/// programs learn that from the first failure. Programs have another way where the kernel lacks
/// such calls, and check for them before: so the calls are missing in a run with a mount whose
/// files have no descriptors of their bytes.
pub fn asynchronous(call: &ProgramCall<'_>) -> CallResult {
    let all = call.process.mounts.iter().all(|mount| mount.backs);
    if all { Err(CallFailure::Pass) } else { Err(Errno::ENOSYS.into()) }
}

/// The kernel itself truncates and syncs a file that only it has open.
fn check_kernel_access(entry: &DescriptorEntry) -> Result<(), CallFailure> {
    if entry.is_inode() { Err(CallFailure::Pass) } else { Ok(()) }
}

/// Advice may be ignored; that it is about an open file is all that is checked.
pub fn advise(_: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    if entry.file().is_path() { Err(Errno::EBADF.into()) } else { Ok(0) }
}

pub fn sync(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    check_kernel_access(entry)?;
    let data = call.number as i64 != libc::SYS_fsync;
    let synced = mappings::write_back_file(call, entry)
        .and_then(|()| Ok(call.client().fsync(call.task(), entry.file(), data)?));
    if synced.is_err() {
        mappings::note_failed_sync(entry);
    }
    synced.map(|()| 0)
}

pub fn syncfs(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    check_kernel_access(entry)?;
    mappings::write_back_all(call)?;
    call.client().syncfs(call.task(), entry.file())?;
    Ok(0)
}

/// sync(2): the mounts of the run here, and all other file systems by the kernel.
pub fn sync_all(call: &ProgramCall<'_>) -> CallResult {
    // sync(2) reports no errors. The end of a mapping does.
    let _ = mappings::write_back_all(call);
    call.client().sync(call.task());
    Err(CallFailure::Pass)
}

pub fn ftruncate(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    check_kernel_access(entry)?;
    raise_at_limit(call.client().ftruncate(call.task(), entry.file(), call.args[1] as i64))?;
    Ok(0)
}

pub fn fallocate(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    check_kernel_access(entry)?;
    let range = (call.args[2] as i64, call.args[3] as i64);
    raise_at_limit(call.client().fallocate(call.task(), entry.file(), call.args[1] as u32, range))?;
    Ok(0)
}

/// tee(2) and vmsplice(2) are about pipes, and no file of ours is one.
pub fn refuse_pipe(_: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    Err(if entry.file().is_path() { Errno::EBADF } else { Errno::EINVAL }.into())
}

pub fn ioctl(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    const FIOCLEX: u32 = 0x5451;
    const FIONCLEX: u32 = 0x5450;
    let cmd = call.args[1] as u32;
    if entry.file().is_path() {
        return Err(Errno::EBADF.into());
    }
    if cmd == FIOCLEX || cmd == FIONCLEX {
        let flag = u64::from(cmd == FIOCLEX);
        return Ok(sys::plain(libc::SYS_fcntl, call.args[0], libc::F_SETFD as u64, flag)?);
    }
    if let Some(answer) = common_ioctl(call, entry, cmd) {
        return answer;
    }
    // Size and direction as `_IOC` encodes them: bit 30 is set if data goes in, bit 31 if it goes
    // out.
    let size = (cmd >> 16 & 0x3fff) as usize;
    let input = if cmd & 1 << 30 != 0 { sys::bytes(call.args[2], size)? } else { &[] };
    let output_len = if cmd & 1 << 31 != 0 { size } else { 0 };
    let args = IoctlArgs { cmd, arg: call.args[2], input, output_len, dir: false, compat32: false };
    let reply = call.client().ioctl(call.task(), entry.file(), &args)?;
    let out = reply.output.get(..output_len.min(reply.output.len())).unwrap_or_default();
    sys::program_memory(call.args[2], out.len())?.copy_from_slice(out);
    Ok(i64::from(reply.result))
}

/// Commands that the kernel answers for every file system, some of which take no address.
fn common_ioctl(call: &ProgramCall<'_>, entry: &DescriptorEntry, cmd: u32) -> Option<CallResult> {
    const FIGETBSZ: u32 = 2;
    const FIONREAD: u32 = 0x541b;
    const FIONBIO: u32 = 0x5421;
    const FIOASYNC: u32 = 0x5452;
    const FS_IOC_FIEMAP: u32 = 0xc020_660b;
    const FICLONE: u32 = 0x4004_9409;
    const FICLONERANGE: u32 = 0x4020_940d;
    const FIDEDUPERANGE: u32 = 0xc018_9436;
    let (client, task, file) = (call.client(), call.task(), entry.file());
    let stat = || client.fstat(task, file).map(|stat| stat.attr).map_err(CallFailure::from);
    let put = |value: i32| sys::store(call.args[2], value).map(|()| 0).map_err(CallFailure::from);
    Some(match cmd {
        FICLONE | FICLONERANGE | FIDEDUPERANGE | FS_IOC_FIEMAP => Err(Errno::EOPNOTSUPP.into()),
        FIONREAD if file.kind() == FileKind::Regular => {
            stat().and_then(|attr| put((attr.size as i64 - file.position() as i64) as i32))
        }
        FIGETBSZ => stat().and_then(|attr| put(attr.blksize as i32)),
        FIONBIO => sys::load::<i32>(call.args[2]).map_err(CallFailure::from).and_then(|on| {
            let flag = libc::O_NONBLOCK as u32;
            let flags = file.flags().0 & !flag | if on != 0 { flag } else { 0 };
            client.set_flags(task, file, flags)?;
            Ok(0)
        }),
        FIOASYNC => Err(Errno::ENOTTY.into()),
        _ => return None,
    })
}

pub fn flock(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    // Other processes may have this open file, and the lock is theirs as well.
    if entry.lower.is_some() {
        return Err(CallFailure::Lower(call.entry(0).ok_or(Errno::EBADF)?, None));
    }
    let how = call.int(1);
    let typ = match how & !libc::LOCK_NB {
        libc::LOCK_SH => LockType::Read,
        libc::LOCK_EX => LockType::Write,
        libc::LOCK_UN => LockType::Unlock,
        _ => return Err(Errno::EINVAL.into()),
    };
    let lock = Lock { typ, start: 0, end: u64::MAX, pid: 0 };
    take_lock(call, entry, LockFamily::Flock, lock, how & libc::LOCK_NB == 0)
}

/// Takes a lock; with `wait`, as soon as it can be had, or a signal came.
pub fn take_lock(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    family: LockFamily,
    lock: Lock,
    wait: bool,
) -> CallResult {
    if !wait || lock.typ == LockType::Unlock {
        call.client().set_lock(call.task(), entry.file(), family, lock)?;
        return Ok(0);
    }
    let mut pause = Duration::from_millis(1);
    loop {
        let pending = call.client().wait_for_lock(call.task(), entry.file(), family, lock)?;
        while !pending.wait_timeout(LOCK_POLL) {
            inside::allow_forks();
            if pending::waits() {
                pending.cancel();
            }
        }
        match pending.wait().0 {
            // A file system in this process keeps no thread that waits: forks do not know of such a
            // thread.
            Err(Errno::EAGAIN) => {}
            Err(Errno::EINTR) if pending::waits() => {}
            other => return Ok(other.map(|_| 0)?),
        }
        if pending::waits() {
            return Err(CallFailure::Interrupted(AfterSignal::from_waiting_signal()));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOCK_POLL);
        inside::allow_forks();
    }
}

/// The longest interval between two tries of a lock request that waits.
const LOCK_POLL: Duration = Duration::from_millis(20);

// ---- copying ------------------------------------------------------------------------------

/// Most bytes that one call copies through memory: callers make another call for the rest.
const PIECE: usize = 1 << 20;

/// One end of a copy.
#[derive(Clone)]
struct CopySide {
    entry: Option<Arc<DescriptorEntry>>,
    fd: i32,
    offset: Option<u64>,
}

impl CopySide {
    fn new(call: &ProgramCall<'_>, fd: usize, pointer: u64) -> Result<Self, Errno> {
        let offset = if pointer == 0 { None } else { Some(offset(sys::load::<u64>(pointer)?)?) };
        let entry = call.entry(fd).filter(|entry| !entry.backed);
        Ok(CopySide { entry, fd: call.int(fd), offset })
    }

    fn read(&self, call: &ProgramCall<'_>, room: &mut [u8]) -> Result<usize, CallFailure> {
        let (client, task) = (call.client(), call.task());
        match (&self.entry, self.offset) {
            (Some(entry), None) => Ok(client.read(task, entry.file(), room)?),
            (Some(entry), Some(at)) => Ok(client.pread(task, entry.file(), room, at)?),
            (None, at) => {
                let args = [
                    self.fd as u64,
                    room.as_mut_ptr() as u64,
                    room.len() as u64,
                    at.unwrap_or(0),
                    0,
                    0,
                ];
                let number = if at.is_some() { libc::SYS_pread64 } else { libc::SYS_read };
                // It may be a pipe or a socket.
                Ok(call_waiting_inside(number as u64, &args)? as usize)
            }
        }
    }

    fn write(&self, call: &ProgramCall<'_>, bytes: &[u8]) -> Result<usize, CallFailure> {
        let (client, task) = (call.client(), call.task());
        match (&self.entry, self.offset) {
            (Some(entry), None) => raise_at_limit(client.write(task, entry.file(), bytes)),
            (Some(entry), Some(at)) => raise_at_limit(client.pwrite(task, entry.file(), bytes, at)),
            (None, at) => {
                let args = [
                    self.fd as u64,
                    bytes.as_ptr() as u64,
                    bytes.len() as u64,
                    at.unwrap_or(0),
                    0,
                    0,
                ];
                let number = if at.is_some() { libc::SYS_pwrite64 } else { libc::SYS_write };
                // It may be a pipe or a socket.
                Ok(call_waiting_inside(number as u64, &args)? as usize)
            }
        }
    }

    /// Writes as much as possible. Of a file that has no room for all bytes, the kernel, too, hears
    /// of the reason: a limit has its signal.
    fn write_all(&self, call: &ProgramCall<'_>, bytes: &[u8]) -> Result<usize, CallFailure> {
        let mut done = self.write(call, bytes)?;
        while self.entry.is_some() && done > 0 && done < bytes.len() {
            let rest = CopySide { offset: self.offset.map(|at| at + done as u64), ..self.clone() };
            match rest.write(call, &bytes[done..]) {
                Ok(0) | Err(_) => break,
                Ok(more) => done += more,
            }
        }
        Ok(done)
    }

    /// Fails for a file with `O_APPEND`, where sendfile(2) and splice(2) cannot write.
    fn check_not_appending(&self) -> Result<(), Errno> {
        let appends = |entry: &Arc<DescriptorEntry>| entry.file().flags().has(OpenFlags::APPEND);
        if self.entry.as_ref().is_some_and(appends) { Err(Errno::EINVAL) } else { Ok(()) }
    }

    /// Takes back what was read and could not be written.
    fn give_back(&self, call: &ProgramCall<'_>, bytes: i64) {
        if self.offset.is_some() || bytes == 0 {
            return;
        }
        match &self.entry {
            Some(entry) => {
                let _ = call.client().lseek(call.task(), entry.file(), -bytes, 1);
            }
            None => {
                let _ = sys::plain(libc::SYS_lseek, self.fd as u64, -bytes as u64, 1);
            }
        }
    }
}

/// Copies up to `len` bytes; puts the offsets back where they came from.
fn copy(
    call: &ProgramCall<'_>,
    mut from: CopySide,
    mut to: CopySide,
    len: usize,
    pointers: (u64, u64),
) -> CallResult {
    let mut piece = vec![0; len.min(128 << 10)];
    let mut done = 0;
    while done < len.min(PIECE) {
        let wanted = piece.len().min(len - done);
        let got = match from.read(call, &mut piece[..wanted]) {
            Ok(0) => break,
            Ok(got) => got,
            Err(fail) if done == 0 => return Err(fail),
            Err(_) => break,
        };
        let put = match to.write_all(call, &piece[..got]) {
            Ok(put) => put,
            Err(fail) => {
                from.give_back(call, got as i64);
                if done == 0 {
                    return Err(fail);
                }
                break;
            }
        };
        from.give_back(call, (got - put) as i64);
        from.offset = from.offset.map(|at| at + put as u64);
        to.offset = to.offset.map(|at| at + put as u64);
        done += put;
        if put < got || got < wanted {
            break;
        }
    }
    for (end, pointer) in [(&from, pointers.0), (&to, pointers.1)] {
        if let Some(at) = end.offset {
            sys::store(pointer, at)?;
        }
    }
    Ok(done as i64)
}

pub fn sendfile(call: &ProgramCall<'_>) -> CallResult {
    let from = CopySide::new(call, 1, call.args[2])?;
    let to = CopySide::new(call, 0, 0)?;
    if from.entry.is_none() && to.entry.is_none() {
        return Err(CallFailure::Pass);
    }
    to.check_not_appending()?;
    copy(call, from, to, call.len(3), (call.args[2], 0))
}

pub fn copy_file_range(call: &ProgramCall<'_>) -> CallResult {
    let from = CopySide::new(call, 0, call.args[1])?;
    let to = CopySide::new(call, 2, call.args[3])?;
    match (&from.entry, &to.entry) {
        (None, None) => Err(CallFailure::Pass),
        _ if call.args[5] != 0 => Err(Errno::EINVAL.into()),
        (Some(src), Some(dst)) => {
            let len = call.len(4);
            let (src, dst) = ((&**src.file(), from.offset), (&**dst.file(), to.offset));
            let done = call.client().copy_file_range(call.task(), src, dst, len);
            let done = raise_at_limit(done)?;
            for (offset, pointer) in [(from.offset, call.args[1]), (to.offset, call.args[3])] {
                if let Some(at) = offset {
                    sys::store(pointer, at + done as u64)?;
                }
            }
            Ok(done as i64)
        }
        // A file that the kernel knows by its bytes, and one of a mount that it does not: between
        // two mounts of one kind the kernel copies, too.
        _ => match (call.entry(0), call.entry(2)) {
            (Some(src), Some(dst)) if is_regular(&src) && is_regular(&dst) => {
                let pointers = (call.args[1], call.args[3]);
                copy(call, from, to, call.len(4), pointers)
            }
            (Some(src), Some(dst)) if is_directory(&src) || is_directory(&dst) => {
                Err(Errno::EISDIR.into())
            }
            (Some(_), Some(_)) => Err(Errno::EINVAL.into()),
            // The error between two kinds of file system of the kernel.
            _ => Err(Errno::EXDEV.into()),
        },
    }
}

pub fn splice(call: &ProgramCall<'_>) -> CallResult {
    let from = CopySide::new(call, 0, call.args[1])?;
    let to = CopySide::new(call, 2, call.args[3])?;
    if from.entry.is_none() && to.entry.is_none() {
        return Err(CallFailure::Pass);
    }
    to.check_not_appending()?;
    // A pipe holds 64 KiB by default; more would wait for a reader that may be this thread.
    copy(call, from, to, call.len(4).min(64 << 10), (call.args[1], call.args[3]))
}

// ---- mappings -----------------------------------------------------------------------------

/// A file without a descriptor of its bytes is mapped by its server's memory, or by a copy in
/// memory.
pub fn mmap(call: &ProgramCall<'_>) -> CallResult {
    let entry = match call.int(3) & libc::MAP_ANONYMOUS {
        0 => call.entry(4).filter(|entry| !entry.backed),
        _ => None,
    };
    match entry {
        Some(entry) => mappings::map(call, &entry),
        // The mapping that it replaces may be ours.
        None if call.int(3) & libc::MAP_FIXED != 0 => mappings::unmap(call),
        None => Err(CallFailure::Pass),
    }
}

pub fn mremap(call: &ProgramCall<'_>) -> CallResult {
    mappings::remap(call)
}

pub fn munmap(call: &ProgramCall<'_>) -> CallResult {
    mappings::unmap(call)
}

pub fn mprotect(call: &ProgramCall<'_>) -> CallResult {
    mappings::protect(call)
}

pub fn msync(call: &ProgramCall<'_>) -> CallResult {
    mappings::sync(call)
}
