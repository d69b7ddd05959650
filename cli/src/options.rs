//! The options of a mount (`-o`), in one table: parsing, help, the manual and suggestions for
//! misspelt ones all read it.

use std::fmt::Write as _;
use std::time::Duration;

use defuse_fs::CacheMode;
use defuse_fuse::abi::InitIn;
use defuse_fuse::mount::{Applied, MountOptions};
use defuse_fuse::{SessionOptions, SpliceLimits, negotiate};
use defuse_passthrough::{FileHandles, Locks};

use crate::compose::Source;
use crate::error::{Failure, Result};

/// Everything that options decide.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How it is mounted.
    pub mount: MountOptions,
    /// How it is served.
    pub session: SessionOptions,
    /// How a directory is served.
    pub passthrough: defuse_passthrough::Options,
    /// How files are kept in memory.
    pub memory: defuse_memory::Options,
}

/// Sets of options with a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// The fastest that is correct for every file system.
    #[default]
    Default,
    /// StackfsBase of "To FUSE or Not to FUSE": one thread, WRITE of 4 KiB, no splice.
    Base,
    /// StackfsOpt of the same: threads, write-back, WRITE of 128 KiB, splice.
    Opt,
}

impl Profile {
    fn settings(self) -> Settings {
        use defuse_passthrough::Options as Passthrough;
        let (session, passthrough) = match self {
            Profile::Default => (SessionOptions::default(), Passthrough::default()),
            Profile::Base => (SessionOptions::paper_base(), Passthrough::paper()),
            Profile::Opt => (SessionOptions::paper_opt(), Passthrough::paper()),
        };
        let (mount, memory) = (MountOptions::default(), defuse_memory::Options::default());
        Settings { mount, session, passthrough, memory }
    }
}

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
    /// As [`MountOptions::apply`] has it; the text shows the value in help.
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

    opt("default_permissions", Session, Flag(|s| s.session.default_permissions = true),
        "the kernel checks permissions by mode and ACL (default)"),
    opt("no_default_permissions", Session, Flag(|s| s.session.default_permissions = false),
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

    fn apply(&self, settings: &mut Settings, value: Option<&str>) -> Result {
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

fn bytes(text: &str) -> Option<u64> {
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

/// Applies `lists` (each a value of `-o`) for `source`, over `profile`.
pub fn parse(profile: Profile, source: &Source, lists: &[String]) -> Result<Settings> {
    let mut settings = profile.settings();
    settings.mount.fsname = fsname(source);
    settings.memory.root_uid = rustix::process::geteuid().as_raw();
    settings.memory.root_gid = rustix::process::getegid().as_raw();
    for option in lists.iter().flat_map(|list| split(list)) {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option.as_str(), None),
        };
        apply(&mut settings, source.backend.name, name, value)?;
    }
    settings.mount.default_permissions = settings.session.default_permissions;
    settings.passthrough.writeback = settings.session.writeback;
    Ok(settings)
}

/// The source as `/proc/mounts` shows it; the kernel takes up to 255 bytes.
fn fsname(source: &Source) -> String {
    let text = source.text().to_string_lossy().into_owned();
    if text.len() < 256 { text } else { source.backend.name.to_owned() }
}

fn apply(settings: &mut Settings, backend: &str, name: &str, value: Option<&str>) -> Result {
    if let Some(option) = OPTIONS.iter().find(|option| option.name == name) {
        if let Backend(owner) = option.scope
            && owner != backend
        {
            return Err(Failure::Usage(format!(
                "option {name} is for sources of type {owner}, not {backend}: leave it out"
            )));
        }
        return option.apply(settings, value);
    }
    let Some((_, bit)) = capability_options().into_iter().find(|(option, _)| option == name) else {
        return Err(unknown(name));
    };
    if value.is_some() {
        return Err(Failure::Usage(format!("option {name} takes no value: write just {name}")));
    }
    settings.session.disabled |= bit;
    Ok(())
}

/// `no_…` for every INIT capability that is decided on, with its bit.
pub fn capability_options() -> Vec<(String, u64)> {
    let kernel =
        InitIn { major: 7, minor: 45, flags: u32::MAX, flags2: u32::MAX, ..InitIn::default() };
    let negotiated = negotiate(&kernel, &defuse_fs::Caps::default(), &SessionOptions::default());
    let decisions = negotiated.map(|(_, negotiated)| negotiated.decisions).unwrap_or_default();
    let option = |name: &str| format!("no_{}", name.to_ascii_lowercase());
    decisions.iter().map(|decision| (option(decision.name), decision.bit)).collect()
}

fn unknown(name: &str) -> Failure {
    let capabilities = capability_options();
    let capabilities = capabilities.iter().map(|(name, _)| name.as_str());
    let candidates = OPTIONS.iter().map(|option| option.name).chain(capabilities);
    let near = candidates.map(|known| (strsim::normalized_damerau_levenshtein(known, name), known));
    let nearest = near.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.6);
    let hint = match nearest {
        Some((_, known)) => format!("did you mean {known}?"),
        None => "see `defuse help options`".to_owned(),
    };
    Failure::Usage(format!("there is no option {name}: {hint}"))
}

