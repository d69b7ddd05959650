//! Measures calls of the in-process client on many names: `cargo run --release -p defuse-testkit
//! --example direct_names [-- COUNT]`. It creates files in one directory of memory, stats them in
//! order, at random and a thousand of them repeatedly, opens and removes them, and prints the CPU
//! time of each call. A second column shows the same calls for a file system that leaves each walk
//! to the client, and a third one the calls of the file system alone.

use std::sync::Arc;

use defuse_direct::{
    ClientMountArgs, ClientOptions, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart,
    WorkDir,
};
use defuse_fs::*;
use defuse_memory::MemoryFileSystem;

/// A file system without `resolve`.
struct WalkedMemory {
    inner: MemoryFileSystem,
}

impl FileSystem for WalkedMemory {
    delegate!(to inner, except lookup);

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        FileSystem::lookup(&self.inner, cx, parent, name)
    }
}

fn main() {
    let count = std::env::args().nth(1).map_or(1_000_000, |text| text.parse().expect("a number"));
    let options = || defuse_memory::MemoryOptions { inodes: None, ..Default::default() };
    let resolves = measure_client(Arc::new(MemoryFileSystem::new(options())), count);
    let walks =
        measure_client(Arc::new(WalkedMemory { inner: MemoryFileSystem::new(options()) }), count);
    let alone = measure_alone(&MemoryFileSystem::new(options()), count);
    println!("{count} names, ns of CPU a call   client   walking   file system alone");
    for (index, (name, ns)) in resolves.iter().enumerate() {
        let other = alone.get(index).map_or(String::new(), |ns| format!("{ns:.0}"));
        println!("{name:32} {ns:7.0} {:9.0} {other:>19}", walks[index].1);
    }
}

fn path(number: usize) -> String {
    format!("m:/dir/f{number:07}")
}

/// Nanoseconds of CPU time for each of `count` calls.
fn time(count: usize, run: impl FnMut(usize)) -> f64 {
    let clock = || rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let start = clock();
    (0..count).for_each(run);
    let end = clock();
    let ns = (end.tv_sec - start.tv_sec) as f64 * 1e9 + (end.tv_nsec - start.tv_nsec) as f64;
    ns / count as f64
}

/// A permutation of the numbers below `count`.
fn shuffle(count: usize) -> Vec<u32> {
    let mut order: Vec<_> = (0..count as u32).collect();
    fastrand::Rng::with_seed(7).shuffle(&mut order);
    order
}

fn measure_client(fs: Arc<dyn FileSystem>, count: usize) -> Vec<(&'static str, f64)> {
    let client = DirectClient::new(ClientOptions::default());
    client.mount(b"m:", fs, &ClientMountArgs::default()).expect("mount");
    let task =
        ClientTask::new(TaskCredentials::user(1000, 1000, &[]), WorkDir::Outside(b"/".to_vec()));
    client.mkdir(&task, WalkStart::Cwd, b"m:/dir", 0o755).expect("mkdir");
    let paths: Vec<_> = (0..count).map(path).collect();
    let missing: Vec<_> = (0..count).map(|number| path(number) + "x").collect();
    let order = shuffle(count);
    let open = |path: &str, flags| {
        let how = OpenHow { flags, mode: 0o644, ..OpenHow::default() };
        let file = client.open(&task, WalkStart::Cwd, path.as_bytes(), how).expect("open");
        file.close(&task).expect("close");
    };
    let stat = |path: &str| client.stat(&task, WalkStart::Cwd, path.as_bytes(), true);
    let is_there = |path: &str| assert!(stat(path).is_ok());
    let at = |number: usize| order[number] as usize;
    vec![
        ("open(O_CREAT), close", time(count, |number| open(&paths[number], 0o101))),
        ("stat in order", time(count, |number| is_there(&paths[number]))),
        ("stat at random", time(count, |number| is_there(&paths[at(number)]))),
        ("stat of 1000 names", time(count, |number| is_there(&paths[at(number % 1000)]))),
        ("stat of missing names", time(count, |number| assert!(stat(&missing[number]).is_err()))),
        ("open, close in order", time(count, |number| open(&paths[number], 0))),
        ("open(O_CREAT) of existing files", time(count, |number| open(&paths[number], 0o101))),
        (
            "chmod in order",
            time(count, |number| {
                client
                    .chmod(&task, WalkStart::Cwd, paths[number].as_bytes(), 0o600, true)
                    .expect("chmod");
            }),
        ),
        (
            "unlink",
            time(count, |number| {
                client.unlink(&task, WalkStart::Cwd, paths[number].as_bytes()).expect("unlink");
            }),
        ),
    ]
}

/// The calls of the file system that the client makes, in the same order.
fn measure_alone(fs: &dyn FileSystem, count: usize) -> Vec<f64> {
    let cx = Context::new(Caller { uid: 1000, gid: 1000, pid: 1 });
    let paths: Vec<_> = (0..count).map(path).collect();
    let missing: Vec<_> = (0..count).map(|number| path(number) + "x").collect();
    let order = shuffle(count);
    let node = |kind, mode| NewNode::new(kind, mode, cx.caller);
    let dir = Name::new(b"dir").expect("a name");
    let dir = fs.mkdir(&cx, Ino::ROOT, dir, &node(FileKind::Directory, 0o755)).expect("mkdir").ino;
    let name = |path: &'static [u8]| Name::new(&path[7..]).expect("a name");
    // The names outlive the calls.
    let paths: &'static [String] = paths.leak();
    let at = |number: usize| order[number] as usize;
    let resolve = |path: &str| {
        let path = NormalPath::new(&path.as_bytes()[3..]).expect("a path");
        shortcuts_of(fs).resolve(&cx, Ino::ROOT, path).expect("resolve")
    };
    let found = |path: &str| match resolve(path) {
        PathResolution::Inode { ino, .. } => ino,
        other => panic!("{other:?}"),
    };
    let close = |ino| {
        let file = File { ino, fh: Fh(0) };
        fs.flush(&cx, file, LockOwner(1)).expect("flush");
        fs.release(&cx, file, ReleaseArgs::default()).expect("release");
    };
    let creation = |number: usize| {
        let regular = node(FileKind::Regular, 0o644);
        let args = OpenArgs { flags: OpenFlags(0o301), kill_suidgid: false };
        let name = name(paths[number].as_bytes());
        let entry = fs.create(&cx, dir, name, &regular, args).expect("create").0;
        close(entry.ino);
        fs.forget(entry.ino, 1);
    };
    let open = |number: usize| {
        let ino = found(&paths[number]);
        fs.open(&cx, ino, OpenArgs::default()).expect("open");
        close(ino);
    };
    vec![
        time(count, creation),
        time(count, |number| {
            found(&paths[number]);
        }),
        time(count, |number| {
            found(&paths[at(number)]);
        }),
        time(count, |number| {
            found(&paths[at(number % 1000)]);
        }),
        time(count, |number| {
            assert!(matches!(resolve(&missing[number]), PathResolution::Missing { .. }))
        }),
        time(count, open),
        time(count, open),
        time(count, |number| {
            let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
            fs.setattr(&cx, found(&paths[number]), None, &set).expect("chmod");
        }),
        time(count, |number| {
            found(&paths[number]);
            fs.unlink(&cx, dir, name(paths[number].as_bytes())).expect("unlink");
        }),
    ]
}
