//! The state that a process has from the process that started it, for daemons: system calls that
//! neither the standard library nor rustix has.

use std::fs;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::process::{Resource, Rlimit, setrlimit};

/// Unblocks all signals in the calling thread, and thus in threads that it starts.
pub fn unblock_signals() {
    // SAFETY: all bytes of `sigset_t` may be zero; sigemptyset writes the whole set, and the mask
    // that is changed is this thread's own.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Marks all descriptors from 3 on close-on-exec but `kept`: programs that this process starts do
/// not inherit them. Nothing is closed in this process. Descriptors that other threads open
/// meanwhile may be left out.
pub fn close_on_exec(kept: &[RawFd]) {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return };
    let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let descriptors: Vec<RawFd> = names.filter(|fd| *fd > 2 && !kept.contains(fd)).collect();
    for fd in descriptors {
        // SAFETY: fcntl takes three numbers. The flag closes nothing here, and a number that is
        // closed meanwhile gives EBADF.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// The bits of the descriptors 0 to 2 that were closed when this process began.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Runs before `main`: the standard library opens /dev/null in place of closed descriptors.
#[used]
// SAFETY: the loader calls functions of initialization, with arguments that are not needed.
#[unsafe(link_section = ".init_array")]
static NOTE_CLOSED: extern "C" fn() = note_closed;

extern "C" fn note_closed() {
    for fd in 0..3 {
        // SAFETY: fcntl takes three numbers, and changes nothing by this command.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            CLOSED.fetch_or(1 << fd, Ordering::Relaxed);
        }
    }
}

/// Leaves the descriptors 0 to 2 closed in programs that it starts, if they were closed when this
/// process began.
pub fn keep_closed() {
    let closed = CLOSED.load(Ordering::Relaxed);
    for fd in (0..3).filter(|fd| closed & 1 << fd != 0) {
        // SAFETY: as in `close_on_exec`.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Sets these limits for the program of `command`, in place of the limits that this process has
/// when it starts the program.
pub fn limit(command: &mut Command, limits: Vec<(Resource, Rlimit)>) {
    let set = move || {
        for (resource, limit) in &limits {
            setrlimit(*resource, *limit)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec this makes system calls of one kind, prlimit(2), and neither
    // allocates nor locks.
    unsafe { command.pre_exec(set) };
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    use super::*;

    #[test]
    fn descriptors_but_those_that_are_kept_are_closed_by_an_execution() {
        let (first, second) = rustix::pipe::pipe().unwrap();
        for pipe in [first.as_fd(), second.as_fd()] {
            fcntl_setfd(pipe, FdFlags::empty()).unwrap();
        }
        close_on_exec(&[second.as_raw_fd()]);
        assert_eq!(fcntl_getfd(&first).unwrap(), FdFlags::CLOEXEC);
        assert_eq!(fcntl_getfd(&second).unwrap(), FdFlags::empty());
    }

    #[test]
    fn a_program_has_its_own_limits() {
        let own = rustix::process::getrlimit(Resource::Fsize);
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -Sf"]);
        limit(&mut command, vec![(Resource::Fsize, Rlimit { current: Some(5120), ..own })]);
        assert_eq!(command.output().unwrap().stdout, b"10\n");
        assert_eq!(rustix::process::getrlimit(Resource::Fsize), own);
    }

    #[test]
    fn a_thread_unblocks_what_it_inherited() {
        let mask = || {
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            status.lines().find_map(|line| line.strip_prefix("SigBlk:\t").map(str::to_owned))
        };
        // SAFETY: as in `unblock_signals`; the set has one signal more.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
        }
        assert_eq!(mask().as_deref(), Some("0000000000004000"));
        let inherited = std::thread::spawn(move || {
            unblock_signals();
            mask()
        });
        assert_eq!(inherited.join().unwrap().as_deref(), Some("0000000000000000"));
        unblock_signals();
    }
}
