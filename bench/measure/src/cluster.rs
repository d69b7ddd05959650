//! Three servers of GlusterFS with lines to a client, all on this machine, whose processes can be
//! killed and whose lines can be cut.
//!
//! Each server has a network and mounts of its own. The first two have the bricks of the volumes,
//! the third one stays for clients that request the configuration. Everything ends with the value,
//! as [`GlusterServers`] does.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::gluster::{GlusterServers, ROOM, VolumeSetup};

/// The number of servers.
pub const SERVERS: usize = 3;

const SCRIPT: &str = include_str!("cluster.sh");

/// Kills all processes in the network of `$1`, a process, but that one.
const CRASH: &str = r#"network=$(readlink "/proc/$1/ns/net")
for process in /proc/[0-9]*; do
    [ "$process" != "/proc/$1" ] && [ "$(readlink "$process/ns/net")" = "$network" ] || continue
    kill -KILL "${process#/proc/}" || true
done"#;

/// Running servers, until dropped. Servers have the numbers 1 to [`SERVERS`].
#[derive(Debug)]
pub struct GlusterCluster {
    servers: GlusterServers,
    /// A process in the name spaces of each server, by its number among the processes of the
    /// servers.
    holders: Vec<String>,
}

impl GlusterCluster {
    /// Starts the servers and these volumes. Each has a brick on each of the first two servers.
    ///
    /// # Errors
    ///
    /// The error contains the output of the programs.
    pub fn start(volumes: &[VolumeSetup]) -> Result<GlusterCluster> {
        let (servers, holders) = GlusterServers::start_by_script(SCRIPT, volumes)?;
        ensure!(holders.len() == SERVERS, "{} servers", holders.len());
        Ok(GlusterCluster { servers, holders })
    }

    /// The client's side: its network, and its mounts.
    pub fn servers(&self) -> &GlusterServers {
        &self.servers
    }

    /// The address of a server.
    pub fn host(&self, server: usize) -> String {
        format!("10.77.0.{server}")
    }

    /// A program on a server.
    pub fn command_on(&self, server: usize, program: &str) -> Command {
        let mut command = self.servers.command_within(Path::new("nsenter"));
        command.args(["--target", &self.holders[server - 1], "--net", "--mount", "--", program]);
        command
    }

    /// Runs `gluster` with these words on a server, and returns its output.
    ///
    /// # Errors
    ///
    /// The error contains the output.
    pub fn gluster(&self, server: usize, words: &[&str]) -> Result<String> {
        let mut command = self.command_on(server, "gluster");
        command.arg("--mode=script").args(words);
        run(&mut command).with_context(|| format!("gluster {}", words.join(" ")))
    }

    /// The directory of the brick of a volume on a server, for this process.
    pub fn brick(&self, server: usize, volume: &str) -> PathBuf {
        self.servers
            .private_path(Path::new(ROOM))
            .join(format!("s{server}/gluster/bricks/{volume}"))
    }

    /// Kills the process of a brick. `gluster volume start VOLUME force` starts it again.
    ///
    /// # Errors
    ///
    /// Fails if the brick does not run.
    pub fn kill_brick(&self, server: usize, volume: &str) -> Result<()> {
        let script = format!("kill -KILL $(cat {ROOM}/vols/{volume}/*-bricks-{volume}*.pid)");
        run(self.command_on(server, "sh").args(["-ec", &script])).map(drop)
    }

    /// Kills all processes of a server at once.
    ///
    /// # Errors
    ///
    /// The error contains the output of the programs.
    pub fn crash(&self, server: usize) -> Result<()> {
        let mut command = self.servers.command_within(Path::new("sh"));
        run(command.args(["-c", CRASH, "sh", &self.holders[server - 1]])).map(drop)
    }

    /// Starts a server after a crash, which starts its bricks.
    ///
    /// # Errors
    ///
    /// The error contains the output of glusterd.
    pub fn restart(&self, server: usize) -> Result<()> {
        let mut command = self.command_on(server, "glusterd");
        run(command.args(["-f", "/var/lib/glusterd/glusterd.vol", "-L", "WARNING"])).map(drop)
    }

    /// Cuts the line of a server: nothing arrives, and no side is notified.
    ///
    /// # Errors
    ///
    /// The errors of ip(8).
    pub fn cut(&self, server: usize) -> Result<()> {
        self.line(server, "down")
    }

    /// Restores the line of a server.
    ///
    /// # Errors
    ///
    /// The errors of ip(8).
    pub fn join(&self, server: usize) -> Result<()> {
        self.line(server, "up")
    }

    fn line(&self, server: usize, state: &str) -> Result<()> {
        let mut ip = self.servers.command_within(Path::new("ip"));
        run(ip.args(["link", "set", &format!("to{server}"), state])).map(drop)
    }
}

/// The output of a program that succeeds.
fn run(command: &mut Command) -> Result<String> {
    // A shell has these directories in its path, a test may not.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    let output = command.stdin(std::process::Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {text}{errors}", output.status);
    Ok(text)
}
