//! The options of a mount, in one table for all parsers.

use super::helper;
use defuse_fs::SourceRestrictions;
use defuse_fs::posix::AccessTimeRule;
use std::fmt;

/// The options of a mount (`mount(8)`, `mount.fuse3(8)`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Read only.
    pub ro: bool,
    /// No execution of programs.
    pub noexec: bool,
    /// set-user-id has no effect.
    pub nosuid: bool,
    /// Device files have no effect.
    pub nodev: bool,
    /// Symbolic links are not followed (Linux 5.10). `fusermount3` does not know it, so that only
    /// root may mount with it.
    pub nosymfollow: bool,
    /// The rule by which reading updates access times. The kernel shows it, and leaves the times to
    /// the file system.
    pub access_times: AccessTimeRule,
    /// Writes are synchronous.
    pub sync: bool,
    /// Changes of directories are synchronous.
    pub dirsync: bool,
    /// sync(2) and syncfs(2) reach the file system, and umount(2) waits for it, where that is
    /// possible ([`PreparedMount::syncfs`](super::PreparedMount::syncfs)): the mount has the type
    /// `fuseblk` and a loop device as its source. `None` leaves the decision to the caller of
    /// [`mount`](super::mount).
    pub syncfs: Option<bool>,
    /// The mount disappears also if the process that serves it is killed. `fusermount3` waits for
    /// that; a process that mounts without it needs another process that waits, which the caller
    /// has to provide.
    pub auto_unmount: bool,
    /// Users other than the mounting user have access.
    pub allow_other: bool,
    /// The kernel checks permissions by the mode.
    pub default_permissions: bool,
    /// Maximum size of a READ, in bytes; 0 for the kernel's own limit.
    pub max_read: u32,
    /// The source shown in `/proc/mounts`.
    pub fsname: String,
    /// The type shown in `/proc/mounts` after `fuse.`; empty for `fuse` alone.
    pub subtype: String,
    /// Mount over a directory that is not empty.
    pub nonempty: bool,
    /// The type of the file system's root.
    pub root: RootKind,
}

/// The type of a file system's root. It must be mounted on a file of the same type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RootKind {
    /// A directory.
    #[default]
    Directory,
    /// A regular file.
    File,
    /// A directory or a regular file, as the mount point is.
    AsMountPoint,
}

impl Default for MountOptions {
    /// Set-user-id and devices have no effect, for every mounting user: the modes reported by a
    /// file system are no reason to trust it with root's privileges.
    fn default() -> MountOptions {
        MountOptions {
            ro: false,
            noexec: false,
            nosuid: true,
            nodev: true,
            nosymfollow: false,
            access_times: AccessTimeRule::Relative,
            sync: false,
            dirsync: false,
            syncfs: None,
            auto_unmount: false,
            allow_other: false,
            default_permissions: false,
            max_read: 0,
            fsname: "defuse".to_owned(),
            subtype: "defuse".to_owned(),
            nonempty: false,
            root: RootKind::Directory,
        }
    }
}

/// The result of [`MountOptions::apply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ApplyOutcome {
    /// It is a mount option, and was set.
    Yes,
    /// It is not a mount option.
    NotAMountOption,
}

