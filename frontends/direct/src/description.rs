//! Open files: what open(2) makes, and what several descriptors may share.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

use defuse_fs::{Context, Fh, File, FileKind, LockKind, LockOwner, OpenFlags, ReleaseArgs};
use defuse_probe::Op;
use rustix::thread::{MembarrierCommand, futex, membarrier};

use crate::credentials::Credentials;
use crate::task::Task;
use crate::walk::Here;

/// What processes share that have an open file in common: the position and the status flags. All
/// of it is atomic and means the same at any address, so it may lie in memory that is mapped
/// `MAP_SHARED`, and a fork then shares it as POSIX says. All zeros is a valid state.
#[derive(Debug, Default)]
#[repr(C)]
pub struct OpenCells {
    position: AtomicU64,
    flags: AtomicU32,
    /// 0 free, otherwise the process that has taken it. Across processes, hence a futex; whoever
    /// waits for a process that is gone takes the lock over.
    lock: AtomicU32,
    /// How many wait for it: a word of its own, so that giving it back is a plain store.
    waiters: AtomicU32,
}

/// Where cells come from that outlive this process's heap.
pub trait Arena: Send + Sync {
    /// Cells for a file that is being opened; `None` where there are none left (`ENFILE`).
    fn take(&self) -> Option<&'static OpenCells>;
    /// The file is closed in this process.
    fn give_back(&self, cells: &'static OpenCells);
    /// A number of this process that no other one has that uses the arena: not 0, below 2^31.
    fn process(&self) -> u32 {
        std::process::id()
    }
    /// Whether the process of that number still lives. It is asked where one holds a lock for long.
    fn is_alive(&self, _process: u32) -> bool {
        true
    }
    /// Has every thread of every process that uses the arena see what this one wrote, and this one
    /// what they did: membarrier(2). Where that cannot be had, one that waits for another process may
    /// wait a tenth of a second too long.
    fn barrier(&self) {
        barrier();
    }
    /// Whether cells that were taken just now belong to an open file already, which this process
    /// takes over from another one: then they stay as they are.
    fn is_taken_over(&self, _cells: &'static OpenCells) -> bool {
        false
    }
}

enum Cells {
    Own(OpenCells),
    Arena(&'static OpenCells, Arc<dyn Arena>),
}

/// An open file, as the kernel calls it: open file description. Descriptors that are duplicates of
/// each other share one, by cloning its `Arc`; the last to go closes it.
pub struct Description {
    here: Here,
    /// `None` for `O_PATH`.
    fh: Option<Fh>,
    pub(crate) access: u32,
    pub(crate) kind: FileKind,
    pub(crate) stream: bool,
    needs_flush: bool,
    backing: Option<Arc<OwnedFd>>,
    lower: Option<Arc<OwnedFd>>,
    id: u64,
    cells: Cells,
    who: Credentials,
}

pub(crate) static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What [`Description::new`] is made of.
pub(crate) struct Parts {
    pub here: Here,
    pub opened: Option<defuse_fs::Opened>,
    pub flags: u32,
    pub who: Credentials,
}

/// What an open file keeps that another program has opened.
pub(crate) struct Taken {
    pub id: u64,
}

impl Description {
    /// An open file. `None` where the arena has no more cells.
    pub(crate) fn new(parts: Parts, arena: Option<&Arc<dyn Arena>>) -> Option<Arc<Self>> {
        // Ids are unique across processes that share locks, as far as process ids are.
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed) | u64::from(parts.who.pid) << 41;
        Description::taken_over(parts, arena, Taken { id })
    }

    /// One that another program of this process has opened, with what it keeps of that.
    pub(crate) fn taken_over(
        parts: Parts,
        arena: Option<&Arc<dyn Arena>>,
        Taken { id }: Taken,
    ) -> Option<Arc<Self>> {
        let cells = match arena {
            Some(arena) => Cells::Arena(arena.take()?, Arc::clone(arena)),
            None => Cells::Own(OpenCells::default()),
        };
        let Parts { here, opened, flags, who } = parts;
        here.mount.users.fetch_add(1, Ordering::Relaxed);
        let fh = opened.as_ref().map(|opened| opened.fh);
        let opened = opened.unwrap_or_default();
        let file = Description {
            kind: here.node.kind(),
            fh,
            access: flags & 3,
            stream: opened.stream,
            needs_flush: fh.is_some() && !opened.no_flush,
            backing: opened.backing,
            lower: opened.lower,
            here,
            id,
            cells,
            who,
        };
        let taken_over = match &file.cells {
            Cells::Own(_) => false,
            Cells::Arena(cells, arena) => arena.is_taken_over(cells),
        };
        if !taken_over {
            file.cells().position.store(0, Ordering::Relaxed);
            file.cells().flags.store(flags, Ordering::Relaxed);
            file.cells().lock.store(0, Ordering::Relaxed);
            file.cells().waiters.store(0, Ordering::Relaxed);
        }
        Some(Arc::new(file))
    }

