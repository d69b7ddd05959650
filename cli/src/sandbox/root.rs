//! A mount namespace of a daemon's own, and a root directory that holds only what it serves.
//!
//! The daemon first has a copy of the namespace of its user, in which it opens its source as usual.
//! A directory that is served is covered by a copy of itself, so that every descriptor into it
//! belongs to that copy. At the end the copies move below a new root, and everything else is
//! detached: `..` leads from a descriptor to the new root, and no path to anything else.

use std::fs::{self, DirBuilder};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use defuse_fuse::mount::{MountEntry, list_mounts};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::{Errno, Result};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, chroot, fchdir, pivot_root};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use crate::mount_flags;

/// Files outside of the source that a daemon opens later: its own descriptors by number, the device
/// for each worker, and those that libraries open in every program.
const KEPT: [&str; 5] = [
    "/proc/self/fd",
    "/dev/fuse",
    "/dev/null",
    "/dev/urandom",
    // The number of rings for requests.
    "/sys/devices/system/cpu/possible",
];

/// The place where the new root is prepared. Every process needs /proc, so it exists.
const PLACE: &str = "/proc";

/// The propagation of mounts in a copy of a namespace: from the original, and not to it.
const FOLLOWING: MountPropagationFlags =
    MountPropagationFlags::DOWNSTREAM.union(MountPropagationFlags::REC);

/// A directory of the namespace of the user that the daemon serves.
pub struct SandboxDirectory {
    /// Without symbolic links.
    path: PathBuf,
    /// The copy of the directory and of the mounts below.
    copy: OwnedFd,
}

/// Puts this thread, and those that it starts, into a copy of its mount namespace. No mount or
/// unmount there affects the original. Its working directory becomes the root.
pub fn leave() -> Result<()> {
    chdir("/")?;
    // Deprecated for the flag FILES, after which threads have different descriptors.
    #[expect(
        deprecated,
        reason = "only FILES is unsafe, and the other function needs unsafe code"
    )]
    rustix::thread::unshare(UnshareFlags::NEWNS)?;
    mount_change("/", FOLLOWING)?;
    leave_outside()
}

/// Detaches what lies outside of the root directory, if chroot(2) has changed that: `..` would lead
/// there from the new root.
fn leave_outside() -> Result<()> {
    let own = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let path = "/proc/thread-self/ns/mnt";
    let namespace = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // The root directory and the working directory are then the namespace's.
    match move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount)) {
        Ok(()) => {}
        // Without CAP_SYS_CHROOT, as in some containers. Their root is the root of the namespace.
        Err(Errno::PERM) => {
            log::info!(
                "the mount namespace of the daemon has all mounts outside of its root directory"
            );
            return Ok(());
        }
        Err(errno) => return Err(errno),
    }
    let of_namespace = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    if mount_of(&own)? == mount_of(&of_namespace)? {
        return Ok(());
    }
    mount_change("/", FOLLOWING)?;
    fchdir(&own)?;
    match pivot_root(".", ".") {
        Ok(()) => unmount(".", UnmountFlags::DETACH)?,
        // The root of the namespace is the first file system of the kernel, which stays.
        Err(Errno::INVAL) => {
            log::info!(
                "the mount namespace of the daemon has all mounts outside of its root directory"
            );
            chroot(".")?;
        }
        Err(errno) => return Err(errno),
    }
    chdir("/")
}

/// The number of the mount of a file.
fn mount_of(file: &OwnedFd) -> Result<u64> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    Ok(stat.stx_mnt_id)
}

/// Covers the directory `path` by a copy of itself. Without `devices`, no device node in the copy
/// can be opened, and thus none that an attacker creates there.
pub fn cover(path: &Path, devices: bool) -> Result<SandboxDirectory> {
    let copy = open_tree(CWD, path, copy_flags(path))?;
    attach(&copy, path)?;
    if !devices {
        for mount in list_mounts().map_err(|_| Errno::IO)? {
            if mount.mount_point.starts_with(path) {
                mount_remount(
                    &mount.mount_point,
                    MountFlags::BIND | MountFlags::NODEV | flags(&mount),
                    "",
                )?;
            }
        }
    }
    Ok(SandboxDirectory { path: path.to_path_buf(), copy })
}

