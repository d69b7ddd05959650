//! The rules by which a session gets its threads, apart from all I/O.
//!
//! [`ThreadPolicy::Adaptive`] is described in the module above. The other policies follow
//! "Eliminating FUSE Bottleneck by Implementing Multi-threaded Framework on Distributed File
//! System", chapter 4:
//!
//! 1. No thread reads before the mount is finished. A session starts its first thread after INIT,
//!    which the kernel sends then.
//! 2. Before every read, a thread checks whether another thread has received the unmount.
//! 3. It reads the device, whose one descriptor all threads share.
//! 4. FORGET starts no thread.
//! 5. Any other request starts one if no thread is free and there are fewer than MAX. So there are
//!    two from the first request on, even with one caller.
//! 6. The thread performs the operation. No thread ends before the session does.
//!
//! In the paper, threads of the client then perform the I/O; here, the threads of a file system
//! with [`defuse_fs::Caps::submits`] do. [`ThreadPolicy::Merged`] is the paper's future work
//! (chapter 9): the thread that reads a request also performs the I/O, and there is no queue
//! between.

use defuse_wire::abi::Opcode;

use super::pool::PoolLoad;
use crate::options::ThreadPolicy;

impl ThreadPolicy {
    /// True if the thread that has received a request hands the device to another one, which it
    /// starts, if [`starts_another`] requires it. Otherwise threads are added by load, and end when
    /// the load is gone.
    pub(crate) fn hands_over(self) -> bool {
        match self {
            ThreadPolicy::Adaptive => false,
            ThreadPolicy::Paper | ThreadPolicy::Merged => true,
        }
    }

    /// Requests go to the threads of a file system that has some.
    pub(crate) fn submits(self) -> bool {
        self != ThreadPolicy::Merged
    }

    /// A worker may have a descriptor of its own, and poll it.
    pub(crate) fn owns_descriptors(self) -> bool {
        self != ThreadPolicy::Paper
    }
}

/// Rules 4 and 5: a thread is started after a request `opcode` was received, by a thread that is no
/// longer free.
pub(crate) fn starts_another(opcode: Opcode, standing: PoolLoad) -> bool {
    let forgets = matches!(opcode, Opcode::Forget | Opcode::BatchForget);
    !forgets && standing.free == 0 && standing.threads < standing.max
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::pool::{PoolGrowth, PoolLimits, WorkerPool};

    fn make_load(free: usize, threads: usize, max: usize) -> PoolLoad {
        PoolLoad { free, threads, max }
    }

    #[test]
    fn a_thread_is_started_only_if_none_is_free() {
        assert!(starts_another(Opcode::Read, make_load(0, 1, 2)));
        assert!(!starts_another(Opcode::Read, make_load(1, 2, 8)));
        assert!(!starts_another(Opcode::Read, make_load(7, 8, 16)));
    }

    #[test]
    fn there_are_never_more_threads_than_the_maximum() {
        assert!(starts_another(Opcode::Write, make_load(0, 7, 8)));
        for threads in [8, 9] {
            assert!(!starts_another(Opcode::Write, make_load(0, threads, 8)));
        }
        assert!(!starts_another(Opcode::Write, make_load(0, 1, 1)));
    }

    #[test]
    fn forget_starts_no_thread_and_every_other_request_does() {
        for &opcode in Opcode::ALL {
            let forgets = [Opcode::Forget, Opcode::BatchForget].contains(&opcode);
            assert_eq!(starts_another(opcode, make_load(0, 1, 2)), !forgets, "{opcode:?}");
        }
    }

    /// Requests by a model of the threads, one decision at a time.
    #[test]
    fn one_caller_leads_to_two_threads_and_blocked_ones_to_the_maximum() {
        let pool = WorkerPool::new(PoolLimits { max: 4, parallel: 1 });
        let receive = |opcode| {
            pool.begin();
            let grown = pool.grow_if(|standing| starts_another(opcode, standing));
            if grown == PoolGrowth::Spawn {
                pool.arrive();
            }
            pool.counts().live
        };
        assert_eq!(pool.grow(), PoolGrowth::Spawn);
        pool.arrive();
        assert_eq!(receive(Opcode::Forget), 1);
        pool.end();
        for _ in 0..100 {
            assert_eq!(receive(Opcode::Getattr), 2, "one request at a time");
            pool.end();
        }
        let blocked = [2, 3, 4, 4].map(|_| receive(Opcode::Read));
        assert_eq!(blocked, [2, 3, 4, 4]);
        for _ in blocked {
            pool.end();
        }
        let counts = pool.counts();
        assert_eq!((counts.live, counts.idle, counts.retired), (4, 4, 0), "none retires");
    }

    #[test]
    fn only_merged_threads_perform_the_io_of_a_file_system_with_its_own() {
        assert!(ThreadPolicy::Adaptive.submits() && ThreadPolicy::Paper.submits());
        assert!(!ThreadPolicy::Merged.submits());
        assert!(!ThreadPolicy::Adaptive.hands_over());
        assert!(ThreadPolicy::Paper.hands_over() && ThreadPolicy::Merged.hands_over());
    }
}
