//! The options of libfuse: those of a mount, of the interface of paths, and of INIT.

use std::ffi::{CString, c_uint};

use defuse_fuse::mount::{ApplyOutcome, MountOptions};

use crate::abi::{ConnInfoThree, FuseConfig, caps};
use crate::args::split_options;

/// The version of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiVersion {
    /// libfuse 2.
    Two,
    /// libfuse 3.
    Three,
}

/// The decision about an option or an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionOutcome {
    /// It was taken.
    Taken,
    /// It belongs to somebody else.
    Foreign,
}

/// An option that is not possible, with the next step.
pub type OptionRefusal = String;

/// The options of a mount.
#[derive(Clone, Debug)]
pub struct MountChoice {
    /// The options for the mount itself.
    pub mount: MountOptions,
    /// Only root and the mounting user have access.
    pub allow_root: bool,
}

impl MountChoice {
    /// The options that libfuse has where none is given.
    pub fn new(version: ApiVersion) -> Self {
        let mount = MountOptions {
            fsname: String::new(),
            subtype: String::new(),
            // libfuse 3 has no such check any more.
            nonempty: version == ApiVersion::Three,
            ..MountOptions::default()
        };
        MountChoice { mount, allow_root: false }
    }

    /// Takes an option of a mount.
    pub fn take(&mut self, option: &str) -> Result<OptionOutcome, OptionRefusal> {
        let (key, value) = key_and_value(option);
        match (key, value) {
            ("allow_root", None) => {
                (self.allow_root, self.mount.allow_other) = (true, true);
            }
            // Of no meaning to the mount: what mount(8) passes to its helpers.
            (
                "user" | "defaults" | "auto" | "noauto" | "users" | "nouser" | "_netdev" | "nofail",
                _,
            )
            | ("large_read", None)
            | ("blksize", Some(_)) => {}
            (key, _) if key.starts_with("x-") => {}
            ("blkdev", _) => {
                return Err(
                    "fuse: the option blkdev is not served by this library (fuseblk needs the \
                            original libfuse)"
                        .to_owned(),
                );
            }
            ("context" | "fscontext" | "defcontext" | "rootcontext", _) => {
                return Err(format!("fuse: the option {key} is not served by this library"));
            }
            ("syncfs" | "no_syncfs", _) => return Ok(OptionOutcome::Foreign),
            // Sizes below a page are raised by the kernel.
            ("max_read", Some(bytes)) => {
                let bytes: u32 = number(option, bytes)?;
                self.mount.max_read = if bytes == 0 { 0 } else { bytes.max(4096) };
            }
            ("subtype" | "fsname", Some("")) => {}
            (key, value) => match self.mount.apply(key, value) {
                Ok(ApplyOutcome::Yes) => {}
                Ok(ApplyOutcome::NotAMountOption) => return Ok(OptionOutcome::Foreign),
                Err(error) => return Err(format!("fuse: {error}")),
            },
        }
        Ok(OptionOutcome::Taken)
    }

    /// The source of the mount, for /proc/mounts.
    pub fn settle(mut self) -> Self {
        if self.mount.fsname.is_empty() {
            self.mount.fsname = match self.mount.subtype.as_str() {
                "" => "/dev/fuse".to_owned(),
                subtype => subtype.to_owned(),
            };
        }
        self
    }
}

