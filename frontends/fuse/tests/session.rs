//! Sessions with the running kernel: panics of handlers, interrupts, locks, workers, notifications.
//! Each test scripts the behaviour of one file.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use defuse_fs::{
    Attr, CacheMode, Caps, Context, DirBuf, DirItem, Entry, Errno, FailureDomain, Fh, File,
    FileKind, FileSystem, Ino, Io, IoOp, Lifecycle, LockRequest, LockSupport, LockType, LockWait,
    Name, NewNode, Notify, OpenArgs, OpenReply, Origin, PollHandle, ReadArgs, ReadBuf, Result,
    SetAttr, Timestamp, WriteArgs, WriteBuf,
};
use defuse_fuse::mount::{self, MountOptions, UnmountError};
use defuse_fuse::{IoUring, ResizeError, Session, SessionOptions, ThreadPolicy};

/// The behaviour of a read of `/file`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ReadScript {
    Answer,
    Panic,
    /// Waits until the test opens the gate, or the caller is interrupted.
    Wait,
    /// Waits for the gate and ignores interrupts.
    WaitForever,
    /// Blocks in a system call that only a signal ends.
    Block,
}

struct ScriptedFileSystem {
    script: Mutex<ReadScript>,
    content: Mutex<Vec<u8>>,
    gate: AtomicBool,
    inside: AtomicUsize,
    most_inside: AtomicUsize,
    lookups: Mutex<HashMap<u64, u64>>,
    forgotten: AtomicU64,
    waiting: Mutex<Vec<LockWait>>,
    polls: Mutex<Vec<PollHandle>>,
    ready: AtomicBool,
    notify: Mutex<Option<Arc<dyn Notify>>>,
    detached: AtomicBool,
    forever: Duration,
    relieved: AtomicUsize,
    /// The two files need different parts of the storage.
    has_parts: AtomicBool,
    submits: AtomicBool,
    no_birth_times: AtomicBool,
    submitted: AtomicUsize,
    /// A creation has begun.
    making: AtomicBool,
}

impl Lifecycle for ScriptedFileSystem {
    fn memory_pressure(&self) {
        self.relieved.fetch_add(1, Ordering::AcqRel);
    }
}

const FILE: Ino = Ino(2);
/// A file whose reads follow no script.
const OTHER: Ino = Ino(3);

impl ScriptedFileSystem {
    fn new() -> Arc<Self> {
        Arc::new(ScriptedFileSystem {
            script: Mutex::new(ReadScript::Answer),
            content: Mutex::new(b"content".to_vec()),
            gate: AtomicBool::new(false),
            inside: AtomicUsize::new(0),
            most_inside: AtomicUsize::new(0),
            lookups: Mutex::default(),
            forgotten: AtomicU64::new(0),
            waiting: Mutex::default(),
            polls: Mutex::default(),
            ready: AtomicBool::new(false),
            notify: Mutex::default(),
            detached: AtomicBool::new(false),
            forever: Duration::from_secs(3600),
            relieved: AtomicUsize::new(0),
            has_parts: AtomicBool::new(false),
            submits: AtomicBool::new(false),
            no_birth_times: AtomicBool::new(false),
            submitted: AtomicUsize::new(0),
            making: AtomicBool::new(false),
        })
    }

    fn set(&self, script: ReadScript) {
        *self.script.lock().unwrap() = script;
    }

    fn notifier(&self) -> Arc<dyn Notify> {
        Arc::clone(self.notify.lock().unwrap().as_ref().expect("attached"))
    }

