//! The registry of servers (`defuse serve`, `defuse manager`): one file for each, beside the files
//! of mounts, and the control socket beside it.
//!
//! A file is valid while the process that wrote it runs.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{CommandFailure, Result};
use crate::registry::{self, now_unix, process_start};
use crate::{control, paths};

/// A server. Paths are shown, not used to find anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerEntry {
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
    pub devices: Vec<TreeDevice>,
    /// The file of the entry.
    #[serde(skip)]
    pub file: PathBuf,
}

impl ServerEntry {
    /// The control socket.
    pub fn control(&self) -> PathBuf {
        registry::socket_beside(&self.file)
    }

    /// True while the process runs.
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.pid_start)
    }
}

/// One of the file systems of a manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeDevice {
    /// The path in the served tree.
    pub path: String,
    /// The source.
    pub source: String,
}

/// The entry of this process. Dropping it removes the file and the control socket.
#[derive(Debug)]
pub struct ServerRegistration(PathBuf);

impl Drop for ServerRegistration {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(file: &Path) {
    // They may be gone.
    let _ = fs::remove_file(file);
    let _ = fs::remove_file(registry::socket_beside(file));
}

/// The path for the entry of this process. Creates the directory.
pub fn place() -> Result<PathBuf> {
    Ok(registry::ensure_dir()?.join(format!("{PREFIX}{}.json", std::process::id())))
}

/// Registers in `file` that this process serves `source` at `socket`. Listens at the control
/// socket, unless that is impossible.
pub fn register(
    file: PathBuf,
    source: String,
    socket: &Path,
    devices: Vec<TreeDevice>,
) -> Result<(ServerRegistration, Option<UnixListener>)> {
    let pid = std::process::id();
    let server = ServerEntry {
        socket: socket.to_string_lossy().into_owned(),
        source,
        pid,
        pid_start: registry::own_start(),
        since_unix: now_unix(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        devices,
        file: file.clone(),
    };
    // From here on an error removes what is there.
    let registered = ServerRegistration(file.clone());
    // The socket first: a process that finds the entry may connect at once.
    let control = server.control();
    let listener = control::listen(&control);
    let no_socket = |error| log::warn!("no control socket {}: {error}", control.display());
    let listener = listener.map_err(no_socket).ok();
    let failed = |error: &dyn std::fmt::Display| {
        CommandFailure::Failed(format!("cannot register the server in {}: {error}", file.display()))
    };
    let text = serde_json::to_vec_pretty(&server).map_err(|error| failed(&error))?;
    paths::write_atomically(&file, &text).map_err(|error| failed(&error))?;
    Ok((registered, listener))
}

/// The server at the socket `path`, if it is visible to this user.
pub fn find_by_socket(path: &Path) -> Option<ServerEntry> {
    let path = paths::mountpoint(path);
    list_all().into_iter().find(|server| paths::mountpoint(Path::new(&server.socket)) == path)
}

/// All servers visible to this user, by socket. Removes stale entries.
pub fn list_all() -> Vec<ServerEntry> {
    let mut all: Vec<ServerEntry> =
        registry::files().into_iter().filter_map(|file| read(&file)).collect();
    all.sort_by(|a, b| a.socket.cmp(&b.socket));
    all
}

const PREFIX: &str = "serve-";

fn read(file: &Path) -> Option<ServerEntry> {
    let name = file.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    if let Some(pid) = name.strip_suffix(".sock") {
        // The server was killed before it wrote its entry. One with an entry may be in another PID
        // namespace.
        let has_entry = file.with_extension("json").exists();
        if !has_entry && pid.parse().is_ok_and(|pid| process_start(pid).is_none()) {
            let _ = fs::remove_file(file);
        }
        return None;
    }
    name.strip_suffix(".json")?;
    let server: ServerEntry = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let pid = registry::number_here(server.pid, server.pid_start);
    let server = ServerEntry { file: file.to_path_buf(), pid, ..server };
    if !server.is_alive() {
        // Without the permission, root removes them later.
        remove(file);
        return None;
    }
    Some(server)
}
