//! open, openat, openat2, creat.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use defuse_direct::{FileDescription, OpenHow, ResolveFlags, WalkStart};
use defuse_fs::{Errno, FileKind};

use crate::machine::descriptors::{close, keep_above, memory};
use crate::machine::inside::InsideGuard;
use crate::machine::sys;
use crate::process::opened_by::OpenPath;
use crate::process::state::{self, RunProcess};
use crate::process::table::DescriptorEntry;
use crate::process::zone;
use crate::serve::call::{CallFailure, CallResult, KernelCall, ProgramCall, TRIES, call_waiting};
use crate::serve::path::{PathOrigin, PathTarget};
use crate::serve::{lower_files, nodes, path};

pub fn open(call: &ProgramCall<'_>) -> CallResult {
    let how =
        OpenHow { flags: call.args[1] as u32, mode: call.args[2] as u32, ..OpenHow::default() };
    open_one(call, None, 0, how)
}

pub fn creat(call: &ProgramCall<'_>) -> CallResult {
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    open_one(
        call,
        None,
        0,
        OpenHow { flags: flags as u32, mode: call.args[1] as u32, ..OpenHow::default() },
    )
}

pub fn openat(call: &ProgramCall<'_>) -> CallResult {
    let how =
        OpenHow { flags: call.args[2] as u32, mode: call.args[3] as u32, ..OpenHow::default() };
    open_one(call, Some(0), 1, how)
}

pub fn openat2(call: &ProgramCall<'_>) -> CallResult {
    if call.args[3] < 24 {
        return Err(CallFailure::Pass);
    }
    let [flags, mode, resolve] = sys::load::<[u64; 3]>(call.args[2])?;
    // The kernel refuses what is not known, by the same words.
    let (Ok(flags), Ok(mode)) = (u32::try_from(flags), u32::try_from(mode)) else {
        return Err(CallFailure::Pass);
    };
    open_one(call, Some(0), 1, OpenHow { flags, mode, resolve: ResolveFlags(resolve) })
}

fn open_one(call: &ProgramCall<'_>, dir: Option<usize>, path: usize, how: OpenHow) -> CallResult {
    let target = call.target(dir, path, false)?;
    let how = match target.entry_if_whole() {
        Some(entry) if entry.backed => return Err(reopen(call, path, entry, how)),
        // Opened once more, as the links of /proc do it.
        Some(_) => OpenHow { flags: how.flags & !(libc::O_NOFOLLOW | libc::O_CREAT) as u32, ..how },
        None => how,
    };
    let by = name_opened(call.process, &target);
    for _ in 0..TRIES {
        match call.client().open(call.task(), target.as_walk_start(), target.path, how) {
            Ok(file) => return give_number(call, file, how.flags, by),
            Err(defuse_direct::CallError::Errno(Errno::ENXIO)) => {}
            Err(stop) => return Err(stop.into()),
        }
        if let Some(by_kernel) = special(call, &target, how)? {
            return Err(by_kernel.into());
        }
    }
    Err(Errno::ENXIO.into())
}

/// Fifos and devices: the kernel has the object behind the inode, so it is opened there: the file
/// itself if it is in a directory of the kernel, or a node of the same kind in a directory of this
/// run. `None` if the name leads to a file by now. The path is walked once: the file that the
/// kernel opens and the later reports about it are of the same inode.
fn special(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    how: OpenHow,
) -> Result<Option<KernelCall>, CallFailure> {
    let file = path_only(call, target, how.flags)?;
    let stat = call.client().fstat(call.task(), &file)?;
    match stat.attr.kind {
        FileKind::Fifo | FileKind::CharDevice | FileKind::BlockDevice => {}
        FileKind::Socket => return Err(Errno::ENXIO.into()),
        _ => return Ok(None),
    }
    let is_last_kept = how.flags & libc::O_NOFOLLOW as u32 != 0;
    let held = match lower_files::special(call, &full_path(call, target), &stat, is_last_kept) {
        Ok(Some(held)) => held,
        Ok(None) => nodes::node(call, &stat).map_err(|_| Errno::ENXIO)?,
        // The name leads to another file by now.
        Err(CallFailure::Errno(Errno::ENXIO | Errno::ENOENT)) => return Ok(None),
        Err(fail) => return Err(fail),
    };
    let entry = Some(as_entry(call, target, file));
    // The only link left to follow is the link of the descriptor.
    const DONE: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
    let args = [libc::AT_FDCWD as u64, 0, u64::from(how.flags & !DONE as u32), 0, 0, 0];
    let (path, number) = (held.path(), libc::SYS_openat);
    Ok(Some(KernelCall { number, args, path, held: Some(held), entry }))
}