/// A mount option that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what their names and the messages say")]
pub enum OptionError {
    /// The option needs a value.
    #[error("mount option {key} needs a value: write {key}={expected}")]
    NeedsValue { key: &'static str, expected: &'static str },
    /// The option has no value.
    #[error("mount option {key} takes no value: write just {key}")]
    TakesNoValue { key: &'static str },
    /// The value has the wrong form.
    #[error("mount option {key}={value} is not possible: write {key}={expected}")]
    BadValue { key: &'static str, value: String, expected: &'static str },
}

enum OptionSetter {
    Flag(fn(&mut MountOptions)),
    /// The expected form of the value, and a setter that returns false for another form.
    Value(&'static str, fn(&mut MountOptions, &str) -> bool),
}

const TABLE: &[(&str, OptionSetter)] = &[
    ("ro", OptionSetter::Flag(|o| o.ro = true)),
    ("rw", OptionSetter::Flag(|o| o.ro = false)),
    ("exec", OptionSetter::Flag(|o| o.noexec = false)),
    ("noexec", OptionSetter::Flag(|o| o.noexec = true)),
    ("suid", OptionSetter::Flag(|o| o.nosuid = false)),
    ("nosuid", OptionSetter::Flag(|o| o.nosuid = true)),
    ("dev", OptionSetter::Flag(|o| o.nodev = false)),
    ("nodev", OptionSetter::Flag(|o| o.nodev = true)),
    ("symfollow", OptionSetter::Flag(|o| o.nosymfollow = false)),
    ("nosymfollow", OptionSetter::Flag(|o| o.nosymfollow = true)),
    ("atime", OptionSetter::Flag(|o| o.access_times = AccessTimeRule::Relative)),
    ("relatime", OptionSetter::Flag(|o| o.access_times = AccessTimeRule::Relative)),
    ("noatime", OptionSetter::Flag(|o| o.access_times = AccessTimeRule::Never)),
    ("strictatime", OptionSetter::Flag(|o| o.access_times = AccessTimeRule::Strict)),
    ("async", OptionSetter::Flag(|o| o.sync = false)),
    ("sync", OptionSetter::Flag(|o| o.sync = true)),
    ("dirsync", OptionSetter::Flag(|o| o.dirsync = true)),
    ("syncfs", OptionSetter::Flag(|o| o.syncfs = Some(true))),
    ("no_syncfs", OptionSetter::Flag(|o| o.syncfs = Some(false))),
    ("auto_unmount", OptionSetter::Flag(|o| o.auto_unmount = true)),
    ("allow_other", OptionSetter::Flag(|o| o.allow_other = true)),
    ("default_permissions", OptionSetter::Flag(|o| o.default_permissions = true)),
    ("nonempty", OptionSetter::Flag(|o| o.nonempty = true)),
    (
        "max_read",
        OptionSetter::Value("BYTES, at least 4096", |o, value| {
            let bytes = value.parse().ok().filter(|&bytes: &u32| bytes >= 4096);
            bytes.map(|bytes| o.max_read = bytes).is_some()
        }),
    ),
    (
        "fsname",
        OptionSetter::Value("NAME, of 1 to 255 bytes", |o, value| {
            o.fsname = value.to_owned();
            (1..256).contains(&value.len()) && !value.contains('\0')
        }),
    ),
    (
        "subtype",
        OptionSetter::Value("NAME, of letters, digits, `.`, `_` and `-`", |o, value| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            o.subtype = value.to_owned();
            (1..64).contains(&value.len()) && value.bytes().all(plain)
        }),
    ),
];

/// The names of all mount options, for help and completion.
pub fn mount_option_names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|(name, _)| *name)
}

impl MountOptions {
    /// Removes permissions that the source denies. Returns the names of the overridden options:
    /// `suid`, `dev`, `exec`.
    pub fn restrict(&mut self, denied: SourceRestrictions) -> Vec<&'static str> {
        let flags = [
            ("suid", denied.suid, &mut self.nosuid),
            ("dev", denied.dev, &mut self.nodev),
            ("exec", denied.exec, &mut self.noexec),
        ];
        let taken = flags.into_iter().filter_map(|(name, denied, flag)| {
            let taken = denied && !*flag;
            *flag |= denied;
            taken.then_some(name)
        });
        taken.collect()
    }

    /// Applies one option of a `-o` list. Later options override earlier ones. After an error the
    /// options are unchanged.
    pub fn apply(&mut self, key: &str, value: Option<&str>) -> Result<ApplyOutcome, OptionError> {
        let Some((key, setter)) = TABLE.iter().find(|(name, _)| *name == key) else {
            return Ok(ApplyOutcome::NotAMountOption);
        };
        match (setter, value) {
            (OptionSetter::Flag(set), None) => set(self),
            (OptionSetter::Flag(_), Some(_)) => return Err(OptionError::TakesNoValue { key }),
            (OptionSetter::Value(expected, _), None) => {
                return Err(OptionError::NeedsValue { key, expected });
            }
            (OptionSetter::Value(expected, set), Some(value)) => {
                let mut changed = self.clone();
                if !set(&mut changed, value) {
                    let value = value.to_owned();
                    return Err(OptionError::BadValue { key, value, expected });
                }
                *self = changed;
            }
        }
        Ok(ApplyOutcome::Yes)
    }
}

