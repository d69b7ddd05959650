//! The core: decides if a system call concerns a mount, and serves it.

mod attributes;
pub mod call;
pub mod cwd;
mod data;
mod descriptors;
mod directory;
pub mod elf;
mod exec;
mod exec_environment;
mod exec_warnings;
pub mod handlers;
mod lower_files;
mod mappings;
mod names;
mod nodes;
pub mod open;
pub mod path;
mod poll;
mod rings;
mod sockets;
mod watch;
mod xattrs;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_fs::Errno;

use crate::machine::inside::{self, InsideGuard};
use crate::machine::message::write_line;
use crate::machine::sys;
use crate::process::fork;
use crate::process::run_memory::CallOutcome;
use crate::process::state::{self, RunMount, RunProcess};
use crate::process::table::DescriptorEntry;
use call::{CallFailure, CallResult, KernelCall, ProgramCall, TRIES, call_waiting};
use handlers::{CallHandler, NativeAccess, handler};

/// Serves a call; `None` if it is the kernel's.
#[inline]
pub fn call(number: u64, args: &[u64; 6]) -> Option<i64> {
    let process = state::get()?;
    if fork::is_new_child() {
        fork::begin_unseen_child(process);
    }
    let Some(handler) = handler(number) else {
        if process.plan.report {
            note_missed(process, number, args);
        }
        return None;
    };
    if inside::is_inside() {
        return None;
    }
    if rings::are_in_use() {
        rings::forget_closed(process, number, args);
    }
    let served = match handler {
        CallHandler::Fd(native, run) => serve_by_descriptor(process, (number, args), native, run),
        CallHandler::Any(run) => {
            let call = ProgramCall { process, number, args };
            let inside = InsideGuard::enter()?;
            let mut result = run(&call);
            if matches!(result, Err(CallFailure::Errno(Errno::ESTALE))) {
                result = walk_again(&call, run);
            }
            drop(inside);
            finish(&call, result)
        }
    };
    if process.plan.report {
        let fate = if served.is_some() { CallOutcome::Served } else { CallOutcome::Passed };
        process.shared.count(number, fate);
    }
    served
}

/// A call whose file another process removed after its names were walked. From the beginning, as
/// the kernel does it, and a few times more, because it is as fast as the other process.
#[cold]
fn walk_again(call: &ProgramCall<'_>, run: fn(&ProgramCall<'_>) -> CallResult) -> CallResult {
    let mut result = Err(CallFailure::Errno(Errno::ESTALE));
    for _ in 0..TRIES {
        call.client().forget_names();
        result = run(call);
        if !matches!(result, Err(CallFailure::Errno(Errno::ESTALE))) {
            break;
        }
    }
    result
}

/// Counts a call that nothing here serves, if it names a descriptor of ours: the kernel refuses it.
#[cold]
fn note_missed(process: &'static RunProcess, number: u64, args: &[u64; 6]) {
    if is_missed(process, number, args) {
        process.shared.count(number, CallOutcome::Missed);
    }
}

fn is_missed(process: &'static RunProcess, number: u64, args: &[u64; 6]) -> bool {
    let known = u16::try_from(number).is_ok_and(|n| defuse_preload_plan::calls::name(n).is_some());
    known && handler(number).is_none() && process.view().table.has(args[0] as i32)
}

/// Counts a call once more, by the site that it came from: its place among the sites of all objects
/// of the plan.
#[cold]
pub fn count_site(number: u64, args: &[u64; 6], site: usize, served: bool) {
    let Some(process) = state::get() else { return };
    let fate = match served {
        true => CallOutcome::Served,
        false if is_missed(process, number, args) => CallOutcome::Missed,
        false => CallOutcome::Passed,
    };
    process.shared.count_site(site, fate);
}

#[inline]
fn serve_by_descriptor(
    process: &'static RunProcess,
    (number, args): (u64, &[u64; 6]),
    native: NativeAccess,
    run: fn(&ProgramCall<'_>, &DescriptorEntry) -> CallResult,
) -> Option<i64> {
    let found = process.view().table.get(args[0] as i32)?;
    let entry = found.as_ref()?;
    if native.has(entry) {
        return None;
    }
    let call = ProgramCall { process, number, args };
    let inside = InsideGuard::enter()?;
    let result = run(&call, entry);
    drop(inside);
    finish(&call, result)
}

/// Prints once why files cannot be used any more: their server is gone.
#[cold]
fn warn_of_dead_server(process: &'static RunProcess) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    let is_dead = |mount: &&RunMount| {
        mount.is_gone || mount.relay.as_ref().is_some_and(|relay| relay.is_dead())
    };
    let Some(mount) = process.mounts.iter().find(is_dead) else { return };
    if !REPORTED.swap(true, Ordering::Relaxed) {
        write_line(&format!(
            "{}: the process that served it has ended, and its files are gone for this program: start \
             it anew",
            String::from_utf8_lossy(&mount.target)
        ));
    }
}

/// The value for the program; `None` if the kernel has to execute the call as it is.
fn finish(call: &ProgramCall<'_>, result: CallResult) -> Option<i64> {
    match result {
        Ok(value) => Some(value),
        Err(CallFailure::Errno(errno)) => {
            if errno == Errno::ENOTCONN {
                warn_of_dead_server(call.process);
            }
            Some(sys::failure(errno))
        }
        Err(CallFailure::Pass) => open::pass_to_kernel(call),
        Err(CallFailure::Outside(outside)) => path::kernel(call, outside)
            .map(|value| open::record_number(call, value))
            .or_else(|| open::pass_to_kernel(call)),
        Err(CallFailure::Interrupted(after)) => Some(after.value()),
        Err(CallFailure::Lower(entry, lock)) => Some(call_on_lower(call, &entry, lock)),
        Err(CallFailure::Kernel(by_kernel)) => {
            let KernelCall { number, mut args, path, held, entry } = *by_kernel;
            args[1] = path.as_ptr() as u64;
            let value = call_waiting(number as u64, &args);
            drop(held);
            Some(match entry {
                Some(entry) if value >= 0 => open::record_open(call, value as i32, entry),
                _ => value,
            })
        }
    }
}

/// Has the kernel execute the call on the lower open file, with `lock` as the third argument.
fn call_on_lower(
    call: &ProgramCall<'_>,
    entry: &DescriptorEntry,
    mut lock: Option<libc::flock>,
) -> i64 {
    let Some(lower) = &entry.lower else { return sys::failure(Errno::EBADF) };
    let mut args = *call.args;
    args[0] = lower.as_raw_fd() as u64;
    if let Some(lock) = &mut lock {
        args[2] = std::ptr::from_mut(lock) as u64;
    }
    call_waiting(call.number, &args)
}
