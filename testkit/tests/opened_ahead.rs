//! Small files and directories are opened before a client requests each of them: fewer requests,
//! and no client sees another file than by an open of the moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_connection::{
    ConnectionLimits, PeerConnection, PeerCredentials, ServiceQuotas, ServiceState, VersionSource,
    WantedFiles,
};
use defuse_fs::{
    Attr, Caller, Context, Errno, File, FileKind, FileSystem, Ino, NewNode, NoNotify, NormalPath,
    OpenArgs, OpenFlags, Origin, PathResolution, ReleaseArgs, RenameFlags, Result, SetAttr,
    SetTime, Shortcuts, Timestamp,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_shared::{LaneOffers, VersionedFileSystem};
use defuse_socket::ServerOptions;
use defuse_testkit::listing;

#[allow(dead_code, unused_imports)] // Not all of it is used here.
mod served;
use served::{TestServer, context, create, name};

/// Options of a server that offers lanes.
fn with_lanes() -> ServerOptions {
    ServerOptions { lanes: Some(Arc::new(LaneOffers::default())), ..ServerOptions::default() }
}

fn serve_with(options: ServerOptions) -> TestServer {
    let fs = VersionedFileSystem::wrap(Arc::new(MemoryFileSystem::new(MemoryOptions::default())))
        .unwrap();
    let versions = Some(Arc::clone(&fs) as Arc<dyn VersionSource>);
    let clients = RemoteOptions { lanes: LaneUse::IfOffered, ..RemoteOptions::default() };
    TestServer::new(fs, ServerOptions { versions, ..options }, clients)
}

/// A client that knows the versions of the server.
fn connect(served: &TestServer) -> RemoteClient {
    let client = served.client();
    client.attach(Origin::new(), Arc::new(NoNotify));
    client
}

/// Opens a path for reading, as the client of unmodified programs does.
fn open(fs: &RemoteClient, path: &str) -> Result<File> {
    let args = OpenArgs { flags: OpenFlags(0), kill_suidgid: false };
    let path = NormalPath::new(path.as_bytes()).unwrap();
    match fs.resolve_to_open(&context(), Ino::ROOT, path, args)? {
        (PathResolution::Inode { ino, .. }, Some(opened)) => Ok(File { ino, fh: opened.fh }),
        (PathResolution::Inode { ino, .. }, None) => {
            Ok(File { ino, fh: fs.open(&context(), ino, args)?.fh })
        }
        (PathResolution::Missing { .. }, _) => Err(Errno::ENOENT),
        (PathResolution::Walk, _) => panic!("{path:?} is not resolved"),
    }
}

fn close(fs: &RemoteClient, file: File) {
    fs.release(&context(), file, ReleaseArgs::default()).unwrap();
}

fn contents(fs: &RemoteClient, path: &str) -> Result<Vec<u8>> {
    let file = open(fs, path)?;
    let bytes = served::read(fs, file, 0, 100_000);
    close(fs, file);
    bytes
}

fn write(fs: &RemoteClient, file: File, bytes: &[u8]) {
    assert_eq!(served::write(fs, file, 0, bytes), Ok(bytes.len()));
}

fn make(fs: &RemoteClient, text: &str, bytes: &[u8]) -> Ino {
    let (_, file) = create(fs, text);
    write(fs, file, bytes);
    close(fs, file);
    file.ino
}

/// Files of 100 bytes.
fn make_all(fs: &RemoteClient, count: usize) -> Vec<Ino> {
    (0..count).map(|at| make(fs, &nth(at), &[1; 100])).collect()
}

/// The numbers of open files of all clients, in the order in which they connected.
fn open_files(served: &TestServer) -> Vec<u64> {
    let clients = served.server.statistics().clients;
    clients.iter().map(|client| client.holdings.open_files).collect()
}

fn nth(at: usize) -> String {
    format!("file-{at:03}")
}

#[test]
fn files_of_a_directory_are_opened_several_at_a_time() {
    for options in [with_lanes(), ServerOptions::default()] {
        open_several(&serve_with(options));
    }
}

fn open_several(served: &TestServer) {
    let (maker, reader) = (connect(served), connect(served));
    for at in 0..200 {
        make(&maker, &nth(at), &vec![at as u8; at * 7]);
    }
    let large = vec![9; 40_000];
    make(&maker, "large", &large);
    for round in 0..3 {
        let (opens, all) = (served.requests_of(&["OPEN"]), served.requests_of(&["IOCTL"]));
        for at in 0..200 {
            assert!(contents(&reader, &nth(at)).unwrap() == vec![at as u8; at * 7], "{at}");
        }
        let opens = served.requests_of(&["OPEN"]) - opens;
        let all = served.requests_of(&["IOCTL"]) - all;
        assert!(opens < 60 && all < 90, "round {round}: {opens} opens, {all} others");
        assert!(contents(&reader, "large").unwrap() == large);
    }
    assert!(open_files(served)[1] > 0, "some wait to be closed");
    reader.give_back();
    assert_eq!(open_files(served), [0, 0]);
}

/// A client that reads the files 0 to 7, so that 8 to 15 are open already.
fn with_ready_files(served: &TestServer) -> RemoteClient {
    let reader = connect(served);
    for at in 0..8 {
        contents(&reader, &nth(at)).unwrap();
    }
    // No client waits for the answer.
    let begun = Instant::now();
    while *open_files(served).last().unwrap() < 8 {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?} files are open",
            open_files(served)
        );
        std::thread::yield_now();
    }
    reader
}

