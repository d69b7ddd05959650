//! The file system as a whole: the tree and the contents in memory, the store on the device, and the way
//! from one to the other.
//!
//! Lock order: the commit, a handle of the running group, a content, the tree, the pool. The line for reads
//! is a leaf. Nobody who holds a content or the tree does I/O.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use defuse_block::{Blocking, Device};
use defuse_fs::{Attr, Errno, ReadBuf, Result, SetAttr};

use crate::Options;
use crate::commit::Rules;
use crate::content::{Content, Pool};
use crate::format::BLOCK;
use crate::format::inode::Data;
use crate::group::{self, Gate, Handle};
use crate::load;
use crate::store::{self, Store, StoreError, survey};
use crate::tree::{Problem, Tree};

/// Blocks of one read at most: 1 MiB.
const GATHERED: usize = 256;

/// The state that operations and the committing thread share.
pub(crate) struct Engine {
    tree: Mutex<Tree>,
    pool: Arc<Pool>,
    gate: Gate,
    /// `None` where nothing may be written.
    store: Option<Store>,
    /// One commit at a time.
    committing: Mutex<()>,
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

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
    let survey = survey(&*device, Rules::ALL)?;
    let store = Store::begin(device, &survey, Rules::ALL, random.fork())?;
    let pool = Arc::new(Pool::new(load::space(&survey.superblock)));
    let (tree, gate) = (Mutex::new(Tree::empty(Arc::clone(&pool), root)), Gate::default());
    let batch = group::close(&gate.close(), &tree, &pool).map_err(|_| StoreError::Full)?;
    let group = store.commit(store.turn(), batch.changes, true, &mut |_| None)?;
    store.sync(group)
}

impl Engine {
    pub(crate) fn open(
        device: Arc<dyn Device>,
        options: Options,
        rules: Rules,
        random: fastrand::Rng,
    ) -> Result<(Engine, Vec<Problem>), StoreError> {
        let survey = survey(&*device, rules)?;
        let (tree, pool, problems) = load::load(&*device, &survey)?;
        pool.set_tails_move(rules.tails_move);
        let line = Blocking::new(&*device).map_err(store::failed("open a queue"))?;
        let writes = !options.read_only && problems.is_empty();
        let store = match writes {
            true => Some(Store::begin(device, &survey, rules, random)?),
            false => None,
        };
        let engine = Engine {
            tree: Mutex::new(tree),
            pool,
            gate: Gate::default(),
            store,
            committing: Mutex::default(),
            line: Mutex::new(line),
            options,
            rules,
            read_only: AtomicBool::new(!writes),
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

    /// The blocks that files share.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Changes the tree. `EROFS` where nothing is written any more.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Tree) -> Result<T>) -> Result<T> {
        let handle = self.enter()?;
        let result = self.with_tree(&handle, change);
        drop(handle);
        self.has_changes();
        result
    }

    /// Gives lookups or opens back.
    pub(crate) fn leave(&self, leave: impl FnOnce(&mut Tree)) {
        self.with_tree(&self.gate.enter(), leave);
    }

    /// A handle of the running group. `EROFS`.
    fn enter(&self) -> Result<Handle<'_>> {
        match self.read_only.load(Ordering::Relaxed) {
            true => Err(Errno::EROFS),
            false => Ok(self.gate.enter()),
        }
    }

    /// Changes the tree, and ends the contents of inodes that are gone by that.
    fn with_tree<T>(&self, _: &Handle<'_>, change: impl FnOnce(&mut Tree) -> T) -> T {
        let mut tree = lock(&self.tree);
        let result = change(&mut tree);
        let ended = tree.take_ended();
        drop(tree);
        ended.iter().for_each(|content| lock(content).end(&self.pool));
        result
    }

