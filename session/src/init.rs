//! INIT: the negotiation with the kernel. This module decides on every capability bit, and gives a
//! reason to print.

use std::fmt;

use defuse_fs::{Caps, LockSupport};

use crate::options::{IoUring, SessionOptions, ThreadPolicy};
use defuse_wire::abi::*;
use defuse_wire::request::DecodeOptions;
use defuse_wire::vendor::{CALLER_GROUPS, COMPOUND, DECIDES_ON_NAMES, NO_BIRTH_TIMES};

/// The decision about one INIT capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitDecision {
    /// The name in the kernel's header, without `FUSE_`.
    pub name: &'static str,
    /// The bit.
    pub bit: u64,
    /// True if it is used.
    pub used: bool,
    /// The reason.
    pub reason: &'static str,
}

impl fmt::Display for InitDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.used { "used" } else { "not used" };
        write!(f, "{:22} {verdict:8}  {}", self.name, self.reason)
    }
}

/// The outcome of INIT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NegotiatedInit {
    /// The minor version: the smaller one of both sides.
    pub minor: u32,
    /// The bits that are used.
    pub flags: u64,
    /// Maximum size of a WRITE in bytes.
    pub max_write: usize,
    /// Maximum size of a READ in bytes.
    pub max_read: usize,
    /// Maximum number of background requests.
    pub max_background: u16,
    /// Maximum number of worker threads.
    pub max_workers: usize,
    /// The rules by which they are started and ended.
    pub policy: ThreadPolicy,
    /// The decision on each bit.
    pub decisions: Vec<InitDecision>,
}

impl NegotiatedInit {
    /// True if all bits of `flags` are used.
    pub fn uses(&self, flags: u64) -> bool {
        self.flags & flags == flags
    }

    /// Returns the reason why requests travel over the device, unless they travel over rings.
    pub(crate) fn ring_refusal(&self) -> Option<&'static str> {
        let decision = self.decisions.iter().find(|decision| decision.bit == FUSE_OVER_IO_URING)?;
        (!decision.used).then_some(decision.reason)
    }

    /// Decides against rings, for `reason`.
    pub(crate) fn refuse_rings(&mut self, reason: &'static str) {
        self.flags &= !FUSE_OVER_IO_URING;
        let ring = self.decisions.iter_mut().find(|decision| decision.bit == FUSE_OVER_IO_URING);
        if let Some(decision) = ring {
            (decision.used, decision.reason) = (false, reason);
        }
    }

    /// The layout of requests after INIT.
    pub(crate) fn decode_options(&self) -> DecodeOptions {
        DecodeOptions { setxattr_ext: self.uses(FUSE_SETXATTR_EXT), payload_in_pipe: false }
    }
}

/// The kernel's version of the protocol is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitError {
    /// The kernel is too old.
    #[error("the kernel speaks FUSE {0}.{1}; at least 7.{MINOR_MIN} (Linux 5.4) is needed")]
    TooOld(u32, u32),
    /// The kernel has a later major version, and repeats INIT after the reply with ours.
    #[error("the kernel speaks FUSE {0}; this session requested 7")]
    LaterMajor(u32),
}

/// The largest request and reply that kernels allow by default: 256 pages.
pub(crate) const MAX_IO: usize = 1 << 20;
const PAGE: usize = 4096;
/// Maximum number of worker threads of any session.
pub(crate) const WORKERS_MOST: usize = 1024;
/// Maximum number of workers that wait for another process, unless the options or the processors
/// require more.
const WAITING_WORKERS: usize = 128;