/// The options of a list. A backslash makes the next character part of the option (fuse(8)).
pub fn split(list: &str) -> Vec<String> {
    let mut options = vec![String::new()];
    let mut escaped = false;
    for c in list.chars() {
        match (c, options.last_mut()) {
            ('\\', _) if !escaped => escaped = true,
            (',', _) if !escaped => options.push(String::new()),
            (c, Some(option)) => {
                option.push(c);
                escaped = false;
            }
            (_, None) => {}
        }
    }
    options.retain(|option| !option.is_empty());
    options
}

/// Whether there is such an option at all, for any source.
pub fn is_known(name: &str) -> bool {
    OPTIONS.iter().any(|option| option.name == name)
        || capability_options().iter().any(|(option, _)| option == name)
}

/// The option as one that [`split`] gives back whole.
pub fn escape(option: &str) -> String {
    option.replace('\\', "\\\\").replace(',', "\\,")
}

/// The parts of the table, with their titles.
pub fn parts() -> Vec<(String, Vec<&'static Opt>)> {
    let part = |title: String, scope: Scope| {
        (title, OPTIONS.iter().filter(|option| option.scope == scope).collect())
    };
    let mut parts =
        vec![part("of every mount".into(), Mount), part("of every session".into(), Session)];
    for backend in crate::compose::BACKENDS {
        parts.push(part(format!("of {}", backend.form), Backend(backend.name)));
    }
    parts
}

