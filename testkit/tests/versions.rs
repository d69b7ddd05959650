//! Versions of names and attributes: every change shows in them, and clients of one server see each
//! other's changes at once, although they request only what they do not know.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_connection::{
    PeerConnection, PeerCredentials, ServiceQuotas, ServiceState, VersionSource,
};
use defuse_direct::{
    ClientMountArgs, ClientOptions, ClientTask, DirectClient, NewOwner, NewTimes, OpenHow,
    WalkStart,
};
use defuse_fs::{
    Attr, Caller, Context, CopyRange, Errno, Fallocate, File, FileKind, FileSystem, Ino, NewNode,
    NoNotify, NormalPath, OpenArgs, OpenFlags, PathResolution, RenameFlags, SetAttr, SetTime,
    SetXattrFlags, Timestamp, XattrName, shortcuts_of,
};
use defuse_memory::MemoryFileSystem;
use defuse_remote::{LaneUse, RemoteOptions};
use defuse_ring::versions::{VersionReader, VersionedItem};
use defuse_shared::VersionedFileSystem;
use defuse_socket::ServerOptions;

mod served;
use served::{TestServer, context, create, name, read, write};

fn memory() -> Arc<dyn FileSystem> {
    Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default()))
}

/// The names of the random test, in each directory.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// All that is known of a file system, with the versions.
#[derive(Default)]
struct VersionState {
    names: HashMap<(Ino, &'static str), (Option<Ino>, u64)>,
    inodes: HashMap<Ino, (Attr, u64, u64)>,
}

impl VersionState {
    fn read(fs: &dyn FileSystem, reader: &VersionReader, inodes: &[Ino]) -> VersionState {
        let mut state = VersionState::default();
        for &ino in inodes {
            let Ok(attr) = fs.getattr(&context(), ino, None) else { continue };
            let version = |thing| reader.version_of(thing).unwrap();
            let versions =
                (version(VersionedItem::Attributes(ino.0)), version(VersionedItem::Rights(ino.0)));
            state.inodes.insert(ino, (attr, versions.0, versions.1));
            if attr.kind != FileKind::Directory {
                continue;
            }
            for text in NAMES {
                let found = match shortcuts_of(fs).resolve(&context(), ino, name(text).into()) {
                    Ok(PathResolution::Inode { ino, .. }) => Some(ino),
                    _ => None,
                };
                let of = VersionedItem::Name(ino.0, text.as_bytes());
                state.names.insert((ino, text), (found, version(of)));
            }
        }
        state
    }

