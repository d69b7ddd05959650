//! A layer that shows clients what has changed, by versions in memory that they read.
//!
//! Each change through this layer begins and ends in the versions of all items that it changes,
//! before its reply. So a client that finds a version unchanged may use its cached data: no client
//! has got a newer state.
//!
//! Deliberately absent: leases. A change waits for no client, however many know the name, and a
//! client that is stopped or hostile delays no other client. A lease would have to be recalled from
//! each.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_connection::{NameSource, PeerCredentials, VersionSource};
use defuse_fs::{
    AccessMode, Attr, Context, CopyRange, DirBuf, Entry, Errno, Fallocate, Fh, Figure, File,
    FileSystem, Ino, IoctlArgs, IoctlReply, Name, NewNode, OpenArgs, OpenFlags, OpenReply,
    PathResolution, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags,
    Shortcuts, Timestamp, WriteArgs, WriteBuf, XattrName, delegate, shortcuts_of,
};
use defuse_ring::InodeVersionSet;
use defuse_ring::versions::{VersionWriter, VersionedItem};

use crate::named::NameMemories;

/// Locks of names. Two names may share one.
const LOCKS: usize = 64;
/// The maximum number of inodes whose attributes are published later.
const UNTOLD: usize = 4096;

/// A file system whose changes show in versions.
pub struct VersionedFileSystem {
    inner: Arc<dyn FileSystem>,
    versions: Arc<VersionWriter>,
    name_memories: NameMemories,
    /// Inodes of which a read does not change the access time, for less than a day.
    settled: InodeVersionSet,
    /// Inodes whose attributes are published when a changed open file is closed.
    untold: UnreportedInodes,
    /// Changes of one name take turns, so that a removal knows the inode that it removes.
    names: [Mutex<()>; LOCKS],
    unseen: Option<UnseenChanges>,
}

#[derive(Default)]
struct UnreportedInodes {
    inodes: Mutex<HashSet<Ino>>,
    /// The number of inodes, because most closes find none.
    count: AtomicUsize,
}

impl UnreportedInodes {
    fn lock(&self) -> MutexGuard<'_, HashSet<Ino>> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an inode. Returns false if there are too many.
    fn add(&self, ino: Ino) -> bool {
        let mut inodes = self.lock();
        let has_room = inodes.len() < UNTOLD || inodes.contains(&ino);
        if has_room {
            inodes.insert(ino);
            self.count.store(inodes.len(), Ordering::Relaxed);
        }
        has_room
    }

    fn take(&self, ino: Ino) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut inodes = self.lock();
        let was_there = inodes.remove(&ino);
        self.count.store(inodes.len(), Ordering::Relaxed);
        was_there
    }
}

/// True for inodes that others may change without this layer.
pub type UnseenChanges = Box<dyn Fn(Ino) -> bool + Send + Sync>;

impl std::fmt::Debug for VersionedFileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Versioned")
    }
}

impl VersionedFileSystem {
    /// Creates versions for `inner`. `None` if it may change without this layer
    /// (`Caps::exclusive`), or requires its operations to be submitted, or if there is no memory
    /// for the versions.
    pub fn wrap(inner: Arc<dyn FileSystem>) -> Option<Arc<VersionedFileSystem>> {
        VersionedFileSystem::wrap_except(inner, None)
    }

    /// Like [`wrap`](VersionedFileSystem::wrap), with inodes that others may change, about which
    /// clients cache nothing.
    pub fn wrap_except(
        inner: Arc<dyn FileSystem>,
        unseen: Option<UnseenChanges>,
    ) -> Option<Arc<VersionedFileSystem>> {
        let caps = inner.caps();
        if !caps.exclusive || caps.submits {
            return None;
        }
        let versions =
            VersionWriter::new().map_err(|error| log::warn!("no versions: {error}")).ok()?;
        let (versions, name_memories) = (Arc::new(versions), NameMemories::default());
        let names = std::array::from_fn(|_| Mutex::default());
        let (settled, untold) = (InodeVersionSet::default(), UnreportedInodes::default());
        Some(Arc::new(VersionedFileSystem {
            inner,
            versions,
            name_memories,
            settled,
            untold,
            names,
            unseen,
        }))
    }

