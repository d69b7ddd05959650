//! The client against servers that lie, hang, or send garbage.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Context, DirBuf, DirItem, DirSink, Entry, Errno, Fh, File, FileKind, FileSystem, Ino,
    InterruptToken, Name, NewNode, Notify, OpenArgs, OpenFlags, PollHandle, ReadArgs, ReadBuf,
    Result, SliceSink, SliceSource, WriteArgs, WriteBuf,
};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_ring::layout::{BELL, BYTES, LANES_OF_BLOCK, VERSION};
use defuse_ring::{LaneServer, MappedMemory};
use defuse_wire::abi::{self, InHeader, Opcode, OutHeader};
use defuse_wire::vendor::{self, LaneOffer};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use zerocopy::{FromBytes, IntoBytes};

/// The messages with which a server replies to one request.
type ServerReplies = Vec<Vec<u8>>;

fn message(error: i32, unique: u64, body: &[u8]) -> Vec<u8> {
    let header = OutHeader { len: (16 + body.len()) as u32, error, unique };
    [header.as_bytes(), body].concat()
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// Creates a client whose server agrees to INIT with `flags`, and replies to each other request
/// with the result of `says`. `None` ends the server.
fn with_server(
    flags: u64,
    options: RemoteOptions,
    mut says: impl FnMut(&InHeader, &[u8]) -> Option<ServerReplies> + Send + 'static,
) -> RemoteClient {
    let (ours, theirs) = pair();
    std::thread::spawn(move || {
        let mut room = vec![0; 1 << 18];
        while let Ok(len @ 1..) = rustix::io::read(&theirs, &mut room[..]) {
            let (header, body) = InHeader::read_from_prefix(&room[..len]).unwrap();
            let opcode = Opcode::from_u32(header.opcode).unwrap();
            let answers = match opcode {
                Opcode::Init => {
                    let init = abi::InitOut {
                        major: 7,
                        minor: 38,
                        flags: flags as u32,
                        max_write: 4096,
                        ..abi::InitOut::default()
                    };
                    Some(vec![message(0, header.unique, init.as_bytes())])
                }
                opcode if !opcode.has_reply() && opcode != Opcode::Interrupt => continue,
                _ => says(&header, body),
            };
            let Some(answers) = answers else { return };
            for answer in answers {
                let _ = rustix::net::send(&theirs, &answer, SendFlags::NOSIGNAL);
            }
        }
    });
    RemoteClient::from_socket(ours, options).unwrap()
}

fn context() -> Context<'static> {
    Context::new(Caller::default())
}

fn name() -> Name<'static> {
    Name::new(b"name").unwrap()
}

const FILE: File = File { ino: Ino(2), fh: Fh(3) };

fn entry_out(nodeid: u64) -> abi::EntryOut {
    let attr = abi::Attr { ino: nodeid, mode: 0o100644, nlink: 1, ..abi::Attr::default() };
    abi::EntryOut { nodeid, attr, ..abi::EntryOut::default() }
}

fn read(client: &RemoteClient, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    client.read(&context(), FILE, ReadArgs::default(), &mut out)?;
    let filled = out.filled_len();
    bytes.truncate(filled);
    Ok(bytes)
}

#[test]
fn invalid_replies_are_eio_and_the_next_call_works() {
    let count = AtomicUsize::new(0);
    let client = with_server(0, RemoteOptions::default(), move |header, _| {
        let unique = header.unique;
        let good = entry_out(7);
        Some(vec![match count.fetch_add(1, Ordering::SeqCst) {
            0 => message(0, unique, &good.as_bytes()[..100]),
            1 => message(0, unique, &[good.as_bytes(), &[0; 8]].concat()),
            2 => message(0, unique, entry_out(1).as_bytes()),
            3 => message(-512, unique, &[]),
            4 => message(5, unique, &[]),
            5 => message(-2, unique, b"an error with a body"),
            6 => message(-2, unique, &[]),
            _ => message(0, unique, good.as_bytes()),
        }])
    });
    for _ in 0..6 {
        assert_eq!(client.lookup(&context(), Ino::ROOT, name()), Err(Errno::EIO));
    }
    assert_eq!(client.lookup(&context(), Ino::ROOT, name()), Err(Errno::ENOENT));
    assert_eq!(client.lookup(&context(), Ino::ROOT, name()).unwrap().ino, Ino(7));
    assert!(!client.is_dead());
}

