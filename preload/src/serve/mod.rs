//! The core: decides if a system call concerns a mount, and serves it.

mod attributes;
mod below;
pub mod call;
pub mod cwd;
mod data;
mod descriptors;
mod directory;
pub mod elf;
mod exec;
mod exec_environment;
pub mod handlers;
mod leaving;
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

use crate::machine::inside::{self, Inside};
use crate::machine::message::say;
use crate::machine::sys;
use crate::process::fork;
use crate::process::run_memory::Fate;
use crate::process::state::{self, Process, RunMount};
use crate::process::table::Entry;
use call::{ByKernel, Call, Fail, Served, TRIES, waiting};
use handlers::{Handler, Native, handler};

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
        Handler::Fd(native, run) => by_descriptor(process, (number, args), native, run),
        Handler::Any(run) => {
            let call = Call { process, number, args };
            let inside = Inside::enter()?;
            let mut result = run(&call);
            if matches!(result, Err(Fail::Errno(Errno::ESTALE))) {
                result = walk_again(&call, run);
            }
            drop(inside);
            finish(&call, result)
        }
    };
    if process.plan.report {
        let fate = if served.is_some() { Fate::Served } else { Fate::Passed };
        process.shared.count(number, fate);
    }
    served
}

/// A call whose file another process removed after its names were walked. From the beginning, as the
/// kernel does it, and a few times more, because it is as fast as the other process.
#[cold]
fn walk_again(call: &Call<'_>, run: fn(&Call<'_>) -> Served) -> Served {
    let mut result = Err(Fail::Errno(Errno::ESTALE));
    for _ in 0..TRIES {
        call.client().forget_names();
        result = run(call);
        if !matches!(result, Err(Fail::Errno(Errno::ESTALE))) {
            break;
        }
    }
    result
}

/// Counts a call that nothing here serves, if it names a descriptor of ours: the kernel refuses it.
#[cold]
fn note_missed(process: &'static Process, number: u64, args: &[u64; 6]) {
    if is_missed(process, number, args) {
        process.shared.count(number, Fate::Missed);
    }
}

fn is_missed(process: &'static Process, number: u64, args: &[u64; 6]) -> bool {
    let known = u16::try_from(number).is_ok_and(|n| defuse_preload_plan::calls::name(n).is_some());
    known && handler(number).is_none() && process.view().table.has(args[0] as i32)
}

/// Counts a call once more, by the site that it came from: its place among those of all objects of
/// the plan.
#[cold]
pub fn count_site(number: u64, args: &[u64; 6], site: usize, served: bool) {
    let Some(process) = state::get() else { return };
    let fate = match served {
        true => Fate::Served,
        false if is_missed(process, number, args) => Fate::Missed,
        false => Fate::Passed,
    };
    process.shared.count_site(site, fate);
}

#[inline]
fn by_descriptor(
    process: &'static Process,
    (number, args): (u64, &[u64; 6]),
    native: Native,
    run: fn(&Call<'_>, &Entry) -> Served,
) -> Option<i64> {
    let found = process.view().table.get(args[0] as i32)?;
    let entry = found.as_ref()?;
    if native.has(entry) {
        return None;
    }
    let call = Call { process, number, args };
    let inside = Inside::enter()?;
    let result = run(&call, entry);
    drop(inside);
    finish(&call, result)
}

/// Prints once why files cannot be used any more: their server is gone.
#[cold]
fn tell_of_the_dead(process: &'static Process) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_dead = |mount: &&RunMount| {
        mount.is_gone || mount.relay.as_ref().is_some_and(|relay| relay.is_dead())
    };
    let Some(mount) = process.mounts.iter().find(is_dead) else { return };
    if !TOLD.swap(true, Ordering::Relaxed) {
        say(&format!(
            "{}: the process that served it has ended, and its files are gone for this program: start \
             it anew",
            String::from_utf8_lossy(&mount.target)
        ));
    }
}

/// The value for the program; `None` if the kernel has to execute the call as it is.
fn finish(call: &Call<'_>, result: Served) -> Option<i64> {
    match result {
        Ok(value) => Some(value),
        Err(Fail::Errno(errno)) => {
            if errno == Errno::ENOTCONN {
                tell_of_the_dead(call.process);
            }
            Some(sys::failure(errno))
        }
        Err(Fail::Pass) => open::passed(call),
        Err(Fail::Outside(outside)) => path::kernel(call, outside)
            .map(|value| open::noted(call, value))
            .or_else(|| open::passed(call)),
        Err(Fail::Interrupted(after)) => Some(after.value()),
        Err(Fail::Lower(entry, lock)) => Some(on_lower(call, &entry, lock)),
        Err(Fail::Kernel(by_kernel)) => {
            let ByKernel { number, mut args, path, held, entry } = *by_kernel;
            args[1] = path.as_ptr() as u64;
            let value = waiting(number as u64, &args);
            drop(held);
            Some(match entry {
                Some(entry) if value >= 0 => open::took(call, value as i32, entry),
                _ => value,
            })
        }
    }
}

/// Has the kernel execute the call on the lower open file, with `lock` as the third argument.
fn on_lower(call: &Call<'_>, entry: &Entry, mut lock: Option<libc::flock>) -> i64 {
    let Some(lower) = &entry.lower else { return sys::failure(Errno::EBADF) };
    let mut args = *call.args;
    args[0] = lower.as_raw_fd() as u64;
    if let Some(lock) = &mut lock {
        args[2] = std::ptr::from_mut(lock) as u64;
    }
    waiting(call.number, &args)
}