    fn attr(&self, ino: Ino) -> Attr {
        let dir = ino == Ino::ROOT;
        Attr {
            st_ino: ino.0,
            kind: if dir { FileKind::Directory } else { FileKind::Regular },
            perm: if dir { 0o755 } else { 0o644 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: if dir { 0 } else { self.content.lock().unwrap().len() as u64 },
            blocks: 1,
            blksize: 4096,
            atime: Timestamp::default(),
            mtime: Timestamp { secs: 1, nanos: 0 },
            ctime: Timestamp::default(),
            btime: Some(Timestamp { secs: 7, nanos: 0 }),
            valid_for: self.forever,
        }
    }

    fn run_script(&self, cx: &Context<'_>) -> Result<()> {
        let script = *self.script.lock().unwrap();
        match script {
            ReadScript::Answer => return Ok(()),
            ReadScript::Panic => panic!("scripted"),
            ReadScript::Block => {
                let (reader, _writer) = rustix::pipe::pipe().unwrap();
                let error = rustix::io::read(&reader, &mut [0; 1][..]).unwrap_err();
                return Err(Errno::from_raw(error.raw_os_error()));
            }
            ReadScript::Wait | ReadScript::WaitForever => {}
        }
        while !self.gate.load(Ordering::Acquire) {
            if script == ReadScript::Wait && cx.is_interrupted() {
                return Err(Errno::EINTR);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl FileSystem for ScriptedFileSystem {
    fn caps(&self) -> Caps {
        let submits = self.submits.load(Ordering::Acquire);
        let birth_times = !self.no_birth_times.load(Ordering::Acquire);
        let locks = LockSupport::FileSystem;
        Caps { locks, exclusive: true, submits, birth_times, ..Caps::default() }
    }
    fn attach(&self, _: Origin, notify: Arc<dyn Notify>) {
        *self.notify.lock().unwrap() = Some(notify);
    }
    fn detach(&self, _: Origin) -> Result<()> {
        self.detached.store(true, Ordering::Release);
        Ok(())
    }
    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        Some(self)
    }
    fn lookup(&self, _: &Context<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        let ino = match name.as_bytes() {
            b"file" => FILE,
            b"other" => OTHER,
            _ => return Err(Errno::ENOENT),
        };
        *self.lookups.lock().unwrap().entry(ino.0).or_default() += 1;
        Ok(Entry { ino, generation: 1, attr: self.attr(ino), valid_for: self.forever })
    }
    /// Waits for the gate.
    fn mkdir(&self, cx: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>) -> Result<Entry> {
        self.making.store(true, Ordering::Release);
        self.run_script(cx)?;
        Err(Errno::ENOSPC)
    }
    fn forget(&self, ino: Ino, lookups: u64) {
        *self.lookups.lock().unwrap().entry(ino.0).or_default() -= lookups;
        self.forgotten.fetch_add(lookups, Ordering::AcqRel);
    }
    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        Ok(self.attr(ino))
    }
    fn setattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>, _: &SetAttr) -> Result<Attr> {
        Ok(self.attr(ino))
    }
    fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<OpenReply> {
        let cached = *self.script.lock().unwrap() == ReadScript::Answer;
        let cache = if cached { CacheMode::Keep } else { CacheMode::Direct };
        Ok(OpenReply { fh: Fh(9), cache, ..OpenReply::default() })
    }
    fn failure_domain(&self, ino: Ino, _: Option<Name<'_>>) -> Option<FailureDomain> {
        let has_parts = self.has_parts.load(Ordering::Acquire) && ino != Ino::ROOT;
        has_parts.then_some(FailureDomain(ino.0 as u32))
    }
    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        if file.ino == OTHER {
            return out.put(b"other".get(args.offset as usize..).unwrap_or_default()).map(drop);
        }
        let inside = self.inside.fetch_add(1, Ordering::AcqRel) + 1;
        self.most_inside.fetch_max(inside, Ordering::AcqRel);
        let result = self.run_script(cx);
        self.inside.fetch_sub(1, Ordering::AcqRel);
        result?;
        let content = self.content.lock().unwrap();
        out.put(content.get(args.offset as usize..).unwrap_or_default())?;
        Ok(())
    }
    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        if file.ino == FILE {
            self.run_script(cx)?;
        }
        let mut bytes = vec![0; data.remaining()];
        let mut done = 0;
        while done < bytes.len() {
            match data.take(&mut bytes[done..])? {
                0 => break,
                count => done += count,
            }
        }
        if file.ino == FILE {
            let (mut content, start) = (self.content.lock().unwrap(), args.offset as usize);
            let end = content.len().max(start + done);
            content.resize(end, 0);
            content[start..start + done].copy_from_slice(&bytes[..done]);
        }
        Ok(done)
    }
    fn submit(&self, mut io: Io) {
        self.submitted.fetch_add(1, Ordering::AcqRel);
        let IoOp::Read { file, args, .. } = io.op() else { return io.finish(Err(Errno::EIO)) };
        let result = io.with_read_buf(|cx, out| self.read(cx, file, args, out));
        io.finish_filled(result);
    }
    fn flush(&self, _: &Context<'_>, _: File, _: defuse_fs::LockOwner) -> Result<()> {
        Ok(())
    }
    fn readdir(&self, _: &Context<'_>, _: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        if from == 0 {
            out.push(DirItem { ino: 2, next: 1, kind: FileKind::Regular, name: b"file" });
        }
        Ok(())
    }
    fn setlk(&self, _: &Context<'_>, _: File, request: &LockRequest) -> Result<()> {
        match request.lock.typ {
            // The unlock grants all waits.
            LockType::Unlock => {
                let waiting = std::mem::take(&mut *self.waiting.lock().unwrap());
                waiting.into_iter().for_each(|wait| wait.finish(Ok(())));
                Ok(())
            }
            _ => Err(Errno::EAGAIN),
        }
    }
    fn setlkw(&self, wait: LockWait) {
        self.waiting.lock().unwrap().push(wait);
    }
    fn poll(&self, _: &Context<'_>, _: File, _: u32, wake: Option<PollHandle>) -> Result<u32> {
        self.polls.lock().unwrap().extend(wake);
        Ok(if self.ready.load(Ordering::Acquire) { libc::POLLIN as u32 } else { 0 })
    }
}

const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";

fn kernel_offers_rings() -> bool {
    let forbidden = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    forbidden.is_ok_and(|text| text.trim() != "2")
        && std::fs::read_to_string(ENABLE_URING).is_ok_and(|text| text.trim() == "Y")
}

struct SessionMount {
    dir: tempfile::TempDir,
    fs: Arc<ScriptedFileSystem>,
    session: Option<Session>,
}

impl SessionMount {
    fn new(options: &SessionOptions) -> Option<SessionMount> {
        SessionMount::mount(ScriptedFileSystem::new(), options)
    }

    fn mount(fs: Arc<ScriptedFileSystem>, options: &SessionOptions) -> Option<SessionMount> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            eprintln!("skipped: needs root and /dev/fuse");
            return None;
        }
        if options.io_uring == IoUring::Required && !kernel_offers_rings() {
            eprintln!("not here: needs `echo 1 > {ENABLE_URING}` and io_uring");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
        let session = Session::start(mounted.device, fs.clone(), options).unwrap();
        Some(SessionMount { dir, fs, session: Some(session) })
    }

    fn file(&self) -> std::path::PathBuf {
        self.dir.path().join("file")
    }

    /// A figure of the threads, such as `workers_idle`.
    fn gauge(&self, name: &str) -> u64 {
        self.session.as_ref().unwrap().statistics().snapshot().gauges[name]
    }

    /// A process that reads the file.
    fn reader(&self) -> Child {
        Command::new("cat")
            .arg(self.file())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn end(mut self) -> (Arc<ScriptedFileSystem>, bool) {
        // A process forked by another test has the files of this process open until it executes its
        // program.
        eventually("nobody uses the mount", || match mount::unmount(self.dir.path(), false) {
            Err(UnmountError::Busy { .. }) => false,
            other => other.is_ok(),
        });
        let clean = self.session.take().unwrap().wait().clean;
        (self.fs.clone(), clean)
    }
}

