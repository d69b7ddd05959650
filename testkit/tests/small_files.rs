//! Small files come with the reply to OPEN: reading them takes no request, and no client reads old
//! bytes.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_connection::{
    PeerConnection, PeerCredentials, ServiceQuotas, ServiceState, VersionSource,
};
use defuse_fs::{
    Caller, Context, File, FileSystem, Ino, NoNotify, OpenArgs, OpenFlags, Origin, PathResolution,
    ReadArgs, ReadBuf, ReleaseArgs, SetAttr, SetTime, Shortcuts, SliceSink, Timestamp,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_shared::VersionedFileSystem;
use defuse_socket::ServerOptions;

#[allow(dead_code)] // Not all of it is used here.
mod served;
use served::{TestServer, context, create, name};

/// The largest file that comes with the reply, in bytes.
const MOST: usize = 32 * 1024;

fn serve() -> TestServer {
    let fs = VersionedFileSystem::wrap(Arc::new(MemoryFileSystem::new(MemoryOptions::default())))
        .unwrap();
    let versions = Some(Arc::clone(&fs) as Arc<dyn VersionSource>);
    let options = ServerOptions { versions, ..ServerOptions::default() };
    let clients = RemoteOptions { lanes: LaneUse::IfOffered, ..RemoteOptions::default() };
    TestServer::new(fs, options, clients)
}

/// A client that knows the versions of the server.
fn connect(served: &TestServer) -> RemoteClient {
    let client = served.client();
    client.attach(Origin::new(), Arc::new(NoNotify));
    client
}

fn open(fs: &dyn FileSystem, ino: Ino, flags: u32) -> File {
    let args = OpenArgs { flags: OpenFlags(flags), kill_suidgid: false };
    File { ino, fh: fs.open(&context(), ino, args).unwrap().fh }
}

fn close(fs: &dyn FileSystem, file: File) {
    fs.release(&context(), file, ReleaseArgs::default()).unwrap();
}

fn read_with(fs: &dyn FileSystem, file: File, flags: u32, (offset, len): (u64, usize)) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let args = ReadArgs { offset, flags: OpenFlags(flags), ..ReadArgs::default() };
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    fs.read(&context(), file, args, &mut out).unwrap();
    let filled = out.filled_len();
    bytes.truncate(filled);
    bytes
}

fn read(fs: &dyn FileSystem, file: File, offset: u64, len: usize) -> Vec<u8> {
    served::read(fs, file, offset, len).unwrap()
}

fn write(fs: &dyn FileSystem, file: File, offset: u64, bytes: &[u8]) {
    assert_eq!(served::write(fs, file, offset, bytes), Ok(bytes.len()));
}

/// A file with these bytes, closed. Its inode is known to all clients, which are clients of one
/// user.
fn make(fs: &dyn FileSystem, text: &str, bytes: &[u8]) -> Ino {
    let (_, file) = create(fs, text);
    write(fs, file, 0, bytes);
    close(fs, file);
    file.ino
}

fn resize(fs: &dyn FileSystem, ino: Ino, size: u64) {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fs.setattr(&context(), ino, None, &set).unwrap();
}

fn look_up(fs: &dyn FileSystem, text: &str) -> Ino {
    fs.lookup(&context(), Ino::ROOT, name(text)).unwrap().ino
}

#[test]
fn a_small_file_is_read_by_its_open_alone() {
    let served = serve();
    let client = connect(&served);
    let bytes: Vec<u8> = (0..MOST).map(|at| at as u8).collect();
    let ino = make(&client, "file", &bytes);
    let empty = make(&client, "empty", &[]);
    let before = served.requests_of(&["READ"]);
    for _ in 0..3 {
        let file = open(&client, ino, 0);
        assert!(read(&client, file, 0, 2 * MOST) == bytes);
        assert_eq!(read(&client, file, 1000, 10), bytes[1000..1010]);
        assert_eq!(read(&client, file, MOST as u64, 10), []);
        assert_eq!(read(&client, file, u64::MAX, 10), []);
        close(&client, file);
    }
    let file = open(&client, empty, 0);
    assert_eq!(read(&client, file, 0, 10), []);
    close(&client, file);
    // The access time of the file is the time of its first read, so that there is nothing to
    // report.
    let file = open(&client, ino, 0);
    assert_eq!(read(&client, file, 1000, 10), bytes[1000..1010]);
    client.getattr(&context(), ino, None).unwrap();
    assert_eq!(served.requests_of(&["READ"]), before);
    // One byte more does not come with the reply.
    let ino = make(&client, "large", &vec![7; MOST + 1]);
    let file = open(&client, ino, 0);
    assert!(read(&client, file, 0, 2 * MOST) == vec![7; MOST + 1]);
    assert!(served.requests_of(&["READ"]) > before);
    close(&client, file);
    // The first read has changed the access time. Others do not, so that the attributes stay known,
    // for a second.
    let before = served.requests_of(&["IOCTL"]);
    for _ in 0..20 {
        client.resolve(&context(), Ino::ROOT, name("large").into()).unwrap();
        let file = open(&client, ino, 0);
        assert_eq!(read(&client, file, 0, 10), [7; 10]);
        close(&client, file);
    }
    let made = served.requests_of(&["IOCTL"]) - before;
    assert!(made < 10, "{made} requests");
}

