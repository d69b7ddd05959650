//! One inode: its type, attributes, contents and references.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_fs::posix::acl::Acl;
use defuse_fs::posix::{AccessTimeRule, drop_set_id};
use defuse_fs::{Errno, FileKind, Result, Timestamp};

use crate::data::PagedData;
use crate::dir::DirEntries;
use crate::space::SpaceCharge;
use crate::sync::{SpaceQuota, lock, read, write};
use crate::xattr::XattrMap;

/// Maximum number of links to an inode.
pub(crate) const LINK_MAX: u32 = i32::MAX as u32;

/// Set-user-id and set-group-id.
pub(crate) const SGID: u32 = 0o2000;

/// An inode. Immutable fields are public; the locks around the others are taken in the order that
/// the documentation of the crate gives.
pub(crate) struct MemoryInode {
    pub ino: u64,
    pub kind: FileKind,
    pub rdev: u64,
    pub btime: Timestamp,
    /// File size in bytes, outside of the lock, so that getattr does not wait for a write in
    /// progress.
    pub size: AtomicU64,
    /// Pages in use, outside of the lock for the same reason.
    pub pages: AtomicU64,
    meta: RwLock<InodeMeta>,
    /// The rule of `relatime` requires no new access time. Reads need no lock to know that. Set
    /// under a read lock of `meta`, and cleared under a write lock.
    atime_is_current: AtomicBool,
    /// The attributes were returned to a caller since the data last changed. Written under the lock
    /// of `meta`.
    pub seen: AtomicBool,
    pub body: InodeContent,
    refs: Mutex<InodeRefs>,
    quota: Arc<SpaceQuota>,
}

/// The contents of an inode, by its type.
pub(crate) enum InodeContent {
    File(RwLock<PagedData>),
    Dir(DirBody),
    /// The target of the link, and the space it uses.
    Symlink(Box<[u8]>, #[expect(dead_code, reason = "held until the link is dropped")] SpaceCharge),
    /// Devices, fifos and sockets have no contents.
    Special,
}

/// A directory: its entries, and the inode number of its parent.
pub(crate) struct DirBody {
    pub names: RwLock<DirEntries>,
    pub parent: AtomicU64,
}

/// The attributes that can change.
pub(crate) struct InodeMeta {
    pub perm: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    /// Created by `O_TMPFILE` without `O_EXCL`: link(2) may give it a first name.
    pub linkable: bool,
    pub xattrs: XattrMap,
    pub access_acl: Option<Acl>,
    pub default_acl: Option<Acl>,
    /// The space of extended attributes and ACLs.
    pub charge: SpaceCharge,
}

/// Reference counts. An inode is freed when all of them are 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InodeRefs {
    pub lookups: u64,
    pub opens: u64,
    pub names: u64,
}

impl InodeRefs {
    fn is_none(self) -> bool {
        self.lookups == 0 && self.opens == 0 && self.names == 0
    }
}

impl MemoryInode {
    /// Creates an inode that counts against `quota`. The caller has taken one from the quota.
    pub fn new(
        ino: u64,
        node: FixedAttributes,
        meta: InodeMeta,
        body: InodeContent,
        refs: InodeRefs,
        quota: Arc<SpaceQuota>,
    ) -> Self {
        let size = match &body {
            InodeContent::Symlink(target, _) => target.len() as u64,
            _ => 0,
        };
        MemoryInode {
            ino,
            kind: node.kind,
            rdev: node.rdev,
            btime: meta.ctime,
            size: AtomicU64::new(size),
            pages: AtomicU64::new(0),
            meta: RwLock::new(meta),
            atime_is_current: AtomicBool::new(false),
            seen: AtomicBool::new(false),
            body,
            refs: Mutex::new(refs),
            quota,
        }
    }

