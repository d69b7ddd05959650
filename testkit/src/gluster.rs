//! Volumes of GlusterFS on this machine: a distributed one and a replicated one, whose servers tell clients of
//! changes by others.
//!
//! The servers have a network, mounts and processes of their own (namespaces(7)). Any number of such sets
//! exist side by side, nothing of them is visible from outside, and the kernel ends all of it with their first
//! process. That process ends when its input does, so that not even SIGKILL of this one leaves anything.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The address of the servers, in their network only.
pub const HOST: &str = "127.1.1.1";

/// The volumes: distributed over two bricks, and replicated on two.
pub const VOLUMES: [&str; 2] = ["dist", "repl"];

/// Time limit for the volumes to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// Directories of programs that are not in every path.
const ADMINISTRATOR: [&str; 2] = ["/usr/sbin", "/sbin"];

const SCRIPT: &str = include_str!("gluster.sh");

/// Running servers, until dropped.
pub struct Servers {
    child: Child,
    /// Its end is the end of the servers.
    _input: ChildStdin,
    network: File,
}

/// The reason why servers cannot run here; `None` if they can.
pub fn why_not() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root can run servers of GlusterFS in a network of their own");
    }
    let programs = [
        ("glusterd", "glusterfs-server is not installed"),
        ("gluster", "glusterfs-cli is not installed"),
        ("ip", "iproute2 is not installed"),
        ("nsenter", "util-linux is not installed"),
    ];
    let path = std::env::var("PATH").unwrap_or_default();
    let has = |program: &str| {
        path.split(':').chain(ADMINISTRATOR).any(|dir| Path::new(dir).join(program).is_file())
    };
    programs.into_iter().find(|(program, _)| !has(program)).map(|(_, reason)| reason)
}

impl Servers {
    /// Starts the servers and both volumes, which takes 3 to 5 seconds.
    ///
    /// # Errors
    ///
    /// The error contains the output of the programs.
    pub fn start() -> Result<Servers> {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", SCRIPT]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("unshare(1) of util-linux")?;
        let input = child.stdin.take().context("a pipe")?;
        let output = child.stdout.take().context("a pipe")?;
        let errors = child.stderr.take().context("a pipe")?;
        let (send, first) = channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            let _ = send.send(read.map(|_| line));
        });
        let ready = matches!(first.recv_timeout(PATIENCE), Ok(Ok(line)) if line.trim() == "ready");
        if !ready {
            drop(input);
            let _ = child.kill();
            let _ = child.wait();
            let mut said = String::new();
            let _ = errors.take(4096).read_to_string(&mut said);
            bail!("the servers of GlusterFS did not start: {}", said.trim());
        }
        let network = File::open(format!("/proc/{}/ns/net", child.id()))?;
        Ok(Servers { child, _input: input, network })
    }

    /// The command line that runs the rest of its arguments in the network of the servers.
    pub fn inside(&self) -> [String; 3] {
        let network = format!("--net=/proc/{}/ns/net", self.child.id());
        ["nsenter".to_owned(), network, "--".to_owned()]
    }

    /// A program in the network of the servers.
    pub fn command(&self, program: &Path) -> Command {
        let inside = self.inside();
        let mut command = Command::new(&inside[0]);
        command.args(&inside[1..]).arg(program);
        command
    }

    /// Moves this thread into the network of the servers, with all threads that it starts from now on.
    ///
    /// # Errors
    ///
    /// The errors of setns(2).
    pub fn enter(&self) -> Result<()> {
        let network = Some(LinkNameSpaceType::Network);
        Ok(move_into_link_name_space(self.network.as_fd(), network)?)
    }

    /// Waits until the servers end by themselves.
    ///
    /// # Errors
    ///
    /// The errors of wait(2).
    pub fn wait(mut self) -> Result<()> {
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        // The first process of the name space follows, because this is the last of its input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
