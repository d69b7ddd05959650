//! The kind of source `memory`.

use std::ffi::OsStr;
use std::sync::Arc;

use defuse_fs::FileSystem;
use defuse_fs::source::OptionValue::{Number, Octal, Size};
use defuse_fs::source::{
    FileAccess, FrontendProperties, SourceDescription, SourceFacts, SourceOption, SourceRest,
    SourceResult, SourceSharing,
};

use crate::{MemoryFileSystem, MemoryOptions};

/// `memory:`.
pub static KIND: SourceDescription<MemoryOptions> = SourceDescription {
    about: SourceFacts {
        name: "memory",
        form: "memory:",
        help: "files in memory, like tmpfs; gone with the mount",
        rest: SourceRest::Nothing,
        sharing: SourceSharing::NeedsServer,
        rings: false,
        network: false,
        files: FileAccess::None,
    },
    options: OPTIONS,
    defaults,
    open,
    images: None,
};

/// The largest number of a user or group: `u32::MAX` means none (chown(2)).
const ID_MAX: u64 = u32::MAX as u64 - 1;

#[rustfmt::skip]
const OPTIONS: &[SourceOption<MemoryOptions>] = &[
    SourceOption::new("size", Size(0, u64::MAX, |o, n| o.size = (n > 0).then_some(n)),
        "most bytes in files, 0 for no limit (default: half of the machine's or control group's memory)"),
    SourceOption::new("inodes", Number(0, u64::MAX, |o, n| o.inodes = (n > 0).then_some(n)),
        "most inodes, 0 for no limit (default: one for every 8 KiB of memory)"),
    SourceOption::new("mode", Octal(0o7777, |o, n| o.root_perm = n),
        "permission bits of the root directory (default 1777)"),
    SourceOption::new("uid", Number(0, ID_MAX, |o, n| o.root_uid = n as u32),
        "owner of the root directory (default: the mounting user)"),
    SourceOption::new("gid", Number(0, ID_MAX, |o, n| o.root_gid = n as u32),
        "group of the root directory (default: the mounting user's)"),
];

/// The root directory belongs to the user of this process.
fn defaults(frontend: &FrontendProperties) -> MemoryOptions {
    MemoryOptions {
        root_uid: rustix::process::geteuid().as_raw(),
        root_gid: rustix::process::getegid().as_raw(),
        writeback: frontend.writeback,
        access_times: frontend.access_times,
        ..MemoryOptions::default()
    }
}

fn open(_: &OsStr, options: MemoryOptions) -> SourceResult<Arc<dyn FileSystem>> {
    Ok(Arc::new(MemoryFileSystem::new(options)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_reach_their_settings() {
        let of = |options: &[&str]| KIND.settings(&FrontendProperties::default(), options);
        let set = of(&["size=1G", "inodes=0", "mode=700", "uid=5", "gid=6"]).unwrap();
        let expected = MemoryOptions {
            size: Some(1 << 30),
            inodes: None,
            root_perm: 0o700,
            root_uid: 5,
            root_gid: 6,
            ..MemoryOptions::default()
        };
        assert_eq!(set, expected);
        let error = of(&["mode=99"]).unwrap_err().to_string();
        assert!(error.contains("an octal number up to 7777"), "{error}");
    }
}
