//! The client of a GlusterFS volume under memcheck of valgrind: everything that libgfapi calls back
//! uses memory that is allocated and initialised. All parts take four minutes, and run with
//! `DEFUSE_FULL=1`.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use defuse_fs::{
    Buffer, Caller, Completion, Context, Errno, File, FileKind, FileSystem, Ino, Io, IoOp, Name,
    NewNode, OpenArgs, OpenFlags, ReadArgs, ReadSink, ReleaseArgs, WriteArgs, WriteSource,
};
use defuse_measure::server::ServerProcess;
use defuse_testkit::cluster::GlusterCluster;
use defuse_testkit::gluster::{BrickLayout, VolumeSetup, unavailable_reason};
use defuse_testkit::mounted::{self, ServedMount};
use defuse_testkit::posix;
use defuse_testkit::suites::{ConformanceSuite, exclusions};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process_group};

/// The checker, which runs the rest of its arguments. Coroutines of libgfapi have stacks of 2 MiB,
/// so that a smaller change of the stack pointer may be the way to another one; frames of ours are
/// far smaller.
const MEMCHECK: [&str; 8] = [
    "valgrind",
    "--tool=memcheck",
    "--leak-check=no",
    "--error-exitcode=99",
    "--max-stackframe=1000000",
    "--fair-sched=try",
    "--num-callers=40",
    concat!("--suppressions=", env!("CARGO_MANIFEST_DIR"), "/tests/gluster_memory.supp"),
];

/// A time after which something hangs: the program is many times slower than usual.
const HANGS: Duration = Duration::from_secs(120);

/// The variable with the source for [`child`].
const SOURCE: &str = "DEFUSE_MEMORY_SOURCE";

#[test]
fn callbacks_of_libgfapi_use_valid_memory() {
    if std::env::var_os("DEFUSE_FULL").is_none() {
        return;
    }
    if let Some(reason) =
        mounted::unavailable_reason().or_else(unavailable_reason).or_else(memcheck_refusal)
    {
        println!("skipped: {reason}");
        return;
    }
    let cluster = start();
    time_run("an application", || an_application_has_its_answers(&cluster));
    let places = [mounted::scratch().unwrap(), mounted::scratch().unwrap()];
    let here = mount(&cluster, &MEMCHECK, places[0].path());
    let there = mount(&cluster, &[], places[1].path());
    time_run("posix cases", || posix_cases(here.path()));
    time_run("messages", || changes_by_others_are_seen(here.path(), there.path()));
    time_run("locks", || locks_wait_for_other_clients(here.path(), there.path()));
    time_run("faults", || writers_outlast_faults(&cluster, here.path()));
    time_run("end", || a_mount_ends_with_requests_in_flight(&cluster, here));
    there.end().unwrap();
    is_clean(&fs::read_to_string(places[0].path().join("log")).unwrap());
    let place = mounted::scratch().unwrap();
    time_run("server", || a_server_outlasts_its_clients(&cluster, place.path()));
}

fn memcheck_refusal() -> Option<&'static str> {
    let version = Command::new(MEMCHECK[0]).arg("--version").output();
    version.err().map(|_| "valgrind is not installed")
}

fn start() -> GlusterCluster {
    let options = || vec![("network.ping-timeout", "4"), ("features.cache-invalidation", "on")];
    let volume =
        |name: &str, layout| VolumeSetup { name: name.to_owned(), layout, options: options() };
    GlusterCluster::start(&[
        volume("dist", BrickLayout::Distributed),
        volume("repl", BrickLayout::Replicated),
    ])
    .unwrap()
}

/// Mounts the replicated volume, by a program that runs under `checker` unless it is empty.
fn mount(cluster: &GlusterCluster, checker: &[&str], place: &Path) -> ServedMount {
    let inside = cluster.servers().network_prefix();
    let prefix: Vec<&str> = inside.iter().map(String::as_str).chain(checker.to_vec()).collect();
    let source = format!("gluster://{}/repl", cluster.host(3));
    ServedMount::mount_under(&prefix, source.as_ref(), place, &["-o", "no_sandbox"]).unwrap()
}

fn time_run<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = run();
    println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
    result
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < HANGS, "not within {HANGS:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Memcheck has watched the program to its end, and found nothing.
fn is_clean(said: &str) {
    let mut summaries = said.lines().filter(|line| line.contains("ERROR SUMMARY:")).peekable();
    assert!(summaries.peek().is_some(), "no summary: {said}");
    assert!(summaries.all(|line| line.contains(" 0 errors ")), "{said}");
}

fn posix_cases(dir: &Path) {
    let left_out = |case: &str| {
        let is_long = case.contains("many") || case.contains("tree_of_depth");
        let hangs = exclusions::hang_reason(ConformanceSuite::Posix, "gluster-repl", case);
        hangs.or(is_long.then_some("it makes the calls of others, but more of them"))
    };
    let report = posix::run_except(dir, "", &left_out);
    let (passed, _, _) = report.counts();
    assert!(passed >= 150, "only {passed} passed\n{report}");
}