#[test]
fn more_data_than_requested_is_refused() {
    let client = with_server(0, RemoteOptions::default(), |header, _| {
        let answer = match Opcode::from_u32(header.opcode).unwrap() {
            Opcode::Write => abi::WriteOut { size: 5000, padding: 0 }.as_bytes().to_vec(),
            Opcode::Readdir => vec![0; 100_000],
            _ => vec![1; 4097],
        };
        Some(vec![message(0, header.unique, &answer)])
    });
    assert_eq!(read(&client, 4096), Err(Errno::EIO));
    let mut source = SliceSource::new(b"abc");
    let written =
        client.write(&context(), FILE, WriteArgs::default(), &mut WriteBuf::new(&mut source));
    assert_eq!(written, Err(Errno::EIO));
    let mut names = LimitedNames { room: usize::MAX, taken: 0 };
    let listed = client.readdir(&context(), FILE, 0, &mut DirBuf::new(&mut names));
    assert_eq!((listed, names.taken), (Err(Errno::EIO), 0));
}

/// Creates a client whose server replies to each READ through shared memory by so many bytes, after
/// a header with their number.
fn with_lanes(bytes: usize) -> RemoteClient {
    let (ours, theirs) = pair();
    std::thread::spawn(move || {
        let (memory, fd) = MappedMemory::new().unwrap();
        let server = LaneServer::new(memory);
        // Each request comes with a bell.
        server.fall_asleep();
        let mut room = vec![0; 1 << 18];
        while let Ok(len @ 1..) = rustix::io::read(&theirs, &mut room[..]) {
            if len > BELL {
                let (header, _) = InHeader::read_from_prefix(&room[..len]).unwrap();
                let Some(Opcode::Init) = Opcode::from_u32(header.opcode) else { continue };
                let offer = LaneOffer {
                    version: VERSION,
                    lanes: LANES_OF_BLOCK as u32,
                    bytes: BYTES as u64,
                };
                let offer = message(vendor::OFFER, 0, offer.as_bytes());
                let mut beside = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut beside = SendAncillaryBuffer::new(&mut beside);
                let fds = [fd.as_fd()];
                beside.push(SendAncillaryMessage::ScmRights(&fds));
                let parts = [IoSlice::new(&offer)];
                rustix::net::sendmsg(&theirs, &parts, &mut beside, SendFlags::empty()).unwrap();
                let init = abi::InitOut { major: 7, minor: 38, ..abi::InitOut::default() };
                let init = message(0, header.unique, init.as_bytes());
                rustix::net::send(&theirs, &init, SendFlags::NOSIGNAL).unwrap();
            }
            let number = |head: &[u8]| u64::from_ne_bytes(head[8..16].try_into().unwrap());
            while let Some(arrived) = server.take(&mut room, number, |_, len| len).unwrap() {
                let (header, _) = InHeader::read_from_prefix(&room[..arrived.len]).unwrap();
                let reply = match Opcode::from_u32(header.opcode).unwrap() {
                    Opcode::Read => {
                        let head = OutHeader { len: bytes as u32, error: 0, unique: header.unique };
                        let filled = head.as_bytes().iter().copied().chain(std::iter::repeat(7));
                        filled.take(bytes).collect()
                    }
                    _ => message(-Errno::ENOSYS.raw(), header.unique, &[]),
                };
                server.answer(arrived.lane, header.unique, &[&reply], &[0; 16]).unwrap();
            }
        }
    });
    let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    RemoteClient::from_socket(ours, options).unwrap()
}

#[test]
fn a_reply_in_shared_memory_that_is_too_short_or_too_long_is_refused() {
    let read_of = |bytes| read(&with_lanes(bytes), 4096);
    assert_eq!(read_of(16 + 4096), Ok(vec![7; 4096]));
    assert_eq!(read_of(16), Ok(Vec::new()));
    assert_eq!(read_of(16 + 4097), Err(Errno::EIO));
    for bytes in [0, 8, 15] {
        let client = with_lanes(bytes);
        assert_eq!(read(&client, 4096), Err(Errno::ENOTCONN), "{bytes} bytes");
        assert!(client.is_dead());
    }
}

#[test]
fn unknown_duplicate_and_late_replies_reach_nobody() {
    let client = with_server(0, RemoteOptions::default(), |header, _| {
        let unique = header.unique;
        let wrong = |other| message(0, other, entry_out(9).as_bytes());
        let right = message(0, unique, entry_out(7).as_bytes());
        Some(vec![wrong(unique + 2), wrong(unique ^ (1 << 40)), wrong(2), right.clone(), right])
    });
    for _ in 0..100 {
        assert_eq!(client.lookup(&context(), Ino::ROOT, name()).unwrap().ino, Ino(7));
    }
}

