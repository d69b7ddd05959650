//! The working directory, the umask, and who the process is.

use defuse_fs::Errno;

use crate::machine::sys;
use crate::process::state::RunProcess;
use crate::process::{credentials, kernel_cwd};
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::path;

pub fn chdir(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false);
    let done = match &target {
        Ok(target) => match target.entry_if_whole() {
            Some(entry) => call.client().fchdir(call.task(), entry.file()),
            None => call.client().chdir(call.task(), target.path),
        },
        Err(_) => return record_kernel_cwd(call, call.kernel()),
    };
    match done.map_err(CallFailure::from) {
        Ok(()) => record_mount_cwd(),
        Err(CallFailure::Outside(outside)) => {
            let value = path::kernel(call, outside).unwrap_or_else(|| call.kernel());
            record_kernel_cwd(call, value)
        }
        Err(fail) => Err(fail),
    }
}

pub fn fchdir(call: &ProgramCall<'_>) -> CallResult {
    match call.entry(0) {
        Some(entry) => {
            call.client().fchdir(call.task(), entry.file())?;
            record_mount_cwd()
        }
        None => record_kernel_cwd(call, call.kernel()),
    }
}

/// After the process went to a directory of a mount.
fn record_mount_cwd() -> CallResult {
    kernel_cwd::enter();
    Ok(0)
}

/// After the kernel went to another directory.
fn record_kernel_cwd(call: &ProgramCall<'_>, value: i64) -> CallResult {
    if value == 0 {
        kernel_cwd::record_leave();
        call.process.adopt_kernel_cwd();
    }
    Ok(value)
}

pub fn getcwd(call: &ProgramCall<'_>) -> CallResult {
    let path = call.client().getcwd(call.task())?;
    let room = sys::program_memory(call.args[0], call.args[1] as usize)?;
    let len = path.len() + 1;
    if room.len() < len {
        return Err(Errno::ERANGE.into());
    }
    room[..path.len()].copy_from_slice(&path);
    room[path.len()] = 0;
    Ok(len as i64)
}

/// The path of the working directory.
pub fn path(process: &'static RunProcess) -> Option<Vec<u8>> {
    let task = process.task();
    process.client.path_of_work_dir(task, &task.cwd()).ok()
}

/// A root of its own within a mount would need the kernel's help.
pub fn chroot(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false)?;
    call.client().stat(call.task(), target.as_walk_start(), target.path, true)?;
    Err(Errno::EPERM.into())
}

pub fn umask(call: &ProgramCall<'_>) -> CallResult {
    call.process.task().set_umask(call.args[0] as u32);
    Ok(call.kernel())
}

/// Calls that change who the thread is: the kernel does them, and every thread looks again.
pub fn credentials(call: &ProgramCall<'_>) -> CallResult {
    call.client().prepare_privilege_drop();
    let value = call.kernel();
    credentials::record_change();
    Ok(value)
}

/// unshare(2) and setns(2), by which a process may enter another user namespace.
pub fn namespaces(call: &ProgramCall<'_>) -> CallResult {
    let is_setns = call.number as i64 == libc::SYS_setns;
    let users = || std::fs::read_link("/proc/self/ns/user").ok();
    let before = is_setns.then(users);
    let value = call.kernel();
    let entered = match before {
        Some(before) => before != users(),
        None => call.args[0] & libc::CLONE_NEWUSER as u64 != 0,
    };
    if value == 0 && entered {
        call.process.enter_user_namespace();
    }
    Ok(value)
}

/// Goes to `path` before the program begins.
pub fn change_at_start(call: &ProgramCall<'_>, path: &[u8]) -> Result<(), Errno> {
    match call.client().chdir(call.task(), path) {
        Ok(()) => {
            kernel_cwd::enter();
            Ok(())
        }
        Err(defuse_direct::CallError::Errno(errno)) => Err(errno),
        Err(defuse_direct::CallError::Outside(_)) => {
            sys::check(call.kernel())?;
            call.process.adopt_kernel_cwd();
            Ok(())
        }
    }
}
