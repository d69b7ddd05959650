//! The in-process client: mounts, walks, open files, and file systems that fail.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use defuse_direct::{
    CallError, ClientMountArgs, ClientOptions, ClientTask, DescriptorTable, DirectClient, FdFlags,
    FileDescription, LockFamily, NewOwner, OpenHow, OutsidePaths, ResolveFlags, Result,
    TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::layer::{FaultAction, FaultLayer, FaultRule, FaultTrigger, Method, Shortcut};
use defuse_fs::{
    Attr, Caps, Context, Entry, Errno, Fh, FileKind, FileSystem, Ino, Lifecycle, Lock, LockType,
    Name, RenameFlags, delegate,
};
use defuse_memory::MemoryFileSystem;
use defuse_passthrough::Passthrough;

const CREATE: u32 = 0o102;

fn memory() -> Arc<MemoryFileSystem> {
    Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default()))
}

fn task() -> ClientTask {
    ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()))
}

fn client(targets: &[&str]) -> DirectClient {
    let client = DirectClient::new(ClientOptions::default());
    for target in targets {
        client.mount(target.as_bytes(), memory(), &ClientMountArgs::default()).unwrap();
    }
    client
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

fn put(client: &DirectClient, task: &ClientTask, path: &str, bytes: &[u8]) {
    let file = open(client, task, path, CREATE).unwrap();
    assert_eq!(client.write(task, &file, bytes), Ok(bytes.len()));
}

fn get(client: &DirectClient, task: &ClientTask, path: &str) -> Result<Vec<u8>> {
    let file = open(client, task, path, 0)?;
    let mut room = [0; 100];
    let count = client.read(task, &file, &mut room)?;
    Ok(room[..count].to_vec())
}

fn errno<T: std::fmt::Debug>(result: Result<T>) -> Errno {
    match result {
        Err(CallError::Errno(errno)) => errno,
        other => panic!("{other:?}"),
    }
}

#[test]
fn several_file_systems_of_the_same_and_of_different_types_are_used_at_once() {
    let (client, task) = (client(&["a:", "b:"]), task());
    let dir = tempfile::tempdir().unwrap();
    let source = Passthrough::new(dir.path(), Default::default()).unwrap();
    client.mount(b"/defuse-test/p", Arc::new(source), &ClientMountArgs::default()).unwrap();
    put(&client, &task, "a:/x", b"one");
    for target in ["b:/x", "/defuse-test/p/x"] {
        let from = open(&client, &task, "a:/x", 0).unwrap();
        let to = open(&client, &task, target, CREATE).unwrap();
        assert_eq!(client.copy_file_range(&task, (&from, None), (&to, None), 100), Ok(3));
        assert_eq!(get(&client, &task, target).unwrap(), b"one");
    }
    assert_eq!(std::fs::read(dir.path().join("x")).unwrap(), b"one");
    let rename = client.rename(
        &task,
        (WalkStart::Cwd, b"a:/x"),
        (WalkStart::Cwd, b"b:/y"),
        RenameFlags::default(),
    );
    assert_eq!(errno(rename), Errno::EXDEV);
}

/// Two clients of one directory, which share a counter of changes, as programs of a run do.
fn two_clients_that_count(dir: &std::path::Path) -> [DirectClient; 2] {
    let changes: &'static AtomicU32 = Box::leak(Box::default());
    std::array::from_fn(|_| {
        let client = DirectClient::new(ClientOptions {
            path_changes: Some(changes),
            ..ClientOptions::default()
        });
        let options = defuse_passthrough::PassthroughOptions {
            attr_valid_for: Duration::ZERO,
            entry_valid_for: Duration::ZERO,
            credentials: defuse_passthrough::CredentialsPolicy::Restore,
            ..defuse_passthrough::PassthroughOptions::default()
        };
        let source = Passthrough::new(dir, options).unwrap();
        let directories_hold = Duration::from_secs(60);
        let args = ClientMountArgs { directories_hold, ..ClientMountArgs::default() };
        client.mount(b"p:", Arc::new(source), &args).unwrap();
        client
    })
}

#[test]
fn a_directory_within_a_path_is_not_looked_up_again_until_a_change_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let [one, other] = two_clients_that_count(dir.path());
    let task = task();
    let lookups = |client: &DirectClient| {
        let ops = client.statistics(b"p:").unwrap().ops;
        ops.iter().find(|stats| stats.op.name() == "LOOKUP").map_or(0, |stats| stats.latency.count)
    };
    let is_there = |client: &DirectClient, path: &str| {
        client.stat(&task, WalkStart::Cwd, path.as_bytes(), false)
    };
    one.mkdir(&task, WalkStart::Cwd, b"p:/a", 0o755).unwrap();
    one.mkdir(&task, WalkStart::Cwd, b"p:/a/b", 0o755).unwrap();
    put(&one, &task, "p:/a/b/file", b"old");
    is_there(&one, "p:/a/b/file").unwrap();
    let before = lookups(&one);
    is_there(&one, "p:/a/b/file").unwrap();
    assert_eq!(lookups(&one), before + 1, "the file itself is looked up each time");

    // Another client of the same counter moves a directory away, and puts another one in its place.
    let rename = |from: &[u8], to: &[u8]| {
        other
            .rename(&task, (WalkStart::Cwd, from), (WalkStart::Cwd, to), RenameFlags::default())
            .unwrap();
    };
    rename(b"p:/a/b", b"p:/a/c");
    assert_eq!(errno(is_there(&one, "p:/a/b/file")), Errno::ENOENT);
    other.mkdir(&task, WalkStart::Cwd, b"p:/a/b", 0o755).unwrap();
    put(&one, &task, "p:/a/b/file", b"new");
    assert_eq!(get(&one, &task, "p:/a/c/file").unwrap(), b"old");
    assert_eq!(get(&one, &task, "p:/a/b/file").unwrap(), b"new");

    // A removal is counted, too: the directory that comes after it has other files.
    other.unlink(&task, WalkStart::Cwd, b"p:/a/b/file").unwrap();
    other.rmdir(&task, WalkStart::Cwd, b"p:/a/b").unwrap();
    rename(b"p:/a/c", b"p:/a/b");
    assert_eq!(get(&one, &task, "p:/a/b/file").unwrap(), b"old");

    // The name of a removed directory may become the name of a link.
    rename(b"p:/a/b", b"p:/a/d");
    other.symlink(&task, b"d", WalkStart::Cwd, b"p:/a/b").unwrap();
    assert_eq!(get(&one, &task, "p:/a/b/file").unwrap(), b"old");
    assert!(one.readlink(&task, WalkStart::Cwd, b"p:/a/b").is_ok());
}