    /// True where nothing is written any more.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
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
        let Some(store) = &self.store else { return Ok(()) };
        let committing = lock(&self.committing);
        // What failed once was told to one caller alone, and may be lost to all.
        if self.read_only.load(Ordering::Relaxed) {
            return Err(Errno::EIO);
        }
        self.pending.store(false, Ordering::Relaxed);
        if !lock(&self.tree).is_dirty() {
            return Ok(());
        }
        if !self.rules.blocks_wait_for_group {
            self.pool.release(&self.pool.take_given_up());
        }
        let (turn, batch) = {
            let closed = self.gate.close();
            (store.turn(), group::close(&closed, &self.tree, &self.pool))
        };
        let written = batch.map_err(|_| StoreError::Full).and_then(|batch| {
            store.write_data(&batch.data)?;
            let units = &mut |wanted| self.take_units(wanted);
            let group = store.commit(turn, batch.changes, true, units)?;
            store.sync(group)?;
            Ok(batch.freed)
        });
        let freed = written.map_err(|error| {
            self.read_only.store(true, Ordering::Relaxed);
            log::error!("uhs: {error}: nothing is written any more");
            Errno::EIO
        })?;
        lock(&self.tree).slots = store.slots();
        self.pool.release(&freed);
        if self.pool.pages().0 > self.options.cache_pages {
            let contents = lock(&self.tree).contents();
            contents.iter().for_each(|content| lock(content).drop_clean(&self.pool));
        }
        drop(committing);
        Ok(())
    }

    /// Commits for the last time.
    pub(crate) fn rest(&self) {
        let rested = self.commit().map(|()| self.store.as_ref().map(Store::rest));
        if let Ok(Some(Err(error))) = rested {
            log::warn!("uhs: {error}");
        }
    }

    fn take_units(&self, wanted: u32) -> Option<(u32, u32)> {
        let mut space = self.pool.space();
        let (first, count) = space.find_units(wanted)?;
        space.reserve(first, count);
        Some((first, count))
    }

    pub(crate) fn read(&self, ino: u64, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        let content = self.tree().data(ino)?;
        loop {
            let held = lock(&content);
            let missing = held.missing(offset, out.remaining() as u64);
            if missing.is_empty() {
                held.read(offset, out)?;
                self.tree().accessed(ino);
                return Ok(());
            }
            drop(held);
            self.fetch(&content, &missing)?;
        }
    }

    pub(crate) fn readlink(&self, ino: u64) -> Result<Vec<u8>> {
        let content = self.tree().content(ino)?;
        match lock(&content).data() {
            Data::Target(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
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
        let content = self.tree().data(ino)?;
        let missing = |held: &Content| {
            held.missing_edges(offset.unwrap_or_else(|| held.size()), data.len() as u64)
        };
        let taken = self.change_content(&content, missing, |held| {
            let offset = offset.unwrap_or_else(|| held.size());
            let taken = held.write(&self.pool, offset, data);
            match &taken {
                Ok(0) | Err(_) => self.tree().settle(ino, held.facts())?,
                Ok(_) => self.tree().wrote(ino, held.facts(), kill_suidgid)?,
            }
            taken
        })?;
        // Whoever writes faster than the device waits for it.
        if self.pool.pages().1 > self.options.dirty_pages {
            self.commit()?;
        }
        Ok(taken)
    }

    pub(crate) fn setattr(&self, ino: u64, set: &SetAttr) -> Result<Attr> {
        let Some(size) = set.size else { return self.change(|tree| tree.setattr(ino, set)) };
        let content = self.tree().data(ino)?;
        self.change_content(
            &content,
            |held| held.page_to_cut(size),
            |held| {
                let result = held.set_size(&self.pool, size);
                let mut tree = self.tree();
                tree.settle(ino, held.facts())?;
                result.and_then(|()| tree.setattr(ino, set))
            },
        )
    }

    /// Changes a content when nothing is `missing` for it.
    fn change_content<T>(
        &self,
        content: &Mutex<Content>,
        missing: impl Fn(&Content) -> Vec<(u64, u64)>,
        change: impl FnOnce(&mut Content) -> Result<T>,
    ) -> Result<T> {
        loop {
            let handle = self.enter()?;
            let mut held = lock(content);
            let missing = missing(&held);
            if missing.is_empty() {
                let result = change(&mut held);
                drop(held);
                drop(handle);
                self.has_changes();
                return result;
            }
            drop(held);
            drop(handle);
            self.fetch(content, &missing)?;
        }
    }

    /// Reads pages into memory. The content drops those whose block is another one by then.
    fn fetch(&self, content: &Mutex<Content>, missing: &[(u64, u64)]) -> Result<()> {
        // Blocks that are freed and taken again meanwhile may hold anything.
        let releases = self.pool.releases();
        for run in missing.chunk_by(|a, b| a.1 + 1 == b.1).flat_map(|run| run.chunks(GATHERED)) {
            let mut bytes = vec![0; run.len() * BLOCK];
            lock(&self.line).read(run[0].1, &mut bytes).map_err(|_| Errno::EIO)?;
            let mut held = lock(content);
            for (at, page) in run.iter().zip(bytes.as_chunks::<BLOCK>().0) {
                if self.pool.releases() == releases {
                    held.fill(&self.pool, *at, Arc::new(*page));
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
