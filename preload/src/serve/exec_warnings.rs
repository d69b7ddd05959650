//! Warnings about programs that the run does not serve once they are executed.
//!
//! Nothing here decides how a program is executed. A program is looked at once in a run for each
//! user, because that takes time; the shared memory notes which programs were. Calls that a program
//! makes without the C library are looked for when it begins (`catch/own_calls.rs`).

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use defuse_direct::FileDescription;

use crate::machine::descriptors::take_owned;
use crate::machine::message::write_line;
use crate::machine::sys;
use crate::process::user_namespace::{IdKind, to_server};
use crate::serve::call::ProgramCall;
use crate::serve::elf;

/// A program as execveat(2) names it.
#[derive(Clone, Copy)]
pub struct ProgramPath<'a> {
    /// The directory where a relative path begins.
    pub dir: i32,
    /// The path; empty for the file `dir` itself, with `AT_EMPTY_PATH`.
    pub path: &'a [u8],
    /// `AT_EMPTY_PATH` and `AT_SYMLINK_NOFOLLOW`.
    pub flags: i32,
}

impl<'a> ProgramPath<'a> {
    /// A program as execve(2) names it.
    pub fn new(path: &'a [u8]) -> Self {
        ProgramPath { dir: libc::AT_FDCWD, path, flags: 0 }
    }
}

/// Looks at a program of the kernel's name space that is about to be executed by `name`.
pub fn check_program(call: &ProgramCall<'_>, at: ProgramPath<'_>, name: &[u8]) {
    if let Some(stat) = stat(at) {
        check_new_program(call, &file_of(&stat), &stat, at, name, elf::MAX_SCRIPTS);
    }
}

/// The numbers that tell this file apart.
fn file_of(stat: &libc::stat) -> [u64; 4] {
    [stat.st_dev, stat.st_ino, stat.st_ctime as u64, stat.st_ctime_nsec as u64]
}

/// Looks at the program `file` of a mount, which the kernel executes by the descriptor `fd`.
pub fn check_mounted_program(call: &ProgramCall<'_>, file: &FileDescription, fd: i32, name: &[u8]) {
    let at = ProgramPath { dir: fd, path: b"", flags: libc::AT_EMPTY_PATH };
    let known = call.client().fstat(call.task(), file);
    if let (Ok(known), Some(stat)) = (known, stat(at)) {
        let ctime = known.attr.ctime;
        let file = [known.dev, known.attr.st_ino, ctime.secs as u64, ctime.nanos.into()];
        check_new_program(call, &file, &stat, at, name, elf::MAX_SCRIPTS);
    }
}

/// Looks at a program unless a process of this user has: `file` tells files apart. A script's
/// interpreter may be a script, at most `scripts` times.
fn check_new_program(
    call: &ProgramCall<'_>,
    file: &[u64; 4],
    stat: &libc::stat,
    at: ProgramPath<'_>,
    name: &[u8],
    scripts: usize,
) {
    const EXECUTABLE: u32 = 0o111;
    let is_program = stat.st_mode & libc::S_IFMT == libc::S_IFREG && stat.st_mode & EXECUTABLE != 0;
    if !is_program || !call.process.shared.is_new_program(mark(call, file)) {
        return;
    }
    let mut head = [0; elf::HEAD];
    let program = open_program(at);
    let len = program.as_ref().and_then(|file| file.read_at(&mut head, 0).ok());
    let head = &head[..len.unwrap_or(0)];
    if let Some((interpreter, _)) = elf::script(head) {
        // The kernel executes it, unless it finds too many.
        if scripts > 0
            && let at = ProgramPath::new(interpreter)
            && let Some(stat) = self::stat(at)
        {
            check_new_program(call, &file_of(&stat), &stat, at, interpreter, scripts - 1);
        }
    } else if changes_user(call, stat, at) {
        warn_of_another_user(call, name);
    } else if elf::is_foreign(head) {
        warn(call, name, "a program of 32 bits or of another machine", "`defuse mount` serves it");
    } else if let (Some(program), false) = (program, call.process.plan.dispatch) {
        let more = |bytes: &mut [u8], at| program.read_at(bytes, at).unwrap_or(0);
        if elf::is_static(head, more) {
            warn(
                call,
                name,
                "a static program, or one of another C library",
                "--dispatch serves it",
            );
        }
    }
}

