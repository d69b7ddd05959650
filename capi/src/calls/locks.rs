//! lock files
//!
//! Locks apply among all users of the file system that keeps them. Passthrough and memory keep none
//! themselves, so their locks apply within this process. Record locks by F_SETLK belong to the
//! process, so that its threads never wait for each other. Locks by F_OFD_SETLK and flock(2) belong
//! to the open file. See defuse_fcntl(3) for record locks.

use std::ffi::c_int;
use std::sync::Arc;

use defuse_direct::{CallError, FileDescription, LockFamily, Result};
use defuse_fs::{Buffer, Errno, Lock, LockType};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::memory::OutPointer;
use crate::state::{LibraryState, succeed};

/// Locks the whole of an open file, flock(2). `operation` is LOCK_SH, LOCK_EX or LOCK_UN. With
/// LOCK_NB it fails with EWOULDBLOCK instead of waiting.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_flock(fd: c_int, operation: c_int) -> c_int {
    succeed(|state| {
        let typ = match operation & !libc::LOCK_NB {
            libc::LOCK_SH => LockType::Read,
            libc::LOCK_EX => LockType::Write,
            libc::LOCK_UN => LockType::Unlock,
            _ => return Err(Errno::EINVAL.into()),
        };
        let lock = Lock { typ, start: 0, end: u64::MAX, pid: 0 };
        take(state, &*state.file(fd)?, LockFamily::Flock, lock, operation & libc::LOCK_NB == 0)
    })
}

/// Locks `length` bytes from the file position on for the process, lockf(3). `command` is F_LOCK,
/// F_TLOCK, F_ULOCK or F_TEST.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lockf(fd: c_int, command: c_int, length: libc::off_t) -> c_int {
    succeed(|state| {
        let file = state.file(fd)?;
        let typ = if command == libc::F_ULOCK { LockType::Unlock } else { LockType::Write };
        let range = (0, length);
        let (start, end) = state.client.lock_range(&state.task, &file, libc::SEEK_CUR, range)?;
        let lock = Lock { typ, start, end, pid: 0 };
        match command {
            libc::F_TEST => {
                let found =
                    state.client.test_lock(&state.task, &file, LockFamily::Process, lock)?;
                found.map_or(Ok(()), |_| Err(Errno::EACCES.into()))
            }
            libc::F_LOCK | libc::F_TLOCK | libc::F_ULOCK => {
                take(state, &file, LockFamily::Process, lock, command == libc::F_LOCK)
            }
            _ => Err(Errno::EINVAL.into()),
        }
    })
}

/// The variable argument of fcntl(2): a number, or a pointer to a lock.
///
/// In the ABIs of Linux listed here, C passes it like a named argument.
#[repr(transparent)]
pub struct FcntlArgument(OutPointer<libc::flock>);

const _: () = assert!(
    cfg!(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")),
    "on this architecture, see how variable arguments are passed before defuse_fcntl is used"
);

impl FcntlArgument {
    /// The argument as a number: an `int`, whose upper half is undefined.
    pub fn number(&self) -> c_int {
        self.0.address() as c_int
    }
}

/// Executes a command of fcntl(2) for record locks.
pub(super) fn record(
    state: &LibraryState,
    file: &Arc<FileDescription>,
    command: c_int,
    argument: &FcntlArgument,
) -> Result<c_int> {
    let family = match command {
        libc::F_GETLK | libc::F_SETLK | libc::F_SETLKW => LockFamily::Process,
        libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => LockFamily::OpenFile,
        _ => return Err(Errno::EINVAL.into()),
    };
    let raw = argument.0.get()?;
    if family == LockFamily::OpenFile && raw.l_pid != 0 {
        return Err(Errno::EINVAL.into());
    }
    let typ = match c_int::from(raw.l_type) {
        libc::F_RDLCK => LockType::Read,
        libc::F_WRLCK => LockType::Write,
        libc::F_UNLCK => LockType::Unlock,
        _ => return Err(Errno::EINVAL.into()),
    };
    let range = (raw.l_start, raw.l_len);
    let (start, end) = state.client.lock_range(&state.task, file, raw.l_whence.into(), range)?;
    let lock = Lock { typ, start, end, pid: 0 };
    match command {
        libc::F_GETLK | libc::F_OFD_GETLK => {
            let found = state.client.test_lock(&state.task, file, family, lock)?;
            argument.0.put(describe_lock(raw, family, found))?;
        }
        _ => {
            let waits = command == libc::F_SETLKW || command == libc::F_OFD_SETLKW;
            take(state, file, family, lock, waits)?;
        }
    }
    Ok(0)
}

/// The result of `F_GETLK` for `request`.
fn describe_lock(request: libc::flock, family: LockFamily, found: Option<Lock>) -> libc::flock {
    let Some(found) = found else {
        return libc::flock { l_type: libc::F_UNLCK as i16, ..request };
    };
    let typ = if found.typ == LockType::Read { libc::F_RDLCK } else { libc::F_WRLCK };
    let endless = found.end >= i64::MAX as u64;
    libc::flock {
        l_type: typ as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: found.start as i64,
        l_len: if endless { 0 } else { (found.end - found.start + 1) as i64 },
        l_pid: if family == LockFamily::Process { found.pid as i32 } else { -1 },
    }
}

/// Sets a lock. If `wait` is set, waits until it is available, or until a signal arrives.
fn take(
    state: &LibraryState,
    file: &Arc<FileDescription>,
    family: LockFamily,
    lock: Lock,
    wait: bool,
) -> Result<()> {
    let at_once = state.client.set_lock(&state.task, file, family, lock);
    if !wait || at_once != Err(CallError::Errno(Errno::EAGAIN)) {
        return at_once;
    }
    // A condition variable does not return on a signal; poll(2) does.
    let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let ended = Arc::new(ended.map_err(|errno| Errno::from_raw(errno.raw_os_error()))?);
    let (answers, answer) = std::sync::mpsc::channel();
    let tell = Arc::clone(&ended);
    let callback = Box::new(move |result: Result<usize, Errno>, _: Buffer| {
        // The receiver exists until it has the answer.
        let _ = answers.send(result);
        let _ = rustix::io::write(&*tell, &1u64.to_ne_bytes());
    });
    let client = &state.client;
    let pending = client.wait_for_lock_then(&state.task, file, family, lock, Some(callback))?;
    if poll(&mut [PollFd::new(&*ended, PollFlags::IN)], None).is_err() {
        pending.cancel();
    }
    let result = answer.recv().unwrap_or(Err(Errno::EIO));
    Ok(result.map(drop)?)
}
