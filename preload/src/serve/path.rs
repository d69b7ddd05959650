//! Paths of a call: where they begin, and what the kernel does with those that lead out.

use std::ffi::CString;
use std::sync::{Arc, OnceLock};

use defuse_direct::{OutsidePaths, WalkStart, WorkDir};
use defuse_fs::Errno;

use crate::machine::{pid, sys, wait};
use crate::process::{state::RunProcess, table::DescriptorEntry};
use crate::serve::call::{CallFailure, CallResult, ProgramCall};

/// The start of a path.
pub enum PathOrigin {
    /// The working directory, or the root.
    Cwd,
    /// An open file of ours.
    Entry(Arc<DescriptorEntry>),
    /// A directory of the kernel, by its path.
    Kernel(Vec<u8>),
}

/// A path of a call, which may lead into a mount.
pub struct PathTarget<'a> {
    /// The start.
    pub start: PathOrigin,
    /// The path. Empty if it is the start itself.
    pub path: &'a [u8],
    /// It was a link of /proc to a descriptor.
    pub magic: bool,
}

impl PathTarget<'_> {
    /// The start, in the client's type.
    pub fn as_walk_start(&self) -> WalkStart<'_> {
        match &self.start {
            PathOrigin::Cwd => WalkStart::Cwd,
            PathOrigin::Entry(entry) if self.path.is_empty() => WalkStart::Itself(entry.file()),
            PathOrigin::Entry(entry) => WalkStart::Dir(entry.file()),
            PathOrigin::Kernel(path) => WalkStart::Path(path),
        }
    }

    /// The open file that it is by itself.
    pub fn entry_if_whole(&self) -> Option<&Arc<DescriptorEntry>> {
        match &self.start {
            PathOrigin::Entry(entry) if self.path.is_empty() => Some(entry),
            _ => None,
        }
    }
}

impl<'a> ProgramCall<'a> {
    /// The path in argument `path`, relative to the descriptor in argument `dir` (`None` for calls
    /// without one). With `empty` the path may be empty (`AT_EMPTY_PATH`).
    pub fn target(
        &self,
        dir: Option<usize>,
        path: usize,
        empty: bool,
    ) -> Result<PathTarget<'a>, CallFailure> {
        // An argument that is no address goes to the kernel, which returns the error.
        let path = sys::string(self.args[path]).map_err(|_| CallFailure::Pass)?;
        if let Some(program) = executable(path) {
            // A path without links, as the kernel returns it.
            if self.process.client.may_be_inside(program) {
                return Ok(PathTarget { start: PathOrigin::Cwd, path: program, magic: false });
            }
            let outside = OutsidePaths { path: Some(program.to_vec()), second: None };
            return Err(CallFailure::Outside(outside));
        }
        let dir = dir.map_or(libc::AT_FDCWD, |at| self.int(at));
        target(self.process, dir, path, empty)
    }
}

/// The path of the program, if that is a static one or lies in a mount: the kernel believes that it
/// executes the carrier, or memory.
static EXECUTABLE: OnceLock<Vec<u8>> = OnceLock::new();

/// Sets the path that `/proc/self/exe` leads to.
pub fn set_executable(path: Vec<u8>) {
    let _ = EXECUTABLE.set(path);
}

/// The target of `path` if that is the link of /proc to the program of this process, and the kernel
/// believes that it executes another one.
pub fn executable(path: &[u8]) -> Option<&'static [u8]> {
    let program = EXECUTABLE.get().map(Vec::as_slice)?;
    let who = path.strip_prefix(b"/proc/")?.strip_suffix(b"/exe")?;
    let number = std::str::from_utf8(who).ok().and_then(|who| who.parse::<i32>().ok());
    let is_own = matches!(who, b"self" | b"thread-self") || number == Some(pid::read_pid());
    is_own.then_some(program)
}

/// Where `path` begins, relative to the descriptor `dir`.
pub fn target<'a>(
    process: &'static RunProcess,
    dir: i32,
    path: &'a [u8],
    empty: bool,
) -> Result<PathTarget<'a>, CallFailure> {
    let cwd = |path| Ok(PathTarget { start: PathOrigin::Cwd, path, magic: false });
    let view = process.view();
    if path.first() == Some(&b'/') {
        return match magic(process, path) {
            Some(target) => Ok(target),
            None if is_of_kernel(process, path) => Err(CallFailure::Pass),
            None => cwd(path),
        };
    }
    if path.is_empty() && !empty {
        return Err(CallFailure::Pass);
    }
    if dir == libc::AT_FDCWD {
        if path.is_empty() {
            return cwd(b".");
        }
        return cwd(path);
    }
    if let Some(found) = view.table.get(dir) {
        let entry = found.clone().ok_or(CallFailure::Pass)?;
        return Ok(PathTarget { start: PathOrigin::Entry(entry), path, magic: false });
    }
    if process.client.may_be_inside(path) {
        return cwd(path);
    }
    if path.is_empty() {
        // The kernel's descriptor itself.
        return Err(CallFailure::Pass);
    }
    let directory = path_of_descriptor(dir).ok_or(CallFailure::Pass)?;
    let mut full = directory.clone();
    full.push(b'/');
    full.extend_from_slice(path);
    if process.client.may_be_inside(&full) {
        return Ok(PathTarget { start: PathOrigin::Kernel(directory), path, magic: false });
    }
    Err(CallFailure::Pass)
}

/// Paths that lead to no mount whatever links there are, and that programs use all the time.
fn is_of_kernel(process: &RunProcess, path: &[u8]) -> bool {
    let below = [&b"/proc/"[..], b"/sys/", b"/dev/"].iter().any(|top| path.starts_with(top));
    below && !process.client.may_be_inside(path)
}