/// The table, for people.
pub fn help() -> String {
    let mut text = String::new();
    for (title, options) in parts() {
        let _ = writeln!(text, "\nOptions {title}:");
        for option in options {
            let _ = writeln!(text, "  {:<32} {}", option.form(), option.help);
        }
    }
    let _ = writeln!(text, "\nOptions that switch a capability of INIT off:");
    let names: Vec<_> = capability_options().into_iter().map(|(name, _)| name).collect();
    for line in names.chunks(3) {
        let _ = writeln!(text, "  {}", line.join(", "));
    }
    text.trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_fuse::mount::mount_option_names;

    fn of(profile: Profile, backend: &str, list: &str) -> Result<Settings> {
        let source = Source::parse(format!("{backend}:x").as_ref()).unwrap();
        parse(profile, &source, &[list.to_owned()])
    }

    fn ok(backend: &str, list: &str) -> Settings {
        of(Profile::Default, backend, list).unwrap()
    }

    fn error(backend: &str, list: &str) -> String {
        let failure = of(Profile::Default, backend, list).unwrap_err();
        assert_eq!(failure.code(), 2);
        failure.to_string()
    }

    #[test]
    fn every_mount_option_is_in_the_table_and_no_option_twice() {
        for name in mount_option_names() {
            assert!(OPTIONS.iter().any(|option| option.name == name), "{name}");
        }
        let mut names: Vec<_> = OPTIONS.iter().map(|option| option.name).collect();
        names.sort_unstable();
        let before = names.len();
        names.dedup();
        assert_eq!(names.len(), before);
        for option in OPTIONS {
            assert!(!option.help.is_empty() && option.help.len() < 100, "{}", option.name);
            if let Backend(name) = option.scope {
                assert!(crate::compose::BACKENDS.iter().any(|backend| backend.name == name));
            }
        }
    }

    #[test]
    fn values_reach_their_settings() {
        let set =
            ok("passthrough", "ro,max_write=64K,workers=3,attr_timeout=0.5,handles=off,fd_cache=9");
        assert!(set.mount.ro);
        assert_eq!((set.session.max_write, set.session.workers), (65536, Some(3)));
        assert_eq!(set.session.attr_timeout, Some(Duration::from_millis(500)));
        assert_eq!(set.session.entry_timeout, None);
        assert_eq!((set.passthrough.file_handles, set.passthrough.fd_cache), (FileHandles::Off, 9));
        let set = ok("memory", "size=1G,inodes=0,mode=700,uid=5,timeout=2");
        assert_eq!((set.memory.size, set.memory.inodes), (Some(1 << 30), None));
        assert_eq!((set.memory.root_perm, set.memory.root_uid), (0o700, 5));
        assert_eq!(set.session.negative_timeout, Some(Duration::from_secs(2)));
    }

    #[test]
    fn what_several_parts_must_agree_on_reaches_all_of_them() {
        let set = ok("passthrough", "writeback,locks=filesystem");
        assert!(set.session.writeback && set.passthrough.writeback);
        assert!(set.session.forward_locks && set.passthrough.locks == Locks::FileSystem);
        assert!(set.session.default_permissions && set.mount.default_permissions);
        let set = ok("passthrough", "no_default_permissions");
        assert!(!set.session.default_permissions && !set.mount.default_permissions);
    }

    #[test]
    fn options_override_their_profile() {
        let with = |profile, list| of(profile, "passthrough", list).unwrap();
        let opt = with(Profile::Opt, "");
        assert!(opt.session.writeback && opt.passthrough.writeback && !opt.passthrough.xattrs);
        let opt = with(Profile::Opt, "no_writeback,xattr,max_write=1M");
        assert!(!opt.passthrough.writeback && opt.passthrough.xattrs);
        assert_eq!(opt.session.max_write, 1 << 20);
        assert_eq!(with(Profile::Base, "").session.workers, Some(1));
    }

    #[test]
    fn mistakes_are_told_with_what_would_be_right() {
        for (backend, list, says) in [
            ("memory", "sise=1", "did you mean size?"),
            ("memory", "qqqq", "see `defuse help options`"),
            ("memory", "size", "needs a value: write size=BYTES"),
            ("memory", "size=1X", "write bytes"),
            ("memory", "mode=99", "an octal number up to 7777"),
            ("memory", "writeback=1", "write just writeback"),
            ("memory", "exclusive", "is for sources of type passthrough, not memory"),
            ("passthrough", "handles=maybe", "one of auto|on|off"),
            ("passthrough", "max_write=1", "from 4096 to 1048576"),
            ("passthrough", "workers=+1", "a number from 1 to 1024"),
            ("passthrough", "timeout=-1", "such as 1 or 0.5"),
            ("passthrough", "ro=1", "write just ro"),
            ("passthrough", "no_handle_killpriv_v3", "did you mean no_handle_killpriv_v2?"),
        ] {
            let text = error(backend, list);
            assert!(text.contains(says), "{list}: {text}");
        }
    }

    #[test]
    fn capabilities_are_switched_off_by_their_name() {
        let set = ok("memory", "no_handle_killpriv_v2,no_max_pages");
        assert_eq!(
            set.session.disabled,
            defuse_fuse::abi::FUSE_HANDLE_KILLPRIV_V2 | defuse_fuse::abi::FUSE_MAX_PAGES
        );
    }

    #[test]
    fn commas_may_be_escaped() {
        assert_eq!(split(r"a,b=c\,d,,e\\f"), ["a", "b=c,d", r"e\f"]);
        assert_eq!(split(&escape(r"a,b\c")), [r"a,b\c"]);
        assert_eq!(ok("memory", r"fsname=a\,b").mount.fsname, "a,b");
    }

    #[test]
    fn help_shows_every_option() {
        let text = help();
        for option in OPTIONS {
            assert!(text.contains(&option.form()), "{}", option.name);
        }
        assert!(text.contains("no_passthrough"));
    }
}
