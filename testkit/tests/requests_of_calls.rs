//! The requests that each call of a program in a run makes to the server of its mount, and for
//! which of them it waits.

#[allow(dead_code, unused_imports)] // Not all of it is used here.
mod served;

use std::sync::Arc;

use defuse_connection::VersionSource;
use defuse_direct::{
    ClientMountArgs, ClientOptions, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart,
    WorkDir,
};
use defuse_fs::{FileSystem, RenameFlags};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_shared::{LaneOffers, VersionedFileSystem};
use defuse_socket::ServerOptions;
use served::TestServer;

const WRONLY: u32 = 0o1;
const CREAT: u32 = 0o100;
const EXCL: u32 = 0o200;
const TRUNC: u32 = 0o1000;

const AT: WalkStart<'_> = WalkStart::Cwd;

/// A server of files in memory as `defuse run` has one.
fn serve_memory() -> TestServer {
    let fs: Arc<dyn FileSystem> = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let fs = VersionedFileSystem::wrap(fs).unwrap();
    let versions = Some(Arc::clone(&fs) as Arc<dyn VersionSource>);
    let lanes = Some(Arc::new(LaneOffers::default()) as _);
    let clients = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    TestServer::new(fs, ServerOptions { versions, lanes, ..ServerOptions::default() }, clients)
}

/// A program with a connection of its own, and a mount at `a:`.
struct CountedProgram {
    remote: Arc<RemoteClient>,
    client: DirectClient,
    task: ClientTask,
}

impl CountedProgram {
    fn new(served: &TestServer, uid: u32) -> CountedProgram {
        let remote = Arc::new(served.client());
        let options = ClientOptions { kernel_links: false, ..ClientOptions::default() };
        let client = DirectClient::new(options);
        client.mount(b"a:", Arc::clone(&remote) as _, &ClientMountArgs::default()).unwrap();
        let who = TaskCredentials::user(uid, uid, &[]);
        let task = ClientTask::new(who, WorkDir::Outside(b"/".to_vec()));
        CountedProgram { remote, client, task }
    }

    /// Makes the call, and returns the requests that it has waited for, and those that it has not.
    fn count<T>(&self, call: impl FnOnce(&DirectClient, &ClientTask) -> T) -> (u64, u64) {
        let counts = || {
            let counts = self.remote.lane_counts().unwrap();
            (counts.requests - counts.posted, counts.posted)
        };
        let before = counts();
        drop(call(&self.client, &self.task));
        let now = counts();
        (now.0 - before.0, now.1 - before.1)
    }

    /// Counts the requests of open(2) and close(2).
    fn open(&self, path: &str, flags: u32) -> (u64, u64) {
        self.count(|client, task| {
            let how = OpenHow { flags, mode: 0o644, ..OpenHow::default() };
            let file = client.open(task, AT, path.as_bytes(), how).unwrap();
            file.close(task).unwrap();
        })
    }

    fn stat(&self, path: &str) -> (u64, u64) {
        self.count(|client, task| client.stat(task, AT, path.as_bytes(), false).unwrap())
    }
}

/// Root and another user wait for as many.
#[test]
fn a_call_of_a_run_waits_for_no_more_requests_than_documented() {
    let served = serve_memory();
    let root = CountedProgram::new(&served, 0);
    root.client.mkdir(&root.task, AT, b"a:/open", 0o777).unwrap();
    root.client.chmod(&root.task, AT, b"a:/open", 0o777, true).unwrap();
    let user = CountedProgram::new(&served, other_user());
    for program in [root, user] {
        let uid = program.task.credentials().uid;
        let dir = format!("a:/open/{uid}");
        let call = |run: &dyn Fn(&DirectClient, &ClientTask)| program.count(|c, t| run(c, t));
        let path = |name: &str| format!("{dir}/{name}");
        let make = |path: &str| {
            call(&|client, task| client.mkdir(task, AT, path.as_bytes(), 0o755).unwrap())
        };
        // The first walks through a directory look it up, and a user other than root reads its
        // access list.
        for number in 0..3 {
            make(&format!("{dir}-{number}"));
            program.stat("a:/open");
        }
        assert_eq!((make(&dir), program.stat(&dir)), ((1, 0), (0, 0)), "mkdir and stat");
        for name in ["first", "second"] {
            program.open(&path(name), CREAT | WRONLY);
        }
        assert_eq!(program.stat(&path("first")), (0, 0), "stat of the first file");
        for name in ["one", "two"] {
            let creat = CREAT | WRONLY | TRUNC;
            assert_eq!(program.open(&path(name), creat), (1, 1), "creat {name}");
            assert_eq!(program.stat(&path(name)), (0, 0), "stat of {name}");
            assert_eq!(program.stat(&path(name)), (0, 0), "stat of {name} again");
            assert_eq!(program.open(&path(name), creat), (1, 1), "creat of {name}, which is there");
        }
        assert_eq!(program.open(&path("three"), CREAT | EXCL | WRONLY), (1, 1), "O_EXCL");
        assert_eq!(program.stat(&path("three")), (0, 0), "stat after O_EXCL");
        let (new, old, other) = (path("link"), path("three"), path("four"));
        let linked = call(&|client, task| {
            client.symlink(task, b"one", AT, new.as_bytes()).unwrap();
        });
        assert_eq!((linked, program.stat(&new)), ((1, 0), (0, 0)), "symlink and lstat");
        let linked = call(&|client, task| {
            client.link(task, (AT, old.as_bytes()), (AT, other.as_bytes()), false).unwrap();
        });
        assert_eq!(program.stat(&other), (0, 0), "stat of a new link");
        assert!(linked.0 <= 2, "{linked:?}");
        let moved = path("moved");
        let renamed = call(&|client, task| {
            let (from, to) = ((AT, other.as_bytes()), (AT, moved.as_bytes()));
            client.rename(task, from, to, RenameFlags(0)).unwrap();
        });
        assert_eq!(renamed, (1, 0), "rename");
        assert_eq!(program.stat(&moved), (0, 0), "stat of a new name");
        let removed = call(&|client, task| client.unlink(task, AT, moved.as_bytes()).unwrap());
        assert_eq!(removed, (1, 0), "unlink");
    }
}

/// Root's connections act for every user; others act for themselves alone.
fn other_user() -> u32 {
    match rustix::process::geteuid().as_raw() {
        0 => 1000,
        own => own,
    }
}
