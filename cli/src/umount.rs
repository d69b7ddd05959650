//! `defuse umount`.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use defuse_fuse::mount::{
    MountEntry, ServerLiveness, UnmountError, force_if, fuse_mounts, is_dead_mount, liveness,
    unmount_if,
};

use crate::completions;
use crate::error::{self, CommandFailure, Result};
use crate::mount_locations::{self, DaemonIdentity, MountLocation};
use crate::paths;
use crate::registry::{self, RegisteredMount};

/// Time limit for the daemon to make everything durable.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit after a lazy unmount, whose files may stay open.
const LAZY_PATIENCE: Duration = Duration::from_millis(500);
/// Time after which a message about the wait is printed.
const QUIET: Duration = Duration::from_secs(1);

/// Unmount file systems
///
/// Waits until everything is durable and the serving process has ended. Also removes a mount whose
/// process has died.
#[derive(clap::Args, Default)]
pub struct UmountArgs {
    /// Detach at once, even if in use; the mount ends when its last file is closed
    #[arg(short, long)]
    pub lazy: bool,
    /// Cut off what is in progress, as `umount -f` does
    #[arg(skip)]
    pub force: bool,
    /// Do not report other places where the file system is mounted, as umount(8) does not
    #[arg(skip)]
    pub silent: bool,
    /// The mount points
    #[arg(required = true, add = completions::own_mounts())]
    pub mountpoints: Vec<PathBuf>,
}

/// Unmounts all mounts that can be unmounted, and fails if one cannot.
pub fn run(args: &UmountArgs) -> Result {
    let mut outcome = Ok(());
    for path in &args.mountpoints {
        if let Err(failure) = unmount_one(&paths::mountpoint(path), args) {
            if let Err(earlier) = &outcome {
                error::warn(earlier);
            }
            outcome = Err(failure);
        }
    }
    outcome
}

fn unmount_one(path: &Path, args: &UmountArgs) -> Result {
    let (found, lazy) = (registry::find_by_mountpoint(path), args.lazy);
    let Some(mount) = mount_at(path) else {
        return match found {
            Some(found) => check_elsewhere(path, &found, lazy),
            // umount(2) returns the most exact error.
            None => unmount_if(path, lazy, is_ours).map_err(CommandFailure::from_error),
        };
    };
    if found.is_none() && !is_ours(&mount) {
        let (path, fstype) = (path.display(), &mount.fstype);
        return Err(CommandFailure::Failed(format!(
            "{path} is a mount of {fstype}, not of defuse: use umount(8)"
        )));
    }
    // The path may lead elsewhere at any time.
    let is_it = |now: &MountEntry| now.mount_id == mount.mount_id;
    let served = UnmountTarget::find(mount.connection(), found);
    let before = mount_locations::places(mount.connection());
    if args.force {
        // Calls in progress fail, and then none of them uses the mount.
        let _ = force_if(path, is_it);
    }
    if !args.force || mount_at(path).is_some_and(|now| is_it(&now)) {
        let serving = served.as_ref().is_some_and(UnmountTarget::is_alive);
        match unmount_if(path, lazy, is_it) {
            // Processes in it can do nothing with it any more.
            Err(UnmountError::Busy { .. }) if !serving && is_dead_mount(path) => {
                unmount_if(path, true, is_it).map_err(CommandFailure::from_error)?;
            }
            other => other.map_err(CommandFailure::from_error)?,
        }
    }
    let Some(served) = served else { return Ok(()) };
    let others =
        find_lasting(|| mount_locations::find_remaining(mount.connection(), &before), &served);
    if others.is_empty() {
        return wait_for(path, &served, lazy);
    }
    if args.silent {
        return Ok(());
    }
    let pid = served.daemon.pid;
    error::warn(&format!(
        "unmounted {}; the file system is also mounted on {}, so that process {pid} goes on to serve it until \
         `{}`",
        path.display(),
        join_commands(&others),
        commands(&others)
    ));
    Ok(())
}

