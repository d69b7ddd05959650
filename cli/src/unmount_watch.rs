//! `-o auto_unmount` for other users than root.
//!
//! fusermount3 waits for the end of the daemon, and unmounts if the mount point is not connected.
//! It looks there as root, and the kernel lets root look into mounts of other users only with
//! `fuse.allow_sys_admin_access`. So a process of the user waits, too, and looks as the user.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use defuse_fuse::mount;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::{CommandFailure, Result};
use crate::inherited;

/// Looks at the mount point, and the time between two of them: the device closes a moment after the
/// daemon's socket.
const LOOKS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// The process that unmounts if this one is killed. Dropped, it ends and leaves the mount.
pub struct UnmountWatch {
    process: Child,
    /// Closes when this process ends.
    _socket: UnixStream,
}

impl UnmountWatch {
    /// Starts the process for the mount at `mountpoint`.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot be started.
    pub fn start(mountpoint: &Path) -> io::Result<UnmountWatch> {
        let (ours, theirs) = UnixStream::pair()?;
        inherited::keep_descriptors(&[]);
        let process = Command::new("/proc/self/exe")
            .arg("watch-mount")
            .arg(mountpoint)
            .current_dir("/")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(UnmountWatch { process, _socket: ours })
    }
}

impl Drop for UnmountWatch {
    fn drop(&mut self) {
        // After an orderly unmount, the next mount at this place must stay.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The arguments of the process.
#[derive(clap::Args)]
pub struct WatchMountArgs {
    /// The mount point
    mountpoint: PathBuf,
}

/// The process: waits for the end of the daemon, whose socket is the standard input.
pub fn run(args: &WatchMountArgs) -> Result {
    inherited::give_up();
    // Shown by ps(1).
    let _ = rustix::thread::set_name(c"defuse-unmount");
    // A terminal signals all processes; this one ends after the daemon.
    let _ = rustix::process::setsid();
    let mut byte = [0];
    while matches!(io::stdin().read(&mut byte), Ok(1..)) {}
    for _ in 0..LOOKS {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        match rustix::fs::open(&args.mountpoint, flags, Mode::empty()) {
            Err(Errno::NOTCONN) => {
                return mount::unmount(&args.mountpoint, true).map_err(CommandFailure::from_error);
            }
            // Another process has the device, or fusermount3 was faster.
            _ => thread::sleep(PAUSE),
        }
    }
    Ok(())
}
