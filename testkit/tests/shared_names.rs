//! Names in memory of the server: a client need not request what others with its rights have
//! received, and learns nothing that its user may not know.

use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_connection::{
    NameSource, PeerConnection, PeerCredentials, ServiceQuotas, ServiceState, VersionSource,
};
use defuse_fs::{
    Caller, Context, Errno, File, FileKind, FileSystem, Ino, NewNode, NoNotify, NormalPath,
    OpenArgs, OpenFlags, PathResolution, ReleaseArgs, SetAttr, SetTime, SetXattrFlags, Timestamp,
    Xattr, XattrName, shortcuts_of,
};
use defuse_memory::MemoryFileSystem;
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_ring::names::NameReader;
use defuse_shared::VersionedFileSystem;
use defuse_socket::ServerOptions;

#[allow(dead_code, unused_imports)] // Not all of it is used here.
mod served;
use served::{TestServer, context, create, name, read, write};

fn make_versioned() -> Arc<VersionedFileSystem> {
    VersionedFileSystem::wrap(Arc::new(MemoryFileSystem::new(
        defuse_memory::MemoryOptions::default(),
    )))
    .unwrap()
}

fn serve() -> TestServer {
    let fs = make_versioned();
    let versions = Some(Arc::clone(&fs) as Arc<dyn VersionSource>);
    let options = ServerOptions { versions, ..ServerOptions::default() };
    let clients = RemoteOptions { lanes: LaneUse::IfOffered, ..RemoteOptions::default() };
    TestServer::new(fs, options, clients)
}

fn client(served: &TestServer) -> RemoteClient {
    let client = served.client();
    client.attach(defuse_fs::Origin::new(), Arc::new(NoNotify));
    // It requests the memory of names.
    let _ = find(&client, "nothing");
    client
}

fn find(fs: &dyn FileSystem, path: &str) -> PathResolution {
    shortcuts_of(fs)
        .resolve(&context(), Ino::ROOT, NormalPath::new(path.as_bytes()).unwrap())
        .unwrap()
}

fn size(fs: &dyn FileSystem, path: &str) -> Option<u64> {
    match find(fs, path) {
        PathResolution::Inode { attr, .. } => Some(attr.size),
        _ => None,
    }
}

fn make_tree(fs: &dyn FileSystem, files: usize) {
    let cx = context();
    let dir = NewNode::new(FileKind::Directory, 0o755, cx.caller);
    let dir = fs.mkdir(&cx, Ino::ROOT, name("dir"), &dir).unwrap().ino;
    let file = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    for number in 0..files {
        fs.mknod(&cx, dir, name(&format!("file-{number}")), &file).unwrap();
    }
}

#[test]
fn a_name_that_one_client_was_told_of_takes_no_request_of_the_next_one() {
    let served = serve();
    let (first, second) = (client(&served), client(&served));
    make_tree(&first, 40);
    let paths: Vec<_> = (0..40).map(|number| format!("dir/file-{number}")).collect();
    let look = |client: &RemoteClient| {
        assert!(paths.iter().all(|path| size(client, path) == Some(0)));
        assert_eq!(size(client, "dir/none"), None);
    };
    look(&first);
    // The server publishes them soon after the answer to the first client.
    let begun = Instant::now();
    let mut made = u64::MAX;
    while made > 3 && begun.elapsed() < Duration::from_secs(20) {
        let before = served.requests();
        look(&client(&served));
        // It requests the two memories, and a name that does not exist.
        made = served.requests() - before;
    }
    assert!(made <= 3, "{made} requests");
    look(&second);
    // The inodes are good for every call.
    let PathResolution::Inode { ino, .. } = find(&second, "dir/file-7") else { panic!("no inode") };
    assert!(second.open(&context(), ino, OpenArgs::default()).is_ok());
}

