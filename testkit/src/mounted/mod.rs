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
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub use ext4::Ext4;
pub(crate) use ext4::succeed;
pub use program::program;
pub(crate) use program::root;

/// Time limit for a mount to appear, and for a server to exit.
const PATIENCE: Duration = Duration::from_secs(60);

/// The reason why mounting is not possible here; `None` if it is.
pub fn why_not() -> Option<&'static str> {
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

/// A mount that `defuse mount` serves in the foreground of a child process.
pub struct Mount {
    path: PathBuf,
    server: Child,
    log: PathBuf,
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

impl Mount {
    /// Mounts `source` (`memory:`, `passthrough:DIR`) on a new directory `mnt` in `place`, for all
    /// users, with set-user-id and devices.
    ///
    /// # Errors
    ///
    /// The error contains the log of the program.
    pub fn new(source: &OsStr, place: &Path, args: &[&str]) -> Result<Mount> {
        let mut command = Command::new(program()?);
        Mount::by(&mut command, source, place, args)
    }

    /// Like [`Mount::new`], through `prefix`, a command that runs its last arguments (`prlimit`).
    pub fn under(prefix: &[&str], source: &OsStr, place: &Path, args: &[&str]) -> Result<Mount> {
        let mut command = Command::new(prefix[0]);
        command.args(&prefix[1..]).arg(program()?);
        Mount::by(&mut command, source, place, args)
    }

    fn by(command: &mut Command, source: &OsStr, place: &Path, args: &[&str]) -> Result<Mount> {
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
        let mut mount = Mount { path, server, log, reaped: false };
        mount.wait_until_ready()?;
        Ok(mount)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let outside = device(self.path.parent().context("a mount point has a parent")?)?;
        let begun = Instant::now();
        while device(&self.path).is_ok_and(|inside| inside == outside) {
            if let Some(status) = self.server.try_wait()? {
                self.reaped = true;
                bail!("defuse mount: {status}\n{}", self.log());
            }
            if begun.elapsed() > PATIENCE {
                bail!("not mounted after {PATIENCE:?}\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
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

    /// Between fork and execve, a process that another thread starts has the files of this one open.
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
                anyhow::ensure!(status.success(), "the server: {status}\n{}", self.log());
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(false)
    }
}

impl Drop for Mount {
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

fn device(path: &Path) -> rustix::io::Result<u64> {
    rustix::fs::stat(path).map(|stat| stat.st_dev)
}
