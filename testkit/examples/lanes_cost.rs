//! Measures calls through shared memory and through a socket alternately:
//! `cargo run --release -p defuse-testkit --example lanes_cost`. Memory serves both, on threads of
//! this process. A name is looked up that does not exist, and 4 KiB are read and written; through
//! shared memory, reads are reads of a cached page.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use defuse_fs::{
    Caller, Context, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs, OpenFlags, ReadArgs,
    ReadBuf, SliceSink, SliceSource, WriteArgs, WriteBuf,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_shared::{LaneOffers, PagedFileSystem, PagedOptions};
use defuse_socket::{ServerOptions, SocketServer};

const CALLS: u32 = 2000;
const ROUNDS: usize = 15;
const BLOCK: usize = 4096;

struct LaneCase {
    name: &'static str,
    client: RemoteClient,
    file: File,
    /// The best of all rounds, in nanoseconds per call.
    best: [f64; 3],
}

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

impl LaneCase {
    fn new(name: &'static str, path: &Path, shared: bool) -> LaneCase {
        let lanes = if shared { LaneUse::Required } else { LaneUse::Never };
        let options = RemoteOptions { lanes, ..RemoteOptions::default() };
        let client = RemoteClient::connect(path, options).expect("a connection");
        let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
        let flags = OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT);
        let args = OpenArgs { flags, kill_suidgid: false };
        let text = Name::new(name.as_bytes()).expect("a name");
        let (entry, opened) =
            client.create(&cx(), Ino::ROOT, text, &node, args).expect("a new file");
        let file = File { ino: entry.ino, fh: opened.fh };
        LaneCase { name, client, file, best: [f64::MAX; 3] }
    }

    fn look(&self) {
        let missing = Name::new(b"missing").expect("a name");
        let _ = self.client.lookup(&cx(), Ino::ROOT, missing);
    }

    fn read(&self, room: &mut [u8]) {
        let mut sink = SliceSink::new(room);
        let mut out = ReadBuf::new(&mut sink, BLOCK);
        self.client.read(&cx(), self.file, ReadArgs::default(), &mut out).expect("a read");
    }

    fn write(&self, bytes: &[u8]) {
        let mut source = SliceSource::new(bytes);
        let args = WriteArgs { flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
        let mut data = WriteBuf::new(&mut source);
        self.client.write(&cx(), self.file, args, &mut data).expect("a write");
    }
}

fn time(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..CALLS).for_each(|_| call());
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

fn main() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let lanes = Some(Arc::new(LaneOffers::default()) as _);
    let memory = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let paged =
        PagedFileSystem::wrap(memory, PagedOptions::default()).expect("memory is exclusive");
    let pages = Some(Arc::clone(&paged) as _);
    let options = ServerOptions { lanes, pages, ..ServerOptions::default() };
    let server = Arc::new(SocketServer::bind(&path, paged, options).expect("a socket"));
    let running = Arc::clone(&server);
    std::thread::spawn(move || running.run());
    let mut ways = [LaneCase::new("socket", &path, false), LaneCase::new("shared", &path, true)];
    let mut block = vec![7u8; BLOCK];
    for _ in 0..ROUNDS {
        for way in &mut ways {
            let write = time(|| way.write(&block));
            let read = time(|| way.read(&mut block));
            let look = time(|| way.look());
            for (best, now) in way.best.iter_mut().zip([look, read, write]) {
                *best = best.min(now);
            }
        }
    }
    let base = ways[0].best;
    for LaneCase { name, best, client, .. } in &ways {
        let [look, read, write] = std::array::from_fn(|at| (best[at], best[at] / base[at]));
        println!(
            "{name:<8} lookup {:>6.0} ns, {:.2}   read {:>6.0} ns, {:.2}   write {:>6.0} ns, {:.2}",
            look.0, look.1, read.0, read.1, write.0, write.1
        );
        if let Some(counts) = client.lane_counts() {
            println!("{counts:?}");
        }
    }
}
