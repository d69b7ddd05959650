//! Attacks of clients on the server of a socket and on each other. The server runs as root. The
//! clients are threads of this process with the credentials of other users.

mod raw;
mod users;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use defuse_fs::{
    Caller, Caps, Context, CopyRange, DirBuf, DirItem, DirSink, Entry, Errno, Fallocate, File,
    FileKind, FileSystem, Ino, InterruptToken, Io, Lock, LockKind, LockOwner, LockRequest,
    LockType, LockWait, Name, NewNode, OpenArgs, OpenFlags, RenameFlags, Result, SetAttr, SetTime,
    SetXattrFlags, SliceSource, Timestamp, WriteArgs, WriteBuf, XattrName, delegate,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{ConnectionHandover, RemoteClient, RemoteOptions};
use defuse_socket::{AdmissionPolicy, ConnectionLimits, ServerOptions, SocketServer};
use users::as_user;

const USER: u32 = 4321;
const OTHER: u32 = 4322;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root can become another user");
    }
    root
}

/// A server that admits two users, on which `run` carries out an attack.
fn with_server(options: ServerOptions, run: impl FnOnce(&SocketServer, &str) + Send) {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = format!("@defuse-attacks-{}-{number}", std::process::id());
    let admission = AdmissionPolicy::Users(vec![USER, OTHER]);
    let memory =
        MemoryFileSystem::new(MemoryOptions { root_perm: 0o777, ..MemoryOptions::default() });
    let options = ServerOptions { admission, ..options };
    let server = SocketServer::bind(path.as_ref(), Arc::new(memory), options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&server, &path)));
        server.shut_down();
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
}

fn connect(path: &str, uid: u32) -> RemoteClient {
    let connect = || RemoteClient::connect(path.as_ref(), RemoteOptions::default()).unwrap();
    if uid == 0 { connect() } else { as_user(uid, connect) }
}

fn context(uid: u32) -> Context<'static> {
    Context::new(Caller { uid, gid: uid, pid: 1 })
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn flags(flags: u32) -> OpenArgs {
    OpenArgs { flags: OpenFlags(flags), kill_suidgid: false }
}

fn create(client: &RemoteClient, uid: u32, text: &str, perm: u32) -> (Entry, File) {
    let cx = context(uid);
    let node = NewNode::new(FileKind::Regular, 0o666, cx.caller);
    let args = flags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL);
    let (entry, opened) = client.create(&cx, Ino::ROOT, name(text), &node, args).unwrap();
    chmod(client, uid, entry.ino, perm).unwrap();
    (entry, File { ino: entry.ino, fh: opened.fh })
}

fn chmod(client: &RemoteClient, uid: u32, ino: Ino, perm: u32) -> Result<u32> {
    let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
    client.setattr(&context(uid), ino, None, &set).map(|attr| attr.perm)
}

fn write(client: &RemoteClient, uid: u32, file: File, bytes: &[u8]) -> Result<usize> {
    let args = WriteArgs { flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    client.write(&context(uid), file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes)))
}

fn find(client: &RemoteClient, uid: u32, text: &str) -> Ino {
    client.lookup(&context(uid), Ino::ROOT, name(text)).unwrap().ino
}

fn open(client: &RemoteClient, uid: u32, ino: Ino, how: u32) -> Result<File> {
    client.open(&context(uid), ino, flags(how)).map(|opened| File { ino, fh: opened.fh })
}

