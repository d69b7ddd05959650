//! Mounts of the real program, and native ext4 as the reference.
//!
//! The server is a separate process, as for users. Everything is unmounted and removed when
//! dropped, also after a failed assertion.

mod ext4;
mod program;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::gluster::GlusterServers;

pub use ext4::Ext4Mount;
pub(crate) use ext4::succeed;
pub use program::program;
pub(crate) use program::root;

/// Time limit for a mount to appear, and for a server to exit.
const PATIENCE: Duration = Duration::from_secs(60);

/// The reason why mounting is not possible here; `None` if it is.
pub fn unavailable_reason() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root may mount for other users");
    }
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    device.err().map(|_| "there is no /dev/fuse")
}

/// A directory for one run, in memory if there is `/dev/shm`, so that no disk is involved.
pub fn scratch() -> Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix("defuse-testkit-");
    match builder.tempdir_in("/dev/shm") {
        Ok(dir) => Ok(dir),
        Err(_) => Ok(builder.tempdir()?),
    }
}

/// A mount that a child process serves in its foreground: `defuse mount`, or GlusterFS's own
/// client.
pub struct ServedMount {
    path: PathBuf,
    server: Child,
    log: PathBuf,
    /// The exit code of the server after an unmount.
    ends_with: i32,
    reaped: bool,
}

/// The option for the transport, so that it is always defined: /dev/fuse, unless the variable
/// `DEFUSE_TRANSPORT` is `io_uring`. Profiles define it themselves, and the arguments of a test
/// take precedence.
fn transport(args: &[&str]) -> &'static [&'static str] {
    match std::env::var_os("DEFUSE_TRANSPORT") {
        _ if args.contains(&"--profile") => &[],
        Some(name) if name == "io_uring" => &["-o", "io_uring"],
        _ => &["-o", "no_io_uring"],
    }
}

/// True if mounts can use io_uring: `echo 1 > /sys/module/fuse/parameters/enable_uring`.
pub fn has_rings() -> bool {
    let parameter = "/sys/module/fuse/parameters/enable_uring";
    fs::read_to_string(parameter).is_ok_and(|text| text.trim() == "Y")
}

impl ServedMount {
    /// Mounts `source` (`memory:`, `passthrough:DIR`) on a new directory `mnt` in `place`, for all
    /// users, with set-user-id and devices.
    ///
    /// # Errors
    ///
    /// The error contains the log of the program.
    pub fn new(source: &OsStr, place: &Path, args: &[&str]) -> Result<ServedMount> {
        let mut command = Command::new(program()?);
        ServedMount::mount_by(&mut command, source, place, args)
    }

    /// Mounts like [`ServedMount::new`], through `prefix`, a command that runs its last arguments
    /// (`prlimit`).
    pub fn mount_under(
        prefix: &[&str],
        source: &OsStr,
        place: &Path,
        args: &[&str],
    ) -> Result<ServedMount> {
        let mut command = Command::new(prefix[0]);
        command.args(&prefix[1..]).arg(program()?);
        ServedMount::mount_by(&mut command, source, place, args)
    }

    fn mount_by(
        command: &mut Command,
        source: &OsStr,
        place: &Path,
        args: &[&str],
    ) -> Result<ServedMount> {
        let (path, log) = (place.join("mnt"), place.join("log"));
        fs::create_dir_all(&path)?;
        command
            .args(["mount", "--foreground", "-o", "allow_other,suid,dev"])
            .args(transport(args))
            .args(args);
        command.arg(source).arg(&path).env("DEFUSE_RUNTIME_DIR", place.join("run"));
        let err = fs::OpenOptions::new().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(err);
        let server = command.spawn().context("defuse cannot be run")?;
        let mut mount = ServedMount { path, server, log, ends_with: 0, reaped: false };
        mount.wait_until_ready("defuse mount")?;
        Ok(mount)
    }