impl Drop for SessionMount {
    fn drop(&mut self) {
        self.fs.gate.store(true, Ordering::Release);
        let _ = mount::abort(self.dir.path());
    }
}

fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_true() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn make_options(transport: IoUring) -> SessionOptions {
    SessionOptions { io_uring: transport, ..SessionOptions::default() }
}

fn one_worker() -> SessionOptions {
    SessionOptions { workers: Some(1), ..make_options(IoUring::Off) }
}

/// The minimum number of workers for the transport.
fn few_workers(transport: IoUring) -> SessionOptions {
    let processors = std::thread::available_parallelism().unwrap().get();
    match transport {
        IoUring::Required => {
            SessionOptions { workers: Some(processors + 1), ..make_options(transport) }
        }
        _ => one_worker(),
    }
}

/// Runs each test over /dev/fuse and over rings.
macro_rules! over_each_transport {
    ($($test:ident),* $(,)?) => {
        mod over_the_device {
            $(#[test] fn $test() { super::$test(super::IoUring::Off); })*
        }
        mod over_rings {
            $(#[test] fn $test() { super::$test(super::IoUring::Required); })*
        }
    };
}

over_each_transport! {
    a_panic_answers_eio_to_its_request_alone,
    a_handler_that_hangs_does_not_prevent_an_abort,
    waiting_for_locks_holds_no_worker,
    an_interrupt_reaches_a_deferred_request,
    every_lookup_is_returned,
    notifications_reach_the_page_cache,
    poll_is_woken_by_a_notification,
    statx_returns_the_birth_time,
    the_birth_time_is_asked_for_once_if_there_is_none,
}

fn a_panic_answers_eio_to_its_request_alone(transport: IoUring) {
    let Some(mount) = SessionMount::new(&few_workers(transport)) else { return };
    mount.fs.set(ReadScript::Panic);
    let error = std::fs::read(mount.file()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    mount.fs.set(ReadScript::Answer);
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    let (fs, clean) = mount.end();
    assert!(clean && fs.detached.load(Ordering::Acquire));
}

/// The reason why file systems with several frontends do not drop single names of each other before
/// they answer: two that change the same directory would wait for each other. All names, and
/// attributes, are dropped at once (`defuse_fs::Frontends`).
#[test]
fn the_kernel_drops_a_name_after_the_answer_to_a_change_of_its_directory() {
    let Some(mount) = SessionMount::new(&make_options(IoUring::Off)) else { return };
    mount.fs.set(ReadScript::WaitForever);
    let made = std::thread::spawn({
        let path = mount.dir.path().join("dir");
        move || std::fs::create_dir(path)
    });
    eventually("the directory is being made", || mount.fs.making.load(Ordering::Acquire));
    let notify = mount.fs.notifier();
    let _ = notify.invalidate_inode(Ino::ROOT, None);
    let _ = notify.increment_epoch();
    let dropped = Arc::new(AtomicBool::new(false));
    let dropping = std::thread::spawn({
        let dropped = Arc::clone(&dropped);
        move || {
            let _ = notify.invalidate_entry(Ino::ROOT, Name::new(b"file").unwrap(), false);
            dropped.store(true, Ordering::Release);
        }
    });
    std::thread::sleep(Duration::from_millis(200));
    assert!(!dropped.load(Ordering::Acquire), "the kernel waits for nothing: drop names at once");
    mount.fs.gate.store(true, Ordering::Release);
    assert_eq!(made.join().unwrap().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    dropping.join().unwrap();
    assert!(mount.end().1);
}

/// The only worker is in the handler, so that only the watchdog can receive the INTERRUPT.
#[test]
fn an_interrupt_ends_the_handler_of_the_only_worker() {
    let Some(mount) = SessionMount::new(&one_worker()) else { return };
    for script in [ReadScript::Wait, ReadScript::Block] {
        mount.fs.set(script);
        let mut reader = mount.reader();
        eventually("the handler runs", || mount.fs.inside.load(Ordering::Acquire) == 1);
        reader.kill().unwrap();
        eventually("the reader ends", || reader.try_wait().unwrap().is_some());
        eventually("the handler ends", || mount.fs.inside.load(Ordering::Acquire) == 0);
    }
    mount.fs.set(ReadScript::Answer);
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    assert!(mount.end().1);
}

#[test]
fn without_signals_an_interrupt_is_reported_to_the_handler() {
    let options = SessionOptions { signals: false, ..one_worker() };
    let Some(mount) = SessionMount::new(&options) else { return };
    mount.fs.set(ReadScript::Wait);
    let mut reader = mount.reader();
    eventually("the handler runs", || mount.fs.inside.load(Ordering::Acquire) == 1);
    reader.kill().unwrap();
    eventually("the handler ends", || mount.fs.inside.load(Ordering::Acquire) == 0);
    reader.wait().unwrap();
    mount.fs.set(ReadScript::Answer);
    assert!(mount.end().1);
}

#[test]
fn a_session_that_is_stopped_leaves_its_mount_without_a_server() {
    for transport in [IoUring::Off, IoUring::Auto] {
        let Some(mut mount) = SessionMount::new(&make_options(transport)) else { return };
        assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
        let session = mount.session.take().unwrap();
        let stopper = session.stopper();
        std::thread::scope(|scope| {
            scope.spawn(move || stopper.stop());
            assert!(session.wait().clean);
        });
        assert!(mount.fs.detached.load(Ordering::Acquire));
        // Another test may have forked, and its child has the device until it executes its program.
        eventually("the kernel sees no server", || {
            let error = std::fs::metadata(mount.file()).unwrap_err();
            error.raw_os_error() == Some(Errno::ENOTCONN.raw())
        });
    }
}

#[test]
fn a_file_system_is_chosen_when_the_kernel_has_offered_its_capabilities() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: needs root and /dev/fuse");
        return;
    }
    let (dir, fs) = (tempfile::tempdir().unwrap(), ScriptedFileSystem::new());
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let mut offered = 0;
    let session = Session::start_chosen(mounted.device, |init| {
        offered = init.flags;
        assert_eq!(init.major, 7);
        (fs.clone(), SessionOptions { max_write: 8192, ..one_worker() })
    });
    let session = session.unwrap();
    let mut mount = SessionMount { dir, fs, session: None };
    assert!(u64::from(offered) & defuse_fuse::abi::FUSE_ASYNC_READ != 0);
    assert_eq!(session.negotiated_init().max_write, 8192);
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    mount.session = Some(session);
    assert!(mount.end().1);
}

/// Requests received by the watchdog while the worker hangs are handled afterwards.
#[test]
fn requests_behind_a_stuck_worker_are_not_lost() {
    let Some(mount) = SessionMount::new(&one_worker()) else { return };
    mount.fs.set(ReadScript::WaitForever);
    let mut readers: Vec<Child> = (0..5).map(|_| mount.reader()).collect();
    eventually("the handler runs", || mount.fs.inside.load(Ordering::Acquire) == 1);
    std::thread::sleep(Duration::from_millis(100));
    mount.fs.gate.store(true, Ordering::Release);
    for reader in &mut readers {
        let mut text = String::new();
        reader.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        assert!(reader.wait().unwrap().success());
    }
    assert_eq!(mount.fs.most_inside.load(Ordering::Acquire), 1, "one worker means one at a time");
    assert!(mount.end().1);
}

fn a_handler_that_hangs_does_not_prevent_an_abort(transport: IoUring) {
    let Some(mut mount) = SessionMount::new(&make_options(transport)) else { return };
    mount.fs.set(ReadScript::WaitForever);
    let mut reader = mount.reader();
    eventually("the handler runs", || mount.fs.inside.load(Ordering::Acquire) == 1);
    let busy = mount::unmount(mount.dir.path(), false).unwrap_err();
    assert!(matches!(busy, mount::UnmountError::Busy { .. }), "{busy}");
    mount::abort(mount.dir.path()).unwrap();
    eventually("the reader ends", || reader.try_wait().unwrap().is_some());
    assert!(!reader.wait().unwrap().success());
    assert!(!mount.session.take().unwrap().wait().clean, "the handler is still there");
    assert!(std::fs::read_dir(mount.dir.path()).unwrap().next().is_none());
}

#[test]
fn workers_appear_when_handlers_block_and_retire_never_below_one() {
    let options = SessionOptions { workers: Some(6), ..make_options(IoUring::Off) };
    let Some(mount) = SessionMount::new(&options) else { return };
    mount.fs.set(ReadScript::WaitForever);
    let mut readers: Vec<Child> = (0..10).map(|_| mount.reader()).collect();
    eventually("all workers are busy", || mount.fs.inside.load(Ordering::Acquire) == 6);
    mount.fs.gate.store(true, Ordering::Release);
    for reader in &mut readers {
        assert!(reader.wait().unwrap().success());
    }
    assert_eq!(mount.fs.most_inside.load(Ordering::Acquire), 6);
    let statistics = mount.session.as_ref().unwrap().statistics();
    let peak = statistics.snapshot().gauges["workers_peak"];
    assert_eq!(peak, 6);
    // With one caller at a time, the other workers park.
    eventually("workers park", || {
        std::fs::read(mount.file()).unwrap();
        let gauges = statistics.snapshot().gauges;
        gauges["workers_parked"] + gauges["workers_retired"] >= 4
    });
    assert!(mount.end().1);
}

fn make_policy_options(policy: ThreadPolicy, workers: usize) -> SessionOptions {
    SessionOptions { policy, workers: Some(workers), ..make_options(IoUring::Auto) }
}

/// The rules of the paper: two threads from the first request on, one more for each blocked one up
/// to the maximum, and none ends.
fn threads_follow_the_rules_of_the_paper(policy: ThreadPolicy) {
    let Some(mount) = SessionMount::new(&make_policy_options(policy, 5)) else { return };
    for _ in 0..200 {
        std::fs::metadata(mount.file()).unwrap();
        mount.fs.notifier().invalidate_inode(FILE, None).unwrap();
    }
    // The caller may send its next request before the thread that has answered is free again.
    let threads = mount.gauge("workers");
    assert!((2..=5).contains(&threads), "{threads} with one caller at a time");
    mount.fs.set(ReadScript::WaitForever);
    let mut readers: Vec<Child> = (0..9).map(|_| mount.reader()).collect();
    eventually("all threads are busy", || mount.fs.inside.load(Ordering::Acquire) == 5);
    assert_eq!((mount.gauge("workers"), mount.gauge("workers_idle")), (5, 0));
    mount.fs.gate.store(true, Ordering::Release);
    for reader in &mut readers {
        assert!(reader.wait().unwrap().success());
    }
    assert_eq!(mount.fs.most_inside.load(Ordering::Acquire), 5);
    std::thread::sleep(Duration::from_millis(300));
    mount.fs.set(ReadScript::Answer);
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    assert_eq!((mount.gauge("workers"), mount.gauge("workers_retired")), (5, 0));
    let decisions = mount.session.as_ref().unwrap().negotiated_init().clone();
    assert_eq!((decisions.policy, decisions.uses(1 << 41)), (policy, false), "no io_uring");
    assert!(mount.end().1);
}

#[test]
fn threads_follow_the_rules_of_the_paper_on_readers() {
    threads_follow_the_rules_of_the_paper(ThreadPolicy::Paper);
}

#[test]
fn threads_follow_the_rules_of_the_paper_on_merged_readers() {
    threads_follow_the_rules_of_the_paper(ThreadPolicy::Merged);
}

/// An INTERRUPT is received although all threads that there may be are in handlers.
#[test]
fn an_interrupt_arrives_while_all_threads_of_the_paper_are_blocked() {
    let Some(mount) = SessionMount::new(&make_policy_options(ThreadPolicy::Paper, 2)) else {
        return;
    };
    mount.fs.set(ReadScript::Wait);
    let mut readers: Vec<Child> = (0..4).map(|_| mount.reader()).collect();
    eventually("all threads are busy", || mount.fs.inside.load(Ordering::Acquire) == 2);
    for reader in &mut readers {
        reader.kill().unwrap();
    }
    for reader in &mut readers {
        eventually("the reader ends", || reader.try_wait().unwrap().is_some());
    }
    mount.fs.set(ReadScript::Answer);
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    assert!(mount.end().1);
}

#[test]
fn only_merged_threads_perform_the_io_of_a_file_system_with_threads_of_its_own() {
    for (policy, is_submitted) in
        [(ThreadPolicy::Adaptive, true), (ThreadPolicy::Paper, true), (ThreadPolicy::Merged, false)]
    {
        let fs = ScriptedFileSystem::new();
        fs.submits.store(true, Ordering::Release);
        let Some(mount) = SessionMount::mount(fs, &make_policy_options(policy, 3)) else { return };
        assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
        let submitted = mount.fs.submitted.load(Ordering::Acquire);
        assert_eq!(submitted > 0, is_submitted, "{policy:?}");
        assert!(mount.end().1);
    }
}

#[test]
fn the_policies_of_the_paper_are_refused_over_io_uring() {
    if SessionMount::new(&make_options(IoUring::Required)).is_none() {
        return;
    }
    for policy in [ThreadPolicy::Paper, ThreadPolicy::Merged] {
        let dir = tempfile::tempdir().unwrap();
        let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
        let options = SessionOptions { policy, ..make_options(IoUring::Required) };
        let refused =
            Session::start(mounted.device, ScriptedFileSystem::new(), &options).err().unwrap();
        assert!(refused.to_string().contains("paper and merged"), "{refused}");
        let _ = mount::unmount(dir.path(), true);
    }
}

/// The maximum of a mount in use changes both ways, and no request is lost.
#[test]
fn the_number_of_threads_changes_while_a_mount_is_used() {
    for policy in [ThreadPolicy::Adaptive, ThreadPolicy::Paper, ThreadPolicy::Merged] {
        let options = SessionOptions {
            io_uring: IoUring::Off,
            // The number of a mount for several users is exceeded while all threads are stuck.
            default_permissions: false,
            ..make_policy_options(policy, 2)
        };
        let Some(mount) = SessionMount::new(&options) else { return };
        let workers = mount.session.as_ref().unwrap().workers();
        mount.fs.set(ReadScript::WaitForever);
        let mut readers: Vec<Child> = (0..9).map(|_| mount.reader()).collect();
        eventually("two are inside", || mount.fs.inside.load(Ordering::Acquire) == 2);
        // Until the watchdog has received the others.
        std::thread::sleep(Duration::from_millis(100));
        workers.resize(7).unwrap();
        eventually("seven are inside", || mount.fs.inside.load(Ordering::Acquire) == 7);
        mount.fs.gate.store(true, Ordering::Release);
        for reader in &mut readers {
            assert!(reader.wait().unwrap().success());
        }
        mount.fs.gate.store(false, Ordering::Release);
        let mut readers: Vec<Child> = (0..9).map(|_| mount.reader()).collect();
        eventually("seven are inside", || mount.fs.inside.load(Ordering::Acquire) == 7);
        workers.resize(3).unwrap();
        assert_eq!((mount.gauge("workers_max"), mount.gauge("workers")), (3, 7), "all are busy");
        mount.fs.gate.store(true, Ordering::Release);
        for reader in &mut readers {
            assert!(reader.wait().unwrap().success());
        }
        eventually("threads end", || mount.gauge("workers") <= 3);
        assert_eq!(std::fs::metadata(mount.file()).unwrap().len(), 7);
        workers.resize(1).unwrap();
        eventually("one remains", || mount.gauge("workers") == 1);
        mount.fs.set(ReadScript::Answer);
        assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
        for count in [0, 1025] {
            assert_eq!(workers.resize(count), Err(ResizeError::OutOfRange(count)));
        }
        assert!(mount.end().1, "{policy:?}");
    }
}

#[test]
fn the_number_of_threads_over_io_uring_is_fixed() {
    let Some(mount) = SessionMount::new(&make_options(IoUring::Required)) else { return };
    let workers = mount.session.as_ref().unwrap().workers();
    assert_eq!(workers.resize(4), Err(ResizeError::OverRings));
    assert!(mount.end().1);
}

/// Requests for one part of the storage, which does not answer, leave threads to requests for
/// another part.
#[test]
fn a_part_that_does_not_answer_holds_up_only_what_needs_it() {
    for policy in [ThreadPolicy::Adaptive, ThreadPolicy::Paper, ThreadPolicy::Merged] {
        let fs = ScriptedFileSystem::new();
        fs.has_parts.store(true, Ordering::Release);
        let options = SessionOptions { io_uring: IoUring::Off, ..make_policy_options(policy, 4) };
        let Some(mount) = SessionMount::mount(fs, &options) else { return };
        let other = mount.dir.path().join("other");
        assert_eq!(std::fs::read(&other).unwrap(), b"other");
        mount.fs.set(ReadScript::Wait);
        let mut readers: Vec<Child> = (0..12).map(|_| mount.reader()).collect();
        eventually("the others wait", || mount.gauge("requests_held_back") == 9);
        eventually("three of four run", || mount.fs.inside.load(Ordering::Acquire) == 3);
        for _ in 0..100 {
            mount.fs.notifier().invalidate_inode(OTHER, Some((0, 0))).unwrap();
            assert_eq!(std::fs::read(&other).unwrap(), b"other");
        }
        // An interrupt ends a wait, before the part answers.
        let waiting = 3;
        for reader in readers.iter_mut().rev().take(waiting) {
            reader.kill().unwrap();
        }
        for reader in readers.iter_mut().rev().take(waiting) {
            eventually("the reader ends", || reader.try_wait().unwrap().is_some());
        }
        mount.fs.gate.store(true, Ordering::Release);
        for reader in &mut readers[..12 - waiting] {
            let mut text = String::new();
            reader.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "content", "{policy:?}");
            assert!(reader.wait().unwrap().success());
        }
        assert_eq!(mount.fs.most_inside.load(Ordering::Acquire), 3);
        assert_eq!(mount.gauge("requests_held_back"), 0);
        assert!(mount.end().1);
    }
}

/// The data of a large write waits in a pipe, from which the worker has to take it for the next
/// request.
#[test]
fn a_large_write_that_waits_for_its_part_keeps_its_data() {
    let fs = ScriptedFileSystem::new();
    fs.has_parts.store(true, Ordering::Release);
    let options = SessionOptions { workers: Some(4), ..make_options(IoUring::Off) };
    let Some(mount) = SessionMount::mount(fs, &options) else { return };
    mount.fs.set(ReadScript::WaitForever);
    let open = |name| {
        let path = mount.dir.path().join(name);
        std::fs::File::options().write(true).open(path).unwrap()
    };
    let (file, other) = (open("file"), open("other"));
    let mut readers: Vec<Child> = (0..3).map(|_| mount.reader()).collect();
    eventually("three threads are held", || mount.fs.inside.load(Ordering::Acquire) == 3);
    let large: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
    // After large writes, the only free worker receives through its pipe.
    (0..4).for_each(|_| other.write_all_at(&large[..256 << 10], 0).unwrap());
    let bytes = large.clone();
    let writing = std::thread::spawn(move || file.write_all_at(&bytes, 0));
    eventually("the write waits", || mount.gauge("requests_held_back") >= 1);
    other.write_all_at(b"short", 0).unwrap();
    mount.fs.gate.store(true, Ordering::Release);
    writing.join().unwrap().unwrap();
    assert!(*mount.fs.content.lock().unwrap() == large);
    for reader in &mut readers {
        io::copy(&mut reader.stdout.take().unwrap(), &mut io::sink()).unwrap();
        assert!(reader.wait().unwrap().success());
    }
    drop(other);
    assert!(mount.end().1);
}

/// More callers wait for a lock than there are workers. The unlock is received nevertheless.
fn waiting_for_locks_holds_no_worker(transport: IoUring) {
    let Some(mount) = SessionMount::new(&few_workers(transport)) else { return };
    let script = "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)";
    let lock = || Command::new("python3").args(["-c", script]).arg(mount.file()).spawn().unwrap();
    let mut waiters: Vec<Child> = (0..4).map(|_| lock()).collect();
    eventually("all wait", || mount.fs.waiting.lock().unwrap().len() == 4);
    // An interrupt ends one of the waits: the token trips, and the file system may answer.
    let file = std::fs::File::open(mount.file()).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
    for waiter in &mut waiters {
        assert!(waiter.wait().unwrap().success());
    }
    drop(file);
    assert!(mount.end().1);
}

fn an_interrupt_reaches_a_deferred_request(transport: IoUring) {
    let Some(mount) = SessionMount::new(&few_workers(transport)) else { return };
    let script = "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)";
    let mut waiter =
        Command::new("python3").args(["-c", script]).arg(mount.file()).spawn().unwrap();
    eventually("it waits", || mount.fs.waiting.lock().unwrap().len() == 1);
    let interrupted = Arc::new(AtomicBool::new(false));
    {
        let waiting = mount.fs.waiting.lock().unwrap();
        let flag = Arc::clone(&interrupted);
        waiting[0].interrupt().on_interrupt(move || flag.store(true, Ordering::Release));
    }
    waiter.kill().unwrap();
    eventually("the interrupt arrives", || interrupted.load(Ordering::Acquire));
    mount.fs.waiting.lock().unwrap().pop().unwrap().finish(Err(Errno::EINTR));
    waiter.wait().unwrap();
    assert!(mount.end().1);
}

fn every_lookup_is_returned(transport: IoUring) {
    let Some(mount) = SessionMount::new(&make_options(transport)) else { return };
    for _ in 0..50 {
        assert_eq!(std::fs::metadata(mount.file()).unwrap().len(), 7);
        let parent = Name::new(b"file").unwrap();
        let _ = mount.fs.notifier().invalidate_entry(Ino::ROOT, parent, false);
    }
    std::fs::metadata(mount.file()).unwrap();
    // Over rings, the thread that reads them pauses from time to time.
    eventually("they arrive", || mount.fs.forgotten.load(Ordering::Acquire) >= 40);
    let (fs, _) = mount.end();
    // At an unmount the kernel drops its lookups without FORGET. It must not return more than it
    // has.
    let left = fs.lookups.lock().unwrap().get(&FILE.0).copied().unwrap_or(0);
    assert!(fs.forgotten.load(Ordering::Acquire) >= 40, "{left} left");
}

fn notifications_reach_the_page_cache(transport: IoUring) {
    let Some(mount) = SessionMount::new(&make_options(transport)) else { return };
    let notify = mount.fs.notifier();
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    *mount.fs.content.lock().unwrap() = b"CONTENT".to_vec();
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content", "it is cached");
    notify.invalidate_inode(FILE, Some((0, 0))).unwrap();
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"CONTENT");
    notify.store(FILE, 0, b"stored!").unwrap();
    let file = std::fs::File::open(mount.file()).unwrap();
    let mut bytes = [0; 7];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"stored!");
    let (sender, receiver) = std::sync::mpsc::channel();
    let done = Box::new(move |got: Result<Vec<u8>>| sender.send(got).unwrap());
    notify.retrieve(FILE, 2, 3, done).unwrap();
    let got = receiver.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
    assert_eq!(got, b"ore");
    drop(file);
    let name = Name::new(b"file").unwrap();
    for result in [
        notify.notify_delete(Ino::ROOT, FILE, name),
        notify.invalidate_entry(Ino::ROOT, name, true),
        notify.increment_epoch(),
        notify.prune(&[FILE]),
        notify.invalidate_inode(FILE, None),
    ] {
        // The name may just have been deleted.
        assert!(matches!(result, Ok(()) | Err(Errno::ENOENT)), "{result:?}");
    }
    assert!(mount.end().1);
    assert_eq!(notify.invalidate_inode(FILE, None), Err(Errno::ENOTCONN));
}