/// Opens the inode of a path (`O_PATH`).
fn path_only(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    flags: u32,
) -> Result<Arc<FileDescription>, CallFailure> {
    let flags = libc::O_PATH as u32 | flags & libc::O_NOFOLLOW as u32;
    let how = OpenHow { flags, ..OpenHow::default() };
    Ok(call.client().open(call.task(), target.as_walk_start(), target.path, how)?)
}

/// The entry of a file that the kernel opens for the program.
fn as_entry(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    file: Arc<FileDescription>,
) -> Arc<DescriptorEntry> {
    let cells = file.arena_cells().map(|cells| call.process.shared.index(cells));
    let by = name_opened(call.process, target);
    Arc::new(DescriptorEntry::new(file, true, by, cells))
}

/// Opens what `entry` has open once more, by a link of /proc in the argument `path`: the kernel
/// does that with what it has open itself.
fn reopen(
    call: &ProgramCall<'_>,
    path: usize,
    entry: &Arc<DescriptorEntry>,
    how: OpenHow,
) -> CallFailure {
    if how.flags & libc::O_NOFOLLOW as u32 != 0 {
        return CallFailure::Pass;
    }
    let target = PathTarget { start: PathOrigin::Entry(Arc::clone(entry)), path: b"", magic: true };
    let text = sys::string(call.args[path]).ok().and_then(|text| CString::new(text).ok());
    let (Some(text), Ok(file)) = (text, path_only(call, &target, 0)) else {
        return CallFailure::Pass;
    };
    let entry = as_entry(call, &target, file);
    let (flags, mode) = (u64::from(how.flags), u64::from(how.mode));
    let args = [libc::AT_FDCWD as u64, 0, flags, mode, 0, 0];
    KernelCall { number: libc::SYS_openat, args, path: text, held: None, entry: Some(entry) }.into()
}

/// Notes that the kernel has opened `fd`, which is `entry`; returns what the program gets.
pub fn record_open(call: &ProgramCall<'_>, fd: i32, entry: Arc<DescriptorEntry>) -> i64 {
    let Some(_inside) = InsideGuard::enter() else { return i64::from(fd) };
    let limit = call.process.limit.load(std::sync::atomic::Ordering::Relaxed);
    if fd as u32 >= limit || call.process.view().table.set(fd, entry).is_err() {
        close(fd);
        return sys::failure(Errno::EMFILE);
    }
    i64::from(fd)
}

/// Has the kernel open a file for the program, if the number may be among ours: it is noted then.
/// `None` for other calls.
pub fn pass_to_kernel(call: &ProgramCall<'_>) -> Option<i64> {
    let limit = call.process.limit.load(std::sync::atomic::Ordering::Relaxed);
    let may_be_ours = opens(call.number) && i64::from(limit) > i64::from(call.process.floor);
    may_be_ours.then(|| record_number(call, call_waiting(call.number, call.args)))
}

/// Notes the number of a file that the kernel has opened for the program; returns it.
pub fn record_number(call: &ProgramCall<'_>, value: i64) -> i64 {
    if value >= 0 && opens(call.number) {
        zone::set_of_program(call.process.floor, value as i32, true);
    }
    value
}

fn opens(number: u64) -> bool {
    [libc::SYS_open, libc::SYS_creat, libc::SYS_openat, libc::SYS_openat2]
        .contains(&(number as i64))
}

/// The path by which an open file is named later.
fn name_opened(process: &'static RunProcess, target: &PathTarget<'_>) -> OpenPath {
    let from = match &target.start {
        _ if target.path.starts_with(b"/") || process.client.may_be_inside(target.path) => {
            return OpenPath::from_absolute(target.path.to_vec());
        }
        PathOrigin::Entry(entry) => entry.opened_by.clone(),
        PathOrigin::Kernel(path) => OpenPath::from_absolute(path.clone()),
        PathOrigin::Cwd => OpenPath::work_dir(process.task().cwd()),
    };
    from.join(target.path)
}

