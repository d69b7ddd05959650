//! Clients whose processes a table calls stopped.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use defuse_fs::layer::LockingLayer;
use defuse_fs::*;

use super::{ProcessStatus, describe_file};
use crate::{PeerConnection, PeerCredentials, ServiceQuotas, ServiceState};

/// A root with the file `held`.
#[derive(Default)]
struct HeldFileSystem {
    /// Calls that a search for a name would make.
    searches: AtomicU32,
}

const FILE: Ino = Ino(5);
const LIMIT: Duration = Duration::from_secs(9);

fn attr(ino: Ino) -> Attr {
    let kind = if ino == Ino::ROOT { FileKind::Directory } else { FileKind::Regular };
    Attr::for_new(ino, &NewNode::new(kind, 0o777, Caller { uid: 7, gid: 7, pid: 0 }))
}

impl FileSystem for HeldFileSystem {
    fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        self.searches.fetch_add(1, Ordering::Relaxed);
        let attr = attr(FILE);
        Ok(Entry { ino: FILE, generation: 0, attr, valid_for: Duration::ZERO })
    }
    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        Ok(attr(ino))
    }
    fn readdir(&self, _: &Context<'_>, _: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        self.searches.fetch_add(1, Ordering::Relaxed);
        if from == 0 {
            out.push(DirItem { ino: FILE.0, next: 1, kind: FileKind::Regular, name: b"held" });
        }
        Ok(())
    }
}

type DynFileSystem = Arc<dyn FileSystem>;

/// The server, and the processes of the machine: stopped or not.
struct StoppedScene {
    one: Arc<HeldFileSystem>,
    fs: DynFileSystem,
    service: Arc<ServiceState>,
    processes: HashMap<u32, bool>,
    now: Instant,
}

/// A client with an open file.
struct TestClient {
    connection: PeerConnection<DynFileSystem>,
    caller: Caller,
    file: File,
}

impl StoppedScene {
    fn new(processes: &[(u32, bool)]) -> StoppedScene {
        let one = Arc::new(HeldFileSystem::default());
        let fs: DynFileSystem = Arc::new(LockingLayer::new(Arc::clone(&one)));
        let service = ServiceState::with_watcher(ServiceQuotas::default(), || {});
        let processes = processes.iter().copied().collect();
        StoppedScene { one, fs, service, processes, now: Instant::now() }
    }

    fn client(&self, pid: u32) -> TestClient {
        let who = PeerCredentials { pid: pid as i32, uid: 7, groups: vec![7] };
        let connection = PeerConnection::new(Arc::clone(&self.fs), Arc::clone(&self.service), who);
        let caller = Caller { uid: 7, gid: 7, pid };
        let cx = Context::new(caller);
        connection.lookup(&cx, Ino::ROOT, Name::new(b"held").unwrap()).unwrap();
        let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
        let file = File { ino: FILE, fh: connection.open(&cx, FILE, args).unwrap().fh };
        TestClient { connection, caller, file }
    }

    /// Lets time pass, with several looks. Returns the number of locks that were released.
    fn pass(&mut self, time: Duration) -> usize {
        let look = |pid: u32| {
            let is_stopped = *self.processes.get(&pid)?;
            Some(ProcessStatus { uid: 7, start: 1, name: "a".to_owned(), is_stopped })
        };
        let mut released = 0;
        for _ in 0..4 {
            self.now += time / 4;
            released += self.service.watch.release(&*self.fs, (LIMIT, self.now), &look);
        }
        released
    }
}

impl TestClient {
    fn request(&self, kind: LockKind, typ: LockType) -> LockRequest {
        let lock = Lock { typ, start: 0, end: 9, pid: self.caller.pid };
        LockRequest { kind, owner: LockOwner::for_process(self.caller.pid), lock, wait: true }
    }