    /// Checks that all that has changed since `before` has another version.
    fn check_since(&self, before: &VersionState, what: &str) {
        for (place, (found, version)) in &self.names {
            let Some((found_before, before)) = before.names.get(place) else { continue };
            let notified = version != before;
            assert!(found == found_before || notified, "{what}: the name {place:?}");
        }
        for (ino, (attr, version, rights)) in &self.inodes {
            let Some((attr_before, before, rights_before)) = before.inodes.get(ino) else {
                continue;
            };
            let same = Attr { atime: attr.atime, ..*attr_before } == *attr;
            assert!(same || version != before, "{what}: the attributes of {ino:?}");
            let of = |attr: &Attr| (attr.perm & 0o777, attr.uid, attr.gid);
            let same = of(attr) == of(attr_before);
            assert!(same || rights != rights_before, "{what}: the rights to {ino:?}");
        }
    }
}

/// Makes a random change. Returns what it was, for messages.
fn change(fs: &dyn FileSystem, inodes: &mut Vec<Ino>, random: &mut fastrand::Rng) -> String {
    let cx = context();
    let any = |random: &mut fastrand::Rng, inodes: &[Ino]| inodes[random.usize(..inodes.len())];
    let (dir, other) = (any(random, inodes), any(random, inodes));
    let (one, two) = (NAMES[random.usize(..4)], NAMES[random.usize(..4)]);
    let ino = any(random, inodes);
    let made = |kind| NewNode::new(kind, 0o644, cx.caller);
    let kind = random.u32(..14);
    let outcome = match kind {
        0 => fs.mkdir(&cx, dir, name(one), &made(FileKind::Directory)).map(|e| inodes.push(e.ino)),
        1 => fs.mknod(&cx, dir, name(one), &made(FileKind::Fifo)).map(|e| inodes.push(e.ino)),
        2 => fs
            .symlink(&cx, dir, name(one), b"to", &made(FileKind::Symlink))
            .map(|e| inodes.push(e.ino)),
        3 => fs.link(&cx, ino, dir, name(one)).map(drop),
        4 => fs.unlink(&cx, dir, name(one)),
        5 => fs.rmdir(&cx, dir, name(one)),
        6 | 7 => {
            let flags = RenameFlags(if kind == 7 { RenameFlags::EXCHANGE } else { 0 });
            fs.rename(&cx, (dir, name(one)), (other, name(two)), flags)
        }
        8 => {
            let time = SetTime::At(Timestamp { secs: random.i64(1..1000), nanos: 0 });
            let sets = [
                SetAttr { perm: Some(random.u32(..0o1000)), ..SetAttr::default() },
                SetAttr { uid: Some(random.u32(..9)), ..SetAttr::default() },
                SetAttr { gid: Some(random.u32(..9)), ..SetAttr::default() },
                SetAttr { mtime: Some(time), ..SetAttr::default() },
                SetAttr { size: Some(random.u64(..9000)), ..SetAttr::default() },
            ];
            fs.setattr(&cx, ino, None, &sets[random.usize(..sets.len())]).map(drop)
        }
        9 => {
            let xattr = XattrName::new(b"user.x").unwrap();
            fs.setxattr(&cx, ino, xattr, b"value", SetXattrFlags::default())
        }
        10 => {
            let flags = OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL);
            let args = OpenArgs { flags, kill_suidgid: false };
            fs.create(&cx, dir, name(one), &made(FileKind::Regular), args).map(|(entry, opened)| {
                inodes.push(entry.ino);
                let file = File { ino: entry.ino, fh: opened.fh };
                fs.release(&cx, file, defuse_fs::ReleaseArgs::default()).unwrap();
            })
        }
        _ => with_file(fs, ino, random),
    };
    format!("{kind} of {ino:?}, {dir:?}/{one} and {other:?}/{two}: {outcome:?}")
}

/// Changes the data of a file.
fn with_file(fs: &dyn FileSystem, ino: Ino, random: &mut fastrand::Rng) -> Result<(), Errno> {
    let cx = context();
    if fs.getattr(&cx, ino, None)?.kind != FileKind::Regular {
        return Err(Errno::EINVAL);
    }
    let truncates = if random.bool() { OpenFlags::TRUNC } else { 0 };
    let flags = OpenFlags(OpenFlags::RDWR | truncates);
    let file = File { ino, fh: fs.open(&cx, ino, OpenArgs { flags, kill_suidgid: false })?.fh };
    let at = random.u64(..9000);
    match random.u32(..3) {
        0 => write(fs, file, at, b"some bytes").map(drop)?,
        1 => fs.fallocate(&cx, file, Fallocate { offset: at, length: 10, mode: 0 })?,
        _ => {
            let copy = CopyRange {
                src: file,
                src_offset: 0,
                dst: file,
                dst_offset: 20_000 + at,
                length: 10,
                flags: 0,
            };
            fs.copy_file_range(&cx, &copy).map(drop)?;
        }
    }
    fs.release(&cx, file, defuse_fs::ReleaseArgs::default())
}

#[test]
fn every_change_through_the_layer_shows_in_its_versions() {
    let fs = VersionedFileSystem::wrap(memory()).unwrap();
    fs.attach(defuse_fs::Origin::new(), Arc::new(NoNotify));
    let reader = VersionReader::from_fd(fs.versions().unwrap()).unwrap();
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut inodes = vec![Ino::ROOT];
    let mut before = VersionState::read(&*fs, &reader, &inodes);
    for _ in 0..3000 {
        let all = reader.global_version().unwrap();
        let what = change(&*fs, &mut inodes, &mut random);
        let after = VersionState::read(&*fs, &reader, &inodes);
        after.check_since(&before, &format!("seed {seed}: {what}"));
        let changed = !what.ends_with("Ok(())") || reader.global_version() != Some(all);
        assert!(changed, "seed {seed}: {what}: the version of everything");
        before = after;
        if inodes.len() > 60 {
            inodes.truncate(20);
        }
    }
}

