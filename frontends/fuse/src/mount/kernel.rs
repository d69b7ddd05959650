//! Mounting by system calls, for privileged users.

use super::check::CheckedTarget;
use super::loop_device::{self, AttachedLoopDevice};
use super::{MountError, MountMethod, MountOptions, PreparedMount, SyncFs, open_device};
use defuse_fs::posix::AccessTimeRule;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The failed call, and the kernel's messages about it.
struct MountFailure {
    step: &'static str,
    errno: Errno,
    log: String,
}

pub(super) fn mount(
    target: &CheckedTarget,
    options: &MountOptions,
) -> Result<PreparedMount, MountError> {
    let mut syncfs = SyncFs::NotWanted;
    if options.syncfs == Some(true) {
        let device = open_device(&target.path)?;
        match mount_by_loop_device(&device, target, options) {
            Ok(()) => {
                let (mountpoint, syncfs) = (target.path.clone(), SyncFs::Reached);
                return Ok(PreparedMount {
                    device,
                    mountpoint,
                    how: MountMethod::Fsopen,
                    syncfs,
                    watch: None,
                });
            }
            Err(MountFailure { step, errno, .. }) => syncfs = SyncFs::Impossible { step, errno },
        }
    }
    let device = open_device(&target.path)?;
    let how = match mount_by_fsopen(&device, target, options, (FUSE, &options.fsname)) {
        Ok(()) => MountMethod::Fsopen,
        // The new calls are missing before Linux 5.2, and some filters permit only mount(2).
        Err(MountFailure { errno: Errno::NOSYS | Errno::PERM, .. }) => {
            mount_by_call(&device, target, options).map_err(|failure| error(target, failure))?;
            MountMethod::MountSyscall
        }
        Err(failure) => return Err(error(target, failure)),
    };
    Ok(PreparedMount { device, mountpoint: target.path.clone(), how, syncfs, watch: None })
}

fn error(target: &CheckedTarget, failure: MountFailure) -> MountError {
    let mountpoint = target.path.clone();
    match failure {
        MountFailure { errno: errno @ (Errno::PERM | Errno::ACCESS), .. } => {
            MountError::NotPermitted { mountpoint, errno }
        }
        MountFailure { errno: errno @ Errno::NODEV, .. } => MountError::NoFuse { errno },
        MountFailure { step, errno, log } => MountError::Refused { mountpoint, step, errno, log },
    }
}

/// The options that are passed to the kernel in every case.
fn parameters(
    device: BorrowedFd<'_>,
    target: &CheckedTarget,
    options: &MountOptions,
) -> Vec<(&'static str, String)> {
    let mut parameters = vec![
        ("fd", device.as_raw_fd().to_string()),
        ("rootmode", format!("{:o}", target.rootmode)),
        ("user_id", rustix::process::getuid().as_raw().to_string()),
        ("group_id", rustix::process::getgid().as_raw().to_string()),
    ];
    if options.max_read != 0 {
        parameters.push(("max_read", options.max_read.to_string()));
    }
    parameters
}

fn flags(options: &MountOptions) -> impl Iterator<Item = &'static str> {
    let flags = [
        (options.allow_other, "allow_other"),
        (options.default_permissions, "default_permissions"),
    ];
    flags.into_iter().filter_map(|(set, name)| set.then_some(name))
}

/// The types of mounts.
pub(super) const FUSE: &str = "fuse";
pub(super) const FUSEBLK: &str = "fuseblk";

/// Mounts with a loop device as the source.
fn mount_by_loop_device(
    device: &OwnedFd,
    target: &CheckedTarget,
    options: &MountOptions,
) -> Result<(), MountFailure> {
    let failed = |errno| MountFailure { step: "loop device", errno, log: String::new() };
    let source = AttachedLoopDevice::new(&options.fsname).map_err(failed)?;
    let path = source.path.to_string_lossy();
    mount_by_fsopen(device, target, options, (FUSEBLK, &path))
}

