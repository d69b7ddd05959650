//! One mount: a file system, its caches, and the only path by which the client calls it.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use defuse_fs::locks::LockQueue;
use defuse_fs::{
    Attr, Caps, Entry, Errno, Fh, FileSystem, Ino, Lifecycle, LockSupport, Name, Notify, OpenArgs,
    OpenReply, Origin, PollHandle, RecallCallback, Result, Versions, Xattr, XattrName,
    shortcuts_of,
};
use defuse_probe::{Op, Recorder, StatsSnapshot};
use defuse_process::ProcessOwner;

use crate::cache::{CachedLookup, DentryCache, LookupTicket, NameChange};
use crate::credentials::TaskCredentials;
use crate::lifetime::{AnswerValidity, CallMoment};
use crate::node::{CachedInode, MountCore};
use crate::owned::OwnedFileSystem;
use crate::prefix_cache::{DirectoryHold, PrefixCache, PrefixDirectory, WalkBegin};

/// The place of a mount.
#[derive(Clone, Debug)]
pub(crate) enum MountSpot {
    /// An absolute path of the kernel's name space.
    Path(Box<[u8]>),
    /// A name, without the colon.
    Name(Box<[u8]>),
    /// A directory of another mount, at this path.
    Covers { node: Arc<CachedInode>, mount: Arc<ClientMount>, path: Box<[u8]> },
}

impl MountSpot {
    /// The place as text: a path, or a name with its colon.
    fn target(&self) -> Vec<u8> {
        match self {
            MountSpot::Path(path) | MountSpot::Covers { path, .. } => path.to_vec(),
            MountSpot::Name(name) => [name, b":".as_slice()].concat(),
        }
    }
}

/// The attributes of an inode that a walk has reached.
#[derive(Clone, Copy)]
pub(crate) enum ReachedAttributes {
    Nothing,
    /// The attributes have just arrived from the file system.
    Now(Attr),
    /// The attributes of a directory that was passed lately, which are good enough for permission
    /// checks.
    Lately(Attr),
}

/// A mounted file system.
pub struct ClientMount {
    // The order of the fields matters: nodes must be forgotten before the file system is detached.
    names: Arc<DentryCache>,
    pub(crate) root: Arc<CachedInode>,
    pub(crate) spot: MountSpot,
    pub(crate) core: Arc<MountCore>,
    /// The identity of the mount, in the contexts of its operations.
    pub(crate) origin: Origin,
    caps: Caps,
    read_only: bool,
    pub(crate) noexec: bool,
    pub(crate) id: u32,
    pub(crate) locks: LockQueue,
    /// Number of open files and working directories.
    pub(crate) users: AtomicUsize,
    /// A lock was requested through this mount.
    pub(crate) has_locked: AtomicBool,
    pub(crate) lacks_access: AtomicBool,
    /// The file system takes data operations only by `submit`.
    pub(crate) lacks_calls: AtomicBool,
    pub(crate) lacks_resolve: AtomicBool,
    pub(crate) lacks_open_or_create: AtomicBool,
    lacks_peek: AtomicBool,
    /// True if a lookup had a reply that may be cached.
    has_cacheable_names: AtomicBool,
    /// Number of mounts on directories of this one.
    pub(crate) covered: AtomicUsize,
    pub(crate) source: String,
    /// The result of detaching the file system, once that has happened.
    pub(crate) durable: Arc<OnceLock<Result<()>>>,
}

/// Arguments of [`ClientMount::new`] beside the file system.
pub(crate) struct MountSettings {
    pub read_only: bool,
    pub noexec: bool,
    pub id: u32,
    pub names: usize,
    pub source: String,
    /// The lifetime of directories that a walk has passed, if they are kept at all.
    pub directories: Option<DirectoryHold>,
}

