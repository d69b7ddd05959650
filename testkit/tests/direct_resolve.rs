//! Paths that a file system resolves in one call: the permissions and the files are the same as in
//! a walk.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use defuse_direct::{
    CallError, ClientMountArgs, ClientOptions, ClientTask, DirectClient, FileDescription,
    LockFamily, NeededAccess, OpenHow, Result, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::layer::{FaultLayer, LockingLayer, Method, ReadOnlyLayer, SubdirLayer};
use defuse_fs::posix::acl;
use defuse_fs::{
    Caller, Context, Entry, Errno, FileSystem, Ino, Lock, LockType, Name, NormalPath,
    PathResolution, RenameFlags, SetXattrFlags, Shortcuts, delegate, shortcuts_of,
};
use defuse_memory::MemoryFileSystem;

const CREATE: u32 = 0o102;
const PATH: u32 = 0o10000000;

/// Counts the calls of each method.
struct MethodCounter {
    inner: MemoryFileSystem,
    calls: Mutex<BTreeMap<&'static str, usize>>,
}

impl MethodCounter {
    fn new() -> Arc<Self> {
        let inner = MemoryFileSystem::new(defuse_memory::MemoryOptions::default());
        Arc::new(MethodCounter { inner, calls: Mutex::default() })
    }

    fn intercept<T>(
        &self,
        method: Method,
        _: &Context<'_>,
        call: impl FnOnce(&MemoryFileSystem) -> defuse_fs::Result<T>,
    ) -> defuse_fs::Result<T> {
        *self.calls.lock().unwrap().entry(method.name()).or_default() += 1;
        call(&self.inner)
    }

    fn take(&self) -> Vec<(&'static str, usize)> {
        std::mem::take(&mut *self.calls.lock().unwrap()).into_iter().collect()
    }
}

impl FileSystem for MethodCounter {
    delegate!(intercept inner);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }
}

impl Shortcuts for MethodCounter {
    delegate!(intercept inner, only resolve, peek);
}

fn client(fs: Arc<dyn FileSystem>) -> DirectClient {
    let client = DirectClient::new(ClientOptions::default());
    client.mount(b"m:", fs, &ClientMountArgs::default()).unwrap();
    client
}

fn task(uid: u32, groups: &[u32]) -> ClientTask {
    ClientTask::new(TaskCredentials::user(uid, uid, groups), WorkDir::Outside(b"/".to_vec()))
}

fn open(
    client: &DirectClient,
    task: &ClientTask,
    path: &str,
    flags: u32,
) -> Result<Arc<FileDescription>> {
    let how = OpenHow { flags, mode: 0o644, ..OpenHow::default() };
    client.open(task, WalkStart::Cwd, path.as_bytes(), how)
}

fn create(client: &DirectClient, task: &ClientTask, path: &str) {
    open(client, task, path, CREATE).unwrap();
}

fn stat(client: &DirectClient, task: &ClientTask, path: &str) -> Result<u64> {
    client.stat(task, WalkStart::Cwd, path.as_bytes(), true).map(|stat| stat.attr.st_ino)
}

const REFUSED: Result<()> = Err(CallError::Errno(Errno::EACCES));

/// Every call that looks for `path`, of which the user may not search a directory.
fn assert_refused(client: &DirectClient, task: &ClientTask, path: &str) {
    let bytes = path.as_bytes();
    let at = WalkStart::Cwd;
    assert_eq!(stat(client, task, path).map(drop), REFUSED, "{path}");
    assert_eq!(stat(client, task, &format!("{path}-none")).map(drop), REFUSED);
    assert_eq!(client.access(task, at, bytes, NeededAccess::from_bits(0), (true, true)), REFUSED);
    assert_eq!(client.chmod(task, at, bytes, 0o777, true), REFUSED);
    assert_eq!(open(client, task, path, 0).map(drop), REFUSED);
    assert_eq!(open(client, task, path, CREATE).map(drop), REFUSED);
    assert_eq!(client.unlink(task, at, bytes), REFUSED);
    assert_eq!(client.mkdir(task, at, bytes, 0o777), REFUSED);
    assert_eq!(client.rename(task, (at, bytes), (at, b"m:/x"), RenameFlags(0)), REFUSED);
}