/// `serve --admit UID` by root made that user root: the server carried out every request of an
/// admitted user. The user created a block device, set mode 4755 on a file of root and gave it
/// `security.capability`.
#[test]
fn an_admitted_user_has_only_its_own_rights() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user) = (connect(path, 0), connect(path, USER));
        create(&root, 0, "secret", 0o600);
        create(&root, 0, "shown", 0o644);
        create(&root, 0, "open", 0o666);
        let cx = context(USER);
        let [secret, shown, open_to_all] =
            ["secret", "shown", "open"].map(|text| find(&user, USER, text));
        let make = |kind, perm| {
            let node = NewNode { rdev: 0x0800, ..NewNode::new(kind, perm, cx.caller) };
            user.mknod(&cx, Ino::ROOT, name("made"), &node).map(|entry| entry.attr.uid)
        };
        assert_eq!(make(FileKind::BlockDevice, 0o666), Err(Errno::EPERM));
        assert_eq!(make(FileKind::CharDevice, 0o666), Err(Errno::EPERM));
        assert_eq!(make(FileKind::Fifo, 0o666), Ok(USER));
        let node = NewNode::new(FileKind::Regular, 0o666, context(0).caller);
        assert!(user.mknod(&cx, Ino::ROOT, name("roots"), &node).is_err());
        let label = (XattrName::new(b"security.capability").unwrap(), &b"x"[..]);
        let node =
            NewNode { security: Some(label), ..NewNode::new(FileKind::Regular, 0o666, cx.caller) };
        if let Ok(made) = user.mknod(&cx, Ino::ROOT, name("labelled"), &node) {
            let found = user.getxattr(&cx, made.ino, label.0, 100);
            assert!(found.is_err(), "a label at birth");
        }
        for ino in [secret, shown, open_to_all] {
            let set = |set: SetAttr| user.setattr(&cx, ino, None, &set).err();
            let perm = SetAttr { perm: Some(0o4755), ..SetAttr::default() };
            assert_eq!(set(perm), Some(Errno::EPERM));
            let time = Some(SetTime::At(Timestamp { secs: 1, nanos: 0 }));
            assert_eq!(set(SetAttr { mtime: time, ..SetAttr::default() }), Some(Errno::EPERM));
            for uid in [0, USER, OTHER] {
                let owner = SetAttr { uid: Some(uid), ..SetAttr::default() };
                assert_eq!(set(owner), Some(Errno::EPERM), "chown to {uid}");
                let group = SetAttr { gid: Some(uid), ..SetAttr::default() };
                assert_eq!(set(group), Some(Errno::EPERM), "chgrp to {uid}");
            }
            for text in ["security.capability", "trusted.x", "system.posix_acl_access"] {
                let text = XattrName::new(text.as_bytes()).unwrap();
                let set = user.setxattr(&cx, ino, text, b"x", SetXattrFlags::default());
                assert_eq!(set, Err(Errno::EPERM), "{text:?}");
                assert_eq!(user.removexattr(&cx, ino, text), Err(Errno::EPERM), "{text:?}");
            }
        }
        let how = [0, OpenFlags::WRONLY, OpenFlags::RDWR, OpenFlags::TRUNC];
        assert!(how.iter().all(|&how| open(&user, USER, secret, how) == Err(Errno::EACCES)));
        assert!(how[1..].iter().all(|&how| open(&user, USER, shown, how) == Err(Errno::EACCES)));
        assert!(open(&user, USER, shown, 0).is_ok());
        assert_eq!(open(&user, USER, shown, OpenFlags::NOATIME), Err(Errno::EPERM));
        let size = SetAttr { size: Some(0), ..SetAttr::default() };
        assert_eq!(user.setattr(&cx, shown, None, &size).err(), Some(Errno::EACCES));
        assert_eq!(user.link(&cx, shown, Ino::ROOT, name("hard")).err(), Some(Errno::EPERM));
        let both = |flags| {
            let to = (Ino::ROOT, name("moved"));
            user.rename(&cx, (Ino::ROOT, name("made")), to, RenameFlags(flags))
        };
        assert_eq!(both(4), Err(Errno::EPERM), "RENAME_WHITEOUT makes a device");
        assert_eq!(both(0), Ok(()));
    });
}

/// CREATE without `O_EXCL` opened an existing file without a permission check.
#[test]
fn create_opens_no_existing_file() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user, cx) = (connect(path, 0), connect(path, USER), context(USER));
        create(&root, 0, "secret", 0o600);
        let create = |text, how| {
            let node = NewNode::new(FileKind::Regular, 0o600, cx.caller);
            let args = flags(how | OpenFlags::CREAT);
            let made = user.create(&cx, Ino::ROOT, name(text), &node, args);
            made.map(|(entry, _)| (entry.attr.uid, entry.attr.size))
        };
        for how in [0, OpenFlags::RDWR, OpenFlags::TRUNC] {
            assert_eq!(create("secret", how), Err(Errno::ESTALE));
        }
        assert_eq!(create("new", OpenFlags::RDWR), Ok((USER, 0)));
        chmod(&root, 0, Ino::ROOT, 0o755).unwrap();
        assert_eq!(create("newer", OpenFlags::RDWR), Err(Errno::EACCES));
    });
}

/// In a sticky directory a user removed a file of root with two requests: between the check of the
/// owner and the removal, another client of the same user moved the file of root to the name. The
/// names of the directory are now locked meanwhile.
#[test]
fn names_of_root_stay_in_a_sticky_directory_while_names_change() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user) = (connect(path, 0), connect(path, USER));
        chmod(&root, 0, Ino::ROOT, 0o1777).unwrap();
        let cx = context(USER);
        let made = |client: &RemoteClient, uid| {
            let node = NewNode::new(FileKind::Regular, 0o666, context(uid).caller);
            client.mknod(&context(uid), Ino::ROOT, name("x"), &node).is_ok()
        };
        std::thread::scope(|scope| {
            let removes = scope.spawn(|| {
                for _ in 0..3000 {
                    made(&user, USER);
                    let _ = user.unlink(&cx, Ino::ROOT, name("x"));
                }
            });
            while !removes.is_finished() {
                if made(&root, 0) {
                    let kept = root.unlink(&context(0), Ino::ROOT, name("x"));
                    assert_eq!(kept, Ok(()), "the user has removed a file of root");
                }
            }
        });
    });
}

struct ListedKinds(Vec<(String, bool)>);

impl DirSink for ListedKinds {
    fn wants_entries(&self) -> bool {
        true
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        self.0.push((String::from_utf8_lossy(item.name).into_owned(), entry.is_some()));
    }
}