/// Another client changes what this one knows, so that the servers send messages.
fn changes_by_others_are_seen(here: &Path, there: &Path) {
    let [from, to] = [here, there].map(|dir| dir.join("known"));
    fs::create_dir(&from).unwrap();
    for round in 0..20 {
        let path = |dir: &Path, what: &str| dir.join(format!("{what}-{round}"));
        for what in ["mode", "data", "gone", "moved", "new"] {
            fs::write(path(&from, what), "old").unwrap();
            fs::metadata(path(&from, what)).unwrap();
        }
        let open = fs::File::open(path(&from, "data")).unwrap();
        fs::set_permissions(path(&to, "mode"), fs::Permissions::from_mode(0o640)).unwrap();
        fs::write(path(&to, "data"), "longer").unwrap();
        fs::remove_file(path(&to, "gone")).unwrap();
        fs::rename(path(&to, "moved"), path(&to, "new")).unwrap();
        fs::create_dir(path(&to, "dir")).unwrap();
        let mode = || fs::metadata(path(&from, "mode")).unwrap().permissions().mode() & 0o777;
        wait_until("the mode", || mode() == 0o640);
        let mut bytes = [0; 6];
        wait_until("the data", || {
            open.read_at(&mut bytes, 0).is_ok_and(|len| &bytes[..len] == b"longer")
        });
        wait_until("the removal", || !path(&from, "gone").exists());
        wait_until("the former name", || !path(&from, "moved").exists());
        wait_until("the directory", || path(&from, "dir").is_dir());
    }
    let listed: Vec<_> = fs::read_dir(&from).unwrap().map(|entry| entry.unwrap()).collect();
    assert_eq!(listed.len(), 20 * 4);
    assert!(listed.iter().all(|entry| entry.metadata().is_ok()));
}

fn locks_wait_for_other_clients(here: &Path, there: &Path) {
    fs::write(here.join("lock"), "x").unwrap();
    let open =
        |dir: &Path| fs::File::options().read(true).write(true).open(dir.join("lock")).unwrap();
    for (holder, waiter) in [(here, there), (there, here)] {
        let (held, other) = (open(holder), open(waiter));
        fcntl_lock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        let (send, answer) = channel();
        std::thread::spawn(move || send.send(fcntl_lock(&other, FlockOperation::LockExclusive)));
        assert!(answer.recv_timeout(Duration::from_millis(500)).is_err(), "both have the lock");
        drop(held);
        answer.recv_timeout(HANGS).expect("the lock is free").unwrap();
    }
}

/// Runs threads that write, sync, read and list during `change`. Returns the number of rounds, and
/// the errors.
fn load(dir: &Path, change: impl FnOnce()) -> (usize, Vec<std::io::Error>) {
    let done = AtomicBool::new(false);
    let work = &|path: PathBuf| {
        let (mut rounds, mut errors, bytes) = (0, Vec::new(), vec![7; 150_000]);
        while !done.load(Ordering::Acquire) {
            let round = || {
                let mut options = fs::File::options();
                let options = options.read(true).write(true).create(true).truncate(false);
                let file = options.open(&path)?;
                file.write_all_at(&bytes, rounds as u64 % 8)?;
                file.sync_data()?;
                file.sync_all()?;
                file.read_exact_at(&mut vec![0; bytes.len()], 0)?;
                fs::read_dir(dir)?.try_for_each(|entry| entry?.metadata().map(drop))
            };
            if let Err(error) = round() {
                errors.push(error);
                std::thread::sleep(Duration::from_millis(10));
            } else {
                rounds += 1;
            }
        }
        (rounds, errors)
    };
    std::thread::scope(|scope| {
        let start = |number| scope.spawn(move || work(dir.join(format!("load-{number}"))));
        let threads: Vec<_> = (0..6).map(start).collect();
        std::thread::sleep(Duration::from_secs(2));
        // The threads end also if it fails.
        let changed = catch_unwind(AssertUnwindSafe(change));
        done.store(true, Ordering::Release);
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        changed.unwrap_or_else(|panic| resume_unwind(panic));
        let rounds = results.iter().map(|result| result.0).sum();
        (rounds, results.into_iter().flat_map(|result| result.1).collect())
    })
}