/// Takes an option of the interface of paths.
pub fn take_library_option(
    version: ApiVersion,
    config: &mut FuseConfig,
    option: &str,
) -> Result<OptionOutcome, OptionRefusal> {
    let (key, value) = key_and_value(option);
    let two = version == ApiVersion::Two;
    match (key, value) {
        ("kernel_cache", None) => config.kernel_cache = 1,
        ("auto_cache", None) => config.auto_cache = 1,
        ("noauto_cache", None) => config.auto_cache = 0,
        ("umask", Some(mask)) => {
            let mask = u32::from_str_radix(mask, 8).map_err(|_| invalid(option))?;
            (config.set_mode, config.umask) = (1, mask & 0o777);
        }
        ("uid", Some(uid)) => (config.set_uid, config.uid) = (1, number(option, uid)?),
        ("gid", Some(gid)) => (config.set_gid, config.gid) = (1, number(option, gid)?),
        ("entry_timeout", Some(time)) => config.entry_timeout = number(option, time)?,
        ("attr_timeout", Some(time)) => config.attr_timeout = number(option, time)?,
        ("negative_timeout", Some(time)) => config.negative_timeout = number(option, time)?,
        ("ac_attr_timeout", Some(time)) => {
            (config.ac_attr_timeout_set, config.ac_attr_timeout) = (1, number(option, time)?);
        }
        ("noforget", None) => config.remember = -1,
        ("remember", Some(time)) => {
            let seconds: u32 = number(option, time)?;
            config.remember = i32::try_from(seconds).unwrap_or(i32::MAX);
        }
        ("modules", Some(modules)) => {
            return Err(format!(
                "fuse: the modules `{modules}' are not served by this library: start the program without \
                 -o modules, or with the original libfuse"
            ));
        }
        ("no_rofd_flush", None) if !two => config.no_rofd_flush = 1,
        ("hard_remove", None) if two => config.hard_remove = 1,
        ("use_ino", None) if two => config.use_ino = 1,
        ("readdir_ino", None) if two => config.readdir_ino = 1,
        ("direct_io", None) if two => config.direct_io = 1,
        ("nopath", None) if two => config.nullpath_ok = 1,
        ("intr", None) if two => config.intr = 1,
        ("intr_signal", Some(signal)) if two => config.intr_signal = number(option, signal)?,
        ("debug", None) => config.debug = 1,
        _ => return Ok(OptionOutcome::Foreign),
    }
    Ok(OptionOutcome::Taken)
}

/// The wishes of options about INIT (`struct fuse_conn_info_opts`).
#[derive(Clone, Debug, Default)]
pub struct ConnOptions {
    max_write: Option<c_uint>,
    max_read: Option<c_uint>,
    max_readahead: Option<c_uint>,
    max_background: Option<c_uint>,
    congestion_threshold: Option<c_uint>,
    time_gran: Option<c_uint>,
    set: u32,
    cleared: u32,
}

/// Options that set or clear capabilities.
const CAPABILITIES: &[(&str, u32, bool)] = &[
    ("async_read", caps::ASYNC_READ, true),
    ("sync_read", caps::ASYNC_READ, false),
    ("atomic_o_trunc", caps::ATOMIC_O_TRUNC, true),
    ("no_remote_lock", caps::POSIX_LOCKS | caps::FLOCK_LOCKS, false),
    ("no_remote_flock", caps::FLOCK_LOCKS, false),
    ("no_remote_posix_lock", caps::POSIX_LOCKS, false),
    ("big_writes", 0, true),
    ("splice_write", SPLICE_WRITE, true),
    ("no_splice_write", SPLICE_WRITE, false),
    ("splice_move", SPLICE_MOVE, true),
    ("no_splice_move", SPLICE_MOVE, false),
    ("splice_read", SPLICE_READ, true),
    ("no_splice_read", SPLICE_READ, false),
    ("auto_inval_data", caps::AUTO_INVAL_DATA, true),
    ("no_auto_inval_data", caps::AUTO_INVAL_DATA, false),
    ("readdirplus=no", READDIRPLUS | READDIRPLUS_AUTO, false),
    ("readdirplus=yes", READDIRPLUS, true),
    ("readdirplus=auto", READDIRPLUS | READDIRPLUS_AUTO, true),
    ("async_dio", caps::ASYNC_DIO, true),
    ("no_async_dio", caps::ASYNC_DIO, false),
    ("writeback_cache", caps::WRITEBACK_CACHE, true),
    ("no_writeback_cache", caps::WRITEBACK_CACHE, false),
];

const SPLICE_WRITE: u32 = 1 << 7;
const SPLICE_MOVE: u32 = 1 << 8;
const SPLICE_READ: u32 = 1 << 9;
const READDIRPLUS: u32 = 1 << 13;
const READDIRPLUS_AUTO: u32 = 1 << 14;

