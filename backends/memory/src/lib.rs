//! A file system in memory, like tmpfs.
//!
//! It is a complete [`FileSystem`]. Its inodes, names and pages are on the heap of this process and
//! are lost when the process exits. It never exceeds its limits on bytes and inodes. An inode's
//! space is freed with its last name, lookup count and open file.
//!
//! It checks no permission bits, which is the task of the frontend. The handle of an open file
//! leads reads and writes to the inode without a search (`handles.rs`); a directory's has the end
//! of the listing. It stores nothing on disk. The limit in bytes counts the pages of files. Names,
//! symbolic links, extended attributes and ACLs count as one page for every 4096 bytes together.
//!
//! The access time follows the rule of the mount (by default `relatime`), and `O_NOATIME` is
//! honoured. If no caller has read a file's attributes since the previous write, the next write
//! uses the time of the last kernel tick; see `clock.rs`.
//!
//! Several frontends may be attached at once. Each may cache names and attributes, and drops what
//! another one changes before that change is answered ([`Frontends`]). Data is not cached then. A
//! frontend that cannot drop names at once, such as a socket or a kernel before 6.16, caches
//! nothing; if it is the first one, that kernel keeps the names that it has cached before. Every
//! change goes through `MemoryFileSystem::change_names` or `MemoryFileSystem::change_attributes`,
//! which notify the other frontends when it has released its locks.
//!
//! # Lock order
//!
//! 1. `MemoryFileSystem::rename`, for a rename between two directories; or the handle of an open
//!    file.
//! 2. `DirBody::names`: an ancestor before its descendant. Two directories of which neither is an
//!    ancestor of the other are locked by inode number, and only under 1.
//! 3. `InodeContent::File`, the data of files: two of them by inode number.
//! 4. `MemoryInode::meta`, one at a time. For a directory it may be held while no other `meta` is
//!    held.
//! 5. The references of an inode.
//! 6. The leaves, one at a time: shards of the table, unused handles, free pages, locks, ends of
//!    listings, the space of names and attributes.
//!
//! No operation holds 2 while it takes 3, so that a long write never delays a lookup.
//!
//! *Invariant*: an inode is in the table exactly as long as it has a reference (a name, a lookup
//! count or an open file). *Invariant*: the bytes of a page past the end of its file are zero.

#![forbid(unsafe_code)]

mod clock;
mod data;
mod dir;
mod files;
mod handles;
mod inode;
mod kind;
mod listings;
mod names;
mod pages;
mod rename;
mod space;
mod sync;
mod table;
mod xattr;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use defuse_fs::posix::{self, AccessTimeRule, clears_mark, drop_set_id};
use defuse_fs::{
    Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, Fallocate, Fh, Figure, File, FileKind,
    FileSystem, Frontends, Ino, Lifecycle, Lock, LockKind, LockOwner, LockRequest, LockSupport,
    LockWait, Name, NewNode, NormalPath, Notify, OpenArgs, OpenFlags, OpenReply, Origin,
    PathResolution, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags,
    Shortcuts, StatFs, Timestamp, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
};

pub use kind::KIND;

use inode::{DirBody, FixedAttributes, InodeContent, InodeMeta, InodeRefs, MemoryInode};
use pages::{PAGE, PagePool};
use sync::{SpaceQuota, read};

/// Only this file system changes its files, so answers stay valid until it sends an invalidation.
const VALID_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Free space in statfs if there is no limit: 16 TiB, because some programs check for free space
/// before they write.
const UNLIMITED_PAGES: u64 = 1 << 32;
const UNLIMITED_INODES: u64 = 1 << 32;

/// Options of a [`MemoryFileSystem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Maximum number of bytes that files, names and attributes may use, rounded down to pages of
    /// 4096 bytes. `None` for the machine's memory as the only limit.
    pub size: Option<u64>,
    /// Maximum number of inodes, including the root. `None` for no limit.
    pub inodes: Option<u64>,
    /// Bytes of unused pages to keep. Writing to such a page takes a tenth of the time of a page
    /// that the kernel must supply.
    pub pool: u64,
    /// Permission bits of the root directory, 0 to 0o7777.
    pub root_perm: u32,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
    /// The frontend has a write-back cache, and dates changes by the last tick of the kernel's
    /// clock.
    pub writeback: bool,
    /// The rule by which reading updates access times.
    pub access_times: AccessTimeRule,
}