/// READDIRPLUS returned the inodes of a directory that the user could read but not search, and with
/// an inode the user can open a file.
#[test]
fn readdirplus_returns_no_inodes_of_a_directory_without_search_permission() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user) = (connect(path, 0), connect(path, USER));
        create(&root, 0, "file", 0o666);
        for (perm, given) in [(0o755, true), (0o744, false)] {
            chmod(&root, 0, Ino::ROOT, perm).unwrap();
            let cx = context(USER);
            let opened = user.opendir(&cx, Ino::ROOT, OpenFlags(0)).unwrap();
            let mut listed = ListedKinds(Vec::new());
            let dir = File { ino: Ino::ROOT, fh: opened.fh };
            user.readdir(&cx, dir, 0, &mut DirBuf::new(&mut listed)).unwrap();
            let file = listed.0.iter().find(|(text, _)| text == "file").cloned();
            assert_eq!(file, Some(("file".to_owned(), given)), "{perm:o}");
        }
        assert_eq!(user.lookup(&context(USER), Ino::ROOT, name("file")).err(), Some(Errno::EACCES));
    });
}

/// A client left out the flag that clears set-user-id, and the server kept mode 6777 on the file of
/// root that the user had changed. With fallocate(2) and copy_file_range(2), `memory:` always kept
/// it.
#[test]
fn every_file_that_a_user_changes_loses_set_user_id() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user, cx) = (connect(path, 0), connect(path, USER), context(USER));
        let (entry, of_root) = create(&root, 0, "file", 0o6777);
        write(&root, 0, of_root, &[1; 8192]).unwrap();
        let file = open(&user, USER, find(&user, USER, "file"), OpenFlags::RDWR).unwrap();
        let truncate = || {
            let set = SetAttr { size: Some(8000), ..SetAttr::default() };
            user.setattr(&cx, file.ino, Some(file.fh), &set).map(drop)
        };
        let allocate =
            |mode| user.fallocate(&cx, file, Fallocate { mode, offset: 0, length: 4096 });
        let copy = || {
            let range = CopyRange {
                src: file,
                src_offset: 0,
                dst: file,
                dst_offset: 4096,
                length: 100,
                flags: 0,
            };
            user.copy_file_range(&cx, &range).map(drop)
        };
        let emptied = || open(&user, USER, file.ino, OpenFlags::RDWR | OpenFlags::TRUNC).map(drop);
        let written = || write(&user, USER, file, b"x").map(drop);
        let changes: [(&str, &dyn Fn() -> Result<()>); 6] = [
            ("write", &written),
            ("truncate", &truncate),
            ("fallocate", &|| allocate(0)),
            ("punch", &|| allocate(3)),
            ("copy", &copy),
            ("open", &emptied),
        ];
        for (what, change) in changes {
            assert_eq!(chmod(&root, 0, entry.ino, 0o6777), Ok(0o6777));
            assert_eq!(change(), Ok(()), "{what}");
            let perm = root.getattr(&context(0), entry.ino, None).unwrap().perm;
            assert_eq!(perm, 0o777, "{what}");
        }
    });
}

fn request(kind: LockKind, owner: LockOwner, typ: LockType) -> LockRequest {
    let end = if kind == LockKind::Flock { u64::MAX } else { 9 };
    LockRequest { kind, owner, lock: Lock { typ, start: 0, end, pid: 1 }, wait: false }
}

/// The server passed on the lock owner that the client named. A client that named the owner of
/// another client's lock, a small number, shared its locks and released them.
#[test]
fn no_client_releases_a_lock_of_another_by_naming_its_owner() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (one, other) = (connect(path, USER), connect(path, OTHER));
        let (_, file) = create(&one, USER, "locked", 0o666);
        let theirs = open(&other, OTHER, find(&other, OTHER, "locked"), OpenFlags::RDWR).unwrap();
        for (kind, owner) in [
            (LockKind::Flock, LockOwner(7)),
            (LockKind::Posix, LockOwner(7)),
            (LockKind::Posix, LockOwner::for_process(1)),
        ] {
            let (locks, cx) = (request(kind, owner, LockType::Write), context(OTHER));
            one.setlk(&context(USER), file, &locks).unwrap();
            other.setlk(&cx, theirs, &request(kind, owner, LockType::Unlock)).unwrap();
            other.flush(&cx, theirs, owner).unwrap();
            assert_eq!(other.setlk(&cx, theirs, &locks), Err(Errno::EAGAIN), "{kind:?}");
            one.setlk(&context(USER), file, &request(kind, owner, LockType::Unlock)).unwrap();
        }
    });
}

/// A user with read permission took a write lock on a file, and blocked all writers.
#[test]
fn a_record_lock_needs_a_file_that_is_open_for_it() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user) = (connect(path, 0), connect(path, USER));
        create(&root, 0, "file", 0o644);
        let file = open(&user, USER, find(&user, USER, "file"), 0).unwrap();
        let ask = |kind, typ| user.setlk(&context(USER), file, &request(kind, LockOwner(3), typ));
        assert_eq!(ask(LockKind::Posix, LockType::Write), Err(Errno::EBADF));
        assert_eq!(ask(LockKind::Posix, LockType::Read), Ok(()));
        assert_eq!(ask(LockKind::Flock, LockType::Write), Ok(()));
    });
}

