//! Configurations, and the mounts on which a suite runs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use defuse_measure::server::ServerProcess;
use tempfile::TempDir;

use crate::gluster::{GlusterServers, HOST};
use crate::mounted::{Ext4Mount, ServedMount, program, scratch, succeed};

/// The server of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigBackend {
    /// ext4 itself.
    Native,
    /// `defuse mount passthrough:` over a directory of ext4.
    Passthrough,
    /// `defuse mount memory:`.
    Memory,
    /// `defuse mount uhs:` of a new image.
    Uhs,
    /// `defuse mount gluster:` of this volume, on servers of its own.
    Gluster(&'static str),
    /// GlusterFS's own client on this volume, on servers of its own. It is measured beside ours.
    NativeGluster(&'static str),
    /// `defuse mount shared:` of a server of this source. `SOURCE` in it stands for a directory of
    /// ext4, and `IMAGE` for a new image of uhs.
    Shared(&'static str),
    /// `defuse run` with such a source; `gluster:` has servers of its own, and `shared:` one of the
    /// source that follows. There is no mount; each program of a suite has the files in its own
    /// process.
    Run(&'static str),
}

/// A file system with its options.
#[derive(Debug, PartialEq, Eq)]
pub struct StageConfig {
    /// Its name in the table and on the command line.
    pub name: &'static str,
    /// The server.
    pub backend: ConfigBackend,
    /// Arguments of `defuse mount`, `defuse run` or glusterfs(8).
    pub args: &'static [&'static str],
}

const fn config(
    name: &'static str,
    backend: ConfigBackend,
    args: &'static [&'static str],
) -> StageConfig {
    StageConfig { name, backend, args }
}

impl StageConfig {
    /// True if it has servers of GlusterFS.
    pub fn needs_servers(&self) -> bool {
        match self.backend {
            Gluster(_) | NativeGluster(_) => true,
            Run(source) => source.starts_with("gluster:"),
            _ => false,
        }
    }

    /// True if a server has the files, so that it may have several clients.
    pub fn is_shared(&self) -> bool {
        self.source().is_some_and(|(_, is_shared)| is_shared)
    }

    /// The source, with `SOURCE` and `IMAGE`, and true if a server serves the source; `None` for
    /// ext4 itself.
    fn source(&self) -> Option<(String, bool)> {
        let (text, is_shared) = match self.backend {
            ConfigBackend::Native => return None,
            Passthrough => ("passthrough:SOURCE", false),
            Memory => ("memory:", false),
            Uhs => ("uhs:IMAGE", false),
            Gluster(volume) => return Some((format!("gluster://{HOST}/{volume}"), false)),
            NativeGluster(volume) => return Some((format!("{HOST}:/{volume}"), false)),
            Shared(source) => (source, true),
            Run(source) => match source.strip_prefix("shared:") {
                Some(served) => (served, true),
                None => (source, false),
            },
        };
        Some((text.to_owned(), is_shared))
    }
}

use ConfigBackend::{Gluster, Memory, NativeGluster, Passthrough, Run, Shared, Uhs};

/// The reference.
pub static NATIVE: StageConfig = config("native", ConfigBackend::Native, &[]);

/// All other configurations.
#[rustfmt::skip]
pub static CONFIGS: &[StageConfig] = &[
    config("passthrough", Passthrough, &[]),
    config("passthrough-writeback", Passthrough, &["-o", "writeback"]),
    config("passthrough-locks", Passthrough, &["-o", "locks=filesystem"]),
    config("passthrough-base", Passthrough, &["--profile", "base"]),
    config("passthrough-opt", Passthrough, &["--profile", "opt"]),
    config("passthrough-no_passthrough", Passthrough, &["-o", "no_passthrough"]),
    config("passthrough-exclusive", Passthrough, &["-o", "exclusive"]),
    config("passthrough-no_handles", Passthrough, &["-o", "handles=off"]),
    config("passthrough-direct_io", Passthrough, &["-o", "direct_io"]),
    config("passthrough-io_uring", Passthrough, &["-o", "io_uring"]),
    config("memory", Memory, &[]),
    config("memory-writeback", Memory, &["-o", "writeback"]),
    config("memory-locks", Memory, &["-o", "locks=filesystem"]),
    config("memory-base", Memory, &["--profile", "base"]),
    config("memory-opt", Memory, &["--profile", "opt"]),
    config("memory-direct_io", Memory, &["-o", "direct_io"]),
    config("memory-io_uring", Memory, &["-o", "io_uring"]),
    config("uhs", Uhs, &[]),
    config("uhs-small_cache", Uhs, &["-o", "cache=1M,commit=0.05"]),
    config("uhs-direct_io", Uhs, &["-o", "direct_io"]),
    config("uhs-io_uring", Uhs, &["-o", "io_uring"]),
    config("shared-memory", Shared("memory:"), &[]),
    config("shared-passthrough", Shared("passthrough:SOURCE"), &[]),
    config("shared-uhs", Shared("uhs:IMAGE"), &[]),
];

/// The configurations without a mount.
pub static RUNS: &[StageConfig] = &[
    config("run-passthrough", Run("passthrough:SOURCE"), &[]),
    config("run-passthrough-backing_off", Run("passthrough:SOURCE,backing=off"), &[]),
    config("run-memory", Run("memory:"), &[]),
    config("run-uhs", Run("uhs:IMAGE"), &[]),
    config("run-shared-memory", Run("shared:memory:"), &[]),
    config("run-shared-passthrough", Run("shared:passthrough:SOURCE"), &[]),
    config("run-shared-uhs", Run("shared:uhs:IMAGE"), &[]),
];

/// One more without a mount, for the exercisers: the parent of the run serves the files to all of
/// its programs.
pub static SERVED: StageConfig =
    config("run-passthrough-served", Run("passthrough:SOURCE"), &["--fork", "server"]);

/// The configurations with servers of GlusterFS, which take seconds to start.
pub static VOLUMES: &[StageConfig] = &[
    config("gluster-dist", Gluster("dist"), &[]),
    config("gluster-repl", Gluster("repl"), &[]),
    config("run-gluster-dist", Run("gluster://127.1.1.1/dist"), &[]),
    config("run-gluster-repl", Run("gluster://127.1.1.1/repl"), &[]),
    config("native-gluster-dist", NativeGluster("dist"), &["--acl"]),
    config("native-gluster-repl", NativeGluster("repl"), &["--acl"]),
];

/// The path of the files of [`RUNS`], which does not exist for other programs.
const TARGET: &str = "/defuse-suite";

/// A sparse image of uhs in `place`.
fn new_image(place: &Path) -> Result<PathBuf> {
    let image = place.join("image");
    let mut mkfs = Command::new(program()?);
    succeed(mkfs.args(["mkfs", "uhs", "--size", "2G", "--sparse"]).arg(&image))?;
    Ok(image)
}

/// A mounted configuration, initially empty. Everything is removed when it is dropped.
pub struct MountedStage {
    config: &'static StageConfig,
    /// The source of the mount or the run.
    text: OsString,
    mount: Option<ServedMount>,
    /// The server of a source that is shared.
    server: Option<ServerProcess>,
    lower: Option<Ext4Mount>,
    /// The image of uhs.
    image: Option<PathBuf>,
    /// The servers of a volume.
    servers: Option<GlusterServers>,
    /// The directory of one of several clients.
    own: Option<PathBuf>,
    // Dropped last, because the others are in it.
    place: TempDir,
}

impl MountedStage {
    /// `config` with nothing mounted.
    fn bare(config: &'static StageConfig) -> Result<MountedStage> {
        Ok(MountedStage {
            config,
            text: OsString::new(),
            mount: None,
            server: None,
            lower: None,
            image: None,
            servers: None,
            own: None,
            place: scratch()?,
        })
    }

    /// Mounts `config`.
    pub fn new(config: &'static StageConfig) -> Result<MountedStage> {
        let mut stage = MountedStage::bare(config)?;
        if config.needs_servers() {
            stage.servers = Some(GlusterServers::start()?);
        }
        let Some((mut text, is_shared)) = config.source() else {
            stage.lower = Some(stage.new_ext4()?);
            return Ok(stage);
        };
        if text.contains("SOURCE") {
            let lower = stage.new_ext4()?;
            let path = lower.path().join("source");
            std::fs::create_dir(&path)?;
            text = text.replace("SOURCE", &path.display().to_string());
            stage.lower = Some(lower);
        }
        if text.contains("IMAGE") {
            let image = new_image(stage.place.path())?;
            text = text.replace("IMAGE", &image.display().to_string());
            stage.image = Some(image);
        }
        stage.text = text.into();
        if is_shared {
            let socket = stage.place.path().join("socket");
            stage.server = Some(ServerProcess::start(program()?, &stage.text, &socket)?);
            stage.text = OsString::from("shared:");
            stage.text.push(socket);
        }
        if !stage.is_in_process() {
            stage.mount = Some(stage.new_mount()?);
        }
        Ok(stage)
    }

    /// `count` clients of one server of `config`, each with a directory of its own. The last of
    /// them has the server, so that it must be dropped after the others.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`MountedStage::new`].
    pub fn crowd(config: &'static StageConfig, count: usize) -> Result<Vec<MountedStage>> {
        ensure!(config.is_shared(), "{}: has no server for several clients", config.name);
        let owner = MountedStage::new(config)?;
        let another = |_| {
            let mut stage =
                MountedStage { text: owner.text.clone(), ..MountedStage::bare(config)? };
            if !stage.is_in_process() {
                stage.mount = Some(stage.new_mount()?);
            }
            Ok(stage)
        };
        let mut stages: Vec<MountedStage> = (1..count).map(another).collect::<Result<_>>()?;
        stages.push(owner);
        for (number, stage) in stages.iter_mut().enumerate() {
            let own = stage.path().join(format!("client-{number}"));
            succeed(stage.command(Path::new("mkdir"))?.arg(&own))?;
            stage.own = Some(own);
        }
        Ok(stages)
    }

    fn new_ext4(&self) -> Result<Ext4Mount> {
        Ext4Mount::new(&self.place.path().join("ext4"), 4 << 30, 200_000)
    }

    fn new_mount(&self) -> Result<ServedMount> {
        let (source, place, args) = (&self.text, self.place.path(), self.config.args);
        match (&self.servers, self.config.backend) {
            (Some(servers), NativeGluster(volume)) => {
                ServedMount::native(servers, (HOST, volume), place, args)
            }
            (Some(servers), _) => {
                let inside = servers.network_prefix();
                let inside: Vec<&str> = inside.iter().map(String::as_str).collect();
                ServedMount::mount_under(&inside, source, place, args)
            }
            (None, _) => ServedMount::new(source, place, args),
        }
    }

    /// The served directory of ext4, if there is one.
    pub fn source(&self) -> Option<PathBuf> {
        let served = !self.text.is_empty();
        self.lower.as_ref().filter(|_| served).map(|lower| lower.path().join("source"))
    }

    /// Unmounts, if there is a mount. Written data is then below.
    ///
    /// # Errors
    ///
    /// Fails if the server does not exit successfully.
    pub fn unmount(&mut self) -> Result<()> {
        self.mount.take().map_or(Ok(()), ServedMount::end)
    }

    /// Mounts the same directory again.
    ///
    /// # Errors
    ///
    /// The error contains the log of the program.
    pub fn mount_again(&mut self) -> Result<()> {
        if !self.is_in_process() && self.is_durable() {
            self.mount = Some(self.new_mount()?);
        }
        Ok(())
    }

    /// True if the files outlive an unmount.
    pub fn is_durable(&self) -> bool {
        let is_below = self.source().is_some() || self.image.is_some();
        is_below || self.servers.is_some() || self.server.is_some()
    }

    /// Unmounts, ends the server, and checks the image; `None` without one.
    pub fn check_image(&mut self) -> Option<Result<()>> {
        let image = self.image.clone()?;
        let check = |stage: &mut MountedStage| -> Result<()> {
            stage.unmount()?;
            stage.server.take().map_or(Ok(()), ServerProcess::end)?;
            succeed(Command::new(program()?).arg("fsck").arg(image)).map(drop)
        };
        Some(check(self))
    }

    /// Its configuration.
    pub fn config(&self) -> &'static StageConfig {
        self.config
    }

    /// True if it is one of several clients, and has only a directory.
    pub fn is_one_of_many(&self) -> bool {
        self.own.is_some()
    }

    /// The root of the file system under test, or the directory of one of several clients.
    pub fn path(&self) -> &Path {
        match (&self.mount, &self.lower) {
            _ if self.own.is_some() => self.own.as_deref().unwrap_or(Path::new("")),
            _ if self.is_in_process() => Path::new(TARGET),
            (Some(mount), _) => mount.path(),
            (None, Some(lower)) => lower.path(),
            (None, None) => self.place.path(),
        }
    }

    /// True if only programs started by [`command`](MountedStage::command) have the files.
    pub fn is_in_process(&self) -> bool {
        matches!(self.config.backend, Run(_))
    }

    /// A program that has the files at [`path`](MountedStage::path). It is killed after five
    /// minutes.
    ///
    /// # Errors
    ///
    /// Fails if defuse cannot be built.
    pub fn command(&self, name: &Path) -> Result<Command> {
        if !self.is_in_process() {
            return Ok(Command::new(name));
        }
        let mut mount = OsString::from(format!("{TARGET}="));
        mount.push(&self.text);
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "300"]);
        if let Some(servers) = &self.servers {
            command.args(servers.network_prefix());
        }
        command.arg(program()?).arg("run").args(self.config.args);
        command.arg("--mount").arg(mount).arg("--").arg(name);
        Ok(command)
    }

    /// A directory on another file system.
    pub fn make_beside(&self, name: &str) -> Result<PathBuf> {
        let path = self.place.path().join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }
}