impl Default for MemoryOptions {
    /// The defaults of tmpfs(5): half of the memory of the machine, or of the limit of the control
    /// group if that is less, one inode for every two pages of that memory, and a root directory
    /// like `/tmp`.
    fn default() -> Self {
        let memory = defuse_hugepages::memory_limit();
        MemoryOptions {
            size: Some(memory / 2),
            inodes: Some(memory / PAGE as u64 / 2),
            pool: (memory / 16).min(64 << 20),
            root_perm: 0o1777,
            root_uid: 0,
            root_gid: 0,
            writeback: false,
            access_times: AccessTimeRule::Relative,
        }
    }
}

/// A file system in memory.
pub struct MemoryFileSystem {
    table: table::MemoryInodeTable,
    handles: handles::HandleTable,
    pool: Arc<PagePool>,
    small: Arc<space::SmallObjects>,
    inodes: Arc<SpaceQuota>,
    locks: defuse_fs::locks::LockQueue,
    listings: listings::OpenListings,
    /// Held while a name moves between directories; see the lock order.
    rename: Mutex<()>,
    next_ino: AtomicU64,
    frontends: Frontends,
    clock: clock::DateClock,
    access_times: AccessTimeRule,
}

impl MemoryFileSystem {
    /// Creates an empty file system.
    ///
    /// # Panics
    ///
    /// Panics if `options.inodes` is 0, because the root needs an inode.
    pub fn new(options: MemoryOptions) -> Self {
        let pages = options.size.map(|size| size / PAGE as u64);
        let pool = Arc::new(PagePool::new(pages, options.pool as usize / PAGE));
        let memory = MemoryFileSystem {
            table: table::MemoryInodeTable::new(),
            handles: handles::HandleTable::new(),
            small: Arc::new(space::SmallObjects::new(Arc::clone(&pool))),
            pool,
            inodes: Arc::new(SpaceQuota::new(options.inodes)),
            locks: defuse_fs::locks::LockQueue::default(),
            listings: listings::OpenListings::default(),
            rename: Mutex::new(()),
            next_ino: AtomicU64::new(Ino::ROOT.0 + 1),
            frontends: Frontends::new(VALID_FOR),
            clock: clock::DateClock::new(options.writeback),
            access_times: options.access_times,
        };
        assert!(memory.inodes.take(1), "the root directory needs an inode");
        let parent = AtomicU64::new(Ino::ROOT.0);
        let names = RwLock::new(dir::DirEntries::new(&memory.small));
        memory.table.insert(Arc::new(MemoryInode::new(
            Ino::ROOT.0,
            FixedAttributes { kind: FileKind::Directory, rdev: 0 },
            root_meta(&options, memory.clock.exact(), space::SpaceCharge::new(&memory.small)),
            InodeContent::Dir(DirBody { names, parent }),
            InodeRefs { lookups: 1, opens: 0, names: 1 },
            Arc::clone(&memory.inodes),
        )));
        memory
    }

    /// Makes a change of names by `cx`, and notifies the other frontends. `change` also returns the
    /// inodes whose attributes it has changed.
    fn change_names<T, const N: usize>(
        &self,
        cx: &Context<'_>,
        change: impl FnOnce() -> Result<(T, [Ino; N])>,
    ) -> Result<T> {
        let (answer, inodes) = change()?;
        self.frontends.notify_names(cx.origin, &inodes);
        Ok(answer)
    }

    /// Makes a change of the attributes of `ino` by `cx`, and notifies the other frontends. A
    /// change that fails may have changed something. Before a change that `kills` the set-id bits:
    /// clears set-group-id where that depends on the groups of the caller.
    fn clear_mark(&self, cx: &Context<'_>, ino: Ino, kills: bool) {
        if !kills {
            return;
        }
        let Ok(inode) = self.inode(ino) else { return };
        let (perm, gid) = {
            let meta = inode.meta();
            (meta.perm, meta.gid)
        };
        if !inode.is_dir() && clears_mark(cx, perm, gid) {
            let mut meta = inode.change_meta();
            meta.perm = drop_set_id(meta.perm, false);
        }
    }

    fn change_attributes<T>(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let answer = change();
        self.frontends.notify_attributes(cx.origin, &[ino]);
        answer
    }

    /// Reads from `ino` for `cx`. `read` also returns true if that has changed the access time.
    fn access<T>(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        read: impl FnOnce() -> Result<(T, bool)>,
    ) -> Result<T> {
        let (answer, accessed) = read()?;
        if accessed {
            self.frontends.notify_attributes(cx.origin, &[ino]);
        }
        Ok(answer)
    }
}