#[test]
fn a_path_costs_one_call_and_no_lookup() {
    let fs = MethodCounter::new();
    let (client, root, user) = (client(fs.clone()), task(0, &[]), task(5, &[]));
    client.mkdir(&root, WalkStart::Cwd, b"m:/a", 0o755).unwrap();
    client.mkdir(&root, WalkStart::Cwd, b"m:/a/b", 0o755).unwrap();
    create(&client, &root, "m:/a/b/file");
    client.symlink(&root, b"file", WalkStart::Cwd, b"m:/a/b/link").unwrap();
    client.forget_names();
    fs.take();
    for who in [&root, &user] {
        stat(&client, who, "m:/a/b/file").unwrap();
        assert_eq!(stat(&client, who, "m:/a/none/x").err(), Some(Errno::ENOENT.into()));
        client.stat(who, WalkStart::Cwd, b"m:/a/b/link", false).unwrap();
        assert_eq!(fs.take(), [("resolve", 3)]);
        drop(open(&client, who, "m:/a/b/file", 0).unwrap());
        let opened = fs.take();
        assert!(opened.contains(&("resolve", 1)) && opened.contains(&("open", 1)), "{opened:?}");
        assert!(!opened.iter().any(|&(name, _)| name == "lookup"), "{opened:?}");
    }
    assert_eq!(client.statistics(b"m:").unwrap().gauges["names_cached"], 0);
    // A link is walked.
    let found = stat(&client, &user, "m:/a/b/link").unwrap();
    assert_eq!(found, stat(&client, &user, "m:/a/b/file").unwrap());
    assert!(fs.take().iter().any(|&(name, _)| name == "lookup"));
}

#[test]
fn creating_and_closing_a_file_asks_for_nothing_that_is_known() {
    let fs = MethodCounter::new();
    let (client, user) = (client(fs.clone()), task(5, &[]));
    client.mkdir(&user, WalkStart::Cwd, b"m:/dir", 0o755).unwrap();
    let make = |path| {
        fs.take();
        let file = open(&client, &user, path, CREATE).unwrap();
        file.close(&user).unwrap();
        file
    };
    drop(make("m:/dir/one"));
    // The permissions of the directory are still known after a change of its names.
    let expected = [("create", 1), ("release", 1), ("resolve", 1)];
    drop(make("m:/dir/two"));
    assert_eq!(fs.take(), expected);
    let listed = client.stat(&user, WalkStart::Cwd, b"m:/dir", true).unwrap().attr;
    assert_eq!(listed.size, 40, "its size is the current one");
    client.chmod(&user, WalkStart::Cwd, b"m:/dir", 0o555, true).unwrap();
    assert_eq!(open(&client, &user, "m:/dir/three", CREATE).map(drop), REFUSED);
    client.chmod(&user, WalkStart::Cwd, b"m:/dir", 0o755, true).unwrap();
    // From the first lock on, closing releases locks.
    let file = make("m:/dir/four");
    let lock = Lock { typ: LockType::Write, start: 0, end: 9, pid: 0 };
    client.set_lock(&user, &file, LockFamily::Process, lock).unwrap();
    let other = open(&client, &user, "m:/dir/four", CREATE).unwrap();
    other.close(&user).unwrap();
    let second = task(6, &[]);
    second.set_pid(99);
    let found = client.test_lock(&second, &file, LockFamily::Process, lock);
    assert_eq!(found, Ok(None), "closing any descriptor releases the locks of the process");
}

#[test]
fn a_resolved_path_does_not_lead_through_a_directory_that_the_user_may_not_search() {
    let client = client(MethodCounter::new());
    let root = task(0, &[]);
    client.mkdir(&root, WalkStart::Cwd, b"m:/dir", 0o755).unwrap();
    client.mkdir(&root, WalkStart::Cwd, b"m:/dir/sub", 0o755).unwrap();
    create(&client, &root, "m:/dir/sub/file");
    let path = "m:/dir/sub/file";
    let user = task(5, &[]);
    stat(&client, &user, path).unwrap();
    // For others, for the group although others may, and for the owner although all others may.
    for (mode, owner, groups) in [(0o754, 0, 0), (0o707, 0, 5), (0o077, 5, 0)] {
        for dir in [&b"m:/dir"[..], b"m:/dir/sub"] {
            let ids = defuse_direct::NewOwner { uid: Some(owner), gid: Some(groups) };
            client.chown(&root, WalkStart::Cwd, dir, ids, true).unwrap();
            client.chmod(&root, WalkStart::Cwd, dir, mode, true).unwrap();
            assert_refused(&client, &user, path);
            stat(&client, &root, path).unwrap();
            let ids = defuse_direct::NewOwner { uid: Some(0), gid: Some(0) };
            client.chown(&root, WalkStart::Cwd, dir, ids, true).unwrap();
            client.chmod(&root, WalkStart::Cwd, dir, 0o755, true).unwrap();
            stat(&client, &user, path).unwrap();
        }
    }
}