#[test]
fn a_file_that_has_changed_since_is_opened_anew() {
    type RemoteChange = fn(&RemoteClient, Ino);
    let served = serve_with(with_lanes());
    let maker = connect(&served);
    let changes: [(&str, RemoteChange, Result<Vec<u8>>); 6] = [
        ("nothing", |_, _| (), Ok(vec![1; 100])),
        (
            "a write",
            |fs, ino| {
                let args = OpenArgs { flags: OpenFlags(OpenFlags::WRONLY), kill_suidgid: false };
                let file = File { ino, fh: fs.open(&context(), ino, args).unwrap().fh };
                write(fs, file, &[2; 100]);
                close(fs, file);
            },
            Ok(vec![2; 100]),
        ),
        (
            "a truncation",
            |fs, ino| {
                let set = SetAttr { size: Some(10), ..SetAttr::default() };
                fs.setattr(&context(), ino, None, &set).unwrap();
            },
            Ok(vec![1; 10]),
        ),
        (
            "another file by this name",
            |fs, _| {
                make(fs, "new", &[3; 5]);
                let (from, to) = ((Ino::ROOT, name("new")), (Ino::ROOT, name("file-008")));
                fs.rename(&context(), from, to, RenameFlags(0)).unwrap();
            },
            Ok(vec![3; 5]),
        ),
        (
            "a removal",
            |fs, _| fs.unlink(&context(), Ino::ROOT, name("file-008")).unwrap(),
            Err(Errno::ENOENT),
        ),
        (
            "a new file by this name",
            |fs, _| {
                fs.unlink(&context(), Ino::ROOT, name("file-008")).unwrap();
                make(fs, "file-008", &[4; 7]);
            },
            Ok(vec![4; 7]),
        ),
    ];
    for (what, change, expected) in changes {
        let inos = make_all(&maker, 20);
        let reader = with_ready_files(&served);
        let open_before = open(&reader, "file-009").unwrap();
        change(&maker, inos[8]);
        assert_eq!(contents(&reader, "file-008"), expected, "{what}");
        // Removed while it is open, a file stays as it is.
        maker.unlink(&context(), Ino::ROOT, name("file-009")).unwrap();
        assert_eq!(served::read(&reader, open_before, 0, 1000).unwrap(), [1; 100], "{what}");
        close(&reader, open_before);
        for at in 0..20 {
            let _ = maker.unlink(&context(), Ino::ROOT, name(&nth(at)));
        }
    }
}

#[test]
fn removed_files_do_not_stay_open() {
    let served = serve_with(with_lanes());
    let maker = connect(&served);
    make_all(&maker, 30);
    let reader = with_ready_files(&served);
    // One that is in use until it is closed.
    for (remover, path) in [(&reader, "file-010"), (&maker, "file-011")] {
        let file = open(&reader, path).unwrap();
        remover.unlink(&context(), Ino::ROOT, name(path)).unwrap();
        let before = open_files(&served)[1];
        assert_eq!(served::read(&reader, file, 0, 1000).unwrap(), [1; 100]);
        close(&reader, file);
        assert!(open_files(&served)[1] < before, "{path} is closed");
    }
    let before = open_files(&served)[1];
    reader.unlink(&context(), Ino::ROOT, name("file-012")).unwrap();
    assert!(open_files(&served)[1] < before, "that one is closed: {before}");
    for at in (0..29).filter(|at| !(10..13).contains(at)) {
        maker.unlink(&context(), Ino::ROOT, name(&nth(at))).unwrap();
    }
    reader.unlink(&context(), Ino::ROOT, name("file-029")).unwrap();
    assert_eq!(open_files(&served), [0, 0]);
}