#[test]
fn a_message_that_is_not_fuse_ends_the_connection_for_all() {
    for garbage in [vec![0xff; 100], vec![1], message(0, 4, &[0; 8])[..20].to_vec()] {
        let client =
            with_server(0, RemoteOptions::default(), move |_, _| Some(vec![garbage.clone()]));
        assert_eq!(client.lookup(&context(), Ino::ROOT, name()), Err(Errno::ENOTCONN));
        assert!(client.is_dead());
        assert_eq!(client.getattr(&context(), Ino::ROOT, None), Err(Errno::ENOTCONN));
    }
}

#[test]
fn the_end_of_a_server_wakes_all_waiting_threads() {
    let waiting = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&waiting);
    let client = with_server(0, RemoteOptions::default(), move |_, _| {
        // Does not reply to eight requests, and ends at the ninth.
        if seen.fetch_add(1, Ordering::SeqCst) < 8 { Some(Vec::new()) } else { None }
    });
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..8).map(|_| scope.spawn(|| client.lookup(&context(), Ino::ROOT, name()))).collect();
        while waiting.load(Ordering::SeqCst) < 8 {
            std::thread::yield_now();
        }
        assert_eq!(client.getattr(&context(), Ino::ROOT, None), Err(Errno::ENOTCONN));
        for thread in all {
            assert_eq!(thread.join().unwrap(), Err(Errno::ENOTCONN));
        }
    });
}

#[test]
fn a_silent_server_is_given_up_after_the_timeout() {
    let options =
        RemoteOptions { timeout: Some(Duration::from_millis(200)), ..RemoteOptions::default() };
    let client = with_server(0, options, |_, _| Some(Vec::new()));
    let begun = Instant::now();
    assert_eq!(client.getattr(&context(), Ino::ROOT, None), Err(Errno::ENOTCONN));
    assert!(begun.elapsed() >= Duration::from_millis(200));
}

#[test]
fn an_interrupt_is_sent_once_and_the_reply_still_awaited() {
    let interrupts = Arc::new(AtomicUsize::new(0));
    let seen_interrupts = Arc::clone(&interrupts);
    let mut held = 0;
    let client = with_server(0, RemoteOptions::default(), move |header, body| {
        if header.opcode == Opcode::Interrupt as u32 {
            let args = abi::InterruptIn::read_from_bytes(body).unwrap();
            assert_eq!((args.unique, header.unique), (held, held | 1));
            seen_interrupts.fetch_add(1, Ordering::SeqCst);
            return Some(vec![message(-4, held, &[])]);
        }
        held = header.unique;
        Some(Vec::new())
    });
    let token = InterruptToken::default();
    token.trip();
    let cx = Context::with_interrupt(Caller::default(), 0, &token);
    assert_eq!(client.getattr(&cx, Ino::ROOT, None), Err(Errno::EINTR));
    assert_eq!(interrupts.load(Ordering::SeqCst), 1);
}

struct LimitedNames {
    room: usize,
    taken: usize,
}

impl DirSink for LimitedNames {
    fn wants_entries(&self) -> bool {
        true
    }
    fn fits(&self, _: usize) -> bool {
        self.taken < self.room
    }
    fn add(&mut self, _: DirItem<'_>, entry: Option<&Entry>) {
        assert!(entry.is_some());
        self.taken += 1;
    }
}

#[test]
fn each_listing_of_an_endless_directory_ends_and_lookups_that_do_not_fit_are_returned() {
    let plus = abi::FUSE_DO_READDIRPLUS;
    let client = with_server(plus, RemoteOptions::default(), |header, body| {
        let args = abi::ReadIn::read_from_bytes(body).ok()?;
        let mut room = vec![0; args.size as usize];
        let mut dir = defuse_wire::reply::DirEncoder::new(&mut room);
        let mut at = args.offset + 1;
        while dir.push_plus(format!("{at}").as_bytes(), at, &entry_out(at + 1)).is_ok() {
            at += 1;
        }
        let len = dir.len();
        Some(vec![message(0, header.unique, &room[..len])])
    });
    let mut names = LimitedNames { room: usize::MAX, taken: 0 };
    client.readdir(&context(), FILE, 0, &mut DirBuf::new(&mut names)).unwrap();
    assert!(names.taken > 10 && names.taken < 1000, "{}", names.taken);
    let mut few = LimitedNames { room: 3, taken: 0 };
    client.readdir(&context(), FILE, 0, &mut DirBuf::new(&mut few)).unwrap();
    assert_eq!(few.taken, 3);
}

