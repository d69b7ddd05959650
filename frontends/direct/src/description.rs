//! Open files: the result of open(2), which duplicate descriptors share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::native::NativeFile;
use defuse_fs::{Fh, File, FileKind, LockKind, LockOwner, OpenFlags, ReleaseArgs};
use defuse_probe::Op;
use rustix::thread::{MembarrierCommand, futex, membarrier};

use crate::credentials::TaskCredentials;
use crate::mounted_inode::MountedInode;
use crate::task::ClientTask;

/// The state that processes share with an open file: the position and the status flags. All fields
/// are atomic and independent of the address. In memory mapped `MAP_SHARED`, a child process of
/// fork(2) therefore shares them, as POSIX requires. All zeros is a valid state.
#[derive(Debug, Default)]
#[repr(C)]
pub struct OpenCells {
    position: AtomicU64,
    flags: AtomicU32,
    /// 0 if free, otherwise the number of the process that holds the lock. A futex across
    /// processes. If the holder is gone, a waiter takes the lock over.
    lock: AtomicU32,
    /// Number of waiters. It is a separate word so that unlocking is a plain store.
    waiters: AtomicU32,
}

/// Provides cells that outlive this process's heap.
pub trait CellArena: Send + Sync {
    /// Returns cells for a file that is being opened, or `None` if none are left (`ENFILE`).
    fn take(&self) -> Option<&'static OpenCells>;
    /// Returns cells when the file is closed in this process.
    fn give_back(&self, cells: &'static OpenCells);
    /// The number of this process, unique among the processes that use the arena. Not 0, below
    /// 2^31.
    fn process(&self) -> u32 {
        std::process::id()
    }
    /// True if the process of that number still lives. Called when it has held a lock for long.
    fn is_alive(&self, _process: u32) -> bool {
        true
    }
    /// Orders memory accesses among all threads of all processes that use the arena, membarrier(2).
    /// Without it, a waiter for another process may wait up to a tenth of a second too long.
    fn barrier(&self) {
        barrier();
    }
    /// True if these cells already belong to an open file that this process takes over from another
    /// one. They then keep their values.
    fn is_taken_over(&self, _cells: &'static OpenCells) -> bool {
        false
    }
}

enum CellStorage {
    Own(OpenCells),
    Arena(&'static OpenCells, Arc<dyn CellArena>),
}

/// An open file; POSIX calls it open file description. Duplicate descriptors share it by cloning
/// its `Arc`. Dropping the last clone closes the file.
pub struct FileDescription {
    here: MountedInode,
    /// `None` for `O_PATH`.
    fh: Option<Fh>,
    /// Keeps the number of the inode valid, for `O_PATH` and an inode without a lookup.
    pin: Option<Fh>,
    pub(crate) access: u32,
    pub(crate) kind: FileKind,
    pub(crate) stream: bool,
    needs_flush: bool,
    backing: Option<Arc<OwnedFd>>,
    native: Option<NativeFile>,
    lower: Option<Arc<OwnedFd>>,
    /// The descriptor of a native file for the program, until it is taken.
    descriptor: Mutex<Option<OwnedFd>>,
    id: u64,
    cells: CellStorage,
    who: Arc<TaskCredentials>,
}

pub(crate) static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The parts of [`FileDescription::new`].
pub(crate) struct DescriptionParts {
    pub here: MountedInode,
    pub opened: Option<defuse_fs::OpenReply>,
    pub pin: Option<Fh>,
    pub flags: u32,
    pub who: Arc<TaskCredentials>,
}

impl DescriptionParts {
    /// Releases the handle that the file system has opened.
    fn release(self) {
        let DescriptionParts { here: MountedInode { node, mount }, opened, pin, who, .. } = self;
        let cx = who.context(mount.origin);
        for fh in opened.map(|opened| opened.fh).into_iter().chain(pin) {
            let file = File { ino: node.ino(), fh };
            let _ = if node.is_dir() {
                mount.call(Op::RELEASEDIR, |fs| fs.releasedir(&cx, file))
            } else {
                mount.call(Op::RELEASE, |fs| fs.release(&cx, file, ReleaseArgs::default()))
            };
        }
    }
}

/// State of an open file that was opened by an earlier program.
pub(crate) struct InheritedFile {
    pub id: u64,
}

impl FileDescription {
    /// Creates an open file, or `None` if the arena has no cells left.
    pub(crate) fn new(
        parts: DescriptionParts,
        arena: Option<&Arc<dyn CellArena>>,
    ) -> Option<Arc<Self>> {
        // Ids are unique among processes that share locks, as far as process ids are.
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed) | u64::from(parts.who.pid) << 41;
        FileDescription::from_handover(parts, arena, InheritedFile { id })
    }