    /// The attributes.
    pub fn meta(&self) -> RwLockReadGuard<'_, InodeMeta> {
        read(&self.meta)
    }

    /// The attributes, to change them.
    pub fn change_meta(&self) -> RwLockWriteGuard<'_, InodeMeta> {
        let meta = write(&self.meta);
        // Another processor may read the flag: it is written only where it changes.
        if self.atime_is_current.load(Ordering::Relaxed) {
            self.atime_is_current.store(false, Ordering::Relaxed);
        }
        meta
    }

    /// True if reading updates the access time. By the rule of `relatime`, it does so only if the
    /// time is not later than the last change.
    pub fn atime_is_due(&self, rule: AccessTimeRule) -> bool {
        if rule != AccessTimeRule::Relative {
            return rule == AccessTimeRule::Strict;
        }
        if self.atime_is_current.load(Ordering::Relaxed) {
            return false;
        }
        let meta = self.meta();
        let due = meta.atime <= meta.mtime || meta.atime <= meta.ctime;
        if !due {
            self.atime_is_current.store(true, Ordering::Relaxed);
        }
        due
    }

    /// Changes the references. Returns true if none is left, and the inode must leave the table.
    /// Fails with `ESTALE` if there were none before, because the inode is being freed already.
    pub fn change_refs(&self, change: impl FnOnce(&mut InodeRefs)) -> Result<bool> {
        let mut refs = lock(&self.refs);
        if refs.is_none() {
            return Err(Errno::ESTALE);
        }
        change(&mut refs);
        Ok(refs.is_none())
    }

    /// True if a frontend has lookups of the inode.
    pub fn is_looked_up(&self) -> bool {
        lock(&self.refs).lookups > 0
    }

    /// The directory contents. Fails with `ENOTDIR`.
    pub fn dir(&self) -> Result<&DirBody> {
        match &self.body {
            InodeContent::Dir(dir) => Ok(dir),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// The file data. Fails with `EISDIR` for a directory, and with `EINVAL` for other types.
    pub fn data(&self) -> Result<&RwLock<PagedData>> {
        match &self.body {
            InodeContent::File(data) => Ok(data),
            InodeContent::Dir(_) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    pub fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// Publishes size and space of `data` for getattr. Called under the lock of the data.
    pub fn publish(&self, data: &PagedData) {
        self.size.store(data.size(), Ordering::Relaxed);
        self.pages.store(data.page_count(), Ordering::Relaxed);
    }
}

impl Drop for MemoryInode {
    fn drop(&mut self) {
        self.quota.give_back(1);
    }
}

/// The attributes that never change.
pub(crate) struct FixedAttributes {
    pub kind: FileKind,
    pub rdev: u64,
}

impl InodeMeta {
    /// Updates mtime and ctime after a change of data or names.
    pub fn set_modified(&mut self, now: Timestamp) {
        self.mtime = now;
        self.ctime = now;
    }

    /// Clears the set-id bits. Called for writes without privilege, and for every change of owner.
    pub fn kill_suidgid(&mut self) {
        // The bits that depend on the groups of the caller were cleared before the change.
        self.perm = drop_set_id(self.perm, true);
        if self.xattrs.remove(b"security.capability") {
            self.uncharge();
        }
    }

    /// The bytes that extended attributes and ACLs use.
    pub fn bytes(&self) -> usize {
        let lists = [&self.access_acl, &self.default_acl];
        self.xattrs.bytes() + lists.into_iter().flatten().map(Acl::bytes).sum::<usize>()
    }

    /// Returns space after attributes or ACLs have shrunk.
    pub fn uncharge(&mut self) {
        let _ = self.charge.set(self.bytes());
    }

    /// chmod(2), which updates the access ACL, too.
    pub fn chmod(&mut self, perm: u32) {
        self.perm = perm & 0o7777;
        if let Some(acl) = &mut self.access_acl {
            acl.chmod(perm);
        }
    }

    /// True if everyone may search the directory with these attributes.
    pub fn is_open_to_all(&self) -> bool {
        self.perm & 0o111 == 0o111 && self.access_acl.is_none()
    }
}
