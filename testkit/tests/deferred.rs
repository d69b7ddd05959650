//! Reads, writes and fsyncs that the file system completes later, from other threads.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::{
    Caps, Context, Errno, File as Open, FileSystem, Io, IoOp, ReadArgs, ReadBuf, Result, WriteArgs,
    WriteBuf, delegate,
};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::RemoteOptions;
use defuse_socket::ServerOptions;
use served::{TestServer, context, create, read, write};

#[allow(dead_code, unused_imports)] // Not all of it is used here.
mod served;

/// A memory file system whose data operations take time on separate threads.
#[derive(Clone)]
struct DelayedFileSystem {
    inner: Arc<MemoryFileSystem>,
    /// How often fsyncdir, syncfs and operations on data were submitted.
    dirs: Arc<AtomicUsize>,
    all: Arc<AtomicUsize>,
    data: Arc<AtomicUsize>,
    /// It takes submissions and no calls.
    refuses_calls: bool,
}

impl DelayedFileSystem {
    fn new() -> Self {
        let inner = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
        DelayedFileSystem {
            inner,
            dirs: Arc::default(),
            all: Arc::default(),
            data: Arc::default(),
            refuses_calls: false,
        }
    }

    fn count_submitted(&self) -> usize {
        self.data.load(Ordering::SeqCst)
    }
}

impl FileSystem for DelayedFileSystem {
    delegate!(to inner, except caps, submit, read, write);

    fn read(
        &self,
        cx: &Context<'_>,
        file: Open,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        if self.refuses_calls {
            return Err(Errno::ENOSYS);
        }
        self.inner.read(cx, file, args, out)
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: Open,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        if self.refuses_calls {
            return Err(Errno::ENOSYS);
        }
        self.inner.write(cx, file, args, data)
    }

    fn caps(&self) -> Caps {
        Caps { submits: true, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        match io.op() {
            IoOp::Fsyncdir { .. } => self.dirs.fetch_add(1, Ordering::SeqCst),
            IoOp::Syncfs => self.all.fetch_add(1, Ordering::SeqCst),
            _ => self.data.fetch_add(1, Ordering::SeqCst),
        };
        let inner = Arc::clone(&self.inner);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(2));
            inner.submit(io);
        });
    }
}

const BLOCK: usize = 16 * 1024;
const BLOCKS: usize = 16;

fn content(file: usize, block: usize) -> Vec<u8> {
    (0..BLOCK).map(|at| (file * 31 + block * 7 + at) as u8).collect()
}

fn write_and_read(dir: &Path, number: usize) {
    let path = dir.join(format!("file{number}"));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&content(number, block), (block * BLOCK) as u64).unwrap();
    }
    file.sync_all().unwrap();
    File::open(dir).unwrap().sync_all().unwrap();
    for block in (0..BLOCKS).rev() {
        let mut bytes = vec![0; BLOCK];
        file.read_exact_at(&mut bytes, (block * BLOCK) as u64).unwrap();
        assert_eq!(bytes, content(number, block), "file {number}, block {block}");
    }
    let mut beyond = [0; 8];
    assert_eq!(file.read_at(&mut beyond, (BLOCKS * BLOCK) as u64).unwrap(), 0);
}

/// One worker serves all callers at once, because no data operation blocks it.
#[test]
fn data_operations_may_complete_later_without_blocking_a_worker() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let fs = Arc::new(DelayedFileSystem::new());
    let dirs = Arc::clone(&fs.dirs);
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let options = SessionOptions { workers: Some(1), direct_io: true, ..SessionOptions::default() };
    let session = Session::start(mounted.device, fs, &options).unwrap();
    let statistics = session.statistics();
    let result = std::panic::catch_unwind(|| {
        std::thread::scope(|scope| {
            for number in 0..8 {
                let dir = dir.path();
                scope.spawn(move || write_and_read(dir, number));
            }
        });
    });
    mount::abort(dir.path()).unwrap();
    session.wait().durable.unwrap();
    result.unwrap();
    assert_eq!(dirs.load(Ordering::SeqCst), 8);
    let snapshot = statistics.snapshot();
    for name in ["READ", "WRITE", "FSYNC", "FSYNCDIR"] {
        let counted = snapshot.ops.iter().find(|stats| stats.op.name() == name);
        let counted = counted.unwrap_or_else(|| panic!("{name} was not counted"));
        assert!(counted.latency.count >= 8, "{name}: {}", counted.latency.count);
    }
}

