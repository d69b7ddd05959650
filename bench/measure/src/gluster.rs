//! Volumes of GlusterFS on this machine: a distributed one and a replicated one, whose servers
//! notify clients of changes by others, or volumes that the caller describes.
//!
//! The servers have a network, mounts and processes of their own (namespaces(7)). Any number of
//! such sets exist side by side, no part of a set is visible from outside, and the kernel ends the
//! whole set with its first process. That process ends when its input does, so that not even
//! SIGKILL of this one leaves anything.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The address of the servers, in their network only.
pub const HOST: &str = "127.1.1.1";

/// The volumes: distributed over two bricks, and replicated on two.
pub const VOLUMES: [&str; 2] = ["dist", "repl"];

/// A directory in memory that only processes of [`GlusterServers::command_within`] see, for their
/// files. The bricks are in it, too.
pub const ROOM: &str = "/run/gluster";

/// The places of the files of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrickLayout {
    /// Each of two bricks has some files.
    Distributed,
    /// Two bricks have all files.
    Replicated,
    /// Two bricks have all files, and a third one their names and attributes.
    Arbiter,
    /// Three bricks have a part of each file, of which two suffice.
    Disperse,
}

/// A volume to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSetup {
    /// Its name.
    pub name: String,
    /// The places of its files.
    pub layout: BrickLayout,
    /// Options, as `gluster volume set` takes them.
    pub options: Vec<(&'static str, &'static str)>,
}

impl VolumeSetup {
    /// The line for the script: name, kind and options.
    fn line(&self) -> String {
        let kind = match self.layout {
            BrickLayout::Distributed => "distributed",
            BrickLayout::Replicated => "replicated",
            BrickLayout::Arbiter => "arbiter",
            BrickLayout::Disperse => "disperse",
        };
        let options = self.options.iter().map(|(key, value)| format!(" {key} {value}"));
        format!("{} {kind}{}\n", self.name, options.collect::<String>())
    }
}

/// Time limit for the volumes to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// Directories of programs that are not in every path.
const ADMINISTRATOR: [&str; 2] = ["/usr/sbin", "/sbin"];

const SCRIPT: &str = include_str!("gluster.sh");

/// The beginning of each script.
const BEGINNING: &str = concat!(include_str!("leave_mounts.sh"), include_str!("volumes.sh"));

/// Running servers, until dropped.
#[derive(Debug)]
pub struct GlusterServers {
    child: Child,
    /// Its end is the end of the servers.
    _input: ChildStdin,
    network: File,
}

/// The reason why servers cannot run here; `None` if they can.
pub fn unavailable_reason() -> Option<&'static str> {
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

impl GlusterServers {
    /// Starts the servers and the [`VOLUMES`], which takes 3 to 5 seconds.
    ///
    /// # Errors
    ///
    /// The error contains the output of the programs.
    pub fn start() -> Result<GlusterServers> {
        let tells = vec![
            ("features.cache-invalidation", "on"),
            ("features.cache-invalidation-timeout", "600"),
        ];
        let volume =
            |name: &str, layout, options| VolumeSetup { name: name.to_owned(), layout, options };
        GlusterServers::with(&[
            volume(VOLUMES[0], BrickLayout::Distributed, Vec::new()),
            volume(VOLUMES[1], BrickLayout::Replicated, tells),
        ])
    }

    /// Starts the servers and these volumes, about a second for each.
    ///
    /// # Errors
    ///
    /// The error contains the output of the programs.
    pub fn with(volumes: &[VolumeSetup]) -> Result<GlusterServers> {
        GlusterServers::start_by_script(SCRIPT, volumes).map(|(servers, _)| servers)
    }

