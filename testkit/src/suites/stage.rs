//! Configurations, and the mounts on which a suite runs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;
use tempfile::TempDir;

use crate::mounted::{Ext4, Mount, scratch};

/// What serves the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// ext4 itself.
    Native,
    /// `defuse mount passthrough:` over a directory of ext4.
    Passthrough,
    /// `defuse mount memory:`.
    Memory,
}

/// A file system with its options.
#[derive(Debug, PartialEq, Eq)]
pub struct Config {
    /// As the table and the command line have it.
    pub name: &'static str,
    /// What serves it.
    pub backend: Backend,
    /// Arguments of `defuse mount`.
    pub args: &'static [&'static str],
}

const fn config(name: &'static str, backend: Backend, args: &'static [&'static str]) -> Config {
    Config { name, backend, args }
}

use Backend::{Memory, Passthrough};

/// The reference.
pub static NATIVE: Config = config("native", Backend::Native, &[]);

/// All others.
#[rustfmt::skip]
pub static CONFIGS: &[Config] = &[
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
];

/// A mounted configuration, empty at first. All of it goes away when it is dropped.
pub struct Stage {
    config: &'static Config,
    mount: Option<Mount>,
    lower: Option<Ext4>,
    // Last, because the others are in it.
    place: TempDir,
}

impl Stage {
    /// Mounts `config`.
    pub fn new(config: &'static Config) -> Result<Stage> {
        let place = scratch()?;
        let mut stage = Stage { config, mount: None, lower: None, place };
        if config.backend != Memory {
            let path = stage.place.path().join("ext4");
            stage.lower = Some(Ext4::new(&path, 4 << 30, 200_000)?);
        }
        let source = match (config.backend, &stage.lower) {
            (Backend::Native, _) => return Ok(stage),
            (Passthrough, Some(lower)) => {
                let source = lower.path().join("source");
                std::fs::create_dir(&source)?;
                let mut text = OsString::from("passthrough:");
                text.push(source);
                text
            }
            _ => OsString::from("memory:"),
        };
        stage.mount = Some(Mount::new(&source, stage.place.path(), config.args)?);
        Ok(stage)
    }

    /// Its configuration.
    pub fn config(&self) -> &'static Config {
        self.config
    }

    /// The root of the file system under test.
    pub fn path(&self) -> &Path {
        match (&self.mount, &self.lower) {
            (Some(mount), _) => mount.path(),
            (None, Some(lower)) => lower.path(),
            (None, None) => self.place.path(),
        }
    }

    /// A directory beside it, on another file system.
    pub fn beside(&self, name: &str) -> Result<PathBuf> {
        let path = self.place.path().join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }
}