/// A program with a client of its own.
struct VersionProgram {
    client: DirectClient,
    task: ClientTask,
}

impl VersionProgram {
    fn new(served: &TestServer) -> VersionProgram {
        let client = DirectClient::new(ClientOptions::default());
        client.mount(b"m:", Arc::new(served.client()), &ClientMountArgs::default()).unwrap();
        VersionProgram { client, task: ClientTask::for_this_process().unwrap() }
    }

    fn stat(&self, path: &str) -> Result<Attr, i32> {
        let stat = self.client.stat(&self.task, WalkStart::Cwd, path.as_bytes(), false);
        stat.map(|stat| stat.attr).map_err(|stop| stop.errno().raw())
    }

    fn make(&self, path: &str) {
        let flags = OpenFlags::RDWR | OpenFlags::CREAT;
        let how = OpenHow { flags, mode: 0o644, ..OpenHow::default() };
        let file = self.client.open(&self.task, WalkStart::Cwd, path.as_bytes(), how).unwrap();
        file.close(&self.task).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        let (from, to) = ((WalkStart::Cwd, from.as_bytes()), (WalkStart::Cwd, to.as_bytes()));
        self.client.rename(&self.task, from, to, RenameFlags(0)).unwrap();
    }
}

fn serve() -> TestServer {
    let fs = VersionedFileSystem::wrap(memory()).unwrap();
    let versions = Some(Arc::clone(&fs) as Arc<dyn VersionSource>);
    let options = ServerOptions { versions, ..ServerOptions::default() };
    let clients = RemoteOptions { lanes: LaneUse::IfOffered, ..RemoteOptions::default() };
    TestServer::new(fs, options, clients)
}

/// Each client knows the state before each change, and finds the state after it.
#[test]
fn what_a_client_knows_ends_with_the_change_of_another() {
    let served = serve();
    let (one, two) = (VersionProgram::new(&served), VersionProgram::new(&served));
    let at = |path: &str| path.as_bytes().to_vec();
    one.client.mkdir(&one.task, WalkStart::Cwd, b"m:/dir", 0o755).unwrap();
    one.client.mkdir(&one.task, WalkStart::Cwd, b"m:/dir/sub", 0o755).unwrap();
    for round in 0..40 {
        let (writer, reader) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
        let both = |path: &str| {
            let seen = [writer.stat(path), reader.stat(path)];
            assert_eq!(seen[0].map(|attr| attr.st_ino), seen[1].map(|attr| attr.st_ino), "{path}");
            seen[1]
        };
        assert_eq!(both("m:/dir/sub/file"), Err(2));
        writer.make("m:/dir/sub/file");
        assert_eq!(both("m:/dir/sub/file").unwrap().size, 0);
        let path = at("m:/dir/sub/file");
        writer.client.truncate(&writer.task, WalkStart::Cwd, &path, 77).unwrap();
        assert_eq!(both("m:/dir/sub/file").unwrap().size, 77);
        let follows = true;
        writer.client.chmod(&writer.task, WalkStart::Cwd, &path, 0o600, follows).unwrap();
        assert_eq!(both("m:/dir/sub/file").unwrap().perm, 0o600);
        writer
            .client
            .link(&writer.task, (WalkStart::Cwd, &path), (WalkStart::Cwd, b"m:/second"), false)
            .unwrap();
        assert_eq!(both("m:/dir/sub/file").unwrap().nlink, 2);
        writer.client.unlink(&writer.task, WalkStart::Cwd, b"m:/second").unwrap();
        assert_eq!(both("m:/dir/sub/file").unwrap().nlink, 1);
        // The directory on the way moves, and another takes its place.
        writer.rename("m:/dir/sub", "m:/moved");
        assert_eq!(both("m:/dir/sub/file"), Err(2));
        assert_eq!(both("m:/moved/file").unwrap().size, 77);
        writer.client.mkdir(&writer.task, WalkStart::Cwd, b"m:/dir/sub", 0o755).unwrap();
        assert_eq!(both("m:/dir/sub/file"), Err(2));
        writer.client.unlink(&writer.task, WalkStart::Cwd, b"m:/moved/file").unwrap();
        assert_eq!(both("m:/moved/file"), Err(2));
        writer.client.rmdir(&writer.task, WalkStart::Cwd, b"m:/moved").unwrap();
        assert_eq!(both("m:/moved"), Err(2));
    }
}

