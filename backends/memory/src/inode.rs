//! One inode: what it is, who refers to it, and its attributes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use defuse_fs::{Errno, FileKind, Result, Timestamp};

use crate::acl::Acl;
use crate::data::Data;
use crate::dir::Dir;
use crate::space::Charge;
use crate::sync::{Quota, lock};
use crate::xattr::Xattrs;

/// The most names one inode can have.
pub(crate) const LINK_MAX: u32 = i32::MAX as u32;

/// Set-user-id and set-group-id.
pub(crate) const SUID: u32 = 0o4000;
pub(crate) const SGID: u32 = 0o2000;
const GROUP_EXEC: u32 = 0o010;

/// An inode. What never changes lies open; the rest is behind the locks whose order the crate's
/// documentation gives.
pub(crate) struct Inode {
    pub ino: u64,
    pub kind: FileKind,
    pub rdev: u64,
    pub btime: Timestamp,
    /// Length in bytes, so that getattr need not wait for a write in progress.
    pub size: AtomicU64,
    /// Pages in use, for the same reason.
    pub pages: AtomicU64,
    pub meta: RwLock<Meta>,
    /// Whether somebody was told the attributes since the data changed. Changes under the lock of `meta`.
    pub seen: AtomicBool,
    pub body: Body,
    refs: Mutex<Refs>,
    quota: Arc<Quota>,
}

/// What the kind of inode brings with it.
pub(crate) enum Body {
    File(RwLock<Data>),
    Dir(DirBody),
    /// The target, and what it takes.
    Symlink(Box<[u8]>, #[expect(dead_code, reason = "held until the link is dropped")] Charge),
    /// Devices, fifos and sockets: an inode is all there is.
    Special,
}

/// A directory: its names, and the number of its parent.
pub(crate) struct DirBody {
    pub names: RwLock<Dir>,
    pub parent: AtomicU64,
}

/// The attributes that change.
pub(crate) struct Meta {
    pub perm: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    /// Made by `O_TMPFILE` without `O_EXCL`: may get its first name by link.
    pub linkable: bool,
    pub xattrs: Xattrs,
    pub access_acl: Option<Acl>,
    pub default_acl: Option<Acl>,
    /// For the attributes and the lists.
    pub charge: Charge,
}

/// Why an inode is alive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refs {
    pub lookups: u64,
    pub opens: u64,
    pub names: u64,
}

impl Refs {
    fn none(self) -> bool {
        self.lookups == 0 && self.opens == 0 && self.names == 0
    }
}

impl Inode {
    /// An inode that counts against `quota`, from which the caller has taken one.
    pub fn new(
        ino: u64,
        node: Fixed,
        meta: Meta,
        body: Body,
        refs: Refs,
        quota: Arc<Quota>,
    ) -> Self {
        let size = match &body {
            Body::Symlink(target, _) => target.len() as u64,
            _ => 0,
        };
        Inode {
            ino,
            kind: node.kind,
            rdev: node.rdev,
            btime: meta.ctime,
            size: AtomicU64::new(size),
            pages: AtomicU64::new(0),
            meta: RwLock::new(meta),
            seen: AtomicBool::new(false),
            body,
            refs: Mutex::new(refs),
            quota,
        }
    }

    /// Changes the references; true where none is left and the inode has to leave the table. An
    /// inode without any cannot be revived (`ESTALE`): it is leaving already.
    pub fn change_refs(&self, change: impl FnOnce(&mut Refs)) -> Result<bool> {
        let mut refs = lock(&self.refs);
        if refs.none() {
            return Err(Errno::ESTALE);
        }
        change(&mut refs);
        Ok(refs.none())
    }

    /// `ENOTDIR` unless it is a directory.
    pub fn dir(&self) -> Result<&DirBody> {
        match &self.body {
            Body::Dir(dir) => Ok(dir),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// `EISDIR` for a directory, `EINVAL` for anything else that is not a regular file.
    pub fn data(&self) -> Result<&RwLock<Data>> {
        match &self.body {
            Body::File(data) => Ok(data),
            Body::Dir(_) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    pub fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// Shows the length and the space of `data` to getattr. Called under the lock of the data.
    pub fn publish(&self, data: &Data) {
        self.size.store(data.size(), Ordering::Relaxed);
        self.pages.store(data.page_count(), Ordering::Relaxed);
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        self.quota.give_back(1);
    }
}

/// What stays as it was made.
pub(crate) struct Fixed {
    pub kind: FileKind,
    pub rdev: u64,
}

impl Meta {
    /// Data or names changed.
    pub fn modified(&mut self, now: Timestamp) {
        self.mtime = now;
        self.ctime = now;
    }

    /// What happens when someone without privilege changes the data, and on every change of owner.
    pub fn kill_suidgid(&mut self) {
        self.perm &= !SUID;
        // Without group-execute the bit once meant mandatory locking and stays, as on Linux.
        if self.perm & GROUP_EXEC != 0 {
            self.perm &= !SGID;
        }
        if self.xattrs.remove(b"security.capability") {
            self.uncharge();
        }
    }

    /// The bytes of attributes and lists.
    pub fn bytes(&self) -> usize {
        let lists = [&self.access_acl, &self.default_acl];
        self.xattrs.bytes() + lists.into_iter().flatten().map(Acl::bytes).sum::<usize>()
    }

    /// Follows attributes or lists that have become less.
    pub fn uncharge(&mut self) {
        let _ = self.charge.set(self.bytes());
    }

    /// chmod(2), which an access list follows.
    pub fn chmod(&mut self, perm: u32) {
        self.perm = perm & 0o7777;
        if let Some(acl) = &mut self.access_acl {
            acl.chmod(perm);
        }
    }

    /// The policy of `relatime`: reading moves the access time only where it is not younger than
    /// the last change.
    pub fn atime_is_due(&self) -> bool {
        self.atime <= self.mtime || self.atime <= self.ctime
    }
}
