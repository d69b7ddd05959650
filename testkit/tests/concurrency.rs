//! The promises of frontends about calls at the same time, as the trait's documentation states
//! them.

mod ways;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use defuse_fs::{
    Caps, Context, Entry, Fh, File, FileSystem, Ino, Name, NewNode, OpenArgs, OpenReply, ReadArgs,
    ReadBuf, ReleaseArgs, Result, WriteArgs, WriteBuf, delegate,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};

/// Calls that must be inside at the same time.
const AT_ONCE: usize = 3;

/// A file system that watches which calls overlap.
struct OverlapWatcher {
    inner: MemoryFileSystem,
    next: AtomicU64,
    /// Calls on each open file that have not returned.
    open: Mutex<HashMap<Fh, usize>>,
    /// Calls on an open file that was released, releases during another call, and missed meetings.
    wrong: AtomicUsize,
    released: AtomicUsize,
    /// How many reads are to meet before any returns; how many have come.
    meeting: Mutex<(usize, usize)>,
    met: Condvar,
}

impl OverlapWatcher {
    fn new() -> Arc<Self> {
        Arc::new(OverlapWatcher {
            inner: MemoryFileSystem::new(MemoryOptions::default()),
            next: AtomicU64::new(1),
            open: Mutex::default(),
            wrong: AtomicUsize::new(0),
            released: AtomicUsize::new(0),
            meeting: Mutex::default(),
            met: Condvar::new(),
        })
    }

    fn record_open(&self, opened: OpenReply) -> OpenReply {
        let fh = Fh(self.next.fetch_add(1, Ordering::SeqCst));
        self.open.lock().unwrap().insert(fh, 0);
        OpenReply { fh, ..opened }
    }

    fn run_inside<T>(&self, fh: Fh, call: impl FnOnce() -> T) -> T {
        let count = |change: isize| match self.open.lock().unwrap().get_mut(&fh) {
            Some(count) => *count = count.wrapping_add_signed(change),
            None => _ = self.wrong.fetch_add(1, Ordering::SeqCst),
        };
        count(1);
        let result = call();
        count(-1);
        result
    }

    /// Waits until all that are to meet are here.
    fn meet(&self) {
        let mut meeting = self.meeting.lock().unwrap();
        meeting.1 += 1;
        self.met.notify_all();
        let wait = |meeting: &mut (usize, usize)| meeting.1 < meeting.0;
        let (_meeting, ended) =
            self.met.wait_timeout_while(meeting, Duration::from_secs(20), wait).unwrap();
        if ended.timed_out() {
            self.wrong.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl FileSystem for OverlapWatcher {
    delegate!(to inner, except caps, open, create, read, write, release);

    fn caps(&self) -> Caps {
        // Frontends start a thread for each call that waits.
        Caps { blocking: true, ..self.inner.caps() }
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        Ok(self.record_open(FileSystem::open(&self.inner, cx, ino, args)?))
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (entry, opened) = FileSystem::create(&self.inner, cx, parent, name, node, args)?;
        Ok((entry, self.record_open(opened)))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        self.run_inside(file.fh, || {
            self.meet();
            FileSystem::read(&self.inner, cx, file, args, out)
        })
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.run_inside(file.fh, || FileSystem::write(&self.inner, cx, file, args, data))
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        if self.open.lock().unwrap().remove(&file.fh) != Some(0) {
            self.wrong.fetch_add(1, Ordering::SeqCst);
        }
        self.released.fetch_add(1, Ordering::SeqCst);
        FileSystem::release(&self.inner, cx, file, args)
    }
}

#[test]
fn calls_on_one_open_file_arrive_at_the_same_time() {
    ways::run_on_each(OverlapWatcher::new, |way, fs, open| {
        let file = open();
        assert_eq!(file.pwrite(b"text", 0), 4);
        *fs.meeting.lock().unwrap() = (AT_ONCE, 0);
        std::thread::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.spawn(|| assert_eq!(file.pread(&mut [0; 4], 0), 4));
            }
        });
        let (wanted, came) = *fs.meeting.lock().unwrap();
        assert_eq!((wanted, came), (AT_ONCE, AT_ONCE), "{way}");
        // A read that waits until another has returned would have missed it.
        assert_eq!(fs.wrong.load(Ordering::SeqCst), 0, "{way}");
    });
}

#[test]
fn an_open_file_is_released_once_and_after_its_last_call() {
    ways::run_on_each(OverlapWatcher::new, |way, fs, open| {
        const ROUNDS: usize = 30;
        for _ in 0..ROUNDS {
            let file = open();
            std::thread::scope(|scope| {
                for at in 0..4u64 {
                    let own = file.clone();
                    scope.spawn(move || {
                        own.pwrite(b"text", at * 4);
                        own.pread(&mut [0; 4], at * 4);
                    });
                }
                // The last thread that is done closes it.
                drop(file);
            });
        }
        // No caller waits for RELEASE.
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while fs.released.load(Ordering::SeqCst) < ROUNDS {
            assert!(std::time::Instant::now() < deadline, "{way}: a file was not released");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (released, wrong) = (&fs.released, &fs.wrong);
        let counted = (released.load(Ordering::SeqCst), wrong.load(Ordering::SeqCst));
        assert_eq!(counted, (ROUNDS, 0), "{way}");
    });
}