    /// Starts servers by a script. Returns the words after `ready`, too.
    pub(crate) fn start_by_script(
        script: &str,
        volumes: &[VolumeSetup],
    ) -> Result<(GlusterServers, Vec<String>)> {
        let lines: String = volumes.iter().map(VolumeSetup::line).collect();
        let mut command = Command::new("unshare");
        command.env("VOLUMES", lines);
        command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["sh", "-c", &format!("{BEGINNING}{script}")]);
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
        let line = first.recv_timeout(PATIENCE).ok().and_then(std::result::Result::ok);
        let mut words = line.iter().flat_map(|line| line.split_whitespace()).map(str::to_owned);
        if words.next().as_deref() != Some("ready") {
            drop(input);
            let _ = child.kill();
            let _ = child.wait();
            let mut said = String::new();
            let _ = errors.take(4096).read_to_string(&mut said);
            bail!("the servers of GlusterFS did not start: {}", said.trim());
        }
        let network = File::open(format!("/proc/{}/ns/net", child.id()))?;
        Ok((GlusterServers { child, _input: input, network }, words.collect()))
    }

    /// A path that only processes of [`GlusterServers::command_within`] see, for this process.
    pub(crate) fn private_path(&self, path: &Path) -> PathBuf {
        let root = format!("/proc/{}/root", self.child.id());
        Path::new(&root).join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The command line that runs the rest of its arguments in the network of the servers.
    pub fn network_prefix(&self) -> [String; 3] {
        let network = format!("--net=/proc/{}/ns/net", self.child.id());
        ["nsenter".to_owned(), network, "--".to_owned()]
    }

    /// A program in the network of the servers.
    pub fn command(&self, program: &Path) -> Command {
        let inside = self.network_prefix();
        let mut command = Command::new(&inside[0]);
        command.args(&inside[1..]).arg(program);
        command
    }

    /// A program in the network, the mounts and the processes of the servers: the kernel ends it
    /// with them. Its files in [`ROOM`] are in memory.
    pub fn command_within(&self, program: &Path) -> Command {
        let space = |name: &str| format!("/proc/{}/ns/{name}", self.child.id());
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", space("net"))).arg(format!("--mount={}", space("mnt")));
        // The root of the mounts is another one than ours, if ours was changed by chroot(2).
        command.arg(format!("--root=/proc/{}/root", self.child.id()));
        // The process that has the name spaces is not itself in the name space of the processes.
        command.arg(format!("--pid={}", space("pid_for_children"))).arg("--").arg(program);
        command
    }

    /// Moves this thread into the network of the servers, with all threads that it starts from now
    /// on.
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

impl Drop for GlusterServers {
    fn drop(&mut self) {
        // The first process of the name space follows, because this is the last of its input.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_a_line_of_the_script() {
        let options = vec![("a.b", "on"), ("c", "2")];
        let volume = VolumeSetup { name: "v".into(), layout: BrickLayout::Replicated, options };
        assert_eq!(volume.line(), "v replicated a.b on c 2\n");
        for (layout, word) in [
            (BrickLayout::Distributed, "distributed"),
            (BrickLayout::Arbiter, "arbiter"),
            (BrickLayout::Disperse, "disperse"),
        ] {
            let volume = VolumeSetup { name: "w".into(), layout, options: Vec::new() };
            assert_eq!(volume.line(), format!("w {word}\n"));
        }
    }

    #[test]
    fn processes_within_end_with_the_servers() {
        if let Some(reason) = unavailable_reason() {
            println!("skipped: {reason}");
            return;
        }
        let volume = VolumeSetup {
            name: "v".into(),
            layout: BrickLayout::Distributed,
            options: vec![("performance.io-cache", "off")],
        };
        let servers = GlusterServers::with(&[volume]).unwrap();
        let script =
            format!("[ -d {ROOM}/bricks/v1 ] && readlink /proc/self/ns/pid && exec sleep 1000");
        let mut within = servers.command_within(Path::new("sh"));
        let mut child = within.args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let outside = std::fs::read_link("/proc/self/ns/pid").unwrap();
        assert!(line.starts_with("pid:[") && *line.trim() != *outside.as_os_str(), "{line}");
        assert!(!Path::new(ROOM).join("bricks/v1").exists());
        drop(servers);
        assert!(!child.wait().unwrap().success());
    }
}
