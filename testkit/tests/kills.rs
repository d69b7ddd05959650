//! Clients of `defuse serve --shared` that are killed at random points: while they hold locks and
//! wait for them, write into lanes, read pages, and change names. No other client waits for them,
//! data that they made durable is there, and the server keeps nothing of them.
//!
//! `DEFUSE_FULL=1` kills ten thousand.

#[path = "served/content.rs"]
mod content;
#[path = "served/files.rs"]
mod files;

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, DirBuf, DirItem, DirSink, Entry, Errno, File, FileSystem, Ino, Lock, LockKind,
    LockOwner, LockRequest, LockType, LockWait, NoNotify, OpenArgs, OpenFlags, Origin, ReleaseArgs,
    Shortcuts,
};
use defuse_measure::server::ServerProcess;
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_testkit::mounted::{program, scratch};
use files::{context, create, name, read, write};

/// Names the socket to a client that is to be killed.
const SOCKET: &str = "DEFUSE_KILLS_SOCKET";

/// Clients at a time that are to be killed.
const VICTIMS: usize = 3;

/// No call of another client takes longer, on a machine that is busy with other tests.
const LIMIT: Duration = Duration::from_secs(30);

fn kill_count() -> u32 {
    if std::env::var_os("DEFUSE_FULL").is_some() { 10_000 } else { 60 }
}

fn connect(socket: &Path) -> RemoteClient {
    let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    let client = RemoteClient::connect(socket, options).unwrap();
    client.attach(Origin::new(), std::sync::Arc::new(NoNotify));
    client
}

fn open(fs: &dyn FileSystem, text: &str) -> File {
    let ino = fs.lookup(&context(), Ino::ROOT, name(text)).unwrap().ino;
    let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
    File { ino, fh: fs.open(&context(), ino, args).unwrap().fh }
}

fn close(fs: &dyn FileSystem, file: File) {
    fs.release(&context(), file, ReleaseArgs::default()).unwrap();
    fs.forget(file.ino, 1);
}

fn request(typ: LockType, owner: u64, wait: bool) -> LockRequest {
    let lock = Lock { typ, start: 0, end: u64::MAX >> 1, pid: owner as u32 };
    LockRequest { kind: LockKind::Posix, owner: LockOwner(owner), lock, wait }
}

/// The content of a file by its name.
fn content(text: &str) -> Vec<u8> {
    content::make_content(text, 60_000)
}

/// Names of a listing, up to a thousand.
#[derive(Default)]
struct BoundedNames(Vec<String>);

impl DirSink for BoundedNames {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        self.0.len() < 1000
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.0.push(String::from_utf8_lossy(item.name).into_owned());
    }
}

/// The first names of the root directory.
fn names(client: &RemoteClient) -> Vec<String> {
    let (cx, mut names) = (context(), BoundedNames::default());
    let root = client.opendir(&cx, Ino::ROOT, OpenFlags::default()).unwrap();
    let root = File { ino: Ino::ROOT, fh: root.fh };
    client.readdir(&cx, root, 0, &mut DirBuf::new(&mut names)).unwrap();
    client.releasedir(&cx, root).unwrap();
    names.0
}

/// A client that is killed in the middle of this. A line of its output names a file that is
/// durable.
#[test]
fn victim() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let client = connect(socket.as_ref());
    let pid = std::process::id();
    println!("ready");
    std::thread::scope(|scope| {
        scope.spawn(|| make_files(&client, pid));
        scope.spawn(|| take_locks(&client, u64::from(pid)));
        scope.spawn(|| look(&client));
    });
}

fn make_files(client: &RemoteClient, pid: u32) {
    let (cx, mut out) = (context(), std::io::stdout());
    let mut random = fastrand::Rng::with_seed(pid.into());
    for number in 0.. {
        let text = format!("victim {pid} {number}");
        let (entry, file) = create(client, &text);
        if random.bool() {
            // It ends with its client, however that ends.
            client.unlink(&cx, Ino::ROOT, name(&text)).unwrap();
        }
        let bytes = content(&text);
        for (at, part) in bytes.chunks(20_000).enumerate() {
            write(client, file, at as u64 * 20_000, part).unwrap();
        }
        let kept = client.lookup(&cx, Ino::ROOT, name(&text)).is_ok_and(|found| {
            client.forget(found.ino, 1);
            found.ino == entry.ino
        });
        if kept && random.u8(..4) == 0 {
            client.fsync(&cx, file, false).unwrap();
            writeln!(out, "durable {text}").unwrap();
        } else if kept {
            let to = format!("{text} renamed");
            let places = [name(&text), name(&to)].map(|name| (Ino::ROOT, name));
            client.rename(&cx, places[0], places[1], Default::default()).unwrap();
            client.unlink(&cx, Ino::ROOT, name(&to)).unwrap();
        }
        close(client, file);
    }
}