    /// Creates an open file that an earlier program of this process has opened.
    pub(crate) fn from_handover(
        parts: DescriptionParts,
        arena: Option<&Arc<dyn CellArena>>,
        InheritedFile { id }: InheritedFile,
    ) -> Option<Arc<Self>> {
        let cells = match arena {
            Some(arena) => match arena.take() {
                Some(cells) => CellStorage::Arena(cells, Arc::clone(arena)),
                None => {
                    parts.release();
                    return None;
                }
            },
            None => CellStorage::Own(OpenCells::default()),
        };
        let DescriptionParts { here, opened, pin, flags, who } = parts;
        here.mount.users.fetch_add(1, Ordering::Relaxed);
        let (fh, flags) = (opened.as_ref().map(|opened| opened.fh), flags & !LOCKED);
        let opened = opened.unwrap_or_default();
        let (backing, native) = opened.backing.map(|of| (of.fd, of.native)).unzip();
        let mut native = native.flatten();
        let descriptor = native.as_mut().and_then(NativeFile::take_descriptor);
        let file = FileDescription {
            kind: here.node.kind(),
            fh,
            pin,
            access: flags & 3,
            stream: opened.stream,
            needs_flush: fh.is_some() && !opened.no_flush,
            backing,
            native,
            lower: opened.lower,
            descriptor: Mutex::new(descriptor),
            here,
            id,
            cells,
            who,
        };
        let taken_over = match &file.cells {
            CellStorage::Own(_) => false,
            CellStorage::Arena(cells, arena) => arena.is_taken_over(cells),
        };
        if !taken_over {
            file.cells().position.store(0, Ordering::Relaxed);
            file.cells().flags.store(flags, Ordering::Relaxed);
            file.cells().lock.store(0, Ordering::Relaxed);
            file.cells().waiters.store(0, Ordering::Relaxed);
        }
        Some(Arc::new(file))
    }

    pub(crate) fn inode(&self) -> &MountedInode {
        &self.here
    }

    /// The mount of the file.
    pub fn mount(&self) -> &Arc<crate::ClientMount> {
        &self.here.mount
    }

    /// The descriptor that holds the file's data, if the file system gave one.
    pub fn backing(&self) -> Option<&Arc<OwnedFd>> {
        self.backing.as_ref()
    }

    /// True if the kernel may change the file through the [`backing`](FileDescription::backing)
    /// descriptor, attributes and size as well as data ([`defuse_fs::native`]). It is open for
    /// writing, so that its mount is not read-only.
    pub fn is_backed_by_file_itself(&self) -> bool {
        self.native.as_ref().is_some_and(NativeFile::has_attributes) && self.writes()
    }

    /// True if the file is open for reading. The access mode 3 requires both permissions and allows
    /// neither access, open(2).
    #[inline]
    pub(crate) fn reads(&self) -> bool {
        matches!(self.access, 0 | OpenFlags::RDWR)
    }

    /// True if the file is open for writing.
    #[inline]
    pub(crate) fn writes(&self) -> bool {
        matches!(self.access, OpenFlags::WRONLY | OpenFlags::RDWR)
    }

    /// Takes the descriptor of a native file that is for the program, if the file system gave one
    /// ([`defuse_fs::native`]).
    pub fn take_descriptor(&self) -> Option<OwnedFd> {
        self.descriptor.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The open file of the lower file system, if the file system gave one
    /// (`DescriptorFile::lower`). Used for mappings, and for locks that belong to the open file.
    pub fn lower(&self) -> Option<&Arc<OwnedFd>> {
        self.lower.as_ref()
    }

    /// The cells of the arena, if the open file uses any.
    pub fn arena_cells(&self) -> Option<&'static OpenCells> {
        match self.cells {
            CellStorage::Own(_) => None,
            CellStorage::Arena(cells, _) => Some(cells),
        }
    }

    /// The type of the file.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// Number of the open file, unique in this process: the owner of its locks.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// True if the file was opened with `O_PATH`.
    pub fn is_path(&self) -> bool {
        self.fh.is_none()
    }

    pub(crate) fn needs_flush(&self) -> bool {
        self.needs_flush
    }