    /// Makes a change of these items.
    fn change<T>(
        &self,
        things: &[VersionedItem<'_>],
        change: impl FnOnce(&dyn FileSystem) -> T,
    ) -> T {
        self.versions.begin(things.iter().copied());
        let _ended = VersionChangeGuard { versions: &self.versions, things };
        change(&*self.inner)
    }

    fn change_attributes<T>(&self, ino: Ino, change: impl FnOnce(&dyn FileSystem) -> T) -> T {
        self.change(&[VersionedItem::Attributes(ino.0)], change)
    }

    fn change_rights<T>(&self, ino: Ino, change: impl FnOnce(&dyn FileSystem) -> T) -> T {
        self.change(&[VersionedItem::Attributes(ino.0), VersionedItem::Rights(ino.0)], change)
    }

    /// Makes a name in `dir`.
    fn make<T>(&self, dir: Ino, name: Name<'_>, make: impl FnOnce(&dyn FileSystem) -> T) -> T {
        let _one = self.lock(dir, name);
        self.change(&[make_item(dir, name), VersionedItem::Attributes(dir.0)], make)
    }

    /// Removes a name in `dir`, and changes the inode with this name.
    fn remove<T>(
        &self,
        cx: &Context<'_>,
        dir: Ino,
        name: Name<'_>,
        remove: impl FnOnce(&dyn FileSystem) -> T,
    ) -> T {
        let _one = self.lock(dir, name);
        let found = self.item_of_name(cx, dir, name);
        self.change(&[make_item(dir, name), VersionedItem::Attributes(dir.0), found], remove)
    }

    /// The attributes of the inode that has a name; of no inode where there is none.
    fn item_of_name(&self, cx: &Context<'_>, dir: Ino, name: Name<'_>) -> VersionedItem<'static> {
        let ino = match shortcuts_of(&*self.inner).resolve(cx, dir, name.into()) {
            Ok(PathResolution::Inode { ino, .. }) => Some(ino),
            Ok(PathResolution::Missing { .. }) => None,
            Ok(PathResolution::Walk) | Err(_) => {
                self.inner.lookup(cx, dir, name).ok().map(|entry| {
                    self.inner.forget(entry.ino, 1);
                    entry.ino
                })
            }
        };
        VersionedItem::Attributes(ino.map_or(0, |ino| ino.0))
    }

    /// The version of the attributes with which a read does not change the access time. `None` if
    /// it does, or may.
    fn stable_version(&self, cx: &Context<'_>, ino: Ino) -> Option<u64> {
        let version = self.versions.version_of(VersionedItem::Attributes(ino.0))?;
        if !self.settled.has(ino.0, version) {
            let attr = self.inner.getattr(cx, ino, None).ok()?;
            if attr.read_is_due(Timestamp::now()) {
                return None;
            }
            self.settled.add(ino.0, version);
        }
        Some(version)
    }

    /// Publishes the attributes of an inode after a change, if clients got them before.
    fn publish_attributes(&self, cx: &Context<'_>, ino: Ino) {
        if self.name_memories.has_name_of(ino) {
            self.name_memories.publish_attributes(&self.versions, ino, (&*self.inner, cx));
        }
    }

    fn stripe_index(dir: Ino, name: Name<'_>) -> usize {
        let bytes = name.as_bytes().iter();
        bytes.fold(dir.0 as usize, |sum, &byte| sum.wrapping_mul(31) + usize::from(byte)) % LOCKS
    }

    fn lock(&self, dir: Ino, name: Name<'_>) -> MutexGuard<'_, ()> {
        self.lock_at(Self::stripe_index(dir, name))
    }

    fn lock_at(&self, at: usize) -> MutexGuard<'_, ()> {
        self.names[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn make_item<'a>(dir: Ino, name: Name<'a>) -> VersionedItem<'a> {
    VersionedItem::Name(dir.0, name.as_bytes())
}

/// Ends a change, also if it panics.
struct VersionChangeGuard<'a> {
    versions: &'a VersionWriter,
    things: &'a [VersionedItem<'a>],
}

impl Drop for VersionChangeGuard<'_> {
    fn drop(&mut self) {
        self.versions.end(self.things.iter().copied());
    }
}

impl VersionSource for VersionedFileSystem {
    fn versions(&self) -> Result<OwnedFd> {
        self.versions.reader().map_err(|error| Errno::from_raw(error.raw_os_error()))
    }

    fn covers(&self, ino: Ino) -> bool {
        !self.unseen.as_ref().is_some_and(|unseen| unseen(ino))
    }

    fn attributes(&self, ino: Ino) -> Option<u64> {
        self.versions.version_of(VersionedItem::Attributes(ino.0)).filter(|_| self.covers(ino))
    }

    fn record_mapping(&self, ino: Ino) {
        self.change_attributes(ino, |_| ());
    }

    fn names(&self, who: &PeerCredentials) -> Option<Arc<dyn NameSource>> {
        self.name_memories.memory_for(who, &self.versions).map(|name_memory| name_memory as _)
    }
}