#[test]
fn the_in_process_client_submits_what_makes_changes_durable() {
    let fs = DelayedFileSystem::new();
    let client = DirectClient::new(defuse_direct::ClientOptions::default());
    client.mount(b"a:", Arc::new(fs.clone()), &ClientMountArgs::default()).unwrap();
    let outside = WorkDir::Outside(b"/".to_vec());
    let task = ClientTask::new(TaskCredentials::user(0, 0, &[]), outside);
    let flags = libc::O_DIRECTORY as u32;
    let how = OpenHow { flags, mode: 0, ..OpenHow::default() };
    let dir = client.open(&task, WalkStart::Cwd, b"a:/", how).unwrap();
    client.fsync(&task, &dir, false).unwrap();
    client.start_fsync(&task, &dir, true, None).unwrap().wait().0.unwrap();
    client.syncfs(&task, &dir).unwrap();
    client.start_syncfs(&task, &dir, None).unwrap().wait().0.unwrap();
    let submitted = [&fs.dirs, &fs.all].map(|count| count.load(Ordering::SeqCst));
    assert_eq!(submitted, [2, 2]);
    dir.close(&task).unwrap();
}

fn serve_later(refuses_calls: bool) -> (DelayedFileSystem, TestServer) {
    let fs = DelayedFileSystem { refuses_calls, ..DelayedFileSystem::new() };
    let served =
        TestServer::new(Arc::new(fs.clone()), ServerOptions::default(), RemoteOptions::default());
    (fs, served)
}

/// A mapping is part of the data of a file, wherever operations are finished.
#[test]
fn submitted_operations_of_clients_see_what_others_have_mapped() {
    let (fs, served) = serve_later(false);
    let (one, other) = (served.client(), served.client());
    let (_, file) = create(&one, "mapped");
    write(&one, file, 0, b"before").unwrap();
    let submitted = fs.count_submitted();
    assert!(submitted > 0);
    let map = File::from(one.map(&context(), file, 0..4096, true).unwrap());
    let mapped = || {
        let mut bytes = [0; 6];
        map.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert_eq!(&mapped(), b"before");
    let found = other.lookup(&context(), defuse_fs::Ino::ROOT, served::name("mapped")).unwrap();
    let args = defuse_fs::OpenArgs {
        flags: defuse_fs::OpenFlags(defuse_fs::OpenFlags::RDWR),
        kill_suidgid: false,
    };
    let opened = other.open(&context(), found.ino, args).unwrap();
    let theirs = Open { ino: found.ino, fh: opened.fh };
    write(&other, theirs, 0, b"theirs").unwrap();
    assert_eq!(&mapped(), b"theirs");
    map.write_all_at(b"stored", 0).unwrap();
    assert_eq!(read(&other, theirs, 0, 6).unwrap(), b"stored");
    other.fsync(&context(), theirs, false).unwrap();
    one.unmap(&context(), file.ino).unwrap();
    assert_eq!(read(&other, theirs, 0, 6).unwrap(), b"stored");
    assert!(fs.count_submitted() > submitted, "the read after the mapping was submitted");
}

#[test]
fn a_file_system_that_takes_only_submissions_has_no_mappings_and_small_files_all_the_same() {
    for refuses_calls in [false, true] {
        let (fs, served) = serve_later(refuses_calls);
        let client = DirectClient::new(defuse_direct::ClientOptions::default());
        client.mount(b"a:", Arc::new(served.client()), &ClientMountArgs::default()).unwrap();
        let task =
            ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));
        client.create_with(&task, WalkStart::Cwd, b"a:/small", 0o644, b"contents").unwrap();
        // A chain of requests is answered at once where it may be.
        assert_eq!(fs.count_submitted() > 0, refuses_calls);
        let file = client.open(&task, WalkStart::Cwd, b"a:/small", OpenHow::default()).unwrap();
        let mut bytes = [0; 9];
        assert_eq!(client.pread(&task, &file, &mut bytes, 0), Ok(8));
        assert_eq!(&bytes[..8], b"contents");
        file.close(&task).unwrap();
        let one = served.client();
        let (_, file) = create(&one, "other");
        let mapped = one.map(&context(), file, 0..4096, true).map(drop);
        assert_eq!(mapped, if refuses_calls { Err(Errno::ENOSYS) } else { Ok(()) });
    }
}