#[test]
fn what_a_client_finds_there_is_the_newest() {
    let served = serve();
    let (one, two) = (client(&served), client(&served));
    let cx = context();
    let (entry, file) = create(&one, "file");
    for round in 0..100 {
        let (writer, reader) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
        assert_eq!(size(writer, "file"), size(reader, "file"));
        write(&one, file, round, b"x").unwrap();
        assert_eq!(
            (size(reader, "file"), size(writer, "file")),
            (Some(round + 1), Some(round + 1))
        );
        let perm = Some(0o600 + round as u32 % 8);
        let set = SetAttr { perm, ..SetAttr::default() };
        let PathResolution::Inode { ino, .. } = find(writer, "file") else { panic!("no inode") };
        writer.setattr(&cx, ino, None, &set).unwrap();
        let PathResolution::Inode { attr, .. } = find(reader, "file") else { panic!("no inode") };
        assert_eq!(Some(attr.perm), perm);
    }
    one.unlink(&cx, Ino::ROOT, name("file")).unwrap();
    assert_eq!((size(&one, "file"), size(&two, "file")), (None, None));
    let (second, _) = create(&two, "file");
    let PathResolution::Inode { ino, .. } = find(&one, "file") else { panic!("no inode") };
    assert!(ino == second.ino && ino != entry.ino);
}

/// While a file is open, a change by it shows at once. When it is closed, others find the
/// attributes in the memory.
#[test]
fn what_an_open_file_changes_is_told_when_it_is_closed() {
    for access in [0, OpenFlags::RDWR] {
        let served = serve();
        let (one, two) = (client(&served), client(&served));
        let cx = context();
        make_tree(&one, 1);
        assert_eq!(size(&one, "dir/file-0"), Some(0));
        let PathResolution::Inode { ino, .. } = find(&one, "dir/file-0") else {
            panic!("no inode")
        };
        let args = OpenArgs { flags: OpenFlags(access), ..OpenArgs::default() };
        let opened = one.open(&cx, ino, args).unwrap();
        let perm = |client: &RemoteClient| {
            let PathResolution::Inode { attr, .. } = find(client, "dir/file-0") else {
                panic!("none")
            };
            attr.perm
        };
        let change = |perm_now| {
            let set = SetAttr { perm: Some(perm_now), ..SetAttr::default() };
            one.setattr(&cx, ino, Some(opened.fh), &set).unwrap();
        };
        for perm_now in [0o600, 0o640, 0o601] {
            change(perm_now);
            assert_eq!((perm(&two), perm(&one)), (perm_now, perm_now));
        }
        let looks_of_next = || {
            let looks = || served.requests_of(&["LOOKUP"]) + served.requests_of(&["IOCTL"]);
            let before = looks();
            let shown = perm(&client(&served));
            (shown, looks() - before)
        };
        // The server publishes the name soon after the answer to a look, and a new client then
        // makes no request.
        let begun = Instant::now();
        while looks_of_next().1 > 0 && begun.elapsed() < Duration::from_secs(20) {}
        change(0o606);
        let file = File { ino, fh: opened.fh };
        one.release(&cx, file, ReleaseArgs::from_flags(args.flags)).unwrap();
        let begun = Instant::now();
        while served.requests_of(&["RELEASE"]) == 0 && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(looks_of_next(), (0o606, 0));
    }
}

/// Attributes of a file that no client has read since its last change hold for longer than a
/// second, and end with its first read.
#[test]
fn the_first_read_of_a_file_shows_in_its_attributes() {
    let served = serve();
    let (one, two, three) = (client(&served), client(&served), client(&served));
    let cx = context();
    let (_, file) = create(&one, "file");
    write(&one, file, 0, b"contents").unwrap();
    let past = SetTime::At(Timestamp { secs: 1000, nanos: 0 });
    let set = SetAttr { atime: Some(past), ..SetAttr::default() };
    one.setattr(&cx, file.ino, None, &set).unwrap();
    let accessed = |client: &RemoteClient| match find(client, "file") {
        PathResolution::Inode { attr, .. } => attr.atime.secs,
        _ => panic!("no inode"),
    };
    assert_eq!([&one, &two, &three].map(accessed), [1000; 3]);
    let before = served.requests();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!((accessed(&three), served.requests()), (1000, before));
    read(&one, file, 0, 8).unwrap();
    let before = served.requests();
    let after = accessed(&two);
    assert!(after > 1000);
    assert_eq!((accessed(&three), served.requests()), (after, before), "it is told of");
    assert_eq!(accessed(&one), after);
}

