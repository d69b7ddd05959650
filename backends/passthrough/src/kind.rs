//! The kind of source `passthrough`.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::source::OptionValue::{Choice, Flag, Number};
use defuse_fs::source::{
    CallingThreads, FileAccess, FrontendProperties, SourceDescription, SourceFacts,
    SourceOpenError, SourceOption, SourceRest, SourceResult, SourceSharing,
};
use defuse_fs::{CacheMode, FileSystem};

use crate::{CredentialsPolicy, FileHandles, Passthrough, PassthroughOptions};

/// `passthrough:DIR`.
pub static KIND: SourceDescription<PassthroughOptions> = SourceDescription {
    about: SourceFacts {
        name: "passthrough",
        form: "passthrough:DIR",
        help: "a directory of another file system",
        rest: SourceRest::Path,
        sharing: SourceSharing::InDirectory,
        rings: false,
        network: false,
        files: FileAccess::InDirectory,
    },
    options: OPTIONS,
    defaults,
    open,
    images: None,
};

#[rustfmt::skip]
const OPTIONS: &[SourceOption<PassthroughOptions>] = &[
    SourceOption::new("backing", Choice(&[
            ("on", |o| o.backing_files = true),
            ("off", |o| o.backing_files = false),
        ]),
        "let frontends read and write files by their own descriptors (default on)"),
    SourceOption::new("exclusive", Flag(|o| o.exclusive = true),
        "the source changes only through this mount: caches live longer"),
    SourceOption::new("handles", Choice(&[
            ("auto", |o| o.file_handles = FileHandles::Auto),
            ("on", |o| o.file_handles = FileHandles::On),
            ("off", |o| o.file_handles = FileHandles::Off),
        ]),
        "find inodes again by file handles, or by name (default auto)"),
    SourceOption::new("fd_cache", Number(0, u32::MAX as u64, |o, n| o.fd_cache = n as usize),
        "descriptors kept open for inodes with handles (default 0: by the limit of open files)"),
    SourceOption::new("xattr", Flag(|o| o.xattrs = true),
        "extended attributes and ACLs exist (default)"),
    SourceOption::new("no_xattr", Flag(|o| o.xattrs = false),
        "extended attributes do not exist, nor ACLs unless other users have access"),
    SourceOption::new("cache", Choice(&[
            ("cached", |o| o.cache = CacheMode::Cached),
            ("keep", |o| o.cache = CacheMode::Keep),
            ("direct", |o| o.cache = CacheMode::Direct),
        ]),
        "keep pages while a file is open (default), from earlier opens as well, or not at all"),
];

fn defaults(frontend: &FrontendProperties) -> PassthroughOptions {
    let base = if frontend.stackfs {
        PassthroughOptions::stackfs()
    } else {
        PassthroughOptions::default()
    };
    let valid = |time| if frontend.concurrent { Duration::ZERO } else { time };
    PassthroughOptions {
        attr_valid_for: valid(base.attr_valid_for),
        entry_valid_for: valid(base.entry_valid_for),
        negative_lifetime: valid(base.negative_lifetime),
        backing_files: frontend.backing_files,
        locks: frontend.locks,
        fd_cache: frontend.descriptors_kept,
        writeback: frontend.writeback,
        access_times: frontend.access_times,
        credentials: match (frontend.threads, frontend.threads.native_opener()) {
            (_, Some(opener)) => CredentialsPolicy::Callers(opener),
            (CallingThreads::Application, None) => CredentialsPolicy::Restore,
            (CallingThreads::Serving | CallingThreads::Callers, None) => CredentialsPolicy::Sticky,
        },
        descriptors_from: frontend.descriptors_from,
        granted: frontend.granted,
        single_user: frontend.single_user,
        mountpoint: frontend.mountpoint.clone(),
        ..base
    }
}

fn open(rest: &OsStr, options: PassthroughOptions) -> SourceResult<Arc<dyn FileSystem>> {
    let fs = Passthrough::new(Path::new(rest), options).map_err(SourceOpenError::from_error)?;
    Ok(Arc::new(fs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GrantedEffects, LockPlace};
    use defuse_fs::posix::AccessTimeRule;

    #[test]
    fn options_reach_their_settings() {
        let of = |options: &[&str]| KIND.settings(&FrontendProperties::default(), options).unwrap();
        assert_eq!(of(&[]), PassthroughOptions::default());
        let changed = of(&["handles=off", "fd_cache=9", "no_xattr", "exclusive", "cache=keep"]);
        let expected = PassthroughOptions {
            file_handles: FileHandles::Off,
            fd_cache: 9,
            xattrs: false,
            exclusive: true,
            cache: CacheMode::Keep,
            ..PassthroughOptions::default()
        };
        assert_eq!(changed, expected);
        assert!(!of(&["backing=off"]).backing_files);
        let error = KIND.settings(&FrontendProperties::default(), &["handles=maybe"]).unwrap_err();
        assert!(error.to_string().contains("one of auto|on|off"), "{error}");
    }

    #[test]
    fn the_frontend_decides_the_settings_that_depend_on_it() {
        let granted = GrantedEffects { suid: true, dev: false };
        let frontend = FrontendProperties {
            threads: CallingThreads::Application,
            locks: LockPlace::Inherited,
            concurrent: true,
            writeback: true,
            access_times: AccessTimeRule::Never,
            read_only: false,
            backing_files: false,
            granted,
            single_user: true,
            mountpoint: Some("/mnt".into()),
            descriptors_from: 900,
            descriptors_kept: 256,
            stackfs: false,
        };
        let expected = PassthroughOptions {
            attr_valid_for: Duration::ZERO,
            entry_valid_for: Duration::ZERO,
            backing_files: false,
            locks: LockPlace::Inherited,
            fd_cache: 256,
            writeback: true,
            access_times: AccessTimeRule::Never,
            credentials: CredentialsPolicy::Restore,
            descriptors_from: 900,
            granted,
            single_user: true,
            mountpoint: Some("/mnt".into()),
            ..PassthroughOptions::default()
        };
        assert_eq!(KIND.settings(&frontend, &[] as &[&str]), Ok(expected));
    }

    #[test]
    fn options_override_what_is_left_out_for_stackfs() {
        let frontend = FrontendProperties {
            stackfs: true,
            backing_files: false,
            single_user: true,
            ..FrontendProperties::default()
        };
        let of = |options: &[&str]| KIND.settings(&frontend, options).unwrap();
        assert_eq!(of(&[]), PassthroughOptions::stackfs());
        assert_eq!(
            of(&["xattr"]),
            PassthroughOptions { xattrs: true, ..PassthroughOptions::stackfs() }
        );
    }
}
