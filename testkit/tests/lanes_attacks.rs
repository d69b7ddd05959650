//! Attacks of clients through shared memory. The server runs as root; the attacker is another user, who makes
//! requests by hand and writes anything into its lanes, while an honest client works.

mod raw;

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Context, Errno, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs, OpenFlags,
    ReadArgs, ReadBuf, SliceSink, SliceSource, WriteArgs, WriteBuf,
};
use defuse_memory::{Memory, Options};
use defuse_remote::{LaneUse, Remote, RemoteOptions};
use defuse_ring::layout::{BYTES, arena_of, number_in};
use defuse_ring::{Lane, Memory as Ring, Shared};
use defuse_shared::LaneOffers;
use defuse_socket::{Admission, Server, ServerOptions};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

const USER: u32 = 4321;
const SECRET: &[u8] = b"the bytes that only root may read";

/// Positions in the memory, see ring/SPEC.md.
const USED: usize = 192;
const LANE_AT: usize = 4096;
const LANE: usize = 4096 + ARENA as usize;
/// Bytes of the arena of the first lanes.
const ARENA: u32 = arena_of(0) as u32;

/// Runs an attack of [`USER`] on a server with a file `secret` of root, while an honest client of root writes
/// and reads. Fails if that one notices.
fn attack(run: impl FnOnce(&Path, Ino) + Send) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).unwrap();
    let path = dir.path().join("socket");
    let memory = Memory::new(Options { root_perm: 0o777, ..Options::default() });
    let lines = Some(Arc::new(LaneOffers::default()) as _);
    let admission = Admission::Users(vec![USER]);
    let options = ServerOptions { admission, lines, ..ServerOptions::default() };
    let server = Server::bind(&path, Arc::new(memory), options).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
        let honest = Remote::connect(&path, options).unwrap();
        let secret = create(&honest, "secret", 0o600);
        assert_eq!(write(&honest, secret, SECRET), Ok(SECRET.len()));
        let over = &over;
        let works = scope.spawn(move || {
            let file = create(&honest, "honest", 0o600);
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
        let (path, ino) = (&path, secret.ino);
        let done = scope.spawn(move || {
            become_user();
            run(path, ino);
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

fn create(fs: &Remote, text: &str, perm: u32) -> File {
    let node = NewNode::new(FileKind::Regular, perm, cx().caller);
    let flags = OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT);
    let args = OpenArgs { flags, kill_suidgid: false };
    let name = Name::new(text.as_bytes()).unwrap();
    let (entry, opened) = fs.create(&cx(), Ino::ROOT, name, &node, args).unwrap();
    File { ino: entry.ino, fh: opened.fh }
}

fn write(fs: &Remote, file: File, bytes: &[u8]) -> Result<usize, Errno> {
    let args = WriteArgs { flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    fs.write(&cx(), file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes)))
}

fn read(fs: &Remote, file: File) -> Vec<u8> {
    let mut bytes = vec![0; 4000];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, 4000);
    fs.read(&cx(), file, ReadArgs::default(), &mut out).unwrap();
    let filled = out.filled();
    bytes.truncate(filled);
    bytes
}

/// A client made by hand: after INIT, with its memory.
struct Attacker {
    socket: OwnedFd,
    memory: Arc<Ring>,
    lane: Lane,
}

/// A request of FUSE with the credentials of the attacker.
fn request(opcode: u32, number: u64, ino: u64, body: &[u8]) -> Vec<u8> {
    raw::request(opcode, number, ino, USER, body)
}

/// The descriptor and the length of a message.
fn receive(socket: &OwnedFd) -> (Option<OwnedFd>, usize) {
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
    (fd, received.bytes)
}

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;

impl Attacker {
    fn connect(path: &Path) -> Attacker {
        let socket = raw::begun(path, USER);
        let (fd, _) = receive(&socket);
        let memory = Arc::new(Ring::of(fd.unwrap()).unwrap());
        let mut room = [0; 4096];
        let (len, _) = rustix::net::recv(&socket, &mut room[..], RecvFlags::empty()).unwrap();
        assert!(len > 16, "INIT was not answered");
        Attacker { socket, memory, lane: Lane::new(0) }
    }

    fn bell(&self) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&self.socket, &[0], flags);
    }

    /// The reply to a request, without the header; the error; or `None` if the connection has ended.
    fn ask(&mut self, opcode: u32, ino: u64, body: &[u8]) -> Option<Result<Vec<u8>, i32>> {
        let number = self.lane.next_number();
        self.lane.submit(&*self.memory, number, &[&request(opcode, number, ino, body)], 0).unwrap();
        self.bell();
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
            let attacker = Attacker::connect(path);
            attacker.memory.write(LANE_AT + 1024, &entry(*words));
            attacker.memory.store(USED, u32::MAX);
            attacker.memory.store(LANE_AT, *submitted);
            attacker.bell();
            let ended = attacker.has_ended(Duration::from_secs(60));
            assert!(ended, "{submitted:#x} {words:x?} is served");
        }
    });
}

/// Only the head of a long WRITE is copied, and its header says how much data follows.
#[test]
fn a_long_write_whose_length_is_a_lie_ends_only_the_connection_of_its_client() {
    attack(|path, _| {
        for length in [0, 80, 100_000, 200_001, u32::MAX] {
            let mut attacker = Attacker::connect(path);
            let number = attacker.lane.next_number();
            let mut message = request(WRITE, number, 1, &[0; 40]);
            message[..4].copy_from_slice(&length.to_ne_bytes());
            let data = vec![7; 200_000 - message.len()];
            attacker.lane.submit(&*attacker.memory, number, &[&message, &data], 0).unwrap();
            attacker.bell();
            assert!(attacker.has_ended(Duration::from_secs(60)), "{length} is served");
        }
        // A handle that is not this client's, with data that stays in the lane.
        let mut attacker = Attacker::connect(path);
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
        let mut attacker = Attacker::connect(path);
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

/// The message changes while the server reads it: what is checked must be what is used.
#[test]
fn a_message_that_changes_while_it_is_handled_reads_no_foreign_file() {
    attack(|path, secret| {
        let mut attacker = Attacker::connect(path);
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
                    None => attacker = Attacker::connect(path),
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
            let attacker = Attacker::connect(path);
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
                attacker.bell();
            }
            assert!(!attacker.has_secret());
        }
    });
}

/// Each further block takes memory that other clients, too, want.
#[test]
fn a_client_that_asks_for_lanes_without_end_gets_few_and_others_still_get_theirs() {
    attack(|path, _| {
        let greedy: Vec<Attacker> = (0..5).map(|_| Attacker::connect(path)).collect();
        let mut blocks = 0;
        for attacker in &greedy {
            for _ in 0..20 {
                rustix::net::send(&attacker.socket, &[0; 2], SendFlags::NOSIGNAL).unwrap();
                let (fd, len) = receive(&attacker.socket);
                assert_eq!(len, 32, "an offer");
                blocks += usize::from(fd.is_some());
            }
        }
        // Seven each, until half of the 64 of a user are in use.
        assert_eq!(blocks, 32 - 5);
        assert!((0..30).all(|_| Attacker::connect(path).memory.blocks() == 1));
    });
}