#[test]
fn a_file_without_extended_attributes_is_asked_for_none() {
    let served = serve();
    let (one, two) = (client(&served), client(&served));
    let cx = context();
    let (entry, _) = create(&one, "file");
    let ino = entry.ino;
    let (acl, user) = (&b"system.posix_acl_access"[..], &b"user.key"[..]);
    let get = |client: &RemoteClient, name: &[u8]| {
        client.getxattr(&cx, ino, XattrName::new(name).unwrap(), 100).map(|found| match found {
            Xattr::Value(value) => value,
            Xattr::Size(_) => panic!("only a size"),
        })
    };
    find(&one, "file");
    find(&two, "file");
    let before = served.requests();
    assert_eq!((get(&two, acl), get(&two, user)), (Err(Errno::ENODATA), Err(Errno::ENODATA)));
    assert_eq!(two.listxattr(&cx, ino, 0), Ok(Xattr::Size(0)));
    assert_eq!(two.listxattr(&cx, ino, 100), Ok(Xattr::Value(Vec::new())));
    assert_eq!(served.requests(), before);
    // Another client gives it some.
    let name = XattrName::new(user).unwrap();
    one.setxattr(&cx, ino, name, b"value", SetXattrFlags::default()).unwrap();
    assert_eq!(get(&two, user), Ok(b"value".to_vec()));
    find(&two, "file");
    assert_eq!(get(&two, user), Ok(b"value".to_vec()));
    assert_eq!(two.listxattr(&cx, ino, 100), Ok(Xattr::Value(b"user.key\0".to_vec())));
    let list = [
        2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0,
        255, 255, 255, 255,
    ];
    one.removexattr(&cx, ino, name).unwrap();
    let flags = SetXattrFlags::default();
    one.setxattr(&cx, ino, XattrName::new(acl).unwrap(), &list, flags).unwrap();
    find(&two, "file");
    assert_eq!(get(&two, user), Err(Errno::ENODATA));
    assert_eq!(get(&two, acl), get(&one, acl));
}

fn make_user(uid: u32, groups: &[u32]) -> PeerCredentials {
    PeerCredentials { pid: 1, uid, groups: groups.to_vec() }
}

/// A user who reads the memory of others, or names inodes from it, would get behind a directory
/// that is closed to it.
#[test]
fn users_with_other_rights_share_no_names() {
    let fs = make_versioned();
    let (root, user) = (context(), Context::new(Caller { uid: 7, gid: 7, pid: 1 }));
    let closed = NewNode::new(FileKind::Directory, 0o700, root.caller);
    let closed = fs.mkdir(&root, Ino::ROOT, name("closed"), &closed).unwrap().ino;
    let file = NewNode::new(FileKind::Regular, 0o644, root.caller);
    let file = fs.mknod(&root, closed, name("file"), &file).unwrap().ino;
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let connect = |who: PeerCredentials| {
        let shared: Arc<dyn FileSystem> = Arc::clone(&fs) as _;
        let connection = PeerConnection::new(shared, Arc::clone(&service), who);
        connection.share(fs.names(connection.credentials()).unwrap());
        connection
    };
    let same = [connect(make_user(0, &[0])), connect(make_user(0, &[0]))];
    let others = [make_user(7, &[7]), make_user(0, &[0, 7])].map(connect);
    let path = NormalPath::new(b"closed/file").unwrap();
    same[0].walk_steps(&root, Ino::ROOT, path, |_| ()).unwrap();
    assert!(same[1].getattr(&root, file, None).is_ok(), "told of to a client with its rights");
    assert_eq!(others[0].getattr(&user, file, None), Err(Errno::ESTALE));
    assert_eq!(others[1].getattr(&root, file, None), Err(Errno::ESTALE));
    let finds = |client: &PeerConnection<Arc<dyn FileSystem>>| {
        let reader = NameReader::from_fd(client.shared_names().unwrap()).unwrap();
        reader.find(closed.0, b"file").is_some()
    };
    assert_eq!(same.each_ref().map(finds), [true; 2]);
    assert_eq!(others.each_ref().map(finds), [false; 2]);
    // Not even the user itself publishes names in a directory that it may not search.
    assert_eq!(others[0].walk_steps(&user, Ino::ROOT, path, |_| ()), Err(Errno::EACCES));
    assert!(!finds(&others[0]));
    // The next program of a process, as another user, has the names of that user.
    let successor = same[0].prepare_exec(make_user(7, &[7]));
    successor.share(fs.names(successor.credentials()).unwrap());
    assert_eq!(successor.getattr(&user, file, None), Err(Errno::ESTALE));
    assert!(!finds(&successor));
    // A copy for a child has the rights of its parent.
    assert!(same[0].copy().unwrap().getattr(&root, file, None).is_ok());
}

