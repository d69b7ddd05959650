//! Attacks of clients through shared memory. The server runs as root; the attacker is another user,
//! who makes requests by hand and writes anything into its lanes, while an honest client works.

mod raw;

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Context, Errno, File, FileKind, FileSystem, Ino, Name, NewNode, NoNotify, NormalPath,
    OpenArgs, OpenFlags, Origin, ReadArgs, ReadBuf, Shortcuts, SliceSink, SliceSource, WriteArgs,
    WriteBuf,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_ring::layout::{BYTES, arena_of, number_in};
use defuse_ring::{ClientLane, MappedMemory as Ring, PeerMemory};
use defuse_shared::{SharedLayers, SharedOptions};
use defuse_socket::{AdmissionPolicy, ServerOptions, SocketServer};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

const USER: u32 = 4321;
const SECRET: &[u8] = b"the bytes that only root may read";
/// A name in the directory `closed` of root.
const HIDDEN: &str = "the name that only root may know";
const PUBLIC: &[u8] = b"the bytes that everybody may read";

/// Positions in the memory, see ring/SPEC.md.
const USED: usize = 192;
const LANE_AT: usize = 4096;
const LANE: usize = 4096 + ARENA as usize;
/// Bytes of the arena of the first lanes.
const ARENA: u32 = arena_of(0) as u32;

/// Runs an attack of [`USER`] on a server with a file `secret` of root, while an honest client of
/// root writes and reads. Fails if that one notices.
fn attack(run: impl FnOnce(&Path, Ino) + Send) {
    attack_open_file(|path, secret| run(path, secret.ino));
}

/// Runs an attack like [`attack`], with the open file of the honest client, which reads it from
/// pages. Other files of root are `public`, `drop`, which others may only write, and [`HIDDEN`] in
/// `closed`.
fn attack_open_file(run: impl FnOnce(&Path, File) + Send) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).unwrap();
    let path = dir.path().join("socket");
    let memory =
        MemoryFileSystem::new(MemoryOptions { root_perm: 0o777, ..MemoryOptions::default() });
    let layers = SharedLayers::build(Arc::new(memory), SharedOptions::default());
    let (versions, pages) = (layers.version_source(), layers.page_source());
    let lanes = layers.transport();
    let admission = AdmissionPolicy::Users(vec![USER]);
    let options = ServerOptions { admission, lanes, pages, versions, ..ServerOptions::default() };
    let server = SocketServer::bind(&path, layers.fs, options).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
        let honest = RemoteClient::connect(&path, options).unwrap();
        honest.attach(Origin::new(), Arc::new(NoNotify));
        let secret = make_files(&honest);
        let over = &over;
        let works = scope.spawn(move || {
            let file = create(&honest, Ino::ROOT, "honest", 0o600);
            let mut longest = Duration::ZERO;
            for round in (0..=u8::MAX).cycle() {
                let begun = Instant::now();
                assert_eq!(write(&honest, file, &[round; 3000]), Ok(3000));
                assert_eq!(read(&honest, file), [round; 3000]);
                longest = longest.max(begun.elapsed());
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
            longest
        });
        let path = &path;
        let done = scope.spawn(move || {
            become_user();
            run(path, secret);
        });
        let done = done.join();
        over.store(true, Ordering::Relaxed);
        let longest = works.join();
        server.shut_down();
        done.unwrap();
        let longest = longest.unwrap();
        assert!(longest < Duration::from_secs(30), "the honest client waited for {longest:?}");
    });
}

/// Makes the files of root. Returns `secret`, of which this client and the server have the pages.
fn make_files(honest: &RemoteClient) -> File {
    let made = [("secret", 0o600, SECRET), ("drop", 0o622, SECRET), ("public", 0o644, PUBLIC)];
    let made = made.map(|(text, perm, bytes)| {
        let file = create(honest, Ino::ROOT, text, perm);
        assert_eq!(write(honest, file, bytes), Ok(bytes.len()));
        (0..12).for_each(|_| assert_eq!(read(honest, file), bytes));
        file
    });
    assert!(honest.lane_counts().unwrap().page_reads > 0);
    let node = NewNode::new(FileKind::Directory, 0o700, cx().caller);
    let closed = honest.mkdir(&cx(), Ino::ROOT, Name::new(b"closed").unwrap(), &node).unwrap();
    create(honest, closed.ino, HIDDEN, 0o644);
    let path = format!("closed/{HIDDEN}");
    honest.resolve(&cx(), Ino::ROOT, NormalPath::new(path.as_bytes()).unwrap()).unwrap();
    made[0]
}

