//! The caller of the in-process client sees the error that a file system returns: every error of
//! every method, through every call that uses the method, and a panic instead. Nothing leaks
//! meanwhile, and the client's caches are correct afterwards.
//!
//! `DEFUSE_FULL=1` tries every error at every place, instead of a part of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use defuse_direct::{
    CallError, ClientMountArgs, ClientOptions, ClientTask, DescriptorTable, DirectClient, FdFlags,
    FileDescription, LockFamily, NeededAccess, NewOwner, NewTimes, OpenHow, Result,
    TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::layer::{FaultAction, FaultLayer, FaultRule, FaultTrigger, Method};
use defuse_fs::{Context, Errno, FileSystem, Ino, Lock, LockType, RenameFlags, SetXattrFlags};
use defuse_memory::MemoryFileSystem;
use defuse_passthrough::Passthrough;

const RDWR: u32 = libc::O_RDWR as u32;
const CREATE: u32 = RDWR | libc::O_CREAT as u32;
const DIRECTORY: u32 = libc::O_DIRECTORY as u32;

/// Every error with a name, and one without.
fn errors() -> Vec<Errno> {
    let named = (1..134).map(Errno::from_raw).filter(|errno| errno.name().is_some());
    named.chain([Errno::from_raw(133)]).collect()
}

/// The errors to try at the place `turn`: all with `DEFUSE_FULL`. Otherwise those that have a
/// meaning for a client, and one in eight of the others, different at every place.
fn errors_of(turn: usize) -> impl Iterator<Item = Errno> {
    const MEAN: [Errno; 8] = [
        Errno::ENOSYS,
        Errno::EOPNOTSUPP,
        Errno::ENOENT,
        Errno::EEXIST,
        Errno::EXDEV,
        Errno::EINTR,
        Errno::EAGAIN,
        Errno::ESTALE,
    ];
    let all = std::env::var_os("DEFUSE_FULL").is_some();
    let is_tried = move |&(at, errno): &(usize, Errno)| {
        all || MEAN.contains(&errno) || (at + turn).is_multiple_of(8)
    };
    errors().into_iter().enumerate().filter(is_tried).map(|(_, errno)| errno)
}

/// A file system, a client on it, and its open files.
struct FaultSide {
    client: DirectClient,
    task: ClientTask,
    file: Arc<FileDescription>,
    dir: Arc<FileDescription>,
}

impl FaultSide {
    fn new(fs: Arc<dyn FileSystem>) -> Self {
        let (client, task) = client(fs);
        let file = open(&client, &task, "a:/d/f", RDWR).unwrap();
        let dir = open(&client, &task, "a:/d", DIRECTORY).unwrap();
        FaultSide { client, task, file, dir }
    }

    fn open(&self, path: &str, flags: u32) -> Result<()> {
        let file = open(&self.client, &self.task, path, flags)?;
        file.close(&self.task).map_err(CallError::from)
    }
}

fn client(fs: Arc<dyn FileSystem>) -> (DirectClient, ClientTask) {
    let client = DirectClient::new(ClientOptions::default());
    client.mount(b"a:", fs, &ClientMountArgs::default()).unwrap();
    let place = WorkDir::Outside(b"/".to_vec());
    (client, ClientTask::new(TaskCredentials::user(0, 0, &[]), place))
}

fn open(
    client: &DirectClient,
    task: &ClientTask,
    path: &str,
    flags: u32,
) -> Result<Arc<FileDescription>> {
    client.open(
        task,
        WalkStart::Cwd,
        path.as_bytes(),
        OpenHow { flags, mode: 0o644, ..OpenHow::default() },
    )
}

/// The initial tree of every call.
fn prepare(fs: Arc<dyn FileSystem>) {
    let (client, task) = client(fs);
    for dir in ["a:/d", "a:/e"] {
        client.mkdir(&task, WalkStart::Cwd, dir.as_bytes(), 0o755).unwrap();
    }
    for path in ["a:/f", "a:/d/f"] {
        let file = open(&client, &task, path, CREATE).unwrap();
        client.write(&task, &file, &[7; 5000]).unwrap();
        let flags = SetXattrFlags::default();
        client.fsetxattr(&task, &file, b"user.a", b"value", flags).unwrap();
    }
    client.symlink(&task, b"f", WalkStart::Cwd, b"a:/l").unwrap();
    client.unmount(b"a:", false).unwrap();
}

