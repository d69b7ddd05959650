//! Making, removing, renaming and reading names.

use std::sync::atomic::Ordering;

use defuse_fs::{Errno, RenameFlags};

use crate::machine::sys;
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::path::PathTarget;
use crate::serve::{cwd, path};

pub fn mkdir(call: &ProgramCall<'_>) -> CallResult {
    let at = usize::from(call.number as i64 == libc::SYS_mkdirat);
    let target = call.target((at == 1).then_some(0), at, false)?;
    call.client().mkdir(
        call.task(),
        target.as_walk_start(),
        target.path,
        call.args[at + 1] as u32,
    )?;
    Ok(0)
}

pub fn mknod(call: &ProgramCall<'_>) -> CallResult {
    let at = usize::from(call.number as i64 == libc::SYS_mknodat);
    let target = call.target((at == 1).then_some(0), at, false)?;
    let (mode, device) = (call.args[at + 1] as u32, u64::from(call.args[at + 2] as u32));
    call.client().mknod(call.task(), target.as_walk_start(), target.path, mode, device)?;
    Ok(0)
}

pub fn unlink(call: &ProgramCall<'_>) -> CallResult {
    let (dir, path, is_dir) = match call.number as i64 {
        libc::SYS_rmdir => (None, 0, true),
        libc::SYS_unlink => (None, 0, false),
        _ if call.int(2) & !libc::AT_REMOVEDIR != 0 => return Err(CallFailure::Pass),
        _ => (Some(0), 1, call.int(2) & libc::AT_REMOVEDIR != 0),
    };
    if is_dir {
        return count_change(call, rmdir_inside(call, (dir, path)));
    }
    let target = call.target(dir, path, false)?;
    call.client().unlink(call.task(), target.as_walk_start(), target.path)?;
    Ok(0)
}

fn rmdir_inside(call: &ProgramCall<'_>, (dir, path): (Option<usize>, usize)) -> CallResult {
    let target = call.target(dir, path, false)?;
    call.client().rmdir(call.task(), target.as_walk_start(), target.path)?;
    Ok(0)
}

/// The descriptors and paths of a call with two.
fn list_two(call: &ProgramCall<'_>, plain: i64) -> [(Option<usize>, usize); 2] {
    if call.number as i64 == plain { [(None, 0), (None, 1)] } else { [(Some(0), 1), (Some(2), 3)] }
}

/// The two targets of a call; where one is surely the kernel's, it stands for itself: the client
/// fails with `EXDEV`.
fn find_both<'a>(
    call: &ProgramCall<'a>,
    plain: i64,
    empty: bool,
) -> Result<[PathTarget<'a>; 2], CallFailure> {
    let [from, to] = list_two(call, plain);
    for (one, other) in [(from, to), (to, from)] {
        // An argument that is no path fails, whatever file system the other path leads to.
        if let Err(errno) = sys::string(call.args[one.1]) {
            let target = call.target(other.0, other.1, empty)?;
            let found = call.client().stat(call.task(), target.as_walk_start(), target.path, false);
            let outside = matches!(found, Err(defuse_direct::CallError::Outside(_)));
            return Err(if outside { CallFailure::Pass } else { errno.into() });
        }
    }
    match (call.target(from.0, from.1, empty), call.target(to.0, to.1, false)) {
        (Ok(from), Ok(to)) => Ok([from, to]),
        (Err(_), Err(_)) => Err(CallFailure::Pass),
        (Ok(target), Err(_)) | (Err(_), Ok(target)) => {
            // One lies in the kernel for sure. If the other is ours, they are two file systems.
            let parent = target.path.iter().rposition(|&byte| byte == b'/');
            let dir = parent.map_or(&b"."[..], |at| &target.path[..at.max(1)]);
            call.client().stat(call.task(), target.as_walk_start(), dir, true)?;
            Err(Errno::EXDEV.into())
        }
    }
}

