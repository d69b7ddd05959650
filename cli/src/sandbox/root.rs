//! A mount namespace of a daemon's own, and a root directory that holds only what it serves.
//!
//! The daemon first has a copy of the namespace of its user, in which it opens its source as usual. A
//! directory that is served is covered by a copy of itself, so that every descriptor into it belongs to
//! that copy. At the end the copies move below a new root, and everything else is detached: `..` leads from
//! a descriptor to the new root, and no path to anything else.

use std::fs::{self, DirBuilder};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use defuse_fuse::mount::{MountEntry, all_mounts};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, pivot_root};
use rustix::thread::UnshareFlags;

/// Files outside of the source that a daemon opens later: its own descriptors by number, the device for
/// each worker, and those that libraries open in every program.
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

/// A directory of the namespace of the user that the daemon serves.
pub struct Served {
    /// Without symbolic links.
    path: PathBuf,
    /// The copy of it and of the mounts below.
    copy: OwnedFd,
}

/// Puts this thread, and those that it starts, into a copy of its mount namespace. No mount or unmount there
/// affects the original. Its working directory becomes the root.
pub fn leave() -> Result<()> {
    chdir("/")?;
    // Deprecated for the flag FILES, after which threads have different descriptors.
    #[expect(
        deprecated,
        reason = "only FILES is unsafe, and the other function needs unsafe code"
    )]
    rustix::thread::unshare(UnshareFlags::NEWNS)?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
}

/// Covers the directory `path` by a copy of itself. Without `devices`, no device node in the copy can be
/// opened, and thus none that an attacker creates there.
pub fn cover(path: &Path, devices: bool) -> Result<Served> {
    let copy = open_tree(CWD, path, copying(path))?;
    attach(&copy, path)?;
    if !devices {
        for mount in all_mounts().map_err(|_| Errno::IO)? {
            if mount.mount_point.starts_with(path) {
                mount_remount(
                    &mount.mount_point,
                    MountFlags::BIND | MountFlags::NODEV | flags(&mount),
                    "",
                )?;
            }
        }
    }
    Ok(Served { path: path.to_path_buf(), copy })
}

/// Makes the copies and [`KEPT`] the only content of this namespace, for all threads of this process.
pub fn confine(served: &[Served]) -> Result<()> {
    // One that does not exist here is not needed.
    let kept = |path: &&'static str| {
        let path = Path::new(*path);
        Some((path, path.is_dir(), open_tree(CWD, path, copying(path)).ok()?))
    };
    let kept: Vec<_> = KEPT.iter().filter_map(kept).collect();
    let root = empty_root()?;
    attach(&root, Path::new(PLACE))?;
    for one in served {
        let to = below(&one.path);
        make_dirs(&to)?;
        attach(&one.copy, &to)?;
    }
    for (path, is_dir, tree) in &kept {
        let to = below(path);
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

fn copying(path: &Path) -> OpenTreeFlags {
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
fn below(path: &Path) -> PathBuf {
    Path::new(PLACE).join(path.strip_prefix("/").unwrap_or(path))
}

fn make_dirs(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// The flags of `mount` that another one of the same file system must keep.
fn flags(mount: &MountEntry) -> MountFlags {
    crate::remount::flags_of_mount(&mount.mount_options)
}

/// The reason why `directories` cannot be served from another namespace as they are from this one, or
/// `None`. Mounts and unmounts below a directory reach the copy of it only if its mount is shared.
pub fn unfit(directories: &[PathBuf], forced: bool) -> Option<String> {
    let Ok(mounts) = all_mounts() else { return Some("the mounts cannot be read".to_owned()) };
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

/// The directory of a source, without symbolic links. `None` if it does not exist: opening it fails, too.
pub fn resolved(path: &Path) -> Option<PathBuf> {
    fs::canonicalize(path).ok()
}