type FaultCall = fn(&FaultSide) -> Result<()>;

const LOCK: Lock = Lock { typ: LockType::Write, start: 0, end: 9, pid: 0 };

/// Every call of the client that reaches a file system.
const CALLS: &[(&str, FaultCall)] = &[
    ("stat", |s| s.client.stat(&s.task, WalkStart::Cwd, b"a:/l", true).map(drop)),
    ("lstat", |s| s.client.stat(&s.task, WalkStart::Cwd, b"a:/l", false).map(drop)),
    ("fstat", |s| s.client.fstat(&s.task, &s.file).map(drop)),
    ("access", |s| {
        s.client.access(&s.task, WalkStart::Cwd, b"a:/f", NeededAccess::READ, (true, true))
    }),
    ("chmod", |s| s.client.chmod(&s.task, WalkStart::Cwd, b"a:/f", 0o600, true)),
    ("fchmod", |s| s.client.fchmod(&s.task, &s.file, 0o600)),
    ("chown", |s| {
        let owner = NewOwner { uid: Some(1), gid: None };
        s.client.chown(&s.task, WalkStart::Cwd, b"a:/f", owner, true)
    }),
    ("fchown", |s| s.client.fchown(&s.task, &s.file, NewOwner { uid: Some(1), gid: None })),
    ("utimens", |s| s.client.utimens(&s.task, WalkStart::Cwd, b"a:/f", NewTimes::NOW, true)),
    ("futimens", |s| s.client.futimens(&s.task, &s.file, NewTimes::NOW)),
    ("truncate", |s| s.client.truncate(&s.task, WalkStart::Cwd, b"a:/f", 10)),
    ("ftruncate", |s| s.client.ftruncate(&s.task, &s.file, 10)),
    ("statfs", |s| s.client.statfs(&s.task, WalkStart::Cwd, b"a:/f").map(drop)),
    ("fstatfs", |s| s.client.fstatfs(&s.task, &s.file).map(drop)),
    ("mkdir", |s| s.client.mkdir(&s.task, WalkStart::Cwd, b"a:/n", 0o755)),
    ("mkdirat", |s| s.client.mkdir(&s.task, WalkStart::Dir(&s.dir), b"n", 0o755)),
    ("mknod", |s| s.client.mknod(&s.task, WalkStart::Cwd, b"a:/n", 0o10644, 0)),
    ("symlink", |s| s.client.symlink(&s.task, b"f", WalkStart::Cwd, b"a:/n")),
    ("readlink", |s| s.client.readlink(&s.task, WalkStart::Cwd, b"a:/l").map(drop)),
    ("link", |s| {
        s.client.link(&s.task, (WalkStart::Cwd, b"a:/f"), (WalkStart::Cwd, b"a:/n"), false)
    }),
    ("flink", |s| s.client.flink(&s.task, &s.file, (WalkStart::Cwd, b"a:/n"))),
    ("unlink", |s| s.client.unlink(&s.task, WalkStart::Cwd, b"a:/f")),
    ("unlink of an open file", |s| s.client.unlink(&s.task, WalkStart::Cwd, b"a:/d/f")),
    ("rmdir", |s| s.client.rmdir(&s.task, WalkStart::Cwd, b"a:/e")),
    ("rename", |s| {
        s.client.rename(
            &s.task,
            (WalkStart::Cwd, b"a:/f"),
            (WalkStart::Cwd, b"a:/e/n"),
            RenameFlags(0),
        )
    }),
    ("rename over an open file", |s| {
        s.client.rename(
            &s.task,
            (WalkStart::Cwd, b"a:/f"),
            (WalkStart::Cwd, b"a:/d/f"),
            RenameFlags(0),
        )
    }),
    ("read", |s| s.client.read(&s.task, &s.file, &mut [0; 100]).map(drop)),
    ("pread", |s| s.client.pread(&s.task, &s.file, &mut [0; 100], 9).map(drop)),
    ("write", |s| s.client.write(&s.task, &s.file, b"text").map(drop)),
    ("pwrite", |s| s.client.pwrite(&s.task, &s.file, b"text", 6000).map(drop)),
    ("lseek to a hole", |s| s.client.lseek(&s.task, &s.file, 0, libc::SEEK_HOLE as u32).map(drop)),
    ("fallocate", |s| s.client.fallocate(&s.task, &s.file, 0, (0, 9000))),
    ("fsync", |s| s.client.fsync(&s.task, &s.file, false)),
    ("fsync of a directory", |s| s.client.fsync(&s.task, &s.dir, true)),
    ("syncfs", |s| s.client.syncfs(&s.task, &s.file)),
    ("copy_file_range", |s| {
        let (from, to) = ((&*s.file, Some(0)), (&*s.file, Some(8192)));
        s.client.copy_file_range(&s.task, from, to, 100).map(drop)
    }),
    ("open", |s| s.open("a:/f", RDWR)),
    ("open of a directory", |s| s.open("a:/e", DIRECTORY)),
    ("open of a new file", |s| s.open("a:/n", CREATE)),
    ("open with O_TRUNC", |s| s.open("a:/f", RDWR | libc::O_TRUNC as u32)),
    ("open with O_TMPFILE", |s| s.open("a:/d", RDWR | libc::O_TMPFILE as u32)),
    ("open with O_PATH", |s| s.open("a:/f", libc::O_PATH as u32)),
    ("read_dir", |s| s.client.read_dir(&s.task, &s.dir).map(drop)),
    ("getxattr", |s| {
        s.client.getxattr(&s.task, (WalkStart::Cwd, b"a:/f", true), b"user.a", 99).map(drop)
    }),
    ("fgetxattr", |s| s.client.fgetxattr(&s.task, &s.file, b"user.a", 99).map(drop)),
    ("setxattr", |s| {
        let place = (WalkStart::Cwd, &b"a:/f"[..], true);
        s.client.setxattr(&s.task, place, b"user.b", b"x", SetXattrFlags::default())
    }),
    ("fsetxattr", |s| {
        s.client.fsetxattr(&s.task, &s.file, b"user.b", b"x", SetXattrFlags::default())
    }),
    ("listxattr", |s| s.client.listxattr(&s.task, WalkStart::Cwd, b"a:/f", true, 999).map(drop)),
    ("flistxattr", |s| s.client.flistxattr(&s.task, &s.file, 999).map(drop)),
    ("removexattr", |s| s.client.removexattr(&s.task, (WalkStart::Cwd, b"a:/f", true), b"user.a")),
    ("fremovexattr", |s| s.client.fremovexattr(&s.task, &s.file, b"user.a")),
    ("set_lock", |s| s.client.set_lock(&s.task, &s.file, LockFamily::Process, LOCK)),
    ("test_lock", |s| s.client.test_lock(&s.task, &s.file, LockFamily::OpenFile, LOCK).map(drop)),
    ("chdir", |s| s.client.chdir(&s.task, b"a:/e")),
    ("close", |s| s.file.close(&s.task).map_err(CallError::from)),
];