/// The calls of tar(1) for each file that it has written.
#[test]
fn a_file_that_was_just_changed_gets_the_owner_that_it_has_by_no_request() {
    let served = serve();
    let (one, two) = (VersionProgram::new(&served), VersionProgram::new(&served));
    let how =
        OpenHow { flags: OpenFlags::RDWR | OpenFlags::CREAT, mode: 0o600, ..OpenHow::default() };
    let path = b"m:/file";
    let file = one.client.open(&one.task, WalkStart::Cwd, path, how).unwrap();
    let me = one.client.fstat(&one.task, &file).unwrap().attr;
    let times = NewTimes { atime: None, mtime: Some(SetTime::At(Timestamp { secs: 7, nanos: 0 })) };
    let touch = || one.client.futimens(&one.task, &file, times).unwrap();
    let give = |uid, gid| {
        let before = served.requests();
        let owner = NewOwner { uid, gid };
        // Without the wait for the number of requests, which takes longer than a tick.
        touch();
        one.client.fchown(&one.task, &file, owner).unwrap();
        served.requests() - before - 1
    };
    let (own, group) = (Some(me.uid), Some(me.gid));
    // A tick may end in between.
    assert!((0..20).any(|_| give(own, group) == 0 && give(None, group) == 0));
    let stranger = one.task.with_credentials(defuse_direct::TaskCredentials::user(1000, 1000, &[]));
    for _ in 0..20 {
        touch();
        let given = one.client.fchown(&stranger, &file, NewOwner { uid: own, gid: group });
        assert_eq!(given.map_err(|stop| stop.errno()), Err(Errno::EPERM));
    }
    // The time of the change shows if it is another one.
    std::thread::sleep(Duration::from_millis(30));
    let before = served.requests();
    one.client.fchown(&one.task, &file, NewOwner { uid: own, gid: group }).unwrap();
    assert_eq!(served.requests(), before + 1);
    // Bits are lost, and a file that can be executed may have a capability.
    for mode in [0o4600, 0o700] {
        one.client.fchmod(&one.task, &file, mode).unwrap();
        assert_eq!(give(own, group), 1, "{mode:o}");
        assert_eq!(one.stat("m:/file").unwrap().perm, mode & 0o777);
    }
    one.client.fchmod(&one.task, &file, 0o600).unwrap();
    if me.uid != 0 {
        println!("skipped: only root changes owners");
        return;
    }
    // Another client has given the file away in the same tick.
    for other in 1..50 {
        touch();
        let owner = NewOwner { uid: Some(other), gid: None };
        two.client.chown(&two.task, WalkStart::Cwd, path, owner, true).unwrap();
        one.client.fchown(&one.task, &file, NewOwner { uid: own, gid: None }).unwrap();
        assert_eq!(one.stat("m:/file").unwrap().uid, me.uid);
    }
}

#[test]
fn a_known_name_takes_no_request() {
    let served = serve();
    let program = VersionProgram::new(&served);
    program.client.mkdir(&program.task, WalkStart::Cwd, b"m:/dir", 0o755).unwrap();
    let look = || (program.stat("m:/dir").unwrap().kind, program.stat("m:/dir/none"));
    assert_eq!(look(), (FileKind::Directory, Err(2)));
    let before = served.requests();
    for _ in 0..100 {
        assert_eq!(look(), (FileKind::Directory, Err(2)));
    }
    // Attributes are requested again after a second.
    let made = served.requests() - before;
    assert!(made < 50, "{made} requests");
}