fn make_limited(limits: ConnectionLimits) -> ServerOptions {
    ServerOptions { limits, ..ServerOptions::default() }
}

fn resize(client: &RemoteClient, uid: u32, ino: Ino, size: u64) -> Result<()> {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    client.setattr(&context(uid), ino, None, &set).map(drop)
}

/// One request to map a hole of 64 GiB copied the hole, byte by byte, into the memory of the
/// server.
#[test]
fn mapping_a_hole_takes_no_memory() {
    with_server(ServerOptions::default(), |_, path| {
        let (client, cx) = (connect(path, 0), context(0));
        let (_, file) = create(&client, 0, "sparse", 0o644);
        let (size, far) = (1 << 36, 40 << 30);
        resize(&client, 0, file.ino, size).unwrap();
        let write_at = |offset, bytes: &[u8]| {
            let args = WriteArgs { offset, flags: OpenFlags(2), ..WriteArgs::default() };
            client.write(&cx, file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes))).unwrap()
        };
        write_at(far, b"data");
        let memory = std::fs::File::from(client.map(&cx, file, 0..size, true).unwrap());
        let read_at = |offset| {
            let mut bytes = [9; 4];
            memory.read_exact_at(&mut bytes, offset).unwrap();
            bytes
        };
        assert_eq!((read_at(0), &read_at(far)), ([0; 4], b"data"));
        assert!(memory.metadata().unwrap().blocks() * 512 < 1 << 20);
        // Later writes are visible, and stores through the mapping reach the file.
        write_at(1 << 30, b"more");
        assert_eq!(&read_at(1 << 30), b"more");
        memory.write_all_at(b"mine", 2 << 30).unwrap();
        client.fsync(&cx, file, true).unwrap();
        let attr = client.getattr(&cx, file.ino, None).unwrap();
        assert!(attr.size == size && attr.blocks * 512 < 1 << 20, "{attr:?}");
        drop(memory);
        client.unmap(&cx, file.ino).unwrap();
        assert_eq!(read(&client, file, 2 << 30, 4), b"mine");
    });
}

fn read(client: &RemoteClient, file: File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut sink = defuse_fs::SliceSink::new(&mut bytes);
    let mut out = defuse_fs::ReadBuf::new(&mut sink, len);
    let args = defuse_fs::ReadArgs { offset, ..defuse_fs::ReadArgs::default() };
    client.read(&context(0), file, args, &mut out).unwrap();
    let filled = out.filled_len();
    bytes.truncate(filled);
    bytes
}

/// The server copied the data of every mapping of a client, without a limit.
#[test]
fn a_client_maps_no_more_than_its_share() {
    let limits = ConnectionLimits { mapped_bytes: 1 << 20, ..ConnectionLimits::default() };
    with_server(make_limited(limits), |_, path| {
        let (one, other, cx) = (connect(path, 0), connect(path, 0), context(0));
        let (_, file) = create(&one, 0, "file", 0o644);
        assert_eq!(write(&one, 0, file, &vec![7; 2 << 20]), Ok(2 << 20));
        let map = |from: u64, to: u64| one.map(&cx, file, from << 10..to << 10, true).err();
        assert_eq!(map(0, 2048), Some(Errno::ENOMEM));
        assert_eq!(map(0, 768), None);
        assert_eq!(map(1024, 1536), Some(Errno::ENOMEM));
        assert_eq!(map(0, 512), None, "what is there already");
        // Another client has its own share.
        let theirs = open(&other, 0, find(&other, 0, "file"), 0).unwrap();
        assert!(other.map(&cx, theirs, 1 << 20..3 << 19, false).is_ok());
        for _ in 0..2 {
            one.unmap(&cx, file.ino).unwrap();
        }
        assert_eq!(map(1024, 1536), None);
    });
}

/// A client truncated the memory that it shared with others, ftruncate(2), and each of them that
/// used its mapping was killed by SIGBUS. A client with read permission only reopened the memory
/// for writing.
#[test]
fn no_client_truncates_the_memory_of_a_mapping_and_readers_cannot_write_it() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user) = (connect(path, 0), connect(path, USER));
        let (_, of_root) = create(&root, 0, "shown", 0o644);
        assert_eq!(write(&root, 0, of_root, &[7; 8192]), Ok(8192));
        let shared = root.map(&context(0), of_root, 0..8192, true).unwrap();
        for len in [0, 4096] {
            let refused = rustix::fs::ftruncate(&shared, len);
            assert_eq!(refused, Err(rustix::io::Errno::PERM), "{len}");
        }
        let file = open(&user, USER, find(&user, USER, "shown"), 0).unwrap();
        let cx = context(USER);
        assert_eq!(user.map(&cx, file, 0..8192, true).err(), Some(Errno::EACCES));
        let memory: OwnedFd = user.map(&cx, file, 0..8192, false).unwrap();
        as_user(USER, || {
            assert_eq!(rustix::io::write(&memory, b"x"), Err(rustix::io::Errno::BADF));
            let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
            let again = std::fs::OpenOptions::new().write(true).open(path);
            assert!(again.is_err(), "open for writing");
            let mode = rustix::fs::Mode::from_raw_mode(0o666);
            assert!(rustix::fs::fchmod(&memory, mode).is_err());
        });
    });
}

