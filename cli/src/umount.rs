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

/// How long the daemon may take to make everything durable.
const PATIENCE: Duration = Duration::from_secs(60);
/// After a lazy unmount its files may stay open for as long as they like.
const LAZY_PATIENCE: Duration = Duration::from_millis(500);
/// When a word about the waiting is in order.
const QUIET: Duration = Duration::from_secs(1);

/// Unmount file systems
///
/// Waits until the process that serves them has ended, and everything is durable. Also removes
/// what is left of a mount whose process is gone.
#[derive(clap::Args)]
pub struct UmountArgs {
    /// Detach at once, also what is in use; it ends when the last file is closed
    #[arg(short, long)]
    lazy: bool,
    /// Where it is mounted
    #[arg(required = true)]
    mountpoints: Vec<PathBuf>,
}

/// Unmounts all that can be unmounted, and fails if something could not.
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
        // Whoever is in there cannot do anything with it any more.
        Err(UnmountError::Busy { .. }) if !served && is_dead_mount(path) => {
            unmount(path, true).map_err(Failure::failed)?;
        }
        other => other.map_err(Failure::failed)?,
    }
    found.map_or(Ok(()), |found| wait_for(&found, lazy))
}

/// Removes a mount of ours from `path` whose daemon is gone, so that something can be mounted there.
pub fn clear_dead(path: &Path) -> Result {
    let Some(mount) = mount_at(path) else { return Ok(()) };
    let found = registry::of_mountpoint(path);
    if !(is_ours(&mount) || found.is_some()) || liveness(path) != Liveness::Dead {
        return Ok(());
    }
    log::warn!("{} has a mount whose process is gone: removing it", path.display());
    unmount(path, true).map_err(Failure::failed)?;
    if let Some(found) = found {
        found.remove();
    }
    Ok(())
}

/// The topmost FUSE mount there.
pub fn mount_at(path: &Path) -> Option<MountEntry> {
    fuse_mounts().ok()?.into_iter().rfind(|mount| mount.mount_point == path)
}

/// Whether a mount is one of defuse, as far as its type tells.
pub fn is_ours(mount: &MountEntry) -> bool {
    mount.fstype == "fuse.defuse"
}

/// Waits until the daemon has ended, and removes what it may have left.
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
