//! Inodes that are known, with their lookups and attributes.
//!
//! *Invariant*: a node owns the lookups that were counted on it, and gives back exactly these when
//! it is dropped. Two nodes of one inode may exist for a moment, while one is being dropped and a
//! new lookup has come: each owns its own, so nothing is given back twice or lost.

use std::array;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use defuse_fs::{Attr, FileKind, FileSystem, Ino};
use defuse_probe::{Op, Recorder, clock};
use hashbrown::HashTable;

/// Locks that a panic does not poison: what is behind them is valid between any two statements.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nanoseconds of `CLOCK_MONOTONIC_COARSE`: some milliseconds coarse, as timeouts are, and a third
/// of the cost.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// When what holds for `time` from now on has expired.
pub(crate) fn expiry(time: Duration) -> u64 {
    if time.is_zero() {
        return 0;
    }
    now_ns().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// An inode.
pub(crate) struct Node {
    core: Arc<Core>,
    ino: Ino,
    kind: FileKind,
    lookups: AtomicU64,
    cached: Mutex<Cached>,
    /// Moves with everything that may change attributes, so that an answer that was on its way
    /// meanwhile is not kept.
    version: AtomicU64,
    /// Reading has moved the access time since the attributes were fetched.
    accessed: AtomicBool,
    /// How many mounts cover this directory.
    pub(crate) covers: AtomicU32,
}

#[derive(Default)]
struct Cached {
    /// With the version that it belongs to, and when it expires.
    attr: Option<(Attr, u64, u64)>,
    /// The same of the access list; `Some(None)` where there is none.
    acl: Option<CachedAcl>,
}

/// An access list or its absence, its version, and when it expires.
type CachedAcl = (Option<Box<[u8]>>, u64, u64);

impl Node {
    pub(crate) fn ino(&self) -> Ino {
        self.ino
    }

    pub(crate) fn kind(&self) -> FileKind {
        self.kind
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// To be read before attributes are asked for that are then [kept](Node::keep_attr).
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Relaxed)
    }

    /// Attributes have changed, or may have. To be called when the change is there.
    ///
    /// Without a locked instruction, which would cost as much as the rest of what a write counts. Of
    /// two threads at once the version may grow by one alone: both changes were there when it was
    /// read, so that attributes that are asked for after it has grown have both.
    #[inline]
    pub(crate) fn changed(&self) {
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), std::sync::atomic::Ordering::Release);
    }

    /// Reading has changed the access time.
    #[inline]
    pub(crate) fn was_read(&self) {
        if !self.accessed.load(Relaxed) {
            self.accessed.store(true, Relaxed);
        }
    }

    pub(crate) fn keep_attr(&self, attr: &Attr, version: u64) {
        let expires = expiry(attr.valid_for);
        if expires > 0 {
            self.accessed.store(false, Relaxed);
            lock(&self.cached).attr = Some((*attr, version, expires));
        }
    }

    /// Attributes that may still be relied on. `times` says that the access time matters too.
    pub(crate) fn cached_attr(&self, times: bool) -> Option<Attr> {
        if times && self.accessed.load(Relaxed) {
            return None;
        }
        let version = self.version();
        let attr = lock(&self.cached).attr;
        attr.filter(|&(_, of, expires)| of == version && now_ns() < expires).map(|(attr, ..)| attr)
    }

    pub(crate) fn keep_acl(&self, acl: Option<Box<[u8]>>, version: u64, valid_for: Duration) {
        lock(&self.cached).acl = Some((acl, version, expiry(valid_for)));
    }

    /// What `decide` says of the access list that is cached: `None` where none is, `Some(None)`
    /// where the inode has none.
    pub(crate) fn with_cached_acl<T>(
        &self,
        decide: &mut dyn FnMut(&[u8]) -> T,
    ) -> Option<Option<T>> {
        let version = self.version();
        let cached = lock(&self.cached);
        let (acl, of, expires) = cached.acl.as_ref()?;
        (*of == version && now_ns() < *expires).then(|| acl.as_deref().map(decide))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.core.remove(self);
        let lookups = *self.lookups.get_mut();
        if lookups > 0 && self.ino != Ino::ROOT {
            self.core.forget(self.ino, lookups);
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("ino", &self.ino).field("kind", &self.kind).finish()
    }
}

const SHARDS: usize = 32;

/// Inodes by number.
type Shard = RwLock<HashTable<(Ino, Weak<Node>)>>;

/// A file system with the inodes that are known of it.
pub(crate) struct Core {
    pub(crate) fs: Arc<dyn FileSystem>,
    pub(crate) recorder: Recorder,
    shards: [Shard; SHARDS],
}

impl Core {
    pub(crate) fn new(fs: Arc<dyn FileSystem>, recorder: Recorder) -> Arc<Self> {
        Arc::new(Core { fs, recorder, shards: array::from_fn(|_| RwLock::default()) })
    }

    /// The node of an inode, with `lookups` more of it.
    pub(crate) fn node(self: &Arc<Self>, ino: Ino, kind: FileKind, lookups: u64) -> Arc<Node> {
        let shard = &self.shards[ino.0 as usize % SHARDS];
        let hash = spread(ino);
        let mut table = shard.write().unwrap_or_else(PoisonError::into_inner);
        let found = table.find_mut(hash, |(other, _)| *other == ino);
        if let Some((_, weak)) = found {
            // The kind can differ only where the number was forgotten and given anew.
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

    fn make(self: &Arc<Self>, ino: Ino, kind: FileKind, lookups: u64) -> Arc<Node> {
        Arc::new(Node {
            core: Arc::clone(self),
            ino,
            kind,
            lookups: AtomicU64::new(lookups),
            cached: Mutex::default(),
            version: AtomicU64::new(0),
            accessed: AtomicBool::new(false),
            covers: AtomicU32::new(0),
        })
    }

    /// The node of an inode, where it is known.
    pub(crate) fn find(&self, ino: Ino) -> Option<Arc<Node>> {
        let table = self.shards[ino.0 as usize % SHARDS].read();
        let table = table.unwrap_or_else(PoisonError::into_inner);
        table.find(spread(ino), |(other, _)| *other == ino)?.1.upgrade()
    }

    /// All nodes that are known.
    pub(crate) fn all(&self) -> Vec<Arc<Node>> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let table = shard.read().unwrap_or_else(PoisonError::into_inner);
            all.extend(table.iter().filter_map(|(_, weak)| weak.upgrade()));
        }
        all
    }

    fn remove(&self, node: &Node) {
        let mut table = self.shards[node.ino.0 as usize % SHARDS]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        // By address: a successor may have taken the place already.
        let same =
            |(ino, weak): &(Ino, Weak<Node>)| *ino == node.ino && std::ptr::eq(weak.as_ptr(), node);
        if let Ok(entry) = table.find_entry(spread(node.ino), same) {
            entry.remove();
        }
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        let start = clock::now();
        let call = AssertUnwindSafe(|| self.fs.forget(ino, lookups));
        let ok = std::panic::catch_unwind(call).is_ok();
        self.recorder.with_cells(|cells| cells.record(Op::FORGET, start.elapsed_ns(), ok));
    }
}

fn spread(ino: Ino) -> u64 {
    (ino.0 ^ 0x517c_c1b7).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