/// The access time is the time of a read: for the client that reads at once, and for others when
/// that client gives the file back.
#[test]
fn the_access_time_follows_the_read() {
    let served = serve_with(with_lanes());
    let maker = connect(&served);
    let past = Timestamp { secs: Timestamp::now().secs - 3600, nanos: 0 };
    let set = SetAttr { atime: Some(SetTime::At(past)), ..SetAttr::default() };
    let inos = make_all(&maker, 20);
    for ino in inos {
        maker.setattr(&context(), ino, None, &set).unwrap();
    }
    let reader = with_ready_files(&served);
    let atime = |fs: &RemoteClient, at: usize| {
        let path = nth(at);
        let path = NormalPath::new(path.as_bytes()).unwrap();
        match fs.resolve(&context(), Ino::ROOT, path) {
            Ok(PathResolution::Inode { attr: Attr { atime, .. }, .. }) => atime,
            other => panic!("{other:?}"),
        }
    };
    // An open alone changes nothing.
    close(&reader, open(&reader, "file-008").unwrap());
    assert!((atime(&reader, 8), atime(&reader, 9)) == (past, past));
    contents(&reader, "file-010").unwrap();
    assert!(atime(&reader, 10) > past, "for the client that has read");
    contents(&reader, "file-011").unwrap();
    reader.give_back();
    assert!(atime(&maker, 10) > past && atime(&maker, 11) > past && atime(&maker, 8) == past);
    contents(&reader, "file-012").unwrap();
    drop(reader);
    assert!(atime(&maker, 12) > past, "after its end");
}

#[test]
fn a_child_does_not_inherit_files_that_nobody_has_opened() {
    let served = serve_with(with_lanes());
    let maker = connect(&served);
    make_all(&maker, 20);
    let reader = with_ready_files(&served);
    let file = open(&reader, "file-010").unwrap();
    let child = reader.hand_over().unwrap().begin();
    // Its session begins while it waits for the answer.
    let begun = Instant::now();
    while open_files(&served).len() < 3 && begun.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    assert_eq!(open_files(&served), [0, 1, 1]);
    for fs in [&reader, &child] {
        assert_eq!(served::read(fs, file, 0, 1000).unwrap(), [1; 100]);
        close(fs, file);
    }
    reader.give_back();
    child.getattr(&context(), Ino::ROOT, None).unwrap();
    assert_eq!(open_files(&served)[1], 0);
}

/// The files of one client do not keep it from opening others.
#[test]
fn half_of_the_files_that_a_client_may_have_open_are_left_to_it() {
    let limits = ConnectionLimits { opens: 32, ..ConnectionLimits::default() };
    let served = serve_with(ServerOptions { limits, ..with_lanes() });
    let maker = connect(&served);
    make_all(&maker, 60);
    let reader = with_ready_files(&served);
    assert!(open_files(&served)[1] <= 16);
    let files: Vec<File> = (40..56).map(|at| open(&reader, &nth(at)).unwrap()).collect();
    for file in files {
        assert_eq!(served::read(&reader, file, 0, 1000).unwrap(), [1; 100]);
        close(&reader, file);
    }
}

