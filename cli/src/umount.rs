//! `defuse umount`.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use defuse_fuse::mount::{
    Liveness, MountEntry, UnmountError, fuse_mounts, is_dead_mount, liveness, unmount,
};

use crate::error::{self, Failure, Result};
use crate::paths;
use crate::registry::{self, Found, State};

/// Time limit for the daemon to make everything durable.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit after a lazy unmount, whose files may stay open.
const LAZY_PATIENCE: Duration = Duration::from_millis(500);
/// Time after which a message about the wait is printed.
const QUIET: Duration = Duration::from_secs(1);

/// Unmount file systems
///
/// Waits until everything is durable and the serving process has ended. Also removes a mount whose process
/// has died.
#[derive(clap::Args)]
pub struct UmountArgs {
    /// Detach at once, even if in use; the mount ends when its last file is closed
    #[arg(short, long)]
    lazy: bool,
    /// The mount points
    #[arg(required = true)]
    mountpoints: Vec<PathBuf>,
}

/// Unmounts all mounts that can be unmounted, and fails if one cannot.
pub fn run(args: &UmountArgs) -> Result {
    let mut outcome = Ok(());
    for path in &args.mountpoints {
        if let Err(failure) = one(&paths::mountpoint(path), args.lazy) {
            if let Err(earlier) = &outcome {
                error::warn(earlier);
            }
            outcome = Err(failure);
        }
    }
    outcome
}

fn one(path: &Path, lazy: bool) -> Result {
    let found = registry::of_mountpoint(path);
    let Some(mount) = mount_at(path) else {
        return match found {
            Some(found) => wait_for(&found, lazy),
            // It knows best what to say.
            None => unmount(path, lazy).map_err(Failure::failed),
        };
    };
    if found.is_none() && !is_ours(&mount) {
        let (path, fstype) = (path.display(), &mount.fstype);
        return Err(Failure::Failed(format!(
            "{path} is a mount of {fstype}, not of defuse: use umount(8)"
        )));
    }
    let served = found.as_ref().is_some_and(|found| found.state == State::Serving);
    match unmount(path, lazy) {
        // Processes in it can do nothing with it any more.
        Err(UnmountError::Busy { .. }) if !served && is_dead_mount(path) => {
            unmount(path, true).map_err(Failure::failed)?;
        }
        other => other.map_err(Failure::failed)?,
    }
    found.map_or(Ok(()), |found| wait_for(&found, lazy))
}

/// Removes a mount of defuse from `path` whose daemon has died, so that `path` can be mounted again.
pub fn clear_dead(path: &Path) -> Result {
    let Some(mount) = mount_at(path) else { return Ok(()) };
    let found = registry::of_mountpoint(path);
    if !(is_ours(&mount) || found.is_some()) || liveness(path) != Liveness::Dead {
        return Ok(());
    }
    log::warn!("{} has a mount whose process has died: removing it", path.display());
    unmount(path, true).map_err(Failure::failed)?;
    if let Some(found) = found {
        found.remove();
    }
    Ok(())
}

/// The topmost FUSE mount at this path.
pub fn mount_at(path: &Path) -> Option<MountEntry> {
    fuse_mounts().ok()?.into_iter().rfind(|mount| mount.mount_point == path)
}

/// True for a mount of defuse, judged by its type.
pub fn is_ours(mount: &MountEntry) -> bool {
    ["fuse.defuse", "fuseblk.defuse"].contains(&mount.fstype.as_str())
}

/// Waits until the daemon has ended, and removes its entry.
fn wait_for(found: &Found, lazy: bool) -> Result {
    let (pid, begun) = (found.entry.pid, Instant::now());
    let patience = if lazy { LAZY_PATIENCE } else { PATIENCE };
    let mut told = false;
    while found.entry.is_alive() {
        let waited = begun.elapsed();
        if waited > patience && lazy {
            error::warn(&format!("detached; process {pid} ends when the last file is closed"));
            return Ok(());
        }
        if waited > patience {
            return Err(Failure::Failed(format!(
                "unmounted {}, but process {pid} has not ended after {} s: it may still write; see \
                 its log, or end it with `kill {pid}`",
                found.entry.mountpoint,
                patience.as_secs()
            )));
        }
        if waited > QUIET && !told && !lazy {
            error::warn(&format!("waiting for process {pid} to make everything durable"));
            told = true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    match found.take_failure() {
        Some(failure) => Err(Failure::Failed(failure)),
        None => Ok(()),
    }
}