fn take_locks(client: &RemoteClient, owner: u64) {
    let (cx, file) = (context(), open(client, "locked"));
    loop {
        let (answer, answered) = std::sync::mpsc::channel();
        let caller = Caller { uid: 0, gid: 0, pid: owner as u32 };
        let taken = Box::new(move |taken| answer.send(taken).unwrap_or_default());
        let wanted = (file, request(LockType::Write, owner, true));
        client.setlkw(LockWait::new(wanted, caller, owner, Default::default(), taken));
        answered.recv().unwrap().unwrap();
        std::thread::sleep(Duration::from_micros(200));
        client.setlk(&cx, file, &request(LockType::Unlock, owner, false)).unwrap();
    }
}

fn look(client: &RemoteClient) {
    let (cx, shared) = (context(), open(client, "shared"));
    for round in 0_u64.. {
        read(client, shared, round % 8 * 4096, 4096).unwrap();
        client.resolve(&cx, Ino::ROOT, name("missing").into()).unwrap();
        assert!(names(client).iter().any(|text| text == "shared"));
        if round.is_multiple_of(16) {
            write(client, shared, round % 8 * 4096, &[round as u8; 4096]).unwrap();
        }
    }
}

/// A client that is to be killed, and its output.
struct KilledClient {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl KilledClient {
    fn start(socket: &Path) -> KilledClient {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["victim", "--exact", "--nocapture"]).env(SOCKET, socket);
        let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        KilledClient { child, said }
    }

    /// Waits until it is connected.
    fn is_ready(&mut self) {
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert_ne!(self.said.read_line(&mut line).unwrap(), 0, "a client ended by itself");
        }
    }

    /// Kills it. Returns the names of its durable files.
    fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let lines = self.said.lines().map_while(Result::ok);
        // The last line may be cut.
        let complete = lines.filter(|line| line.starts_with("durable victim "));
        complete.filter_map(|line| line.strip_prefix("durable ").map(str::to_owned)).collect()
    }
}

/// The resources of a server.
#[derive(Debug)]
struct ServerResources {
    sockets: usize,
    descriptors: usize,
    threads: usize,
    /// Memory of its own, in bytes.
    bytes: u64,
}

impl ServerResources {
    fn read(pid: u32) -> ServerResources {
        let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap();
        let links: Vec<_> =
            count("fd").filter_map(|fd| fs::read_link(fd.ok()?.path()).ok()).collect();
        let is_socket = |link: &&PathBuf| link.to_string_lossy().starts_with("socket:");
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let kib: u64 = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
        ServerResources {
            sockets: links.iter().filter(is_socket).count(),
            descriptors: links.len(),
            threads: count("task").count(),
            bytes: kib << 10,
        }
    }