    fn wait(&self, kind: LockKind, typ: LockType) -> mpsc::Receiver<Result<()>> {
        let (send, receive) = mpsc::channel();
        let answer = Box::new(move |result| {
            // The test may have ended.
            let _ = send.send(result);
        });
        let wait = (self.file, self.request(kind, typ));
        self.connection.setlkw(LockWait::new(wait, self.caller, 1, Arc::default(), answer));
        receive
    }

    fn take_lock(&self, kind: LockKind) {
        assert_eq!(self.wait(kind, LockType::Write).try_recv(), Ok(Ok(())));
    }

    fn calls(&self) -> Result<()> {
        self.connection.getattr(&Context::new(self.caller), FILE, None).map(drop)
    }
}

#[test]
fn a_stopped_client_loses_a_lock_for_which_others_wait_and_is_told_once() {
    for kind in [LockKind::Posix, LockKind::Flock] {
        let mut scene = StoppedScene::new(&[(1, true), (2, false), (3, false)]);
        let (holder, waiter, other) = (scene.client(1), scene.client(2), scene.client(3));
        holder.take_lock(kind);
        let granted = waiter.wait(kind, LockType::Write);
        assert_eq!(scene.pass(LIMIT), 0, "not before the limit");
        assert!(granted.try_recv().is_err());
        assert_eq!(scene.pass(LIMIT), 1, "{kind:?}");
        assert_eq!(granted.try_recv(), Ok(Ok(())));
        assert_eq!([holder.calls(), holder.calls()], [Err(Errno::EIO), Ok(())]);
        assert_eq!([waiter.calls(), other.calls()], [Ok(()), Ok(())]);
        let lost = |client: &TestClient| client.connection.holdings().locks_lost;
        assert_eq!([lost(&holder), lost(&waiter), scene.service.locks_lost()], [1, 0, 1]);
        // It may wait for the lock like every client, and its end releases no lock of the other
        // one.
        let again = holder.wait(kind, LockType::Write);
        holder.connection.close();
        let next = other.wait(kind, LockType::Write);
        assert!(next.try_recv().is_err() && !matches!(again.try_recv(), Ok(Ok(()))));
    }
}

#[test]
fn nobody_loses_a_lock_who_runs_or_for_whom_nobody_waits() {
    let mut scene = StoppedScene::new(&[(1, true), (2, false), (3, true)]);
    let (stopped, runs, waiter) = (scene.client(1), scene.client(2), scene.client(9));
    stopped.take_lock(LockKind::Posix);
    assert_eq!(scene.pass(LIMIT * 9), 0, "nobody waits");
    // A running client keeps locks for which others wait, for any time.
    runs.take_lock(LockKind::Flock);
    let granted = waiter.wait(LockKind::Flock, LockType::Write);
    assert_eq!(scene.pass(LIMIT * 9), 0);
    assert!(granted.try_recv().is_err());
    assert_eq!([stopped.calls(), runs.calls()], [Ok(()), Ok(())]);
    // A stopped one whose locks are of another kind, or in another range, is not in the way.
    let beside = scene.client(3);
    let mut request = beside.request(LockKind::Posix, LockType::Write);
    (request.lock.start, request.lock.end) = (100, 199);
    beside.connection.setlk(&Context::new(beside.caller), beside.file, &request).unwrap();
    let wait = waiter.wait(LockKind::Posix, LockType::Write);
    assert_eq!(scene.pass(LIMIT * 2), 1, "the one that is in the way");
    assert_eq!(wait.try_recv(), Ok(Ok(())));
    assert_eq!([beside.calls(), stopped.calls()], [Ok(()), Err(Errno::EIO)]);
}

#[test]
fn a_client_that_was_continued_in_between_has_the_whole_limit_again() {
    let mut scene = StoppedScene::new(&[(1, true), (2, false)]);
    let (holder, waiter) = (scene.client(1), scene.client(2));
    holder.take_lock(LockKind::Posix);
    let granted = waiter.wait(LockKind::Posix, LockType::Read);
    for _ in 0..5 {
        scene.processes.insert(1, true);
        assert_eq!(scene.pass(LIMIT), 0);
        scene.processes.insert(1, false);
        assert_eq!(scene.pass(LIMIT), 0);
    }
    assert!(granted.try_recv().is_err() && holder.calls().is_ok());
    scene.processes.insert(1, true);
    assert_eq!(scene.pass(LIMIT * 2), 1);
}