/// Decides on the reply to the kernel's INIT.
pub fn negotiate(
    kernel: &InitIn,
    caps: &Caps,
    options: &SessionOptions,
) -> Result<(InitOut, NegotiatedInit), InitError> {
    if kernel.major > FUSE_KERNEL_VERSION {
        return Err(InitError::LaterMajor(kernel.major));
    }
    if kernel.major < FUSE_KERNEL_VERSION || kernel.minor < MINOR_MIN {
        return Err(InitError::TooOld(kernel.major, kernel.minor));
    }
    let offered = u64::from(kernel.flags) | u64::from(kernel.flags2) << 32;
    let decisions = decide(offered, caps, options);
    let times = if caps.birth_times { 0 } else { NO_BIRTH_TIMES };
    let groups = if caps.asks_for_groups { CALLER_GROUPS } else { 0 };
    let names = if caps.decides_on_names { DECIDES_ON_NAMES } else { 0 };
    let vendor = offered & (times | groups | names | COMPOUND);
    let flags = decisions.iter().filter(|d| d.used).fold(vendor, |all, d| all | d.bit);
    let max_write = options.max_write.clamp(PAGE, MAX_IO);
    let max_workers = max_workers(caps, options);
    let at_work = options.workers.map_or_else(|| sleeping_workers(caps), |_| max_workers);
    let max_background = options
        .max_background
        .unwrap_or_else(|| (2 * at_work).clamp(16, usize::from(u16::MAX)) as u16);
    let congestion = options.congestion_threshold.unwrap_or(max_background - max_background / 4);
    let minor = kernel.minor.min(FUSE_KERNEL_MINOR_VERSION);
    // Without MAX_PAGES a request has at most 32 pages.
    let pages = if flags & FUSE_MAX_PAGES != 0 { MAX_IO / PAGE } else { 32 };
    let pages = if options.max_write <= 32 * PAGE { 32 } else { pages };
    let out = InitOut {
        major: FUSE_KERNEL_VERSION,
        minor,
        max_readahead: options.max_readahead.min(kernel.max_readahead),
        flags: flags as u32,
        max_background,
        congestion_threshold: congestion,
        max_write: max_write as u32,
        time_gran: caps.time_granularity_ns.clamp(1, 1_000_000_000),
        max_pages: pages as u16,
        map_alignment: 0,
        flags2: (flags >> 32) as u32,
        max_stack_depth: if flags & FUSE_PASSTHROUGH != 0 { 1 } else { 0 },
        request_timeout: request_timeout(flags, options),
        unused: [0; 11],
    };
    let max_read = pages * PAGE;
    let negotiated = NegotiatedInit {
        minor,
        flags,
        max_write,
        max_read,
        max_background,
        max_workers,
        policy: options.policy,
        decisions,
    };
    Ok((out, negotiated))
}

fn request_timeout(flags: u64, options: &SessionOptions) -> u16 {
    let requested = options.request_timeout.filter(|_| flags & FUSE_REQUEST_TIMEOUT != 0);
    requested.map_or(0, |timeout| timeout.as_secs().clamp(1, u64::from(u16::MAX)) as u16)
}

/// Returns the maximum number of workers: the number of processors if handlers never sleep,
/// otherwise many. Data that is submitted needs a worker for a moment only, and all other requests
/// wait for another process. A server that is lost blocks one worker for each caller, so many more
/// are allowed. The paper's policies keep their number.
fn max_workers(caps: &Caps, options: &SessionOptions) -> usize {
    let is_adaptive = options.policy == ThreadPolicy::Adaptive;
    let derived = match is_adaptive && caps.blocking && caps.submits {
        true => sleeping_workers(caps).max(WAITING_WORKERS),
        false => sleeping_workers(caps),
    };
    options.workers.unwrap_or(derived).clamp(1, WORKERS_MOST)
}

/// Returns the maximum number of workers without those that wait for another process.
pub(crate) fn sleeping_workers(caps: &Caps) -> usize {
    let processors = defuse_probe::processors();
    if caps.blocking { (4 * processors).max(16) } else { processors.max(2) }
}

/// True if the file system keeps the file locks, not only the kernel.
pub(crate) fn takes_locks(caps: &Caps, options: &SessionOptions) -> bool {
    caps.locks == LockSupport::FileSystem
        || options.forward_locks && caps.locks != LockSupport::Frontend
}