impl ClientMount {
    pub(crate) fn new(
        fs: Arc<dyn FileSystem>,
        spot: MountSpot,
        settings: MountSettings,
    ) -> Result<Arc<Self>> {
        let recorder = Recorder::new();
        let caps = catch_panic(|| Ok(fs.caps()))?;
        let owner = caps.of_one_process.then(ProcessOwner::current);
        let fs = match owner {
            Some(owner) => {
                let target = String::from_utf8_lossy(&spot.target()).into_owned();
                let source = &settings.source;
                let name = if source.is_empty() { &target } else { source };
                Arc::new(OwnedFileSystem::new(fs, owner, name.clone()))
            }
            None => fs,
        };
        let core = MountCore::new(fs, recorder);
        owner.iter().for_each(|owner| core.fresh.belong_to(*owner));
        let names =
            Arc::new(DentryCache::new(settings.names, core.fresh.clone(), settings.directories));
        let origin = Origin::new();
        let notify = CacheNotify { names: Arc::downgrade(&names), core: Arc::downgrade(&core) };
        catch_panic(|| {
            core.fs.attach(origin, Arc::new(notify));
            Ok(())
        })?;
        let root = core.node(Ino::ROOT, defuse_fs::FileKind::Directory, 0);
        Ok(Arc::new(ClientMount {
            names,
            root,
            spot,
            core,
            origin,
            read_only: settings.read_only || caps.read_only,
            caps,
            noexec: settings.noexec,
            id: settings.id,
            locks: LockQueue::default(),
            users: AtomicUsize::new(0),
            has_locked: AtomicBool::new(false),
            lacks_access: AtomicBool::new(false),
            lacks_calls: AtomicBool::new(false),
            lacks_resolve: AtomicBool::new(false),
            lacks_open_or_create: AtomicBool::new(false),
            lacks_peek: AtomicBool::new(false),
            has_cacheable_names: AtomicBool::new(false),
            covered: AtomicUsize::new(0),
            source: settings.source,
            durable: Arc::default(),
        }))
    }

    /// Calls the file system and records the call. A panic becomes `EIO` for this call alone.
    #[inline]
    pub(crate) fn call<T>(
        &self,
        op: Op,
        call: impl FnOnce(&dyn FileSystem) -> Result<T>,
    ) -> Result<T> {
        self.core.recorder.sample(op, || catch_panic(|| call(&*self.core.fs)))
    }

    /// Passes an event on to the file system, if it handles events.
    pub(crate) fn notify_lifecycle(&self, event: impl FnOnce(&dyn Lifecycle)) {
        let run = || Ok(self.core.fs.lifecycle().map(event));
        // The result does not matter.
        let _ = catch_panic(run);
    }

    /// Releases cached data here and in the file system.
    pub(crate) fn release_memory(&self) {
        self.names.clear();
        self.notify_lifecycle(|lifecycle| lifecycle.memory_pressure());
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        &self.core.recorder
    }

    /// The statistics so far, with the number of cached names and of users as gauges, and the
    /// figures of the file system.
    pub fn statistics(&self) -> StatsSnapshot {
        let mut snapshot = self.core.recorder.snapshot();
        snapshot.gauges.insert("names_cached".to_owned(), self.names.len() as u64);
        let users = self.users.load(Ordering::Relaxed) as u64;
        snapshot.gauges.insert("users".to_owned(), users);
        snapshot.with_figures(&*self.core.fs)
    }

    /// The capabilities that the file system declared.
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// True if the mount is read-only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// `st_dev` of all its files: different for each mount, with a major number of no driver.
    pub fn device(&self) -> u64 {
        rustix::fs::makedev(0xdef, self.id)
    }

    /// The target of the mount as text: a path, or a name with its colon.
    pub fn target(&self) -> Vec<u8> {
        self.spot.target()
    }

    /// True if the file system takes data operations only by `submit`.
    #[inline]
    pub(crate) fn requires_submit(&self) -> bool {
        self.caps.submits && self.lacks_calls.load(Ordering::Relaxed)
    }

    /// True if closing a file may release locks that the file system keeps.
    pub(crate) fn may_hold_locks(&self) -> bool {
        self.has_locks() && self.has_locked.load(Ordering::Relaxed)
    }

    /// True if the file system implements locks itself.
    pub(crate) fn has_locks(&self) -> bool {
        self.caps.locks != LockSupport::Frontend
    }