#[test]
fn a_lock_that_a_running_process_shares_stays() {
    let mut scene = StoppedScene::new(&[(1, true), (2, false), (4, false)]);
    let (parent, waiter) = (scene.client(1), scene.client(2));
    parent.take_lock(LockKind::Flock);
    let child = parent.connection.copy().unwrap();
    let granted = waiter.wait(LockKind::Flock, LockType::Write);
    assert_eq!(scene.pass(LIMIT * 4), 0, "nothing is known of the child");
    let caller = Caller { pid: 4, ..parent.caller };
    child.getattr(&Context::new(caller), FILE, None).unwrap();
    assert_eq!(scene.pass(LIMIT * 4), 0, "the child runs");
    // The connection that took the lock ends, and the child that is left is stopped.
    parent.connection.close();
    scene.processes.insert(4, true);
    assert_eq!(scene.pass(LIMIT * 2), 1);
    assert_eq!(granted.try_recv(), Ok(Ok(())));
    let fetched = child.getattr(&Context::new(caller), FILE, None).map(drop);
    assert_eq!(fetched, Err(Errno::EIO));
}

/// A client itself names the process that calls. If it names a stopped process of another user,
/// that process must not decide about its lock; and a kernel that acts for many processes has no
/// single one.
#[test]
fn processes_of_others_and_connections_of_many_processes_are_not_judged() {
    let mut scene = StoppedScene::new(&[(1, true), (2, false), (3, true)]);
    let (many, waiter) = (scene.client(1), scene.client(2));
    many.take_lock(LockKind::Flock);
    let other = Context::new(Caller { pid: 3, ..many.caller });
    many.connection.getattr(&other, FILE, None).unwrap();
    let granted = waiter.wait(LockKind::Flock, LockType::Write);
    assert_eq!(scene.pass(LIMIT * 4), 0);
    assert!(granted.try_recv().is_err());
    let foreign =
        |_: u32| Some(ProcessStatus { uid: 8, start: 1, name: String::new(), is_stopped: true });
    scene.now += LIMIT * 4;
    for _ in 0..2 {
        scene.now += LIMIT * 4;
        let when = (LIMIT, scene.now);
        assert_eq!(scene.service.watch.release(&*scene.fs, when, &foreign), 0);
    }
}

/// The message named the file after a search through up to 100,000 names, in the server, each time
/// that a user stopped a process of their own that had a lock.
#[test]
fn a_released_lock_causes_no_search_and_the_message_has_the_path_of_the_file() {
    let mut scene = StoppedScene::new(&[(1, true), (2, false)]);
    let (holder, waiter) = (scene.client(1), scene.client(2));
    holder.take_lock(LockKind::Posix);
    let _granted = waiter.wait(LockKind::Posix, LockType::Write);
    let searches = |scene: &StoppedScene| scene.one.searches.load(Ordering::Relaxed);
    let before = searches(&scene);
    assert_eq!(scene.pass(LIMIT * 2), 1);
    assert_eq!(searches(&scene), before);
    let all = [&holder.connection, &waiter.connection].map(|one| Arc::clone(one.client()));
    assert_eq!(describe_file(&*scene.fs, FILE, &[&all[0]]), "/held (inode 5)");
    assert_eq!(describe_file(&*scene.fs, Ino(6), &[&all[0], &all[1]]), "inode 6");
    holder
        .connection
        .release(&Context::new(holder.caller), holder.file, ReleaseArgs::default())
        .unwrap();
    assert_eq!(describe_file(&*scene.fs, FILE, &[&all[0]]), "inode 5");
}
