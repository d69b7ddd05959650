//! Several requests in one message: a path that is not known is opened by one, and a file is
//! created with its contents by one.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use defuse_connection::VersionSource;
use defuse_direct::{
    CallError, ClientMountArgs, ClientOptions, ClientTask, DirEntry, DirectClient, OpenHow,
    TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::Errno;
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_shared::{LaneOffers, VersionedFileSystem};
use defuse_socket::{ServerOptions, SocketServer};
use rustix::net::{RecvFlags, SendFlags};
use tempfile::TempDir;

mod raw;

const RDWR: u32 = 0o2;

/// A server of files in memory, with versions, on a new socket. It is stopped when dropped.
struct CompoundServer {
    server: Arc<SocketServer>,
    path: PathBuf,
    thread: Option<JoinHandle<bool>>,
    _dir: TempDir,
}

impl Drop for CompoundServer {
    fn drop(&mut self) {
        self.server.shut_down();
        let clean = self.thread.take().unwrap().join().unwrap();
        assert!(clean || std::thread::panicking(), "connections did not end");
    }
}

fn serve_with(options: MemoryOptions) -> CompoundServer {
    serve_by(options, ServerOptions::default())
}

/// Starts a server like [`served_with`], with further options of the server.
fn serve_by(options: MemoryOptions, server: ServerOptions) -> CompoundServer {
    let fs = VersionedFileSystem::wrap(Arc::new(MemoryFileSystem::new(options))).unwrap();
    let versions = Some(Arc::clone(&fs) as Arc<dyn VersionSource>);
    let dir = TempDir::with_prefix("defuse-compound-").unwrap();
    let path = dir.path().join("socket");
    let options = ServerOptions { versions, ..server };
    let server = Arc::new(SocketServer::bind(&path, fs, options).unwrap());
    let running = Arc::clone(&server);
    let thread = Some(std::thread::spawn(move || running.run()));
    CompoundServer { server, path, thread, _dir: dir }
}

fn serve() -> CompoundServer {
    serve_with(MemoryOptions::default())
}

/// A program with a connection of its own.
struct CompoundProgram {
    client: DirectClient,
}

impl CompoundProgram {
    fn new(served: &CompoundServer) -> CompoundProgram {
        let options = RemoteOptions { lanes: LaneUse::IfOffered, ..RemoteOptions::default() };
        let client =
            DirectClient::new(ClientOptions { kernel_links: false, ..ClientOptions::default() });
        client
            .mount(
                b"a:",
                Arc::new(RemoteClient::connect(&served.path, options).unwrap()),
                &ClientMountArgs::default(),
            )
            .unwrap();
        CompoundProgram { client }
    }
}

fn task(uid: u32) -> ClientTask {
    ClientTask::new(TaskCredentials::user(uid, uid, &[]), WorkDir::Outside(b"/".to_vec()))
}

/// The requests on files that the server has counted, by their kinds, links of chains among them.
fn count_requests(served: &CompoundServer) -> BTreeMap<&'static str, u64> {
    let of_files = |name: &&str| !matches!(*name, "SETUPMAPPING" | "DESTROY" | "INIT");
    let ops = served.server.snapshot().ops;
    let all = ops.iter().map(|op| (op.op.name(), op.latency.count));
    all.filter(|(name, count)| of_files(name) && *count > 0).collect()
}

/// The requests that the server has handled so far: it counts them soon after the answers.
fn count_handled(served: &CompoundServer) -> BTreeMap<&'static str, u64> {
    let mut last = count_requests(served);
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let now = count_requests(served);
        if now == last {
            return now;
        }
        last = now;
    }
}