fn root_meta(options: &MemoryOptions, now: Timestamp, charge: space::SpaceCharge) -> InodeMeta {
    InodeMeta {
        perm: options.root_perm & 0o7777,
        uid: options.root_uid,
        gid: options.root_gid,
        nlink: 2,
        atime: now,
        mtime: now,
        ctime: now,
        linkable: false,
        xattrs: xattr::XattrMap::default(),
        access_acl: None,
        default_acl: None,
        charge,
    }
}

impl Lifecycle for MemoryFileSystem {
    /// Returns the pages that no file uses to the allocator.
    fn memory_pressure(&self) {
        self.pool.release_free();
    }
}

impl FileSystem for MemoryFileSystem {
    fn caps(&self) -> Caps {
        Caps {
            blocking: false,
            exclusive: true,
            readdir_entries: true,
            posix_acl: true,
            kill_suidgid: true,
            open_truncates: true,
            locks: LockSupport::Either,
            security_labels: true,
            negative_lifetime: VALID_FOR,
            decides_on_names: true,
            delays_changes: false,
            ..Caps::default()
        }
    }

    fn negative_lifetime(&self, origin: Origin) -> Duration {
        self.frontends.negative_lifetime(origin)
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        self.frontends.attach(origin, notify, || self.table.list_known());
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.frontends.detach(origin);
        Ok(())
    }

    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        Some(self)
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.lookup(self.frontends.name_lifetime(cx.origin), parent, name)
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        self.lookup_parent(self.frontends.name_lifetime(cx.origin), ino)
    }

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        // The root keeps its lookup count of one.
        if ino == Ino::ROOT {
            return;
        }
        if let Ok(inode) = self.inode(ino) {
            let mut is_last = false;
            self.drop_refs(&inode, |refs| {
                refs.lookups = refs.lookups.saturating_sub(lookups);
                is_last = refs.lookups == 0;
            });
            if is_last {
                self.frontends.record_forget(ino);
            }
        }
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        match node.kind {
            FileKind::Directory => Err(Errno::EPERM),
            _ => self.make(cx, parent, name, node, None),
        }
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let node = NewNode { kind: FileKind::Directory, rdev: 0, ..*node };
        self.make(cx, parent, name, &node, None)
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let node = NewNode { kind: FileKind::Symlink, perm: 0o777, rdev: 0, ..*node };
        match target.len() {
            0 => Err(Errno::ENOENT),
            1..=4095 => self.make(cx, parent, name, &node, Some(target)),
            _ => Err(Errno::ENAMETOOLONG),
        }
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let lifetime = self.frontends.name_lifetime(cx.origin);
        self.change_names(cx, || Ok((self.link(lifetime, ino, parent, name)?, [parent, ino])))
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.change_names(cx, || Ok(((), [parent, self.unlink(parent, name)?])))
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.change_names(cx, || Ok(((), [parent, self.rmdir(parent, name)?])))
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        self.change_names(cx, || {
            let (source, target) = self.rename(cx, from, to, flags)?;
            Ok(((), [from.0, to.0, source, target]))
        })
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.access(cx, ino, || self.readlink(ino))
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        let valid_for = self.frontends.attribute_lifetime(cx.origin, ino);
        Ok(self.attr(&*self.inode(ino)?, valid_for))
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        posix::check_owner_change(cx, &self.attr(&*self.inode(ino)?, Duration::ZERO), fh, set)?;
        self.clear_mark(cx, ino, set.kill_suidgid || set.uid.or(set.gid).is_some());
        self.change_attributes(cx, ino, || self.setattr(ino, set))
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        posix::check_owner_xattr(cx, &self.attr(&*self.inode(ino)?, Duration::ZERO), name)?;
        self.change_attributes(cx, ino, || self.setxattr(ino, name, value, flags))
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        if name.is_acl() {
            // The kernel caches it with the attributes.
            self.frontends.attribute_lifetime(cx.origin, ino);
        }
        self.getxattr(ino, name, room)
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.listxattr(cx, ino, room)
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        posix::check_owner_xattr(cx, &self.attr(&*self.inode(ino)?, Duration::ZERO), name)?;
        self.change_attributes(cx, ino, || self.removexattr(ino, name))
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        self.clear_mark(cx, ino, args.kill_suidgid && args.flags.has(OpenFlags::TRUNC));
        self.open_inode(cx, ino, args, false)
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        _: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let node = NewNode { kind: FileKind::Regular, rdev: 0, ..*node };
        let lifetime = self.frontends.name_lifetime(cx.origin);
        self.change_names(cx, || Ok((self.create(cx, lifetime, parent, name, &node)?, [parent])))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let node = NewNode { kind: FileKind::Regular, rdev: 0, ..*node };
        self.tmpfile(cx, parent, &node, args)
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        self.access(cx, file.ino, || self.read(file, args, out))
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.clear_mark(cx, file.ino, args.kill_suidgid);
        self.change_attributes(cx, file.ino, || self.write(file, args, data))
    }

    fn flush(&self, _: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        self.locks.drop_owner(file.ino.0, LockKind::Posix, owner);
        Ok(())
    }

    fn release(&self, _: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        if let Some(owner) = args.flock_owner {
            self.locks.drop_owner(file.ino.0, LockKind::Flock, owner);
        }
        let inode = self.handles.close(file).map_or_else(|| self.inode(file.ino), Ok)?;
        self.close(&inode);
        Ok(())
    }

    /// Nothing is durable, so there is nothing to wait for.
    fn fsync(&self, _: &Context<'_>, file: File, _: bool) -> Result<()> {
        self.inode(file.ino).map(drop)
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        self.clear_mark(cx, file.ino, true);
        self.change_attributes(cx, file.ino, || self.fallocate(cx, file, range))
    }

    fn lseek(&self, _: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        read(self.inode(file.ino)?.data()?).seek(offset, whence)
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        self.clear_mark(cx, copy.dst.ino, true);
        self.change_attributes(cx, copy.dst.ino, || self.copy_file_range(cx, copy))
    }

    fn getlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        self.locks.conflict(self.inode(file.ino)?.ino, request)
    }

    fn setlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        self.locks.set(self.inode(file.ino)?.ino, request)
    }

    fn setlkw(&self, wait: LockWait) {
        match self.inode(wait.file().ino) {
            Ok(inode) => self.locks.wait(inode.ino, wait),
            Err(errno) => wait.finish(Err(errno)),
        }
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        let opened = self.open_inode(cx, ino, OpenArgs { flags, kill_suidgid: false }, true)?;
        Ok(OpenReply { fh: self.listings.open(), ..opened })
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let frontends = &self.frontends;
        let lifetime = frontends.lists_entries().then(|| frontends.name_lifetime(cx.origin));
        self.access(cx, dir.ino, || self.readdir(lifetime, dir, from, out))
    }

    fn releasedir(&self, _: &Context<'_>, dir: File) -> Result<()> {
        self.listings.close(dir.fh);
        self.close(&*self.inode(dir.ino)?);
        Ok(())
    }

    fn fsyncdir(&self, _: &Context<'_>, dir: File, _: bool) -> Result<()> {
        self.inode(dir.ino)?.dir().map(drop)
    }

    fn statfs(&self, _: &Context<'_>, _: Ino) -> Result<StatFs> {
        let used = self.pool.quota.used_count();
        let blocks = self.pool.quota.limit().unwrap_or(used + UNLIMITED_PAGES);
        let inodes = self.inodes.used_count();
        let files = self.inodes.limit().unwrap_or(inodes + UNLIMITED_INODES);
        // The counters change while they are read, so the difference may be negative.
        let free = blocks.saturating_sub(used);
        Ok(StatFs {
            blocks,
            blocks_free: free,
            blocks_available: free,
            files,
            files_free: files.saturating_sub(inodes),
            bsize: PAGE as u32,
            frsize: PAGE as u32,
            name_max: defuse_fs::NAME_MAX as u32,
        })
    }

    fn figures(&self) -> Vec<Figure> {
        let pages = |name, pages: u64| Figure::bytes(name, pages * PAGE as u64);
        let mut figures = vec![
            Figure::count("inodes", self.inodes.used_count()),
            pages("space_used", self.pool.quota.used_count()),
            // Freed pages that wait for the next use.
            pages("memory_kept", self.pool.free_pages() as u64),
        ];
        figures.extend(self.inodes.limit().map(|limit| Figure::count("inodes_limit", limit)));
        figures.extend(self.pool.quota.limit().map(|limit| pages("space_limit", limit)));
        figures
    }

    fn syncfs(&self, _: &Context<'_>) -> Result<()> {
        Ok(())
    }
}

impl Shortcuts for MemoryFileSystem {
    fn resolve(&self, _: &Context<'_>, from: Ino, path: NormalPath<'_>) -> Result<PathResolution> {
        self.resolve(from, path)
    }
}