/// The absolute path of a target.
pub fn full_path(call: &ProgramCall<'_>, target: &PathTarget<'_>) -> Vec<u8> {
    name_opened(call.process, target).path(call.client(), call.task())
}

/// Gives an open file the lowest number that is free.
pub fn give_number(
    call: &ProgramCall<'_>,
    file: Arc<FileDescription>,
    flags: u32,
    by: OpenPath,
) -> CallResult {
    let process = call.process;
    let backed = file.backing().is_some() && !file.is_path();
    let cloexec = flags & libc::O_CLOEXEC as u32 != 0;
    let first = if backed { file.take_descriptor() } else { None };
    let has_flags = first.is_some();
    let fd = match first {
        Some(fd) => std::os::fd::IntoRawFd::into_raw_fd(fd),
        None => lowest_number(process, &file, backed, cloexec)?,
    };
    if fd as u32 >= process.limit.load(std::sync::atomic::Ordering::Relaxed) {
        close(fd);
        return Err(Errno::EMFILE.into());
    }
    const SETTABLE: i32 = libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;
    if backed && !has_flags && flags & SETTABLE as u32 != 0 {
        let set = libc::F_SETFL as u64;
        let _ = sys::plain(libc::SYS_fcntl, fd as u64, set, u64::from(flags & SETTABLE as u32));
    }
    let cells = file.arena_cells().map(|cells| process.shared.index(cells));
    let entry = Arc::new(DescriptorEntry::new(file, backed, by, cells));
    match call.process.view().table.set(fd, entry) {
        Ok(_) => Ok(i64::from(fd)),
        Err(_) => {
            close(fd);
            Err(Errno::EMFILE.into())
        }
    }
}

/// A descriptor with the lowest number that is free. The program's descriptor and the file system's
/// are of one open file, whose position the kernel then locks: 40 ns for a read, where another open
/// takes 4 us.
fn lowest_number(
    process: &'static RunProcess,
    file: &FileDescription,
    backed: bool,
    cloexec: bool,
) -> Result<i32, Errno> {
    let source = match file.backing() {
        Some(fd) if backed => std::os::fd::AsRawFd::as_raw_fd(&**fd),
        _ => process.placeholder.load(std::sync::atomic::Ordering::Relaxed),
    };
    let how = if cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD } as u64;
    Ok(sys::plain(libc::SYS_fcntl, source as u64, how, 0)? as i32)
}

/// The path in the kernel's name space of the bytes of `path`, which lies in a mount: the path of
/// its backing file, or of a copy in memory, which stays open. `None` if it lies in no mount.
pub fn kernel_path(call: &ProgramCall<'_>, path: &[u8]) -> Option<CString> {
    let how = OpenHow { flags: libc::O_CLOEXEC as u32, ..OpenHow::default() };
    let file = call.client().open(call.task(), WalkStart::Cwd, path, how).ok()?;
    if let Some(fd) = file.backing() {
        let number = std::os::fd::AsRawFd::as_raw_fd(&**fd);
        return CString::new(path::path_of_descriptor(number)?).ok();
    }
    let copy = copy_to(memory(c"defuse").ok()?, call, &file).ok()?;
    let kept = keep_above(std::os::fd::AsRawFd::as_raw_fd(&copy), call.process.floor, true);
    CString::new(format!("/proc/self/fd/{}", kept.ok()?)).ok()
}

/// A copy of a file in the new memory `fd`.
pub fn copy_to(
    fd: OwnedFd,
    call: &ProgramCall<'_>,
    file: &FileDescription,
) -> Result<OwnedFd, CallFailure> {
    let mut out = File::from(fd);
    let mut piece = vec![0; 256 << 10];
    let mut at = 0;
    loop {
        let len = call.client().pread(call.task(), file, &mut piece, at)?;
        if len == 0 {
            break;
        }
        out.write_all(&piece[..len]).map_err(Errno::from)?;
        at += len as u64;
    }
    Ok(out.into())
}

/// The path that dlopen(3) is to load instead of `path`, where that lies in a mount: the kernel's
/// own path of the bytes, or a copy in memory.
pub fn library(path: &[u8]) -> Option<CString> {
    let process = state::get()?;
    let _inside = InsideGuard::enter()?;
    let args = [0; 6];
    let call = ProgramCall { process, number: 0, args: &args };
    kernel_path(&call, path)
}