fn poll_is_woken_by_a_notification(transport: IoUring) {
    let Some(mount) = SessionMount::new(&make_options(transport)) else { return };
    let file = std::fs::File::open(mount.file()).unwrap();
    let polling = std::thread::spawn(move || {
        let mut fds = [rustix::event::PollFd::new(&file, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&limit)).unwrap()
    });
    eventually("somebody polls", || !mount.fs.polls.lock().unwrap().is_empty());
    assert!(!polling.is_finished());
    mount.fs.ready.store(true, Ordering::Release);
    let handle = mount.fs.polls.lock().unwrap()[0];
    mount.fs.notifier().poll_wake(handle).unwrap();
    assert_eq!(polling.join().unwrap(), 1);
    assert!(mount.end().1);
}

fn statx_returns_the_birth_time(transport: IoUring) {
    let Some(mount) = SessionMount::new(&make_options(transport)) else { return };
    let created = std::fs::metadata(mount.file()).unwrap().created();
    let created = created.map(|time| time.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs());
    assert_eq!(created.map_err(|error: io::Error| error.kind()), Ok(7));
    assert!(mount.end().1);
}

fn the_birth_time_is_asked_for_once_if_there_is_none(transport: IoUring) {
    let fs = ScriptedFileSystem::new();
    fs.no_birth_times.store(true, Ordering::Release);
    let Some(mount) = SessionMount::mount(fs, &make_options(transport)) else { return };
    for name in ["file", "other", "file", "other"] {
        let attributes = std::fs::metadata(mount.dir.path().join(name)).unwrap();
        assert!(attributes.is_file() && attributes.created().is_err(), "{name}");
    }
    let snapshot = mount.session.as_ref().unwrap().statistics().snapshot();
    let requested = snapshot.ops.iter().find(|row| row.op == defuse_probe::Op::STATX);
    assert_eq!(requested.map(|row| row.latency.count), Some(1));
    assert!(mount.end().1);
}

