//! A server with clients in this process, and operations on its files.

mod files;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use defuse_fs::{FileSystem, delegate};
use defuse_remote::{RemoteClient, RemoteOptions};
use defuse_socket::{ServerOptions, SocketServer};
use defuse_testkit::await_settled;
use tempfile::TempDir;

pub use files::{context, create, name, read, write};

/// A server on a new socket, stopped when dropped.
pub struct TestServer {
    pub server: Arc<SocketServer>,
    pub path: PathBuf,
    clients: RemoteOptions,
    thread: Option<JoinHandle<bool>>,
    _dir: TempDir,
}

impl TestServer {
    /// Serves `fs` to clients with the options `clients`.
    pub fn new(
        fs: Arc<dyn FileSystem>,
        options: ServerOptions,
        clients: RemoteOptions,
    ) -> TestServer {
        let dir = TempDir::with_prefix("defuse-served-").unwrap();
        let path = dir.path().join("socket");
        let server = Arc::new(SocketServer::bind(&path, fs, options).unwrap());
        let running = Arc::clone(&server);
        let thread = Some(std::thread::spawn(move || running.run()));
        TestServer { server, path, clients, thread, _dir: dir }
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
        await_settled(|| {
            let ops = self.server.snapshot().ops;
            ops.iter().filter(|op| is_counted(op.op.name())).map(|op| op.latency.count).sum()
        })
    }

    pub fn client(&self) -> RemoteClient {
        RemoteClient::connect(&self.path, self.clients).unwrap()
    }

    /// A new client that keeps the server.
    pub fn with_client(self) -> ClientAndServer {
        ClientAndServer { client: self.client(), _served: self }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.server.shut_down();
        let clean = self.thread.take().unwrap().join().unwrap();
        assert!(clean || std::thread::panicking(), "connections did not end");
    }
}

/// A client and its server.
pub struct ClientAndServer {
    client: RemoteClient,
    _served: TestServer,
}

impl FileSystem for ClientAndServer {
    delegate!(to client);
}
