//! A file system that moves from one server to the next.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::{
    Attr, Caller, Context, DirBuf, Entry, Errno, Fh, File, FileKind, FileSystem, Ino, LockOwner,
    Name, NewNode, OpenArgs, OpenFlags, OpenReply, ReleaseArgs, Result, SliceSource, WriteArgs,
    WriteBuf,
};
use defuse_remote::MovingClient;

/// One file, `file`. It becomes durable when the test allows it.
#[derive(Default)]
struct OneFile {
    is_syncing: AtomicBool,
    may_sync: AtomicBool,
}

const FILE: Ino = Ino(2);

fn attr(ino: Ino) -> Attr {
    let kind = if ino == FILE { FileKind::Regular } else { FileKind::Directory };
    let node = NewNode::new(kind, 0o755, Caller::default());
    // Its birth is the same for all servers.
    Attr { btime: None, ..Attr::for_new(ino, &node) }
}

impl FileSystem for OneFile {
    fn lookup(&self, _: &Context<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        let there = name.as_bytes() == b"file";
        let entry = Entry { ino: FILE, generation: 0, attr: attr(FILE), valid_for: Duration::ZERO };
        there.then_some(entry).ok_or(Errno::ENOENT)
    }
    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        Ok(attr(ino))
    }
    fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<OpenReply> {
        Ok(OpenReply::new(Fh(7)))
    }
    fn write(
        &self,
        _: &Context<'_>,
        _: File,
        _: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut room = vec![0; data.remaining()];
        data.take(&mut room)
    }
    fn flush(&self, _: &Context<'_>, _: File, _: LockOwner) -> Result<()> {
        Ok(())
    }
    fn fsync(&self, _: &Context<'_>, _: File, _: bool) -> Result<()> {
        Ok(())
    }
    fn release(&self, _: &Context<'_>, _: File, _: ReleaseArgs) -> Result<()> {
        Ok(())
    }
    fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
        Ok(())
    }
    fn syncfs(&self, _: &Context<'_>) -> Result<()> {
        self.is_syncing.store(true, Ordering::SeqCst);
        wait("the permission to sync", || self.may_sync.load(Ordering::SeqCst));
        Ok(())
    }
}

fn wait(what: &str, mut is_there: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_there() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A program that forks closes its open files in the child, which is a flush.
#[test]
fn a_flush_while_the_file_system_moves_loses_no_changes() {
    let cx = Context::new(Caller::default());
    let moving = MovingClient::new("test".to_owned(), Duration::from_secs(60));
    let first = Arc::new(OneFile::default());
    moving.give_own(Arc::clone(&first) as _);
    let ino = moving.lookup(&cx, Ino::ROOT, Name::new(b"file").unwrap()).unwrap().ino;
    let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() };
    let file = File { ino, fh: moving.open(&cx, ino, args).unwrap().fh };
    let mut source = SliceSource::new(b"data");
    let wrote = moving.write(&cx, file, WriteArgs::default(), &mut WriteBuf::new(&mut source));
    assert_eq!(wrote, Ok(4));
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| moving.leave_server(Duration::from_secs(60)));
        wait("the sync", || first.is_syncing.load(Ordering::SeqCst));
        // Data that is not durable yet is not lost.
        let flushing = scope.spawn(|| moving.flush(&cx, file, LockOwner(1)));
        std::thread::sleep(Duration::from_millis(50));
        first.may_sync.store(true, Ordering::SeqCst);
        assert_eq!(leaving.join().unwrap(), Ok(()));
        assert_eq!(flushing.join().unwrap(), Ok(()));
    });
    moving.give_own(Arc::new(OneFile::default()));
    assert_eq!(moving.fsync(&cx, file, false), Ok(()));
}
