//! Attacks of clients on the server of a socket and on each other. The server runs as root; the clients
//! are threads of this process with the credentials of other users.

use std::sync::Arc;

use defuse_fs::{
    Caller, Context, CopyRange, DirBuf, DirItem, DirSink, Entry, Errno, Fallocate, File, FileKind,
    FileSystem, Ino, Lock, LockKind, LockOwner, LockRequest, LockType, Name, NewNode, OpenArgs,
    OpenFlags, RenameFlags, Result, SetAttr, SetTime, SetXattrFlags, SliceSource, Timestamp,
    WriteArgs, WriteBuf, XattrName,
};
use defuse_fuse::client::{Client, ClientOptions};
use defuse_fuse::{Admission, Server, ServerOptions};
use defuse_memory::{Memory, Options};

const USER: u32 = 4321;
const OTHER: u32 = 4322;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root can become another user");
    }
    root
}

/// A server that admits two users, with what `run` does to it.
fn with_server(options: ServerOptions, run: impl FnOnce(&Server, &str) + Send) {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = format!("@defuse-attacks-{}-{number}", std::process::id());
    let admission = Admission::Users(vec![USER, OTHER]);
    let memory = Memory::new(Options { root_perm: 0o777, ..Options::default() });
    let options = ServerOptions { admission, ..options };
    let server = Server::bind(path.as_ref(), Arc::new(memory), options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&server, &path)));
        server.shut_down();
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs `run` on a thread of the user, as whom it connects.
fn as_user<T: Send>(uid: u32, run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let become_user = || {
            let (user, group) =
                (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(group, group, group).unwrap();
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            run()
        };
        scope.spawn(become_user).join().unwrap()
    })
}

fn connect(path: &str, uid: u32) -> Client {
    let connect = || Client::connect(path.as_ref(), ClientOptions::default()).unwrap();
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

fn create(client: &Client, uid: u32, text: &str, perm: u32) -> (Entry, File) {
    let cx = context(uid);
    let node = NewNode::new(FileKind::Regular, 0o666, cx.caller);
    let args = flags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL);
    let (entry, opened) = client.create(&cx, Ino::ROOT, name(text), &node, args).unwrap();
    chmod(client, uid, entry.ino, perm).unwrap();
    (entry, File { ino: entry.ino, fh: opened.fh })
}

fn chmod(client: &Client, uid: u32, ino: Ino, perm: u32) -> Result<u32> {
    let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
    client.setattr(&context(uid), ino, None, &set).map(|attr| attr.perm)
}

fn write(client: &Client, uid: u32, file: File, bytes: &[u8]) -> Result<usize> {
    let args = WriteArgs { flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    client.write(&context(uid), file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes)))
}

fn find(client: &Client, uid: u32, text: &str) -> Ino {
    client.lookup(&context(uid), Ino::ROOT, name(text)).unwrap().ino
}

fn open(client: &Client, uid: u32, ino: Ino, how: u32) -> Result<File> {
    client.open(&context(uid), ino, flags(how)).map(|opened| File { ino, fh: opened.fh })
}

/// `serve --admit UID` by root made that user root: the server carried out whatever a client of an
/// admitted user asked for. The user made a block device, set mode 4755 on a file of root and gave it
/// `security.capability`.
#[test]
fn an_admitted_user_has_no_rights_but_its_own() {
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

/// CREATE without `O_EXCL` opened what was there, and nobody asked whether the user may.
#[test]
fn create_opens_no_file_that_is_there() {
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

/// In a sticky directory a user removed a file of root by asking twice: between the look at the owner
/// and the removal another client of the same user moved the file of root under the name. The names of
/// the directory now stand still meanwhile.
#[test]
fn names_of_root_stay_in_a_sticky_directory_while_names_change() {
    if !is_root() {
        return;
    }
    with_server(ServerOptions::default(), |_, path| {
        let (root, user) = (connect(path, 0), connect(path, USER));
        chmod(&root, 0, Ino::ROOT, 0o1777).unwrap();
        let cx = context(USER);
        let made = |client: &Client, uid| {
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

struct Listed(Vec<(String, bool)>);

impl DirSink for Listed {
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

/// READDIRPLUS handed out the inodes of a directory that the user may read and not search, and with an
/// inode the user opens a file.
#[test]
fn a_directory_that_a_user_may_only_read_hands_out_no_inodes() {
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
            let mut listed = Listed(Vec::new());
            let dir = File { ino: Ino::ROOT, fh: opened.fh };
            user.readdir(&cx, dir, 0, &mut DirBuf::new(&mut listed)).unwrap();
            let file = listed.0.iter().find(|(text, _)| text == "file").cloned();
            assert_eq!(file, Some(("file".to_owned(), given)), "{perm:o}");
        }
        assert_eq!(user.lookup(&context(USER), Ino::ROOT, name("file")).err(), Some(Errno::EACCES));
    });
}

/// A client left the flag away that has set-user-id cleared, and the server kept mode 6777 on the file
/// of root that the user had changed; with fallocate(2) and copy_file_range(2) `memory:` always did.
#[test]
fn whatever_a_user_changes_loses_set_user_id() {
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

/// The server passed on the owner of a lock as the client said it. A client that named the owner of
/// another client's lock, a small number, had the same locks and dropped them.
#[test]
fn nobody_drops_a_lock_of_another_client_by_naming_its_owner() {
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
            (LockKind::Posix, LockOwner::of_process(1)),
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

/// A user who may only read a file locked it for writing, and held up all who may write.
#[test]
fn a_record_lock_takes_a_file_that_is_open_for_it() {
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