/// The memory of each mapping had the length of the longest possible file: a client with read
/// permission filled 3 GiB of the server for a file of one byte, far beyond the limit of a
/// connection.
#[test]
fn the_memory_of_a_mapping_is_no_longer_than_the_file() {
    with_server(ServerOptions::default(), |_, path| {
        let (client, cx) = (connect(path, 0), context(0));
        let (_, file) = create(&client, 0, "file", 0o644);
        assert_eq!(write(&client, 0, file, b"x"), Ok(1));
        let map = |writes| std::fs::File::from(client.map(&cx, file, 0..1 << 40, writes).unwrap());
        let (memory, shared) = (map(false), map(true));
        let len = || memory.metadata().unwrap().len();
        assert_eq!(len(), 4096);
        // It grows with the file, and what comes later is seen.
        resize(&client, 0, file.ino, 10_000).unwrap();
        assert_eq!(len(), 12_288);
        let range = Fallocate { mode: 0, offset: 0, length: 20_000 };
        client.fallocate(&cx, file, range).unwrap();
        assert_eq!(len(), 20_480);
        let args = WriteArgs { offset: 50_000, flags: OpenFlags(2), ..WriteArgs::default() };
        let mut source = SliceSource::new(b"far");
        assert_eq!(client.write(&cx, file, args, &mut WriteBuf::new(&mut source)), Ok(3));
        let mut bytes = [0; 3];
        memory.read_exact_at(&mut bytes, 50_000).unwrap();
        assert_eq!((len(), &bytes), (53_248, b"far"));
        // A client that may write makes it longer for itself, and none of the added bytes are the
        // file's.
        rustix::fs::ftruncate(&shared, 1 << 40).unwrap();
        shared.write_all_at(b"beyond", 1 << 30).unwrap();
        resize(&client, 0, file.ino, 60_000).unwrap();
        client.fsync(&cx, file, true).unwrap();
        assert_eq!(client.getattr(&cx, file.ino, None).unwrap().size, 60_000);
        drop((memory, shared));
        client.unmap(&cx, file.ino).unwrap();
        client.unmap(&cx, file.ino).unwrap();
        assert_eq!(read(&client, file, 50_000, 4), b"far\0");
    });
}

/// After FALLOC_FL_COLLAPSE_RANGE the memory of a mapping kept the bytes that had been at the old
/// end. When the file grew again they reappeared, and were written into it.
#[test]
fn data_beyond_the_end_of_a_mapped_file_never_reappears() {
    const COLLAPSE: u32 = 8;
    with_server(ServerOptions::default(), |_, path| {
        let (client, cx) = (connect(path, 0), context(0));
        let (_, file) = create(&client, 0, "file", 0o644);
        let pages: Vec<u8> = (1..=3).flat_map(|page| [page; 4096]).collect();
        assert_eq!(write(&client, 0, file, &pages), Ok(pages.len()));
        let memory = std::fs::File::from(client.map(&cx, file, 0..5 << 12, true).unwrap());
        let seen = |page: u64| {
            let mut byte = [9];
            memory.read_exact_at(&mut byte, page << 12).unwrap();
            (byte[0], read(&client, file, page << 12, 1).first().copied())
        };
        assert_eq!((seen(0), seen(2)), ((1, Some(1)), (3, Some(3))));
        let range = Fallocate { mode: COLLAPSE, offset: 0, length: 4096 };
        client.fallocate(&cx, file, range).unwrap();
        assert_eq!((seen(0), seen(1), seen(2)), ((2, Some(2)), (3, Some(3)), (0, None)));
        resize(&client, 0, file.ino, 3 << 12).unwrap();
        assert_eq!(seen(2), (0, Some(0)), "grown by ftruncate(2)");
        // Stored beyond the end, after which the file grows by a write behind that.
        memory.write_all_at(&[8; 4096], 3 << 12).unwrap();
        let args = WriteArgs { offset: 4 << 12, flags: OpenFlags(2), ..WriteArgs::default() };
        let mut source = SliceSource::new(b"end");
        assert_eq!(client.write(&cx, file, args, &mut WriteBuf::new(&mut source)), Ok(3));
        assert_eq!(seen(3), (0, Some(0)), "grown by a write");
        drop(memory);
        client.unmap(&cx, file.ino).unwrap();
        let mut whole = [[2; 4096], [3; 4096], [0; 4096], [0; 4096]].concat();
        whole.extend(b"end");
        assert_eq!(read(&client, file, 0, 1 << 16), whole);
    });
}

