//! Waiting for descriptors: files of ours are always ready, as regular files are.

use defuse_fs::Errno;

use crate::machine::{inside, pending, sys, wait};
use crate::serve::call::{CallFailure, CallResult, ProgramCall};

/// The placeholder at `fd`, if there is one.
fn find_placeholder(
    call: &ProgramCall<'_>,
    fd: i32,
) -> Option<std::sync::Arc<crate::process::table::DescriptorEntry>> {
    let entry = call.table().get(fd)?.clone()?;
    (!entry.backed).then_some(entry)
}

/// The kernel waits for the rest. A handler of a signal ends that, whatever it wants of other
/// calls.
fn wait(number: u64, args: &[u64; 6]) -> i64 {
    match inside::wait_without_forks(|| wait::pass(number, args)) {
        pending::AGAIN => sys::failure(Errno::EINTR),
        value => value,
    }
}

pub fn poll(call: &ProgramCall<'_>) -> CallResult {
    let count = call.args[1].min(1 << 20);
    let at = |index: u64| call.args[0] + index * 8;
    let mut found = Vec::new();
    for index in 0..count {
        let one = sys::load::<libc::pollfd>(at(index)).map_err(|_| CallFailure::Pass)?;
        if let Some(entry) = find_placeholder(call, one.fd) {
            let ready = if entry.file().is_path() {
                libc::POLLNVAL as u32
            } else {
                call.client().poll(call.task(), entry.file(), one.events as u32)?
            };
            found.push((index, one, ready));
        }
    }
    if found.is_empty() {
        return Err(CallFailure::Pass);
    }
    // The kernel gets the list without ours, and does not wait where one of ours is ready.
    for (index, one, _) in &found {
        sys::store(at(*index), libc::pollfd { fd: -1, ..*one })?;
    }
    let ready = found.iter().filter(|(.., ready)| *ready != 0).count() as i64;
    let mut args = *call.args;
    let zero: libc::timespec = sys::zeroed();
    if ready > 0 {
        args[2] = if call.number as i64 == libc::SYS_poll { 0 } else { &raw const zero as u64 };
    }
    let value = wait(call.number, &args);
    for (index, one, ready) in &found {
        sys::store(at(*index), libc::pollfd { revents: *ready as i16, ..*one })?;
    }
    Ok(if value < 0 && ready == 0 { value } else { value.max(0) + ready })
}

/// The bit of `fd` in the set at `address`, if there is a set.
fn bit(address: u64, fd: i32) -> Result<bool, Errno> {
    if address == 0 {
        return Ok(false);
    }
    let word = sys::load::<u64>(address + fd as u64 / 64 * 8)?;
    Ok(word >> (fd % 64) & 1 != 0)
}

fn change(address: u64, fd: i32, on: bool) -> Result<(), Errno> {
    let at = address + fd as u64 / 64 * 8;
    let word = sys::load::<u64>(at)?;
    let bit = 1u64 << (fd % 64);
    sys::store(at, if on { word | bit } else { word & !bit })
}

pub fn select(call: &ProgramCall<'_>) -> CallResult {
    let sets = [call.args[1], call.args[2], call.args[3]];
    let mut found = Vec::new();
    for fd in 0..call.int(0).min(1 << 20) {
        if find_placeholder(call, fd).is_none() {
            continue;
        }
        for (kind, &set) in sets.iter().enumerate() {
            if bit(set, fd)? {
                found.push((kind, set, fd));
            }
        }
    }
    if found.is_empty() {
        return Err(CallFailure::Pass);
    }
    for &(_, set, fd) in &found {
        change(set, fd, false)?;
    }
    // Nothing exceptional ever happens to a file.
    let ready: Vec<_> = found.iter().filter(|(kind, ..)| *kind < 2).collect();
    let mut args = *call.args;
    let zero = [0u64; 2];
    if !ready.is_empty() {
        args[4] = &raw const zero as u64;
    }
    let value = wait(call.number, &args);
    if value < 0 {
        return Ok(value);
    }
    for &&(_, set, fd) in &ready {
        change(set, fd, true)?;
    }
    Ok(value + ready.len() as i64)
}

/// Fails for files of mounts, as the kernel does for regular files and directories.
pub fn epoll_ctl(call: &ProgramCall<'_>) -> CallResult {
    match find_placeholder(call, call.int(2)) {
        Some(entry) if entry.file().is_path() => Err(Errno::EBADF.into()),
        Some(_) => Err(Errno::EPERM.into()),
        None => Err(CallFailure::Pass),
    }
}
