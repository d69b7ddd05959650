//! Lookups, and calls that create, link and remove names.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use defuse_fs::posix::{CreateParent, new_inode};
use defuse_fs::{
    AnswerLifetime, Context, DirBuf, DirItem, Entry, Errno, File, FileKind, Ino, Name, NewNode,
    NormalPath, OpenArgs, OpenFlags, OpenReply, PathResolution, PushOutcome, Result, SetXattrFlags,
    Timestamp,
};

use crate::MemoryFileSystem;
use crate::data::PagedData;
use crate::dir::{DOT, DOT_DOT, DirEntries};
use crate::inode::{
    DirBody, FixedAttributes, InodeContent, InodeMeta, InodeRefs, LINK_MAX, MemoryInode,
};
use crate::space::SpaceCharge;
use crate::sync::{read, write};
use crate::xattr::XattrMap;

/// Increase of a directory's size for each entry, as on tmpfs.
pub(crate) const ENTRY_SIZE: u64 = 20;

const LOOKED_UP: InodeRefs = InodeRefs { lookups: 1, opens: 0, names: 1 };

impl MemoryFileSystem {
    pub(crate) fn lookup(
        &self,
        lifetime: AnswerLifetime,
        parent: Ino,
        name: Name<'_>,
    ) -> Result<Entry> {
        let dir = self.table.get(parent.0)?;
        let names = read(&dir.dir()?.names);
        let inode = names.find(name)?;
        // Counted under the lock of the names, so that the inode is not freed in between.
        inode.change_refs(|refs| refs.lookups += 1)?;
        drop(names);
        Ok(self.entry(&inode, lifetime))
    }

    pub(crate) fn resolve(&self, from: Ino, path: NormalPath<'_>) -> Result<PathResolution> {
        let mut inode = self.table.get(from.0)?;
        let mut open_to_all = true;
        for name in path.names() {
            let InodeContent::Dir(dir) = &inode.body else { return Ok(PathResolution::Walk) };
            let names = read(&dir.names);
            let child = names.get(name).map(Arc::clone);
            // Under the lock of the names: the permission is the one at the moment of the lookup.
            open_to_all = open_to_all && inode.meta().is_open_to_all();
            drop(names);
            match child {
                Some(child) => inode = child,
                None => return Ok(PathResolution::Missing { open_to_all }),
            }
        }
        let attr = self.attr(&inode, self.frontends.reply_attribute_lifetime());
        Ok(PathResolution::Inode { ino: Ino(inode.ino), attr, open_to_all })
    }

    pub(crate) fn lookup_parent(&self, lifetime: AnswerLifetime, ino: Ino) -> Result<Entry> {
        let dir = self.table.get(ino.0)?;
        let parent = self.table.get(dir.dir()?.parent.load(Ordering::Relaxed))?;
        parent.change_refs(|refs| refs.lookups += 1)?;
        Ok(self.entry(&parent, lifetime))
    }