    /// The moment before a call whose answer is an entry.
    pub(crate) fn current_moment(&self) -> CallMoment {
        self.core.fresh.current_moment()
    }

    /// Returns the node of an entry that the file system returned to a call after `moment`, and
    /// takes over its lookup count.
    pub(crate) fn adopt(&self, entry: &Entry, moment: CallMoment) -> Arc<CachedInode> {
        let node = self.core.node(entry.ino, entry.attr.kind, 1);
        node.keep_attr(&entry.attr, node.version_at(moment));
        node
    }

    /// Looks up a name, in the cache or the file system. Fails with `ENOENT`.
    pub(crate) fn lookup(
        &self,
        dir: &CachedInode,
        name: Name<'_>,
        who: &TaskCredentials,
    ) -> Result<Arc<CachedInode>> {
        self.look_up(dir, name, who).map(|(node, _)| node)
    }

    /// Like [`lookup`](ClientMount::lookup), with the attributes if the file system was called.
    pub(crate) fn look_up(
        &self,
        dir: &CachedInode,
        name: Name<'_>,
        who: &TaskCredentials,
    ) -> Result<(Arc<CachedInode>, Option<Attr>)> {
        self.look_up_to_open(dir, name, who, None).map(|(node, attr, _)| (node, attr))
    }

    /// Like [`look_up`](ClientMount::look_up). With `open`, the file system may have opened the
    /// file.
    pub(crate) fn look_up_to_open(
        &self,
        dir: &CachedInode,
        name: Name<'_>,
        who: &TaskCredentials,
        open: Option<OpenArgs>,
    ) -> Result<(Arc<CachedInode>, Option<Attr>, Option<OpenReply>)> {
        let bytes = name.as_bytes();
        match self.names.get(dir.ino(), bytes) {
            Some(CachedLookup::Node(node)) => return Ok((node, None, None)),
            Some(CachedLookup::Missing) => return Err(Errno::ENOENT),
            None => {}
        }
        let ticket = self.names.ticket(dir.ino(), bytes);
        let cx = who.context(self.origin);
        let look_up = |fs: &dyn FileSystem| match open {
            Some(args) => match shortcuts_of(fs).lookup_to_open(&cx, dir.ino(), name, args) {
                Err(Errno::ENOSYS) => Ok((fs.lookup(&cx, dir.ino(), name)?, None)),
                found => found,
            },
            None => Ok((fs.lookup(&cx, dir.ino(), name)?, None)),
        };
        match self.call(Op::LOOKUP, look_up) {
            Ok((entry, opened)) => {
                let node = self.adopt(&entry, ticket.moment);
                let place = (dir.ino(), bytes);
                if let Some(lasts) = self.name_lifetime(ticket.moment, place, &entry) {
                    if !self.has_cacheable_names.load(Ordering::Relaxed) {
                        self.has_cacheable_names.store(true, Ordering::Relaxed);
                    }
                    self.names.keep(ticket, place, Some(&node), lasts);
                }
                Ok((node, Some(entry.attr), opened))
            }
            Err(errno) => {
                if errno == Errno::ENOENT {
                    self.keep_missing(ticket, (dir.ino(), bytes));
                }
                Err(errno)
            }
        }
    }

    /// The attributes of a name that leads to no mount, without a lookup. `None` where it has to be
    /// looked up. Fails with `ENOENT`.
    pub(crate) fn peek(
        &self,
        dir: &CachedInode,
        name: Name<'_>,
        who: &TaskCredentials,
    ) -> Result<Option<Attr>> {
        if self.lacks_peek.load(Ordering::Relaxed) || self.keeps_names() {
            return Ok(None);
        }
        let cx = who.context(self.origin);
        match self.call(Op::LOOKUP, |fs| shortcuts_of(fs).peek(&cx, dir.ino(), name)) {
            Err(Errno::ENOSYS) => {
                self.lacks_peek.store(true, Ordering::Relaxed);
                Ok(None)
            }
            // A lookup decides.
            Err(Errno::ESTALE) => Ok(None),
            result => result.map(Some),
        }
    }