/// A client that requested resources without limit used up the resources of all others: 18,280
/// waiting locks took 298 MB of the server.
#[test]
fn a_client_has_no_more_open_files_inodes_locks_and_waits_than_its_share() {
    let limits =
        ConnectionLimits { lookups: 9, opens: 4, locks: 3, lock_waits: 2, mapped_bytes: 0 };
    with_server(make_limited(limits), |_, path| {
        let (maker, client, cx) = (connect(path, 0), connect(path, 0), context(0));
        let mut inode = Ino::ROOT;
        for number in 0..9 {
            let (_, file) = create(&maker, 0, &format!("f{number}"), 0o644);
            maker.release(&cx, file, defuse_fs::ReleaseArgs::default()).unwrap();
            inode = client.lookup(&cx, Ino::ROOT, name(&format!("f{number}"))).unwrap().ino;
        }
        let again = client.lookup(&cx, Ino::ROOT, name("f0"));
        assert_eq!(again.err(), Some(Errno::ENFILE));
        let files: Vec<_> = (0..4).map(|_| open(&client, 0, inode, 2).unwrap()).collect();
        assert_eq!(open(&client, 0, inode, 2), Err(Errno::EMFILE));
        assert_eq!(client.opendir(&cx, Ino::ROOT, OpenFlags(0)).err(), Some(Errno::EMFILE));
        let lock = |start: u64, typ| {
            let lock = Lock { typ, start, end: start, pid: 1 };
            let owner = LockOwner(1);
            let request = LockRequest { kind: LockKind::Posix, owner, lock, wait: false };
            client.setlk(&cx, files[0], &request)
        };
        for start in [0, 10, 20] {
            assert_eq!(lock(start, LockType::Write), Ok(()));
        }
        assert_eq!(lock(30, LockType::Write), Err(Errno::ENOLCK));
        assert_eq!((lock(0, LockType::Unlock), lock(30, LockType::Read)), (Ok(()), Ok(())));
        let mapped = client.map(&cx, files[0], 0..4096, false).err();
        assert_eq!(mapped, None, "an empty file takes no memory");
        // The holder of the lock is another owner of the same client.
        let waits = |owner| {
            let lock = Lock { typ: LockType::Write, start: 30, end: 30, pid: 1 };
            let lock =
                LockRequest { kind: LockKind::Posix, owner: LockOwner(owner), lock, wait: true };
            let (sender, answer) = std::sync::mpsc::channel();
            let token = Arc::new(InterruptToken::default());
            let send = Box::new(move |taken| {
                let _ = sender.send(taken);
            });
            let wait = LockWait::new((files[0], lock), cx.caller, owner, token.clone(), send);
            client.setlkw(wait);
            (answer, token)
        };
        lock(10, LockType::Unlock).unwrap();
        let waiting = [waits(2), waits(3)];
        let patience = std::time::Duration::from_secs(30);
        assert_eq!(waits(4).0.recv_timeout(patience), Ok(Err(Errno::ENOLCK)));
        for (answer, token) in waiting {
            token.trip();
            assert_eq!(answer.recv_timeout(patience), Ok(Err(Errno::EINTR)));
        }
    });
}

/// One user opened connections without limit, and no other user could connect.
#[test]
fn a_user_has_no_more_connections_than_its_share() {
    if !is_root() {
        return;
    }
    let options = ServerOptions { max_connections_of_user: 2, ..ServerOptions::default() };
    with_server(options, |_, path| {
        let _held = [connect(path, USER), connect(path, USER)];
        let another = |uid| {
            as_user(uid, || RemoteClient::connect(path.as_ref(), RemoteOptions::default()).is_ok())
        };
        assert!(!another(USER) && another(OTHER));
    });
}

/// A copy of a connection waits at the server until a child uses it. No client gets a copy by
/// guessing, by requesting it twice or on the socket of another one, and each counts as a
/// connection of its user.
#[test]
fn copies_for_children_are_given_to_nobody_else_and_are_limited() {
    const UNKNOWN: u128 = 77;
    const GETATTR: u32 = 3;
    /// Requests a copy of a connection (docs/socket.md).
    const COPY: u32 = 1 << 30;
    if !is_root() {
        return;
    }
    let options = ServerOptions { max_connections_of_user: 4, ..ServerOptions::default() };
    with_server(options, |server, path| {
        let client = connect(path, USER);
        let (_, file) = create(&client, USER, "own", 0o600);
        assert_eq!(write(&client, USER, file, b"own"), Ok(3));
        let path = std::path::Path::new(path);
        let copy_of =
            |copy_of: u128, own: u128| [copy_of.to_ne_bytes(), own.to_ne_bytes()].concat();
        let asks = |body: &[u8]| {
            let socket = raw::connect(path);
            send(&socket, &raw::request(COPY, 1, 0, 0, body));
            socket
        };
        // A number that no connection has, none, and messages that are too short and too long.
        let (guess, none) = (copy_of(UNKNOWN, 5), copy_of(0, 6));
        for body in [&guess[..], &none, &guess[..31], &[&guess[..], &[0]].concat()] {
            for uid in [USER, OTHER, 4323] {
                let socket = as_user(uid, || asks(body));
                assert!(is_ended(&socket), "user {uid}, {} bytes", body.len());
            }
        }
        // Within the limit of connections, and each goes away with its socket.
        let copies = [(); 3].map(|()| as_user(USER, || client.hand_over().unwrap()));
        assert!(as_user(USER, || client.hand_over().is_err()), "a fifth connection");
        assert!(as_user(USER, || copies[0].hand_over().is_err()), "a fifth connection");
        drop(copies);
        let one = (0..500).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            as_user(USER, || client.hand_over().ok())
        });
        // Its socket is good for its INIT alone: another number, another copy and other requests
        // end it.
        let one = one.expect("the copies are gone");
        drop(one);
        let messages = [
            raw::init(USER, 0, [7; 44]),
            raw::request(COPY, 1, 0, 0, &guess),
            raw::request(GETATTR, 2, 1, 0, &[0; 16]),
        ];
        for message in messages {
            let one = (0..500).find_map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(10));
                as_user(USER, || client.hand_over().ok())
            });
            let socket = new_socket_of(&one.expect("the copy before is gone"));
            send(&socket, &message);
            assert!(is_ended(&socket));
        }
        // The parent has lost nothing.
        assert_eq!(write(&client, USER, file, b"more"), Ok(4));
        drop(client);
        let gone = || server.connections() == 0;
        assert!((0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            gone()
        }));
    });
}

