//! The decision for or against io_uring.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use defuse_fs::{Caps, Errno};

use super::ThreadRing;
use crate::init::{WORKERS_MOST, sleeping_workers, takes_locks};
use crate::options::{IoUring, SessionOptions, ThreadPolicy};
use defuse_wire::abi::{FUSE_OVER_IO_URING, InitIn};

/// The data for starting a session with rings.
pub(crate) struct RingPlan {
    /// Queues: one for each processor that there may ever be.
    pub(crate) queues: usize,
    /// A working ring, by which the session notifies the kernel if other rings do not work.
    pub(crate) probe: ThreadRing,
}

/// Decides on rings before INIT is answered. Returns the options with which to negotiate and the
/// plan: `None` if rings are not requested or not offered, or an error with the reason against
/// them.
pub(crate) fn plan(
    device: &Arc<OwnedFd>,
    kernel: &InitIn,
    caps: &Caps,
    options: &SessionOptions,
) -> (SessionOptions, Result<Option<RingPlan>, &'static str>) {
    let mut options = options.clone();
    let offered = u64::from(kernel.flags2) << 32 & FUSE_OVER_IO_URING != 0;
    let off = options.disabled & FUSE_OVER_IO_URING != 0 || options.io_uring == IoUring::Off;
    if off || !offered {
        return (options, Ok(None));
    }
    let plan = workers(caps, &options).and_then(|(queues, workers)| {
        let probe = ThreadRing::new(device, 4).map_err(refusal)?;
        options.workers = Some(workers);
        Ok(Some(RingPlan { queues, probe }))
    });
    if plan.is_err() {
        options.disabled |= FUSE_OVER_IO_URING;
    }
    (options, plan)
}

/// Returns the number of queues, and the maximum number of workers.
fn workers(caps: &Caps, options: &SessionOptions) -> Result<(usize, usize), &'static str> {
    if options.policy != ThreadPolicy::Adaptive {
        return Err("the thread policies paper and merged read /dev/fuse (workers=)");
    }
    let defers = caps.submits || takes_locks(caps, options);
    if options.io_uring == IoUring::Auto && defers {
        return Err("answers that are finished later cost less over the device");
    }
    let queues = possible_processors().ok_or("the number of processors is not known (/sys)")?;
    // Deferred replies need a worker that is bound to no processor.
    match options.workers {
        Some(workers) if workers >= queues + usize::from(defers) => Ok((queues, workers)),
        Some(_) => Err("every processor needs a worker, locks one more (workers=)"),
        None if queues >= WORKERS_MOST => Err("more processors than there may be workers"),
        None => Ok((queues, sleeping_workers(caps).max(2 * queues).min(WORKERS_MOST))),
    }
}

/// The reason behind an error of io_uring_setup(2).
pub(crate) fn refusal(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM | Errno::EACCES => {
            "io_uring is forbidden (sysctl kernel.io_uring_disabled, or a seccomp filter)"
        }
        Errno::ENOSYS => "the kernel has no io_uring",
        Errno::ENOMEM => "no memory for io_uring (ulimit -l)",
        Errno::EMFILE | Errno::ENFILE => "too many open files for io_uring (ulimit -n)",
        Errno::EINVAL => "io_uring lacks what is needed (Linux 6.1)",
        _ => "io_uring could not be set up",
    }
}

/// Processors that the kernel counts queues by: the highest number that there may be, and one.
fn possible_processors() -> Option<usize> {
    last_of_list(&std::fs::read_to_string("/sys/devices/system/cpu/possible").ok()?)
}

/// The end of a list like `0-3,8-11`, as a count.
fn last_of_list(list: &str) -> Option<usize> {
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse::<usize>().ok().map(|last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_processors_ends_with_the_highest() {
        assert_eq!(last_of_list("0\n"), Some(1));
        assert_eq!(last_of_list("0-1\n"), Some(2));
        assert_eq!(last_of_list("0-3,8-11\n"), Some(12));
        assert_eq!(last_of_list("\n"), None);
    }
}