    /// True if attributes in the answers of the file system may be kept.
    pub(crate) fn keeps_answers(&self) -> bool {
        self.core.fresh.is_versioned()
    }

    /// True if a name need not be looked up before it is made or removed: the file system checks
    /// it, and nothing about the name is cached.
    pub(crate) fn decides_on_names(&self) -> bool {
        self.caps.decides_on_names && !self.names.is_off() && !self.keeps_names()
    }

    /// True if a name need not be looked up before it is removed, because versions invalidate
    /// cached data about the name, or nothing is cached.
    pub(crate) fn removes_unseen(&self) -> bool {
        let is_bare = self.covered.load(Ordering::Relaxed) == 0;
        self.decides_on_names()
            || self.caps.decides_on_names && self.core.fresh.is_versioned() && is_bare
    }

    /// True if data about a name may be cached, or if another mount may cover it.
    fn keeps_names(&self) -> bool {
        self.has_cacheable_names.load(Ordering::Relaxed)
            || self.core.fresh.is_versioned()
            || self.covered.load(Ordering::Relaxed) > 0
    }

    /// Returns the lifetime of the name of an entry. A name that is cached keeps the inode at the
    /// file system, also after its removal by others. So the name of a file with data is cached for
    /// a limited time.
    fn name_lifetime(
        &self,
        moment: CallMoment,
        place: (Ino, &[u8]),
        entry: &Entry,
    ) -> Option<AnswerValidity<u64>> {
        let has_data = entry.attr.kind == defuse_fs::FileKind::Regular;
        let moment = if has_data { moment.drop_version() } else { moment };
        self.core.fresh.name(moment, place, entry.valid_for)
    }

    fn keep_missing(&self, ticket: LookupTicket, place: (Ino, &[u8])) {
        let valid = match self.caps.negative_lifetime.is_zero() {
            true => Duration::ZERO,
            false => {
                catch_panic(|| Ok(self.core.fs.negative_lifetime(self.origin))).unwrap_or_default()
            }
        };
        if let Some(lasts) = self.core.fresh.name(ticket.moment, place, valid) {
            self.names.keep(ticket, place, None, lasts);
        }
    }

    /// Looks up a name that leads on, like [`look_up`](ClientMount::look_up). The directory may be
    /// one that a walk has passed lately. The last value is the time until which the directory
    /// holds.
    pub(crate) fn pass(
        &self,
        dir: &CachedInode,
        name: Name<'_>,
        who: &TaskCredentials,
    ) -> Result<(Arc<CachedInode>, ReachedAttributes, u64)> {
        let (passed, place) = (&self.names.passed, (dir.ino(), name.as_bytes()));
        if self.core.fresh.is_here()
            && let Some(PrefixDirectory { node, attr, until }) = passed.get(place.0, place.1)
        {
            return Ok((
                node,
                attr.map_or(ReachedAttributes::Nothing, ReachedAttributes::Lately),
                until,
            ));
        }
        let changes = passed.changes();
        let (node, attr) = self.look_up(dir, name, who)?;
        let keeps = node.is_dir() && !self.names.is_off();
        let until = if keeps { passed.keep(place, &node, attr, changes) } else { 0 };
        Ok((node, attr.map_or(ReachedAttributes::Nothing, ReachedAttributes::Now), until))
    }

    /// Begins a walk in `dir` whose end may be kept: by names alone, on this mount.
    pub(crate) fn begin(&self, dir: &CachedInode) -> Option<WalkBegin> {
        let is_bare = self.covered.load(Ordering::Relaxed) == 0;
        let may_keep = is_bare && !self.names.is_off() && self.core.fresh.is_here();
        if may_keep { self.names.passed.begin(dir.ino()) } else { None }
    }

    /// The directories that walks have passed.
    pub(crate) fn prefix_cache(&self) -> &PrefixCache {
        &self.names.passed
    }

    /// Records a change, after it, by which a path may lead to another directory, or others may
    /// search it.
    pub(crate) fn record_path_change(&self) {
        self.names.passed.count_change();
    }