/// The other places of a mount that stay for longer than it takes a process to start: a new mount
/// namespace, such as the namespace of another mount's daemon, has copies of all mounts for a
/// moment. A place in the namespace of this process stays. None if the daemon ends meanwhile.
fn find_lasting(
    others: impl Fn() -> Vec<MountLocation>,
    served: &UnmountTarget,
) -> Vec<MountLocation> {
    const MOMENT: Duration = Duration::from_secs(1);
    const PAUSE: Duration = Duration::from_millis(50);
    let begun = Instant::now();
    loop {
        let others = others();
        if others.is_empty() || !served.is_alive() {
            return Vec::new();
        }
        if begun.elapsed() > MOMENT || others.iter().any(MountLocation::is_here) {
            return others;
        }
        thread::sleep(PAUSE);
    }
}

fn join_commands(places: &[MountLocation]) -> String {
    places.iter().map(MountLocation::to_string).collect::<Vec<_>>().join(", ")
}

fn commands(places: &[MountLocation]) -> String {
    places.iter().map(MountLocation::command).collect::<Vec<_>>().join("`, `")
}

/// Waits for the daemon of a mount that was here, or fails with the place of the mount.
fn check_elsewhere(path: &Path, found: &RegisteredMount, lazy: bool) -> Result {
    let places = mount_locations::places(found.entry.connection);
    if places.is_empty() || !found.entry.is_alive() {
        let daemon = DaemonIdentity { pid: found.entry.pid, start: found.entry.pid_start };
        return wait_for(path, &UnmountTarget { daemon, found: Some(found.clone()) }, lazy);
    }
    Err(CommandFailure::Failed(format!(
        "{} is not mounted here, but on {}: unmount it there with `{}`, or end its process with `kill {}`",
        path.display(),
        join_commands(&places),
        commands(&places),
        found.entry.pid
    )))
}

/// A mount whose daemon is known.
struct UnmountTarget {
    daemon: DaemonIdentity,
    found: Option<RegisteredMount>,
}

impl UnmountTarget {
    /// The daemon by the registry, or by the device that it has open: the entry may be of another
    /// PID namespace.
    fn find(connection: u32, found: Option<RegisteredMount>) -> Option<UnmountTarget> {
        let entry = found.as_ref().map(|found| &found.entry);
        let registered =
            entry.map(|entry| DaemonIdentity { pid: entry.pid, start: entry.pid_start });
        let holders = DaemonIdentity::find_daemons(connection);
        let daemon = match registered {
            Some(registered) if holders.is_empty() || holders.contains(&registered) => {
                Some(registered)
            }
            _ => holders.last().copied(),
        };
        daemon.map(|daemon| UnmountTarget { daemon, found })
    }

    fn is_alive(&self) -> bool {
        self.daemon.is_alive()
    }
}

/// Removes a mount of defuse from `path` whose daemon has died, so that `path` can be mounted
/// again.
pub fn clear_dead(path: &Path) -> Result {
    let Some(mount) = mount_at(path) else { return Ok(()) };
    let found = registry::find_by_mountpoint(path);
    if !(is_ours(&mount) || found.is_some()) || liveness(path) != ServerLiveness::Dead {
        return Ok(());
    }
    log::warn!("{} has a mount whose process has died: removing it", path.display());
    let is_it = |now: &MountEntry| now.mount_id == mount.mount_id;
    unmount_if(path, true, is_it).map_err(CommandFailure::from_error)?;
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
fn wait_for(path: &Path, served: &UnmountTarget, lazy: bool) -> Result {
    let (pid, begun) = (served.daemon.pid, Instant::now());
    let patience = if lazy { LAZY_PATIENCE } else { PATIENCE };
    let mut reported = false;
    while served.is_alive() {
        let waited = begun.elapsed();
        if waited > patience && lazy {
            error::warn(&format!("detached; process {pid} ends when the last file is closed"));
            return Ok(());
        }
        if waited > patience {
            return Err(CommandFailure::Failed(format!(
                "unmounted {}, but process {pid} has not ended after {} s: it may still write, or the file \
                 system is mounted in a namespace that this user cannot see; see its log, or end it with \
                 `kill {pid}`",
                path.display(),
                patience.as_secs()
            )));
        }
        if waited > QUIET && !reported && !lazy {
            error::warn(&format!("waiting for process {pid} to make everything durable"));
            reported = true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    match served.found.as_ref().and_then(RegisteredMount::take_failure) {
        Some(failure) => Err(CommandFailure::Failed(failure)),
        None => Ok(()),
    }
}