/// Makes the calling thread another user.
fn become_user() {
    let user = rustix::process::Uid::from_raw(USER);
    let group = rustix::process::Gid::from_raw(USER);
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_res_gid(group, group, group).unwrap();
    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
}

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn create(fs: &RemoteClient, dir: Ino, text: &str, perm: u32) -> File {
    let node = NewNode::new(FileKind::Regular, perm, cx().caller);
    let flags = OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT);
    let args = OpenArgs { flags, kill_suidgid: false };
    let name = Name::new(text.as_bytes()).unwrap();
    let (entry, opened) = fs.create(&cx(), dir, name, &node, args).unwrap();
    File { ino: entry.ino, fh: opened.fh }
}

fn write(fs: &RemoteClient, file: File, bytes: &[u8]) -> Result<usize, Errno> {
    let args = WriteArgs { flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    fs.write(&cx(), file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes)))
}

fn read(fs: &RemoteClient, file: File) -> Vec<u8> {
    let mut bytes = vec![0; 4000];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, 4000);
    fs.read(&cx(), file, ReadArgs::default(), &mut out).unwrap();
    let filled = out.filled_len();
    bytes.truncate(filled);
    bytes
}

/// A client made by hand: after INIT, with its memory.
struct LaneAttacker {
    socket: OwnedFd,
    memory: Arc<Ring>,
    lane: ClientLane,
}

/// A request of FUSE with the credentials of the attacker.
fn request(opcode: u32, number: u64, ino: u64, body: &[u8]) -> Vec<u8> {
    raw::request(opcode, number, ino, USER, body)
}

/// The descriptor and the bytes of a message.
fn receive(socket: &OwnedFd) -> (Option<OwnedFd>, Vec<u8>) {
    let mut room = [0; 4096];
    let mut beside = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut beside);
    let mut parts = [IoSliceMut::new(&mut room)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut parts, &mut beside, flags).unwrap();
    let fd = beside.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    (fd, room[..received.bytes].to_vec())
}

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const OPENDIR: u32 = 27;
const IOCTL: u32 = 39;
const SETUPMAPPING: u32 = 48;

/// Flags of SETUPMAPPING.
const MAP_TO_WRITE: u64 = 1;
const MAP_TO_READ: u64 = 2;
const TOLD_NAMES: u64 = 1 << 61;
const VERSIONS: u64 = 1 << 62;
const PAGES: u64 = 1 << 63;

/// Ioctls for a whole path and for the names of a directory.
const RESOLVE: u32 = (b'D' as u32) << 8 | 2;
const NAMES: u32 = (b'D' as u32) << 8 | 3;

/// The body of SETUPMAPPING for an open file.
fn mapping(fh: u64, flags: u64) -> Vec<u8> {
    [fh, 0, 4096, flags, 0].map(u64::to_ne_bytes).concat()
}

/// The number in front of an answer: an inode or an open file.
fn read_first(reply: Vec<u8>) -> u64 {
    u64::from_ne_bytes(reply[..8].try_into().unwrap())
}

/// True if the memory behind a descriptor has these bytes anywhere.
fn has_bytes(memory: &OwnedFd, bytes: &[u8]) -> bool {
    let mut all = vec![0; rustix::fs::fstat(memory).unwrap().st_size as usize];
    let len = rustix::io::pread(memory, &mut all[..], 0).unwrap();
    assert_eq!(len, all.len());
    all.windows(bytes.len()).any(|part| part == bytes)
}

