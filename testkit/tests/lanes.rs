//! File systems through shared memory: the operations of the model, two clients at once, and
//! clients that end.

#[allow(dead_code)] // Not all of it is used here.
mod served;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::{
    Context, Errno, File, FileSystem, Ino, Lock, LockKind, LockOwner, LockRequest, LockType,
    OpenArgs, OpenFlags, ReadArgs, ReadBuf, delegate,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteError, RemoteOptions};
use defuse_shared::{LaneLimits, LaneOffers, PagedFileSystem, PagedOptions};
use defuse_socket::{ClientStatistics, ServerOptions, ServerStatistics, SocketServer};
use defuse_testkit::model::{MissingPolicy, check};
use served::{TestServer, context, create, name, read, write};
use tempfile::TempDir;

const SHARED: RemoteOptions = RemoteOptions {
    timeout: None,
    descriptors_from: 0,
    lanes: LaneUse::Required,
    appends_at_size: false,
};

/// A server of files in memory, with shared memory.
fn memory(limits: LaneLimits) -> TestServer {
    let fs: Arc<dyn FileSystem> = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let lanes = Some(Arc::new(LaneOffers::new(limits)) as _);
    let paged = PagedFileSystem::wrap(Arc::clone(&fs), PagedOptions::default());
    let fs = paged.clone().map_or(fs, |paged| paged as _);
    let pages = paged.map(|paged| paged as _);
    TestServer::new(fs, ServerOptions { lanes, pages, ..ServerOptions::default() }, SHARED)
}

#[test]
fn memory_through_shared_memory_does_what_the_model_does() {
    check(MissingPolicy::Refused, || Arc::new(memory(LaneLimits::default()).with_client()));
}

#[test]
fn one_client_reads_what_another_one_writes_and_both_use_lanes() {
    let served = memory(LaneLimits::default());
    let (one, other) = (served.client(), served.client());
    let (_, file) = create(&one, "shared");
    // Longer than one message.
    let bytes: Vec<u8> = (0..2_500_000_u32).map(|at| (at / 7) as u8).collect();
    assert_eq!(write(&one, file, 3, &bytes), Ok(bytes.len()));
    let cx = context();
    let entry = other.lookup(&cx, Ino::ROOT, name("shared")).unwrap();
    assert_eq!(entry.attr.size, bytes.len() as u64 + 3);
    let opened = other.open(&cx, entry.ino, OpenArgs::default()).unwrap();
    let seen = read(&other, File { ino: entry.ino, fh: opened.fh }, 3, bytes.len() + 50).unwrap();
    assert!(seen == bytes, "{} bytes differ", seen.len());
    assert!([one, other].iter().all(|client| client.lane_counts().unwrap().requests >= 3));
}

fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Data of 1 MiB is one message, and lies in the memory of the client until a file system takes it.
#[test]
fn a_megabyte_is_one_request_and_threads_without_such_a_lane_use_several() {
    const MIB: usize = 1 << 20;
    let served = memory(LaneLimits::default());
    let client = served.client();
    let (_, file) = create(&client, "large");
    let bytes = random(5, 2 * MIB + 77);
    let requests = || client.lane_counts().unwrap().requests;
    let before = requests();
    assert_eq!(write(&client, file, 9, &bytes), Ok(bytes.len()));
    assert_eq!(requests() - before, 3);
    // Cached pages are only used for what is in them.
    let before = requests();
    assert!(read(&client, file, 9, bytes.len()).unwrap() == bytes);
    assert!(requests() - before <= 3 + 2, "{}", requests() - before);

    std::thread::scope(|scope| {
        for thread in 0..12_usize {
            let (client, bytes) = (&client, &bytes);
            scope.spawn(move || {
                let (_, file) = create(client, &format!("of {thread}"));
                for round in 0..20 {
                    let part = &bytes[thread * 1000 + round..][..MIB + 40_000 * thread];
                    assert_eq!(write(client, file, 0, part), Ok(part.len()));
                    assert!(read(client, file, 0, part.len()).unwrap() == part);
                }
            });
        }
    });
}