#[test]
fn rights_of_a_directory_within_a_path_hold_until_a_change_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let [one, other] = two_clients_that_count(dir.path());
    let (root, user) = (task(), TaskCredentials::user(1000, 1000, &[]));
    let user = ClientTask::new(user, WorkDir::Outside(b"/".to_vec()));
    other.mkdir(&root, WalkStart::Cwd, b"p:/a", 0o755).unwrap();
    put(&other, &root, "p:/a/file", b"x");
    let look = || one.stat(&user, WalkStart::Cwd, b"p:/a/file", false);
    look().unwrap();
    other.chmod(&root, WalkStart::Cwd, b"p:/a", 0o700, false).unwrap();
    assert_eq!(errno(look()), Errno::EACCES);
    other
        .chown(&root, WalkStart::Cwd, b"p:/a", NewOwner { uid: Some(1000), gid: None }, false)
        .unwrap();
    look().unwrap();
    // The attributes that stat(2) returns are current, not those from a moment ago.
    std::fs::set_permissions(dir.path().join("a"), PermissionsExt::from_mode(0o711)).unwrap();
    for path in [&b"p:/a"[..], b"p:/a/", b"p:/a/."] {
        assert_eq!(one.stat(&user, WalkStart::Cwd, path, false).unwrap().attr.perm, 0o711);
    }
}