/// A number for this file and this user; 0 for none.
fn mark(call: &ProgramCall<'_>, file: &[u64; 4]) -> u64 {
    let who = call.task().credentials();
    let user = [who.uid, who.real_uid, who.gid, who.real_gid].map(u64::from);
    // FNV-1a, a word at a time.
    let step = |hash: u64, word: &u64| (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    file.iter().chain(&user).fold(0xcbf2_9ce4_8422_2325, step).max(1)
}

/// Prints a warning about a program of this `kind`, and the next step.
fn warn(call: &ProgramCall<'_>, name: &[u8], kind: &str, next: &str) {
    write_line(&format!(
        "{}: {kind}, which is not served: it sees the files of the kernel in place of {}. {next}",
        String::from_utf8_lossy(name),
        call.process.targets()
    ));
}

fn warn_of_another_user(call: &ProgramCall<'_>, name: &[u8]) {
    write_line(&format!(
        "{}: runs with the rights of another user or group (set-user-id, set-group-id or \
         capabilities), so that the loader ignores LD_PRELOAD: it is not served, and sees the files \
         of the kernel in place of {}",
        String::from_utf8_lossy(name),
        call.process.targets()
    ));
}

/// True if the kernel puts the loader into secure mode (`AT_SECURE`, getauxval(3)): the program is
/// executed with rights that its caller's real user does not have.
fn changes_user(call: &ProgramCall<'_>, stat: &libc::stat, at: ProgramPath<'_>) -> bool {
    let who = call.task().credentials();
    let is_set = |bits: u32| stat.st_mode & bits == bits && !are_bits_ignored(at);
    let other = |kind, id| to_server(kind, id).unwrap_or(u32::MAX);
    let user = if is_set(libc::S_ISUID) { other(IdKind::Users, stat.st_uid) } else { who.uid };
    let is_group_set = is_set(libc::S_ISGID | libc::S_IXGRP);
    let group = if is_group_set { other(IdKind::Groups, stat.st_gid) } else { who.gid };
    let may_gain = || who.real_uid != 0 && has_capabilities(at) && !are_bits_ignored(at);
    user != who.real_uid || group != who.real_gid || may_gain()
}

/// True if the file gives capabilities to a user who executes it, capabilities(7).
fn has_capabilities(at: ProgramPath<'_>) -> bool {
    let Some(fd) = open_at(at, libc::O_PATH) else { return false };
    let path = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
    let name = c"security.capability".as_ptr() as u64;
    let args = [path.as_ptr() as u64, name, 0, 0, 0, 0];
    sys::pass(libc::SYS_getxattr as u64, &args) > 0
}

/// True if the kernel ignores the set-id bits and capabilities of the file: its file system is
/// mounted `nosuid`, or the process has renounced it (`PR_SET_NO_NEW_PRIVS`).
fn are_bits_ignored(at: ProgramPath<'_>) -> bool {
    if sys::plain(libc::SYS_prctl, libc::PR_GET_NO_NEW_PRIVS as u64, 0, 0) == Ok(1) {
        return true;
    }
    let Some(fd) = open_at(at, libc::O_PATH) else { return false };
    // `struct statfs`: 120 bytes, of which the eleventh word has the flags.
    let mut space = [0u64; 15];
    let args = [fd.as_raw_fd() as u64, space.as_mut_ptr() as u64, 0, 0, 0, 0];
    let result = sys::check(sys::pass(libc::SYS_fstatfs as u64, &args)).is_ok();
    result && space[10] & libc::ST_NOSUID != 0
}

/// The attributes of the file that the kernel finds at `at`.
fn stat(ProgramPath { dir, path, flags }: ProgramPath<'_>) -> Option<libc::stat> {
    let path = CString::new(path).ok()?;
    let mut stat: libc::stat = sys::zeroed();
    let flags = flags & (libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW);
    let args = [dir as u64, path.as_ptr() as u64, &raw mut stat as u64, flags as u64, 0, 0];
    sys::check(sys::pass(libc::SYS_newfstatat as u64, &args)).ok().map(|_| stat)
}

/// Opens the file at `at`. For an empty path with `AT_EMPTY_PATH`, duplicates the descriptor.
fn open_at(ProgramPath { dir, path, flags }: ProgramPath<'_>, how: i32) -> Option<OwnedFd> {
    let path = CString::new(path).ok()?;
    let how = (how | libc::O_CLOEXEC) as u64;
    let (number, args) = match flags & libc::AT_EMPTY_PATH != 0 && path.is_empty() {
        true => (libc::SYS_fcntl, [dir as u64, libc::F_DUPFD_CLOEXEC as u64, 0, 0, 0, 0]),
        false => (libc::SYS_openat, [dir as u64, path.as_ptr() as u64, how, 0, 0, 0]),
    };
    sys::check(sys::pass(number as u64, &args)).ok().map(|fd| take_owned(fd as i32))
}

/// Opens a program of the kernel's name space for reading, if this process may execute it. It may
/// change its user by that.
pub fn open_program(at: ProgramPath<'_>) -> Option<File> {
    let fd = open_at(at, libc::O_RDONLY)?;
    let empty = c"".as_ptr() as u64;
    let how = (libc::AT_EACCESS | libc::AT_EMPTY_PATH) as u64;
    let args = [fd.as_raw_fd() as u64, empty, libc::X_OK as u64, how, 0, 0];
    sys::check(sys::pass(libc::SYS_faccessat2 as u64, &args)).ok()?;
    Some(File::from(fd))
}