/// The server finds out what a name is, so that a client that may remove it need not know it.
#[test]
fn a_file_is_removed_by_one_request_and_others_know_at_once() {
    let served = serve();
    let (one, two) = (VersionProgram::new(&served), VersionProgram::new(&served));
    one.client.mkdir(&one.task, WalkStart::Cwd, b"m:/dir", 0o755).unwrap();
    for name in ["m:/dir/a", "m:/dir/b"] {
        one.make(name);
    }
    one.client
        .link(&one.task, (WalkStart::Cwd, b"m:/dir/a"), (WalkStart::Cwd, b"m:/dir/c"), false)
        .unwrap();
    let opened =
        two.client.open(&two.task, WalkStart::Cwd, b"m:/dir/a", OpenHow::default()).unwrap();
    let links = || two.client.fstat(&two.task, &opened).unwrap().attr.nlink;
    assert_eq!((links(), two.stat("m:/dir/b").map(|attr| attr.size)), (2, Ok(0)));
    let remove = |path: &str| {
        let removed = two.client.unlink(&two.task, WalkStart::Cwd, path.as_bytes());
        removed.map_err(|stop| stop.errno())
    };
    // The directory is known by then.
    assert_eq!(remove("m:/dir/none"), Err(Errno::ENOENT));
    let looks = || served.requests_of(&["LOOKUP", "IOCTL", "GETATTR", "STATX"]);
    let before = (looks(), served.requests_of(&["UNLINK"]) + 2);
    assert_eq!((remove("m:/dir/a"), remove("m:/dir/b")), (Ok(()), Ok(())));
    assert_eq!((looks(), served.requests_of(&["UNLINK"])), before);
    assert_eq!(links(), 1);
    assert_eq!((one.stat("m:/dir/a"), two.stat("m:/dir/b")), (Err(2), Err(2)));
    assert_eq!((remove("m:/dir/a"), remove("m:/dir")), (Err(Errno::ENOENT), Err(Errno::EISDIR)));
    assert_eq!(remove("m:/dir/c/"), Err(Errno::ENOTDIR));
    // Another program's mount is on it.
    two.client.mkdir(&two.task, WalkStart::Cwd, b"m:/dir/sub", 0o755).unwrap();
    two.client.mount(b"m:/dir/sub", memory(), &ClientMountArgs::default()).unwrap();
    assert_eq!(remove("m:/dir/sub"), Err(Errno::EISDIR));
    assert_eq!(remove("m:/dir/c"), Ok(()));
    assert_eq!(links(), 0);
}

/// Only the server of a file system knows its own changes.
#[test]
fn a_file_system_that_others_change_has_no_versions() {
    let place = tempfile::tempdir().unwrap();
    let fs = defuse_passthrough::Passthrough::new(
        place.path(),
        defuse_passthrough::PassthroughOptions::default(),
    );
    assert!(VersionedFileSystem::wrap(Arc::new(fs.unwrap())).is_none());
}

/// The number that a whole path leads to is good for every call, without a lookup.
#[test]
fn a_file_that_a_path_leads_to_is_opened_without_a_lookup() {
    let both = serve().with_client();
    both.attach(defuse_fs::Origin::new(), Arc::new(NoNotify));
    let cx = context();
    let dir = NewNode::new(FileKind::Directory, 0o755, cx.caller);
    both.mkdir(&cx, Ino::ROOT, name("dir"), &dir).unwrap();
    let (entry, file) = create(&both, "file");
    write(&both, file, 0, b"contents").unwrap();
    both.release(&cx, file, defuse_fs::ReleaseArgs::default()).unwrap();
    both.forget(entry.ino, 1);
    for _ in 0..2 {
        let path = NormalPath::new(b"file").unwrap();
        let Ok(PathResolution::Inode { ino, attr, open_to_all }) =
            shortcuts_of(&both).resolve(&cx, Ino::ROOT, path)
        else {
            panic!("the path does not lead to the file")
        };
        assert_eq!((ino, attr.size, open_to_all), (entry.ino, 8, true));
        assert!(attr.btime.is_some());
        let fh = both.open(&cx, ino, OpenArgs::default()).unwrap().fh;
        assert_eq!(read(&both, File { ino, fh }, 0, 100).unwrap(), b"contents");
        both.release(&cx, File { ino, fh }, defuse_fs::ReleaseArgs::default()).unwrap();
    }
    let missing = |path: &str| {
        shortcuts_of(&both).resolve(&cx, Ino::ROOT, NormalPath::new(path.as_bytes()).unwrap())
    };
    assert_eq!(missing("dir/none/file"), Ok(PathResolution::Missing { open_to_all: true }));
    assert_eq!(missing("file/name"), Ok(PathResolution::Walk));
    // A number that no server returned.
    assert_eq!(both.getattr(&cx, Ino(entry.ino.0 + 1000), None), Err(Errno::ESTALE));
}

