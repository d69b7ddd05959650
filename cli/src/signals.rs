//! Signals of a daemon: an orderly end, an end at once, or statistics in the log.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::{fs, io, thread};

use defuse_fuse::Statistics;
use defuse_fuse::mount::{UnmountError, connection_id, unmount};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

/// Catches the signals from now on; [`serve`] handles them.
pub fn catch() -> io::Result<Signals> {
    Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1])
}

/// The mount that signals act on.
pub struct Target {
    /// The mount point at the start.
    pub mountpoint: PathBuf,
    /// The connection, if known.
    pub connection: Option<u32>,
    /// The kernel's list of connections, if it must be opened in advance.
    pub connections: Option<OwnedFd>,
    /// The statistics of the session.
    pub statistics: Statistics,
}

/// Handles signals on a thread of its own.
pub fn serve(mut signals: Signals, target: Target) -> io::Result<()> {
    let run = move || {
        let mut ending = false;
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => log::info!("statistics: {}", target.statistics.snapshot()),
                _ if ending => abort(target.connection, target.connections.as_ref()),
                _ => {
                    ending = true;
                    begin_to_end(&target);
                }
            }
        }
    };
    thread::Builder::new().name("defuse-signals".to_owned()).spawn(run).map(drop)
}

/// Unmounts on another thread: unmounting waits for data to be written, and a further signal must
/// be handled even if that never ends.
fn begin_to_end(target: &Target) {
    let (mountpoint, connection) = (target.mountpoint.clone(), target.connection);
    let run = move || unmount_or_detach(&mountpoint, connection);
    if let Err(error) = thread::Builder::new().name("defuse-unmount".to_owned()).spawn(run) {
        log::error!("cannot unmount {}: {error}", target.mountpoint.display());
    }
}

fn unmount_or_detach(mountpoint: &Path, connection: Option<u32>) {
    let shown = mountpoint.display();
    if connection.is_some() && connection_id(mountpoint) != connection {
        log::info!(
            "{shown} is not mounted any more, but files are open; signal again to cut them off"
        );
        return;
    }
    match unmount(mountpoint, false) {
        Ok(()) => log::info!("unmounted {shown}"),
        Err(UnmountError::Busy { .. }) => {
            log::warn!(
                "{shown} is in use: detached until its last file is closed; signal again to cut it off"
            );
            if let Err(error) = unmount(mountpoint, true) {
                log::error!("{error}");
            }
        }
        Err(error) => log::error!("{error}"),
    }
}

/// Aborts the connection. All waiting requests fail with ECONNABORTED.
fn abort(connection: Option<u32>, connections: Option<&OwnedFd>) {
    log::warn!("second signal: the connection is aborted");
    let Some(number) = connection else {
        log::error!("the number of the connection is unknown; exiting now");
        std::process::exit(1);
    };
    let file = format!("{number}/abort");
    let mounted = Path::new(CONNECTIONS).join(&file);
    let aborted = fs::write(mounted, "1").or_else(|error| match connections {
        Some(root) => abort_unmounted(root, &file),
        None => Err(error),
    });
    if let Err(error) = aborted {
        // The kernel ends the connection with the last descriptor of the device.
        log::error!("fusectl cannot abort connection {number}: {error}; exiting now");
        std::process::exit(1);
    }
}

/// The mount point of fusectl.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// A replacement of [`CONNECTIONS`] if fusectl is not mounted, as in many containers: root may open a
/// detached instance of fusectl. This must happen before the sandbox refuses to mount.
pub fn connections() -> Option<OwnedFd> {
    if fs::read_dir(CONNECTIONS).is_ok_and(|mut all| all.next().is_some()) {
        return None;
    }
    let open = || {
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    };
    open().map_err(|errno| log::debug!("fusectl is not available: {errno}")).ok()
}

fn abort_unmounted(connections: &OwnedFd, file: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let abort = rustix::fs::openat(connections, file, flags, Mode::empty())?;
    rustix::io::write(abort, b"1").map(drop).map_err(Into::into)
}