/// An ACL that grants everything to everyone but the user 5.
fn make_list_without_user_5(others: u16) -> Vec<u8> {
    let mut list = acl::VERSION.to_le_bytes().to_vec();
    let entries = [
        (acl::USER_OBJ, 7, u32::MAX),
        (acl::USER, 0, 5),
        (acl::GROUP_OBJ, 7, u32::MAX),
        (acl::MASK, 7, u32::MAX),
        (acl::OTHER, others, u32::MAX),
    ];
    for (tag, perm, id) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(perm.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    list
}

#[test]
fn the_acl_of_a_directory_and_of_a_file_restricts_a_resolved_path() {
    let client = client(MethodCounter::new());
    let (root, user, other) = (task(0, &[]), task(5, &[]), task(6, &[]));
    client.mkdir(&root, WalkStart::Cwd, b"m:/dir", 0o777).unwrap();
    create(&client, &root, "m:/dir/file");
    let set = |path: &[u8], list: &[u8]| {
        let (name, flags) = (b"system.posix_acl_access", SetXattrFlags::default());
        client.setxattr(&root, (WalkStart::Cwd, path, true), name, list, flags).unwrap();
    };
    set(b"m:/dir", &make_list_without_user_5(7));
    assert_refused(&client, &user, "m:/dir/file");
    stat(&client, &other, "m:/dir/file").unwrap();
    client
        .removexattr(&root, (WalkStart::Cwd, b"m:/dir", true), b"system.posix_acl_access")
        .unwrap();
    set(b"m:/dir/file", &make_list_without_user_5(7));
    stat(&client, &user, "m:/dir/file").unwrap();
    let read = |task| open(&client, task, "m:/dir/file", 0).map(drop);
    assert_eq!((read(&user), read(&other)), (REFUSED, Ok(())));
    let access = NeededAccess::READ;
    assert_eq!(client.access(&user, WalkStart::Cwd, b"m:/dir/file", access, (true, true)), REFUSED);
}

/// While the directory is closed, and only then, it contains a secret name.
#[test]
fn a_name_in_a_closed_directory_is_never_resolved_as_open_while_the_mode_changes() {
    let fs = Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default()));
    let client = client(fs.clone());
    let (root, cx) = (task(0, &[]), Context::new(Caller { uid: 5, gid: 5, pid: 1 }));
    let path = NormalPath::new(b"dir/secret").unwrap();
    client.mkdir(&root, WalkStart::Cwd, b"m:/dir", 0o700).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20_000 {
                client.chmod(&root, WalkStart::Cwd, b"m:/dir", 0o700, true).unwrap();
                create(&client, &root, "m:/dir/secret");
                client.unlink(&root, WalkStart::Cwd, b"m:/dir/secret").unwrap();
                client.chmod(&root, WalkStart::Cwd, b"m:/dir", 0o755, true).unwrap();
            }
            done.store(true, Relaxed);
        });
        let mut missing = 0;
        while !done.load(Relaxed) {
            match Shortcuts::resolve(&*fs, &cx, Ino::ROOT, path).unwrap() {
                PathResolution::Inode { open_to_all, .. } => assert!(!open_to_all),
                PathResolution::Missing { open_to_all } => missing += usize::from(open_to_all),
                PathResolution::Walk => unreachable!("dir is a directory"),
            }
        }
        assert!(missing > 0);
    });
}