impl ConnOptions {
    /// Takes an option about INIT.
    pub fn take(&mut self, option: &str) -> Result<OptionOutcome, OptionRefusal> {
        if let Some((_, bits, sets)) = CAPABILITIES.iter().find(|(name, ..)| *name == option) {
            let (on, off) = if *sets { (*bits, 0) } else { (0, *bits) };
            self.set = self.set & !off | on;
            self.cleared = self.cleared & !on | off;
            return Ok(OptionOutcome::Taken);
        }
        let (key, Some(value)) = key_and_value(option) else { return Ok(OptionOutcome::Foreign) };
        let variable = match key {
            "max_write" => &mut self.max_write,
            "max_read" => &mut self.max_read,
            "max_readahead" => &mut self.max_readahead,
            "max_background" => &mut self.max_background,
            "congestion_threshold" => &mut self.congestion_threshold,
            "time_gran" => &mut self.time_gran,
            _ => return Ok(OptionOutcome::Foreign),
        };
        *variable = Some(number(option, value)?);
        Ok(OptionOutcome::Taken)
    }

    /// Applies the wishes, as far as the kernel has the capabilities.
    pub fn apply(&self, conn: &mut ConnInfoThree) {
        let take = |wish: Option<c_uint>, old| wish.unwrap_or(old);
        conn.max_write = take(self.max_write, conn.max_write);
        conn.max_read = take(self.max_read, conn.max_read);
        conn.max_readahead = take(self.max_readahead, conn.max_readahead);
        conn.max_background = take(self.max_background, conn.max_background);
        conn.congestion_threshold = take(self.congestion_threshold, conn.congestion_threshold);
        conn.time_gran = take(self.time_gran, conn.time_gran);
        conn.want = (conn.want | self.set & conn.capable) & !self.cleared;
    }
}

/// Offers each option of the lists after `-o` to `take`, which removes those that it takes. Returns
/// the remaining arguments: the program, one list, and the others.
pub fn take_from(
    words: &[CString],
    mut take: impl FnMut(&str) -> Result<OptionOutcome, OptionRefusal>,
) -> Result<Vec<CString>, OptionRefusal> {
    let (mut kept, mut others) = (Vec::new(), Vec::new());
    let mut rest = words.iter().skip(1);
    while let Some(word) = rest.next() {
        let bytes = word.to_bytes();
        // mount(8): another form of an option.
        if bytes == b"-r" && take("ro")? == OptionOutcome::Taken {
            continue;
        }
        if !bytes.starts_with(b"-o") {
            others.push(word.clone());
            continue;
        }
        let list = match &bytes[2..] {
            [] => rest.next().ok_or("fuse: missing argument after `-o'")?.to_bytes(),
            list => list,
        };
        for option in split_options(list).into_iter().filter(|option| !option.is_empty()) {
            let text = String::from_utf8_lossy(&option).into_owned();
            if take(&text)? == OptionOutcome::Foreign {
                kept.push(option);
            }
        }
    }
    let mut all: Vec<CString> = words.first().cloned().into_iter().collect();
    if !kept.is_empty() {
        let list: Vec<Vec<u8>> = kept.iter().map(|option| escape(option)).collect();
        all.push(c"-o".to_owned());
        all.push(CString::new(list.join(&b',')).map_err(|_| "fuse: an option has a NUL")?);
    }
    all.extend(others);
    Ok(all)
}

fn escape(option: &[u8]) -> Vec<u8> {
    let escaped = |&byte: &u8| match byte {
        b',' | b'\\' => vec![b'\\', byte],
        byte => vec![byte],
    };
    option.iter().flat_map(escaped).collect()
}

fn key_and_value(option: &str) -> (&str, Option<&str>) {
    option.split_once('=').map_or((option, None), |(key, value)| (key, Some(value)))
}

fn number<T: std::str::FromStr>(option: &str, value: &str) -> Result<T, OptionRefusal> {
    value.parse().map_err(|_| invalid(option))
}

fn invalid(option: &str) -> OptionRefusal {
    format!("fuse: invalid parameter in option `{option}'")
}