/// A file system for one call, and the resources that it still holds at the end.
trait FaultBackend: FileSystem + Sized + 'static {
    fn new(place: &std::path::Path) -> Self;
    /// Number of inodes with references beside the root, and of open files.
    fn count_held(&self) -> (u64, u64);
}

impl FaultBackend for Passthrough {
    fn new(place: &std::path::Path) -> Self {
        Passthrough::new(place, Default::default()).unwrap()
    }

    fn count_held(&self) -> (u64, u64) {
        let stats = self.stats();
        (stats.inodes as u64 - 1, stats.open_files as u64)
    }
}

impl FaultBackend for MemoryFileSystem {
    fn new(_: &std::path::Path) -> Self {
        MemoryFileSystem::new(Default::default())
    }

    /// An inode without a name lives as long as it is known or open. If nothing has a name, only
    /// the root may be left.
    fn count_held(&self) -> (u64, u64) {
        let cx = Context::new(TaskCredentials::user(0, 0, &[]).caller());
        let space = self.statfs(&cx, Ino::ROOT).unwrap();
        (space.files - space.files_free - 1, 0)
    }
}

/// Removes everything through a new client, so that only referenced inodes are left.
fn clear(fs: Arc<dyn FileSystem>) {
    let (client, task) = client(fs);
    for path in ["a:/f", "a:/n", "a:/l", "a:/d/f", "a:/d/n", "a:/e/n"] {
        let _ = client.unlink(&task, WalkStart::Cwd, path.as_bytes());
    }
    for path in ["a:/n", "a:/d/n", "a:/d", "a:/e"] {
        let _ = client.rmdir(&task, WalkStart::Cwd, path.as_bytes());
    }
    client.unmount(b"a:", false).unwrap();
}

