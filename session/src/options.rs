//! The options of a session. The file system declares its own properties (`Caps`).

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::SupplementaryGroups;

use crate::transport::dev::SpliceLimits;

/// The use of io_uring instead of /dev/fuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoUring {
    /// Never.
    Off,
    /// Used if the kernel and this process support it, and if it is faster.
    /// [`crate::NegotiatedInit`] has the outcome.
    Auto,
    /// The session does not start without it.
    Required,
}

/// The rules by which a session over /dev/fuse gets its threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThreadPolicy {
    /// Threads are added while requests wait, and end when there are too many.
    #[default]
    Adaptive,
    /// The rules of a paper on multithreaded FUSE for GlusterFS (see `workers/policy.rs`): a thread
    /// that has received a request starts another one if none is free, up to the maximum, and no
    /// thread ends. File systems with threads of their own use them.
    Paper,
    /// Like [`Paper`](ThreadPolicy::Paper), but the thread that has received a request performs its
    /// I/O, too.
    Merged,
}

impl ThreadPolicy {
    /// The name, as in `-o workers=NAME`.
    pub fn name(self) -> &'static str {
        match self {
            ThreadPolicy::Adaptive => "adaptive",
            ThreadPolicy::Paper => "paper",
            ThreadPolicy::Merged => "merged",
        }
    }
}

/// Settings of a session. The defaults are the fastest that are correct for every file system;
/// features that a file system or a kernel lacks are left out when the session starts.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionOptions {
    /// Maximum number of workers; `None` derives it: the number of processors for a file system
    /// that never sleeps, more for a file system that sleeps. 1 is the single-threaded daemon. With
    /// another number there may be more while all workers wait for something, if several users
    /// share the mount: one user cannot stop the others.
    pub workers: Option<usize>,
    /// The rules by which workers are started and ended. Not used over io_uring, whose queues are
    /// bound to processors.
    pub policy: ThreadPolicy,
    /// Most bytes in one WRITE, 4096 to 1 MiB.
    pub max_write: usize,
    /// Most bytes that the kernel reads ahead.
    pub max_readahead: u32,
    /// Requests that the kernel may have in flight for readahead, write-back and asynchronous
    /// direct I/O. `None` derives it from the workers. (fuse(4): 12 unless set.)
    pub max_background: Option<u16>,
    /// From this many on, the kernel treats the mount as congested. `None`: three quarters.
    pub congestion_threshold: Option<u16>,
    /// Keep buffered writes in the page cache and send them later, in large pieces.
    pub writeback: bool,
    /// Use a descriptor of the device for each worker.
    pub clone_fd: bool,
    /// The first worker runs on the thread that calls
    /// [`CallerWorker::run`](crate::CallerWorker::run), which starts after the session. Unused over
    /// io_uring.
    pub caller_serves: bool,
    /// The time for which a worker polls for the next request before it sleeps, if recent requests
    /// arrived that fast. While it polls, it yields to other threads that need the processor. Zero
    /// disables polling. Unused over io_uring, where workers run on the processor of their callers.
    pub spin: Duration,
    /// The use of io_uring (Linux 6.14).
    pub io_uring: IoUring,
    /// Count operations and their latencies.
    pub statistics: bool,
    /// The conditions for splicing.
    pub splice: SpliceLimits,
    /// Let the kernel read and write backing files by itself.
    pub passthrough: bool,
    /// Bypass the page cache for every file.
    pub direct_io: bool,
    /// The kernel checks permissions (mount option `default_permissions`).
    pub default_permissions: bool,
    /// An open with `O_TRUNC` is one request. The kernel then sends it before it checks whether the
    /// file is being executed: a file that is being executed is truncated, and the caller gets
    /// ETXTBSY.
    pub atomic_o_trunc: bool,
    /// Take locks to the file system even where the kernel could keep them.
    pub forward_locks: bool,
    /// LOOKUP of `..` is answered for as long as the directory is looked up. For clients that walk
    /// paths themselves; the kernel would rely on it for NFS export.
    pub answers_parents: bool,
    /// Overrides how long attributes are trusted.
    pub attr_timeout: Option<Duration>,
    /// Overrides how long names are trusted.
    pub entry_timeout: Option<Duration>,
    /// Overrides how long missing names are trusted to be missing.
    pub negative_timeout: Option<Duration>,
    /// The kernel aborts the session when a request waits longer than this for an answer
    /// (needs 7.43; whole seconds).
    pub request_timeout: Option<Duration>,
    /// The kernel is requested to forget unused inodes beyond this number (needs 7.45). Unused for
    /// clients of a socket.
    pub max_inodes: Option<usize>,
    /// The file that shows memory pressure, in the format of `/proc/pressure/memory`, such as the
    /// `memory.pressure` of a control group. Caches are released while some task waits for memory
    /// for 10 % of the time.
    pub memory_pressure: PathBuf,
    /// The groups of callers. `None`: from `/proc/PID/status`, which a program in a namespace of
    /// its own may not see. Unused for clients of a socket.
    pub groups: Option<GroupSource>,
    /// The interrupt of a request ends the system call in which its handler waits, by a signal
    /// (`EINTR`). Without it, only [`Context::is_interrupted`](defuse_fs::Context::is_interrupted)
    /// reports an interrupt.
    pub signals: bool,
    /// INIT capabilities not to use, as a mask of the `FUSE_*` bits of [`defuse_wire::abi`].
    pub disabled: u64,
}