    pub(crate) fn fh(&self) -> Option<Fh> {
        self.fh
    }

    /// The file as the contract names it. Fails with `EBADF` for `O_PATH`.
    #[inline]
    pub(crate) fn file(&self) -> Result<File, defuse_fs::Errno> {
        let fh = self.fh.ok_or(defuse_fs::Errno::EBADF)?;
        Ok(File { ino: self.here.node.ino(), fh })
    }

    #[inline]
    fn cells(&self) -> &OpenCells {
        match &self.cells {
            CellStorage::Own(cells) => cells,
            CellStorage::Arena(cells, _) => cells,
        }
    }

    /// The current flags, without creation flags; `F_GETFL`.
    #[inline]
    pub fn flags(&self) -> OpenFlags {
        OpenFlags(self.cells().flags.load(Ordering::Relaxed) & !LOCKED)
    }

    /// Records that a lock was or will be taken through this open file, by any process that shares
    /// it.
    pub(crate) fn record_lock(&self) {
        self.here.mount.has_locked.store(true, Ordering::Relaxed);
        self.cells().flags.fetch_or(LOCKED, Ordering::Relaxed);
    }

    /// True if closing the file may have to end locks that the file system keeps: the record locks
    /// of this process, or the locks of the open file, which another process may have taken.
    pub(crate) fn may_hold_locks(&self) -> bool {
        let mount = &self.here.mount;
        let is_locked = self.cells().flags.load(Ordering::Relaxed) & LOCKED != 0;
        mount.may_hold_locks() || is_locked && mount.has_locks()
    }

    /// Changes the flags that `F_SETFL` can change: append, nonblock, direct, noatime.
    /// [`DirectClient::set_flags`](crate::DirectClient::set_flags) does the checks.
    pub(crate) fn set_flags(&self, flags: u32) {
        const SETTABLE: u32 = OpenFlags::APPEND
            | OpenFlags::NONBLOCK
            | OpenFlags::DIRECT
            | OpenFlags::NOATIME
            | ASYNC;
        let change = |now: u32| Some(now & !SETTABLE | flags & SETTABLE);
        let _ = self.cells().flags.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }

    /// The file position: in bytes, or for a directory a value of telldir(3).
    pub fn position(&self) -> u64 {
        self.cells().position.load(Ordering::Relaxed)
    }

    /// Calls `run` with the position while holding its lock. The first value that `run` returns
    /// becomes the new position.
    #[inline]
    pub(crate) fn with_position<T>(&self, run: impl FnOnce(u64) -> (u64, T)) -> T {
        let cells = self.cells();
        let _held = match &self.cells {
            CellStorage::Own(cells) => cells.acquire(1, None),
            CellStorage::Arena(cells, arena) => cells.acquire(arena.process(), Some(&**arena)),
        };
        let (position, value) = run(cells.position.load(Ordering::Relaxed));
        cells.position.store(position, Ordering::Relaxed);
        value
    }

