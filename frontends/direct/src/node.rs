//! Known inodes, with their lookup counts and cached attributes.
//!
//! *Invariant*: a node owns the lookup counts added to it, and forgets exactly these when it is
//! dropped. While one node of an inode is being dropped, a new lookup may create a second one. Each
//! owns its own counts, so that none is forgotten twice or lost.

use std::array;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use defuse_fs::{Attr, FileKind, FileSystem, Ino};
use defuse_probe::{Op, Recorder};
use hashbrown::HashTable;

use crate::lifetime::{AnswerValidity, CallMoment, ChangeTracker, InodeVersions};

/// Locks a mutex and ignores poisoning: the data is valid between any two statements.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nanoseconds of `CLOCK_MONOTONIC_COARSE`. Its resolution of some milliseconds is enough for
/// timeouts, and it costs a third of the precise clock.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The time at which something valid for `time` from now on expires.
pub(crate) fn expiry(time: Duration) -> u64 {
    if time.is_zero() {
        return 0;
    }
    now_ns().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// An inode.
pub(crate) struct CachedInode {
    core: Arc<MountCore>,
    ino: Ino,
    kind: FileKind,
    lookups: AtomicU64,
    cached: Mutex<CachedAttributes>,
    /// Increased by everything that may change attributes. An answer that was requested before the
    /// change is then not cached.
    version: AtomicU64,
    /// Increased by every change of data that permission checks use: mode, owner, group and ACL. A
    /// change of the names in a directory does not increase it.
    rights: AtomicU64,
    /// Number of notifications that others have changed the inode.
    notifications: AtomicU64,
    /// The access time has changed since the attributes were fetched, because the file was read.
    accessed: AtomicBool,
    /// Number of mounts that cover this directory.
    pub(crate) covers: AtomicU32,
}

#[derive(Default)]
struct CachedAttributes {
    /// Attributes, the version that they belong to, and how long they hold.
    attr: Option<(Attr, AttributeVersion, AnswerValidity<InodeVersions>)>,
    /// The access ACL, in the same way; `Some(None)` if the inode has no ACL.
    acl: Option<CachedAcl>,
}

/// An ACL or its absence, the version that it belongs to, and how long it holds.
type CachedAcl = (Option<Box<[u8]>>, AttributeVersion, AnswerValidity<InodeVersions>);

/// The version of the attributes of an inode, and the version of the attributes that permission
/// checks use.
#[derive(Clone, Copy)]
pub(crate) struct AttributeVersion {
    all: u64,
    rights: u64,
    notifications: NotificationCounts,
    /// The moment in the file system.
    moment: CallMoment,
}

/// The number of notifications about one inode, and about all.
type NotificationCounts = (u64, u64);

impl CachedInode {
    pub(crate) fn ino(&self) -> Ino {
        self.ino
    }

    pub(crate) fn kind(&self) -> FileKind {
        self.kind
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// True if the node itself keeps the number valid.
    pub(crate) fn has_lookups(&self) -> bool {
        self.ino == Ino::ROOT || self.lookups.load(Relaxed) > 0
    }

    /// The version before a request for attributes. [`CachedInode::keep_attr`] needs it.
    pub(crate) fn version(&self) -> AttributeVersion {
        self.version_at(self.core.fresh.current_moment())
    }

    /// The version after a request that began at `moment`.
    pub(crate) fn version_at(&self, moment: CallMoment) -> AttributeVersion {
        let (all, rights) = (self.version.load(Relaxed), self.rights.load(Relaxed));
        AttributeVersion { all, rights, notifications: self.notification_counts(), moment }
    }

    fn notification_counts(&self) -> NotificationCounts {
        (self.notifications.load(SeqCst), self.core.fresh.epoch())
    }

    /// Invalidates cached attributes after a change by others. Unlike the number of
    /// [`invalidate`](CachedInode::invalidate), this number never goes back when two threads call
    /// it, so that attributes which were requested before a change are never used after it.
    pub(crate) fn invalidate_by_others(&self) {
        self.notifications.fetch_add(1, SeqCst);
    }

    /// Invalidates cached attributes. Call it after the change.
    ///
    /// It uses no locked instruction, which would cost as much as the rest of the accounting of a
    /// write. If two threads call it at once, the version may grow by only one. That is enough:
    /// both changes were complete when the version was read, so attributes requested after it has
    /// grown include both.
    #[inline]
    pub(crate) fn invalidate(&self) {
        self.invalidate_names();
        increase(&self.rights);
    }

    /// Like [`invalidate`](CachedInode::invalidate), for a directory of which only the names have
    /// changed.
    #[inline]
    pub(crate) fn invalidate_names(&self) {
        increase(&self.version);
    }

    /// Like [`invalidate`](CachedInode::invalidate), for data. If versions show changes of the
    /// rights by others, the cached rights stay, unless the file may lose set-id bits.
    #[inline]
    pub(crate) fn invalidate_data(&self) {
        if self.core.fresh.is_versioned() && self.keeps_its_rights() {
            self.invalidate_names();
        } else {
            self.invalidate();
        }
    }

    /// True if a change of the data is known to clear no set-id bit.
    #[inline(never)]
    fn keeps_its_rights(&self) -> bool {
        const SET_ID: u32 = 0o6000;
        lock(&self.cached).attr.as_ref().is_some_and(|(attr, ..)| attr.perm & SET_ID == 0)
    }

    /// Caches attributes that arrived after `moment`, if nothing has changed since.
    pub(crate) fn keep_known(&self, attr: &Attr, moment: CallMoment) {
        if self.core.fresh.is_versioned() {
            self.keep_attr(attr, self.version_at(moment));
        }
    }

    /// Caches the attributes in the reply to a change that began after `moment`, if no other change
    /// has happened since.
    pub(crate) fn keep_after_change(&self, attr: &Attr, moment: CallMoment) {
        if self.core.fresh.is_versioned() {
            self.keep_attr(attr, self.version_at(self.core.fresh.skip_own_change(moment)));
        }
    }

    /// Records that a read has changed the access time.
    #[inline]
    pub(crate) fn record_read(&self) {
        if !self.accessed.load(Relaxed) {
            self.accessed.store(true, Relaxed);
        }
    }

    pub(crate) fn keep_attr(&self, attr: &Attr, version: AttributeVersion) {
        if let Some(lasts) = self.core.fresh.inode(version.moment, self.ino, attr) {
            self.accessed.store(false, Relaxed);
            lock(&self.cached).attr = Some((*attr, version, lasts));
        }
    }

    /// Returns cached attributes that are still valid, with the time of creation if `birth` is set.
    pub(crate) fn find_cached_attr(&self, birth: bool) -> Option<Attr> {
        if self.accessed.load(Relaxed) {
            return None;
        }
        let fresh = &self.core.fresh;
        self.find_cached_all()
            .filter(|(_, lasts)| fresh.has_attributes(*lasts, self.ino, birth))
            .map(|(attr, _)| attr)
    }

    /// True if the file is known to have no data from `offset` on. Only versions prove that no data
    /// was appended.
    #[inline]
    pub(crate) fn ends_before(&self, offset: u64) -> bool {
        self.core.fresh.is_versioned() && offset > 0 && self.is_known_to_end_before(offset)
    }

    /// Not inlined into a read of a file system without versions.
    #[inline(never)]
    fn is_known_to_end_before(&self, offset: u64) -> bool {
        self.kind == FileKind::Regular
            && self.present_attr().is_some_and(|attr| attr.size <= offset)
    }

    /// Returns cached attributes if they are current, except for the access time: versions prove
    /// that nothing has changed.
    pub(crate) fn present_attr(&self) -> Option<Attr> {
        let fresh = &self.core.fresh;
        self.find_cached_all()
            .filter(|(_, lasts)| matches!(lasts, AnswerValidity::While(_)))
            .filter(|(_, lasts)| fresh.has_attributes(*lasts, self.ino, false))
            .map(|(attr, _)| attr)
    }

    /// Cached attributes of which type, mode, owner and group are still valid.
    pub(crate) fn find_cached_rights(&self) -> Option<Attr> {
        self.find_cached(|of, _, rights| of.rights == rights)
            .filter(|(_, lasts)| self.core.fresh.has_rights(*lasts, self.ino))
            .map(|(attr, _)| attr)
    }

    /// Returns cached attributes that this client has not changed since.
    fn find_cached_all(&self) -> Option<(Attr, AnswerValidity<InodeVersions>)> {
        self.find_cached(|of, all, rights| of.all == all && of.rights == rights)
    }

    /// Cached attributes whose version fits the present numbers.
    fn find_cached(
        &self,
        fits: impl Fn(&AttributeVersion, u64, u64) -> bool,
    ) -> Option<(Attr, AnswerValidity<InodeVersions>)> {
        let (all, rights) = (self.version.load(Relaxed), self.rights.load(Relaxed));
        let notifications = self.notification_counts();
        let cached = lock(&self.cached);
        let (attr, of, lasts) = cached.attr.as_ref()?;
        (of.notifications == notifications && fits(of, all, rights)).then_some((*attr, *lasts))
    }

    /// Caches the ACL of an inode with the attributes `attr`, which holds as long as they do.
    pub(crate) fn keep_acl(&self, acl: Option<Box<[u8]>>, version: AttributeVersion, attr: &Attr) {
        if let Some(lasts) = self.core.fresh.inode(version.moment, self.ino, attr) {
            lock(&self.cached).acl = Some((acl, version, lasts));
        }
    }

    /// Calls `decide` with the cached ACL. Returns `None` if none is cached, and `Some(None)` if
    /// the inode has no ACL.
    pub(crate) fn with_cached_acl<T>(
        &self,
        decide: &mut dyn FnMut(&[u8]) -> T,
    ) -> Option<Option<T>> {
        let (rights, notifications) = (self.rights.load(Relaxed), self.notification_counts());
        let cached = lock(&self.cached);
        let (acl, of, lasts) = cached.acl.as_ref()?;
        let holds = || self.core.fresh.has_rights(*lasts, self.ino);
        let fits = of.rights == rights && of.notifications == notifications && holds();
        fits.then(|| acl.as_deref().map(decide))
    }
}

#[inline]
fn increase(version: &AtomicU64) {
    version.store(version.load(Relaxed).wrapping_add(1), std::sync::atomic::Ordering::Release);
}

impl Drop for CachedInode {
    fn drop(&mut self) {
        self.core.remove(self);
        let lookups = *self.lookups.get_mut();
        if lookups > 0 && self.ino != Ino::ROOT {
            self.core.forget(self.ino, lookups);
        }
    }
}

impl std::fmt::Debug for CachedInode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("ino", &self.ino).field("kind", &self.kind).finish()
    }
}