impl FileSystem for VersionedFileSystem {
    delegate!(
        to inner, except figures, mknod, mkdir, symlink, link, unlink, rmdir, rename, setattr,
            setxattr, removexattr,
        open, create, read, write, release, readdir, fallocate, copy_file_range, ioctl
    );

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn figures(&self) -> Vec<Figure> {
        let mut figures = self.inner.figures();
        figures.push(Figure::count("versions_changes", self.versions.changes()).since_start());
        figures
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(parent, name, |fs| fs.mknod(cx, parent, name, node))
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(parent, name, |fs| fs.mkdir(cx, parent, name, node))
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(parent, name, |fs| fs.symlink(cx, parent, name, target, node))
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let _one = self.lock(parent, name);
        let things = [
            make_item(parent, name),
            VersionedItem::Attributes(parent.0),
            VersionedItem::Attributes(ino.0),
        ];
        self.change(&things, |fs| fs.link(cx, ino, parent, name))
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, parent, name, |fs| fs.unlink(cx, parent, name))
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, parent, name, |fs| fs.rmdir(cx, parent, name))
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let places = [Self::stripe_index(from.0, from.1), Self::stripe_index(to.0, to.1)];
        let (first, second) = (places[0].min(places[1]), places[0].max(places[1]));
        let _first = self.lock_at(first);
        let _second = (first != second).then(|| self.lock_at(second));
        let (moved, other) =
            (self.item_of_name(cx, from.0, from.1), self.item_of_name(cx, to.0, to.1));
        let dirs = [from.0, to.0].map(|dir| VersionedItem::Attributes(dir.0));
        let things =
            [make_item(from.0, from.1), make_item(to.0, to.1), dirs[0], dirs[1], moved, other];
        self.change(&things, |fs| fs.rename(cx, from, to, flags))
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        let SetAttr { perm, uid, gid, .. } = set;
        let outcome = match perm.or(*uid).or(*gid) {
            Some(_) => self.change_rights(ino, |fs| fs.setattr(cx, ino, fh, set)),
            None => self.change_attributes(ino, |fs| fs.setattr(cx, ino, fh, set)),
        };
        // A program that changes an open file often makes further changes to it, as tar does.
        let later = fh.is_some() && (!self.name_memories.has_name_of(ino) || self.untold.add(ino));
        if !later {
            self.publish_attributes(cx, ino);
        }
        outcome
    }

    /// An access list is among the attributes.
    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        self.change_rights(ino, |fs| fs.setxattr(cx, ino, name, value, flags))
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        self.change_rights(ino, |fs| fs.removexattr(cx, ino, name))
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        match args.flags.has(OpenFlags::TRUNC) {
            true => self.change_attributes(ino, |fs| fs.open(cx, ino, args)),
            false => self.inner.open(cx, ino, args),
        }
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        self.make(parent, name, |fs| fs.create(cx, parent, name, node, args))
    }

    /// A new access time does not show in the version: otherwise every client that has listed the
    /// directory would have to list it again.
    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let is_due = self.stable_version(cx, dir.ino).is_none();
        let outcome = self.inner.readdir(cx, dir, from, out);
        if is_due {
            self.publish_attributes(cx, dir.ino);
        }
        outcome
    }

    /// A file that was written probably stays as it is.
    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        let outcome = self.inner.release(cx, file, args);
        if self.untold.take(file.ino) || args.flags.access() != AccessMode::Read {
            self.publish_attributes(cx, file.ino);
        }
        outcome
    }

    /// The first read after a change shows in the versions, because it changes the access time.
    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        if args.flags.has(OpenFlags::NOATIME) {
            return self.inner.read(cx, file, args, out);
        }
        let Some(version) = self.stable_version(cx, file.ino) else {
            let outcome = self.change_attributes(file.ino, |fs| fs.read(cx, file, args, out));
            self.publish_attributes(cx, file.ino);
            return outcome;
        };
        let outcome = self.inner.read(cx, file, args, out);
        // A change in between has made an update of the access time necessary.
        if self.versions.version_of(VersionedItem::Attributes(file.ino.0)) != Some(version) {
            self.change_attributes(file.ino, |_| ());
        }
        outcome
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.change_attributes(file.ino, |fs| fs.write(cx, file, args, data))
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        self.change_attributes(file.ino, |fs| fs.fallocate(cx, file, range))
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let things = [copy.src.ino, copy.dst.ino].map(|ino| VersionedItem::Attributes(ino.0));
        self.change(&things, |fs| fs.copy_file_range(cx, copy))
    }

    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        self.change_rights(file.ino, |fs| fs.ioctl(cx, file, args))
    }
}

impl Shortcuts for VersionedFileSystem {
    delegate!(to inner, only resolve, peek);
}