/// A brick that is killed gives no errors, a volume that is stopped does.
fn writers_outlast_faults(cluster: &GlusterCluster, dir: &Path) {
    let start = || cluster.gluster(3, &["volume", "start", "repl", "force"]).unwrap();
    let dir = dir.join("load");
    fs::create_dir(&dir).unwrap();
    let (rounds, errors) = load(&dir, || {
        cluster.kill_brick(1, "repl").unwrap();
        std::thread::sleep(Duration::from_secs(2));
        start();
        std::thread::sleep(Duration::from_secs(4));
        cluster.gluster(3, &["volume", "stop", "repl", "force"]).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        start();
        wait_until("the volume works again", || fs::write(dir.join("new"), "x").is_ok());
    });
    println!("  {rounds} rounds, {} errors", errors.len());
    assert!(rounds > 0 && !errors.is_empty(), "{rounds} rounds, {errors:?}");
}

/// The kernel aborts the requests of a mount while the servers answer none of them.
fn a_mount_ends_with_requests_in_flight(cluster: &GlusterCluster, mount: ServedMount) {
    let dir = mount.path().join("load");
    let (_, errors) = load(&dir, || {
        [1, 2].iter().for_each(|&server| cluster.cut(server).unwrap());
        std::thread::sleep(Duration::from_secs(1));
        // It is busy, but aborts the connection first.
        assert!(unmount(mount.path(), UnmountFlags::FORCE).is_err());
    });
    // Requests after the abort fail with ENOTCONN.
    let in_flight = errors.iter().filter(|error| error.kind() == ErrorKind::ConnectionAborted);
    assert!(in_flight.count() > 0, "no request was in flight: {errors:?}");
    [1, 2].iter().for_each(|&server| cluster.join(server).unwrap());
    mount.end().unwrap();
}

/// Clients share memory with a server, which libgfapi reads from and writes to: large requests of a
/// mount, and of programs that are killed during them.
fn a_server_outlasts_its_clients(cluster: &GlusterCluster, place: &Path) {
    let (socket, said) = (place.join("socket"), place.join("said"));
    let mut serve = cluster.servers().command(Path::new(MEMCHECK[0]));
    serve.args(&MEMCHECK[1..]).arg(mounted::program().unwrap());
    serve.stderr(fs::File::create(&said).unwrap());
    let source = format!("gluster://{}/repl", cluster.host(3));
    let options = ["-o", "no_sandbox"].map(str::to_owned);
    let server = ServerProcess::start_by(serve, &options, source.as_ref(), &socket).unwrap();
    let shared = format!("shared:{}", socket.display());
    let mount = ServedMount::new(shared.as_ref(), place, &[]).unwrap();
    let dir = mount.path().join("server");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("large"), vec![7; 4 << 20]).unwrap();

    let script =
        "while :; do dd if=/x/server/large of=/x/server/copy bs=1M conv=notrunc,fsync 2>&1; done";
    for _ in 0..6 {
        let mut run = Command::new(mounted::program().unwrap());
        run.args(["run", "--mount", &format!("/x={shared}"), "--", "sh", "-c", script]);
        let run = run.stdout(std::process::Stdio::piped()).process_group(0);
        let mut run = run.spawn().unwrap();
        // Copies are under way.
        let mut some = [0; 64];
        run.stdout.take().unwrap().read_exact(&mut some).unwrap();
        std::thread::sleep(Duration::from_millis(fastrand::u64(0..300)));
        let group = Pid::from_raw(run.id() as i32).unwrap();
        kill_process_group(group, Signal::KILL).unwrap();
        run.wait().unwrap();
    }
    let (rounds, errors) = load(&dir, || {
        cluster.kill_brick(1, "repl").unwrap();
        std::thread::sleep(Duration::from_secs(2));
        cluster.gluster(3, &["volume", "start", "repl", "force"]).unwrap();
    });
    println!("  {rounds} rounds, {} errors", errors.len());
    assert!(rounds > 0 && errors.is_empty(), "{rounds} rounds, {errors:?}");
    assert_eq!(fs::read(dir.join("large")).unwrap(), vec![7; 4 << 20]);
    mount.end().unwrap();
    let ended = server.end();
    is_clean(&fs::read_to_string(said).unwrap());
    ended.unwrap();
}

/// Runs [`child`] under memcheck.
fn an_application_has_its_answers(cluster: &GlusterCluster) {
    let mut checked = cluster.servers().command(Path::new(MEMCHECK[0]));
    checked.args(&MEMCHECK[1..]).arg(std::env::current_exe().unwrap());
    checked.args(["child", "--exact", "--nocapture"]);
    checked.env(SOURCE, format!("//{}/dist", cluster.host(3)));
    let output = checked.output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && said.contains("all answers are there"), "{said}");
    is_clean(&said);
}