#[test]
fn a_path_of_several_names_leads_where_it_leads_now() {
    let dir = tempfile::tempdir().unwrap();
    let [one, other] = two_clients_that_count(dir.path());
    let task = task();
    for path in ["p:/a", "p:/a/b", "p:/a/b/c", "p:/a/b/c/d"] {
        one.mkdir(&task, WalkStart::Cwd, path.as_bytes(), 0o755).unwrap();
    }
    put(&one, &task, "p:/a/b/c/file", b"old");
    let there = |path: &str| get(&one, &task, path);
    for path in ["p:/a/b/c/file", "p:/a/b/c/file", "p://a/b//c/file", "p:/a/b/c/./file"] {
        assert_eq!(there(path).unwrap(), b"old", "{path}");
    }
    assert_eq!(there("p:/a/b/c/d/../file").unwrap(), b"old");
    assert_eq!(errno(there("p:/a/b/c/file/")), Errno::ENOTDIR);
    assert_eq!(
        one.stat(&task, WalkStart::Cwd, b"p:/a/b/c/..", false).unwrap().attr.kind,
        FileKind::Directory
    );

    // A directory in the middle is another one now, then a link, and then a mount.
    let rename = |from: &[u8], to: &[u8]| {
        other
            .rename(&task, (WalkStart::Cwd, from), (WalkStart::Cwd, to), RenameFlags::default())
            .unwrap();
    };
    rename(b"p:/a/b", b"p:/a/x");
    assert_eq!(errno(there("p:/a/b/c/file")), Errno::ENOENT);
    for path in [&b"p:/a/b"[..], b"p:/a/b/c"] {
        other.mkdir(&task, WalkStart::Cwd, path, 0o755).unwrap();
    }
    put(&other, &task, "p:/a/b/c/file", b"new");
    assert_eq!(there("p:/a/b/c/file").unwrap(), b"new");
    rename(b"p:/a/b", b"p:/a/y");
    other.symlink(&task, b"x", WalkStart::Cwd, b"p:/a/b").unwrap();
    for _ in 0..2 {
        assert_eq!(there("p:/a/b/c/file").unwrap(), b"old");
    }
    one.unlink(&task, WalkStart::Cwd, b"p:/a/b").unwrap();
    rename(b"p:/a/y", b"p:/a/b");
    for _ in 0..2 {
        assert_eq!(there("p:/a/b/c/file").unwrap(), b"new");
    }
    one.mount(b"p:/a/b", memory(), &ClientMountArgs::default()).unwrap();
    assert_eq!(errno(there("p:/a/b/c/file")), Errno::ENOENT);
    one.mkdir(&task, WalkStart::Cwd, b"p:/a/b/c", 0o755).unwrap();
    put(&one, &task, "p:/a/b/c/file", b"on the mount");
    assert_eq!(there("p:/a/b/c/file").unwrap(), b"on the mount");
    one.unmount(b"p:/a/b", false).unwrap();
    assert_eq!(there("p:/a/b/c/file").unwrap(), b"new");
}

#[test]
fn a_path_that_one_user_came_through_says_nothing_of_another() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let [one, other] = two_clients_that_count(dir.path());
    let root = task();
    let user = |uid, groups: &[u32]| {
        ClientTask::new(TaskCredentials::user(uid, uid, groups), WorkDir::Outside(b"/".to_vec()))
    };
    other.mkdir(&root, WalkStart::Cwd, b"p:/a", 0o700).unwrap();
    other.mkdir(&root, WalkStart::Cwd, b"p:/a/b", 0o755).unwrap();
    put(&other, &root, "p:/a/b/file", b"x");
    let look = |task: &ClientTask| one.stat(task, WalkStart::Cwd, b"p:/a/b/file", false);
    look(&root).unwrap();
    assert_eq!(errno(look(&user(1000, &[]))), Errno::EACCES);
    let owner = NewOwner { uid: Some(1000), gid: Some(7) };
    other.chown(&root, WalkStart::Cwd, b"p:/a", owner, false).unwrap();
    let alice = user(1000, &[]);
    for _ in 0..2 {
        look(&alice).unwrap();
    }
    for eve in [user(1001, &[]), user(1001, &[7])] {
        assert_eq!(errno(look(&eve)), Errno::EACCES);
    }
    other.chmod(&root, WalkStart::Cwd, b"p:/a", 0o710, false).unwrap();
    let member = user(1001, &[7]);
    for _ in 0..2 {
        look(&member).unwrap();
    }
    // This task without the group.
    member.set_credentials(TaskCredentials::user(1001, 1001, &[]));
    assert_eq!(errno(look(&member)), Errno::EACCES);
    other.chmod(&root, WalkStart::Cwd, b"p:/a", 0o600, false).unwrap();
    assert_eq!(errno(look(&alice)), Errno::EACCES);
}