#[test]
fn a_missing_opcode_is_requested_once() {
    let requested = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&requested);
    let client = with_server(0, RemoteOptions::default(), move |header, _| {
        let unique = header.unique;
        Some(vec![match Opcode::from_u32(header.opcode).unwrap() {
            Opcode::Mknod => message(0, unique, entry_out(7).as_bytes()),
            Opcode::Open => message(-38, unique, &[]),
            _ => {
                seen.fetch_add(1, Ordering::SeqCst);
                message(-38, unique, &[])
            }
        }])
    });
    let cx = context();
    for _ in 0..3 {
        let access = client.access(&cx, Ino(2), defuse_fs::AccessMask(4));
        assert_eq!(access, Err(Errno::ENOSYS));
        let node = NewNode::new(FileKind::Regular, 0o600, cx.caller);
        let args =
            OpenArgs { flags: OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT), ..Default::default() };
        // MKNOD and OPEN replace CREATE, and the handle 0 replaces the handle of OPEN.
        let (entry, opened) = client.create(&cx, Ino::ROOT, name(), &node, args).unwrap();
        assert_eq!((entry.ino, opened.fh), (Ino(7), Fh(0)));
    }
    assert_eq!(requested.load(Ordering::SeqCst), 2);
}

/// A listener of invalidations that makes requests while it is called.
struct BusyListener {
    heard: AtomicUsize,
    polled: AtomicBool,
}

impl Notify for BusyListener {
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()> {
        assert_eq!((ino, range), (Ino(5), Some((4096, 0))));
        self.heard.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn invalidate_entry(&self, _: Ino, _: Name<'_>, _: bool) -> Result<()> {
        self.heard.fetch_add(100, Ordering::SeqCst);
        Ok(())
    }
    fn notify_delete(&self, _: Ino, _: Ino, _: Name<'_>) -> Result<()> {
        Ok(())
    }
    defuse_fs::caches_no_data!();
    fn poll_wake(&self, handle: PollHandle) -> Result<()> {
        assert_eq!(handle, PollHandle(77));
        self.polled.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn increment_epoch(&self) -> Result<()> {
        Ok(())
    }
    fn prune(&self, _: &[Ino]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn waiting_threads_deliver_notifications_and_invalid_ones_are_ignored() {
    let client = with_server(0, RemoteOptions::default(), |header, _| {
        let inode = abi::NotifyInvalInodeOut { ino: 5, off: 4096, len: 0 };
        let entry = abi::NotifyInvalEntryOut { parent: 1, namelen: 9, flags: 0 };
        let wake = abi::NotifyPollWakeupOut { kh: 77 };
        let mut says = vec![
            message(2, 0, inode.as_bytes()),
            message(3, 0, &[entry.as_bytes(), b"short\0"].concat()),
            message(99, 0, &[]),
            message(-1, 0, &[]),
        ];
        if header.opcode == Opcode::Poll as u32 {
            says = vec![message(0, header.unique, abi::PollOut::default().as_bytes())];
            says.push(message(1, 0, wake.as_bytes()));
        } else {
            says.push(message(-2, header.unique, &[]));
        }
        Some(says)
    });
    let ear = Arc::new(BusyListener { heard: AtomicUsize::new(0), polled: AtomicBool::new(false) });
    client.attach(defuse_fs::Origin::new(), Arc::clone(&ear) as Arc<dyn Notify>);
    assert_eq!(client.lookup(&context(), Ino::ROOT, name()), Err(Errno::ENOENT));
    assert_eq!(ear.heard.load(Ordering::SeqCst), 1);
    // A poll makes no further request, but is notified nevertheless.
    assert_eq!(client.poll(&context(), FILE, 1, Some(PollHandle(77))), Ok(0));
    let begun = Instant::now();
    while !ear.polled.load(Ordering::SeqCst) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the wake-up is not heard");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn each_of_many_threads_gets_its_own_replies() {
    // Replies come in pairs and in reverse order, so that each thread receives for others. One
    // thread, whose replies are never delayed, makes requests until all others are done.
    let mut held: Option<Vec<u8>> = None;
    let client = with_server(0, RemoteOptions::default(), move |header, _| {
        let answer = message(0, header.unique, entry_out(header.nodeid + 1000).as_bytes());
        match held.take() {
            Some(earlier) => Some(vec![answer, earlier]),
            None if header.nodeid == 1 => Some(vec![answer]),
            None => {
                held = Some(answer);
                Some(Vec::new())
            }
        }
    });
    let left = AtomicUsize::new(8);
    std::thread::scope(|scope| {
        let (client, left) = (&client, &left);
        scope.spawn(move || {
            while left.load(Ordering::SeqCst) > 0 {
                client.lookup(&context(), Ino::ROOT, name()).unwrap();
            }
        });
        for thread in 0..8_u64 {
            scope.spawn(move || {
                for round in 0..500 {
                    let ino = 10_000 * (thread + 1) + round;
                    let entry = client.lookup(&context(), Ino(ino), name()).unwrap();
                    assert_eq!(entry.ino, Ino(ino + 1000));
                }
                left.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
}