fn send(socket: &OwnedFd, message: &[u8]) {
    let flags = rustix::net::SendFlags::NOSIGNAL;
    rustix::net::send(socket, message, flags).unwrap();
}

/// True if the server ends the connection, after an error at most.
fn is_ended(socket: &OwnedFd) -> bool {
    let patience = Some(std::time::Duration::from_secs(30));
    let timeout = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(socket, timeout, patience).unwrap();
    let mut room = [0; 64];
    let flags = rustix::net::RecvFlags::empty;
    loop {
        match rustix::net::recv(socket, &mut room[..], flags()) {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return true,
            Ok((16, _)) if room[4..8] != [0; 4] => {}
            other => panic!("{other:?}: {room:?}"),
        }
    }
}

/// A duplicate of the socket of a copy.
fn new_socket_of(copy: &ConnectionHandover) -> OwnedFd {
    copy.as_fd().try_clone_to_owned().unwrap()
}

/// The limits on inodes, open files and locks held for each connection alone. A user got everything
/// by many connections, or by connections that were copies of one.
#[test]
fn a_user_takes_no_more_by_many_connections_than_by_one() {
    if !is_root() {
        return;
    }
    let user_limits = ConnectionLimits { lookups: 5, opens: 5, ..ConnectionLimits::default() };
    with_server(ServerOptions { user_limits, ..ServerOptions::default() }, |_, path| {
        let (one, two) = (connect(path, USER), connect(path, USER));
        let other = connect(path, OTHER);
        for number in 0..3 {
            create(&one, USER, &format!("one {number}"), 0o644);
        }
        // The state of a child of fork(2): a second connection with all that the first has.
        assert!(as_user(USER, || one.hand_over().is_err()), "the user would have twice as much");
        let [(_, file), _] = [0, 1].map(|n| create(&two, USER, &format!("two {n}"), 0o644));
        assert_eq!(open(&two, USER, file.ino, 0).err(), Some(Errno::EMFILE));

        let look = |client: &RemoteClient, uid| {
            client.lookup(&context(uid), Ino::ROOT, name("one 0")).err()
        };
        assert_eq!((look(&two, USER), look(&other, OTHER)), (Some(Errno::ENFILE), None));
        create(&other, OTHER, "of another user", 0o644);
        // The end of a connection gives everything back.
        drop(one);
        let again = || look(&two, USER).is_none();
        assert!((0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            again()
        }));
    });
}

/// Mapped bytes had no limit for a user or for all users: each of thousands of connections could
/// have a gigabyte of the server's memory.
#[test]
fn mapped_bytes_are_limited_for_a_user_and_for_all_users_together() {
    if !is_root() {
        return;
    }
    let of = |mib: u64| ConnectionLimits { mapped_bytes: mib << 20, ..ConnectionLimits::default() };
    let options = ServerOptions {
        limits: of(1),
        user_limits: of(2),
        mapped_bytes: 3 << 20,
        ..ServerOptions::default()
    };
    with_server(options, |_, path| {
        let root = connect(path, 0);
        let files = ["a", "b", "c", "d"];
        for name in files {
            let (_, file) = create(&root, 0, name, 0o644);
            assert_eq!(write(&root, 0, file, &vec![7; 1 << 20]), Ok(1 << 20));
        }
        let map = |uid, name| {
            let client = connect(path, uid);
            let file = open(&client, uid, find(&client, uid, name), 0).unwrap();
            let mapped = client.map(&context(uid), file, 0..(1 << 20) - 8192, false);
            (client, file, mapped.err())
        };
        let (first, second) = (map(USER, files[0]), map(USER, files[1]));
        assert_eq!((first.2, second.2), (None, None));
        assert_eq!(map(USER, files[2]).2, Some(Errno::ENOMEM), "the limit of the user");
        let of_other = map(OTHER, files[2]);
        assert_eq!(of_other.2, None);
        assert_eq!(map(OTHER, files[3]).2, Some(Errno::ENOMEM), "the limit of all users");
        first.0.unmap(&context(USER), first.1.ino).unwrap();
        assert_eq!(map(OTHER, files[3]).2, None);
    });
}