    /// Drops all cached names.
    pub(crate) fn forget_names(&self) {
        self.names.clear();
    }

    /// The parent of a directory. `None` at the root.
    pub(crate) fn parent(
        &self,
        dir: &CachedInode,
        who: &TaskCredentials,
    ) -> Result<Option<Arc<CachedInode>>> {
        if dir.ino() == Ino::ROOT {
            return Ok(None);
        }
        let (cx, moment) = (who.context(self.origin), self.current_moment());
        let entry = self.call(Op::LOOKUP, |fs| fs.lookup_parent(&cx, dir.ino()))?;
        if entry.ino == Ino::ROOT {
            return Ok(Some(Arc::clone(&self.root)));
        }
        Ok(Some(self.adopt(&entry, moment)))
    }

    /// Begins a change of `name` in `dir`, before the call of the file system: until the value is
    /// dropped, no answer about it is cached.
    pub(crate) fn change_name(&self, dir: &CachedInode, name: &[u8]) -> Option<NameChange<'_>> {
        self.names.change(dir.ino(), name)
    }

    /// Invalidates the caches for a change of `name` in `dir` that happens now or has just
    /// happened.
    pub(crate) fn record_name_change(&self, dir: &CachedInode, name: &[u8]) {
        self.names.remove(dir.ino(), name);
        dir.invalidate_names();
    }

    /// Caches the name and the attributes of a new inode, whose creation began after `moment`.
    pub(crate) fn name_made(
        &self,
        dir: &CachedInode,
        name: &[u8],
        (entry, moment): (&Entry, CallMoment),
    ) -> Arc<CachedInode> {
        let moment = self.core.fresh.skip_own_change(moment);
        let node = self.adopt(entry, moment);
        self.record_name_change(dir, name);
        node
    }

    /// Attributes for a permission check, from the cache while they are valid. Size, links and
    /// times may be outdated.
    pub(crate) fn attr(&self, node: &CachedInode, who: &TaskCredentials) -> Result<Attr> {
        self.attr_of(node, None, who)
    }

    /// Like [`attr`](ClientMount::attr), by an open file of the inode.
    pub(crate) fn attr_of(
        &self,
        node: &CachedInode,
        fh: Option<Fh>,
        who: &TaskCredentials,
    ) -> Result<Attr> {
        match node.find_cached_rights() {
            Some(attr) => Ok(attr),
            None => self.fetch_attr(node, fh, who),
        }
    }

    /// The current attributes, from the file system.
    pub(crate) fn fetch_attr(
        &self,
        node: &CachedInode,
        fh: Option<Fh>,
        who: &TaskCredentials,
    ) -> Result<Attr> {
        let version = node.version();
        let cx = who.context(self.origin);
        let attr = self.call(Op::GETATTR, |fs| fs.getattr(&cx, node.ino(), fh))?;
        node.keep_attr(&attr, version);
        Ok(attr)
    }

    /// Calls `decide` with the ACL of `node`. Returns `None` if it has none.
    pub(crate) fn with_acl<T>(
        &self,
        node: &CachedInode,
        who: &TaskCredentials,
        mut decide: impl FnMut(&[u8]) -> T,
    ) -> Result<Option<T>> {
        if let Some(cached) = node.with_cached_acl(&mut decide) {
            return Ok(cached);
        }
        let version = node.version();
        let acl = self.fetch_acl(node.ino(), who)?;
        let decided = acl.as_deref().map(decide);
        if let Some(attr) = node.find_cached_rights() {
            node.keep_acl(acl, version, &attr);
        }
        Ok(decided)
    }

    /// Like [`with_acl`](ClientMount::with_acl), for an inode without a node.
    pub(crate) fn with_fresh_acl<T>(
        &self,
        ino: Ino,
        who: &TaskCredentials,
        decide: impl FnMut(&[u8]) -> T,
    ) -> Result<Option<T>> {
        Ok(self.fetch_acl(ino, who)?.as_deref().map(decide))
    }

    /// The access ACL of an inode, from the file system.
    fn fetch_acl(&self, ino: Ino, who: &TaskCredentials) -> Result<Option<Box<[u8]>>> {
        const ROOM: usize = 64 << 10;
        let cx = who.context(self.origin);
        let name = XattrName::new(b"system.posix_acl_access")?;
        match self.call(Op::GETXATTR, |fs| fs.getxattr(&cx, ino, name, ROOM)) {
            Ok(Xattr::Value(list)) => Ok(Some(list.into_boxed_slice())),
            Ok(Xattr::Size(_)) => Err(Errno::EIO),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Invalidates the attributes that the node of an inode has cached, if it has a node.
    pub(crate) fn invalidate_node(&self, ino: Ino) {
        if let Some(node) = self.core.find(ino) {
            node.invalidate();
        }
    }
}

impl Drop for ClientMount {
    fn drop(&mut self) {
        self.names.clear();
        let durable = catch_panic(|| self.core.fs.detach(self.origin));
        // Only this end of the mount sets it.
        let _ = self.durable.set(durable);
    }
}

impl std::fmt::Debug for ClientMount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let target = String::from_utf8_lossy(&self.target()).into_owned();
        f.debug_struct("Mount").field("target", &target).field("source", &self.source).finish()
    }
}