#[test]
fn nobody_gets_files_that_its_user_may_not_read_or_closes_those_of_others() {
    let fs = VersionedFileSystem::wrap(Arc::new(MemoryFileSystem::new(MemoryOptions::default())))
        .unwrap();
    let version = |ino| fs.attributes(ino);
    let shared = Arc::clone(&fs) as Arc<dyn FileSystem>;
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let user = |uid| PeerCredentials { pid: 1, uid, groups: vec![uid] };
    let root = PeerConnection::new(Arc::clone(&shared), Arc::clone(&service), user(0));
    let stranger = PeerConnection::new(shared, service, user(7));
    let own = Context::new(Caller { uid: 7, gid: 7, pid: 1 });
    let dir = |text, perm| {
        let node = NewNode::new(FileKind::Directory, perm, context().caller);
        root.mkdir(&context(), Ino::ROOT, name(text), &node).unwrap().ino
    };
    let (open_dir, closed_dir) = (dir("open", 0o755), dir("closed", 0o711));
    let mut secret = None;
    for dir in [open_dir, closed_dir] {
        for (text, perm) in [("public", 0o644), ("secret", 0o600)] {
            let node = NewNode::new(FileKind::Regular, perm, context().caller);
            let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
            let made = root.create(&context(), dir, name(text), &node, args).unwrap();
            let file = File { ino: made.0.ino, fh: made.1.fh };
            served::write(&root, file, 0, text.as_bytes()).unwrap();
            secret = Some(file);
        }
    }
    let wanted =
        |flags| WantedFiles { from: 0, flags: OpenFlags(flags), most: 64, most_bytes: 1000 };
    let ahead = |dir, flags| {
        let mut all = Vec::new();
        let notified = |file: defuse_connection::WholeOpenFile| {
            all.push((file.whole.bytes, File { ino: file.ino, fh: file.opened.fh }));
            true
        };
        stranger.open_ahead(&own, dir, wanted(flags), version, notified).map(|_| all)
    };
    assert_eq!(ahead(open_dir, 0).unwrap_err(), Errno::ESTALE, "it was not told of it");
    stranger.lookup(&own, Ino::ROOT, name("open")).unwrap();
    stranger.lookup(&own, Ino::ROOT, name("closed")).unwrap();
    let all = ahead(open_dir, 0).unwrap();
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].0, b"public");
    assert_eq!(ahead(closed_dir, 0).unwrap_err(), Errno::EACCES);
    for flags in [OpenFlags::WRONLY, OpenFlags::RDWR, OpenFlags::TRUNC, OpenFlags::CREAT] {
        assert_eq!(ahead(open_dir, flags).unwrap_err(), Errno::EINVAL);
    }
    // A handle of another client means nothing.
    let secret = secret.unwrap();
    stranger.close_ahead(&own, secret, (OpenFlags(0), true));
    assert_eq!(served::read(&root, secret, 0, 100).unwrap(), b"secret");
    stranger.close_ahead(&own, all[0].1, (OpenFlags(0), true));
    assert_eq!(stranger.holdings().open_files, 0);
}

/// Random changes by one client, and reads by another one, beside a model.
#[test]
fn a_reader_sees_each_change_of_another_client() {
    let served = serve_with(with_lanes());
    let (writer, reader) = (connect(&served), connect(&served));
    let mut model: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut random = fastrand::Rng::with_seed(7);
    let mut random = move |below| random.usize(..below);
    for step in 0..4000 {
        let path = nth(random(24));
        match random(12) {
            0 => {
                let bytes = vec![step as u8; random(3000)];
                if let Some(old) = model.get_mut(&path) {
                    let flags = OpenFlags(OpenFlags::WRONLY | OpenFlags::TRUNC);
                    let ino = writer.lookup(&context(), Ino::ROOT, name(&path)).unwrap().ino;
                    let args = OpenArgs { flags, kill_suidgid: false };
                    let file = File { ino, fh: writer.open(&context(), ino, args).unwrap().fh };
                    write(&writer, file, &bytes);
                    close(&writer, file);
                    *old = bytes;
                } else {
                    make(&writer, &path, &bytes);
                    model.insert(path, bytes);
                }
            }
            1 => {
                let removed = writer.unlink(&context(), Ino::ROOT, name(&path)).is_ok();
                assert_eq!(removed, model.remove(&path).is_some());
            }
            2 => {
                let to = nth(random(24));
                let (from_at, to_at) = ((Ino::ROOT, name(&path)), (Ino::ROOT, name(&to)));
                let moved = writer.rename(&context(), from_at, to_at, RenameFlags(0)).is_ok();
                assert_eq!(moved, model.contains_key(&path));
                if let Some(bytes) = model.remove(&path) {
                    model.insert(to, bytes);
                }
            }
            _ => {
                let expected = model.get(&path).cloned().ok_or(Errno::ENOENT);
                assert!(contents(&reader, &path) == expected, "step {step}: {path}");
            }
        }
    }
}

/// A directory with a file `inside`.
fn make_dir(fs: &RemoteClient, parent: Ino, text: &str) -> Ino {
    let cx = context();
    let node = NewNode::new(FileKind::Directory, 0o755, cx.caller);
    let dir = fs.mkdir(&cx, parent, name(text), &node).unwrap().ino;
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    fs.mknod(&cx, dir, name("inside"), &node).unwrap();
    dir
}

fn inode(fs: &RemoteClient, path: &str) -> Result<Ino> {
    match fs.resolve(&context(), Ino::ROOT, NormalPath::new(path.as_bytes()).unwrap())? {
        PathResolution::Inode { ino, .. } => Ok(ino),
        _ => Err(Errno::ENOENT),
    }
}

fn open_dir(fs: &RemoteClient, ino: Ino) -> File {
    File { ino, fh: fs.opendir(&context(), ino, OpenFlags(OpenFlags::DIRECTORY)).unwrap().fh }
}

fn list(fs: &RemoteClient, dir: File) -> Vec<String> {
    listing::list(fs, &context(), dir)
}