    pub(crate) fn here(&self) -> &Here {
        &self.here
    }

    /// The mount that it belongs to.
    pub fn mount(&self) -> &Arc<crate::Mount> {
        &self.here.mount
    }

    /// The descriptor whose bytes are the file's, where the file system gave one.
    pub fn backing(&self) -> Option<&Arc<OwnedFd>> {
        self.backing.as_ref()
    }

    /// The open file of the lower file system, where the file system told it: for locks that belong
    /// to the open file, and for mappings (`Opened::lower`).
    pub fn lower(&self) -> Option<&Arc<OwnedFd>> {
        self.lower.as_ref()
    }

    /// The cells of the arena, where it has some of it.
    pub fn arena_cells(&self) -> Option<&'static OpenCells> {
        match self.cells {
            Cells::Own(_) => None,
            Cells::Arena(cells, _) => Some(cells),
        }
    }

    /// What it is.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// A number that no other open file of this process has: the owner of its locks.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// True where it was opened with `O_PATH`.
    pub fn is_path(&self) -> bool {
        self.fh.is_none()
    }

    pub(crate) fn needs_flush(&self) -> bool {
        self.needs_flush
    }

    pub(crate) fn fh(&self) -> Option<Fh> {
        self.fh
    }

    /// The file as the contract names it; `EBADF` for `O_PATH`.
    #[inline]
    pub(crate) fn file(&self) -> Result<File, defuse_fs::Errno> {
        let fh = self.fh.ok_or(defuse_fs::Errno::EBADF)?;
        Ok(File { ino: self.here.node.ino(), fh })
    }

    #[inline]
    fn cells(&self) -> &OpenCells {
        match &self.cells {
            Cells::Own(cells) => cells,
            Cells::Arena(cells, _) => cells,
        }
    }

    /// The flags of open(2) as they are now, without those of creation; `F_GETFL`.
    #[inline]
    pub fn flags(&self) -> OpenFlags {
        OpenFlags(self.cells().flags.load(Ordering::Relaxed))
    }

    /// Changes those flags that `F_SETFL` changes: append, nonblock, direct, noatime.
    /// [`Client::set_flags`](crate::Client::set_flags) checks before.
    pub(crate) fn set_flags(&self, flags: u32) {
        const SETTABLE: u32 = OpenFlags::APPEND
            | OpenFlags::NONBLOCK
            | OpenFlags::DIRECT
            | OpenFlags::NOATIME
            | ASYNC;
        let change = |now: u32| Some(now & !SETTABLE | flags & SETTABLE);
        let _ = self.cells().flags.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }

    /// The position of the next read or write in bytes; of a directory, as telldir(3) has it.
    pub fn position(&self) -> u64 {
        self.cells().position.load(Ordering::Relaxed)
    }

    /// Runs `run` with the position, alone among all who share it; what it returns first is the new
    /// one.
    #[inline]
    pub(crate) fn with_position<T>(&self, run: impl FnOnce(u64) -> (u64, T)) -> T {
        let cells = self.cells();
        let _held = match &self.cells {
            Cells::Own(cells) => cells.acquire(1, None),
            Cells::Arena(cells, arena) => cells.acquire(arena.process(), Some(&**arena)),
        };
        let (position, value) = run(cells.position.load(Ordering::Relaxed));
        cells.position.store(position, Ordering::Relaxed);
        value
    }

    /// One descriptor of it is closed: errors of writes that were held back are told, and the record
    /// locks of the process dropped. To be called for every descriptor, before its `Arc` is dropped.
    pub fn close(&self, task: &Task) -> Result<(), defuse_fs::Errno> {
        let Ok(file) = self.file() else { return Ok(()) };
        let mount = &self.here.mount;
        let owner = task.lock_owner();
        if !mount.has_locks() {
            mount.locks.drop_owner(file.ino.0, LockKind::Posix, owner);
        }
        if self.kind == FileKind::Directory || !self.needs_flush && !mount.has_locks() {
            return Ok(());
        }
        let cx = Context::new(task.caller());
        match mount.call(Op::FLUSH, |fs| fs.flush(&cx, file, owner)) {
            Err(defuse_fs::Errno::ENOSYS) => Ok(()),
            result => result,
        }
    }
}

