//! The options of all file systems, in one table.

use defuse_fs::CacheMode;
use defuse_passthrough::FileHandles;

use crate::value::Value::{self, Choice, Flag, Number, Octal, Size};
use crate::{Error, Result, Source};

/// What options of file systems decide.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How a directory is served.
    pub passthrough: defuse_passthrough::Options,
    /// How files are kept in memory.
    pub memory: defuse_memory::Options,
    /// Nothing can be changed.
    pub read_only: bool,
}

impl Default for Settings {
    /// The defaults of each, with a root directory in memory that belongs to this process's user.
    fn default() -> Self {
        let memory = defuse_memory::Options {
            root_uid: rustix::process::geteuid().as_raw(),
            root_gid: rustix::process::getegid().as_raw(),
            ..Default::default()
        };
        Settings { passthrough: Default::default(), memory, read_only: false }
    }
}

/// An option of one kind of file system.
pub struct BackendOpt {
    /// Its name.
    pub name: &'static str,
    /// The kind.
    pub backend: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// What it changes.
    pub value: Value<Settings>,
}

const PASSTHROUGH: &str = "passthrough";
const MEMORY: &str = "memory";
const U32_MAX: u64 = u32::MAX as u64;

const fn opt(
    name: &'static str,
    backend: &'static str,
    value: Value<Settings>,
    help: &'static str,
) -> BackendOpt {
    BackendOpt { name, backend, help, value }
}

/// All of them.
#[rustfmt::skip]
pub const OPTIONS: &[BackendOpt] = &[
    opt("backing", PASSTHROUGH, Choice(&[
            ("on", |s| s.passthrough.backing_files = true),
            ("off", |s| s.passthrough.backing_files = false),
        ]),
        "let frontends read and write files by their own descriptors (default on)"),
    opt("exclusive", PASSTHROUGH, Flag(|s| s.passthrough.exclusive = true),
        "nobody changes the source but through this mount: caches live longer"),
    opt("handles", PASSTHROUGH, Choice(&[
            ("auto", |s| s.passthrough.file_handles = FileHandles::Auto),
            ("on", |s| s.passthrough.file_handles = FileHandles::On),
            ("off", |s| s.passthrough.file_handles = FileHandles::Off),
        ]),
        "find inodes again by file handles, or by name (default auto)"),
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

impl BackendOpt {
    /// The option with its value, as help shows it.
    pub fn form(&self) -> String {
        match self.value.form() {
            Some(value) => format!("{}={value}", self.name),
            None => self.name.to_owned(),
        }
    }
}

impl Settings {
    /// Applies one option of `source`; `ro` and `rw` are of every one.
    pub(crate) fn apply(&mut self, source: &Source, option: &str) -> Result {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        if let ("ro" | "rw", None) = (name, value) {
            self.read_only = name == "ro";
            return Ok(());
        }
        let kind = source.backend.name;
        let own = |known: &&BackendOpt| known.backend == kind;
        match OPTIONS.iter().filter(own).find(|known| known.name == name) {
            Some(known) => known.value.apply(self, name, value),
            None => {
                let names: Vec<_> = OPTIONS.iter().filter(own).map(|known| known.name).collect();
                Err(Error::Usage(format!(
                    "there is no option {name} of {kind}: known are ro, rw, {}",
                    names.join(", ")
                )))
            }
        }
    }
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