/// Files whose readers wait until they may go on.
struct HeldReads {
    inner: MemoryFileSystem,
    may_read: AtomicBool,
}

impl FileSystem for HeldReads {
    delegate!(to inner, except read);
    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> defuse_fs::Result<()> {
        while !self.may_read.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.inner.read(cx, file, args, out)
    }
}

/// The watchdog then lets a thread receive requests for them. Their data was left in the lane, and
/// the writes failed with `EIO`.
#[test]
fn large_data_arrives_while_all_workers_are_stuck() {
    const LEN: usize = 700_000;
    let held = HeldReads {
        inner: MemoryFileSystem::new(MemoryOptions::default()),
        may_read: AtomicBool::new(false),
    };
    let held = Arc::new(held);
    let lanes = Some(Arc::new(LaneOffers::new(LaneLimits::default())) as _);
    let mut options = ServerOptions { lanes, ..ServerOptions::default() };
    options.session.workers = Some(2);
    let served = TestServer::new(Arc::clone(&held) as _, options, SHARED);
    let client = served.client();
    let files: Vec<_> = (0..6).map(|at| create(&client, &format!("file{at}")).1).collect();
    std::thread::scope(|scope| {
        let (client, files) = (&client, &files);
        let readers = [0, 1].map(|at| scope.spawn(move || read(client, files[at], 0, 8)));
        // Time for both to be in their handlers.
        std::thread::sleep(Duration::from_millis(200));
        let writers: Vec<_> = (2..6)
            .map(|at| {
                let bytes = random(at as u64, LEN);
                scope.spawn(move || write(client, files[at], 0, &bytes))
            })
            .collect();
        // Time for the watchdog.
        std::thread::sleep(Duration::from_millis(300));
        held.may_read.store(true, Ordering::Release);
        for writer in writers {
            assert_eq!(writer.join().unwrap(), Ok(LEN));
        }
        assert!(readers.into_iter().all(|reader| reader.join().unwrap() == Ok(Vec::new())));
    });
    for (at, file) in files.into_iter().enumerate().skip(2) {
        assert!(read(&client, file, 0, LEN + 1).unwrap() == random(at as u64, LEN));
    }
}

/// A directory of the kernel, in which data passes from the lane to files and back by the server's
/// own memory.
#[test]
fn large_data_reaches_files_of_the_kernel_whole_also_at_their_ends() {
    let dir = TempDir::with_prefix("defuse-large-").unwrap();
    let options = defuse_passthrough::PassthroughOptions::default();
    let fs = Arc::new(defuse_passthrough::Passthrough::new(dir.path(), options).unwrap());
    let lanes = Some(Arc::new(LaneOffers::new(LaneLimits::default())) as _);
    let served = TestServer::new(fs, ServerOptions { lanes, ..ServerOptions::default() }, SHARED);
    let client = served.client();
    let (entry, file) = create(&client, "large");
    let bytes = random(6, 900_001);
    assert_eq!(write(&client, file, 0, &bytes), Ok(bytes.len()));
    let flags = OpenFlags(OpenFlags::APPEND | 1);
    let args = OpenArgs { flags, ..OpenArgs::default() };
    let opened = client.open(&context(), entry.ino, args).unwrap();
    let append = File { ino: entry.ino, fh: opened.fh };
    assert_eq!(write(&client, append, 900_001, &bytes[..70_000]), Ok(70_000));
    let expected = [&bytes[..], &bytes[..70_000]].concat();
    assert!(std::fs::read(dir.path().join("large")).unwrap() == expected);
    // The file ends within the requested range.
    assert!(read(&client, file, 5, 1 << 20).unwrap() == expected[5..]);
}

