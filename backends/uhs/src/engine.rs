//! The file system as a whole: names and contents in memory, the store on the device, and the way
//! from one to the other.
//!
//! Lock order: the turn to load an inode, the right to write a group, a handle of the running
//! group, the locks of names and contents, the pool. No other lock is taken under the lock of the
//! line for reads. A thread with a handle, a content or a lock of names does no I/O.

mod commit;
mod compact;
mod data;
mod data_groups;
mod direct;
mod figures;
mod files;
mod in_place;
mod merge;
mod queues;
mod submitted;
mod sync_rounds;
mod vacate;
mod write_behind;
mod write_errors;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use defuse_block::{BlockDevice, BlockingQueue, CountedDevice, SeparatedDevice};
use defuse_fs::posix::AccessTimeRule;
use defuse_fs::source::WorkWatch;
use defuse_fs::{AnswerLifetime, Entry, Errno, Frontends, Name, Result, SetXattrFlags, XattrName};

use crate::UhsOptions;
use crate::commit::CommitRules;
use crate::content::{BlockPool, INODE_MEMORY, SharedContent};
use crate::format::superblock::PADDED_RECORDS;
use crate::group::{self, ClosePlan, ClosedChanges, GroupLock, GroupReadGuard};
use crate::io::BlockIo;
use crate::load;
use crate::locks::lock;
use crate::names::{ContentState, LoadProblem, NameStore};
use crate::store::{self, FrozenSlots, InodeStore, StoreError, survey, survey_with_slots};
use commit::PendingGroups;
pub(crate) use commit::SyncScope;
use compact::Compaction;
use data_groups::DataGroups;
use figures::ReadCounters;
#[cfg(test)]
pub(crate) use in_place::InPlaceRest;
use in_place::InPlaceSyncs;
use merge::ScatteredUnits;
pub(crate) use queues::MOST_QUEUES;
pub(crate) use submitted::{SubmissionThreads, is_direct};
use sync_rounds::SyncRounds;
use write_behind::WriteBehind;

/// Only this process changes the file system, so answers stay valid until it sends a notification.
pub(crate) const VALID_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Contents that are looked at when one more is listed.
const LOOKS: usize = 4;

/// Inodes that are loaded at a time.
const LOADS: usize = 16;

/// The slots on the device.
enum EngineSlots {
    Store(Box<InodeStore>),
    /// Nothing may be written.
    Frozen(FrozenSlots),
}

/// The state that operations and the committing thread share.
pub(crate) struct UhsEngine {
    names: NameStore,
    frontends: Frontends,
    pool: Arc<BlockPool>,
    gate: GroupLock,
    store: EngineSlots,
    /// Groups are closed and written one after the other: pages that are in two groups are written
    /// twice, in the order of the groups. Data groups are the exception.
    writing: Mutex<DataGroups>,
    /// A data group is over.
    data_group_over: Condvar,
    rounds: SyncRounds,
    in_place: InPlaceSyncs,
    waiting: Mutex<PendingGroups>,
    line: Mutex<BlockingQueue>,
    io: BlockIo,
    /// The way of all I/O.
    device: Arc<CountedDevice>,
    /// The queues that all threads share, if they do.
    separated: Option<Arc<SeparatedDevice>>,
    reads: ReadCounters,
    compaction: Compaction,
    scattered: ScatteredUnits,
    /// The turns to read the content of an inode from its slot, by the number of the inode.
    loads: [Mutex<()>; LOADS],
    /// Contents with pages that the device does not take.
    stuck: Mutex<BTreeMap<u64, SharedContent>>,
    /// Data that is written before its group. Made when a file needs it; none on a device with few
    /// queues.
    behind: OnceLock<Option<WriteBehind>>,
    /// The device has refused data in this mount.
    refused: AtomicBool,
    /// Inodes with contents in memory that may leave it, each once: a clock
    /// ([`NameStore::retire`]).
    idle: Mutex<VecDeque<u64>>,
    options: UhsOptions,
    rules: CommitRules,
    /// The device or its content is damaged: nothing is written any more.
    read_only: AtomicBool,
    /// Something waits for the next group.
    pending: AtomicBool,
    /// The committing thread sleeps until there is something to commit.
    sleeps: AtomicBool,
    /// The committing thread is not to wait.
    hurried: AtomicBool,
    /// True once the committing thread is to end.
    ended: Mutex<bool>,
    wake: Condvar,
}