impl LaneAttacker {
    fn connect(path: &Path) -> LaneAttacker {
        let socket = raw::connect_and_init(path, USER);
        let (fd, _) = receive(&socket);
        let memory = Arc::new(Ring::from_fd(fd.unwrap()).unwrap());
        let mut room = [0; 4096];
        let (len, _) = rustix::net::recv(&socket, &mut room[..], RecvFlags::empty()).unwrap();
        assert!(len > 16, "INIT was not answered");
        LaneAttacker { socket, memory, lane: ClientLane::new(0) }
    }

    fn ring_doorbell(&self) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&self.socket, &[0], flags);
    }

    /// The reply to a request, without the header; the error; or `None` if the connection has
    /// ended.
    fn ask(&mut self, opcode: u32, ino: u64, body: &[u8]) -> Option<Result<Vec<u8>, i32>> {
        let number = self.lane.next_number();
        self.lane.submit(&*self.memory, number, &[&request(opcode, number, ino, body)], 0).unwrap();
        self.ring_doorbell();
        loop {
            if let Some(answer) = self.lane.poll(&*self.memory).unwrap() {
                let mut reply = vec![0; answer.len];
                self.lane.copy(&*self.memory, answer, 0, &mut reply);
                let error = i32::from_ne_bytes(reply[4..8].try_into().unwrap());
                return Some(if error == 0 { Ok(reply.split_off(16)) } else { Err(-error) });
            }
            if self.has_ended(Duration::ZERO) {
                return None;
            }
            self.lane.sleep(&*self.memory, Duration::from_millis(5));
        }
    }

    /// The descriptor that the server gives for a SETUPMAPPING on the socket, or the error.
    fn ask_for_memory(&self, ino: u64, fh: u64, flags: u64) -> Result<OwnedFd, i32> {
        const NUMBER: u64 = 44;
        let message = request(SETUPMAPPING, NUMBER, ino, &mapping(fh, flags));
        rustix::net::send(&self.socket, &message, SendFlags::NOSIGNAL).unwrap();
        loop {
            let (fd, reply) = receive(&self.socket);
            assert!(!reply.is_empty(), "the connection has ended");
            if reply[8..16] == NUMBER.to_ne_bytes() {
                let error = i32::from_ne_bytes(reply[4..8].try_into().unwrap());
                assert_eq!(fd.is_some(), error == 0, "error {error}");
                return fd.ok_or(-error);
            }
        }
    }

    /// The inode of a name in the root directory.
    fn look_up(&mut self, text: &str) -> u64 {
        read_first(self.ask(LOOKUP, 1, format!("{text}\0").as_bytes()).unwrap().unwrap())
    }

    fn open(&mut self, ino: u64, flags: u32) -> Result<u64, i32> {
        self.ask(OPEN, ino, &[flags, 0].map(u32::to_ne_bytes).concat()).unwrap().map(read_first)
    }

    /// The output of an ioctl of a directory, or the error.
    fn ioctl(&mut self, ino: u64, command: u32, input: &[u8]) -> Result<Vec<u8>, i32> {
        let head = [0, 0, 0, command, 0, 0, input.len() as u32, 65_536].map(u32::to_ne_bytes);
        self.ask(IOCTL, ino, &[&head.concat(), input].concat()).unwrap()
    }

    /// True if the server has closed the socket, at the latest after `patience`.
    fn has_ended(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        loop {
            let mut room = [0; 4096];
            match rustix::net::recv(&self.socket, &mut room[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET) => return true,
                _ if Instant::now() > until => return false,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// True if any byte of the memory comes from the secret.
    fn has_secret(&self) -> bool {
        let mut all = vec![0; BYTES];
        self.memory.read(0, &mut all);
        all.windows(SECRET.len()).any(|bytes| bytes == SECRET)
    }
}

#[test]
fn counters_that_jump_and_ranges_outside_of_the_arena_end_only_the_connection_of_their_client() {
    let entry = |words: [u32; 4]| words.map(u32::to_ne_bytes).concat();
    let valid = [0, 64, 4096, 4096];
    let attacks: &[(u32, [u32; 4])] = &[
        (33, valid),
        (u32::MAX, valid),
        (1 << 31, valid),
        (1, [u32::MAX, 64, 0, 64]),
        (1, [ARENA - 10, 64, 0, 64]),
        (1, [0, 64, ARENA - 10, 64]),
        (1, [0, u32::MAX, 0, 64]),
        (1, [0, 3, 0, 64]),
        (1, [0, 64, 0, 1]),
        // A valid entry, but the message has the number 0, which names no lane.
        (1, valid),
    ];
    attack(|path, _| {
        for (submitted, words) in attacks {
            let attacker = LaneAttacker::connect(path);
            attacker.memory.write(LANE_AT + 1024, &entry(*words));
            attacker.memory.store(USED, u32::MAX);
            attacker.memory.store(LANE_AT, *submitted);
            attacker.ring_doorbell();
            let ended = attacker.has_ended(Duration::from_secs(60));
            assert!(ended, "{submitted:#x} {words:x?} is served");
        }
    });
}

/// Only the head of a long WRITE is copied, and its header contains the length of the data.
#[test]
fn a_long_write_whose_length_is_a_lie_ends_only_the_connection_of_its_client() {
    attack(|path, _| {
        for length in [0, 80, 100_000, 200_001, u32::MAX] {
            let mut attacker = LaneAttacker::connect(path);
            let number = attacker.lane.next_number();
            let mut message = request(WRITE, number, 1, &[0; 40]);
            message[..4].copy_from_slice(&length.to_ne_bytes());
            let data = vec![7; 200_000 - message.len()];
            attacker.lane.submit(&*attacker.memory, number, &[&message, &data], 0).unwrap();
            attacker.ring_doorbell();
            assert!(attacker.has_ended(Duration::from_secs(60)), "{length} is served");
        }
        // A handle that is not this client's, with data that stays in the lane.
        let mut attacker = LaneAttacker::connect(path);
        for fh in 0..8_u64 {
            let mut body = vec![0; 40 + 200_000];
            body[..8].copy_from_slice(&fh.to_ne_bytes());
            body[16..20].copy_from_slice(&200_000_u32.to_ne_bytes());
            assert!(attacker.ask(WRITE, 2, &body).unwrap().is_err(), "handle {fh}");
        }
    });
}

#[test]
fn no_forged_inode_or_handle_reads_a_foreign_file() {
    attack(|path, secret| {
        let mut attacker = LaneAttacker::connect(path);
        let read = |fh: u64| {
            let mut body = [0; 40];
            body[..8].copy_from_slice(&fh.to_ne_bytes());
            body[16..20].copy_from_slice(&4096_u32.to_ne_bytes());
            body
        };
        for ino in (0..64).chain([secret.0, u64::MAX, 1 << 32]) {
            for fh in (0..8).chain([u64::MAX]) {
                let got = attacker.ask(READ, ino, &read(fh)).unwrap();
                assert!(got.is_err(), "inode {ino}, handle {fh}: {got:?}");
            }
            if ino != 1 {
                assert!(attacker.ask(GETATTR, ino, &[0; 16]).unwrap().is_err());
            }
        }
        // Once it is looked up, it may be named, and still not be opened.
        let entry = attacker.ask(LOOKUP, 1, b"secret\0").unwrap().unwrap();
        assert_eq!(entry[..8], secret.0.to_ne_bytes());
        assert_eq!(attacker.ask(OPEN, secret.0, &[0; 8]), Some(Err(libc::EACCES)));
        assert!((0..64).all(|fh| attacker.ask(READ, secret.0, &read(fh)).unwrap().is_err()));
        assert!(!attacker.has_secret());
    });
}

/// The message changes while the server reads it: the server must use the bytes that it has
/// checked.
#[test]
fn a_message_that_changes_while_it_is_handled_reads_no_foreign_file() {
    attack(|path, secret| {
        let mut attacker = LaneAttacker::connect(path);
        attacker.ask(LOOKUP, 1, b"secret\0").unwrap().unwrap();
        let stop = AtomicBool::new(false);
        let other = Arc::clone(&attacker.memory);
        std::thread::scope(|scope| {
            let stop = &stop;
            scope.spawn(move || {
                // The user of the request, its inode and its length.
                let arena = LANE_AT + 4096;
                while !stop.load(Ordering::Relaxed) {
                    for (at, values) in [(24, [0, USER]), (16, [secret.0 as u32, 1]), (0, [4, 48])]
                    {
                        values.iter().for_each(|&value| other.store(arena + at, value));
                    }
                }
            });
            for _ in 0..3000 {
                match attacker.ask(OPEN, 1, &[0; 8]) {
                    Some(_) => {}
                    None => attacker = LaneAttacker::connect(path),
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(!attacker.has_secret());
    });
}

#[test]
fn any_bytes_in_the_lanes_harm_nobody() {
    attack(|path, secret| {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..60 {
            let attacker = LaneAttacker::connect(path);
            for _ in 0..30 {
                let lane = random.usize(..3);
                let at = LANE_AT + lane * LANE;
                let number = number_in(lane, random.u64(..6));
                let ino = [1, secret.0, random.u64(..100)][random.usize(..3)];
                let mut body = [0; 64];
                random.fill(&mut body);
                let opcode = random.u32(..60);
                attacker.memory.write(at + 4096, &request(opcode, number, ino, &body));
                let taken = attacker.memory.load(at + 128);
                let slot = (taken % 32) as usize;
                let words = [0, 40 + random.u32(..70), 8192, 4096].map(u32::to_ne_bytes).concat();
                attacker.memory.write(at + 1024 + slot * 16, &words);
                attacker.memory.store(USED, 3);
                attacker.memory.store(at, taken.wrapping_add(random.u32(..2)));
                let word = at + [128, 256, 384, 512][random.usize(..4)];
                if random.u8(..8) == 0 {
                    attacker.memory.store(word, random.u32(..));
                }
                attacker.ring_doorbell();
            }
            assert!(!attacker.has_secret());
        }
    });
}

/// Each further block takes memory that other clients, too, want.
#[test]
fn a_client_that_asks_for_lanes_without_end_gets_few_and_others_still_get_theirs() {
    attack(|path, _| {
        let greedy: Vec<LaneAttacker> = (0..5).map(|_| LaneAttacker::connect(path)).collect();
        let mut blocks = 0;
        for attacker in &greedy {
            for _ in 0..20 {
                rustix::net::send(&attacker.socket, &[0; 2], SendFlags::NOSIGNAL).unwrap();
                let (fd, message) = receive(&attacker.socket);
                assert_eq!(message.len(), 32, "an offer");
                blocks += usize::from(fd.is_some());
            }
        }
        // Seven each, until half of the 64 of a user are in use.
        assert_eq!(blocks, 32 - 5);
        assert!((0..30).all(|_| LaneAttacker::connect(path).memory.blocks() == 1));
    });
}

/// The memory of pages is for clients that may read the file, and the open file decides.
#[test]
fn pages_are_for_files_that_are_open_for_reading_in_this_connection() {
    attack_open_file(|path, secret| {
        let (mut attacker, mut other) = (LaneAttacker::connect(path), LaneAttacker::connect(path));
        let handles = || (0..64).chain([secret.fh.0, u64::MAX]);
        let kinds = [PAGES, PAGES | MAP_TO_WRITE, u64::MAX, MAP_TO_READ, MAP_TO_WRITE];
        let refused = |attacker: &LaneAttacker, ino: u64, fh: u64, error: i32| {
            for flags in kinds {
                let given = attacker.ask_for_memory(ino, fh, flags);
                assert!(given.is_err(), "inode {ino}, handle {fh}, flags {flags:x}");
            }
            assert_eq!(attacker.ask_for_memory(ino, fh, PAGES).err(), Some(error));
        };
        // It was not given the inode; then it was, and may still not open it.
        handles().for_each(|fh| refused(&attacker, secret.ino.0, fh, libc::ESTALE));
        assert_eq!(attacker.look_up("secret"), secret.ino.0);
        assert_eq!(attacker.open(secret.ino.0, 0), Err(libc::EACCES));
        handles().for_each(|fh| refused(&attacker, secret.ino.0, fh, libc::EBADF));
        // It has the file open for writing only.
        let ino = attacker.look_up("drop");
        assert_eq!(attacker.open(ino, 0), Err(libc::EACCES));
        let fh = attacker.open(ino, OpenFlags::WRONLY).unwrap();
        assert_eq!(attacker.ask_for_memory(ino, fh, PAGES).err(), Some(libc::EACCES));
        // The handle belongs to another connection, to another file, to a directory, or is closed.
        let public = attacker.look_up("public");
        let fh = attacker.open(public, 0).unwrap();
        assert_eq!(other.look_up("public"), public);
        let of_other = other.open(public, 0).unwrap();
        refused(&attacker, public, of_other, libc::EBADF);
        refused(&attacker, secret.ino.0, fh, libc::EBADF);
        let dir = attacker.ask(OPENDIR, 1, &[0; 8]).unwrap().map(read_first).unwrap();
        assert!(attacker.ask_for_memory(1, dir, PAGES).is_err());
        assert!(attacker.ask_for_memory(secret.ino.0, dir, PAGES).is_err());
        let pages = attacker.ask_for_memory(public, fh, PAGES).unwrap();
        let closing = [&fh.to_ne_bytes()[..], &[0; 16]].concat();
        attacker.ask(RELEASE, public, &closing).unwrap().unwrap();
        refused(&attacker, public, fh, libc::EBADF);
        // A lane carries no descriptor.
        let by_lane = attacker.ask(SETUPMAPPING, public, &mapping(of_other, PAGES));
        assert!(matches!(by_lane, Some(Err(_))), "{by_lane:?}");
        // The memories that it did get have nothing of the secret.
        let others = [VERSIONS, TOLD_NAMES].map(|kind| attacker.ask_for_memory(1, 0, kind));
        let given: Vec<_> = others.into_iter().map(Result::unwrap).chain([pages]).collect();
        assert!(has_bytes(&given[2], PUBLIC));
        assert!(given.iter().all(|memory| !has_bytes(memory, SECRET)));
        assert!(!attacker.has_secret() && !other.has_secret());
    });
}

#[test]
fn nobody_writes_lengthens_or_seals_the_memory_that_was_handed_over() {
    attack_open_file(|path, _| {
        let mut attacker = LaneAttacker::connect(path);
        let public = attacker.look_up("public");
        let fh = attacker.open(public, 0).unwrap();
        for (ino, fh, kind) in [(public, fh, PAGES), (1, 0, VERSIONS), (1, 0, TOLD_NAMES)] {
            use rustix::fs::{FallocateFlags, Mode, OFlags, SealFlags};
            let memory = attacker.ask_for_memory(ino, fh, kind | MAP_TO_WRITE).unwrap();
            let before = rustix::fs::fstat(&memory).unwrap();
            assert_eq!(rustix::io::pwrite(&memory, &[1; 8], 64), Err(rustix::io::Errno::BADF));
            for len in [0, before.st_size as u64 - 1, before.st_size as u64 + 1, 1 << 40] {
                assert!(rustix::fs::ftruncate(&memory, len).is_err(), "{len} bytes");
            }
            for mode in [
                FallocateFlags::empty(),
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                FallocateFlags::ZERO_RANGE,
            ] {
                assert!(rustix::fs::fallocate(&memory, mode, 0, 1 << 30).is_err(), "{mode:?}");
            }
            for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE, SealFlags::GROW] {
                assert!(rustix::fs::fcntl_add_seals(&memory, seal).is_err(), "{seal:?}");
            }
            assert!(rustix::fs::fchmod(&memory, Mode::RWXU).is_err());
            let again = format!("/proc/self/fd/{}", memory.as_raw_fd());
            for flags in [OFlags::RDWR, OFlags::WRONLY, OFlags::RDWR | OFlags::TRUNC] {
                let opened = rustix::fs::open(&again, flags, Mode::empty());
                assert_eq!(opened.err(), Some(rustix::io::Errno::ACCESS), "{flags:?}");
            }
            let after = rustix::fs::fstat(&memory).unwrap();
            assert_eq!((after.st_size, after.st_mode), (before.st_size, before.st_mode));
            assert_eq!((after.st_uid, after.st_mode & 0o777), (0, 0o400));
        }
    });
}

/// The number of descriptors of this process, of which the server is a part, that lead to the same
/// memory.
fn descriptors_of(inode: u64) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let inodes = all.filter_map(|entry| std::fs::metadata(entry.unwrap().path()).ok());
    inodes.filter(|found| std::os::unix::fs::MetadataExt::ino(found) == inode).count()
}

#[test]
fn requests_for_memory_without_end_take_no_descriptors_and_no_memory() {
    attack_open_file(|path, _| {
        let mut attacker = LaneAttacker::connect(path);
        let public = attacker.look_up("public");
        let fh = attacker.open(public, 0).unwrap();
        for (ino, fh, kind) in [(public, fh, PAGES), (1, 0, VERSIONS), (1, 0, TOLD_NAMES)] {
            let inode = |memory: OwnedFd| rustix::fs::fstat(memory).unwrap().st_ino;
            let first = inode(attacker.ask_for_memory(ino, fh, kind).unwrap());
            // The server closes what it has sent soon after.
            let settles = |most: usize| {
                let until = Instant::now() + Duration::from_secs(60);
                while descriptors_of(first) > most {
                    assert!(Instant::now() < until, "{kind:x}: {}", descriptors_of(first));
                    std::thread::sleep(Duration::from_millis(2));
                }
            };
            settles(1);
            for _ in 0..500 {
                let memory = attacker.ask_for_memory(ino, fh, kind).unwrap();
                assert_eq!(inode(memory), first, "all requests lead to one memory");
            }
            settles(1);
            // No client receives the answers to these, which have descriptors.
            let mut greedy = LaneAttacker::connect(path);
            if ino == public {
                greedy.look_up("public");
            }
            let fh = if ino == public { greedy.open(ino, 0).unwrap() } else { 0 };
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            for number in 0..20_000_u64 {
                let message = request(SETUPMAPPING, 1000 + 2 * number, ino, &mapping(fh, kind));
                if rustix::net::send(&greedy.socket, &message, flags).is_err() {
                    break;
                }
            }
            assert_eq!(
                inode(attacker.ask_for_memory(1, 0, VERSIONS).unwrap()) == first,
                kind == VERSIONS
            );
            drop(greedy);
            settles(1);
        }
    });
}

#[test]
fn no_memory_has_names_of_a_directory_that_its_user_may_not_search() {
    attack_open_file(|path, _| {
        let mut attacker = LaneAttacker::connect(path);
        let memory =
            [TOLD_NAMES, VERSIONS].map(|kind| attacker.ask_for_memory(1, 0, kind).unwrap());
        let closed = attacker.look_up("closed");
        let hidden = format!("{HIDDEN}\0");
        let whole = format!("closed/{HIDDEN}");
        for _ in 0..20 {
            let found = attacker.ask(LOOKUP, closed, hidden.as_bytes()).unwrap();
            assert_eq!(found.err(), Some(libc::EACCES));
            for (dir, path) in [(1, &whole[..]), (closed, HIDDEN), (closed, "none")] {
                let found = attacker.ioctl(dir, RESOLVE, path.as_bytes());
                assert_eq!(found.err(), Some(libc::EACCES), "{path}");
            }
            assert_eq!(attacker.ioctl(closed, NAMES, b"").err(), Some(libc::EACCES));
        }
        // Names that it may know are there soon after the answer, and names that it may not know
        // would be, too.
        let until = Instant::now() + Duration::from_secs(60);
        while !has_bytes(&memory[0], b"public") {
            attacker.ioctl(1, RESOLVE, b"public").unwrap();
            assert!(Instant::now() < until, "a name is not told");
        }
        assert!(memory.iter().all(|memory| !has_bytes(memory, HIDDEN.as_bytes())));
        // Each inode of root beyond what it was given is still refused.
        for ino in (closed + 1..closed + 64).filter(|ino| *ino != closed) {
            assert!(attacker.ask(GETATTR, ino, &[0; 16]).unwrap().is_err(), "inode {ino}");
        }
    });
}