/// A snapshot was the sum of all clients, and did not show which resources each of them held.
#[test]
fn each_client_has_counts_of_its_own_and_the_sum_has_those_of_ended_ones() {
    let served = memory(LaneLimits::default());
    let by_lanes = served.client();
    let messages = RemoteOptions { lanes: LaneUse::Never, ..SHARED };
    let by_messages = RemoteClient::connect(&served.path, messages).unwrap();
    let (_, one) = create(&by_lanes, "one");
    let (_, two) = create(&by_messages, "two");
    assert_eq!(write(&by_lanes, one, 0, &[1; 1000]), Ok(1000));
    assert_eq!(write(&by_messages, two, 0, &[1; 50]), Ok(50));
    assert!(by_messages.lookup(&context(), Ino::ROOT, name("none")).is_err());
    by_messages.setlk(&context(), two, &exclusive()).unwrap();

    // A worker counts a request after it has answered it.
    let counted = |statistics: &ServerStatistics| {
        let [one, two] = &statistics.clients[..] else { return false };
        (one.bytes, two.bytes, two.requests) == (1000, 50, one.requests + 2)
    };
    let begun = Instant::now();
    let statistics = loop {
        let statistics = served.server.statistics();
        if counted(&statistics) {
            break statistics;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", statistics.clients);
        std::thread::sleep(Duration::from_millis(1));
    };
    let [first, second] = &statistics.clients[..] else { unreachable!() };
    let lanes = first.lanes.unwrap();
    assert!(lanes.used >= 1 && lanes.requests >= 2 && lanes.unanswered == 0, "{lanes:?}");
    // Lanes were offered to it, too.
    assert_eq!((second.lanes.unwrap().requests, second.errors - first.errors), (0, 1));
    let own = std::process::id() as i32;
    assert!([first, second].iter().all(|client| client.pid == own && client.requests >= 2));
    let held = |client: &ClientStatistics| (client.holdings.open_files, client.holdings.locks);
    assert_eq!((held(first), held(second)), ((1, 0), (1, 1)));
    assert!(first.number < second.number && second.holdings.inodes >= 1);
    let requests = |statistics: &ServerStatistics| {
        statistics.all.ops.iter().map(|op| op.latency.count).sum::<u64>()
    };
    assert_eq!(requests(&statistics), first.requests + second.requests);
    assert_eq!(statistics.all.gauges["connections"], 2);

    // An ended client leaves its requests and none of its threads.
    drop(by_messages);
    let begun = Instant::now();
    while served.server.connections() > 1 {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
    let after = served.server.statistics();
    assert_eq!(after.clients.len(), 1);
    assert!(requests(&after) >= requests(&statistics));
    let most = |statistics: &ServerStatistics| statistics.all.gauges["workers_max"];
    assert_eq!(most(&after) * 2, most(&statistics));
}

/// Where more threads make requests than there are lanes, the rest uses messages, until there are
/// more lanes.
#[test]
fn more_threads_than_lanes_all_get_their_own_replies_and_more_lanes() {
    let served = memory(LaneLimits::default());
    let client = served.client();
    let lanes = || served.server.statistics().clients[0].lanes.unwrap().used;
    let more = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..40_u8 {
            let (client, lanes, more) = (&client, &lanes, &more);
            scope.spawn(move || {
                let (entry, file) = create(client, &format!("of thread {thread}"));
                let begun = Instant::now();
                for round in (0..=u8::MAX).cycle() {
                    // They meet when the scheduler lets them.
                    if round >= 40 && more.load(Ordering::Relaxed) {
                        break;
                    }
                    more.fetch_or(lanes() > 16, Ordering::Relaxed);
                    assert!(begun.elapsed() < Duration::from_secs(120), "{} lanes", lanes());
                    let bytes = [thread ^ round; 3000];
                    assert_eq!(write(client, file, 0, &bytes), Ok(3000));
                    assert_eq!(read(client, file, 0, 4000).unwrap(), bytes);
                    let found = client.lookup(&context(), Ino::ROOT, name("none"));
                    assert_eq!(found.err(), Some(Errno::ENOENT));
                    assert_eq!(client.getattr(&context(), file.ino, None).unwrap().size, 3000);
                }
                client.forget(entry.ino, 1);
            });
        }
    });
}