#[test]
fn links_lead_between_mounts_and_out_of_them() {
    let (client, task) = (client(&["/defuse-a", "/defuse-b"]), task());
    put(&client, &task, "/defuse-b/f", b"here");
    client.symlink(&task, b"/defuse-b/f", WalkStart::Cwd, b"/defuse-a/l").unwrap();
    client.symlink(&task, b"../defuse-b", WalkStart::Cwd, b"/defuse-a/up").unwrap();
    client.symlink(&task, b"/etc/hostname", WalkStart::Cwd, b"/defuse-a/out").unwrap();
    client.symlink(&task, b"loop", WalkStart::Cwd, b"/defuse-a/loop").unwrap();
    for path in ["/defuse-a/l", "/defuse-a/up/f", "/defuse-a/../defuse-b/f", "//defuse-b/./f"] {
        assert_eq!(get(&client, &task, path).unwrap(), b"here", "{path}");
    }
    assert_eq!(errno(get(&client, &task, "/defuse-a/loop")), Errno::ELOOP);
    let outside =
        |path: &str| CallError::Outside(OutsidePaths { path: Some(path.into()), second: None });
    assert_eq!(get(&client, &task, "/defuse-a/out"), Err(outside("/etc/hostname")));
    assert_eq!(get(&client, &task, "/defuse-a/../etc/x"), Err(outside("/etc/x")));
    assert_eq!(get(&client, &task, "/etc/x"), Err(CallError::Outside(OutsidePaths::default())));
    // A link in the kernel's name space that leads into a mount.
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/defuse-b", dir.path().join("in")).unwrap();
    let path = format!("{}/in/f", dir.path().display());
    assert_eq!(get(&client, &task, &path).unwrap(), b"here");
}

#[test]
fn a_mount_inside_of_a_mount_covers_the_directory_and_its_parent_is_the_one_below() {
    let (client, task) = (client(&["a:"]), task());
    client.mkdir(&task, WalkStart::Cwd, b"a:/d", 0o755).unwrap();
    put(&client, &task, "a:/f", b"below");
    client.mount(b"a:/d", memory(), &ClientMountArgs::default()).unwrap();
    put(&client, &task, "a:/d/x", b"upper");
    assert_eq!(get(&client, &task, "a:/d/../f").unwrap(), b"below");
    assert_eq!(errno(client.rmdir(&task, WalkStart::Cwd, b"a:/d")), Errno::EBUSY);
    client.chdir(&task, b"a:/d").unwrap();
    assert_eq!(client.getcwd(&task).unwrap(), b"a:/d");
    assert_eq!(get(&client, &task, "x").unwrap(), b"upper");
    assert_eq!(client.unmount(b"a:/d", false), Err(Errno::EBUSY));
    client.chdir(&task, b"..").unwrap();
    client.unmount(b"a:/d", false).unwrap();
    assert_eq!(errno(get(&client, &task, "a:/d/x")), Errno::ENOENT);
}

#[test]
fn a_mount_in_use_is_busy_unless_it_is_detached_lazily() {
    let (client, task) = (client(&["a:"]), task());
    let file = open(&client, &task, "a:/f", CREATE).unwrap();
    assert_eq!(client.unmount(b"a:", false), Err(Errno::EBUSY));
    client.unmount(b"a:", true).unwrap();
    assert_eq!(client.write(&task, &file, b"still"), Ok(5));
    assert!(matches!(get(&client, &task, "a:/f"), Err(CallError::Outside(_))));
    assert_eq!(client.unmount(b"a:", true), Err(Errno::EINVAL));
}

