//! The table of mount and session options, and the parser of their values.

use std::time::Duration;

use defuse_fs::source::LockPlace;
use defuse_fs::source::OptionValue::{self, Choice, Flag, Number, Seconds, Size, Text};
use defuse_fuse::mount::ApplyOutcome;
use defuse_fuse::{IoUring, SpliceLimits, ThreadPolicy};

use super::{OptionSettings, unknown_option_error};
use crate::error::{CommandFailure, Result};
use crate::sandbox::SandboxExtent;

/// The part that an option configures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionScope {
    /// The mount, for every source.
    Mount,
    /// The session, for every source.
    Session,
}

/// One option.
pub struct OptionEntry {
    /// The name.
    pub name: &'static str,
    /// The part that it configures.
    pub scope: OptionScope,
    /// One line of help.
    pub help: &'static str,
    set: OptionEffect,
}

/// The parser of a value, with its effect.
enum OptionEffect {
    /// `MountOptions::apply` parses the value; the text is its form in help.
    Mount(&'static str),
    /// The table parses the value.
    Value(OptionValue<OptionSettings>),
}

use OptionScope::{Mount, Session};

const U16_MAX: u64 = u16::MAX as u64;
const U32_MAX: u64 = u32::MAX as u64;

const fn mount(name: &'static str, value: &'static str, help: &'static str) -> OptionEntry {
    OptionEntry { name, scope: Mount, help, set: OptionEffect::Mount(value) }
}

const fn session(
    name: &'static str,
    value: OptionValue<OptionSettings>,
    help: &'static str,
) -> OptionEntry {
    OptionEntry { name, scope: Session, help, set: OptionEffect::Value(value) }
}

/// The values of `workers`, for messages.
pub const WORKERS: &str = "a number from 1 to 1024, paper[:MAX] or merged[:MAX]";

/// Parses a value of `workers`: the maximum number, the policy, or both.
fn set_workers(settings: &mut OptionSettings, text: &str) -> Option<()> {
    let (word, max) = match text.split_once(':') {
        Some((word, max)) => (word, Some(max)),
        None => (text, None),
    };
    let policy = [ThreadPolicy::Paper, ThreadPolicy::Merged]
        .into_iter()
        .find(|policy| policy.name() == word);
    let (policy, max) = match policy {
        Some(policy) => (policy, max),
        None => (ThreadPolicy::Adaptive, Some(text)),
    };
    let session = &mut settings.session;
    session.workers = match max {
        Some(max) => Some(count(max)?),
        None => None,
    };
    session.policy = policy;
    Some(())
}

/// A number of workers.
fn count(text: &str) -> Option<usize> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|count| digits && (1..=1024).contains(count))
}