#[test]
fn a_small_file_that_is_open_for_both_is_read_by_its_open_until_it_is_written_to() {
    let served = serve();
    let client = connect(&served);
    let ino = make(&client, "file", &[1; 5000]);
    let before = served.requests_of(&["READ"]);
    for _ in 0..3 {
        let file = open(&client, ino, OpenFlags::RDWR);
        assert_eq!(read(&client, file, 100, 9000), [1; 4900]);
        close(&client, file);
    }
    assert_eq!(served.requests_of(&["READ"]), before);
    let file = open(&client, ino, OpenFlags::RDWR);
    write(&client, file, 0, &[2; 100]);
    assert_eq!(read(&client, file, 50, 100), [[2; 50], [1; 50]].concat());
    close(&client, file);
    // Programs that only write to such files end the bytes of these, and not of those that are only
    // read.
    for _ in 0..20 {
        let file = open(&client, ino, OpenFlags::RDWR);
        write(&client, file, 0, &[3; 100]);
        close(&client, file);
    }
    let before = served.requests_of(&["READ"]);
    for (flags, reads) in [(0, 0), (OpenFlags::RDWR, 1)] {
        let file = open(&client, ino, flags);
        assert_eq!(read(&client, file, 0, 100), [3; 100]);
        close(&client, file);
        assert_eq!(served.requests_of(&["READ"]), before + reads);
    }
}

/// Whatever another client does to the file after it was opened, a read sees it.
#[test]
fn a_change_by_another_client_is_read() {
    let served = serve();
    let (one, other) = (connect(&served), connect(&served));
    let ino = make(&one, "file", &[1; 100]);
    let seen = look_up(&other, "file");
    let changes: [(&str, &dyn Fn()); 4] = [
        ("a write", &|| {
            let file = open(&one, ino, OpenFlags::WRONLY);
            write(&one, file, 10, &[2; 5]);
            close(&one, file);
        }),
        ("a truncation", &|| resize(&one, ino, 50)),
        ("an extension", &|| resize(&one, ino, 200)),
        ("an open that truncates", &|| {
            close(&one, open(&one, ino, OpenFlags::WRONLY | OpenFlags::TRUNC));
        }),
    ];
    for (what, change) in changes {
        let file = open(&other, seen, 0);
        let before = read(&other, file, 0, 1000);
        change();
        let after = read(&other, file, 0, 1000);
        assert!(before != after, "{what}");
        let fresh = open(&one, ino, 0);
        assert_eq!(after, read(&one, fresh, 0, 1000), "{what}");
        close(&one, fresh);
        close(&other, file);
    }
}

#[test]
fn a_store_to_a_mapped_file_is_read() {
    let served = serve();
    let (one, other) = (connect(&served), connect(&served));
    let ino = make(&one, "file", &[1; 8192]);
    let seen = look_up(&other, "file");
    let before = open(&other, seen, 0);
    let writer = open(&one, ino, OpenFlags::RDWR);
    let memory = std::fs::File::from(one.map(&context(), writer, 0..8192, true).unwrap());
    let while_mapped = open(&other, seen, 0);
    memory.write_all_at(&[2; 100], 5000).unwrap();
    for file in [before, while_mapped] {
        assert_eq!(read(&other, file, 5000, 101), [vec![2; 100], vec![1]].concat());
    }
    one.unmap(&context(), ino).unwrap();
    assert_eq!(read(&other, before, 5000, 101), [vec![2; 100], vec![1]].concat());
}