/// A thread reads the device beside the rings, so that an INTERRUPT arrives.
#[test]
fn an_interrupt_ends_a_handler_over_rings() {
    let Some(mount) = SessionMount::new(&few_workers(IoUring::Required)) else { return };
    for script in [ReadScript::Wait, ReadScript::Block] {
        mount.fs.set(script);
        let mut reader = mount.reader();
        eventually("the handler runs", || mount.fs.inside.load(Ordering::Acquire) == 1);
        reader.kill().unwrap();
        eventually("the reader ends", || reader.try_wait().unwrap().is_some());
        eventually("the handler ends", || mount.fs.inside.load(Ordering::Acquire) == 0);
    }
    mount.fs.set(ReadScript::Answer);
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    assert!(mount.end().1);
}

/// The session cannot see whether requests wait in a queue. A worker is added while all of a
/// queue's workers sleep.
#[test]
fn sleeping_handlers_do_not_block_a_ring() {
    sleepers_leave_a_worker();
}

fn sleepers_leave_a_worker() {
    let options = SessionOptions { workers: Some(16), ..make_options(IoUring::Required) };
    let Some(mount) = SessionMount::new(&options) else { return };
    mount.fs.set(ReadScript::WaitForever);
    let mut readers: Vec<Child> = (0..8).map(|_| mount.reader()).collect();
    eventually("all are inside", || mount.fs.inside.load(Ordering::Acquire) == 8);
    let file = mount.file();
    let other = std::thread::spawn(move || std::fs::metadata(file).unwrap().len());
    eventually("another request is answered", || other.is_finished());
    assert_eq!(other.join().unwrap(), 7);
    mount.fs.gate.store(true, Ordering::Release);
    for reader in &mut readers {
        assert!(reader.wait().unwrap().success());
    }
    assert!(mount.end().1);
}