fn decide(offered: u64, caps: &Caps, options: &SessionOptions) -> Vec<InitDecision> {
    let requests = list_requested(caps, options);
    let decision = |&(name, bit, wanted, reason): &(&'static str, u64, bool, &'static str)| {
        let (used, reason) = match (wanted, offered & bit != 0, options.disabled & bit != 0) {
            (true, _, true) => (false, "switched off by an option"),
            (true, false, _) if bit == FUSE_OVER_IO_URING => (false, ENABLE_IO_URING),
            (true, false, _) => (false, "the kernel does not offer it"),
            (wanted, _, _) => (wanted, reason),
        };
        InitDecision { name, bit, used, reason }
    };
    requests.iter().map(decision).collect()
}

/// The reason if the kernel does not offer rings.
const ENABLE_IO_URING: &str = "the kernel does not offer it: with Linux 6.14, \
    `echo 1 > /sys/module/fuse/parameters/enable_uring` before mounting";

/// The name of a bit of INIT, the bit, true if this session requests it, and the reason.
type FlagRow = (&'static str, u64, bool, &'static str);

/// Returns all bits.
#[rustfmt::skip]
fn list_requested(caps: &Caps, options: &SessionOptions) -> Vec<FlagRow> {
    let locks = takes_locks(caps, options);
    let acl = caps.posix_acl && options.default_permissions;
    let splice = options.splice != crate::SpliceLimits::NEVER;
    vec![
        ("ASYNC_READ", FUSE_ASYNC_READ, true, "handlers take reads of one file at the same time"),
        ("POSIX_LOCKS", FUSE_POSIX_LOCKS, locks, "the kernel keeps record locks unless other clients share them"),
        ("FILE_OPS", FUSE_FILE_OPS, false, "the kernel ignores it"),
        ("ATOMIC_O_TRUNC", FUSE_ATOMIC_O_TRUNC, caps.open_truncates && options.atomic_o_trunc,
            "by option, because it would truncate files that are being executed"),
        ("EXPORT_SUPPORT", FUSE_EXPORT_SUPPORT, options.answers_parents, "an inode number is invalid once it is forgotten"),
        ("BIG_WRITES", FUSE_BIG_WRITES, true, "max_write is the only limit"),
        ("DONT_MASK", FUSE_DONT_MASK, caps.posix_acl, "default ACLs replace the umask"),
        ("SPLICE_WRITE", FUSE_SPLICE_WRITE, splice, "by the splice options"),
        ("SPLICE_MOVE", FUSE_SPLICE_MOVE, splice, "by the splice options"),
        ("SPLICE_READ", FUSE_SPLICE_READ, splice, "by the splice options"),
        ("FLOCK_LOCKS", FUSE_FLOCK_LOCKS, locks, "the kernel keeps flock locks unless other clients share them"),
        ("HAS_IOCTL_DIR", FUSE_HAS_IOCTL_DIR, true, "directories have ioctl, too"),
        ("AUTO_INVAL_DATA", FUSE_AUTO_INVAL_DATA, !caps.exclusive, "other clients may change the data"),
        ("DO_READDIRPLUS", FUSE_DO_READDIRPLUS, caps.readdir_entries, "if the listings of the file system have attributes"),
        ("READDIRPLUS_AUTO", FUSE_READDIRPLUS_AUTO, caps.readdir_entries && !caps.listings_bring_entries, "attributes are requested only if they are used, unless they cost nothing"),
        // When such a write ends, the kernel does not drop the pages that a buffered read has
        // filled meanwhile, and the session does (dispatch/pages.rs). So the session requests it
        // only where it pays.
        ("ASYNC_DIO", FUSE_ASYNC_DIO, caps.blocking || caps.submits, "parallel parts of one direct I/O pay only if handlers sleep"),
        ("WRITEBACK_CACHE", FUSE_WRITEBACK_CACHE, options.writeback, "by option"),
        ("NO_OPEN_SUPPORT", FUSE_NO_OPEN_SUPPORT, false, "open has a meaning in the contract"),
        ("PARALLEL_DIROPS", FUSE_PARALLEL_DIROPS, true, "lookups and listings of one directory run at once"),
        ("HANDLE_KILLPRIV", FUSE_HANDLE_KILLPRIV, false, "HANDLE_KILLPRIV_V2 replaces it"),
        ("POSIX_ACL", FUSE_POSIX_ACL, acl, "needs a file system with ACLs, and permission checks by the kernel"),
        ("ABORT_ERROR", FUSE_ABORT_ERROR, true, "distinguishes an abort from an unmount"),
        ("MAX_PAGES", FUSE_MAX_PAGES, true, "requests of up to 1 MiB"),
        ("CACHE_SYMLINKS", FUSE_CACHE_SYMLINKS, caps.exclusive, "only if no other client replaces symbolic links"),
        ("NO_OPENDIR_SUPPORT", FUSE_NO_OPENDIR_SUPPORT, false, "opendir has a meaning in the contract"),
        ("EXPLICIT_INVAL_DATA", FUSE_EXPLICIT_INVAL_DATA, caps.exclusive, "data is valid until the file system invalidates it"),
        ("MAP_ALIGNMENT", FUSE_MAP_ALIGNMENT, false, "DAX windows belong to virtual machines"),
        ("SUBMOUNTS", FUSE_SUBMOUNTS, false, "every inode of a mount has one device number"),
        ("HANDLE_KILLPRIV_V2", FUSE_HANDLE_KILLPRIV_V2, caps.kill_suidgid, "without it every buffered write first reads security.capability"),
        ("SETXATTR_EXT", FUSE_SETXATTR_EXT, true, "a new ACL clears set-group-id as POSIX requires"),
        ("INIT_EXT", FUSE_INIT_EXT, true, "capabilities beyond 32 bits"),
        ("SECURITY_CTX", FUSE_SECURITY_CTX, caps.security_labels, "if the file system keeps security labels"),
        ("HAS_INODE_DAX", FUSE_HAS_INODE_DAX, false, "DAX windows belong to virtual machines"),
        ("CREATE_SUPP_GROUP", FUSE_CREATE_SUPP_GROUP, true, "set-group-id directories need the caller's groups"),
        ("HAS_EXPIRE_ONLY", FUSE_HAS_EXPIRE_ONLY, true, "names can expire without being dropped"),
        ("DIRECT_IO_ALLOW_MMAP", FUSE_DIRECT_IO_ALLOW_MMAP, true, "mmap works on direct files"),
        ("PASSTHROUGH", FUSE_PASSTHROUGH, caps.backing_files && options.passthrough && !options.writeback,
            "the kernel reads and writes backing files by itself; excludes write-back"),
        ("NO_EXPORT_SUPPORT", FUSE_NO_EXPORT_SUPPORT, !options.answers_parents, "see EXPORT_SUPPORT"),
        ("HAS_RESEND", FUSE_HAS_RESEND, false, "a session is not handed over to another process"),
        ("ALLOW_IDMAP", FUSE_ALLOW_IDMAP, false, "requests that make no inode would not contain the caller's ids"),
        ("OVER_IO_URING", FUSE_OVER_IO_URING, options.io_uring != IoUring::Off, match options.io_uring {
            IoUring::Off => "switched off by an option",
            _ => "one system call a request",
        }),
        ("REQUEST_TIMEOUT", FUSE_REQUEST_TIMEOUT, options.request_timeout.is_some(), "by option"),
        ("HAS_IO_URING_BUFPOOL", FUSE_HAS_IO_URING_BUFPOOL, false,
            "each ring entry has a buffer of its own, so that pools and zero copy of Linux 7.3 have no use"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(minor: u32, flags: u64) -> InitIn {
        InitIn {
            major: 7,
            minor,
            max_readahead: 1 << 17,
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
            unused: [0; 11],
        }
    }

    #[test]
    fn every_capability_bit_of_the_protocol_is_decided_once() {
        let decisions = decide(u64::MAX, &Caps::default(), &SessionOptions::default());
        let all = decisions.iter().fold(0, |all, d| {
            assert_eq!(all & d.bit, 0, "{} twice", d.name);
            all | d.bit
        });
        assert_eq!(all, ((1 << 44) - 1) & !FUSE_INIT_RESERVED);
        assert!(decisions.iter().all(|d| !d.reason.is_empty()));
    }

    #[test]
    fn nothing_is_answered_that_was_not_offered() {
        let caps = Caps { posix_acl: true, kill_suidgid: true, exclusive: true, ..Caps::default() };
        for bit in 0..44 {
            let offered = 1 << bit;
            let (out, _) =
                negotiate(&kernel(45, offered), &caps, &SessionOptions::default()).unwrap();
            let flags = u64::from(out.flags) | u64::from(out.flags2) << 32;
            assert_eq!(flags & !offered, 0);
        }
    }

    #[test]
    fn asynchronous_direct_io_is_for_file_systems_that_sleep() {
        let uses = |caps: &Caps| {
            let decisions = decide(u64::MAX, caps, &SessionOptions::default());
            decisions.iter().any(|decision| decision.bit == FUSE_ASYNC_DIO && decision.used)
        };
        assert!(!uses(&Caps { blocking: false, ..Caps::default() }));
        assert!(uses(&Caps { blocking: true, ..Caps::default() }));
        assert!(uses(&Caps { submits: true, ..Caps::default() }));
    }

    #[test]
    fn versions_meet_at_the_smaller_one() {
        let options = SessionOptions::default();
        let minor =
            |m| negotiate(&kernel(m, 0), &Caps::default(), &options).map(|(out, _)| out.minor);
        assert_eq!(minor(31), Ok(31));
        assert_eq!(minor(45), Ok(45));
        assert_eq!(minor(99), Ok(45));
        assert_eq!(minor(30), Err(InitError::TooOld(7, 30)));
        let later = InitIn { major: 8, ..kernel(0, 0) };
        assert!(matches!(
            negotiate(&later, &Caps::default(), &options),
            Err(InitError::LaterMajor(8))
        ));
    }

    #[test]
    fn the_papers_configurations_are_its_own() {
        let caps = Caps { readdir_entries: true, kill_suidgid: true, ..Caps::default() };
        let (base, agreed) =
            negotiate(&kernel(45, u64::MAX), &caps, &SessionOptions::stackfs_base()).unwrap();
        assert_eq!((base.max_write, agreed.max_read, agreed.max_workers), (4096, 131072, 1));
        assert!(!agreed.uses(FUSE_WRITEBACK_CACHE) && !agreed.uses(FUSE_HANDLE_KILLPRIV_V2));
        let (opt, agreed) =
            negotiate(&kernel(45, u64::MAX), &caps, &SessionOptions::stackfs_opt()).unwrap();
        assert_eq!((opt.max_write, opt.max_background, opt.congestion_threshold), (131072, 12, 9));
        assert!(agreed.uses(FUSE_WRITEBACK_CACHE) && agreed.max_workers > 1);
    }

    #[test]
    fn write_back_and_backing_files_exclude_each_other() {
        let caps = Caps { backing_files: true, ..Caps::default() };
        let with = |writeback| {
            let options = SessionOptions { writeback, ..SessionOptions::default() };
            negotiate(&kernel(45, u64::MAX), &caps, &options).unwrap().1.uses(FUSE_PASSTHROUGH)
        };
        assert!(with(false) && !with(true));
    }
}