/// A user with many sets of groups would take memory without end, or the memory of others.
#[test]
fn memories_of_names_are_few_and_those_in_use_stay() {
    let fs = make_versioned();
    let mut used: Vec<Arc<dyn NameSource>> = Vec::new();
    for group in 0..4 {
        used.push(fs.names(&make_user(7, &[7, 100 + group])).unwrap());
    }
    assert!(fs.names(&make_user(7, &[7, 200])).is_none(), "a fifth set of groups");
    assert!(fs.names(&make_user(7, &[103, 7])).is_some(), "one that is known, in another order");
    let others: Vec<_> = (0..30).filter_map(|uid| fs.names(&make_user(1000 + uid, &[1]))).collect();
    assert_eq!(others.len(), 12);
    drop(others);
    // Memories that no client uses give way.
    assert!((0..30).all(|uid| fs.names(&make_user(2000 + uid, &[1])).is_some()));
    used.pop();
    assert!(fs.names(&make_user(7, &[7, 200])).is_some());
    assert!(fs.names(&make_user(7, &[7, 201])).is_some(), "the one before is unused");
}

/// Each change of a file would be written to as many names as a user gives it.
#[test]
fn few_names_of_one_file_are_told_of() {
    let fs = make_versioned();
    let cx = context();
    let names = fs.names(&make_user(0, &[0])).unwrap();
    let reader = NameReader::from_fd(names.memory().unwrap()).unwrap();
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let ino = fs.mknod(&cx, Ino::ROOT, name("first"), &node).unwrap().ino;
    let attr = fs.getattr(&cx, ino, None).unwrap();
    let texts: Vec<_> = (0..100).map(|number| number.to_string()).collect();
    for text in &texts {
        fs.link(&cx, ino, Ino::ROOT, name(text)).unwrap();
        let place = (Ino::ROOT, name(text));
        names.publish(
            names.versions_before(place).unwrap(),
            place,
            Some((ino, &attr)),
            true,
            (&*fs, &cx),
        );
    }
    let shown = texts.iter().filter(|text| reader.find(Ino::ROOT.0, text.as_bytes()).is_some());
    assert_eq!(shown.count(), 16);
    let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
    fs.setattr(&cx, ino, None, &set).unwrap();
    assert!(names.lead_to(ino, &|_| false));
}

/// A number stays good as long as a name leads to it.
#[test]
fn inodes_may_be_named_while_their_names_are_in_the_memory() {
    let fs = make_versioned();
    let cx = context();
    let names = fs.names(&make_user(0, &[0])).unwrap();
    let reader = NameReader::from_fd(names.memory().unwrap()).unwrap();
    let node = NewNode::new(FileKind::Fifo, 0o644, cx.caller);
    let make = |number: u32| {
        let text = number.to_string();
        let ino = fs.mknod(&cx, Ino::ROOT, name(&text), &node).unwrap().ino;
        (text, ino)
    };
    // More than have room.
    let all: Vec<_> = (0..100_000).map(make).collect();
    for (text, ino) in &all {
        let attr = fs.getattr(&cx, *ino, None).unwrap();
        let place = (Ino::ROOT, name(text));
        names.publish(
            names.versions_before(place).unwrap(),
            place,
            Some((*ino, &attr)),
            true,
            (&*fs, &cx),
        );
    }
    let found = |text: &str| reader.find(Ino::ROOT.0, text.as_bytes()).is_some();
    let has = |ino: Ino| names.lead_to(ino, &|_| false);
    assert!(all.iter().all(|(text, ino)| found(text) == has(*ino)));
    let count = all.iter().filter(|(_, ino)| has(*ino)).count();
    assert!((40_000..65_537).contains(&count), "{count} names");
    // A name that does not exist any more, and one that leads elsewhere.
    let (text, ino) = all.iter().rev().find(|(_, ino)| has(*ino)).unwrap();
    let place = (Ino::ROOT, name(text));
    names.publish(names.versions_before(place).unwrap(), place, None, true, (&*fs, &cx));
    assert!(!has(*ino));
}