/// Its number stays good while it is open, and while it is the working directory.
#[test]
fn a_directory_that_a_path_leads_to_is_opened_without_a_lookup() {
    let served = serve();
    let (one, two) = (VersionProgram::new(&served), VersionProgram::new(&served));
    one.client.mkdir(&one.task, WalkStart::Cwd, b"m:/dir", 0o755).unwrap();
    one.client.mkdir(&one.task, WalkStart::Cwd, b"m:/dir/sub", 0o755).unwrap();
    one.make("m:/dir/sub/file");
    let lookups = || served.requests_of(&["LOOKUP"]);
    let before = lookups();
    let open = |path: &str, flags| {
        let how = OpenHow { flags, ..OpenHow::default() };
        let opened = two.client.open(&two.task, WalkStart::Cwd, path.as_bytes(), how);
        opened.map_err(|stop| stop.errno().raw())
    };
    let dir = open("m:/dir/sub/", OpenFlags::DIRECTORY).unwrap();
    let names = two.client.read_dir(&two.task, &dir).unwrap();
    assert!(names.iter().any(|entry| entry.name == b"file"));
    let within = |name: &str| {
        let stat = two.client.stat(&two.task, WalkStart::Dir(&dir), name.as_bytes(), true);
        stat.map(|stat| stat.attr.kind).map_err(|stop| stop.errno().raw())
    };
    assert_eq!((within("file"), within("none")), (Ok(FileKind::Regular), Err(2)));
    two.client.fchdir(&two.task, &dir).unwrap();
    dir.close(&two.task).unwrap();
    drop(dir);
    assert_eq!(two.stat("file").map(|attr| attr.kind), Ok(FileKind::Regular));
    assert_eq!(lookups(), before);
    assert_eq!(two.client.getcwd(&two.task).unwrap(), b"m:/dir/sub");
    let not_dir = Err(Errno::ENOTDIR.raw());
    assert_eq!(open("m:/dir/sub/file/", 0).map(drop), not_dir);
    assert_eq!(open("m:/dir/sub/file", OpenFlags::DIRECTORY).map(drop), not_dir);
    assert_eq!(open("m:/dir/none/", 0).map(drop), Err(Errno::ENOENT.raw()));
    assert_eq!(open("m:/dir/", OpenFlags::WRONLY).map(drop), Err(Errno::EISDIR.raw()));
    // The directory goes, and is still the working directory.
    one.client.unlink(&one.task, WalkStart::Cwd, b"m:/dir/sub/file").unwrap();
    one.client.rmdir(&one.task, WalkStart::Cwd, b"m:/dir/sub").unwrap();
    assert_eq!(two.stat(".").map(|attr| attr.kind), Ok(FileKind::Directory));
    assert_eq!(two.stat("file"), Err(2));
}

