//! `mount -o remount,…`: changes of a mount while it is mounted.
//!
//! The kernel replaces all flags of a mount (mount(2), `MS_REMOUNT`), so the present ones are
//! passed again unless an option changes them.

use std::path::Path;

use defuse_fuse::mount::{HeldMountpoint, MountEntry, resolve};
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use rustix::mount::MountFlags;

use crate::error::{self, CommandFailure, Result};
use crate::registry::{self, RegistrationState};
use crate::sources::SOURCES;
use crate::{control, mount_flags, options, umount};

/// Options that mount(8) copies from mountinfo into every remount.
const OF_THE_KERNEL: &[&str] = &[
    "remount",
    "user_id",
    "group_id",
    "rootmode",
    "fd",
    "blksize",
    "allow_other",
    "default_permissions",
    "max_read",
];

/// Changes the mount at `mountpoint` by `wanted`, the options of mount(8) in their order. With
/// `fake`, only checks them.
///
/// # Errors
///
/// [`CommandFailure::Usage`] for options that cannot change while mounted;
/// [`CommandFailure::Failed`] if there is no mount of defuse, and if the kernel refuses.
pub fn run(mountpoint: &Path, wanted: &[String], fake: bool) -> Result {
    let path = resolve(mountpoint);
    let shown = path.display();
    let found = registry::find_by_mountpoint(&path);
    let Some(mount) =
        umount::mount_at(&path).filter(|mount| found.is_some() || umount::is_ours(mount))
    else {
        return Err(CommandFailure::Failed(format!(
            "{shown} is no mount of defuse: mount it first"
        )));
    };
    let known = found.as_ref().map(|found| found.entry.options.as_slice()).unwrap_or_default();
    let before = flags_of(&mount);
    let after = change_flags(before, wanted, known)?;
    let named = mount.source.to_string_lossy();
    let source = found.as_ref().map_or(&*named, |found| &found.entry.source);
    let after = after | find_denied(source, before - after);
    if fake {
        return Ok(());
    }
    // The daemon refuses changes, too. It must allow them before the kernel does, and refuse them
    // after.
    let writable = !after.contains(MountFlags::RDONLY);
    let daemon = found.filter(|found| found.state == RegistrationState::Serving);
    let tell = || daemon.as_ref().map_or(Ok(()), |found| control::set_writable(found, writable));
    if writable {
        tell()?;
    }
    let is_it = |now: &MountEntry| now.mount_id == mount.mount_id;
    let place = HeldMountpoint::open(&path).and_then(|place| place.ok_or(Errno::INVAL));
    place.and_then(|place| place.remount(after, is_it)).map_err(|errno| {
        let next = match errno {
            Errno::BUSY => "files are open for writing (`fuser -vm` lists the processes)",
            Errno::PERM => "only root may remount",
            _ => "the kernel's log may say more (dmesg)",
        };
        CommandFailure::Failed(format!("cannot remount {shown}: {errno}; {next}"))
    })?;
    if writable { Ok(()) } else { tell() }
}

/// The present flags of a mount.
fn flags_of(mount: &MountEntry) -> MountFlags {
    mount_flags::parse(&mount.mount_options) | mount_flags::parse(&mount.super_options)
}

/// The flags after `wanted`. `known` has the options that the mount was made with.
fn change_flags(before: MountFlags, wanted: &[String], known: &[String]) -> Result<MountFlags> {
    let known: Vec<String> = known.iter().flat_map(|list| options::split(list)).collect();
    let mut flags = before;
    for option in wanted {
        let name = option.split_once('=').map_or(option.as_str(), |(name, _)| name);
        if let Some(option) = mount_flags::find(name) {
            flags = option.apply(flags);
        } else if !OF_THE_KERNEL.contains(&name) && !known.contains(option) {
            return Err(CommandFailure::Usage(format!(
                "option {option} cannot change while mounted: unmount, and mount it again"
            )));
        }
    }
    let granted = before - flags;
    for (name, flag) in [("suid", MountFlags::NOSUID), ("dev", MountFlags::NODEV)] {
        if granted.contains(flag) {
            return Err(CommandFailure::Usage(format!(
                "option {name} cannot be granted while mounted, because the source is checked for it \
                 at the start: unmount, and mount it with -o {name}"
            )));
        }
    }
    Ok(flags)
}

/// The flags of `cleared` that the source does not allow to clear.
fn find_denied(source: &str, cleared: MountFlags) -> MountFlags {
    if !cleared.contains(MountFlags::NOEXEC) {
        return MountFlags::empty();
    }
    let source = SOURCES.parse(source.as_ref()).ok();
    let directory = source.as_ref().and_then(|source| source.directory());
    let flags = directory.and_then(|directory| rustix::fs::statvfs(directory).ok());
    if flags.is_some_and(|found| found.f_flag.contains(StatVfsMountFlags::NOEXEC)) {
        error::warn(&"the source is mounted noexec, so the mount stays noexec");
        return MountFlags::NOEXEC;
    }
    MountFlags::empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change_listed(before: MountFlags, wanted: &str) -> Result<MountFlags> {
        change_flags(before, &options::split(wanted), &["size=1M,workers=3".to_owned()])
    }

    #[test]
    fn flags_without_an_option_are_kept() {
        let before = MountFlags::NOSUID | MountFlags::RELATIME;
        let flags = change_listed(before, "remount,ro,noexec").unwrap();
        assert_eq!(flags, before | MountFlags::RDONLY | MountFlags::NOEXEC);
        assert_eq!(change_listed(flags, "rw,exec"), Ok(before));
        assert_eq!(change_listed(before, "noatime"), Ok(MountFlags::NOSUID | MountFlags::NOATIME));
    }

    #[test]
    fn options_that_mount_8_repeats_change_nothing() {
        let list = "rw,nosuid,user_id=0,group_id=0,allow_other,size=1M,workers=3,remount";
        assert_eq!(change_listed(MountFlags::NOSUID, list), Ok(MountFlags::NOSUID));
    }

    #[test]
    fn what_cannot_change_is_refused() {
        let refused = |before, list| change_listed(before, list).unwrap_err().to_string();
        assert!(refused(MountFlags::empty(), "workers=4").contains("mount it again"));
        assert!(refused(MountFlags::NOSUID, "suid").contains("-o suid"));
        assert!(refused(MountFlags::NODEV, "dev").contains("-o dev"));
    }
}