    /// The resources of a server once it has only so many sockets.
    fn await_settled(pid: u32, sockets: usize) -> ServerResources {
        let begun = Instant::now();
        loop {
            let uses = ServerResources::read(pid);
            if uses.sockets <= sockets {
                return uses;
            }
            assert!(begun.elapsed() < LIMIT, "sockets of clients that are gone: {uses:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Works as an ordinary client until `ends`. Returns the longest time of a call, or of a wait for
/// the lock.
fn observe(client: &RemoteClient, ends: &AtomicBool) -> Duration {
    let (cx, own) = (context(), create(client, "own").1);
    let locked = open(client, "locked");
    let mut longest = Duration::ZERO;
    let mut timed = |call: &mut dyn FnMut()| {
        let begun = Instant::now();
        call();
        longest = longest.max(begun.elapsed());
    };
    for round in 0_u64.. {
        if ends.load(Ordering::Relaxed) {
            break;
        }
        let bytes = [round as u8; 5000];
        timed(&mut || assert_eq!(write(client, own, 0, &bytes), Ok(5000)));
        timed(&mut || assert_eq!(read(client, own, 0, 6000).unwrap(), bytes));
        timed(&mut || assert!(client.resolve(&cx, Ino::ROOT, name("own").into()).is_ok()));
        timed(&mut || {
            // Clients that live give it back after 200 us, and wait in turn.
            let begun = Instant::now();
            while client.setlk(&cx, locked, &request(LockType::Write, 1, false)).is_err() {
                assert!(begun.elapsed() < LIMIT, "the lock of a client that is gone");
                std::thread::sleep(Duration::from_micros(50));
            }
            client.setlk(&cx, locked, &request(LockType::Unlock, 1, false)).unwrap();
        });
    }
    close(client, locked);
    close(client, own);
    client.unlink(&cx, Ino::ROOT, name("own")).unwrap();
    longest
}

fn is_whole(client: &RemoteClient, text: &str) {
    let bytes = content(text);
    let file = open(client, text);
    assert!(read(client, file, 0, bytes.len() + 1).unwrap() == bytes, "{text}");
    close(client, file);
}

/// Inodes in use.
fn inodes(client: &RemoteClient) -> u64 {
    let counts = client.statfs(&context(), Ino::ROOT).unwrap();
    counts.files - counts.files_free
}

/// Removes whatever victims have left.
fn remove_rest(client: &RemoteClient) {
    loop {
        let rest: Vec<String> =
            names(client).into_iter().filter(|text| text.starts_with("victim")).collect();
        if rest.is_empty() {
            return;
        }
        for text in &rest {
            client.unlink(&context(), Ino::ROOT, name(text)).unwrap();
        }
    }
}

/// Files that victims have made durable.
#[derive(Default)]
struct DurableFiles {
    files: Vec<String>,
    /// The number of files that were looked at and removed.
    seen: usize,
}

impl DurableFiles {
    fn sum(&self) -> usize {
        self.seen + self.files.len()
    }

    /// Looks at the files, and removes them.
    fn check(&mut self, client: &RemoteClient) {
        for text in self.files.drain(..) {
            is_whole(client, &text);
            client.unlink(&context(), Ino::ROOT, name(&text)).unwrap();
            self.seen += 1;
        }
    }
}

/// Kills so many clients while another one works. Returns the longest time that this one has
/// waited.
fn kill_some(
    socket: &Path,
    (client, durable): (&RemoteClient, &mut DurableFiles),
    kills: u32,
    random: &mut fastrand::Rng,
) -> Duration {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let observer = scope.spawn(|| observe(&connect(socket), &ends));
        let mut victims: HashMap<usize, KilledClient> = HashMap::new();
        for number in 1..=kills {
            let slot = random.usize(..VICTIMS);
            if let Some(mut victim) = victims.remove(&slot) {
                // Some are killed while they connect.
                if random.u8(..8) > 0 {
                    victim.is_ready();
                    std::thread::sleep(Duration::from_micros(random.u64(..15_000)));
                }
                durable.files.extend(victim.kill());
            }
            victims.insert(slot, KilledClient::start(socket));
            assert!(!observer.is_finished(), "the other client has failed");
            if number % 200 == 0 {
                durable.check(client);
            }
        }
        victims.into_values().for_each(|victim| durable.files.extend(victim.kill()));
        ends.store(true, Ordering::Relaxed);
        observer.join().unwrap()
    })
}

#[test]
fn kills_of_clients_lose_nothing_durable_leave_nothing_and_nobody_waits_for_them() {
    let place = scratch().unwrap();
    let (image, socket) = (place.path().join("image"), place.path().join("socket"));
    let run = |args: &[&str]| {
        let output = Command::new(program().unwrap()).args(args).arg(&image).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    run(&["mkfs", "uhs", "--size", "1G", "--sparse"]);
    let source = format!("uhs:{}", image.display());
    let server = ServerProcess::start(program().unwrap(), source.as_ref(), &socket).unwrap();
    let client = connect(&socket);
    for text in ["locked", "shared"] {
        let file = create(&client, text).1;
        write(&client, file, 0, &[1; 32_768]).unwrap();
        close(&client, file);
    }
    let sockets = ServerResources::read(server.pid()).sockets;
    let mut random = fastrand::Rng::with_seed(u64::from(kill_count()));
    let mut found = DurableFiles::default();
    let mut part = |kills| {
        let longest = kill_some(&socket, (&client, &mut found), kills, &mut random);
        assert!(longest < LIMIT, "a call took {longest:?}");
        (longest, ServerResources::await_settled(server.pid(), sockets))
    };
    let (first, before) = part(kill_count() / 4);
    let (second, after) = part(kill_count() - kill_count() / 4);
    println!(
        "{} kills, {} durable files, longest wait {:?}",
        kill_count(),
        found.sum(),
        first.max(second)
    );
    println!("the server after a quarter: {before:?}; after all: {after:?}");
    assert!(found.sum() > 0, "nothing was made durable");
    assert!(after.descriptors <= before.descriptors + 8);
    assert!(after.threads <= before.threads + 8);
    assert!(after.bytes <= before.bytes + (48 << 20));
    let locked = open(&client, "locked");
    assert_eq!(client.setlk(&context(), locked, &request(LockType::Write, 1, false)), Ok(()));

    // The server is killed, too. Then the image has what was durable, and nothing else that counts
    // as used.
    drop(client);
    server.kill().unwrap();
    run(&["fsck"]);
    fs::remove_file(&socket).unwrap();
    let server = ServerProcess::start(program().unwrap(), source.as_ref(), &socket).unwrap();
    let client = connect(&socket);
    found.files.iter().for_each(|text| is_whole(&client, text));
    remove_rest(&client);
    assert_eq!(client.lookup(&context(), Ino::ROOT, name("missing")).err(), Some(Errno::ENOENT));
    // The root, and two files: none without a name. Lookups are returned without waiting.
    let begun = Instant::now();
    while inodes(&client) > 3 {
        assert!(begun.elapsed() < LIMIT, "{} inodes are in use", inodes(&client));
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(client);
    server.end().unwrap();
    run(&["fsck"]);
}