/// The access time is the time of a read, at once for the client that reads, and from the close on
/// for others.
#[test]
fn the_access_time_follows_the_read() {
    let served = serve();
    let (one, other) = (connect(&served), connect(&served));
    // Not a day ago: then an open changes it.
    let past = Timestamp { secs: Timestamp::now().secs - 3600, nanos: 0 };
    let atime = |fs: &dyn FileSystem, ino: Ino| fs.getattr(&context(), ino, None).unwrap().atime;
    let age = |ino| {
        let set = SetAttr { atime: Some(SetTime::At(past)), ..SetAttr::default() };
        one.setattr(&context(), ino, None, &set).unwrap();
    };
    let ino = make(&one, "file", &[1; 100]);
    let seen = look_up(&other, "file");
    age(ino);
    // An open alone changes nothing, nor does a read with O_NOATIME.
    let no_atime = OpenFlags::NOATIME;
    let file = open(&one, ino, no_atime);
    assert_eq!(read_with(&one, file, no_atime, (0, 10)), [1; 10]);
    assert_eq!(atime(&one, ino), past);
    close(&one, file);
    assert_eq!((atime(&one, ino), atime(&other, seen)), (past, past));
    // While it is open, also where the attributes are known.
    let known = || match one.resolve(&context(), Ino::ROOT, name("file").into()) {
        Ok(PathResolution::Inode { attr, .. }) => attr.atime,
        other => panic!("{other:?}"),
    };
    let file = open(&one, ino, 0);
    assert_eq!(known(), past);
    assert_eq!(read(&one, file, 0, 10), [1; 10]);
    assert!(known() > past && atime(&one, ino) > past);
    close(&one, file);
    // By its close.
    age(ino);
    let file = open(&one, ino, 0);
    assert_eq!(read(&one, file, 0, 10), [1; 10]);
    close(&one, file);
    assert!(atime(&one, ino) > past && atime(&other, seen) > past);
    // A time that is set after the read stays.
    age(ino);
    let file = open(&one, ino, 0);
    assert_eq!(read(&one, file, 0, 10), [1; 10]);
    age(ino);
    close(&one, file);
    assert_eq!(atime(&one, ino), past);
}

/// A client that has the file open for writing only, or not at all, gets none of its bytes,
/// whatever it requests.
#[test]
fn bytes_need_a_file_that_is_open_for_reading() {
    let fs: Arc<dyn FileSystem> = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let user = |uid| PeerCredentials { pid: 1, uid, groups: vec![uid] };
    let root = PeerConnection::new(Arc::clone(&fs), Arc::clone(&service), user(0));
    let (entry, file) = create(&root, "secret");
    served::write(&root, file, 0, &[1; 100]).unwrap();
    let set = SetAttr { perm: Some(0o622), ..SetAttr::default() };
    root.setattr(&context(), entry.ino, None, &set).unwrap();
    let whole = |size| root.read_whole(&context(), file, size).map(|whole| whole.bytes);
    assert_eq!((whole(100), whole(99)), (Some(vec![1; 100]), None));
    let stranger = PeerConnection::new(fs, service, user(7));
    let own = Context::new(Caller { uid: 7, gid: 7, pid: 1 });
    assert_eq!(stranger.read_whole(&own, file, 100), None);
    let ino = stranger.lookup(&own, Ino::ROOT, name("secret")).unwrap().ino;
    assert_eq!(stranger.read_whole(&own, file, 100), None);
    let args = OpenArgs { flags: OpenFlags(OpenFlags::WRONLY), kill_suidgid: false };
    let fh = stranger.open(&own, ino, args).unwrap().fh;
    assert_eq!(stranger.read_whole(&own, File { ino, fh }, 100), None);
}

/// Programs that open files and read none do not pay for bytes for long.
#[test]
fn bytes_that_nobody_reads_are_rarely_asked_for() {
    let served = serve();
    let client = connect(&served);
    let ino = make(&client, "file", &[1; 100]);
    (0..100).for_each(|_| close(&client, open(&client, ino, 0)));
    let before = served.requests_of(&["READ"]);
    for _ in 0..64 {
        let file = open(&client, ino, 0);
        assert_eq!(read(&client, file, 0, 100), [1; 100]);
        close(&client, file);
    }
    let made = served.requests_of(&["READ"]) - before;
    assert!((1..64).contains(&made), "{made}: soon they are asked for again");
}

/// A client keeps the bytes of a limited number of open files, and reads the others by requests.
#[test]
fn any_number_of_open_files_are_read() {
    let client = serve().with_client();
    client.attach(Origin::new(), Arc::new(NoNotify));
    let ino = make(&client, "file", &[1; 1000]);
    let files: Vec<File> = (0..600).map(|_| open(&client, ino, 0)).collect();
    for _ in 0..2 {
        files.iter().for_each(|file| assert_eq!(read(&client, *file, 990, 20), [1; 10]));
    }
    files.into_iter().for_each(|file| close(&client, file));
}

/// A reader never sees bytes that are older than an earlier write that was answered.
#[test]
fn two_clients_read_what_was_written_last() {
    let served = serve();
    let (one, other) = (connect(&served), connect(&served));
    let ino = make(&one, "file", &[0; 4096]);
    let seen = look_up(&other, "file");
    let ended = AtomicBool::new(false);
    let written = std::sync::atomic::AtomicU8::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = open(&one, ino, OpenFlags::WRONLY);
            for round in 1..=200 {
                write(&one, file, 0, &[round; 4096]);
                written.store(round, Ordering::SeqCst);
            }
            ended.store(true, Ordering::SeqCst);
        });
        while !ended.load(Ordering::SeqCst) {
            let file = open(&other, seen, 0);
            for _ in 0..3 {
                let least = written.load(Ordering::SeqCst);
                let bytes = read(&other, file, 0, 4096);
                assert!(bytes[0] >= least, "{} is older than {least}", bytes[0]);
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "of one write");
            }
            close(&other, file);
        }
    });
}