/// `O_ASYNC`.
const ASYNC: u32 = 0o20000;

impl Drop for Description {
    fn drop(&mut self) {
        let mount = &self.here.mount;
        if let Ok(file) = self.file() {
            let owner = LockOwner(self.id);
            let cx = Context::new(self.who.caller());
            if self.kind == FileKind::Directory {
                let _ = mount.call(Op::RELEASEDIR, |fs| fs.releasedir(&cx, file));
            } else {
                if !mount.has_locks() {
                    mount.locks.drop_owner(file.ino.0, LockKind::Flock, owner);
                    mount.locks.drop_owner(file.ino.0, LockKind::Posix, owner);
                } else {
                    // Locks of the open file description itself (F_OFD_SETLK).
                    let _ = mount.call(Op::FLUSH, |fs| fs.flush(&cx, file, owner));
                }
                let args = ReleaseArgs { flags: self.flags(), flock_owner: Some(owner) };
                let _ = mount.call(Op::RELEASE, |fs| fs.release(&cx, file, args));
            }
        }
        if let Cells::Arena(cells, arena) = &self.cells {
            arena.give_back(cells);
        }
        mount.users.fetch_sub(1, Ordering::Release);
    }
}

impl std::fmt::Debug for Description {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Description")
            .field("mount", &self.here.mount)
            .field("node", &self.here.node)
            .field("flags", &self.flags())
            .finish_non_exhaustive()
    }
}

struct Held<'a>(&'a OpenCells);

/// How long one waits before it looks whether the process that holds the lock still lives.
const PATIENCE: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// As [`Arena::barrier`], for the threads of this process.
fn barrier() {
    let private = || membarrier(MembarrierCommand::PrivateExpedited);
    if private() == Err(rustix::io::Errno::PERM) {
        let _ = membarrier(MembarrierCommand::RegisterPrivateExpedited);
        let _ = private();
    }
}

impl OpenCells {
    #[inline]
    fn acquire(&self, own: u32, arena: Option<&dyn Arena>) -> Held<'_> {
        if self.take(0, own).is_err() {
            self.wait(own, arena);
        }
        Held(self)
    }

    #[inline]
    fn take(&self, from: u32, own: u32) -> Result<u32, u32> {
        self.lock.compare_exchange(from, own, Ordering::Acquire, Ordering::Relaxed)
    }

    #[cold]
    fn wait(&self, own: u32, arena: Option<&dyn Arena>) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // Whoever gives the lock back from here on sees that somebody waits; what others gave back
        // before is seen here.
        arena.map_or_else(barrier, Arena::barrier);
        while let Err(holder) = self.take(0, own) {
            // Not private: others may have it mapped in another process. Woken, interrupted or
            // refused, the word is looked at again.
            let waited = futex::wait(&self.lock, futex::Flags::empty(), holder, Some(&PATIENCE));
            let is_late = waited == Err(rustix::io::Errno::TIMEDOUT);
            let is_gone = || arena.is_some_and(|arena| !arena.is_alive(holder));
            if is_late && holder != 0 && is_gone() && self.take(holder, own).is_ok() {
                break;
            }
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes one of those who wait.
    #[cold]
    fn wake(&self) {
        let _ = futex::wake(&self.lock, futex::Flags::empty(), 1);
    }
}

impl Drop for Held<'_> {
    /// No locked instruction: who waits makes sure (by the barrier) that it is seen here, or that it
    /// sees the lock free.
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
    use super::*;

    /// Processes that live for so many looks.
    struct Looks(AtomicU32);

    impl Arena for Looks {
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
    fn a_lock_is_taken_over_from_a_process_that_is_gone_and_from_nobody_else() {
        let (cells, looks) = (OpenCells::default(), Looks(AtomicU32::new(3)));
        std::mem::forget(cells.acquire(7, None));
        let held = cells.acquire(8, Some(&looks));
        assert_eq!((looks.0.load(Ordering::Relaxed), cells.lock.load(Ordering::Relaxed)), (0, 8));
        drop(held);
        assert_eq!(cells.lock.load(Ordering::Relaxed), 0);
        assert_eq!(cells.waiters.load(Ordering::Relaxed), 0);
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
