//! Who serves what at a socket (`defuse serve`): a file for each server beside those of mounts.
//!
//! As there, a file counts only while the process that wrote it runs.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::paths;
use crate::registry::{self, now_unix, process_start};

/// A server. Paths are shown, not used to find anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    /// Where it listens.
    pub socket: String,
    /// What it serves.
    pub source: String,
    /// Its process.
    pub pid: u32,
    /// When that started, in clock ticks since boot.
    pub pid_start: u64,
    /// When it began to listen, in seconds since 1970 UTC.
    pub since_unix: u64,
    /// Its version.
    pub version: String,
}

/// The entry of this process; it goes when this is dropped.
#[derive(Debug)]
pub struct Registered(PathBuf);

impl Drop for Registered {
    fn drop(&mut self) {
        // What is not there needs no removal.
        let _ = fs::remove_file(&self.0);
    }
}

/// Notes that this process serves `source` at `socket`.
pub fn register(source: String, socket: &Path) -> Result<Registered> {
    let pid = std::process::id();
    let server = Server {
        socket: socket.to_string_lossy().into_owned(),
        source,
        pid,
        pid_start: process_start(pid).unwrap_or_default(),
        since_unix: now_unix(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let file = registry::made_dir()?.join(format!("{PREFIX}{pid}.json"));
    let failed = |error: &dyn std::fmt::Display| {
        Failure::Failed(format!("cannot register the server in {}: {error}", file.display()))
    };
    let text = serde_json::to_vec_pretty(&server).map_err(|error| failed(&error))?;
    paths::write_atomically(&file, &text).map_err(|error| failed(&error))?;
    Ok(Registered(file))
}

/// All servers that this user may see, by socket. Entries of those that are gone are removed.
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
        // Where that is not permitted, root does it.
        let _ = fs::remove_file(file);
    }
    runs.then_some(server)
}