const SHARDS: usize = 32;

/// Inodes by number.
type InodeShard = RwLock<HashTable<(Ino, Weak<CachedInode>)>>;

/// A file system and its known inodes.
pub(crate) struct MountCore {
    pub(crate) fs: Arc<dyn FileSystem>,
    pub(crate) recorder: Recorder,
    pub(crate) fresh: ChangeTracker,
    shards: [InodeShard; SHARDS],
}

impl MountCore {
    pub(crate) fn new(fs: Arc<dyn FileSystem>, recorder: Recorder) -> Arc<Self> {
        let shards = array::from_fn(|_| RwLock::default());
        Arc::new(MountCore { fs, recorder, fresh: ChangeTracker::default(), shards })
    }

    /// The node of an inode, with `lookups` added to its lookup count.
    pub(crate) fn node(
        self: &Arc<Self>,
        ino: Ino,
        kind: FileKind,
        lookups: u64,
    ) -> Arc<CachedInode> {
        let shard = &self.shards[ino.0 as usize % SHARDS];
        let hash = spread(ino);
        let mut table = shard.write().unwrap_or_else(PoisonError::into_inner);
        let found = table.find_mut(hash, |(other, _)| *other == ino);
        if let Some((_, weak)) = found {
            // The kind differs only if the inode number was forgotten and has been reused.
            if let Some(node) = weak.upgrade().filter(|node| node.kind == kind) {
                node.lookups.fetch_add(lookups, Relaxed);
                return node;
            }
            let node = self.make(ino, kind, lookups);
            *weak = Arc::downgrade(&node);
            return node;
        }
        let node = self.make(ino, kind, lookups);
        table.insert_unique(hash, (ino, Arc::downgrade(&node)), |(ino, _)| spread(*ino));
        node
    }