    /// Creates an inode and its name, and notifies the other frontends.
    pub(crate) fn make(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        target: Option<&[u8]>,
    ) -> Result<Entry> {
        let lifetime = self.frontends.name_lifetime(cx.origin);
        self.change_names(cx, || {
            let dir = self.table.get(parent.0)?;
            let mut names = write(&dir.dir()?.names);
            let inode = self.make_in(cx, &dir, &mut names, name, node, target, LOOKED_UP)?;
            drop(names);
            Ok((self.entry(&inode, lifetime), [parent]))
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn make_in(
        &self,
        cx: &Context<'_>,
        dir: &MemoryInode,
        names: &mut DirEntries,
        name: Name<'_>,
        node: &NewNode<'_>,
        target: Option<&[u8]>,
        refs: InodeRefs,
    ) -> Result<Arc<MemoryInode>> {
        names.check_free(name)?;
        let is_dir = node.kind == FileKind::Directory;
        if is_dir && dir.meta().nlink >= LINK_MAX {
            return Err(Errno::EMLINK);
        }
        let inode = self.new_inode(cx, dir, node, target, refs)?;
        names.reserve(name)?;
        self.table.insert(Arc::clone(&inode));
        names.insert(name, inode.clone());
        record_name_change(dir, names, i32::from(is_dir), inode.btime);
        Ok(inode)
    }

    /// Creates an inode with the attributes of `node` and those inherited from `dir`. It is not yet
    /// in the table.
    pub(crate) fn new_inode(
        &self,
        cx: &Context<'_>,
        dir: &MemoryInode,
        node: &NewNode<'_>,
        target: Option<&[u8]>,
        refs: InodeRefs,
    ) -> Result<Arc<MemoryInode>> {
        let charge = SpaceCharge::new(&self.small);
        let mut meta = new_meta(cx, &dir.meta(), node, self.clock.exact(), charge);
        meta.charge.set(meta.bytes())?;
        if let Some((name, value)) = node.security {
            let flags = SetXattrFlags::default();
            meta.xattrs.set(&mut meta.charge, name.as_bytes(), value, flags)?;
        }
        meta.nlink = refs.names as u32;
        let body = match (node.kind, target) {
            (FileKind::Regular, _) => {
                InodeContent::File(RwLock::new(PagedData::new(Arc::clone(&self.pool))))
            }
            (FileKind::Directory, _) => {
                meta.nlink += 1;
                let parent = AtomicU64::new(dir.ino);
                InodeContent::Dir(DirBody {
                    names: RwLock::new(DirEntries::new(&self.small)),
                    parent,
                })
            }
            (FileKind::Symlink, Some(target)) => {
                let mut charge = SpaceCharge::new(&self.small);
                charge.set(target.len())?;
                InodeContent::Symlink(target.into(), charge)
            }
            (FileKind::Symlink, None) => return Err(Errno::EINVAL),
            _ => InodeContent::Special,
        };
        if !self.inodes.take(1) {
            return Err(Errno::ENOSPC);
        }
        let ino = self.next_ino.fetch_add(1, Ordering::Relaxed);
        let fixed = FixedAttributes { kind: node.kind, rdev: node.rdev };
        Ok(Arc::new(MemoryInode::new(ino, fixed, meta, body, refs, Arc::clone(&self.inodes))))
    }

    pub(crate) fn link(
        &self,
        lifetime: AnswerLifetime,
        ino: Ino,
        parent: Ino,
        name: Name<'_>,
    ) -> Result<Entry> {
        let inode = self.table.get(ino.0)?;
        if inode.is_dir() {
            return Err(Errno::EPERM);
        }
        let dir = self.table.get(parent.0)?;
        let mut names = write(&dir.dir()?.names);
        names.check_free(name)?;
        let now = self.clock.exact();
        let mut meta = inode.change_meta();
        if meta.nlink == 0 && !meta.linkable {
            return Err(Errno::ENOENT);
        }
        if meta.nlink >= LINK_MAX {
            return Err(Errno::EMLINK);
        }
        names.reserve(name)?;
        let more = inode.change_refs(|refs| {
            refs.names += 1;
            refs.lookups += 1;
        });
        more.inspect_err(|_| names.unreserve(name))?;
        meta.nlink += 1;
        // After its first name, a file that loses its last name cannot be linked again.
        meta.linkable = false;
        meta.ctime = now;
        drop(meta);
        names.insert(name, Arc::clone(&inode));
        record_name_change(&dir, &names, 0, now);
        drop(names);
        Ok(self.entry(&inode, lifetime))
    }

    /// Returns the inode that had the name.
    pub(crate) fn unlink(&self, parent: Ino, name: Name<'_>) -> Result<Ino> {
        let dir = self.table.get(parent.0)?;
        let mut names = write(&dir.dir()?.names);
        let inode = names.find(name)?;
        if inode.is_dir() {
            return Err(Errno::EISDIR);
        }
        let now = self.clock.exact();
        names.remove(name);
        record_name_change(&dir, &names, 0, now);
        drop(names);
        self.drop_link(&inode, now);
        Ok(Ino(inode.ino))
    }

    /// Returns the inode of the directory.
    pub(crate) fn rmdir(&self, parent: Ino, name: Name<'_>) -> Result<Ino> {
        let dir = self.table.get(parent.0)?;
        let mut names = write(&dir.dir()?.names);
        let inode = names.find(name)?;
        write(&inode.dir()?.names).kill()?;
        let now = self.clock.exact();
        names.remove(name);
        record_name_change(&dir, &names, -1, now);
        drop(names);
        self.drop_link(&inode, now);
        Ok(Ino(inode.ino))
    }

    /// Decreases the link count. A removed directory also loses its own `.` entry.
    pub(crate) fn drop_link(&self, inode: &MemoryInode, now: Timestamp) {
        let mut meta = inode.change_meta();
        meta.nlink = if inode.is_dir() { 0 } else { meta.nlink.saturating_sub(1) };
        meta.ctime = now;
        drop(meta);
        self.drop_refs(inode, |refs| refs.names = refs.names.saturating_sub(1));
    }

    pub(crate) fn create(
        &self,
        cx: &Context<'_>,
        lifetime: AnswerLifetime,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<(Entry, OpenReply)> {
        let dir = self.table.get(parent.0)?;
        let mut names = write(&dir.dir()?.names);
        let refs = InodeRefs { opens: 1, ..LOOKED_UP };
        let inode = self.make_in(cx, &dir, &mut names, name, node, None, refs)?;
        drop(names);
        Ok((self.entry(&inode, lifetime), self.make_open_reply(&inode)))
    }

    pub(crate) fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let dir = self.table.get(parent.0)?;
        read(&dir.dir()?.names).check_alive()?;
        let refs = InodeRefs { lookups: 1, opens: 1, names: 0 };
        let inode = self.new_inode(cx, &dir, node, None, refs)?;
        inode.change_meta().linkable = !args.flags.has(OpenFlags::EXCL);
        self.table.insert(Arc::clone(&inode));
        let lifetime = self.frontends.name_lifetime(cx.origin);
        Ok((self.entry(&inode, lifetime), self.make_open_reply(&inode)))
    }

    /// Lists names, with entries if these may be `lifetime`. Returns true if the access time was
    /// changed.
    pub(crate) fn readdir(
        &self,
        lifetime: Option<AnswerLifetime>,
        dir: File,
        from: u64,
        out: &mut DirBuf<'_>,
    ) -> Result<((), bool)> {
        let inode = self.table.get(dir.ino.0)?;
        let body = inode.dir()?;
        let accessed = self.touch_atime(&inode);
        let names = read(&body.names);
        let end = self.listings.end(dir.fh, from, names.next_position());
        let parent = body.parent.load(Ordering::Relaxed);
        for (next, name, ino) in [(DOT, &b"."[..], inode.ino), (DOT_DOT, b"..", parent)] {
            let item = DirItem { ino, next, kind: FileKind::Directory, name };
            if from < next && out.push(item) == PushOutcome::Full {
                return Ok(((), accessed));
            }
        }
        let names = names.entries_after(from).take_while(|(next, ..)| *next < end);
        for (next, name, child) in names {
            let item = DirItem { ino: child.ino, next, kind: child.kind, name };
            let look_up = || {
                let lifetime = lifetime?;
                child.change_refs(|refs| refs.lookups += 1).ok()?;
                Some(self.entry(child, lifetime))
            };
            if out.push_with(item, look_up) == PushOutcome::Full {
                break;
            }
        }
        Ok(((), accessed))
    }
}

/// Checks whether open(2) supports this type of file.
pub(crate) fn check_openable(inode: &MemoryInode, flags: OpenFlags) -> Result<()> {
    match inode.kind {
        FileKind::Directory if flags.writable() => Err(Errno::EISDIR),
        FileKind::Symlink => Err(Errno::ELOOP),
        _ => Ok(()),
    }
}

/// Updates the attributes of `dir` after a change of its names. Called under their lock.
pub(crate) fn record_name_change(
    dir: &MemoryInode,
    names: &DirEntries,
    subdirs: i32,
    now: Timestamp,
) {
    dir.size.store(names.len() as u64 * ENTRY_SIZE, Ordering::Relaxed);
    let mut meta = dir.change_meta();
    meta.nlink = meta.nlink.saturating_add_signed(subdirs);
    meta.set_modified(now);
}

/// The attributes of a new inode in the directory `dir`.
fn new_meta(
    cx: &Context<'_>,
    dir: &InodeMeta,
    node: &NewNode<'_>,
    now: Timestamp,
    charge: SpaceCharge,
) -> InodeMeta {
    let parent =
        CreateParent { perm: dir.perm, gid: dir.gid, default_acl: dir.default_acl.as_ref() };
    let made = new_inode(parent, node, cx.caller.uid == 0);
    InodeMeta {
        perm: made.perm,
        uid: node.uid,
        gid: made.gid,
        nlink: 0,
        atime: now,
        mtime: now,
        ctime: now,
        linkable: false,
        xattrs: XattrMap::default(),
        access_acl: made.access_acl,
        default_acl: made.default_acl,
        charge,
    }
}