/// A new thread needs the processor of its queue, and another program uses this processor most of
/// the time.
#[test]
fn a_busy_processor_leaves_workers_for_the_queues_of_others() {
    if SessionMount::new(&make_options(IoUring::Required)).is_none() {
        return;
    }
    let busy = "while :; do i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; sleep 0.01; done";
    let mut hog = Command::new("timeout");
    hog.args(["60", "chrt", "--fifo", "1", "taskset", "--cpu-list", "0", "bash", "-c", busy]);
    let mut hog = hog.stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    if let Some(refused) = hog.try_wait().unwrap() {
        println!("not here: a program with a fixed priority (chrt, taskset): {refused}");
        return;
    }
    let tried = std::panic::catch_unwind(|| (0..4).for_each(|_| sleepers_leave_a_worker()));
    // timeout(1) passes it on.
    let pid = rustix::process::Pid::from_child(&hog);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    hog.wait().unwrap();
    assert!(tried.is_ok());
}

/// Entries whose requests finish later are handled by a thread that does not run handlers.
#[test]
fn requests_continue_after_many_waits_for_locks() {
    let Some(mount) = SessionMount::new(&few_workers(IoUring::Required)) else { return };
    for _ in 0..3 {
        let script = "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)";
        let lock =
            || Command::new("python3").args(["-c", script]).arg(mount.file()).spawn().unwrap();
        let mut waiters: Vec<Child> = (0..8).map(|_| lock()).collect();
        eventually("all wait", || mount.fs.waiting.lock().unwrap().len() == 8);
        let file = std::fs::File::open(mount.file()).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
        for waiter in &mut waiters {
            assert!(waiter.wait().unwrap().success());
        }
    }
    mount.fs.set(ReadScript::Wait);
    mount.fs.gate.store(true, Ordering::Release);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..200 {
                    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
                }
            });
        }
    });
    assert!(mount.end().1);
}