/// The links of /proc and /dev that lead to descriptors and to the working directory.
fn magic<'a>(process: &'static RunProcess, path: &'a [u8]) -> Option<PathTarget<'a>> {
    let rest = path.strip_prefix(b"/dev/").map(|rest| match rest {
        b"stdin" => (&b"0"[..], true),
        b"stdout" => (&b"1"[..], true),
        b"stderr" => (&b"2"[..], true),
        _ => (rest.strip_prefix(b"fd/").unwrap_or_default(), true),
    });
    let (rest, _) = match rest {
        Some(found) => found,
        None => {
            let rest = path.strip_prefix(b"/proc/")?;
            let (who, rest) = split(rest);
            let number = std::str::from_utf8(who).ok().and_then(|who| who.parse::<i32>().ok());
            if !matches!(who, b"self" | b"thread-self") && number != Some(pid::read_pid()) {
                return None;
            }
            if let Some(rest) = rest.strip_prefix(b"cwd").filter(|r| r.is_empty() || r[0] == b'/') {
                let inside = matches!(&*process.task().cwd(), WorkDir::Inside(_));
                let rest = rest.strip_prefix(b"/").unwrap_or(rest);
                let path = if rest.is_empty() { b"." } else { rest };
                return inside.then_some(PathTarget { start: PathOrigin::Cwd, path, magic: true });
            }
            (rest.strip_prefix(b"fd/")?, true)
        }
    };
    let (number, rest) = split(rest);
    let fd = std::str::from_utf8(number).ok()?.parse::<i32>().ok()?;
    let entry = process.view().table.get(fd)?.clone()?;
    Some(PathTarget { start: PathOrigin::Entry(entry), path: rest, magic: true })
}

/// The first component, and what follows its slashes.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().position(|&byte| byte == b'/').unwrap_or(path.len());
    let (first, rest) = path.split_at(end);
    let start = rest.iter().position(|&byte| byte != b'/').unwrap_or(rest.len());
    (first, &rest[start..])
}

/// Where a descriptor of the kernel leads, as text.
pub fn path_of_descriptor(fd: i32) -> Option<Vec<u8>> {
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
    let path = std::os::unix::ffi::OsStringExt::into_vec(link.into_os_string());
    path.starts_with(b"/").then_some(path)
}

/// The arguments of a call that are paths: the first, and the second if there is one.
fn path_arguments(number: u64) -> (usize, Option<usize>) {
    match number as i64 {
        libc::SYS_rename | libc::SYS_link => (0, Some(1)),
        libc::SYS_renameat | libc::SYS_renameat2 | libc::SYS_linkat => (1, Some(3)),
        libc::SYS_symlink => (1, None),
        libc::SYS_symlinkat => (2, None),
        libc::SYS_openat
        | libc::SYS_openat2
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_fchmodat
        | 452
        | libc::SYS_fchownat
        | libc::SYS_futimesat
        | libc::SYS_utimensat
        | libc::SYS_mkdirat
        | libc::SYS_mknodat
        | libc::SYS_unlinkat
        | libc::SYS_readlinkat
        | libc::SYS_name_to_handle_at
        | 463..=466
        | 468
        | 469
        | libc::SYS_inotify_add_watch => (1, None),
        _ => (0, None),
    }
}

/// The call with the paths that the client found: the kernel does it. `None` if the program's
/// own paths are right, so that the call is passed on.
pub fn kernel(call: &ProgramCall<'_>, outside: OutsidePaths) -> Option<i64> {
    if outside.path.is_none() && outside.second.is_none() {
        return None;
    }
    let (first, second) = path_arguments(call.number);
    let mut args = *call.args;
    let text = |path: Option<Vec<u8>>| path.map(|path| CString::new(path).unwrap_or_default());
    let (one, two) = (text(outside.path), text(outside.second));
    if let Some(path) = &one {
        args[first] = path.as_ptr() as u64;
    }
    if let (Some(path), Some(at)) = (&two, second) {
        args[at] = path.as_ptr() as u64;
    }
    Some(match call.number as i64 {
        // A fifo may be there, or a device. A signal that came before was before the call.
        libc::SYS_open | libc::SYS_openat | libc::SYS_openat2 | libc::SYS_creat => {
            wait::pass(call.number, &args)
        }
        _ => sys::pass(call.number, &args),
    })
}

/// Calls at a directory and a path that are newer than this library: programs have other ways for
/// files of mounts.
pub fn refuse_unknown(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(Some(0), 1, true)?;
    match call.client().stat(call.task(), target.as_walk_start(), target.path, true) {
        Err(defuse_direct::CallError::Outside(outside)) => Err(CallFailure::Outside(outside)),
        // Also where the file is missing: the kernel would look elsewhere.
        _ => Err(Errno::ENOSYS.into()),
    }
}

/// Calls that no file system of ours can serve: refused where they name one.
pub fn refuse_unsupported(call: &ProgramCall<'_>) -> CallResult {
    let (dir, path) = match call.number as i64 {
        libc::SYS_fanotify_mark => (Some(3), 4),
        libc::SYS_name_to_handle_at => (Some(0), 1),
        libc::SYS_umount2 => (None, 0),
        _ => (None, 1),
    };
    let target = call.target(dir, path, true)?;
    match call.client().stat(call.task(), target.as_walk_start(), target.path, true) {
        Ok(_) => Err(Errno::EOPNOTSUPP.into()),
        // The kernel returns the error, or succeeds.
        Err(_) => Err(CallFailure::Pass),
    }
}
