//! Locks forwarded to the lower file system.

mod common;

use std::fs::OpenOptions;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::*;
use defuse_fs::layer::{FaultLayer, ReadOnlyLayer};
use defuse_fs::*;
use defuse_passthrough::{LockPlace, Passthrough, PassthroughOptions};

fn request(kind: LockKind, owner: u64, typ: LockType) -> LockRequest {
    let lock = Lock { typ, start: 0, end: 9, pid: 1 };
    LockRequest { kind, owner: LockOwner(owner), lock, wait: true }
}

fn wait(
    served: &ServedDirectory,
    file: File,
    lock: LockRequest,
) -> (mpsc::Receiver<Result<()>>, Arc<InterruptToken>) {
    let (send, receive) = mpsc::channel();
    let token = Arc::new(InterruptToken::default());
    let answer = Box::new(move |taken| {
        let _ = send.send(taken);
    });
    let caller = own_context().caller;
    served.fs.setlkw(LockWait::new((file, lock), caller, 1, Arc::clone(&token), answer));
    (receive, token)
}

#[test]
fn locks_can_be_awaited_and_interrupted_and_others_see_them() {
    let options =
        PassthroughOptions { locks: LockPlace::FileSystem, ..PassthroughOptions::default() };
    run_everywhere(&options, |served| {
        let short = Duration::from_millis(30);
        let long = Duration::from_secs(60);
        let (entry, file) = served.create("a");
        let other = served.open(entry.ino, OpenFlags::RDWR).unwrap();
        for kind in [LockKind::Posix, LockKind::Flock] {
            let first = request(kind, 1, LockType::Write);
            let second = request(kind, 2, LockType::Write);
            let now = LockRequest { wait: false, ..second };
            assert_eq!(served.fs.setlk(&own_context(), file, &first), Ok(()));
            assert_eq!(served.fs.setlk(&own_context(), other, &now), Err(Errno::EAGAIN));
            if kind == LockKind::Posix {
                let found = served.fs.getlk(&own_context(), other, &now).unwrap().unwrap();
                assert_eq!((found.typ, found.start, found.end), (LockType::Write, 0, 9));
                assert_eq!(
                    served.fs.getlk(&own_context(), file, &first),
                    Ok(None),
                    "not one's own"
                );
            }
            let (answer, token) = wait(served, other, second);
            assert!(answer.recv_timeout(short).is_err());
            token.trip();
            assert_eq!(answer.recv_timeout(long), Ok(Err(Errno::EINTR)));
            let (answer, _) = wait(served, other, second);
            assert!(answer.recv_timeout(short).is_err());
            let unlock = request(kind, 1, LockType::Unlock);
            assert_eq!(served.fs.setlk(&own_context(), file, &unlock), Ok(()));
            assert_eq!(answer.recv_timeout(long), Ok(Ok(())));
            assert_eq!(served.fs.setlk(&own_context(), file, &first), Err(Errno::EAGAIN));
            // Closing releases the locks.
            assert_eq!(served.fs.flush(&own_context(), other, LockOwner(2)), Ok(()));
            if kind == LockKind::Flock {
                let args = ReleaseArgs { flock_owner: Some(LockOwner(2)), ..Default::default() };
                assert_eq!(served.fs.release(&own_context(), other, args), Ok(()));
            }
            assert_eq!(served.fs.setlk(&own_context(), file, &first), Ok(()));
        }
        let native = OpenOptions::new().read(true).open(served.path("a")).unwrap();
        assert!(native.try_lock().is_err(), "held against those who use the source directly");
    });
}

/// The descriptor serves other calls meanwhile. The lock still ends with the open directory.
#[test]
fn a_lock_of_a_directory_ends_when_it_is_closed() {
    for locks in [LockPlace::FileSystem, LockPlace::Inherited] {
        let options = PassthroughOptions { locks, ..PassthroughOptions::default() };
        run_everywhere(&options, |served| {
            let dir = served.mkdir(Ino::ROOT, "d");
            let opened = served.fs.opendir(&own_context(), dir.ino, OpenFlags::default()).unwrap();
            let open = File { ino: dir.ino, fh: opened.fh };
            // Its attributes and its names are looked at meanwhile.
            assert_eq!(
                served.fs.getattr(&own_context(), dir.ino, None).map(|attr| attr.kind),
                Ok(dir.attr.kind)
            );
            let none = served.fs.lookup(&own_context(), dir.ino, name("none"));
            assert_eq!(none.map(|entry| entry.ino), Err(Errno::ENOENT));
            drop(opened);
            let other = std::fs::File::open(served.path("d")).unwrap();
            let lock = || other.try_lock().is_ok();
            let request = request(LockKind::Flock, 1, LockType::Write);
            assert_eq!(served.fs.setlk(&own_context(), open, &request), Ok(()));
            assert!(!lock(), "it is locked");
            assert_eq!(served.fs.releasedir(&own_context(), open), Ok(()));
            assert!(lock(), "it is free");
        });
    }
}