/// Makes an empty file system on `device`.
pub(crate) fn make(
    device: Arc<dyn BlockDevice>,
    uuid: [u8; 16],
    root: (u32, u32, u32),
    random: &mut fastrand::Rng,
) -> Result<(), StoreError> {
    store::make(&*device, uuid, random)?;
    let survey = survey(&*device, CommitRules::ALL)?;
    let store = InodeStore::begin(device, &survey, CommitRules::ALL, random.fork())?;
    let pool = Arc::new(BlockPool::new(load::space(&survey.superblock)));
    let gate = GroupLock::new(CommitRules::ALL.full_group);
    let names = NameStore::empty(Arc::clone(&pool), &gate.enter(), root);
    let closed =
        names.and_then(|names| group::close(&gate.close(), &names, &pool, ClosePlan::WHOLE));
    let changes = match closed {
        Ok(ClosedChanges::Batches(batch, _)) => batch.changes,
        Ok(ClosedChanges::Overtakes) | Err(_) => return Err(StoreError::Full),
    };
    let group = store.commit(store.take_turn(), changes, true, &mut |_, _| None)?;
    store.sync(group)
}

impl UhsEngine {
    pub(crate) fn open(
        device: Arc<dyn BlockDevice>,
        options: UhsOptions,
        rules: CommitRules,
        random: fastrand::Rng,
        watch: &dyn WorkWatch,
    ) -> Result<(UhsEngine, Vec<LoadProblem>), StoreError> {
        let separated = queues::share(&device, &options)?;
        let device =
            separated.clone().map_or(device, |separated| separated as Arc<dyn BlockDevice>);
        let counted = Arc::new(CountedDevice::new(device));
        let device = Arc::clone(&counted) as Arc<dyn BlockDevice>;
        let superblock = store::superblock(&*device)?;
        let (survey, mut names, pool, problems) =
            match load::restore(&*device, &superblock, options.index)? {
                Some((survey, names, pool)) => (survey, names, pool, Vec::new()),
                None => {
                    let scanned = CommitRules { kept: rules.kept.min(options.index), ..rules };
                    let mut survey = survey_with_slots(&*device, scanned, |_| {}, watch)?;
                    let (names, pool, problems) =
                        load::load(&*device, &survey, options.index, watch)?;
                    survey.forget_bodies();
                    (survey, names, pool, problems)
                }
            };
        pool.set_rules(rules);
        pool.limit_index(options.index);
        pool.set_trees(survey.superblock.features & PADDED_RECORDS != 0);
        let inodes = pool.inodes().load(Ordering::Relaxed);
        load::check_index(inodes, pool.index_bytes().0 - inodes * INODE_MEMORY, options.index)?;
        if rules.stepped_time {
            names.step_time();
        } else if options.writeback {
            names.share_clock();
        }
        let memory = pool.add_memory(options.cache_pages, options.dirty_pages);
        memory.map_err(store::device_error("reserve memory"))?;
        if let Some(region) = pool.region() {
            device.register(region).map_err(store::device_error("register memory"))?;
        }
        let io = BlockIo::new(Arc::clone(&device), separated.is_some());
        let line = BlockingQueue::new(&*device).map_err(store::device_error("open a queue"))?;
        let writes = !options.read_only && problems.is_empty();
        names.set_access_times(if writes { options.access_times } else { AccessTimeRule::Never });
        let store = match writes {
            true => {
                EngineSlots::Store(Box::new(InodeStore::begin(device, &survey, rules, random)?))
            }
            false => EngineSlots::Frozen(FrozenSlots::from_survey(&survey)),
        };
        let engine = UhsEngine {
            gate: GroupLock::new(rules.full_group.min(names.max_changes_per_thread())),
            names,
            frontends: Frontends::new(VALID_FOR),
            pool,
            store,
            writing: Mutex::default(),
            data_group_over: Condvar::new(),
            rounds: SyncRounds::default(),
            in_place: InPlaceSyncs::default(),
            waiting: Mutex::default(),
            line: Mutex::new(line),
            io,
            device: counted,
            separated,
            reads: ReadCounters::default(),
            compaction: Compaction::default(),
            scattered: ScatteredUnits::default(),
            loads: Default::default(),
            stuck: Mutex::default(),
            behind: OnceLock::new(),
            refused: AtomicBool::new(false),
            idle: Mutex::default(),
            options,
            rules,
            read_only: AtomicBool::new(!writes),
            pending: AtomicBool::new(false),
            sleeps: AtomicBool::new(false),
            hurried: AtomicBool::new(false),
            ended: Mutex::new(false),
            wake: Condvar::new(),
        };
        Ok((engine, problems))
    }

    /// The frontends that receive notifications of changes, by operations and by submitted
    /// operations.
    pub(crate) fn frontends(&self) -> &Frontends {
        &self.frontends
    }

    /// Names and attributes, for reading.
    pub(crate) fn names(&self) -> &NameStore {
        &self.names
    }