/// The client's view of all names.
fn view(client: &DirectClient, task: &ClientTask) -> Vec<String> {
    let names = ["f", "n", "l", "d", "d/f", "d/n", "e", "e/n"];
    let one = |name: &&str| match client.stat(
        task,
        WalkStart::Cwd,
        format!("a:/{name}").as_bytes(),
        false,
    ) {
        Ok(stat) => {
            let attr = stat.attr;
            let size = if attr.kind == defuse_fs::FileKind::Directory { 0 } else { attr.size };
            format!("{name}: {:o} {} {} {size} {}", attr.mode(), attr.nlink, attr.uid, attr.st_ino)
        }
        Err(stop) => format!("{name}: {stop:?}"),
    };
    names.iter().map(one).collect()
}

fn rule(method: Method, action: FaultAction) -> FaultRule {
    FaultRule { method: Some(method), when: FaultTrigger::Always, action }
}

/// Runs one call under a rule and returns its result. Panics if something leaks, or if the client's
/// caches are wrong.
fn run_one<F: FaultBackend>(
    what: &str,
    run: FaultCall,
    rules: &[FaultRule],
) -> (Result<()>, Vec<u64>) {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let fault = Arc::new(FaultLayer::new(F::new(place.path()), 1));
    prepare(Arc::clone(&fault) as _);
    let side = FaultSide::new(Arc::clone(&fault) as _);
    fault.set_rules(rules);
    let result = run(&side);
    let fired = fault.call_counts();
    fault.set_rules(&[]);
    let seen = view(&side.client, &side.task);
    let (fresh, task) = client(Arc::clone(&fault) as _);
    // If the file system answers that a name does not exist, the client may believe it.
    let lies = |rule: &FaultRule| {
        matches!(rule.method, Some(Method::Lookup | Method::Shortcut(_)))
            && rule.action == FaultAction::Fail(Errno::ENOENT)
    };
    if !rules.iter().any(lies) {
        assert_eq!(
            seen,
            view(&fresh, &task),
            "{what}: what the client believes, and what is there"
        );
    }
    fresh.unmount(b"a:", false).unwrap();
    let FaultSide { client, task, file, dir } = side;
    task.set_cwd(WorkDir::Outside(b"/".to_vec()));
    drop((file, dir));
    client.unmount(b"a:", false).unwrap_or_else(|errno| panic!("{what}: {errno}: still in use"));
    drop(client);
    clear(Arc::clone(&fault) as _);
    // A file system that received a request to release something and did not is responsible itself.
    if !rules
        .iter()
        .any(|rule| is_release(rule.method) && !matches!(rule.action, FaultAction::Delay(_)))
    {
        assert_eq!(
            fault.inner().count_held(),
            (0, 0),
            "{what}: inodes and open files that are left"
        );
    }
    (result, fired)
}

fn is_release(method: Option<Method>) -> bool {
    matches!(method, Some(Method::Release | Method::Releasedir))
}

/// The methods that a call uses.
fn list_used<F: FaultBackend>(name: &str, run: FaultCall) -> Vec<Method> {
    let counting: Vec<_> = Method::ALL
        .iter()
        .map(|&method| rule(method, FaultAction::Delay(Duration::ZERO)))
        .collect();
    let (result, fired) = run_one::<F>(name, run, &counting);
    assert_eq!(result, Ok(()), "{name} without faults");
    let fired = Method::ALL.iter().zip(fired).filter(|(_, count)| *count > 0);
    fired.map(|(method, _)| *method).collect()
}

