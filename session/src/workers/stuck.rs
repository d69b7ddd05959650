//! Requests whose callers are being killed, and whose workers do not answer.
//!
//! The kernel lets a caller wait for its reply even after SIGKILL, and notifies the session by
//! INTERRUPT. A handler that waits for a part of the storage that does not respond, such as the
//! server of a socket, cannot answer, so that neither the process nor the mount would end. The
//! watchdog answers with `EINTR` in its place: no process sees the result. The kernel refuses the
//! handler's own reply if it ever arrives, and everything it granted is undone as always.
//!
//! Other signals change nothing: a program that handles them gets no `EINTR` from calls that do not
//! end with it elsewhere.
//!
//! It serves requests of /dev/fuse alone: a reply over a ring belongs to the ring's thread.

use std::collections::HashMap;
use std::fs;
use std::io::IoSlice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::Errno;
use defuse_wire::abi::OutHeader;
use zerocopy::IntoBytes;

use super::inflight::WorkerSlots;
use crate::transport::RequestPort;

/// The devices by which workers reply, by their threads: the kernel takes a reply on the device
/// that delivered the request.
#[derive(Default)]
pub(crate) struct StuckWorkers {
    ports: Mutex<HashMap<i32, Arc<dyn RequestPort>>>,
    /// Requests come from the kernel, whose callers are processes of this machine.
    is_kernel: bool,
}

impl StuckWorkers {
    pub(crate) fn new(is_kernel: bool) -> Self {
        StuckWorkers { ports: Mutex::default(), is_kernel }
    }

    /// A worker begins.
    pub(crate) fn enter(&self, thread: i32, port: Arc<dyn RequestPort>) {
        if self.is_kernel {
            self.lock().insert(thread, port);
        }
    }

    /// A worker ends.
    pub(crate) fn leave(&self, thread: i32) {
        if self.is_kernel {
            self.lock().remove(&thread);
        }
    }

    /// Answers interrupted requests whose callers are being killed.
    pub(crate) fn refuse_killed(&self, slots: &WorkerSlots) {
        if !self.is_kernel {
            return;
        }
        for slot in slots.iter() {
            let Some((unique, caller)) = slot.waiting_caller() else { continue };
            if !is_being_killed(caller) {
                continue;
            }
            let Some(port) = self.lock().get(&slot.thread()).cloned() else { continue };
            let error = -Errno::EINTR.raw();
            let header = OutHeader { len: size_of::<OutHeader>() as u32, error, unique };
            // The worker may have answered meanwhile: then the kernel knows no such request.
            let sent = port.send(&[IoSlice::new(header.as_bytes())]);
            log::debug!("request {unique} of thread {caller}, which is being killed: {sent:?}");
            slot.record_answer(unique);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Arc<dyn RequestPort>>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True for a thread that has SIGKILL pending, as after every signal that ends its process. False
/// where /proc does not show it.
fn is_being_killed(thread: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    is_killed(&status)
}

fn is_killed(status: &str) -> bool {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    let pending = |line: &str| {
        let set = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
    };
    status.lines().filter_map(pending).any(|set| set & KILL != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_with_a_pending_kill_is_recognized() {
        assert!(is_killed("Name:\tx\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"));
        assert!(is_killed("SigPnd:\t0000000000000000\nShdPnd:\t0000000000004102\n"));
        assert!(!is_killed(
            "SigPnd:\t0000000000004002\nShdPnd:\t0000000000000000\nSigBlk:\t0000000000000100\n"
        ));
        assert!(!is_killed("") && !is_being_killed(std::process::id()));
    }
}