#[test]
fn restrictions_of_openat2_hold() {
    let (client, task) = (client(&["a:"]), task());
    client.mkdir(&task, WalkStart::Cwd, b"a:/d", 0o755).unwrap();
    put(&client, &task, "a:/f", b"f");
    client.symlink(&task, b"../f", WalkStart::Cwd, b"a:/d/l").unwrap();
    let dir = open(&client, &task, "a:/d", 0o200000).unwrap();
    let at = |path: &str, resolve| {
        let how = OpenHow { resolve: ResolveFlags(resolve), ..OpenHow::default() };
        client.open(&task, WalkStart::Dir(&dir), path.as_bytes(), how).map(drop)
    };
    assert_eq!(at("../f", 0), Ok(()));
    assert_eq!(errno(at("../f", ResolveFlags::BENEATH)), Errno::EXDEV);
    assert_eq!(errno(at("l", ResolveFlags::BENEATH)), Errno::EXDEV);
    assert_eq!(errno(at("l", ResolveFlags::NO_SYMLINKS)), Errno::ELOOP);
    assert_eq!(errno(at("../f", ResolveFlags::IN_ROOT)), Errno::ENOENT);
}

#[test]
fn duplicates_share_their_position_and_numbers_are_the_lowest() {
    let (client, task) = (client(&["a:"]), task());
    let table = DescriptorTable::new(64);
    let file = open(&client, &task, "a:/f", CREATE).unwrap();
    let first = table.insert(Arc::clone(&file), 0, FdFlags::default()).unwrap();
    let second = table.insert(file, 0, FdFlags::default()).unwrap();
    assert_eq!((first, second), (0, 1));
    client.write(&task, &table.get(first).unwrap(), b"abc").unwrap();
    client.write(&task, &table.get(second).unwrap(), b"def").unwrap();
    assert_eq!(get(&client, &task, "a:/f").unwrap(), b"abcdef");
    table.remove(first).unwrap().close(&task).unwrap();
    assert_eq!(table.get(first).err(), Some(Errno::EBADF));
    let third = open(&client, &task, "a:/f", 0).unwrap();
    assert_eq!(table.insert(third, 0, FdFlags::default()), Ok(0));
}

#[test]
fn an_error_or_panic_of_a_backend_fails_only_that_call() {
    let fault = Arc::new(FaultLayer::new(MemoryFileSystem::new(Default::default()), 1));
    let (client, task) = (client(&[]), task());
    client.mount(b"a:", Arc::clone(&fault) as _, &ClientMountArgs::default()).unwrap();
    put(&client, &task, "a:/f", b"data");
    let file = open(&client, &task, "a:/f", 2).unwrap();
    let mut room = [0; 4];
    for (action, expected) in
        [(FaultAction::Panic, Errno::EIO), (FaultAction::Fail(Errno::ENOSPC), Errno::ENOSPC)]
    {
        let resolve = Method::Shortcut(Shortcut::Resolve);
        let methods = [Method::Read, Method::Write, resolve, Method::Open];
        let rule = |&method: &Method| FaultRule {
            method: Some(method),
            when: FaultTrigger::Always,
            action,
        };
        fault.set_rules(&methods.iter().map(rule).collect::<Vec<_>>());
        assert_eq!(errno(client.pread(&task, &file, &mut room, 0)), expected);
        assert_eq!(errno(client.write(&task, &file, b"x")), expected);
        assert_eq!(errno(get(&client, &task, "a:/other")), expected);
        assert_eq!(errno(get(&client, &task, "a:/f")), expected);
    }
    fault.set_rules(&[]);
    assert_eq!(client.pread(&task, &file, &mut room, 0), Ok(4));
}

#[test]
fn a_thousand_threads_open_write_and_close() {
    let (client, task) = (client(&["a:"]), task());
    std::thread::scope(|scope| {
        for number in 0..1000 {
            let (client, task) = (&client, &task);
            let run = move || {
                let path = format!("a:/{}", number % 50);
                let file = open(client, task, &path, CREATE).unwrap();
                client.pwrite(task, &file, &[1; 100], number * 100).unwrap();
                file.close(task).unwrap();
                if number % 10 == 0 {
                    let _ = client.unlink(task, WalkStart::Cwd, path.as_bytes());
                }
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, run).unwrap();
        }
    });
    assert_eq!(client.mounts()[0].users, 0);
    client.unmount(b"a:", false).unwrap();
}