/// A file system in memory that completes what was submitted on one thread, for all clients.
struct SingleThreadCompletion {
    inner: MemoryFileSystem,
    work: std::sync::mpsc::Sender<Io>,
}

impl SingleThreadCompletion {
    fn new() -> SingleThreadCompletion {
        let (work, received) = std::sync::mpsc::channel::<Io>();
        std::thread::spawn(move || received.into_iter().for_each(|io| io.finish(Ok(0))));
        SingleThreadCompletion { inner: MemoryFileSystem::new(MemoryOptions::default()), work }
    }
}

impl FileSystem for SingleThreadCompletion {
    delegate!(to inner, except caps, submit);

    fn caps(&self) -> Caps {
        Caps { submits: true, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        let _ = self.work.send(io);
    }
}

/// The thread that completed the operations of all clients waited for one that read no answers, and
/// with it everyone.
#[test]
fn a_client_that_reads_no_answers_delays_nobody() {
    const SYNCFS: u32 = 50;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let server = SocketServer::bind(
        &path,
        Arc::new(SingleThreadCompletion::new()),
        ServerOptions::default(),
    )
    .unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let stuck = raw::connect_and_init(&path, 0);
        let mut room = [0; 4096];
        let (len, _) =
            rustix::net::recv(&stuck, &mut room[..], rustix::net::RecvFlags::empty()).unwrap();
        assert!(len > 16, "INIT was not answered");
        let mut refused = 0;
        let mut unique = 4;
        // The server takes requests until its own limits; then the socket is full in both
        // directions.
        while refused < 20 {
            let message = raw::request(SYNCFS, unique, 1, 0, &[0; 8]);
            match rustix::net::send(&stuck, &message, rustix::net::SendFlags::DONTWAIT) {
                Ok(_) => (unique, refused) = (unique + 2, 0),
                Err(_) => {
                    refused += 1;
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
            }
            if unique > 200_000 {
                break;
            }
        }
        let other = connect(path.to_str().unwrap(), 0);
        let (done, finished) = std::sync::mpsc::channel();
        scope.spawn(move || done.send(other.syncfs(&context(0))));
        let answer = finished.recv_timeout(std::time::Duration::from_secs(60));
        // Ends the wait of the other client, if there is one.
        drop(stuck);
        server.shut_down();
        answer.expect("the other client waits").unwrap();
    });
}

/// A file system in memory that keeps what is submitted, and performs calls.
struct KeptSubmissions {
    inner: MemoryFileSystem,
    kept: std::sync::Mutex<Vec<Io>>,
}

impl FileSystem for KeptSubmissions {
    delegate!(to inner, except caps, submit);

    fn caps(&self) -> Caps {
        Caps { submits: true, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        self.kept.lock().unwrap().push(io);
    }
}

/// Submitted operations hold no thread, and a client may send any number of them.
#[test]
fn a_client_has_few_submitted_operations_at_a_time() {
    const SYNCFS: u32 = 50;
    const REQUESTS: usize = 2000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let inner = MemoryFileSystem::new(MemoryOptions::default());
    let fs = Arc::new(KeptSubmissions { inner, kept: std::sync::Mutex::default() });
    let server = SocketServer::bind(&path, fs.clone(), ServerOptions::default()).unwrap();
    let kept = || fs.kept.lock().unwrap().len();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let hostile = raw::connect_and_init(&path, 0);
        let mut room = [0; 4096];
        rustix::net::recv(&hostile, &mut room[..], rustix::net::RecvFlags::empty()).unwrap();
        let (mut sent, mut answered) = (0, 0);
        let begun = std::time::Instant::now();
        while sent < REQUESTS || answered + kept() < REQUESTS {
            let message = raw::request(SYNCFS, 4 + 2 * sent as u64, 1, 0, &[0; 8]);
            let flags = rustix::net::SendFlags::DONTWAIT;
            if sent < REQUESTS && rustix::net::send(&hostile, &message, flags).is_ok() {
                sent += 1;
            }
            let flags = rustix::net::RecvFlags::DONTWAIT;
            match rustix::net::recv(&hostile, &mut room[..], flags) {
                Ok(_) => answered += 1,
                Err(_) => std::thread::yield_now(),
            }
            assert!(begun.elapsed().as_secs() < 60, "{sent} sent, {answered} answered");
        }
        // 16 MiB, 64 KiB for each, and workers that have looked at the same time.
        let of_one = kept();
        assert!((256..256 + 64).contains(&of_one), "{of_one} at a time");
        let other = connect(path.to_str().unwrap(), 0);
        scope.spawn(move || other.syncfs(&context(0)).unwrap());
        let begun = std::time::Instant::now();
        while kept() == of_one && begun.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        let kept: Vec<Io> = std::mem::take(&mut *fs.kept.lock().unwrap());
        assert_eq!(kept.len(), of_one + 1, "those of another client are its own");
        kept.into_iter().for_each(|io| io.finish(Ok(0)));
        drop(hostile);
        server.shut_down();
    });
}
