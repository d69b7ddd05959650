//! The registry of servers (`defuse serve`, `defuse manager`): one file for each, beside those of mounts.
//!
//! A file is valid while the process that wrote it runs.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::paths;
use crate::registry::{self, now_unix, process_start};

/// A server. Paths are shown, not used to find anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    /// The path of the socket.
    pub socket: String,
    /// The source.
    pub source: String,
    /// The process.
    pub pid: u32,
    /// The start of the process, in clock ticks since boot.
    pub pid_start: u64,
    /// The start of the server, in seconds since 1970 UTC.
    pub since_unix: u64,
    /// The version of the program.
    pub version: String,
    /// The file systems of a manager.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
}

/// One of the file systems of a manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The path in the served tree.
    pub path: String,
    /// The source.
    pub source: String,
}

/// The entry of this process. Dropping it removes the file.
#[derive(Debug)]
pub struct Registered(PathBuf);

impl Drop for Registered {
    fn drop(&mut self) {
        // The file may be gone.
        let _ = fs::remove_file(&self.0);
    }
}

/// The path for the entry of this process. Creates the directory.
pub fn place() -> Result<PathBuf> {
    Ok(registry::made_dir()?.join(format!("{PREFIX}{}.json", std::process::id())))
}

/// Registers in `file` that this process serves `source` at `socket`.
pub fn register(
    file: PathBuf,
    source: String,
    socket: &Path,
    devices: Vec<Device>,
) -> Result<Registered> {
    let pid = std::process::id();
    let server = Server {
        socket: socket.to_string_lossy().into_owned(),
        source,
        pid,
        pid_start: process_start(pid).unwrap_or_default(),
        since_unix: now_unix(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        devices,
    };
    let failed = |error: &dyn std::fmt::Display| {
        Failure::Failed(format!("cannot register the server in {}: {error}", file.display()))
    };
    let text = serde_json::to_vec_pretty(&server).map_err(|error| failed(&error))?;
    paths::write_atomically(&file, &text).map_err(|error| failed(&error))?;
    Ok(Registered(file))
}

/// All servers visible to this user, by socket. Removes stale entries.
pub fn all() -> Vec<Server> {
    let mut all: Vec<Server> =
        registry::files().into_iter().filter_map(|file| read(&file)).collect();
    all.sort_by(|a, b| a.socket.cmp(&b.socket));
    all
}

const PREFIX: &str = "serve-";

fn read(file: &Path) -> Option<Server> {
    let name = file.file_name()?.to_str()?;
    if !name.starts_with(PREFIX) || !name.ends_with(".json") {
        return None;
    }
    let server: Server = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let runs = process_start(server.pid) == Some(server.pid_start);
    if !runs {
        // Without the permission, root removes it later.
        let _ = fs::remove_file(file);
    }
    runs.then_some(server)
}