/// Waits until the server has handled `expected` since it had handled `before`: it counts a request
/// after the answer. Nothing else may come.
fn await_handled(
    served: &CompoundServer,
    before: &BTreeMap<&'static str, u64>,
    expected: &[(&'static str, u64)],
) {
    let since = || {
        let all = count_requests(served).into_iter();
        let all = all.map(|(op, count)| (op, count - before.get(op).copied().unwrap_or(0)));
        all.filter(|(_, count)| *count > 0).collect::<Vec<_>>()
    };
    let begun = Instant::now();
    while since() != expected && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(since(), expected);
}

fn errno<T>(result: Result<T, CallError>) -> Errno {
    match result {
        Err(CallError::Errno(errno)) => errno,
        Err(CallError::Outside(_)) => panic!("led out of the mount"),
        Ok(_) => panic!("no error"),
    }
}

#[test]
fn an_unknown_path_is_opened_and_read_by_one_message() {
    let served = serve();
    let root = task(0);
    let maker = CompoundProgram::new(&served);
    maker.client.mkdir(&root, WalkStart::Cwd, b"a:/d", 0o755).unwrap();
    maker.client.mkdir(&root, WalkStart::Cwd, b"a:/d/e", 0o755).unwrap();
    maker.client.create_with(&root, WalkStart::Cwd, b"a:/d/e/file", 0o644, b"contents").unwrap();
    let program = CompoundProgram::new(&served);
    let before = count_handled(&served);
    let file =
        program.client.open(&root, WalkStart::Cwd, b"a:/d/e/file", OpenHow::default()).unwrap();
    let mut bytes = [0; 20];
    assert_eq!(program.client.pread(&root, &file, &mut bytes, 0), Ok(8));
    assert_eq!(&bytes[..8], b"contents");
    // One message with two requests.
    await_handled(&served, &before, &[("COMPOUND", 1), ("IOCTL", 1), ("OPEN", 1)]);
    // A missing file is not opened. The server learns of the read before, which has changed an
    // access time.
    let before = count_handled(&served);
    let open = program.client.open(&root, WalkStart::Cwd, b"a:/d/none", OpenHow::default());
    assert_eq!(errno(open), Errno::ENOENT);
    await_handled(&served, &before, &[("COMPOUND", 1), ("IOCTL", 1), ("READ", 1)]);
}

/// A lane carries whole chains: otherwise each of their requests would be one, or they would go
/// over the socket.
#[test]
fn a_chain_is_one_request_of_a_lane() {
    let lanes = Some(Arc::new(LaneOffers::default()) as _);
    let options = ServerOptions { lanes, ..ServerOptions::default() };
    let served = serve_by(MemoryOptions::default(), options);
    let root = task(0);
    let maker = CompoundProgram::new(&served);
    maker.client.mkdir(&root, WalkStart::Cwd, b"a:/d", 0o755).unwrap();
    maker.client.create_with(&root, WalkStart::Cwd, b"a:/d/file", 0o644, &[9; 20_000]).unwrap();
    let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    let remote = Arc::new(RemoteClient::connect(&served.path, options).unwrap());
    let client =
        DirectClient::new(ClientOptions { kernel_links: false, ..ClientOptions::default() });
    client.mount(b"a:", Arc::clone(&remote) as _, &ClientMountArgs::default()).unwrap();
    let by_lanes = || remote.lane_counts().unwrap().requests;
    for (path, data) in [(&b"a:/one"[..], &b"contents"[..]), (b"a:/two", &[7; 30_000])] {
        let before = (count_handled(&served), by_lanes());
        client.create_with(&root, WalkStart::Cwd, path, 0o644, data).unwrap();
        let all = [("COMPOUND", 1), ("CREATE", 1), ("FLUSH", 1), ("RELEASE", 1), ("WRITE", 1)];
        await_handled(&served, &before.0, &all);
        assert_eq!(by_lanes(), before.1 + 1);
    }
    let before = (count_handled(&served), by_lanes());
    let file = client.open(&root, WalkStart::Cwd, b"a:/d/file", OpenHow::default()).unwrap();
    let mut bytes = [0; 20_001];
    assert_eq!(client.pread(&root, &file, &mut bytes, 0), Ok(20_000));
    assert!(bytes[..20_000] == [9; 20_000]);
    await_handled(&served, &before.0, &[("COMPOUND", 1), ("IOCTL", 1), ("OPEN", 1)]);
    assert_eq!(by_lanes(), before.1 + 1);
}

#[test]
fn a_changed_file_is_read_anew_after_an_open_by_a_chain() {
    let served = serve();
    let root = task(0);
    let (writer, reader) = (CompoundProgram::new(&served), CompoundProgram::new(&served));
    writer.client.create_with(&root, WalkStart::Cwd, b"a:/file", 0o644, b"before").unwrap();
    let file = reader.client.open(&root, WalkStart::Cwd, b"a:/file", OpenHow::default()).unwrap();
    let how = OpenHow { flags: RDWR, ..OpenHow::default() };
    let other = writer.client.open(&root, WalkStart::Cwd, b"a:/file", how).unwrap();
    let mut bytes = [0; 6];
    reader.client.pread(&root, &file, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"before");
    writer.client.pwrite(&root, &other, b"behind", 0).unwrap();
    reader.client.pread(&root, &file, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"behind");
}

#[test]
fn a_file_that_the_caller_may_not_open_is_released() {
    let served = serve();
    let maker = CompoundProgram::new(&served);
    maker.client.create_with(&task(0), WalkStart::Cwd, b"a:/secret", 0o600, b"secret").unwrap();
    maker.client.symlink(&task(0), b"secret", WalkStart::Cwd, b"a:/link").unwrap();
    maker.client.mkdir(&task(0), WalkStart::Cwd, b"a:/dir", 0o755).unwrap();
    // The process is root, for the server, and its task is not.
    let program = CompoundProgram::new(&served);
    let before = count_handled(&served);
    let open = program.client.open(&task(1000), WalkStart::Cwd, b"a:/secret", OpenHow::default());
    assert_eq!(errno(open), Errno::EACCES);
    await_handled(&served, &before, &[("COMPOUND", 1), ("IOCTL", 1), ("OPEN", 1), ("RELEASE", 1)]);
    // Directories and links are opened in their own ways.
    for path in [&b"a:/dir"[..], b"a:/link"] {
        program.client.open(&task(0), WalkStart::Cwd, path, OpenHow::default()).unwrap();
    }
    drop((program, maker));
}

#[test]
fn a_file_is_created_with_its_contents_by_one_message() {
    let served = serve();
    let root = task(0);
    let program = CompoundProgram::new(&served);
    for (path, data) in [(&b"a:/empty"[..], &b""[..]), (b"a:/file", b"contents")] {
        let create =
            |client: &DirectClient| client.create_with(&root, WalkStart::Cwd, path, 0o640, data);
        let before = count_handled(&served);
        create(&program.client).unwrap();
        let all = [("COMPOUND", 1), ("CREATE", 1), ("FLUSH", 1), ("RELEASE", 1), ("WRITE", 1)];
        await_handled(&served, &before, &all[..if data.is_empty() { 4 } else { 5 }]);
        assert_eq!(errno(create(&program.client)), Errno::EEXIST);
        let stat = program.client.stat(&root, WalkStart::Cwd, path, true).unwrap();
        assert_eq!((stat.attr.size, stat.attr.perm), (data.len() as u64, 0o640));
    }
    let long: Vec<u8> = (0..1_000_000u32).map(|at| at as u8).collect();
    program.client.create_with(&root, WalkStart::Cwd, b"a:/long", 0o644, &long).unwrap();
    let file = program.client.open(&root, WalkStart::Cwd, b"a:/long", OpenHow::default()).unwrap();
    let mut bytes = vec![0; long.len() + 1];
    assert_eq!(program.client.pread(&root, &file, &mut bytes, 0), Ok(long.len()));
    assert!(bytes[..long.len()] == long);
    for (path, error) in [(&b"a:/none/file"[..], Errno::ENOENT), (b"a:/file/", Errno::EISDIR)] {
        let made = program.client.create_with(&root, WalkStart::Cwd, path, 0o644, b"x");
        assert_eq!(errno(made), error);
    }
    program.client.chmod(&root, WalkStart::Cwd, b"a:/", 0o755, true).unwrap();
    let denied = program.client.create_with(&task(1000), WalkStart::Cwd, b"a:/other", 0o644, b"x");
    assert_eq!(errno(denied), Errno::EACCES);
    drop(file);
}

#[test]
fn a_creation_on_a_full_file_system_says_so_and_closes_the_file() {
    let served = serve_with(MemoryOptions { size: Some(1 << 20), ..MemoryOptions::default() });
    let root = task(0);
    let program = CompoundProgram::new(&served);
    let some = vec![7; 60_000];
    let mut made = 0;
    let error = loop {
        let path = format!("a:/{made}");
        match program.client.create_with(&root, WalkStart::Cwd, path.as_bytes(), 0o644, &some) {
            Ok(()) => made += 1,
            Err(stop) => break errno(Err::<(), _>(stop)),
        }
        assert!(made < 100);
    };
    assert_eq!(error, Errno::ENOSPC);
    drop(program);
    // A file that was written in part was opened once more, for the rest.
    let all = count_handled(&served);
    let count = |op| all.get(op).copied().unwrap_or(0);
    assert_eq!(count("RELEASE"), count("CREATE") + count("OPEN"));
}

/// The names in a listing, but for `.` and `..`.
fn names(entries: &[DirEntry]) -> Vec<&str> {
    let names = entries.iter().map(|entry| std::str::from_utf8(&entry.name).unwrap());
    let mut names: Vec<_> = names.filter(|name| !matches!(*name, "." | "..")).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_small_directory_is_opened_and_listed_by_one_message() {
    let served = serve();
    let root = task(0);
    let maker = CompoundProgram::new(&served);
    let create = |path: &str| {
        maker.client.create_with(&root, WalkStart::Cwd, path.as_bytes(), 0o644, b"x").unwrap();
    };
    maker.client.mkdir(&root, WalkStart::Cwd, b"a:/empty", 0o755).unwrap();
    maker.client.mkdir(&root, WalkStart::Cwd, b"a:/d", 0o755).unwrap();
    ["one", "two", "three"].iter().for_each(|name| create(&format!("a:/d/{name}")));
    let program = CompoundProgram::new(&served);
    let open =
        |path: &[u8]| program.client.open(&root, WalkStart::Cwd, path, OpenHow::default()).unwrap();
    program.client.stat(&root, WalkStart::Cwd, b"a:/d", true).unwrap();
    program.client.stat(&root, WalkStart::Cwd, b"a:/empty", true).unwrap();
    for (path, expected) in [(&b"a:/empty"[..], &[][..]), (b"a:/d", &["one", "three", "two"])] {
        let before = count_handled(&served);
        let dir = open(path);
        let all = program.client.read_dir(&root, &dir).unwrap();
        assert_eq!(names(&all), expected);
        await_handled(&served, &before, &[("COMPOUND", 1), ("OPENDIR", 1), ("READDIR", 2)]);
        // From each position on, and from the beginning.
        for (at, entry) in all.iter().enumerate() {
            program.client.seek_dir(&dir, entry.next).unwrap();
            assert_eq!(program.client.read_dir(&root, &dir).unwrap(), all[at + 1..]);
        }
        program.client.seek_dir(&dir, 0).unwrap();
        assert_eq!(program.client.read_dir(&root, &dir).unwrap(), all);
    }
    // Another program changes the directory between the open and the listing, and between two.
    let dir = open(b"a:/d");
    create("a:/d/four");
    let now = program.client.read_dir(&root, &dir).unwrap();
    assert_eq!(names(&now), ["four", "one", "three", "two"]);
    maker.client.unlink(&root, WalkStart::Cwd, b"a:/d/one").unwrap();
    program.client.seek_dir(&dir, 0).unwrap();
    assert_eq!(names(&program.client.read_dir(&root, &dir).unwrap()), ["four", "three", "two"]);
}

#[test]
fn a_large_directory_is_listed_whole() {
    let served = serve();
    let root = task(0);
    let maker = CompoundProgram::new(&served);
    maker.client.mkdir(&root, WalkStart::Cwd, b"a:/d", 0o755).unwrap();
    // Of the sizes at which one answer, or both, are full.
    let mut made = Vec::new();
    for count in [100, 300, 400, 450, 500, 520, 600, 2000] {
        for number in made.len()..count {
            let path = format!("a:/d/{number:08}");
            maker.client.create_with(&root, WalkStart::Cwd, path.as_bytes(), 0o644, b"").unwrap();
            made.push(format!("{number:08}"));
        }
        let program = CompoundProgram::new(&served);
        let dir = program.client.open(&root, WalkStart::Cwd, b"a:/d", OpenHow::default()).unwrap();
        let all = program.client.read_dir(&root, &dir).unwrap();
        assert!(names(&all) == made, "{count} names");
    }
}

#[test]
fn who_lists_no_directories_asks_for_few_listings() {
    let served = serve();
    let root = task(0);
    let program = CompoundProgram::new(&served);
    for _ in 0..100 {
        program.client.open(&root, WalkStart::Cwd, b"a:/", OpenHow::default()).unwrap();
    }
    let listed = count_handled(&served).get("READDIR").copied().unwrap_or(0);
    assert!((8..=16).contains(&(listed / 2)), "{listed} parts of listings");
}

/// Opcodes, FUSE.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const WRITE: u32 = 16;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;
const SETLKW: u32 = 33;
const CREATE: u32 = 35;
const DESTROY: u32 = 38;
const POLL: u32 = 40;
const SETUPMAPPING: u32 = 48;
const COMPOUND: u32 = 54;
/// The parts of an answer that a link uses.
const INODE: u32 = 1;
const FILE: u32 = 2;
const POSITION: u32 = 4;

/// The structure of READDIR for so many bytes.
fn listing(bytes: u32) -> Vec<u8> {
    [&[0; 16][..], &bytes.to_ne_bytes(), &[0; 20]].concat()
}

/// A request that is a link, by a process that claims to be root.
fn request(opcode: u32, ino: u64, body: &[u8]) -> Vec<u8> {
    raw::request(opcode, 9, ino, 0, body)
}

/// The body of COMPOUND with these links: the results that they use, the links of these results,
/// and their requests.
fn chain(links: &[((u32, u32), &[u8])]) -> Vec<u8> {
    let mut all = Vec::new();
    for ((uses, of), request) in links {
        all.extend([*uses, *of].map(u32::to_ne_bytes).concat());
        all.extend(*request);
        all.resize(all.len().next_multiple_of(8), 0);
    }
    make_body(&all)
}

/// The body of COMPOUND with these bytes for links.
fn make_body(links: &[u8]) -> Vec<u8> {
    [&[links.len() as u32, 0].map(u32::to_ne_bytes).concat(), links].concat()
}

/// Sends a request for the user `uid`, and returns the error and the body of the answer.
fn ask(socket: &OwnedFd, uid: u32, opcode: u32, body: &[u8]) -> (i32, Vec<u8>) {
    const NUMBER: u64 = 4;
    let message = raw::request(opcode, NUMBER, 1, uid, body);
    rustix::net::send(socket, &message, SendFlags::empty()).unwrap();
    let mut room = vec![0; 1 << 18];
    loop {
        let (_, len) = rustix::net::recv(socket, &mut room[..], RecvFlags::empty()).unwrap();
        if room[8..16] == NUMBER.to_ne_bytes() {
            let error = i32::from_ne_bytes(room[4..8].try_into().unwrap());
            return (-error, room[16..len].to_vec());
        }
    }
}

/// The errors in the answers to the links of a chain.
fn errors(socket: &OwnedFd, links: &[((u32, u32), &[u8])]) -> Vec<i32> {
    let (error, body) = ask(socket, 0, COMPOUND, &chain(links));
    assert_eq!(error, 0);
    let (mut rest, mut all) = (&body[..], Vec::new());
    while !rest.is_empty() {
        let word = |at: usize| u32::from_ne_bytes(rest[at..at + 4].try_into().unwrap());
        all.push(-(word(4) as i32));
        rest = &rest[(word(0) as usize).next_multiple_of(8)..];
    }
    all
}

/// A connection that has agreed on everything.
fn connect_agreed(served: &CompoundServer) -> OwnedFd {
    let socket = raw::connect_and_init_with(&served.path, 0, u32::MAX);
    let mut room = [0; 4096];
    rustix::net::recv(&socket, &mut room[..], RecvFlags::empty()).unwrap();
    socket
}

#[test]
fn hostile_chains_are_refused_and_do_nothing() {
    let served = serve();
    let lookup = request(LOOKUP, 1, b"none\0");
    let plain = ((0, 0), &lookup[..]);
    // A client that has not agreed on chains, like a kernel, has none.
    let stranger = raw::connect_and_init(&served.path, 0);
    assert_eq!(ask(&stranger, 0, COMPOUND, &chain(&[plain])).0, Errno::ENOSYS.raw());
    let socket = connect_agreed(&served);
    assert_eq!(errors(&socket, &[plain]), [Errno::ENOENT.raw()]);
    // Not as a part of another one: chains, and what has no answer, or one at another time or with
    // a descriptor.
    for (opcode, body) in [
        (COMPOUND, chain(&[plain])),
        (INIT, vec![0; 64]),
        (DESTROY, vec![]),
        (FORGET, vec![0; 8]),
        (SETLKW, vec![0; 48]),
        (POLL, vec![0; 24]),
        (SETUPMAPPING, vec![0; 40]),
    ] {
        let link = request(opcode, 1, &body);
        let found = errors(&socket, &[((0, 0), &link), plain]);
        assert_eq!(found, [Errno::EOPNOTSUPP.raw()], "{opcode}");
    }
    // A link that uses a result that an earlier link has not returned, or that has no place for the
    // result.
    let root = request(LOOKUP, 1, b"file\0");
    let (open, write) = (request(OPEN, 0, &[0; 8]), request(WRITE, 0, &[0; 40]));
    let program = CompoundProgram::new(&served);
    program.client.create_with(&task(0), WalkStart::Cwd, b"a:/file", 0o644, b"contents").unwrap();
    let none = Errno::ENOENT.raw();
    assert_eq!(errors(&socket, &[((0, 0), &root), ((INODE | FILE, 0), &write)]), [0, none]);
    let links = [((0, 0), &root[..]), ((INODE, 0), &open), ((FILE, 1), &open)];
    assert_eq!(errors(&socket, &links), [0, 0, Errno::EINVAL.raw()]);
    // An open returns its inode, and an answer without one does not.
    let links = [((0, 0), &root[..]), ((INODE, 0), &open), ((INODE, 1), &open)];
    assert_eq!(errors(&socket, &links), [0, 0, 0]);
    let attributes = request(GETATTR, 1, &[0; 16]);
    assert_eq!(errors(&socket, &[((0, 0), &attributes), ((INODE, 0), &open)]), [0, none]);
    // A position comes from a listing, and is valid for a listing.
    let (opendir, readdir) = (request(OPENDIR, 1, &[0; 8]), request(READDIR, 0, &listing(4096)));
    let all = INODE | FILE | POSITION;
    let links = [((0, 0), &opendir[..]), ((INODE | FILE, 0), &readdir), ((all, 1), &readdir)];
    assert_eq!(errors(&socket, &links), [0, 0, 0]);
    assert_eq!(errors(&socket, &[((0, 0), &opendir), ((all, 0), &readdir)]), [0, none]);
    let links = [((0, 0), &opendir[..]), ((INODE | FILE, 0), &readdir), ((all, 1), &write)];
    assert_eq!(errors(&socket, &links), [0, 0, Errno::EINVAL.raw()]);
    // A handle is of this connection and this inode, wherever it comes from.
    let links = [((0, 0), &root[..]), ((INODE, 0), &open), ((FILE, 1), &write)];
    assert_eq!(errors(&socket, &links), [0, 0, Errno::ESTALE.raw()]);
    // An answer that one message cannot have.
    let readdir =
        request(READDIR, 1, &[[0u64, 0].map(u64::to_ne_bytes).concat(), vec![0xff; 24]].concat());
    assert_eq!(errors(&socket, &[((0, 0), &readdir)]), [Errno::E2BIG.raw()]);
    // Messages that are no chain at all.
    let many: Vec<_> = (0..9).map(|_| plain).collect();
    let itself = chain(&[((INODE, 0), &open)]);
    let later = chain(&[((INODE, 1), &open), plain]);
    let cut = chain(&[plain]);
    for body in [
        make_body(&[]),
        make_body(&[0; 7]),
        make_body(&[0xff; 64]),
        make_body(&cut[8..cut.len() - 8]),
        chain(&many),
        itself,
        later,
    ] {
        assert_eq!(ask(&socket, 0, COMPOUND, &body).0, Errno::EINVAL.raw());
    }
    // The server serves on.
    let stat = program.client.stat(&task(0), WalkStart::Cwd, b"a:/file", true).unwrap();
    assert_eq!(stat.attr.size, 8);
}

#[test]
fn links_act_for_the_caller_of_the_chain_whatever_they_say() {
    let served = serve();
    let program = CompoundProgram::new(&served);
    program.client.chmod(&task(0), WalkStart::Cwd, b"a:/", 0o777, true).unwrap();
    let create = request(
        CREATE,
        1,
        &[&[1, 0o100644, 0, 0].map(u32::to_ne_bytes).concat()[..], b"new\0"].concat(),
    );
    let (error, body) = ask(&connect_agreed(&served), 1000, COMPOUND, &chain(&[((0, 0), &create)]));
    assert_eq!((error, &body[4..8]), (0, &[0; 4][..]));
    let stat = program.client.stat(&task(0), WalkStart::Cwd, b"a:/new", true).unwrap();
    assert_eq!((stat.attr.uid, stat.attr.gid), (1000, 1000));
}