/// All options except those that disable INIT capabilities, whose names come from the protocol.
#[rustfmt::skip]
pub const OPTIONS: &[OptionEntry] = &[
    mount("ro", "", "read only"),
    mount("rw", "", "read and write (default)"),
    mount("noexec", "", "programs are not executed"),
    mount("exec", "", "programs are executed, if the source allows it (default)"),
    mount("nosuid", "", "set-user-id has no effect (default)"),
    mount("suid", "", "set-user-id has an effect, if the source allows it"),
    mount("nodev", "", "device files have no effect (default)"),
    mount("dev", "", "device files have an effect, if the source allows it"),
    mount("nosymfollow", "", "symbolic links are not followed (only root may mount so)"),
    mount("symfollow", "", "symbolic links are followed (default)"),
    mount("noatime", "", "access times are not updated"),
    mount("atime", "", "reading updates the access time if it is older than the last change, or a day old (default)"),
    mount("relatime", "", "the default for access times"),
    mount("strictatime", "", "every reading of a file updates its access time"),
    mount("sync", "", "writes are synchronous"),
    mount("async", "", "writes are not synchronous (default)"),
    mount("dirsync", "", "changes of directories are synchronous"),
    mount("syncfs", "", "sync(2) and syncfs(2) reach the file system, umount(2) waits for it (default for uhs by root)"),
    mount("auto_unmount", "", "the mount disappears also if the daemon is killed"),
    mount("no_syncfs", "", "sync(2) and syncfs(2) do not reach the file system"),
    mount("allow_other", "", "all users have access, not only the mounting one"),
    mount("nonempty", "", "mount over a directory that is not empty"),
    mount("fsname", "NAME", "the source that /proc/mounts shows (default: SOURCE)"),
    mount("subtype", "NAME", "the type that /proc/mounts shows after `fuse.`"),
    mount("max_read", "BYTES", "most bytes in one READ, at least 4096"),

    session("default_permissions", Flag(|s| s.default_permissions = Some(true)),
        "the kernel checks permissions by mode and ACL (default, but for a root's own mount)"),
    session("no_default_permissions", Flag(|s| s.default_permissions = Some(false)),
        "only the file system itself checks permissions"),
    session("sandbox", Choice(&[
            ("", |s| s.sandbox = SandboxExtent::Usual),
            ("privileges", |s| s.sandbox = SandboxExtent::Privileges),
            ("namespace", |s| s.sandbox = SandboxExtent::Namespace),
        ]),
        "the daemon drops privileges, system calls and files that it does not need (default)"),
    session("no_sandbox", Flag(|s| s.sandbox = SandboxExtent::None), "the daemon keeps all privileges and system calls"),
    session("workers", Text("N|paper[:MAX]|merged[:MAX]", WORKERS, set_workers),
        "most worker threads (default: by processors and file system), and the policy"),
    session("max_write", Size(4096, 1 << 20, |s, n| s.session.max_write = n as usize),
        "most bytes in one WRITE (default 1M)"),
    session("max_readahead", Size(0, U32_MAX, |s, n| s.session.max_readahead = n as u32),
        "most bytes that the kernel reads ahead (default 1M)"),
    session("max_background", Number(1, U16_MAX, |s, n| s.session.max_background = Some(n as u16)),
        "most requests of readahead, write-back and asynchronous I/O in flight"),
    session("congestion_threshold",
        Number(1, U16_MAX, |s, n| s.session.congestion_threshold = Some(n as u16)),
        "number of background requests at which the mount counts as congested"),
    session("writeback", Flag(|s| s.session.writeback = true),
        "writes stay in the page cache and are sent later; no other process may write to the source"),
    session("no_writeback", Flag(|s| s.session.writeback = false),
        "writes are sent at once (default)"),
    session("clone_fd", Flag(|s| s.session.clone_fd = true),
        "every worker has its own descriptor of /dev/fuse (default)"),
    session("no_clone_fd", Flag(|s| s.session.clone_fd = false), "workers share one descriptor"),
    session("splice", Flag(|s| s.session.splice = SpliceLimits::MEASURED),
        "splice large reads and writes (default)"),
    session("no_splice", Flag(|s| s.session.splice = SpliceLimits::NEVER),
        "copy all reads and writes"),
    session("passthrough",
        Flag(|s| { s.session.passthrough = true; s.source.frontend.backing_files = true; }),
        "the kernel reads and writes backing files by itself, if it can (default)"),
    session("no_passthrough", Flag(|s| s.session.passthrough = false),
        "this program handles all reads and writes"),
    session("atomic_o_trunc", Flag(|s| s.session.atomic_o_trunc = true),
        "truncate within open: faster, but empties files that are being executed"),
    session("spin", Number(0, 1000, |s, n| s.session.spin = Duration::from_micros(n)),
        "microseconds that a busy worker polls for requests before it sleeps (default: 50)"),
    session("no_statistics", Flag(|s| s.session.statistics = false),
        "count nothing; only for measuring the cost of counting"),
    session("io_uring", Flag(|s| s.session.io_uring = IoUring::Required),
        "requests use io_uring, or the mount fails (default: if the kernel offers it)"),
    session("no_io_uring", Flag(|s| s.session.io_uring = IoUring::Off),
        "requests use /dev/fuse"),
    session("direct_io", Flag(|s| s.session.direct_io = true), "bypass the page cache"),
    session("locks", Choice(&[
            ("frontend", |s| { s.session.forward_locks = false; s.source.frontend.locks = LockPlace::Frontend; }),
            ("filesystem", |s| { s.session.forward_locks = true; s.source.frontend.locks = LockPlace::FileSystem; }),
        ]),
        "place of file locks: in the kernel for this mount, or in the file system for all its users"),
    session("attr_timeout", Seconds(|s, t| s.session.attr_timeout = Some(t)),
        "time for which attributes stay valid (default: as the file system says)"),
    session("entry_timeout", Seconds(|s, t| s.session.entry_timeout = Some(t)),
        "time for which names stay valid"),
    session("negative_timeout", Seconds(|s, t| s.session.negative_timeout = Some(t)),
        "time for which missing names stay missing"),
    session("timeout", Seconds(|s, t| {
            s.session.attr_timeout = Some(t);
            s.session.entry_timeout = Some(t);
            s.session.negative_timeout = Some(t);
        }),
        "sets attr_timeout, entry_timeout and negative_timeout"),
    session("max_inodes", Number(100, U32_MAX, |s, n| s.session.max_inodes = Some(n as usize)),
        "the kernel forgets unused files beyond this number (default: when it needs memory; Linux 6.18)"),
    session("request_timeout", Seconds(|s, t| s.session.request_timeout = Some(t)),
        "the kernel aborts the mount if a request takes longer (whole seconds, Linux 6.15)"),
];

impl OptionEntry {
    /// The option with its value, as help shows it.
    pub fn form(&self) -> String {
        match self.value() {
            Some(value) => format!("{}={value}", self.name),
            None => self.name.to_owned(),
        }
    }

    fn value(&self) -> Option<String> {
        match &self.set {
            OptionEffect::Mount("") => None,
            OptionEffect::Mount(value) => Some((*value).to_owned()),
            OptionEffect::Value(value) => value.form(),
        }
    }

    /// Applies the option with its value, `None` if it came without `=`.
    pub fn apply(&self, settings: &mut OptionSettings, value: Option<&str>) -> Result {
        let name = self.name;
        match &self.set {
            OptionEffect::Mount(_) => match settings.mount.apply(name, value) {
                Ok(ApplyOutcome::Yes) => Ok(()),
                Ok(ApplyOutcome::NotAMountOption) => Err(unknown_option_error(name)),
                Err(error) => Err(CommandFailure::usage(error)),
            },
            OptionEffect::Value(set) => Ok(set.apply(settings, name, value)?),
        }
    }
}