#[test]
fn unavailable_rings_are_refused_with_the_reason() {
    let options = SessionOptions { workers: Some(1), ..make_options(IoUring::Required) };
    if SessionMount::new(&make_options(IoUring::Required)).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let refused =
        Session::start(mounted.device, ScriptedFileSystem::new(), &options).err().unwrap();
    assert!(refused.to_string().contains("workers="), "{refused}");
    let _ = mount::unmount(dir.path(), true);
    // Unless rings are required, the device is used, and the reason is recorded.
    let options = SessionOptions { workers: Some(1), ..make_options(IoUring::Auto) };
    let mount = SessionMount::new(&options).unwrap();
    let decisions = &mount.session.as_ref().unwrap().negotiated_init().decisions;
    let decision = decisions.iter().find(|decision| decision.name == "OVER_IO_URING").unwrap();
    assert!(!decision.used && !decision.reason.is_empty(), "{decision}");
    assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
    assert!(mount.end().1);
}

/// Compares the threads and descriptors of this process.
#[test]
fn sessions_leave_nothing_behind() {
    for transport in [IoUring::Off, IoUring::Required] {
        let Some(mount) = SessionMount::new(&make_options(transport)) else { continue };
        assert!(mount.end().1);
        let most = std::env::var("DEFUSE_SESSIONS").ok().and_then(|text| text.parse().ok());
        for _ in 0..most.unwrap_or(20) {
            let mount = SessionMount::new(&make_options(transport)).unwrap();
            assert_eq!(std::fs::read(mount.file()).unwrap(), b"content");
            assert!(mount.end().1);
        }
        let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(std::result::Result::ok);
        let names = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        let left = names.filter(|name| name.to_string_lossy().contains("io_uring")).count();
        // Other tests run at the same time.
        assert!(left < 100, "{left} rings are left");
    }
}

#[test]
fn a_mount_releases_caches_while_memory_is_short() {
    let place = tempfile::tempdir().unwrap();
    let memory_pressure = place.path().join("memory");
    std::fs::write(&memory_pressure, "some avg10=0.00 avg60=90.00\n").unwrap();
    let options =
        SessionOptions { memory_pressure: memory_pressure.clone(), ..make_options(IoUring::Auto) };
    let Some(mount) = SessionMount::new(&options) else { return };
    // statfs keeps the session busy, which checks about once a second.
    let relieved_within = |time: Duration| {
        let (begun, before) = (Instant::now(), mount.fs.relieved.load(Ordering::Acquire));
        while begun.elapsed() < time {
            rustix::fs::statvfs(mount.dir.path()).unwrap();
            if mount.fs.relieved.load(Ordering::Acquire) > before {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    };
    assert!(!relieved_within(Duration::from_secs(3)));
    std::fs::write(&memory_pressure, "some avg10=30.00 avg60=0.00\n").unwrap();
    assert!(relieved_within(Duration::from_secs(20)));
    mount.end();
}