    /// Closes one descriptor of the file: reports delayed write errors, and releases the record
    /// locks of the process. Call it for every descriptor, before dropping its `Arc`.
    pub fn close(&self, task: &ClientTask) -> Result<(), defuse_fs::Errno> {
        let Ok(file) = self.file() else { return Ok(()) };
        let mount = &self.here.mount;
        let owner = task.lock_owner();
        if !mount.has_locks() {
            mount.locks.drop_owner(file.ino.0, LockKind::Posix, owner);
        }
        if self.kind == FileKind::Directory || !self.needs_flush && !self.may_hold_locks() {
            return Ok(());
        }
        let cx = task.context(mount.origin);
        match mount.call(Op::FLUSH, |fs| fs.flush(&cx, file, owner)) {
            Err(defuse_fs::Errno::ENOSYS) => Ok(()),
            result => result,
        }
    }
}

/// A flag beside the flags of open(2): a lock was taken. The kernel has no flag of this value.
const LOCKED: u32 = 1 << 31;

/// `O_ASYNC`.
const ASYNC: u32 = 0o20000;

impl Drop for FileDescription {
    fn drop(&mut self) {
        let mount = &self.here.mount;
        if let Ok(file) = self.file() {
            let owner = LockOwner(self.id);
            let cx = self.who.context(mount.origin);
            if self.kind == FileKind::Directory {
                let _ = mount.call(Op::RELEASEDIR, |fs| fs.releasedir(&cx, file));
            } else {
                let may_hold_locks = self.may_hold_locks();
                if !mount.has_locks() {
                    mount.locks.drop_owner(file.ino.0, LockKind::Flock, owner);
                    mount.locks.drop_owner(file.ino.0, LockKind::Posix, owner);
                } else if may_hold_locks {
                    // Releases the locks of the open file description itself (F_OFD_SETLK).
                    let _ = mount.call(Op::FLUSH, |fs| fs.flush(&cx, file, owner));
                }
                let flock_owner = may_hold_locks.then_some(owner);
                let is_last = Arc::strong_count(&self.here.node) == 1;
                let last = self.native.as_ref().filter(|_| is_last).map(NativeFile::last_release);
                let args = ReleaseArgs { flags: self.flags(), flock_owner, last };
                let _ = mount.call(Op::RELEASE, |fs| fs.release(&cx, file, args));
            }
        }
        if let Some(fh) = self.pin {
            let file = File { ino: self.here.node.ino(), fh };
            let cx = self.who.context(mount.origin);
            let args = ReleaseArgs::default();
            let _ = mount.call(Op::RELEASE, |fs| fs.release(&cx, file, args));
        }
        if let CellStorage::Arena(cells, arena) = &self.cells {
            arena.give_back(cells);
        }
        mount.users.fetch_sub(1, Ordering::Release);
    }
}

impl std::fmt::Debug for FileDescription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Description")
            .field("mount", &self.here.mount)
            .field("node", &self.here.node)
            .field("flags", &self.flags())
            .finish_non_exhaustive()
    }
}

struct CellsGuard<'a>(&'a OpenCells);

/// Time to wait before checking that the holder of the lock still lives.
const PATIENCE: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Like [`CellArena::barrier`], for the threads of this process only.
fn barrier() {
    let private = || membarrier(MembarrierCommand::PrivateExpedited);
    if private() == Err(rustix::io::Errno::PERM) {
        let _ = membarrier(MembarrierCommand::RegisterPrivateExpedited);
        let _ = private();
    }
}

impl OpenCells {
    #[inline]
    fn acquire(&self, own: u32, arena: Option<&dyn CellArena>) -> CellsGuard<'_> {
        if self.take(0, own).is_err() {
            self.wait(own, arena);
        }
        CellsGuard(self)
    }

    #[inline]
    fn take(&self, from: u32, own: u32) -> Result<u32, u32> {
        self.lock.compare_exchange(from, own, Ordering::Acquire, Ordering::Relaxed)
    }

    #[cold]
    fn wait(&self, own: u32, arena: Option<&dyn CellArena>) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // After the barrier, every unlock sees the waiter, and this thread sees every earlier
        // unlock.
        arena.map_or_else(barrier, CellArena::barrier);
        while let Err(holder) = self.take(0, own) {
            // The futex is not private, since other processes may map it. After a wakeup, a signal
            // or an error, the loop reads the word again.
            let waited = futex::wait(&self.lock, futex::Flags::empty(), holder, Some(&PATIENCE));
            let is_late = waited == Err(rustix::io::Errno::TIMEDOUT);
            let is_gone = || arena.is_some_and(|arena| !arena.is_alive(holder));
            if is_late && holder != 0 && is_gone() && self.take(holder, own).is_ok() {
                break;
            }
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes one waiting thread.
    #[cold]
    fn wake(&self) {
        let _ = futex::wake(&self.lock, futex::Flags::empty(), 1);
    }
}