/// Formats the options for `fusermount3 -o`, which does not know `strictatime`.
impl fmt::Display for MountOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.ro { "ro" } else { "rw" })?;
        for (set, name) in [
            (self.noexec, "noexec"),
            (self.nosuid, "nosuid"),
            (self.nodev, "nodev"),
            (self.nosymfollow, "nosymfollow"),
            (self.access_times == AccessTimeRule::Never, "noatime"),
            (self.sync, "sync"),
            (self.dirsync, "dirsync"),
            (self.auto_unmount, "auto_unmount"),
            (self.allow_other, "allow_other"),
            (self.default_permissions, "default_permissions"),
        ] {
            if set {
                write!(f, ",{name}")?;
            }
        }
        if self.max_read != 0 {
            write!(f, ",max_read={}", self.max_read)?;
        }
        write!(f, ",fsname={}", helper::escape(&self.fsname))?;
        if self.subtype.is_empty() { Ok(()) } else { write!(f, ",subtype={}", self.subtype) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_flags_and_values() {
        let mut options = MountOptions::default();
        assert_eq!(options.apply("ro", None), Ok(ApplyOutcome::Yes));
        assert_eq!(options.apply("nosuid", None), Ok(ApplyOutcome::Yes));
        assert_eq!(options.apply("suid", None), Ok(ApplyOutcome::Yes));
        assert_eq!(options.apply("max_read", Some("65536")), Ok(ApplyOutcome::Yes));
        assert_eq!(options.apply("threads", Some("4")), Ok(ApplyOutcome::NotAMountOption));
        assert_eq!((options.ro, options.nosuid, options.max_read), (true, false, 65536));
        let names: Vec<_> = mount_option_names().collect();
        assert!(names.contains(&"allow_other") && names.contains(&"subtype"));
    }

    #[test]
    fn permissions_that_the_source_denies_are_removed_and_named() {
        let mut options = MountOptions { nosuid: false, ..Default::default() };
        let denied = SourceRestrictions { suid: true, dev: true, exec: false };
        assert_eq!(options.restrict(denied), ["suid"]);
        assert!(options.nosuid && options.nodev && !options.noexec);
        let denied = SourceRestrictions { exec: true, ..SourceRestrictions::default() };
        assert_eq!(options.restrict(denied), ["exec"]);
        assert_eq!(options.restrict(denied), [""; 0]);
    }

    #[test]
    fn an_invalid_option_changes_nothing() {
        let mut options = MountOptions::default();
        let before = options.clone();
        let error = options.apply("ro", Some("1")).unwrap_err();
        assert_eq!(error.to_string(), "mount option ro takes no value: write just ro");
        let error = options.apply("fsname", None).unwrap_err();
        assert!(error.to_string().contains("write fsname=NAME"), "{error}");
        for (key, value) in
            [("max_read", "12"), ("max_read", "x"), ("subtype", "a,b"), ("fsname", "")]
        {
            let error = options.apply(key, Some(value)).unwrap_err();
            assert!(matches!(error, OptionError::BadValue { .. }), "{error}");
        }
        assert_eq!(options, before);
    }

    #[test]
    fn the_helper_gets_escaped_commas() {
        let fsname = "a,b\\c".to_owned();
        let options = MountOptions { nodev: false, fsname, ..Default::default() };
        assert_eq!(options.to_string(), "rw,nosuid,fsname=a\\,b\\\\c,subtype=defuse");
    }
}
