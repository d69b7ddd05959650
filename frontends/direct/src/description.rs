//! Open files: what open(2) makes, and what several descriptors may share.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use defuse_fs::{Context, Fh, File, FileKind, LockKind, LockOwner, OpenFlags, ReleaseArgs};
use defuse_probe::Op;
use rustix::thread::futex;

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
    /// 0 free, otherwise the process that has taken it, with [`AWAITED`] while others wait. Across
    /// processes, hence a futex; whoever waits for a process that is gone takes the lock over.
    lock: AtomicU32,
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
    id: u64,
    cells: Cells,
    who: Credentials,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What [`Description::new`] is made of.
pub(crate) struct Parts {
    pub here: Here,
    pub opened: Option<defuse_fs::Opened>,
    pub flags: u32,
    pub who: Credentials,
}

impl Description {
    /// An open file. `None` where the arena has no more cells.
    pub(crate) fn new(parts: Parts, arena: Option<&Arc<dyn Arena>>) -> Option<Arc<Self>> {
        let cells = match arena {
            Some(arena) => Cells::Arena(arena.take()?, Arc::clone(arena)),
            None => Cells::Own(OpenCells::default()),
        };
        let Parts { here, opened, flags, who } = parts;
        here.mount.users.fetch_add(1, Ordering::Relaxed);
        // Ids are unique across processes that share locks, as far as process ids are.
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed) | u64::from(who.pid) << 41;
        let file = Description {
            kind: here.node.kind(),
            fh: opened.as_ref().map(|opened| opened.fh),
            access: flags & 3,
            stream: opened.as_ref().is_some_and(|opened| opened.stream),
            needs_flush: opened.as_ref().is_some_and(|opened| !opened.no_flush),
            backing: opened.and_then(|opened| opened.backing),
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
            Cells::Own(cells) => cells.acquire(1, &|_| true),
            Cells::Arena(cells, arena) => {
                cells.acquire(arena.process(), &|process| arena.is_alive(process))
            }
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

struct Held<'a>(&'a AtomicU32);

/// Others wait for the lock.
const AWAITED: u32 = 1 << 31;
/// How long one waits before it looks whether the process that holds the lock still lives.
const PATIENCE: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

impl OpenCells {
    #[inline]
    fn acquire(&self, own: u32, is_alive: &dyn Fn(u32) -> bool) -> Held<'_> {
        if self.lock.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait(own, is_alive);
        }
        Held(&self.lock)
    }

    #[cold]
    fn wait(&self, own: u32, is_alive: &dyn Fn(u32) -> bool) {
        loop {
            let now = self.lock.load(Ordering::Relaxed);
            let awaited = now | AWAITED;
            let change =
                |to| self.lock.compare_exchange(now, to, Ordering::Acquire, Ordering::Relaxed);
            if now == 0 {
                // Others may wait, too: that is not known any more.
                if change(own | AWAITED).is_ok() {
                    return;
                }
                continue;
            }
            if now != awaited && change(awaited).is_err() {
                continue;
            }
            // Not private: others may have it mapped in another process. Woken, interrupted or
            // refused, the word is looked at again.
            let waited = futex::wait(&self.lock, futex::Flags::empty(), awaited, Some(&PATIENCE));
            if waited == Err(rustix::io::Errno::TIMEDOUT) && !is_alive(now & !AWAITED) {
                let taken = self.lock.compare_exchange(
                    awaited,
                    own | AWAITED,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                );
                if taken.is_ok() {
                    return;
                }
            }
        }
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.swap(0, Ordering::Release) & AWAITED != 0 {
            let _ = futex::wake(self.0, futex::Flags::empty(), 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_taken_over_from_a_process_that_is_gone_and_from_nobody_else() {
        let cells = OpenCells::default();
        std::mem::forget(cells.acquire(7, &|_| true));
        let asked = std::cell::Cell::new(0);
        // It lives for two looks, and is gone at the third.
        let is_alive = |process| {
            assert_eq!(process, 7);
            asked.set(asked.get() + 1);
            asked.get() < 3
        };
        let held = cells.acquire(8, &is_alive);
        assert_eq!((asked.get(), cells.lock.load(Ordering::Relaxed) & !AWAITED), (3, 8));
        drop(held);
        assert_eq!(cells.lock.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn one_thread_at_a_time_has_the_position() {
        let (cells, inside) = (OpenCells::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for own in 1..=4 {
                let (cells, inside) = (&cells, &inside);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let _held = cells.acquire(own, &|_| true);
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        inside.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(cells.lock.load(Ordering::Relaxed), 0);
    }
}