#[test]
fn locks_work_if_the_backend_has_none() {
    let dir = tempfile::tempdir().unwrap();
    let (client, task) = (client(&[]), task());
    let fs = Passthrough::new(dir.path(), Default::default()).unwrap();
    client.mount(b"p:", Arc::new(fs), &ClientMountArgs::default()).unwrap();
    let first = open(&client, &task, "p:/f", CREATE).unwrap();
    let second = open(&client, &task, "p:/f", 2).unwrap();
    let write = Lock { typ: LockType::Write, start: 0, end: 9, pid: 0 };
    client.set_lock(&task, &first, LockFamily::OpenFile, write).unwrap();
    let refused = client.set_lock(&task, &second, LockFamily::OpenFile, write);
    assert_eq!(errno(refused), Errno::EAGAIN);
    let waiting = client.wait_for_lock(&task, &second, LockFamily::OpenFile, write).unwrap();
    assert!(!waiting.is_done());
    drop(first);
    assert_eq!(waiting.wait().0, Ok(0));
}

#[test]
fn real_paths_are_without_links_and_dots_and_cross_mounts() {
    let (client, task) = (client(&["a:", "/in"]), task());
    for dir in ["a:/d", "a:/d/e"] {
        client.mkdir(&task, WalkStart::Cwd, dir.as_bytes(), 0o755).unwrap();
    }
    client.mount(b"a:/d/e", memory(), &ClientMountArgs::default()).unwrap();
    put(&client, &task, "a:/d/f", b"");
    put(&client, &task, "a:/d/e/g", b"");
    for (text, path) in
        [("d/e/../f", "a:/l"), ("/in", "a:/abs"), ("loop", "a:/loop"), ("none", "a:/no")]
    {
        client.symlink(&task, text.as_bytes(), WalkStart::Cwd, path.as_bytes()).unwrap();
    }
    for (path, expected) in [
        ("a:", "a:/"),
        ("a:/d/./e/..", "a:/d"),
        ("a:/l", "a:/d/f"),
        ("a:/d/e", "a:/d/e"),
        ("a:/d/e/g", "a:/d/e/g"),
        ("a:/abs", "/in"),
        ("/in/", "/in"),
    ] {
        let found = client.real_path(&task, path.as_bytes()).map(String::from_utf8);
        assert_eq!(found, Ok(Ok(expected.to_owned())), "{path}");
    }
    for (path, expected) in
        [("a:/loop", Errno::ELOOP), ("a:/no", Errno::ENOENT), ("a:/l/", Errno::ENOTDIR)]
    {
        assert_eq!(errno(client.real_path(&task, path.as_bytes())), expected, "{path}");
    }
    assert!(matches!(client.real_path(&task, b"/"), Err(CallError::Outside(_))));
}

#[test]
fn lock_ranges_are_relative_to_start_position_and_end() {
    let (client, task) = (client(&["a:"]), task());
    put(&client, &task, "a:/f", &[0; 100]);
    let file = open(&client, &task, "a:/f", CREATE).unwrap();
    client.lseek(&task, &file, 40, 0).unwrap();
    const END: u64 = i64::MAX as u64;
    for (whence, start, len, expected) in [
        (0, 10, 5, Ok((10, 14))),
        (0, 10, 0, Ok((10, END))),
        (1, 0, 1, Ok((40, 40))),
        (1, 0, -40, Ok((0, 39))),
        (2, -1, 1, Ok((99, 99))),
        (2, 5, 0, Ok((105, END))),
        (0, 10, -10, Ok((0, 9))),
        (0, 10, -11, Err(Errno::EINVAL)),
        (0, -1, 5, Err(Errno::EINVAL)),
        (1, -41, 0, Err(Errno::EINVAL)),
        (3, 0, 0, Err(Errno::EINVAL)),
        (1, i64::MAX, 0, Err(Errno::EOVERFLOW)),
        (0, i64::MAX, 2, Err(Errno::EOVERFLOW)),
        (0, 0, i64::MIN, Err(Errno::EINVAL)),
    ] {
        let range = client.lock_range(&task, &file, whence, (start, len));
        assert_eq!(range, expected.map_err(CallError::Errno), "{whence} {start} {len}");
    }
}