/// The options that `--help` of a program lists, with one line each.
pub fn help(version: ApiVersion) -> String {
    let of_paths: &[(&str, &str)] = &[
        ("kernel_cache", "keep cached data of files when they are opened"),
        ("[no]auto_cache", "keep cached data of unchanged files (off)"),
        ("umask=M", "set permissions of all files (octal)"),
        ("uid=N", "set the owner of all files"),
        ("gid=N", "set the group of all files"),
        ("entry_timeout=T", "seconds for which names are cached (1.0)"),
        ("negative_timeout=T", "seconds for which missing names are cached (0.0)"),
        ("attr_timeout=T", "seconds for which attributes are cached (1.0)"),
        ("ac_attr_timeout=T", "seconds for which auto_cache trusts attributes (attr_timeout)"),
        ("noforget", "accepted; inodes in use are never forgotten"),
        ("remember=T", "accepted; inodes in use are never forgotten"),
    ];
    let of_three: &[(&str, &str)] = &[("no_rofd_flush", "no flush of files open for reading")];
    let of_two: &[(&str, &str)] = &[
        ("hard_remove", "remove open files at once"),
        ("use_ino", "show the file system's inode numbers"),
        ("readdir_ino", "accepted"),
        ("direct_io", "bypass the page cache"),
        ("intr", "let signals end requests"),
        ("intr_signal=NUM", "accepted; SIGURG ends system calls"),
    ];
    let of_mounts: &[(&str, &str)] = &[
        ("allow_other", "give access to all users"),
        ("allow_root", "give access to root"),
        ("auto_unmount", "unmount when the process ends"),
        ("default_permissions", "let the kernel check permissions"),
        ("fsname=NAME", "set the source in /proc/mounts"),
        ("subtype=NAME", "set the type in /proc/mounts"),
        ("max_read=N", "most bytes of one read"),
    ];
    let further = if version == ApiVersion::Two { of_two } else { of_three };
    let lines = of_paths.iter().chain(further).chain(of_mounts);
    lines.map(|(option, text)| format!("    -o {option:<22} {text}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(words: &[&str]) -> Vec<CString> {
        words.iter().map(|word| CString::new(*word).unwrap()).collect()
    }

    #[test]
    fn options_go_to_the_side_that_knows_them() {
        let mut choice = MountChoice::new(ApiVersion::Three);
        let words =
            list(&["p", "-oro,max_read=1,mine=a\\,b", "x", "-o", "allow_root,fsname=a\\,b"]);
        let rest = take_from(&words, |option| choice.take(option)).unwrap();
        assert_eq!(rest, list(&["p", "-o", "mine=a\\,b", "x"]));
        let MountChoice { mount, allow_root } = choice.settle();
        assert!(mount.ro && mount.allow_other && allow_root && mount.nonempty);
        assert_eq!((mount.max_read, &mount.fsname[..]), (4096, "a,b"));
    }

    #[test]
    fn a_mount_without_a_name_is_named_as_libfuse_does() {
        let mut choice = MountChoice::new(ApiVersion::Two);
        assert_eq!(choice.clone().settle().mount.fsname, "/dev/fuse");
        choice.take("subtype=bindfs").unwrap();
        assert_eq!(choice.settle().mount.fsname, "bindfs");
    }

    #[test]
    fn options_of_one_version_are_foreign_to_the_other() {
        let mut config = FuseConfig::default();
        let mut take = |version, option| take_library_option(version, &mut config, option);
        assert_eq!(take(ApiVersion::Two, "use_ino"), Ok(OptionOutcome::Taken));
        assert_eq!(take(ApiVersion::Three, "use_ino"), Ok(OptionOutcome::Foreign));
        assert_eq!(take(ApiVersion::Three, "no_rofd_flush"), Ok(OptionOutcome::Taken));
        assert_eq!(take(ApiVersion::Two, "no_rofd_flush"), Ok(OptionOutcome::Foreign));
        assert!(take(ApiVersion::Two, "uid=root").is_err());
        assert!(take(ApiVersion::Three, "modules=subdir").unwrap_err().contains("not served"));
        assert_eq!((config.use_ino, config.no_rofd_flush), (1, 1));
    }

    #[test]
    fn wishes_about_init_are_limited_to_what_the_kernel_has() {
        let mut options = ConnOptions::default();
        for option in ["max_write=65536", "writeback_cache", "no_async_dio", "async_read"] {
            assert_eq!(options.take(option), Ok(OptionOutcome::Taken));
        }
        assert_eq!(options.take("ro"), Ok(OptionOutcome::Foreign));
        let capable = caps::ASYNC_READ | caps::ASYNC_DIO;
        let mut conn =
            ConnInfoThree { capable, want: caps::ASYNC_DIO, max_write: 9, ..Default::default() };
        options.apply(&mut conn);
        assert_eq!((conn.want, conn.max_write), (caps::ASYNC_READ, 65536));
    }
}