/// The expected error of the call `name` if `method` fails with `errno`. It is the same, except for
/// errors of a file system that lacks the method, which are converted as the kernel does for FUSE.
fn expected_result(name: &str, method: Method, errno: Errno) -> Result<()> {
    use Method::*;
    let makes = ["mkdir", "mkdirat", "mknod", "symlink", "flink", "open of a new file"];
    let seen = match (method, errno) {
        // No caller waits for its result.
        (Release | Releasedir, _) => return Ok(()),
        // The lookup of a new name returns this anyway.
        (Lookup | Shortcut(_), Errno::ENOENT) if makes.contains(&name) => return Ok(()),
        (Shortcut(_), Errno::ENOENT) if name == "link" => return Ok(()),
        // The client then walks.
        (Shortcut(_), Errno::ENOSYS | Errno::ESTALE) => return Ok(()),
        // The client then checks permissions itself.
        (Access, Errno::ENOSYS) => return Ok(()),
        // Replaced by reading and writing.
        (CopyFileRange, Errno::EXDEV | Errno::ENOSYS | Errno::EOPNOTSUPP) => return Ok(()),
        // There are no attributes then.
        (Listxattr, Errno::ENOSYS | Errno::EOPNOTSUPP) => return Ok(()),
        // There is nothing to do, or the file has no holes.
        (Flush | Fsync | Fsyncdir | Syncfs | Lseek, Errno::ENOSYS) => return Ok(()),
        (Mkdir | Mknod | Symlink | Link | Unlink | Rmdir | Rename, Errno::ENOSYS) => Errno::EPERM,
        (Setattr | Fallocate | Getxattr | Setxattr | Removexattr | Tmpfile, Errno::ENOSYS) => {
            Errno::EOPNOTSUPP
        }
        // Another process has created it meanwhile, so it is looked up again, but never exists.
        (Create, Errno::EEXIST) => Errno::EIO,
        _ => errno,
    };
    Err(CallError::Errno(seen))
}