/// A client that requests whole paths or directories learns no more than by lookups.
#[test]
fn a_path_leads_no_user_where_it_may_not_search() {
    let fs = memory();
    let (root, user) = (context(), Context::new(Caller { uid: 1000, gid: 1000, pid: 1 }));
    let dir = NewNode::new(FileKind::Directory, 0o700, root.caller);
    let dir = fs.mkdir(&root, Ino::ROOT, name("dir"), &dir).unwrap().ino;
    let file = NewNode::new(FileKind::Regular, 0o644, root.caller);
    let file = fs.mknod(&root, dir, name("file"), &file).unwrap().ino;
    let credentials = PeerCredentials { pid: 1, uid: 1000, groups: vec![1000] };
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let client = PeerConnection::new(Arc::clone(&fs), service, credentials);
    let path = |text: &'static str| NormalPath::new(text.as_bytes()).unwrap();
    let nobody = |step: defuse_connection::PathStep| assert_eq!(step.ino, dir);
    assert_eq!(
        client.walk_steps(&user, dir, path("file"), nobody),
        Err(Errno::ESTALE),
        "not told of"
    );
    assert_eq!(
        client.walk_steps(&user, Ino::ROOT, path("dir"), nobody),
        Ok(defuse_connection::WalkEnd::Found)
    );
    assert_eq!(client.walk_steps(&user, dir, path("file"), nobody), Err(Errno::EACCES));
    assert_eq!(client.walk_steps(&user, Ino::ROOT, path("dir/file"), nobody), Err(Errno::EACCES));
    let notified = client.names(&user, dir, 10, |_, _| panic!("a name is told"));
    assert_eq!(notified, Err(Errno::EACCES));
    assert_eq!(client.getattr(&user, file, None), Err(Errno::ESTALE));
    assert_eq!(
        client.walk_steps(&root, Ino::ROOT, path("dir"), nobody),
        Err(Errno::EPERM),
        "for root"
    );
    client.close();
}

/// The server remembers a limited number of the inodes that it returned.
#[test]
fn a_client_is_told_of_no_more_inodes_than_are_remembered() {
    let fs = memory();
    let cx = context();
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let credentials = PeerCredentials { pid: 1, uid: 0, groups: vec![0] };
    let client = PeerConnection::new(Arc::clone(&fs), service, credentials);
    let node = NewNode::new(FileKind::Fifo, 0o644, cx.caller);
    let mut all = Vec::new();
    for number in 0..80_000 {
        let text = number.to_string();
        all.push(fs.mknod(&cx, Ino::ROOT, name(&text), &node).unwrap().ino);
        client.walk_steps(&cx, Ino::ROOT, name(&text).into(), |_| ()).unwrap();
    }
    let known = |ino: &&Ino| client.getattr(&cx, **ino, None).is_ok();
    let count = all.iter().filter(known).count();
    assert!((32_000..70_000).contains(&count), "{count} inodes are remembered");
    assert!(all[79_000..].iter().all(|ino| known(&ino)), "the last ones");
    client.close();
}

/// A reader of a file notices at once what another client appends, and finds the end where it is.
#[test]
fn the_end_of_a_file_moves_with_what_others_append() {
    let served = serve();
    let (one, two) = (VersionProgram::new(&served), VersionProgram::new(&served));
    let open = |program: &VersionProgram, flags| {
        let how = OpenHow { flags, mode: 0o644, ..OpenHow::default() };
        program.client.open(&program.task, WalkStart::Cwd, b"m:/log", how).unwrap()
    };
    let writer = open(&one, OpenFlags::WRONLY | OpenFlags::CREAT | OpenFlags::APPEND);
    let reader = open(&two, 0);
    let read = || {
        let mut room = [0; 64];
        let len = two.client.read(&two.task, &reader, &mut room).unwrap();
        room[..len].to_vec()
    };
    for round in 0..50 {
        let line = format!("line {round}");
        one.client.write(&one.task, &writer, line.as_bytes()).unwrap();
        let by_file = two.client.fstat(&two.task, &reader).unwrap().attr.size;
        assert_eq!(by_file, one.stat("m:/log").unwrap().size);
        assert_eq!(read(), line.as_bytes());
        assert_eq!((read(), read()), (Vec::new(), Vec::new()));
    }
    writer.close(&one.task).unwrap();
    reader.close(&two.task).unwrap();
}

/// No server reports changes after its end.
#[test]
fn the_end_of_the_server_ends_what_its_clients_know() {
    let served = serve();
    let program = VersionProgram::new(&served);
    create(&served.client(), "file");
    assert!(program.stat("m:/file").is_ok() && program.stat("m:/none") == Err(2));
    drop(served);
    // The last thread of the server reports that it has ended.
    let begun = Instant::now();
    while program.stat("m:/none") == Err(2) && begun.elapsed() < Duration::from_secs(60) {
        std::thread::yield_now();
    }
    assert_eq!(program.stat("m:/none"), Err(Errno::ENOTCONN.raw()));
    assert_eq!(program.stat("m:/file"), Err(Errno::ENOTCONN.raw()));
}