#[test]
fn a_server_without_lanes_is_named_and_a_client_beyond_the_limit_uses_messages() {
    let limits = LaneLimits { blocks: 1, blocks_of_user: 1 };
    let served = memory(limits);
    let (first, second) = (served.client(), served.client());
    assert!(first.lane_counts().is_some() && second.lane_counts().is_none());
    let (_, file) = create(&second, "through messages");
    assert_eq!(write(&second, file, 0, b"bytes"), Ok(5));
    drop(first);
    let again = || {
        (0..100).find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            served.client().lane_counts()
        })
    };
    assert!(again().is_some(), "the end of a client gives its lanes back");
    // A client of messages ignores the offer.
    let plain = RemoteClient::connect(&served.path, RemoteOptions::default()).unwrap();
    assert!(
        plain.lane_counts().is_none()
            && plain.lookup(&context(), Ino::ROOT, name("through messages")).is_ok()
    );

    let dir = TempDir::with_prefix("defuse-lanes-").unwrap();
    let path = dir.path().join("socket");
    let memory = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let server = SocketServer::bind(&path, memory, ServerOptions::default()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let refused = RemoteClient::connect(&path, SHARED).err();
        server.shut_down();
        assert!(matches!(refused, Some(RemoteError::NoLanes)), "{refused:?}");
    });
}

/// The part of a client that is killed: it holds a lock and an open file without a name, and writes
/// through many lanes until its end.
#[test]
fn child() {
    let Some(path) = std::env::var_os("DEFUSE_LANES_CHILD") else { return };
    let client = RemoteClient::connect(path.as_ref(), SHARED).unwrap();
    let ino = client.lookup(&context(), Ino::ROOT, name("locked")).unwrap().ino;
    let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
    let locked = File { ino, fh: client.open(&context(), ino, args).unwrap().fh };
    assert_eq!(client.setlk(&context(), locked, &exclusive()), Ok(()));
    let (_, unnamed) = create(&client, "unnamed");
    client.unlink(&context(), Ino::ROOT, name("unnamed")).unwrap();
    println!("ready");
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let client = &client;
            scope.spawn(move || {
                loop {
                    write(client, unnamed, thread << 20, &[7; 60_000]).unwrap();
                    read(client, unnamed, thread << 20, 4096).unwrap();
                }
            });
        }
    });
}

fn exclusive() -> LockRequest {
    let lock = Lock { typ: LockType::Write, start: 0, end: u64::MAX >> 1, pid: 1 };
    LockRequest { kind: LockKind::Posix, owner: LockOwner(7), lock, wait: false }
}

/// A client that has taken the lock and makes requests, and the time until it does.
fn start_child(served: &TestServer) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["child", "--exact", "--nocapture"]).env("DEFUSE_LANES_CHILD", &served.path);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    assert!(said.lines().any(|line| line.is_ok_and(|line| line.contains("ready"))));
    child
}

#[test]
fn a_client_that_is_killed_leaves_nothing_and_nobody_waits_for_it() {
    let served = memory(LaneLimits::default());
    let client = served.client();
    let (_, file) = create(&client, "locked");
    let used = || client.statfs(&context(), Ino::ROOT).unwrap().files_free;
    let free = used();
    let mut random = fastrand::Rng::with_seed(5);
    let mut longest = Duration::ZERO;
    for round in 0..6_u8 {
        let mut child = start_child(&served);
        assert_eq!(client.setlk(&context(), file, &exclusive()), Err(Errno::EAGAIN));
        let until = Instant::now() + Duration::from_micros(random.u64(..40_000));
        let mut killed = false;
        while !killed || served.server.connections() > 1 {
            if !killed && Instant::now() > until {
                child.kill().unwrap();
                killed = true;
            }
            let begun = Instant::now();
            assert_eq!(write(&client, file, 0, &[round; 5000]), Ok(5000));
            assert_eq!(read(&client, file, 0, 6000).unwrap(), [round; 5000]);
            longest = longest.max(begun.elapsed());
        }
        child.wait().unwrap();
        assert_eq!(client.setlk(&context(), file, &exclusive()), Ok(()));
        let unlock = Lock { typ: LockType::Unlock, ..exclusive().lock };
        let unlock = LockRequest { lock: unlock, ..exclusive() };
        assert_eq!(client.setlk(&context(), file, &unlock), Ok(()));
        assert_eq!(used(), free, "files of clients that are gone");
    }
    assert!(longest < Duration::from_secs(30), "a call took {longest:?}");
}