/// The application: its transfers are in flight while it closes their files, and while it drops the
/// client.
#[test]
fn child() {
    let Some(source) = std::env::var_os(SOURCE) else { return };
    let source = source.to_str().unwrap();
    for in_application in [true, false] {
        let options = defuse_gluster::GlusterOptions { in_application, ..Default::default() };
        let fs = defuse_gluster::Gluster::connect(source, &options).unwrap();
        for _ in 0..10 {
            let (file, answers) = submit_all(&fs);
            fs.release(&root(), file, ReleaseArgs::default()).unwrap();
            expect_success(&answers);
            fs.unlink(&root(), Ino::ROOT, Name::new(b"file").unwrap()).unwrap();
        }
        let (_, answers) = submit_all(&fs);
        drop(fs);
        expect_success(&answers);
        let fs = defuse_gluster::Gluster::connect(source, &options).unwrap();
        fs.unlink(&root(), Ino::ROOT, Name::new(b"file").unwrap()).unwrap();
    }
    println!("all answers are there");
}

fn root() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 0 })
}

type TransferAnswers = Receiver<defuse_fs::Result<usize>>;

/// Makes a file, and starts writes, reads into memory of both kinds, and syncs.
fn submit_all(fs: &dyn FileSystem) -> (File, TransferAnswers) {
    let (send, answers) = channel();
    let flags = OpenFlags(OpenFlags::RDWR);
    let node = NewNode::new(FileKind::Regular, 0o600, root().caller);
    let args = OpenArgs { flags, kill_suidgid: false };
    let name = Name::new(b"file").unwrap();
    let (entry, opened) = fs.create(&root(), Ino::ROOT, name, &node, args).unwrap();
    let file = File { ino: entry.ino, fh: opened.fh };
    for number in 0..64 {
        let (len, offset) = ([1, 500, 9000, 140_000][number % 4], number as u64 * 1000);
        let op = match number % 5 {
            0 | 1 => {
                IoOp::Write { file, args: WriteArgs { offset, flags, ..Default::default() }, len }
            }
            2 | 3 => IoOp::Read { file, args: ReadArgs { offset, flags, lock_owner: None }, len },
            _ => IoOp::Fsync { file, datasync: number % 2 == 0 },
        };
        let room = (number % 5 == 2).then(|| Buffer::from(vec![0; len]));
        let bytes = if number % 5 < 2 { vec![7; len] } else { Vec::new() };
        let transfer = MemoryTransfer {
            memory: SubmittedMemory { bytes, taken: 0 },
            room,
            send: send.clone(),
        };
        fs.submit(Io::new(op, root().caller, 1, Arc::default(), Box::new(transfer)));
    }
    (file, answers)
}

/// Receives the answers until no transfer is left. One that is dropped answers `EIO`.
fn expect_success(answers: &TransferAnswers) {
    let mut count = 0;
    while let Ok(answer) = answers.recv_timeout(HANGS) {
        answer.unwrap();
        count += 1;
    }
    assert_eq!(count, 64);
}

/// The data of a write, or what was read.
struct SubmittedMemory {
    bytes: Vec<u8>,
    taken: usize,
}

impl ReadSink for SubmittedMemory {
    fn put(&mut self, bytes: &[u8]) -> defuse_fs::Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
    fn put_zeros(&mut self, len: usize) -> defuse_fs::Result<()> {
        self.put(&vec![0; len])
    }
    fn fill_from(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> defuse_fs::Result<usize> {
        Err(Errno::EINVAL)
    }
}

impl WriteSource for SubmittedMemory {
    fn remaining(&self) -> usize {
        self.bytes.len() - self.taken
    }
    fn take(&mut self, out: &mut [u8]) -> defuse_fs::Result<usize> {
        let len = out.len().min(self.remaining());
        out[..len].copy_from_slice(&self.bytes[self.taken..][..len]);
        self.taken += len;
        Ok(len)
    }
    fn drain_to(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> defuse_fs::Result<usize> {
        Err(Errno::EINVAL)
    }
    /// Half of the writes lend their memory.
    fn borrow(&mut self) -> Option<&[u8]> {
        self.bytes.len().is_multiple_of(1000).then(|| &self.bytes[self.taken..])
    }
}

/// An operation in flight with all its memory.
struct MemoryTransfer {
    memory: SubmittedMemory,
    room: Option<Buffer>,
    send: Sender<defuse_fs::Result<usize>>,
}

impl Completion for MemoryTransfer {
    fn sink(&mut self) -> &mut dyn ReadSink {
        &mut self.memory
    }
    fn source(&mut self) -> &mut dyn WriteSource {
        &mut self.memory
    }
    fn take_room(&mut self) -> Option<Buffer> {
        self.room.take()
    }
    fn give_room(&mut self, room: Buffer, filled: usize) -> defuse_fs::Result<()> {
        assert!(room[..filled].iter().all(|&byte| byte == 7 || byte == 0));
        self.room = Some(room);
        Ok(())
    }
    fn finish(self: Box<Self>, result: defuse_fs::Result<usize>) {
        assert!(self.memory.bytes.iter().all(|&byte| byte == 7 || byte == 0));
        let _ = self.send.send(result);
    }
}
