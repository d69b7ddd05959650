//! Signals of a daemon: an orderly end, an end at once, or statistics in the log.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{io, thread};

use defuse_fuse::SessionStatistics;
use defuse_fuse::mount::{MountEntry, UnmountError, connection_id, unmount_if};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::sandbox::keeper::{KeeperHandle, KeeperNotes, KeeperOrder};

/// Catches the signals from now on; [`serve`] handles them.
pub fn catch() -> io::Result<Signals> {
    Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1])
}

/// The mount that signals act on.
pub struct SignalTarget {
    /// The mount point at the start.
    pub mountpoint: PathBuf,
    /// The connection, if known.
    pub connection: Option<u32>,
    /// The file that aborts the connection.
    pub abort: Option<OwnedFd>,
    /// The process that unmounts, if this one is in a namespace of its own.
    pub keeper: Option<Arc<KeeperHandle>>,
    /// The kernel keeps data that programs have written, until it has time.
    pub caches_writes: bool,
    /// The statistics of the session.
    pub statistics: SessionStatistics,
}

/// Handles signals on a thread of its own.
pub fn serve(mut signals: Signals, target: SignalTarget) -> io::Result<()> {
    let run = move || {
        let mut ending = false;
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => log::info!("statistics: {}", target.statistics.snapshot()),
                _ if ending => abort(target.connection, target.abort.as_ref()),
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
fn begin_to_end(target: &SignalTarget) {
    let (mountpoint, connection) = (target.mountpoint.clone(), target.connection);
    let (keeper, syncs) = (target.keeper.clone(), target.caches_writes);
    let abort = target.abort.as_ref().and_then(|file| file.try_clone().ok());
    let run = move || {
        let unmounted = match keeper {
            Some(keeper) => keeper.order(&KeeperOrder::Unmount(syncs)),
            None => {
                let notes = unmount_or_detach(&mountpoint, connection, syncs);
                notes.log();
                notes.unmounted
            }
        };
        // The file system may also be mounted elsewhere, as in the mount namespace of a container,
        // from where no process would end this daemon. An ended connection takes no harm.
        if let Some(file) = abort.filter(|_| unmounted) {
            let _ = rustix::io::write(file, b"1");
        }
    };
    if let Err(error) = thread::Builder::new().name("defuse-unmount".to_owned()).spawn(run) {
        log::error!("cannot unmount {}: {error}", target.mountpoint.display());
    }
}

/// Unmounts `mountpoint` if it still has this connection, or detaches it if it is in use. Returns
/// lines for the log. With `syncs`, the kernel first writes the data that it keeps: it does so by
/// itself at the unmount of the last mount alone, which this one may not be.
pub fn unmount_or_detach(mountpoint: &Path, connection: Option<u32>, syncs: bool) -> KeeperNotes {
    use log::Level::{Error, Info, Warn};
    let (shown, mut notes) = (mountpoint.display(), KeeperNotes::default());
    if connection.is_some() && connection_id(mountpoint) != connection {
        let next = "is not mounted any more, but files are open; signal again to cut them off";
        notes.add(Info, format!("{shown} {next}"));
        return notes;
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let root = syncs.then(|| rustix::fs::open(mountpoint, flags, Mode::empty()));
    if let Some(Ok(root)) = root {
        let _ = rustix::fs::syncfs(root);
    }
    let is_it = |now: &MountEntry| connection.is_none_or(|number| now.connection() == number);
    match unmount_if(mountpoint, false, is_it) {
        Ok(()) => {
            notes.unmounted = true;
            notes.add(Info, format!("unmounted {shown}"));
        }
        Err(UnmountError::Busy { .. }) => {
            let next =
                "is in use: detached until its last file is closed; signal again to cut it off";
            notes.add(Warn, format!("{shown} {next}"));
            if let Err(error) = unmount_if(mountpoint, true, is_it) {
                notes.add(Error, error);
            }
        }
        Err(error) => notes.add(Error, error),
    }
    notes
}

/// Aborts the connection. All waiting requests fail with ECONNABORTED.
fn abort(connection: Option<u32>, file: Option<&OwnedFd>) {
    log::warn!("second signal: the connection is aborted");
    let Some((number, file)) = connection.zip(file) else {
        // The kernel ends the connection with the last descriptor of the device.
        log::error!("fusectl does not show the connection; exiting now");
        std::process::exit(1);
    };
    if let Err(errno) = rustix::io::write(file, b"1") {
        log::error!("fusectl cannot abort connection {number}: {errno}; exiting now");
        std::process::exit(1);
    }
}

/// The mount point of fusectl.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// Opens the file that aborts a connection. If fusectl is not mounted, as in many containers, root
/// may open a detached instance of fusectl. This must happen before the sandbox refuses to mount.
pub fn open_abort(connection: u32) -> Option<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let mounted =
        rustix::fs::open(format!("{CONNECTIONS}/{connection}/abort"), flags, Mode::empty());
    let detached = || {
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let all = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        rustix::fs::openat(all, format!("{connection}/abort"), flags, Mode::empty())
    };
    let opened = mounted.or_else(|_| detached());
    opened.map_err(|errno| log::debug!("fusectl is not available: {errno}")).ok()
}
