//! A server with clients in this process, and operations on its files.

mod files;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use defuse_fs::{FileSystem, delegate};
use defuse_remote::{Remote, RemoteOptions};
use defuse_socket::{Server, ServerOptions};
use defuse_testkit::settled;
use tempfile::TempDir;

pub use files::{context, create, name, read, write};

/// A server on a new socket, stopped when dropped.
pub struct Served {
    pub server: Arc<Server>,
    pub path: PathBuf,
    clients: RemoteOptions,
    thread: Option<JoinHandle<bool>>,
    _dir: TempDir,
}

impl Served {
    /// Serves `fs` to clients with the options `clients`.
    pub fn new(fs: Arc<dyn FileSystem>, options: ServerOptions, clients: RemoteOptions) -> Served {
        let dir = TempDir::with_prefix("defuse-served-").unwrap();
        let path = dir.path().join("socket");
        let server = Arc::new(Server::bind(&path, fs, options).unwrap());
        let running = Arc::clone(&server);
        let thread = Some(std::thread::spawn(move || running.run()));
        Served { server, path, clients, thread, _dir: dir }
    }

    /// The number of requests that the clients have made.
    pub fn requests(&self) -> u64 {
        self.count(|_| true)
    }

    /// The number of requests of these kinds that the clients have made.
    pub fn requests_of(&self, kinds: &[&str]) -> u64 {
        self.count(|kind| kinds.contains(&kind))
    }

    fn count(&self, is_counted: impl Fn(&str) -> bool) -> u64 {
        settled(|| {
            let ops = self.server.snapshot().ops;
            ops.iter().filter(|op| is_counted(op.op.name())).map(|op| op.latency.count).sum()
        })
    }

    pub fn client(&self) -> Remote {
        Remote::connect(&self.path, self.clients).unwrap()
    }

    /// A new client that keeps the server.
    pub fn with_client(self) -> Both {
        Both { client: self.client(), _served: self }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.shut_down();
        let clean = self.thread.take().unwrap().join().unwrap();
        assert!(clean || std::thread::panicking(), "connections did not end");
    }
}

/// A client and its server.
pub struct Both {
    client: Remote,
    _served: Served,
}

impl FileSystem for Both {
    delegate!(to client);
}