fn check<F: FaultBackend>() {
    let mut wrong = BTreeMap::<String, Vec<String>>::new();
    let mut turn = 0;
    for &(name, run) in CALLS {
        let methods = list_used::<F>(name, run);
        for &method in &methods {
            turn += 1;
            let fails = errors_of(turn).map(|errno| (FaultAction::Fail(errno), errno));
            // A panic is an error of that call only.
            for (action, errno) in fails.chain([(FaultAction::Panic, Errno::EIO)]) {
                let what = format!("{name}, {} fails: {action:?}", method.name());
                let (result, _) = run_one::<F>(&what, run, &[rule(method, action)]);
                if expected_result(name, method, errno) != result {
                    let key = format!("{name}, {}: {result:?}", method.name());
                    wrong.entry(key).or_default().push(format!("{action:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_error_of_memory_arrives_and_nothing_leaks() {
    check::<MemoryFileSystem>();
}

#[test]
fn every_error_of_a_passthrough_arrives_and_nothing_leaks() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root changes owners");
        return;
    }
    check::<Passthrough>();
}

/// A full table refuses descriptors, assigns the lowest number that is free again, and owns its
/// open files. An open file without a number is closed by its last owner.
#[test]
fn a_full_table_refuses_and_files_without_a_number_are_closed() {
    const LIMIT: usize = 1100;
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let fs = Arc::new(<Passthrough as FaultBackend>::new(place.path()));
    let (client, task) = client(Arc::clone(&fs) as _);
    let table = DescriptorTable::new(LIMIT);
    let add = |number: usize| {
        let file = open(&client, &task, &format!("a:/{}", number % 7), CREATE).unwrap();
        table.insert(file, 0, FdFlags::default())
    };
    for number in 0..LIMIT {
        assert_eq!(add(number), Ok(number as i32));
    }
    let files = || fs.stats().open_files;
    assert_eq!(files(), LIMIT);
    for number in 0..5 {
        assert_eq!(add(number), Err(Errno::EMFILE));
        assert_eq!(files(), LIMIT, "what found no number is closed");
    }
    let last = LIMIT as i32 - 1;
    let file = table.get(last).unwrap().clone();
    assert_eq!(
        table.replace(LIMIT as i32, Arc::clone(&file), FdFlags::default()).err(),
        Some(Errno::EBADF)
    );
    assert_eq!(table.insert(file, LIMIT as i32, FdFlags::default()), Err(Errno::EINVAL));
    for fd in [700, 3, 1023] {
        drop(table.remove(fd).unwrap());
    }
    assert_eq!((add(0), add(1), add(2)), (Ok(3), Ok(700), Ok(1023)));
    assert_eq!(add(3), Err(Errno::EMFILE));
    for fd in 0..LIMIT as i32 {
        table.remove(fd).unwrap().close(&task).unwrap();
    }
    assert_eq!((files(), add(0)), (0, Ok(0)));
    drop(table);
    client.unmount(b"a:", false).unwrap();
    drop(client);
    assert_eq!(fs.count_held(), (0, 0));
}

/// Threads open, read and close while one call in five fails. Each sees its own errors, and at the
/// end nothing is held.
#[test]
fn a_thousand_threads_on_a_failing_file_system_leave_nothing_open() {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let fault = Arc::new(FaultLayer::new(<Passthrough as FaultBackend>::new(place.path()), 7));
    prepare(Arc::clone(&fault) as _);
    let (client, task) = client(Arc::clone(&fault) as _);
    let methods = Method::ALL.iter().copied().map(Some).filter(|&method| !is_release(method));
    let rules = methods.flat_map(|method| {
        [FaultAction::Fail(Errno::EDQUOT), FaultAction::Panic].map(|action| FaultRule {
            method,
            when: FaultTrigger::Chance(0.1),
            action,
        })
    });
    fault.set_rules(&rules.collect::<Vec<_>>());
    let work = |number: usize| -> Result<()> {
        let path = ["a:/f", "a:/d/f", "a:/l"][number % 3];
        let file = open(&client, &task, path, RDWR)?;
        let mut room = [0; 5000];
        let read = client.pread(&task, &file, &mut room, 0)?;
        assert!(read == 5000 && room == [7; 5000], "{read} bytes");
        client.stat(&task, WalkStart::Cwd, path.as_bytes(), true)?;
        file.close(&task).map_err(CallError::from)
    };
    let known = [Ok(()), Err(CallError::Errno(Errno::EDQUOT)), Err(CallError::Errno(Errno::EIO))];
    let seen: Vec<_> = std::thread::scope(|scope| {
        let start = |number: usize| {
            let thread = std::thread::Builder::new().stack_size(256 << 10);
            let work = &work;
            let run = move || (0..5).map(|turn| work(number + turn)).collect::<Vec<_>>();
            thread.spawn_scoped(scope, run).unwrap()
        };
        let threads: Vec<_> = (0..1000).map(start).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    for (number, kind) in known.iter().enumerate() {
        assert!(seen.iter().filter(|one| *one == kind).count() > 100, "{number}: {kind:?}");
    }
    assert!(seen.iter().all(|one| known.contains(one)));
    fault.set_rules(&[]);
    assert_eq!(client.mounts()[0].users, 0);
    client.unmount(b"a:", false).unwrap();
    drop(client);
    clear(Arc::clone(&fault) as _);
    assert_eq!(fault.inner().count_held(), (0, 0));
}

/// The file system reported nothing at its end, so an unmount succeeded whatever data it had lost.
#[test]
fn an_unmount_tells_that_something_could_not_be_made_durable() {
    let fault =
        Arc::new(FaultLayer::new(defuse_memory::MemoryFileSystem::new(Default::default()), 7));
    let (client, _) = client(Arc::clone(&fault) as _);
    for (action, notified) in [
        (FaultAction::Fail(Errno::ENOSPC), Err(Errno::ENOSPC)),
        (FaultAction::Panic, Err(Errno::EIO)),
        (FaultAction::Short(0), Ok(())),
    ] {
        fault.set_rules(&[FaultRule {
            method: Some(Method::Syncfs),
            when: FaultTrigger::Always,
            action,
        }]);
        client.mount(b"b:", Arc::clone(&fault) as _, &ClientMountArgs::default()).unwrap();
        assert_eq!(client.unmount(b"b:", false), notified);
        assert_eq!(client.unmount(b"b:", false), Err(Errno::EINVAL), "it is gone");
    }
}