impl Drop for CellsGuard<'_> {
    /// Without a locked instruction: a waiting thread ensures by the barrier that this thread sees
    /// it, or that it sees the lock free.
    #[inline]
    fn drop(&mut self) {
        self.0.lock.store(0, Ordering::Release);
        compiler_fence(Ordering::SeqCst);
        if self.0.waiters.load(Ordering::Relaxed) != 0 {
            self.0.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use defuse_fs::{
        Attr, Context, DirBuf, Entry, FileSystem, Ino, Name, NewNode, OpenArgs, OpenReply,
        Shortcuts,
    };

    use super::*;
    use crate::DirectClient;

    /// A number of checks for which other processes live.
    struct LookLimit(AtomicU32);

    impl CellArena for LookLimit {
        fn take(&self) -> Option<&'static OpenCells> {
            None
        }

        fn give_back(&self, _: &'static OpenCells) {}

        fn is_alive(&self, process: u32) -> bool {
            assert_eq!(process, 7);
            self.0.fetch_sub(1, Ordering::Relaxed) > 1
        }
    }

    #[test]
    fn a_lock_is_taken_over_only_from_a_process_that_is_gone() {
        let (cells, looks) = (OpenCells::default(), LookLimit(AtomicU32::new(3)));
        std::mem::forget(cells.acquire(7, None));
        let held = cells.acquire(8, Some(&looks));
        assert_eq!((looks.0.load(Ordering::Relaxed), cells.lock.load(Ordering::Relaxed)), (0, 8));
        drop(held);
        assert_eq!(cells.lock.load(Ordering::Relaxed), 0);
        assert_eq!(cells.waiters.load(Ordering::Relaxed), 0);
    }

    /// A file `f`, opened with its lookup, and the number of open files.
    struct OpenCounter(Arc<AtomicU32>);

    impl FileSystem for OpenCounter {
        fn lookup(&self, cx: &Context<'_>, _: Ino, _: Name<'_>) -> defuse_fs::Result<Entry> {
            let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
            let (ino, valid_for) = (Ino(2), Duration::ZERO);
            Ok(Entry { ino, generation: 0, attr: Attr::for_new(ino, &node), valid_for })
        }

        fn shortcuts(&self) -> Option<&dyn Shortcuts> {
            Some(self)
        }

        fn getattr(&self, cx: &Context<'_>, ino: Ino, _: Option<Fh>) -> defuse_fs::Result<Attr> {
            Ok(Attr::for_new(ino, &NewNode::new(FileKind::Directory, 0o755, cx.caller)))
        }

        fn readdir(
            &self,
            _: &Context<'_>,
            _: File,
            _: u64,
            _: &mut DirBuf<'_>,
        ) -> defuse_fs::Result<()> {
            Ok(())
        }

        fn release(&self, _: &Context<'_>, file: File, _: ReleaseArgs) -> defuse_fs::Result<()> {
            assert_eq!(file, File { ino: Ino(2), fh: Fh(7) });
            self.0.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        }
    }

    impl Shortcuts for OpenCounter {
        fn lookup_to_open(
            &self,
            cx: &Context<'_>,
            parent: Ino,
            name: Name<'_>,
            _: OpenArgs,
        ) -> defuse_fs::Result<(Entry, Option<OpenReply>)> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok((self.lookup(cx, parent, name)?, Some(OpenReply::new(Fh(7)))))
        }
    }

    #[test]
    fn a_file_that_a_lookup_has_opened_is_released_if_the_open_fails() {
        let opens = Arc::new(AtomicU32::new(0));
        let full: Option<Arc<dyn CellArena>> = Some(Arc::new(LookLimit(AtomicU32::new(0))));
        let errors = |arena: Option<Arc<dyn CellArena>>, path: &[u8]| {
            let client = DirectClient::new(crate::ClientOptions {
                arena,
                ..crate::ClientOptions::default()
            });
            let fs = Arc::new(OpenCounter(Arc::clone(&opens)));
            client.mount(b"m:", fs, &crate::ClientMountArgs::default()).unwrap();
            let who = TaskCredentials::user(0, 0, &[]);
            let task = ClientTask::new(who, crate::WorkDir::Outside(b"/".to_vec()));
            let opened = client.open(&task, crate::WalkStart::Cwd, path, crate::OpenHow::default());
            let open = opens.load(Ordering::Relaxed);
            (opened.map(drop).map_err(|stop| format!("{stop:?}")), open)
        };
        assert_eq!(errors(None, b"m:/f"), (Ok(()), 1));
        let failed = |(result, open): (std::result::Result<(), String>, u32), errno: &str| {
            assert!(result.as_ref().is_err_and(|text| text.contains(errno)), "{result:?}");
            assert_eq!(open, 0, "{errno}");
        };
        assert_eq!(opens.load(Ordering::Relaxed), 0);
        failed(errors(full, b"m:/f"), "ENFILE");
        failed(errors(None, b"m:/f/"), "ENOTDIR");
    }

    #[test]
    fn one_thread_at_a_time_has_the_position() {
        let (cells, inside) = (OpenCells::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for own in 1..=4 {
                let (cells, inside) = (&cells, &inside);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let _held = cells.acquire(own, None);
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        inside.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let left = [&cells.lock, &cells.waiters].map(|word| word.load(Ordering::Relaxed));
        assert_eq!(left, [0, 0]);
    }
}
