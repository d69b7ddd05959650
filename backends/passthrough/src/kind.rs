//! The kind of source `passthrough`.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::source::Value::{Choice, Flag, Number};
use defuse_fs::source::{
    About, Description, Error, Files, Frontend, Opt, Rest, Result, Sharing, Threads,
};
use defuse_fs::{CacheMode, FileSystem};

use crate::{Credentials, FileHandles, Options, Passthrough};

/// `passthrough:DIR`.
pub static KIND: Description<Options> = Description {
    about: About {
        name: "passthrough",
        form: "passthrough:DIR",
        help: "a directory of another file system",
        rest: Rest::Path,
        sharing: Sharing::InDirectory,
        rings: false,
        network: false,
        files: Files::InDirectory,
    },
    options: OPTIONS,
    defaults,
    open,
    images: None,
};

#[rustfmt::skip]
const OPTIONS: &[Opt<Options>] = &[
    Opt::new("backing", Choice(&[
            ("on", |o| o.backing_files = true),
            ("off", |o| o.backing_files = false),
        ]),
        "let frontends read and write files by their own descriptors (default on)"),
    Opt::new("exclusive", Flag(|o| o.exclusive = true),
        "the source changes only through this mount: caches live longer"),
    Opt::new("handles", Choice(&[
            ("auto", |o| o.file_handles = FileHandles::Auto),
            ("on", |o| o.file_handles = FileHandles::On),
            ("off", |o| o.file_handles = FileHandles::Off),
        ]),
        "find inodes again by file handles, or by name (default auto)"),
    Opt::new("fd_cache", Number(0, u32::MAX as u64, |o, n| o.fd_cache = n as usize),
        "descriptors kept open for inodes with handles (default 0: by the limit of open files)"),
    Opt::new("xattr", Flag(|o| o.xattrs = true),
        "extended attributes and ACLs exist (default)"),
    Opt::new("no_xattr", Flag(|o| o.xattrs = false),
        "extended attributes do not exist, nor ACLs unless other users have access"),
    Opt::new("cache", Choice(&[
            ("cached", |o| o.cache = CacheMode::Cached),
            ("keep", |o| o.cache = CacheMode::Keep),
            ("direct", |o| o.cache = CacheMode::Direct),
        ]),
        "keep pages while a file is open (default), from earlier opens as well, or not at all"),
];

fn defaults(frontend: &Frontend) -> Options {
    let base = if frontend.stackfs { Options::stackfs() } else { Options::default() };
    let valid = |time| if frontend.concurrent { Duration::ZERO } else { time };
    Options {
        attr_valid_for: valid(base.attr_valid_for),
        entry_valid_for: valid(base.entry_valid_for),
        negative_valid_for: valid(base.negative_valid_for),
        backing_files: frontend.backing_files,
        locks: frontend.locks,
        fd_cache: frontend.descriptors_kept,
        writeback: frontend.writeback,
        noatime: frontend.noatime,
        credentials: match (frontend.threads, frontend.threads.native_opener()) {
            (_, Some(opener)) => Credentials::Callers(opener),
            (Threads::Application, None) => Credentials::Restore,
            (Threads::Serving | Threads::Callers, None) => Credentials::Sticky,
        },
        descriptors_from: frontend.descriptors_from,
        granted: frontend.granted,
        single_user: frontend.single_user,
        mountpoint: frontend.mountpoint.clone(),
        ..base
    }
}

fn open(rest: &OsStr, options: Options) -> Result<Arc<dyn FileSystem>> {
    let fs = Passthrough::new(Path::new(rest), options).map_err(Error::failed)?;
    Ok(Arc::new(fs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Granted, Locks};

    #[test]
    fn options_reach_their_settings() {
        let of = |options: &[&str]| KIND.settings(&Frontend::default(), options).unwrap();
        assert_eq!(of(&[]), Options::default());
        let changed = of(&["handles=off", "fd_cache=9", "no_xattr", "exclusive", "cache=keep"]);
        let expected = Options {
            file_handles: FileHandles::Off,
            fd_cache: 9,
            xattrs: false,
            exclusive: true,
            cache: CacheMode::Keep,
            ..Options::default()
        };
        assert_eq!(changed, expected);
        assert!(!of(&["backing=off"]).backing_files);
        let error = KIND.settings(&Frontend::default(), &["handles=maybe"]).unwrap_err();
        assert!(error.to_string().contains("one of auto|on|off"), "{error}");
    }

    #[test]
    fn the_frontend_decides_the_settings_that_depend_on_it() {
        let granted = Granted { suid: true, dev: false };
        let frontend = Frontend {
            threads: Threads::Application,
            locks: Locks::Inherited,
            concurrent: true,
            writeback: true,
            noatime: true,
            read_only: false,
            backing_files: false,
            granted,
            single_user: true,
            mountpoint: Some("/mnt".into()),
            descriptors_from: 900,
            descriptors_kept: 256,
            stackfs: false,
        };
        let expected = Options {
            attr_valid_for: Duration::ZERO,
            entry_valid_for: Duration::ZERO,
            backing_files: false,
            locks: Locks::Inherited,
            fd_cache: 256,
            writeback: true,
            noatime: true,
            credentials: Credentials::Restore,
            descriptors_from: 900,
            granted,
            single_user: true,
            mountpoint: Some("/mnt".into()),
            ..Options::default()
        };
        assert_eq!(KIND.settings(&frontend, &[] as &[&str]), Ok(expected));
    }

    #[test]
    fn options_override_what_is_left_out_for_stackfs() {
        let frontend = Frontend {
            stackfs: true,
            backing_files: false,
            single_user: true,
            ..Frontend::default()
        };
        let of = |options: &[&str]| KIND.settings(&frontend, options).unwrap();
        assert_eq!(of(&[]), Options::stackfs());
        assert_eq!(of(&["xattr"]), Options { xattrs: true, ..Options::stackfs() });
    }
}