/// Has the kernel execute a call here if it is the kernel's, and counts that it may have made a
/// path lead to another directory.
fn count_change(call: &ProgramCall<'_>, served: CallResult) -> CallResult {
    let value = match served {
        Err(CallFailure::Pass) => call.kernel(),
        Err(CallFailure::Outside(outside)) => {
            path::kernel(call, outside).unwrap_or_else(|| call.kernel())
        }
        other => return other,
    };
    if value >= 0 {
        // After the change: a thread that looked at the directory before it has the former count.
        call.process.shared.path_changes().fetch_add(1, Ordering::Release);
    }
    Ok(value)
}

pub fn rename(call: &ProgramCall<'_>) -> CallResult {
    count_change(call, rename_inside(call))
}

pub fn link(call: &ProgramCall<'_>) -> CallResult {
    count_change(call, link_inside(call))
}

pub fn symlink(call: &ProgramCall<'_>) -> CallResult {
    count_change(call, symlink_inside(call))
}

fn rename_inside(call: &ProgramCall<'_>) -> CallResult {
    let flags = if call.number as i64 == libc::SYS_renameat2 { call.args[4] as u32 } else { 0 };
    let [from, to] = find_both(call, libc::SYS_rename, false)?;
    let (from, to) = ((from.as_walk_start(), from.path), (to.as_walk_start(), to.path));
    call.client().rename(call.task(), from, to, RenameFlags(flags))?;
    Ok(0)
}

fn link_inside(call: &ProgramCall<'_>) -> CallResult {
    let flags = if call.number as i64 == libc::SYS_linkat { call.int(4) } else { 0 };
    if flags & !(libc::AT_EMPTY_PATH | libc::AT_SYMLINK_FOLLOW) != 0 {
        return Err(CallFailure::Pass);
    }
    let [from, to] = find_both(call, libc::SYS_link, flags & libc::AT_EMPTY_PATH != 0)?;
    let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
    match from.entry_if_whole() {
        // By AT_EMPTY_PATH, or by /proc with AT_SYMLINK_FOLLOW: how a file without a name gets one.
        Some(entry) if follow || !from.magic => {
            call.client().flink(call.task(), entry.file(), (to.as_walk_start(), to.path))?;
        }
        Some(_) => return Err(Errno::EXDEV.into()),
        None => {
            let (from, to) = ((from.as_walk_start(), from.path), (to.as_walk_start(), to.path));
            call.client().link(call.task(), from, to, follow)?;
        }
    }
    Ok(0)
}

fn symlink_inside(call: &ProgramCall<'_>) -> CallResult {
    let at = call.number as i64 == libc::SYS_symlinkat;
    let target = if at { call.target(Some(1), 2, false) } else { call.target(None, 1, false) }?;
    let text = sys::string(call.args[0])?;
    call.client().symlink(call.task(), text, target.as_walk_start(), target.path)?;
    Ok(0)
}

/// The target of the link whose path is in argument `at`.
fn link_of(call: &ProgramCall<'_>, at: usize) -> Result<Vec<u8>, CallFailure> {
    let target = call.target((at == 1).then_some(0), at, true)?;
    let (client, task) = (call.client(), call.task());
    Ok(match target.entry_if_whole() {
        Some(entry) if target.magic => entry.opened_by.path(client, task),
        Some(entry) => client.freadlink(task, entry.file())?,
        None if target.magic => cwd::path(call.process).ok_or(Errno::ENOENT)?,
        None => client.readlink(task, target.as_walk_start(), target.path)?,
    })
}

pub fn readlink(call: &ProgramCall<'_>) -> CallResult {
    let at = usize::from(call.number as i64 == libc::SYS_readlinkat);
    let text = match path::executable(sys::string(call.args[at]).unwrap_or_default()) {
        Some(program) => program.to_vec(),
        None => link_of(call, at)?,
    };
    let room = call.args[at + 2] as i32;
    if room <= 0 {
        return Err(Errno::EINVAL.into());
    }
    let len = text.len().min(room as usize);
    sys::program_memory(call.args[at + 1], len)?.copy_from_slice(&text[..len]);
    Ok(len as i64)
}