/// A tree with the directories `tree/dir-N`, and a client that has listed all of them once.
fn with_tree(served: &TestServer, count: usize) -> (RemoteClient, RemoteClient) {
    let (maker, reader) = (connect(served), connect(served));
    let tree = make_dir(&maker, Ino::ROOT, "tree");
    (0..count).for_each(|at| {
        make_dir(&maker, tree, &format!("dir-{at}"));
    });
    walk(&reader, count);
    (maker, reader)
}

/// Lists the tree from the top to the bottom.
fn walk(fs: &RemoteClient, count: usize) {
    assert_eq!(list(fs, open_dir(fs, inode(fs, "tree").unwrap())).len(), count + 1);
    for at in 0..count {
        let ino = inode(fs, &format!("tree/dir-{at}")).unwrap();
        assert_eq!(list(fs, open_dir(fs, ino)), ["inside"]);
    }
}

/// Waits until the client that connected at `place` has so many open files and directories.
fn wait_for(served: &TestServer, place: usize, count: u64) {
    let begun = Instant::now();
    while open_files(served)[place] != count {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?} are open", open_files(served));
        std::thread::yield_now();
    }
}

#[test]
fn the_next_directory_is_open_while_a_program_works_in_one() {
    let served = serve_with(with_lanes());
    let (_maker, reader) = with_tree(&served, 10);
    walk(&reader, 10);
    let dir = open_dir(&reader, inode(&reader, "tree").unwrap());
    // Itself, and the first one below.
    wait_for(&served, 1, 2);
    list(&reader, dir);
    let dir = open_dir(&reader, inode(&reader, "tree/dir-0").unwrap());
    // This directory, and the next one.
    wait_for(&served, 1, 2);
    list(&reader, dir);
    // Another one than was expected.
    let other = inode(&reader, "tree/dir-7").unwrap();
    assert_eq!(list(&reader, open_dir(&reader, other)), ["inside"]);
    reader.give_back();
    wait_for(&served, 1, 0);
}

#[test]
fn a_directory_that_has_changed_since_is_opened_and_listed_anew() {
    let served = serve_with(with_lanes());
    let (maker, reader) = with_tree(&served, 10);
    let dir = |at: usize| inode(&maker, &format!("tree/dir-{at}")).unwrap();
    list(&reader, open_dir(&reader, inode(&reader, "tree").unwrap()));
    wait_for(&served, 1, 1);
    let node = NewNode::new(FileKind::Regular, 0o644, context().caller);
    maker.mknod(&context(), dir(0), name("new"), &node).unwrap();
    let first = inode(&reader, "tree/dir-0").unwrap();
    let opened = open_dir(&reader, first);
    // Also after it was opened.
    maker.mknod(&context(), dir(0), name("newer"), &node).unwrap();
    assert_eq!(list(&reader, opened), ["inside", "new", "newer"]);
    // One that is removed meanwhile does not stay.
    list(&reader, open_dir(&reader, inode(&reader, "tree/dir-1").unwrap()));
    wait_for(&served, 1, 1);
    let tree = inode(&maker, "tree").unwrap();
    reader.unlink(&context(), dir(2), name("inside")).unwrap();
    reader.rmdir(&context(), tree, name("dir-2")).unwrap();
    wait_for(&served, 1, 0);
    assert_eq!(inode(&reader, "tree/dir-2"), Err(Errno::ENOENT));
}

/// A directory that no client has opened keeps its access time.
#[test]
fn a_directory_is_not_listed_ahead_where_that_changes_its_access_time() {
    let served = serve_with(with_lanes());
    let (maker, reader) = with_tree(&served, 3);
    let past = Timestamp { secs: Timestamp::now().secs - 3600, nanos: 0 };
    let set = SetAttr { atime: Some(SetTime::At(past)), ..SetAttr::default() };
    let atime = |ino| maker.getattr(&context(), ino, None).unwrap().atime;
    let dirs: Vec<Ino> =
        (0..3).map(|at| inode(&maker, &format!("tree/dir-{at}")).unwrap()).collect();
    for ino in &dirs {
        maker.setattr(&context(), *ino, None, &set).unwrap();
    }
    for at in 0..3 {
        inode(&reader, &format!("tree/dir-{at}")).unwrap();
    }
    list(&reader, open_dir(&reader, inode(&reader, "tree").unwrap()));
    list(&reader, open_dir(&reader, inode(&reader, "tree/dir-0").unwrap()));
    reader.give_back();
    assert!(atime(dirs[0]) > past && atime(dirs[1]) == past && atime(dirs[2]) == past);
}
