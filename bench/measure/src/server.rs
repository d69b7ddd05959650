//! Servers of file systems, by the program under measurement or test.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit for a socket to appear.
const PATIENCE: Duration = Duration::from_secs(60);

/// `defuse serve --shared` in the foreground of a child process, ended when dropped.
#[derive(Debug)]
pub struct ServerProcess(Child);

impl ServerProcess {
    /// Serves `source` at `socket` by `program`. Nothing may be at this path.
    ///
    /// # Errors
    ///
    /// Fails if the program cannot be run, or does not serve.
    pub fn start(program: &Path, source: &OsStr, socket: &Path) -> Result<ServerProcess> {
        ServerProcess::start_with(program, &[], source, socket)
    }

    /// Starts a server like [`start`](ServerProcess::start), with further options of
    /// `defuse serve`.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`start`](ServerProcess::start).
    pub fn start_with(
        program: &Path,
        options: &[String],
        source: &OsStr,
        socket: &Path,
    ) -> Result<ServerProcess> {
        let mut command = Command::new(program);
        command.stderr(Stdio::null());
        ServerProcess::start_by(command, options, source, socket)
    }

    /// Starts a server like [`start_with`](ServerProcess::start_with), by a command that runs the
    /// program with its further arguments, such as a checker.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`start`](ServerProcess::start).
    pub fn start_by(
        mut command: Command,
        options: &[String],
        source: &OsStr,
        socket: &Path,
    ) -> Result<ServerProcess> {
        command.args(["serve", "--foreground", "--shared"]).args(options).arg(source).arg(socket);
        let child = command.stdin(Stdio::null()).spawn();
        let mut server = ServerProcess(child.context("defuse cannot be run")?);
        let begun = Instant::now();
        while !is_listening(socket) {
            if let Some(status) = server.0.try_wait()? {
                bail!("defuse serve {}: {status}", source.display());
            }
            ensure!(begun.elapsed() < PATIENCE, "no server after {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Kills it, as in a crash.
    ///
    /// # Errors
    ///
    /// Fails with the errors of kill(2).
    pub fn kill(mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }

    /// Ends it, and waits until everything is durable.
    ///
    /// # Errors
    ///
    /// Fails if it does not exit successfully.
    pub fn end(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.0), Signal::TERM)?;
        let status = self.0.wait()?;
        ensure!(status.success(), "the server: {status}");
        Ok(())
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
            let _ = self.0.wait();
        }
    }
}

/// True if a server listens at the path: a server binds its socket a moment before.
fn is_listening(socket: &Path) -> bool {
    let address = SocketAddrUnix::new(socket);
    let of_client = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None);
    let connected = address.and_then(|address| rustix::net::connect(&of_client?, &address));
    connected.is_ok()
}