#[test]
fn without_forwarding_the_frontend_keeps_locks() {
    let served = ServedDirectory::new(&bases()[0], PassthroughOptions::default());
    let (_, file) = served.create("a");
    let lock = request(LockKind::Posix, 1, LockType::Write);
    assert_eq!(served.fs.setlk(&own_context(), file, &lock), Err(Errno::ENOSYS));
    assert_eq!(served.fs.caps().locks, LockSupport::Frontend);
}

/// A child process has the descriptors of its parent, like the duplicate in this test. Its exit
/// released the locks of the parent.
#[test]
fn a_release_unlocks_only_if_no_other_process_can_have_the_open_file() {
    for (locks, held) in [(LockPlace::FileSystem, false), (LockPlace::Inherited, true)] {
        let served = ServedDirectory::new(
            &bases()[0],
            PassthroughOptions { locks, ..PassthroughOptions::default() },
        );
        let (entry, file) = served.create("a");
        let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() };
        let opened = served.fs.open(&own_context(), entry.ino, args).unwrap();
        assert_eq!(opened.lower.is_some(), locks == LockPlace::Inherited);
        // With locks of the lower file system both have the descriptor of the open file.
        let elsewhere = opened.lower.or(opened.backing.map(|backing| backing.fd)).unwrap();
        let open = File { ino: entry.ino, fh: opened.fh };
        let lock = request(LockKind::Flock, 1, LockType::Write);
        assert_eq!(served.fs.setlk(&own_context(), open, &lock), Ok(()));
        let args = ReleaseArgs { flock_owner: Some(LockOwner(1)), ..ReleaseArgs::default() };
        assert_eq!(served.fs.release(&own_context(), open, args), Ok(()));
        let other = LockRequest { wait: false, ..request(LockKind::Flock, 2, LockType::Write) };
        let busy = if held { Err(Errno::EAGAIN) } else { Ok(()) };
        assert_eq!(served.fs.setlk(&own_context(), file, &other), busy, "{locks:?}");
        drop(elsewhere);
        assert_eq!(served.fs.setlk(&own_context(), file, &other), Ok(()));
    }
}

/// The lower open file can be mapped, which bypasses layers that must see all data.
#[test]
fn layers_pass_on_a_lower_open_file_only_if_no_data_bypasses_them() {
    let options =
        PassthroughOptions { locks: LockPlace::Inherited, ..PassthroughOptions::default() };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a"), "a").unwrap();
    let fs: Arc<dyn FileSystem> = Arc::new(Passthrough::new(dir.path(), options).unwrap());
    let entry = fs.lookup(&own_context(), Ino::ROOT, name("a")).unwrap();
    let lower = |fs: &dyn FileSystem, flags| {
        let args = OpenArgs { flags: OpenFlags(flags), ..OpenArgs::default() };
        fs.open(&own_context(), entry.ino, args).map(|opened| opened.lower.is_some())
    };
    assert_eq!(lower(&*fs, OpenFlags::RDWR), Ok(true));
    let read_only = ReadOnlyLayer::new(Arc::clone(&fs));
    assert_eq!(lower(&read_only, 0), Ok(true));
    assert_eq!(lower(&read_only, OpenFlags::RDWR), Err(Errno::EROFS));
    let switch = read_only.switch();
    switch.store(true, std::sync::atomic::Ordering::Release);
    assert_eq!(lower(&read_only, OpenFlags::RDWR), Ok(false), "it could be forbidden later");
    assert_eq!(lower(&FaultLayer::new(fs, 1), 0), Ok(false));
}

/// A waiting thread does not exist in a child process, which found the thread's mutex locked.
#[test]
fn in_a_process_that_forks_a_conflicting_lock_is_eagain() {
    let served = ServedDirectory::new(
        &bases()[0],
        PassthroughOptions { locks: LockPlace::Inherited, ..PassthroughOptions::default() },
    );
    let (_, file) = served.create("a");
    assert_eq!(
        served.fs.setlk(&own_context(), file, &request(LockKind::Posix, 1, LockType::Write)),
        Ok(())
    );
    let (answer, _) = wait(&served, file, request(LockKind::Posix, 2, LockType::Write));
    assert_eq!(answer.recv_timeout(Duration::from_secs(60)), Ok(Err(Errno::EAGAIN)));
}