fn mount_by_fsopen(
    device: &OwnedFd,
    target: &CheckedTarget,
    options: &MountOptions,
    (fstype, source): (&'static str, &str),
) -> Result<(), MountFailure> {
    let context = fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC);
    let context =
        context.map_err(|errno| MountFailure { step: "fsopen", errno, log: String::new() })?;
    let failed = |step| {
        let log = kernel_log(context.as_fd());
        move |errno| MountFailure { step, errno, log }
    };
    let mut strings = parameters(device.as_fd(), target, options);
    strings.push(("source", source.to_owned()));
    if fstype == FUSEBLK {
        strings.push(("blksize", loop_device::BLOCK.to_string()));
    }
    if !options.subtype.is_empty() {
        strings.push(("subtype", options.subtype.clone()));
    }
    for (key, value) in strings {
        fsconfig_set_string(&context, key, &value).map_err(|errno| failed(key)(errno))?;
    }
    let superblock = [(options.ro, "ro"), (options.sync, "sync"), (options.dirsync, "dirsync")];
    let superblock = superblock.into_iter().filter_map(|(set, name)| set.then_some(name));
    for flag in flags(options).chain(superblock) {
        fsconfig_set_flag(&context, flag).map_err(|errno| failed(flag)(errno))?;
    }
    fsconfig_create(&context).map_err(|errno| failed("fsconfig create")(errno))?;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes(options))
        .map_err(|errno| failed("fsmount")(errno))?;
    let empty = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&mount, "", &target.fd, "", empty).map_err(|errno| failed("move_mount")(errno))
}

fn attributes(options: &MountOptions) -> MountAttrFlags {
    let mut attributes = MountAttrFlags::empty();
    attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, options.ro);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.noexec);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, options.nosuid);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NODEV, options.nodev);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW, options.nosymfollow);
    attributes.insert(match options.access_times {
        AccessTimeRule::Relative => MountAttrFlags::empty(),
        AccessTimeRule::Strict => MountAttrFlags::MOUNT_ATTR_STRICTATIME,
        AccessTimeRule::Never => MountAttrFlags::MOUNT_ATTR_NOATIME,
    });
    attributes
}

/// Reads the messages of a file system context (`fsopen(2)`).
fn kernel_log(context: BorrowedFd<'_>) -> String {
    let mut messages = Vec::new();
    let mut buf = [0; 512];
    // The kernel keeps at most 8 messages.
    for _ in 0..8 {
        let Ok(len) = rustix::io::read(context, &mut buf) else { break };
        messages.push(String::from_utf8_lossy(&buf[..len]).trim().to_owned());
    }
    messages.join("; ")
}

fn mount_by_call(
    device: &OwnedFd,
    target: &CheckedTarget,
    options: &MountOptions,
) -> Result<(), MountFailure> {
    let failed = |errno| MountFailure { step: "mount", errno, log: String::new() };
    let strings = parameters(device.as_fd(), target, options);
    let strings = strings.into_iter().map(|(key, value)| format!("{key}={value}"));
    let data: Vec<_> = strings.chain(flags(options).map(str::to_owned)).collect();
    let data = CString::new(data.join(",")).map_err(|_| failed(Errno::INVAL))?;
    let fstype = super::type_name(FUSE, &options.subtype);
    let flags = mount_flags(options);
    let source = options.fsname.as_str();
    // Mounts through the descriptor that was checked, if /proc is available.
    let checked = format!("/proc/self/fd/{}", target.fd.as_raw_fd());
    let checked = match rustix::fs::accessat(
        CWD,
        &checked,
        rustix::fs::Access::EXISTS,
        rustix::fs::AtFlags::empty(),
    ) {
        Ok(()) => checked.into(),
        Err(_) => target.path.clone(),
    };
    rustix::mount::mount(source, checked, fstype, flags, data.as_c_str()).map_err(failed)
}

fn mount_flags(options: &MountOptions) -> MountFlags {
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::RDONLY, options.ro);
    flags.set(MountFlags::NOEXEC, options.noexec);
    flags.set(MountFlags::NOSUID, options.nosuid);
    flags.set(MountFlags::NODEV, options.nodev);
    flags.set(MountFlags::NOSYMFOLLOW, options.nosymfollow);
    flags.insert(match options.access_times {
        AccessTimeRule::Relative => MountFlags::empty(),
        AccessTimeRule::Strict => MountFlags::STRICTATIME,
        AccessTimeRule::Never => MountFlags::NOATIME,
    });
    flags.set(MountFlags::SYNCHRONOUS, options.sync);
    flags.set(MountFlags::DIRSYNC, options.dirsync);
    flags
}

#[cfg(test)]
pub(super) fn mount_by_syscall(
    target: &CheckedTarget,
    options: &MountOptions,
) -> Result<PreparedMount, MountError> {
    let device = open_device(&target.path)?;
    mount_by_call(&device, target, options).map_err(|failure| error(target, failure))?;
    let mountpoint = target.path.clone();
    let syncfs = SyncFs::NotWanted;
    Ok(PreparedMount { device, mountpoint, how: MountMethod::MountSyscall, syncfs, watch: None })
}
