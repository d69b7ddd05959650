//! What signals do to a daemon: end it in order, end it at once, or make it tell its statistics.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::{fs, io, thread};

use defuse_fuse::Statistics;
use defuse_fuse::mount::{UnmountError, connection_id, unmount};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

/// Keeps the signals from killing the process from now on; they are handled by [`serve`].
pub fn catch() -> io::Result<Signals> {
    Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1])
}

/// The mount that signals are about.
pub struct Target {
    /// Where it was mounted.
    pub mountpoint: PathBuf,
    /// Its connection, where known.
    pub connection: Option<u32>,
    /// The kernel's list of connections, where it has to be opened beforehand.
    pub connections: Option<OwnedFd>,
    /// What it has measured.
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

/// Unmounts on yet another thread: unmounting waits for data to be written, and the next signal
/// must be heard even where that never happens.
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

/// Ends the connection, whoever uses it. Everything that waits for it fails with ECONNABORTED.
fn abort(connection: Option<u32>, connections: Option<&OwnedFd>) {
    log::warn!("signalled again: the connection is aborted");
    let Some(number) = connection else {
        log::error!("its number is not known; ending at once");
        std::process::exit(1);
    };
    let file = format!("{number}/abort");
    let mounted = Path::new(CONNECTIONS).join(&file);
    let aborted = fs::write(mounted, "1").or_else(|error| match connections {
        Some(root) => abort_unmounted(root, &file),
        None => Err(error),
    });
    if let Err(error) = aborted {
        // The kernel ends the connection when nobody has the device open any more.
        log::error!("fusectl does not abort connection {number}: {error}; ending at once");
        std::process::exit(1);
    }
}

/// Where fusectl is mounted.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// The same as [`CONNECTIONS`] where nothing is mounted there, as in many containers: root may have an
/// instance of fusectl that is mounted nowhere. It is taken before the sandbox refuses to mount.
pub fn connections() -> Option<OwnedFd> {
    if fs::read_dir(CONNECTIONS).is_ok_and(|mut all| all.next().is_some()) {
        return None;
    }
    let open = || {
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    };
    open().map_err(|errno| log::debug!("fusectl cannot be had: {errno}")).ok()
}

fn abort_unmounted(connections: &OwnedFd, file: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let abort = rustix::fs::openat(connections, file, flags, Mode::empty())?;
    rustix::io::write(abort, b"1").map(drop).map_err(Into::into)
}
