//! System calls without a safe wrapper: record locks, mappings, and a child process.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

/// The lock commands of fcntl(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockCommand {
    Set,
    SetWait,
    OfdSet,
}

/// Type of a lock: `F_RDLCK`, `F_WRLCK`, `F_UNLCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FcntlLockType {
    Read,
    Write,
    Unlock,
}

fn flock(kind: FcntlLockType, start: i64, len: i64) -> libc::flock {
    let kind = match kind {
        FcntlLockType::Read => libc::F_RDLCK,
        FcntlLockType::Write => libc::F_WRLCK,
        FcntlLockType::Unlock => libc::F_UNLCK,
    };
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

/// Locks `len` bytes from `start`, where 0 means to the end, fcntl(2).
pub(crate) fn lock(
    fd: impl AsFd,
    command: LockCommand,
    kind: FcntlLockType,
    start: i64,
    len: i64,
) -> io::Result<()> {
    let command = match command {
        LockCommand::Set => libc::F_SETLK,
        LockCommand::SetWait => libc::F_SETLKW,
        LockCommand::OfdSet => libc::F_OFD_SETLK,
    };
    let lock = flock(kind, start, len);
    // SAFETY: the kernel only reads the structure, which outlives the call.
    let result = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), command, &raw const lock) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The lock that conflicts (`F_GETLK`): start, length and process; `None` if there is none.
pub(super) fn test_lock(
    fd: impl AsFd,
    kind: FcntlLockType,
    start: i64,
    len: i64,
) -> io::Result<Option<(i64, i64, i32)>> {
    let mut lock = flock(kind, start, len);
    // SAFETY: the kernel writes only into the structure, which outlives the call.
    let result = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let free = lock.l_type == libc::F_UNLCK as libc::c_short;
    Ok((!free).then_some((lock.l_start, lock.l_len, lock.l_pid)))
}

/// A child process that runs a function and exits with its result.
pub(crate) struct ForkedChild(libc::pid_t);

impl ForkedChild {
    /// Starts the process. Other threads do not exist in the child, so `run` should make little
    /// more than system calls. A panic exits with 255.
    pub fn start(run: impl FnOnce() -> u8) -> io::Result<ForkedChild> {
        // SAFETY: the child runs `run` and leaves by `_exit`, so no destructor and no exit handler
        // of the parent runs twice; glibc keeps its allocator usable across fork.
        match unsafe { libc::fork() } {
            0 => {
                let run = std::panic::AssertUnwindSafe(run);
                let status = std::panic::catch_unwind(run).unwrap_or(255);
                // SAFETY: ends this process; nothing is accessed after it.
                unsafe { libc::_exit(status.into()) }
            }
            pid if pid > 0 => Ok(ForkedChild(pid)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Waits for the exit. Returns the exit status, or an error if a signal ended the process.
    pub fn wait(self) -> io::Result<u8> {
        let mut status = 0;
        loop {
            // SAFETY: `status` outlives the call, and the process is a child that was not waited
            // for, because this method consumes it.
            if unsafe { libc::waitpid(self.0, &raw mut status, 0) } == self.0 {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        match libc::WIFEXITED(status) {
            true => Ok(libc::WEXITSTATUS(status) as u8),
            false => Err(io::Error::other("the child was killed")),
        }
    }
}

/// Makes `SIGALRM` interrupt this process after `milliseconds`, without restarting system calls.
/// For a child process only: handler and timer belong to the whole process.
pub(super) fn interrupt_after(milliseconds: i64) {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: a zeroed sigaction is valid; the handler does nothing, which is safe in a signal
    // handler; all structures outlive the calls.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        libc::sigaction(libc::SIGALRM, &raw const action, ptr::null_mut());
        let mut timer: libc::itimerval = std::mem::zeroed();
        timer.it_value.tv_usec = milliseconds * 1000;
        libc::setitimer(libc::ITIMER_REAL, &raw const timer, ptr::null_mut());
    }
}

/// A mapping of a file, mmap(2). Accesses copy, so there is no reference into shared memory.
pub(crate) struct TestMapping {
    start: *mut u8,
    len: usize,
}

impl TestMapping {
    /// Maps the first `len` bytes of `fd` writable, shared or private.
    pub fn new(fd: impl AsFd, len: usize, shared: bool) -> io::Result<TestMapping> {
        let flags = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = fd.as_fd().as_raw_fd();
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(TestMapping { start: start.cast(), len })
    }

    /// Number of bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies `len` bytes at `offset`, which must be in a page that the file reaches (otherwise
    /// SIGBUS).
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        // SAFETY: in bounds by the assertion; volatile, because the file may change concurrently.
        (offset..offset + len).map(|at| unsafe { self.start.add(at).read_volatile() }).collect()
    }

    /// Stores `bytes` at `offset`, which must be in a page that the file reaches (otherwise
    /// SIGBUS).
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        for (at, &byte) in bytes.iter().enumerate() {
            // SAFETY: in bounds by the assertion; volatile, because others see the file.
            unsafe { self.start.add(offset + at).write_volatile(byte) };
        }
    }

    /// msync(2) with `MS_SYNC`.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping.
        let result = unsafe { libc::msync(self.start.cast(), self.len, libc::MS_SYNC) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for TestMapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, and no reference into it exists.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}