    /// Mounts `volume` by GlusterFS's own client, with these options of glusterfs(8), on a new
    /// directory `native` in `place`. `host` is one of its servers.
    ///
    /// # Errors
    ///
    /// The error contains the log of the client.
    pub fn native(
        servers: &GlusterServers,
        (host, volume): (&str, &str),
        place: &Path,
        args: &[&str],
    ) -> Result<ServedMount> {
        let (path, log) = (place.join("native"), place.join("native.log"));
        fs::create_dir_all(&path)?;
        // nsenter(1) becomes the client, so that it is the child.
        let mut command = servers.command(Path::new("glusterfs"));
        command.args(["--no-daemon", "--log-level=ERROR"]).args(args);
        command.arg(format!("--log-file={}", log.display()));
        command.arg(format!("--volfile-server={host}")).arg(format!("--volfile-id={volume}"));
        command.arg(&path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = command.spawn().context("nsenter(1) of util-linux")?;
        // After an unmount, it sends SIGTERM to itself, and exits with the number of the signal.
        let ends_with = Signal::TERM.as_raw();
        let mut mount = ServedMount { path, server, log, ends_with, reaped: false };
        mount.wait_until_ready("glusterfs")?;
        Ok(mount)
    }

    fn wait_until_ready(&mut self, program: &str) -> Result<()> {
        let outside = device(self.path.parent().context("a mount point has a parent")?)?;
        let begun = Instant::now();
        loop {
            let inside = device_within(&self.path, PATIENCE.saturating_sub(begun.elapsed()));
            if let Some(status) = self.server.try_wait()? {
                self.reaped = true;
                bail!("{program}: {status}\n{}", self.log());
            }
            match inside {
                Some(Ok(inside)) if inside == outside => {}
                // The server is not connected yet, or is about to exit.
                Some(Err(Errno::NOTCONN | Errno::CONNABORTED)) => {}
                Some(_) => return Ok(()),
                None => bail!("{program}: not mounted after {PATIENCE:?}\n{}", self.log()),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The process id of the server.
    pub fn pid(&self) -> u32 {
        self.server.id()
    }

    /// The log of the program.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Kills the server, as in a crash. The mount remains, without a server.
    pub fn kill(&mut self) -> Result<()> {
        self.server.kill()?;
        self.server.wait()?;
        self.reaped = true;
        Ok(())
    }

    /// Unmounts, and waits for the server to exit successfully.
    pub fn end(mut self) -> Result<()> {
        self.unmount_when_idle()?;
        if !self.wait_for_server()? {
            bail!("the server is there {PATIENCE:?} after the unmount\n{}", self.log());
        }
        Ok(())
    }

    /// Between fork and execve, a process that another thread starts has the files of this one
    /// open.
    fn unmount_when_idle(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            match unmount(&self.path, UnmountFlags::empty()) {
                Err(Errno::BUSY) if begun.elapsed() < Duration::from_secs(2) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                done => return Ok(done?),
            }
        }
    }

    /// Returns false if it does not exit.
    fn wait_for_server(&mut self) -> Result<bool> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.server.try_wait()? {
                self.reaped = true;
                let is_expected = status.code() == Some(self.ends_with);
                anyhow::ensure!(is_expected, "the server: {status}\n{}", self.log());
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(false)
    }
}

impl Drop for ServedMount {
    fn drop(&mut self) {
        // After a successful unmount, the path refers to the directory below.
        let _ = unmount(&self.path, UnmountFlags::DETACH);
        if self.reaped || self.wait_for_server().unwrap_or(true) {
            return;
        }
        if let Some(pid) = Pid::from_raw(self.server.id() as i32) {
            let _ = kill_process(pid, Signal::KILL);
            let _ = self.server.wait();
        }
    }
}

/// The device of a directory; `None` if the server of a mount there has not answered in time. The
/// thread that waits for it ends with the server.
fn device_within(path: &Path, limit: Duration) -> Option<rustix::io::Result<u64>> {
    let (send, answer) = channel();
    let path = path.to_owned();
    std::thread::spawn(move || send.send(device(&path)));
    answer.recv_timeout(limit).ok()
}

fn device(path: &Path) -> rustix::io::Result<u64> {
    rustix::fs::stat(path).map(|stat| stat.st_dev)
}
