//! The table of options, and how the value of each is read.

use std::time::Duration;

use defuse_fs::CacheMode;
use defuse_fuse::SpliceLimits;
use defuse_fuse::mount::Applied;
use defuse_passthrough::{FileHandles, Locks};

use super::{Settings, unknown};
use crate::error::{Failure, Result};

/// Whom an option concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The mount, whatever is mounted.
    Mount,
    /// The session, whatever is mounted.
    Session,
    /// The backend of this name only.
    Backend(&'static str),
}

/// One option.
pub struct Opt {
    /// Its name.
    pub name: &'static str,
    /// Whom it concerns.
    pub scope: Scope,
    /// What it does, in one line.
    pub help: &'static str,
    set: Set,
}

/// What follows the `=`, and what it changes.
enum Set {
    /// As `MountOptions::apply` has it; the text shows the value in help.
    Mount(&'static str),
    /// Nothing follows.
    Flag(fn(&mut Settings)),
    /// A decimal number in a range.
    Number(u64, u64, fn(&mut Settings, u64)),
    /// Bytes, with K, M, G or T, in a range.
    Size(u64, u64, fn(&mut Settings, u64)),
    /// An octal number up to this one.
    Octal(u32, fn(&mut Settings, u32)),
    /// Seconds, also fractions.
    Seconds(fn(&mut Settings, Duration)),
    /// One of these words.
    Choice(&'static [Word]),
}

/// A word that a value may be, and what it changes.
type Word = (&'static str, fn(&mut Settings));

use Scope::{Backend, Mount, Session};
use Set::{Choice, Flag, Number, Octal, Seconds, Size};

const PASSTHROUGH: Scope = Backend("passthrough");
const MEMORY: Scope = Backend("memory");
const U16_MAX: u64 = u16::MAX as u64;
const U32_MAX: u64 = u32::MAX as u64;

const fn opt(name: &'static str, scope: Scope, set: Set, help: &'static str) -> Opt {
    Opt { name, scope, help, set }
}

/// All options but those that switch INIT capabilities off, which the protocol names.
#[rustfmt::skip]
pub const OPTIONS: &[Opt] = &[
    opt("ro", Mount, Set::Mount(""), "read only"),
    opt("rw", Mount, Set::Mount(""), "read and write (default)"),
    opt("noexec", Mount, Set::Mount(""), "programs are not executed"),
    opt("exec", Mount, Set::Mount(""), "programs are executed (default)"),
    opt("nosuid", Mount, Set::Mount(""), "set-user-id has no effect (default unless root mounts)"),
    opt("suid", Mount, Set::Mount(""), "set-user-id has an effect (default for root)"),
    opt("nodev", Mount, Set::Mount(""), "device files have no effect (default unless root mounts)"),
    opt("dev", Mount, Set::Mount(""), "device files have an effect (default for root)"),
    opt("noatime", Mount, Set::Mount(""), "access times are not updated"),
    opt("atime", Mount, Set::Mount(""), "access times are updated (default)"),
    opt("sync", Mount, Set::Mount(""), "writes are synchronous"),
    opt("async", Mount, Set::Mount(""), "writes are not synchronous (default)"),
    opt("dirsync", Mount, Set::Mount(""), "changes of directories are synchronous"),
    opt("allow_other", Mount, Set::Mount(""), "other users than the one who mounts may enter"),
    opt("nonempty", Mount, Set::Mount(""), "mount over a directory that is not empty"),
    opt("fsname", Mount, Set::Mount("NAME"), "the source that /proc/mounts shows (default: SOURCE)"),
    opt("subtype", Mount, Set::Mount("NAME"), "the type that /proc/mounts shows after `fuse.`"),
    opt("max_read", Mount, Set::Mount("BYTES"), "most bytes in one READ, at least 4096"),

    opt("default_permissions", Session, Flag(|s| s.default_permissions = Some(true)),
        "the kernel checks permissions by mode and ACL (default, but for a root's own mount)"),
    opt("no_default_permissions", Session, Flag(|s| s.default_permissions = Some(false)),
        "nobody checks permissions but the file system itself"),
    opt("workers", Session, Number(1, 1024, |s, n| s.session.workers = Some(n as usize)),
        "most worker threads (default: by processors and file system)"),
    opt("max_write", Session, Size(4096, 1 << 20, |s, n| s.session.max_write = n as usize),
        "most bytes in one WRITE (default 1M)"),
    opt("max_readahead", Session, Size(0, U32_MAX, |s, n| s.session.max_readahead = n as u32),
        "most bytes that the kernel reads ahead (default 1M)"),
    opt("max_background", Session, Number(1, U16_MAX, |s, n| s.session.max_background = Some(n as u16)),
        "most requests of readahead, write-back and asynchronous I/O in flight"),
    opt("congestion_threshold", Session,
        Number(1, U16_MAX, |s, n| s.session.congestion_threshold = Some(n as u16)),
        "background requests from which on the mount counts as congested"),
    opt("writeback", Session, Flag(|s| s.session.writeback = true),
        "writes stay in the page cache and are sent later; needs a source that nobody else writes"),
    opt("no_writeback", Session, Flag(|s| s.session.writeback = false),
        "writes are sent at once (default)"),
    opt("clone_fd", Session, Flag(|s| s.session.clone_fd = true),
        "every worker has its own descriptor of /dev/fuse (default)"),
    opt("no_clone_fd", Session, Flag(|s| s.session.clone_fd = false), "workers share one descriptor"),
    opt("splice", Session, Flag(|s| s.session.splice = SpliceLimits::MEASURED),
        "splice large reads and writes (default)"),
    opt("no_splice", Session, Flag(|s| s.session.splice = SpliceLimits::NEVER),
        "copy all reads and writes"),
    opt("passthrough", Session,
        Flag(|s| { s.session.passthrough = true; s.passthrough.backing_files = true; }),
        "the kernel reads and writes backing files by itself, where it can (default)"),
    opt("no_passthrough", Session, Flag(|s| s.session.passthrough = false),
        "all reads and writes come to this program"),
    opt("atomic_o_trunc", Session, Flag(|s| s.session.atomic_o_trunc = true),
        "truncate within open: faster, but empties files that are being executed"),
    opt("spin", Session, Number(0, 1000, |s, n| s.session.spin = Duration::from_micros(n)),
        "microseconds that a busy worker looks for requests before it sleeps (default: 50)"),
    opt("no_statistics", Session, Flag(|s| s.session.statistics = false),
        "count nothing: only good for measuring what counting costs"),
    opt("direct_io", Session, Flag(|s| s.session.direct_io = true), "bypass the page cache"),
    opt("locks", Session, Choice(&[
            ("frontend", |s| { s.session.forward_locks = false; s.passthrough.locks = Locks::Frontend; }),
            ("filesystem", |s| { s.session.forward_locks = true; s.passthrough.locks = Locks::FileSystem; }),
        ]),
        "who keeps file locks: the kernel for this mount, or the file system for all its users"),
    opt("attr_timeout", Session, Seconds(|s, t| s.session.attr_timeout = Some(t)),
        "how long attributes are trusted (default: as the file system says)"),
    opt("entry_timeout", Session, Seconds(|s, t| s.session.entry_timeout = Some(t)),
        "how long names are trusted"),
    opt("negative_timeout", Session, Seconds(|s, t| s.session.negative_timeout = Some(t)),
        "how long missing names are trusted to be missing"),
    opt("timeout", Session, Seconds(|s, t| {
            s.session.attr_timeout = Some(t);
            s.session.entry_timeout = Some(t);
            s.session.negative_timeout = Some(t);
        }),
        "all three of them"),
    opt("request_timeout", Session, Seconds(|s, t| s.session.request_timeout = Some(t)),
        "the kernel aborts the mount when a request waits longer (whole seconds, Linux 6.15)"),

    opt("exclusive", PASSTHROUGH, Flag(|s| s.passthrough.exclusive = true),
        "nobody changes the source but through this mount: caches live longer"),
    opt("handles", PASSTHROUGH, Choice(&[
            ("auto", |s| s.passthrough.file_handles = FileHandles::Auto),
            ("on", |s| s.passthrough.file_handles = FileHandles::On),
            ("off", |s| s.passthrough.file_handles = FileHandles::Off),
        ]),
        "find inodes again by file handles, or keep a descriptor of each (default auto)"),
    opt("fd_cache", PASSTHROUGH, Number(0, U32_MAX, |s, n| s.passthrough.fd_cache = n as usize),
        "descriptors kept open for inodes with handles (default 0: by the limit of open files)"),
    opt("xattr", PASSTHROUGH, Flag(|s| s.passthrough.xattrs = true),
        "extended attributes and ACLs exist (default)"),
    opt("no_xattr", PASSTHROUGH, Flag(|s| s.passthrough.xattrs = false),
        "extended attributes and ACLs do not exist"),
    opt("cache", PASSTHROUGH, Choice(&[
            ("cached", |s| s.passthrough.cache = CacheMode::Cached),
            ("keep", |s| s.passthrough.cache = CacheMode::Keep),
            ("direct", |s| s.passthrough.cache = CacheMode::Direct),
        ]),
        "keep pages while a file is open (default), from earlier opens as well, or not at all"),

    opt("size", MEMORY, Size(0, u64::MAX, |s, n| s.memory.size = (n > 0).then_some(n)),
        "most bytes in files, 0 for no limit (default: half of the memory)"),
    opt("inodes", MEMORY, Number(0, u64::MAX, |s, n| s.memory.inodes = (n > 0).then_some(n)),
        "most inodes, 0 for no limit (default: one for every 8 KiB of memory)"),
    opt("mode", MEMORY, Octal(0o7777, |s, n| s.memory.root_perm = n),
        "permission bits of the root directory (default 1777)"),
    opt("uid", MEMORY, Number(0, U32_MAX - 1, |s, n| s.memory.root_uid = n as u32),
        "owner of the root directory (default: who mounts)"),
    opt("gid", MEMORY, Number(0, U32_MAX - 1, |s, n| s.memory.root_gid = n as u32),
        "group of the root directory (default: who mounts)"),
];

impl Opt {
    /// The option with its value, as help shows it.
    pub fn form(&self) -> String {
        match self.value() {
            Some(value) => format!("{}={value}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// What follows the `=`; `None` where nothing does.
    fn value(&self) -> Option<String> {
        match &self.set {
            Set::Mount("") | Flag(_) => None,
            Set::Mount(value) => Some((*value).to_owned()),
            Number(..) => Some("N".to_owned()),
            Size(..) => Some("BYTES".to_owned()),
            Octal(..) => Some("OCTAL".to_owned()),
            Seconds(_) => Some("SECS".to_owned()),
            Choice(words) => {
                Some(words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join("|"))
            }
        }
    }

    /// What a value must be, for an error about one that is not.
    fn expected(&self) -> String {
        match &self.set {
            Number(min, max, _) => range("a number", *min, *max),
            Size(min, max, _) => range("bytes (also 64K, 1M, 2G)", *min, *max),
            Octal(max, _) => format!("an octal number up to {max:o}"),
            Seconds(_) => "seconds, such as 1 or 0.5".to_owned(),
            Choice(_) => format!("one of {}", self.value().unwrap_or_default()),
            Set::Mount(_) | Flag(_) => String::new(),
        }
    }

    /// Applies the option with its value, if it is given one.
    pub fn apply(&self, settings: &mut Settings, value: Option<&str>) -> Result {
        let name = self.name;
        match (&self.set, value) {
            (Set::Mount(_), value) => match settings.mount.apply(name, value) {
                Ok(Applied::Yes) => return Ok(()),
                Ok(Applied::NotAMountOption) => return Err(unknown(name)),
                Err(error) => return Err(Failure::usage(error)),
            },
            (Flag(set), None) => {
                set(settings);
                return Ok(());
            }
            (Flag(_), Some(_)) => {
                return Err(Failure::Usage(format!(
                    "option {name} takes no value: write just {name}"
                )));
            }
            (_, None) => {
                let form = self.form();
                return Err(Failure::Usage(format!("option {name} needs a value: write {form}")));
            }
            (_, Some(_)) => {}
        }
        let value = value.unwrap_or_default();
        self.apply_value(settings, value).ok_or_else(|| {
            let expected = self.expected();
            Failure::Usage(format!("option {name}={value} is not possible: write {expected}"))
        })
    }

    /// `None` where the value is not of the expected form.
    fn apply_value(&self, settings: &mut Settings, value: &str) -> Option<()> {
        let within = |min: u64, max: u64| move |n: &u64| (min..=max).contains(n);
        match &self.set {
            Number(min, max, set) => set(settings, decimal(value).filter(within(*min, *max))?),
            Size(min, max, set) => set(settings, bytes(value).filter(within(*min, *max))?),
            Octal(max, set) => {
                set(settings, u32::from_str_radix(value, 8).ok().filter(|n| n <= max)?);
            }
            Seconds(set) => set(settings, seconds(value)?),
            Choice(words) => words.iter().find(|(word, _)| *word == value)?.1(settings),
            Set::Mount(_) | Flag(_) => return None,
        }
        Some(())
    }
}

fn range(what: &str, min: u64, max: u64) -> String {
    match max {
        u64::MAX if min == 0 => what.to_owned(),
        u64::MAX => format!("{what}, at least {min}"),
        _ => format!("{what} from {min} to {max}"),
    }
}

/// Digits only: `parse` would also take a plus sign.
fn decimal(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// A number with K, M, G or T, of 1024.
pub fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    decimal(digits)?.checked_mul(1 << shift)
}

/// Up to a century, so that no sum of times can overflow.
pub fn seconds(text: &str) -> Option<Duration> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds: f64 = text.parse().ok().filter(|_| plain)?;
    (seconds <= 3.2e9).then(|| Duration::from_secs_f64(seconds))
}
