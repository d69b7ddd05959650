//! The file system as a whole: the tree in memory, the store on the device, and the way from one to the
//! other.
//!
//! Lock order: the store, then the tree. The line for reads is a leaf. Nobody who holds the tree does I/O.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use defuse_block::{Blocking, Device};
use defuse_fs::{Errno, ReadBuf, Result, SetAttr};

use crate::commit::Rules;
use crate::format::BLOCK;
use crate::load;
use crate::store::{self, StoreError};
use crate::tree::{Problem, Tree};
use crate::{Options, Store};

/// Blocks of one read at most: 1 MiB.
const GATHERED: usize = 256;

/// The state that operations and the committing thread share.
pub(crate) struct Engine {
    tree: Mutex<Tree>,
    store: Mutex<Store>,
    line: Mutex<Blocking>,
    options: Options,
    rules: Rules,
    /// Something is wrong with the device or with what it holds: nothing is written any more.
    read_only: AtomicBool,
    /// Something waits for the next group.
    pending: AtomicBool,
    /// True once the committing thread is to end.
    ended: Mutex<bool>,
    wake: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes an empty file system on `device`.
pub(crate) fn make(
    device: Arc<dyn Device>,
    uuid: [u8; 16],
    root: (u32, u32, u32),
    random: &mut fastrand::Rng,
) -> Result<(), StoreError> {
    store::make(&*device, uuid, random)?;
    let (mut store, _) = Store::open(device, random.fork())?;
    let mut tree = Tree::empty(load::space(store.superblock()), root);
    let batch = tree.batch().map_err(|_| StoreError::Full)?;
    store.commit(&batch.changes, &mut |_| None)?;
    store.sync()
}

impl Engine {
    pub(crate) fn open(
        device: Arc<dyn Device>,
        options: Options,
        rules: Rules,
        random: fastrand::Rng,
    ) -> Result<(Engine, Vec<Problem>), StoreError> {
        let (store, found) = Store::open_by(Arc::clone(&device), rules, random)?;
        let mut line = Blocking::new(&*device).map_err(store::failed("open a queue"))?;
        let (mut tree, problems) = load::load(&mut line, store.superblock(), &found)?;
        tree.slots = store.slots();
        tree.tails_move = rules.tails_move;
        let engine = Engine {
            tree: Mutex::new(tree),
            store: Mutex::new(store),
            line: Mutex::new(line),
            options,
            rules,
            read_only: AtomicBool::new(!problems.is_empty()),
            pending: AtomicBool::new(false),
            ended: Mutex::new(false),
            wake: Condvar::new(),
        };
        Ok((engine, problems))
    }

    /// The tree, to look at.
    pub(crate) fn tree(&self) -> MutexGuard<'_, Tree> {
        lock(&self.tree)
    }