    /// The blocks that files share.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Changes names or attributes; tries again where a commit makes space. `EROFS` where nothing
    /// is written any more.
    pub(crate) fn change<T>(
        &self,
        change: impl Fn(&NameStore, &GroupReadGuard<'_>) -> Result<T>,
    ) -> Result<T> {
        let once = || {
            let handle = self.enter()?;
            let result = change(&self.names, &handle);
            self.end_change(handle);
            result
        };
        self.with_space(once)
    }

    /// Tries again where a commit makes space, and where a compaction does.
    pub(super) fn with_space<T>(&self, mut once: impl FnMut() -> Result<T>) -> Result<T> {
        let mut result = once();
        for makes_space in [UhsEngine::commit_for_space, UhsEngine::compact_now] {
            if matches!(result, Err(Errno::ENOSPC)) && makes_space(self)? {
                result = once();
            }
        }
        result
    }

    /// Commits where that may make space. False where it cannot.
    fn commit_for_space(&self) -> Result<bool> {
        let waits = self.pool.has_waiting();
        if waits {
            self.commit(SyncScope::Changes)?;
        }
        Ok(waits)
    }

    /// Gives an inode another name.
    pub(crate) fn link(
        &self,
        ino: u64,
        place: (u64, Name<'_>),
        lifetime: AnswerLifetime,
    ) -> Result<Entry> {
        // An inode with several names keeps its content in memory: the content records where the
        // records lie.
        let content = self.content(ino)?;
        self.change(|names, handle| names.link(handle, (ino, &content), place, lifetime))
    }

    pub(crate) fn setxattr(
        &self,
        ino: u64,
        attribute: (XattrName<'_>, &[u8]),
        flags: SetXattrFlags,
    ) -> Result<()> {
        // An inode with attributes keeps its content in memory: the content records where the
        // records lie.
        let content = self.content(ino)?;
        self.change(|names, handle| {
            names.setxattr(handle, (ino, &mut lock(&content)), attribute, flags)
        })
    }

    pub(crate) fn removexattr(&self, ino: u64, name: XattrName<'_>) -> Result<()> {
        let content = self.content(ino)?;
        let removed = self.change(|names, handle| names.removexattr(handle, ino, name));
        drop(content);
        self.is_idle(ino);
        removed
    }

    /// A handle of the running group. `EROFS`.
    fn enter(&self) -> Result<GroupReadGuard<'_>> {
        match self.read_only.load(Ordering::Relaxed) {
            true => Err(Errno::EROFS),
            false => Ok(self.gate.enter()),
        }
    }

    /// Ends a change. The thread that fills the group writes it.
    pub(super) fn end_change(&self, handle: GroupReadGuard<'_>) {
        let full = handle.is_full();
        drop(handle);
        self.has_changes();
        if full {
            self.write_full_group();
        }
    }

    /// Prevents all writes from now on.
    #[cfg(test)]
    pub(crate) fn abandon(&self) {
        self.read_only.store(true, Ordering::Relaxed);
    }

    /// True where nothing is written any more.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    /// Wakes the committing thread, unless it is awake.
    pub(crate) fn has_changes(&self) {
        let knows =
            self.pending.load(Ordering::Relaxed) || self.pending.swap(true, Ordering::SeqCst);
        if !knows && self.sleeps.load(Ordering::SeqCst) {
            drop(lock(&self.ended));
            self.wake.notify_all();
        }
    }

    /// Makes the committing thread commit now, without waiting for its interval.
    fn commit_soon(&self) {
        if !self.hurried.load(Ordering::Relaxed) && !self.hurried.swap(true, Ordering::Relaxed) {
            drop(lock(&self.ended));
            self.wake.notify_all();
        }
    }

    /// Returns lookups. True if the inode has none left.
    pub(crate) fn forget(&self, ino: u64, lookups: u64) -> bool {
        // Blocks that the inode gives up belong to the running group.
        let _handle = self.gate.enter();
        self.names.forget(ino, lookups)
    }

    /// Records that an open file was released.
    pub(crate) fn record_close(&self, ino: u64) {
        let handle = self.gate.enter();
        let to_list = self.names.record_close(ino);
        drop(handle);
        if self.pool.has_ahead()
            && !self.names.is_open(ino)
            && let Ok(ContentState::Here(content)) = self.names.content(ino)
        {
            lock(&content).stop_growing(&self.pool);
        }
        if to_list {
            self.list(ino);
        }
    }

    /// Records a use of the content of an inode, which may leave memory later.
    fn is_idle(&self, ino: u64) {
        if self.names.record_use(ino) {
            self.list(ino);
        }
    }

    /// Lists a content that may leave memory. While too many are listed, unused contents leave
    /// memory.
    fn list(&self, ino: u64) {
        let mut idle = lock(&self.idle);
        idle.push_back(ino);
        // After a failure the content of the slots is unknown, so that contents cannot be read
        // again.
        if self.is_read_only() && matches!(self.store, EngineSlots::Store(_)) {
            return;
        }
        for _ in 0..LOOKS {
            let oldest = (idle.len() > self.options.cache_pages / 4).then(|| idle.pop_front());
            let Some(oldest) = oldest.flatten() else { return };
            drop(idle);
            let stays = self.names.retire(oldest);
            idle = lock(&self.idle);
            if stays {
                idle.push_back(oldest);
            }
        }
    }
}