/// Makes the copies and [`KEPT`] the only content of this namespace, for all threads of this
/// process.
pub fn confine(served: &[SandboxDirectory]) -> Result<()> {
    // One that does not exist here is not needed.
    let kept = |path: &&'static str| {
        let path = Path::new(*path);
        Some((path, path.is_dir(), open_tree(CWD, path, copy_flags(path)).ok()?))
    };
    let kept: Vec<_> = KEPT.iter().filter_map(kept).collect();
    let root = empty_root()?;
    attach(&root, Path::new(PLACE))?;
    for one in served {
        let to = path_in_new_root(&one.path);
        make_dirs(&to)?;
        attach(&one.copy, &to)?;
    }
    for (path, is_dir, tree) in &kept {
        let to = path_in_new_root(path);
        match is_dir {
            true => make_dirs(&to)?,
            false => {
                make_dirs(to.parent().unwrap_or(Path::new(PLACE)))?;
                let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
                rustix::fs::open(&to, flags, Mode::empty())?;
            }
        }
        attach(tree, &to)?;
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_remount(PLACE, MountFlags::BIND | MountFlags::RDONLY | flags, "")?;
    chdir(PLACE)?;
    // The old root comes to lie over the new one, and is detached with all that is mounted in it.
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")
}

fn copy_flags(path: &Path) -> OpenTreeFlags {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    // Nothing is mounted below a file, and nothing below /proc/self/fd is ours to copy.
    if KEPT.iter().any(|kept| path == Path::new(kept)) {
        flags
    } else {
        flags | OpenTreeFlags::AT_RECURSIVE
    }
}

fn attach(tree: &OwnedFd, to: &Path) -> Result<()> {
    move_mount(tree, "", CWD, to, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

fn empty_root() -> Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "mode", "755")?;
    fsconfig_set_string(&context, "size", "64k")?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// The path in the new root, before it is the root.
fn path_in_new_root(path: &Path) -> PathBuf {
    Path::new(PLACE).join(path.strip_prefix("/").unwrap_or(path))
}

fn make_dirs(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// The flags of `mount` that another one of the same file system must keep.
fn flags(mount: &MountEntry) -> MountFlags {
    mount_flags::parse(&mount.mount_options)
}

/// The reason why `directories` cannot be served from another namespace as they are from this one,
/// or `None`. Mounts and unmounts below a directory reach its copy only if its mount is shared.
pub fn explain_unfit(directories: &[PathBuf], forced: bool) -> Option<String> {
    let Ok(mounts) = list_mounts() else { return Some("the mounts cannot be read".to_owned()) };
    if !mounts.iter().any(|mount| mount.mount_point == Path::new("/") && mount.fstype != "rootfs") {
        return Some("the root directory is no mount of its own".to_owned());
    }
    directories.iter().find_map(|path| {
        if path == Path::new("/") || path.starts_with("/proc") {
            return Some(format!("it serves {}", path.display()));
        }
        let holds = |mount: &&MountEntry| path.starts_with(&mount.mount_point);
        let deepest =
            mounts.iter().filter(holds).max_by_key(|mount| mount.mount_point.as_os_str().len());
        let below = mounts.iter().filter(|mount| mount.mount_point.starts_with(path));
        let private = deepest.into_iter().chain(below).find(|mount| !mount.shared);
        let private = private.filter(|_| !forced)?;
        Some(format!(
            "the mount {} is not shared, so that later mounts below {} would not be served (`mount \
             --make-rshared {}` makes it so, and `-o sandbox=namespace` does without)",
            private.mount_point.display(),
            path.display(),
            private.mount_point.display()
        ))
    })
}

/// The directory of a source, without symbolic links. `None` if it does not exist: opening it
/// fails, too.
pub fn resolve(path: &Path) -> Option<PathBuf> {
    fs::canonicalize(path).ok()
}
