//! Measures the cost of a call of the in-process client: `cargo run --release -p defuse-testkit
//! --example direct_throughput`. It reads and writes blocks of 4 KiB of a 4 MiB file in tmpfs,
//! alternately natively and through the client on passthrough and memory. For comparison it
//! measures memory behind a socket, and behind a kernel mount with `direct_io` if possible. `defuse
//! bench direct` measures the client's own share of a call.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use defuse_direct::{
    ClientMountArgs, ClientOptions, ClientTask, DirectClient, FileDescription, OpenHow,
    TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::FileSystem;
use defuse_memory::MemoryFileSystem;
use defuse_passthrough::Passthrough;
use defuse_remote::{RemoteClient, RemoteOptions};
use defuse_socket::{ServerOptions, SocketServer};
use defuse_testkit::mounted::{self, ServedMount};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 1024;
const ROUNDS: usize = 15;

type ReadFunction = Box<dyn FnMut(&mut [u8], u64)>;
type WriteFunction = Box<dyn FnMut(&[u8], u64)>;

struct ThroughputTarget {
    name: &'static str,
    read: ReadFunction,
    write: WriteFunction,
    /// The best of all rounds, in nanoseconds per call.
    best: [f64; 2],
}

fn direct(
    name: &'static str,
    client: &Arc<DirectClient>,
    task: &Arc<ClientTask>,
    file: Arc<FileDescription>,
) -> ThroughputTarget {
    let (c, t, f) = (Arc::clone(client), Arc::clone(task), Arc::clone(&file));
    let read = move |room: &mut [u8], at: u64| {
        let _ = c.pread(&t, &f, room, at);
    };
    let (c, t) = (Arc::clone(client), Arc::clone(task));
    let write = move |bytes: &[u8], at: u64| {
        c.pwrite(&t, &file, bytes, at).expect("write");
    };
    ThroughputTarget { name, read: Box::new(read), write: Box::new(write), best: [f64::MAX; 2] }
}

fn native(name: &'static str, dir: &Path) -> ThroughputTarget {
    let mut file = std::fs::File::options();
    file.read(true).write(true).create(true).truncate(true);
    let file = Arc::new(file.open(dir.join("native")).expect("a file in /dev/shm"));
    let other = Arc::clone(&file);
    let read = move |room: &mut [u8], at: u64| {
        let _ = rustix::io::pread(&*file, room, at);
    };
    let write = move |bytes: &[u8], at: u64| {
        rustix::io::pwrite(&*other, bytes, at).expect("write");
    };
    ThroughputTarget { name, read: Box::new(read), write: Box::new(write), best: [f64::MAX; 2] }
}

fn main() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a tmpfs");
    let client = Arc::new(DirectClient::new(ClientOptions::default()));
    let task = ClientTask::new(
        TaskCredentials::read_calling_thread().expect("ids"),
        WorkDir::Outside(b"/".to_vec()),
    );
    let task = Arc::new(task);
    let options = defuse_passthrough::PassthroughOptions {
        credentials: defuse_passthrough::CredentialsPolicy::Restore,
        ..Default::default()
    };
    let passthrough = Passthrough::new(dir.path(), options).expect("a source");
    let memory = || MemoryFileSystem::new(defuse_memory::MemoryOptions::default());
    let socket = dir.path().join("socket");
    let server = SocketServer::bind(&socket, Arc::new(memory()), ServerOptions::default());
    let server = Arc::new(server.expect("a socket"));
    let running = Arc::clone(&server);
    std::thread::spawn(move || running.run());
    let over = RemoteClient::connect(&socket, RemoteOptions::default()).expect("a connection");
    let mounts: [(&str, &[u8], Arc<dyn FileSystem>); 3] = [
        ("passthrough", b"p:", Arc::new(passthrough)),
        ("memory", b"m:", Arc::new(memory())),
        ("socket", b"s:", Arc::new(over)),
    ];
    let mut targets = vec![native("native", dir.path())];
    for (name, target, fs) in mounts {
        client.mount(target, fs, &ClientMountArgs::default()).expect("mount");
        let path = [target, b"/file"].concat();
        let how = OpenHow { flags: 0o102, mode: 0o600, ..OpenHow::default() };
        let file = client.open(&task, WalkStart::Cwd, &path, how).expect("open");
        targets.push(direct(name, &client, &task, file));
    }
    let mount = match mounted::unavailable_reason() {
        None => ServedMount::new(OsStr::new("memory:"), dir.path(), &["-o", "direct_io"]).ok(),
        Some(_) => None,
    };
    targets.extend(mount.as_ref().map(|mount| native("kernel mount", mount.path())));
    let mut block = vec![7u8; BLOCK];
    for round in 0..ROUNDS {
        for target in &mut targets {
            let time = |run: &mut dyn FnMut(u64)| {
                let start = Instant::now();
                (0..BLOCKS).for_each(|number| run(number * BLOCK as u64));
                start.elapsed().as_nanos() as f64 / BLOCKS as f64
            };
            let write = time(&mut |at| (target.write)(&block, at));
            let read = time(&mut |at| (target.read)(&mut block, at));
            // The first round allocates the pages.
            if round > 0 {
                target.best = [target.best[0].min(read), target.best[1].min(write)];
            }
        }
    }
    let base = targets[0].best;
    for ThroughputTarget { name, best, .. } in &targets {
        let [read, write] = *best;
        println!(
            "{name:<12} read {read:>6.0} ns, {:>5.2} of native   write {write:>6.0} ns, {:>5.2} of native",
            base[0] / read,
            base[1] / write
        );
    }
    drop((targets, mount));
}