    fn make(self: &Arc<Self>, ino: Ino, kind: FileKind, lookups: u64) -> Arc<CachedInode> {
        Arc::new(CachedInode {
            core: Arc::clone(self),
            ino,
            kind,
            lookups: AtomicU64::new(lookups),
            cached: Mutex::default(),
            version: AtomicU64::new(0),
            rights: AtomicU64::new(0),
            notifications: AtomicU64::new(0),
            accessed: AtomicBool::new(false),
            covers: AtomicU32::new(0),
        })
    }

    /// The node of an inode, if it is known.
    pub(crate) fn find(&self, ino: Ino) -> Option<Arc<CachedInode>> {
        let table = self.shards[ino.0 as usize % SHARDS].read();
        let table = table.unwrap_or_else(PoisonError::into_inner);
        table.find(spread(ino), |(other, _)| *other == ino)?.1.upgrade()
    }

    fn remove(&self, node: &CachedInode) {
        let mut table = self.shards[node.ino.0 as usize % SHARDS]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        // Compare addresses: the entry may belong to a successor by now.
        let same = |(ino, weak): &(Ino, Weak<CachedInode>)| {
            *ino == node.ino && std::ptr::eq(weak.as_ptr(), node)
        };
        if let Ok(entry) = table.find_entry(spread(node.ino), same) {
            entry.remove();
        }
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        let call = AssertUnwindSafe(|| self.fs.forget(ino, lookups));
        // A panic cannot be reported.
        let _ = self.recorder.sample(Op::FORGET, || std::panic::catch_unwind(call));
    }
}

fn spread(ino: Ino) -> u64 {
    (ino.0 ^ 0x517c_c1b7).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