/// A source of the supplementary groups of callers. Two are equal if they are the same object.
#[derive(Clone)]
pub struct GroupSource(pub Arc<dyn SupplementaryGroups>);

impl fmt::Debug for GroupSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupSource")
    }
}

impl PartialEq for GroupSource {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions {
            workers: None,
            policy: ThreadPolicy::Adaptive,
            max_write: 1 << 20,
            max_readahead: 1 << 20,
            max_background: None,
            congestion_threshold: None,
            writeback: false,
            clone_fd: true,
            caller_serves: false,
            spin: Duration::from_micros(50),
            io_uring: IoUring::Auto,
            statistics: true,
            splice: SpliceLimits::MEASURED,
            passthrough: true,
            direct_io: false,
            default_permissions: true,
            atomic_o_trunc: false,
            forward_locks: false,
            answers_parents: false,
            attr_timeout: None,
            entry_timeout: None,
            negative_timeout: None,
            request_timeout: None,
            max_inodes: None,
            memory_pressure: "/proc/pressure/memory".into(),
            groups: None,
            signals: true,
            disabled: 0,
        }
    }
}

/// INIT capabilities that came after Linux 4.1 (protocol 7.23), the kernel under which Stackfs was
/// measured. Its configurations are measured without them.
const AFTER_STACKFS: u64 = !((1 << 18) - 1);

impl SessionOptions {
    /// StackfsBase of "To FUSE or Not to FUSE" (section 4): no write-back, WRITE of 4 KiB, one
    /// thread, no splice.
    pub fn stackfs_base() -> Self {
        SessionOptions {
            workers: Some(1),
            max_write: 4096,
            max_readahead: 128 * 1024,
            max_background: Some(12),
            congestion_threshold: Some(9),
            clone_fd: false,
            spin: Duration::ZERO,
            io_uring: IoUring::Off,
            splice: SpliceLimits::NEVER,
            passthrough: false,
            disabled: AFTER_STACKFS,
            ..SessionOptions::default()
        }
    }

    /// StackfsOpt of the same paper: write-back cache, WRITE of 128 KiB, many threads, splice for
    /// all.
    pub fn stackfs_opt() -> Self {
        SessionOptions {
            workers: None,
            max_write: 128 * 1024,
            writeback: true,
            splice: SpliceLimits::STACKFS,
            ..SessionOptions::stackfs_base()
        }
    }
}