/// Calls `call`; a panic in it becomes `EIO`.
#[inline]
pub(crate) fn catch_panic<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Errno::EIO))
}

/// Lets a file system invalidate the caches of its mount. It holds weak references, so that a file
/// system that keeps it does not keep itself alive.
struct CacheNotify {
    names: Weak<DentryCache>,
    core: Weak<MountCore>,
}

impl CacheNotify {
    fn names(&self) -> Result<Arc<DentryCache>> {
        self.names.upgrade().ok_or(Errno::ENOTCONN)
    }

    fn core(&self) -> Result<Arc<MountCore>> {
        self.core.upgrade().ok_or(Errno::ENOTCONN)
    }

    fn invalidate(&self, ino: Ino) -> Result<()> {
        let core = self.core()?;
        // Counted before the search for the node: the reply to a lookup that creates a node
        // meanwhile is then not cached.
        core.fresh.record_notification();
        core.find(ino).ok_or(Errno::ENOENT)?.invalidate_by_others();
        Ok(())
    }
}

impl Notify for CacheNotify {
    fn invalidate_inode(&self, ino: Ino, _: Option<(u64, u64)>) -> Result<()> {
        self.invalidate(ino)
    }

    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, _: bool) -> Result<()> {
        self.names()?.remove(parent, name.as_bytes());
        Ok(())
    }

    fn notify_delete(&self, parent: Ino, child: Ino, name: Name<'_>) -> Result<()> {
        self.names()?.remove(parent, name.as_bytes());
        for ino in [parent, child] {
            // An inode without a node has nothing cached.
            let _ = self.invalidate(ino);
        }
        Ok(())
    }

    defuse_fs::caches_no_data!();

    /// [`DirectClient::poll`](crate::DirectClient::poll) does not wait, so there is no waiter to
    /// wake.
    fn poll_wake(&self, _: PollHandle) -> Result<()> {
        Ok(())
    }

    fn increment_epoch(&self) -> Result<()> {
        let core = self.core()?;
        core.fresh.record_notification();
        core.fresh.increment_epoch();
        self.names()?.clear();
        Ok(())
    }

    /// Names have tickets and attributes have versions from before their request, so that answers
    /// in progress are not cached.
    fn drops_at_once(&self) -> bool {
        true
    }

    fn prune(&self, inodes: &[Ino]) -> Result<()> {
        self.names()?.prune(inodes);
        Ok(())
    }

    fn versions(&self, versions: Arc<dyn Versions>) {
        if let Some(core) = self.core.upgrade() {
            core.fresh.set(versions);
        }
    }

    /// The client writes nothing back, and drops attributes at once.
    fn recall(&self, ino: Ino, _: Duration, done: RecallCallback) {
        done(self.invalidate_inode(ino, None));
    }
}