#[test]
fn a_sync_reaches_all_mounts() {
    let (client, task) = (client(&["a:", "b:"]), task());
    client.sync(&task);
    for target in ["a:", "b:"] {
        let snapshot = client.statistics(target.as_bytes()).unwrap();
        let synced = snapshot.ops.iter().find(|stats| stats.op.name() == "SYNCFS");
        assert_eq!(synced.map(|stats| stats.latency.count), Some(1), "{target}");
    }
}

/// A file system that counts how often it is to release memory. It leaves walks to the client.
struct ReleaseCounter {
    inner: MemoryFileSystem,
    released: AtomicUsize,
}

impl FileSystem for ReleaseCounter {
    delegate!(to inner, except lookup, lifecycle);

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> defuse_fs::Result<Entry> {
        FileSystem::lookup(&self.inner, cx, parent, name)
    }

    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        Some(self)
    }
}

impl Lifecycle for ReleaseCounter {
    fn memory_pressure(&self) {
        self.released.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_process_that_is_short_of_memory_releases_names_and_what_file_systems_keep() {
    let (client, task) = (client(&[]), task());
    let inner = MemoryFileSystem::new(defuse_memory::MemoryOptions::default());
    let fs = Arc::new(ReleaseCounter { inner, released: AtomicUsize::new(0) });
    client.mount(b"a:", Arc::clone(&fs) as _, &ClientMountArgs::default()).unwrap();
    put(&client, &task, "a:/f", b"text");
    drop(open(&client, &task, "a:/f", 0).unwrap());
    let cached = || client.statistics(b"a:").unwrap().gauges["names_cached"];
    assert!(cached() > 0);
    client.release_memory();
    assert_eq!((cached(), fs.released.load(Ordering::SeqCst)), (0, 1));
    open(&client, &task, "a:/f", 0).unwrap();
}

/// A file system of which nothing is cached, with birth times that only getattr returns, or without
/// any.
struct UncachedMemory {
    inner: MemoryFileSystem,
    birth_times: bool,
    requests: AtomicUsize,
}

impl FileSystem for UncachedMemory {
    delegate!(to inner, except caps, lookup, getattr);

    fn caps(&self) -> Caps {
        Caps { birth_times: self.birth_times, ..self.inner.caps() }
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> defuse_fs::Result<Entry> {
        let mut entry = FileSystem::lookup(&self.inner, cx, parent, name)?;
        (entry.valid_for, entry.attr.valid_for, entry.attr.btime) = Default::default();
        Ok(entry)
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> defuse_fs::Result<Attr> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let attr = FileSystem::getattr(&self.inner, cx, ino, fh)?;
        Ok(Attr { valid_for: Default::default(), ..attr })
    }
}

/// The client requested the attributes of each name again, which it had got with the name a moment
/// before.
#[test]
fn a_look_at_a_name_is_one_request_unless_it_tells_no_birth_time() {
    for (birth_times, expected) in [(false, 0), (true, 1)] {
        let (client, task) = (client(&[]), task());
        let inner = MemoryFileSystem::new(defuse_memory::MemoryOptions::default());
        let fs = Arc::new(UncachedMemory { inner, birth_times, requests: AtomicUsize::new(0) });
        client.mount(b"a:", Arc::clone(&fs) as _, &ClientMountArgs::default()).unwrap();
        client.mkdir(&task, WalkStart::Cwd, b"a:/d", 0o755).unwrap();
        put(&client, &task, "a:/d/f", b"text");
        client.symlink(&task, b"d/f", WalkStart::Cwd, b"a:/link").unwrap();
        for (path, size) in [("a:/d/f", 4), ("a:/link", 4), ("a:/d/./f", 4)] {
            fs.requests.store(0, Ordering::SeqCst);
            let stat = client.stat(&task, WalkStart::Cwd, path.as_bytes(), true).unwrap();
            assert_eq!((stat.attr.size, stat.attr.btime.is_some()), (size, birth_times), "{path}");
            assert_eq!(fs.requests.load(Ordering::SeqCst), expected, "{path}");
        }
        // The end of a path that leads up was not looked up last.
        let (above, root) = (b"a:/d/..", client.stat(&task, WalkStart::Cwd, b"a:/", true).unwrap());
        assert_eq!(
            client.stat(&task, WalkStart::Cwd, above, true).unwrap().attr.st_ino,
            root.attr.st_ino
        );
    }
}