    /// Changes the tree. `EROFS` where nothing is written any more.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Tree) -> Result<T>) -> Result<T> {
        if self.read_only.load(Ordering::Relaxed) {
            return Err(Errno::EROFS);
        }
        let result = change(&mut lock(&self.tree));
        self.has_changes();
        result
    }

    /// Wakes the committing thread, unless it knows.
    pub(crate) fn has_changes(&self) {
        if !self.pending.swap(true, Ordering::Relaxed) {
            drop(lock(&self.ended));
            self.wake.notify_all();
        }
    }

    /// Makes everything durable that operations did until now. `EIO` where the device failed, now or
    /// before.
    pub(crate) fn commit(&self) -> Result<()> {
        let mut store = lock(&self.store);
        self.pending.store(false, Ordering::Relaxed);
        let batch = {
            let mut tree = lock(&self.tree);
            if !tree.is_dirty() {
                return if store.has_failed() { Err(Errno::EIO) } else { Ok(()) };
            }
            if !self.rules.blocks_wait_for_group {
                tree.release_at_once();
            }
            tree.batch()
        };
        let written = batch.map_err(|_| StoreError::Full).and_then(|batch| {
            store.write_data(&batch.data)?;
            store.commit(&batch.changes, &mut |wanted| self.take_units(wanted))?;
            store.sync()?;
            Ok(batch.freed)
        });
        let freed = written.map_err(|error| {
            self.read_only.store(true, Ordering::Relaxed);
            log::error!("uhs: {error}: nothing is written any more");
            Errno::EIO
        })?;
        let mut tree = lock(&self.tree);
        tree.slots = store.slots();
        tree.release(&freed);
        if tree.pages().0 > self.options.cache_pages {
            tree.drop_clean();
        }
        Ok(())
    }

    fn take_units(&self, wanted: u32) -> Option<(u32, u32)> {
        let mut tree = lock(&self.tree);
        let (first, count) = tree.space.find_units(wanted)?;
        tree.space.reserve(first, count);
        Some((first, count))
    }

    pub(crate) fn read(&self, ino: u64, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        loop {
            let mut tree = lock(&self.tree);
            let missing = tree.missing(ino, offset, out.remaining() as u64)?;
            if missing.is_empty() {
                return tree.read(ino, offset, out);
            }
            drop(tree);
            self.fetch(ino, &missing)?;
        }
    }

    /// Writes at `offset`, or at the end. Returns how many bytes were taken.
    pub(crate) fn write(
        &self,
        ino: u64,
        offset: Option<u64>,
        data: &[u8],
        kill_suidgid: bool,
    ) -> Result<usize> {
        let place = |tree: &Tree| -> Result<(u64, Vec<(u64, u64)>)> {
            let offset = offset.map_or_else(|| tree.size(ino), Ok)?;
            Ok((offset, tree.missing_edges(ino, offset, data.len() as u64)?))
        };
        let taken = loop {
            let (_, missing) = place(&self.tree())?;
            self.fetch(ino, &missing)?;
            let taken = self.change(|tree| {
                // Pages may have been dropped since, and the file may have grown.
                let (offset, missing) = place(tree)?;
                match missing.is_empty() {
                    true => tree.write(ino, offset, data, kill_suidgid).map(Some),
                    false => Ok(None),
                }
            })?;
            if let Some(taken) = taken {
                break taken;
            }
        };
        // Whoever writes faster than the device waits for it.
        if self.tree().pages().1 > self.options.dirty_pages {
            self.commit()?;
        }
        Ok(taken)
    }

    pub(crate) fn setattr(&self, ino: u64, set: &SetAttr) -> Result<defuse_fs::Attr> {
        loop {
            let cut =
                |tree: &Tree| set.size.map_or(Ok(Vec::new()), |size| tree.page_to_cut(ino, size));
            let missing = cut(&self.tree())?;
            self.fetch(ino, &missing)?;
            let done = self.change(|tree| {
                let missing = cut(tree)?;
                if missing.is_empty() { tree.setattr(ino, set).map(Some) } else { Ok(None) }
            })?;
            if let Some(attr) = done {
                return Ok(attr);
            }
        }
    }

    /// Reads pages into memory. The tree drops those whose block is another one by then.
    fn fetch(&self, ino: u64, missing: &[(u64, u64)]) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        // Blocks that are freed and taken again meanwhile may hold anything.
        let releases = self.tree().releases();
        for run in missing.chunk_by(|a, b| a.1 + 1 == b.1).flat_map(|run| run.chunks(GATHERED)) {
            let mut bytes = vec![0; run.len() * BLOCK];
            lock(&self.line).read(run[0].1, &mut bytes).map_err(|_| Errno::EIO)?;
            let mut tree = lock(&self.tree);
            for (at, content) in run.iter().zip(bytes.chunks(BLOCK)) {
                if tree.releases() == releases {
                    tree.fill(ino, *at, content.into());
                }
            }
        }
        Ok(())
    }

    /// Starts the thread that commits what nobody syncs.
    pub(crate) fn start(self: &Arc<Self>, interval: Duration) -> std::io::Result<JoinHandle<()>> {
        let engine = Arc::clone(self);
        let thread = std::thread::Builder::new().name("uhs-commit".to_owned());
        thread.spawn(move || engine.keep_committing(interval))
    }

    fn keep_committing(&self, interval: Duration) {
        let mut ended = lock(&self.ended);
        while !*ended {
            if !self.pending.load(Ordering::Relaxed) {
                ended = self.wake.wait(ended).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.wake.wait_timeout_while(ended, interval, |ended| !*ended);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            // What failed was logged.
            let _ = self.commit();
            ended = lock(&self.ended);
        }
    }

    /// Ends that thread.
    pub(crate) fn end(&self) {
        *lock(&self.ended) = true;
        self.wake.notify_all();
    }
}