/// A closed directory with a secret name, and an open one without it, exchange their names.
#[test]
fn permissions_and_names_are_those_of_the_same_directory_while_directories_are_renamed() {
    let client = client(Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default())));
    let (root, user) = (task(0, &[]), task(5, &[]));
    client.mkdir(&root, WalkStart::Cwd, b"m:/one", 0o700).unwrap();
    client.mkdir(&root, WalkStart::Cwd, b"m:/two", 0o755).unwrap();
    create(&client, &root, "m:/one/secret");
    create(&client, &root, "m:/two/public");
    let done = AtomicBool::new(false);
    let paths = (WalkStart::Cwd, &b"m:/one"[..]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20_000 {
                let flags = RenameFlags(RenameFlags::EXCHANGE);
                client.rename(&root, paths, (WalkStart::Cwd, b"m:/two"), flags).unwrap();
            }
            done.store(true, Relaxed);
        });
        let mut found = 0;
        while !done.load(Relaxed) {
            let secret = stat(&client, &user, "m:/one/secret");
            assert!(secret.is_err(), "{secret:?}");
            found += usize::from(stat(&client, &user, "m:/one/public").is_ok());
        }
        assert!(found > 0);
    });
}

#[test]
fn a_resolved_file_is_usable_after_its_last_name_is_gone() {
    let client = client(MethodCounter::new());
    let user = task(5, &[]);
    create(&client, &user, "m:/file");
    let file = open(&client, &user, "m:/file", 2).unwrap();
    assert_eq!(client.fstat(&user, &file).unwrap().attr.nlink, 1);
    client.chmod(&user, WalkStart::Cwd, b"m:/file", 0o640, true).unwrap();
    assert_eq!(client.fstat(&user, &file).unwrap().attr.perm, 0o640);
    let how = OpenHow { flags: PATH, ..OpenHow::default() };
    let path_only = client.open(&user, WalkStart::Itself(&file), b"", how).unwrap();
    client.unlink(&user, WalkStart::Cwd, b"m:/file").unwrap();
    assert_eq!(client.fstat(&user, &file).unwrap().attr.nlink, 0);
    assert_eq!(client.write(&user, &file, b"text"), Ok(4));
    drop(file);
    assert_eq!(client.fstat(&user, &path_only).unwrap().attr.size, 4);
    drop(path_only);
    let space = client.statfs(&user, WalkStart::Cwd, b"m:/").unwrap();
    assert_eq!(space.files - space.files_free, 1, "the inode is freed with its last user");
}

/// A layer that hides names.
struct HidingLayer {
    inner: Arc<MemoryFileSystem>,
}

impl FileSystem for HidingLayer {
    delegate!(to inner, except lookup);

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> defuse_fs::Result<Entry> {
        match name.as_bytes() {
            b"file" => Err(Errno::ENOENT),
            _ => FileSystem::lookup(&self.inner, cx, parent, name),
        }
    }
}

#[test]
fn layers_pass_a_path_on_and_one_with_its_own_lookup_is_not_bypassed() {
    let fs = Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default()));
    let (setup, root) = (client(fs.clone()), task(0, &[]));
    setup.mkdir(&root, WalkStart::Cwd, b"m:/dir", 0o755).unwrap();
    create(&setup, &root, "m:/dir/file");
    let ino = stat(&setup, &root, "m:/dir/file").unwrap();
    let subdir = SubdirLayer::new(fs.clone(), Caller::default(), [&b"dir"[..]]).unwrap();
    let layers: [(&str, Arc<dyn FileSystem>); 4] = [
        ("dir/file", Arc::new(ReadOnlyLayer::new(fs.clone()))),
        ("dir/file", Arc::new(LockingLayer::new(fs.clone()))),
        ("dir/file", Arc::new(FaultLayer::new(fs.clone(), 1))),
        ("file", Arc::new(subdir)),
    ];
    let cx = Context::new(Caller::default());
    for (path, layer) in layers {
        let path = NormalPath::new(path.as_bytes()).unwrap();
        let answer = shortcuts_of(&*layer).resolve(&cx, Ino::ROOT, path).unwrap();
        assert!(
            matches!(answer, PathResolution::Inode { ino: Ino(found), .. } if found == ino),
            "{answer:?}"
        );
    }
    let hides = client(Arc::new(HidingLayer { inner: fs }));
    assert_eq!(stat(&hides, &root, "m:/dir/file").err(), Some(Errno::ENOENT.into()));
    stat(&hides, &root, "m:/dir").unwrap();
}
