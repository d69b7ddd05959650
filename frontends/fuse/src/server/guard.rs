//! What a client may do whose user is another one than the server's.
//!
//! The process at the other end checks permissions, as the kernel does for a mount, and it is trusted
//! with that as far as its user could do everything to the server anyway. A program that has become
//! another user and executes one of that user leads here: what it asks for is checked once more, by
//! the rules of inode_permission and may_delete of `fs/namei.c`, setattr_prepare of `fs/attr.c` and
//! xattr(7). A client that checks by itself never notices.

use defuse_fs::{
    AccessMode, Attr, Context, Errno, Fh, File, FileKind, FileSystem, Ino, Name, OpenFlags, Result,
    Xattr, XattrName, acl,
};

use super::ledger::Ledger;
use super::peer::Credentials;
use crate::abi;
use crate::dispatch::convert;
use crate::request::{Body, Extensions};

const READ: u32 = 4;
const WRITE: u32 = 2;
const EXEC: u32 = 1;

/// The rules for one client.
pub(super) struct Guard<'a> {
    pub(super) fs: &'a dyn FileSystem,
    pub(super) ledger: &'a Ledger,
    pub(super) who: &'a Credentials,
}

impl Guard<'_> {
    /// `EACCES`, `EPERM`, `EBADF`, or what the file system answers.
    pub(super) fn check(&self, body: &Body<'_>, ino: Ino, cx: &Context<'_>) -> Result<()> {
        match body {
            Body::Lookup { .. } => self.permit(ino, EXEC, cx),
            Body::Setattr(args) => self.setattr(ino, args, cx),
            Body::Open(args) => self.permit(ino, mask_of(args.flags), cx),
            Body::Opendir(_) => self.permit(ino, READ, cx),
            Body::Create { args, ext, .. } => {
                // What is there already is opened, and not created.
                if args.flags & OpenFlags::EXCL == 0 {
                    return Err(Errno::EPERM);
                }
                self.make(ino, args.mode, ext, cx)
            }
            Body::Tmpfile { args, ext, .. } => self.make(ino, args.mode, ext, cx),
            Body::Mknod { args, ext, .. } => match convert::node_kind(args.mode)? {
                FileKind::CharDevice | FileKind::BlockDevice => Err(Errno::EPERM),
                _ => self.make(ino, args.mode, ext, cx),
            },
            Body::Mkdir { ext, .. } | Body::Symlink { ext, .. } => self.make(ino, 0, ext, cx),
            Body::Link { args, .. } => self.link(ino, Ino(args.oldnodeid), cx),
            Body::Unlink { name } | Body::Rmdir { name } => self.remove(ino, name, cx).map(drop),
            Body::Rename { args, name, newname } => {
                self.rename((ino, name), (Ino(args.newdir), newname), cx)
            }
            Body::Rename2 { args, name, newname } => {
                self.rename((ino, name), (Ino(args.newdir), newname), cx)
            }
            Body::Getxattr { name, .. } => self.xattr(ino, name, READ, cx),
            Body::Setxattr { name, .. } | Body::Removexattr { name } => {
                self.xattr(ino, name, WRITE, cx)
            }
            Body::Read(args) => self.reads(File { ino, fh: Fh(args.fh) }),
            Body::Write { args, .. } => self.writes(File { ino, fh: Fh(args.fh) }),
            Body::Fallocate(args) => self.writes(File { ino, fh: Fh(args.fh) }),
            Body::CopyFileRange(args) | Body::CopyFileRange64(args) => {
                self.reads(File { ino, fh: Fh(args.fh_in) })?;
                self.writes(File { ino: Ino(args.nodeid_out), fh: Fh(args.fh_out) })
            }
            Body::Bmap(_) => Err(Errno::EPERM),
            // What a request does, and who may have it done, only the file system knows.
            Body::Ioctl { .. } => Err(Errno::ENOTTY),
            _ => Ok(()),
        }
    }

    fn attr(&self, ino: Ino, cx: &Context<'_>) -> Result<Attr> {
        self.fs.getattr(cx, ino, None)
    }

    fn in_group(&self, gid: u32) -> bool {
        self.who.groups.contains(&gid)
    }

    fn owns(&self, attr: &Attr) -> bool {
        attr.uid == self.who.uid
    }

    fn permit(&self, ino: Ino, mask: u32, cx: &Context<'_>) -> Result<()> {
        let attr = self.attr(ino, cx)?;
        self.permit_attr(ino, &attr, mask, cx)
    }

    fn permit_attr(&self, ino: Ino, attr: &Attr, mask: u32, cx: &Context<'_>) -> Result<()> {
        let granted = |bits: u32| bits & mask == mask;
        let granted = if self.owns(attr) {
            granted(attr.perm >> 6)
        } else if let Some(list) = self.access_list(ino, attr, cx)? {
            let in_group = |gid| self.in_group(gid);
            let user = (self.who.uid, &in_group as &dyn Fn(u32) -> bool);
            acl::permits(&list, user, (attr.uid, attr.gid), mask).unwrap_or(false)
        } else {
            granted(if self.in_group(attr.gid) { attr.perm >> 3 } else { attr.perm })
        };
        if granted { Ok(()) } else { Err(Errno::EACCES) }
    }

    fn access_list(&self, ino: Ino, attr: &Attr, cx: &Context<'_>) -> Result<Option<Vec<u8>>> {
        // With a list the group bits are its mask.
        if attr.perm & 0o070 == 0 || attr.kind == FileKind::Symlink || !self.fs.caps().posix_acl {
            return Ok(None);
        }
        let name = XattrName::new(b"system.posix_acl_access")?;
        match self.fs.getxattr(cx, ino, name, 1 << 16) {
            Ok(Xattr::Value(list)) => Ok(Some(list)),
            Ok(Xattr::Size(_)) => Err(Errno::EIO),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// `EBADF` where the file is not open for it.
    fn reads(&self, file: File) -> Result<()> {
        if self.ledger.modes(file).is_some_and(|(reads, _)| reads) {
            Ok(())
        } else {
            Err(Errno::EBADF)
        }
    }

    fn writes(&self, file: File) -> Result<()> {
        if self.ledger.modes(file).is_some_and(|(_, writes)| writes) {
            Ok(())
        } else {
            Err(Errno::EBADF)
        }
    }

    fn setattr(&self, ino: Ino, args: &abi::SetattrIn, cx: &Context<'_>) -> Result<()> {
        let has = |bits: u32| args.valid & bits != 0;
        let attr = self.attr(ino, cx)?;
        let given = abi::FATTR_MODE | abi::FATTR_UID | abi::FATTR_GID | abi::FATTR_CTIME;
        if has(given) && !self.owns(&attr) {
            return Err(Errno::EPERM);
        }
        let gid = if has(abi::FATTR_GID) { args.gid } else { attr.gid };
        if has(abi::FATTR_MODE) && args.mode & 0o2000 != 0 && !self.in_group(gid) {
            return Err(Errno::EPERM);
        }
        if has(abi::FATTR_SIZE) {
            match has(abi::FATTR_FH) {
                true => self.writes(File { ino, fh: Fh(args.fh) })?,
                false => self.permit_attr(ino, &attr, WRITE, cx)?,
            }
        }
        let (atime, mtime) = (abi::FATTR_ATIME_NOW, abi::FATTR_MTIME_NOW);
        let set = has(abi::FATTR_ATIME) && !has(atime) || has(abi::FATTR_MTIME) && !has(mtime);
        if set && !self.owns(&attr) {
            return Err(Errno::EPERM);
        }
        if has(atime | mtime) && !self.owns(&attr) {
            self.permit_attr(ino, &attr, WRITE, cx)?;
        }
        Ok(())
    }

    /// A new name in `dir`, of an inode with `mode`.
    fn make(&self, dir: Ino, mode: u32, ext: &Extensions<'_>, cx: &Context<'_>) -> Result<()> {
        let attr = self.attr(dir, cx)?;
        self.permit_attr(dir, &attr, WRITE | EXEC, cx)?;
        let foreign = ext.groups().any(|gid| !self.in_group(gid));
        if foreign || mode & 0o2000 != 0 && !self.in_group(attr.gid) {
            return Err(Errno::EPERM);
        }
        Ok(())
    }

    fn link(&self, dir: Ino, old: Ino, cx: &Context<'_>) -> Result<()> {
        self.permit(dir, WRITE | EXEC, cx)?;
        let attr = self.attr(old, cx)?;
        let privileged = attr.perm & 0o4000 != 0 || attr.perm & 0o2010 == 0o2010;
        let safe = attr.kind == FileKind::Regular && !privileged;
        if self.owns(&attr) || safe && self.permit_attr(old, &attr, READ | WRITE, cx).is_ok() {
            return Ok(());
        }
        Err(Errno::EPERM)
    }

    /// Whether the name may go; what it stands for, where it is there.
    fn remove(&self, dir: Ino, name: &[u8], cx: &Context<'_>) -> Result<Option<(Ino, Attr)>> {
        let attr = self.attr(dir, cx)?;
        self.permit_attr(dir, &attr, WRITE | EXEC, cx)?;
        let found = match self.fs.lookup(cx, dir, Name::new(name)?) {
            Ok(found) => found,
            Err(Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        self.fs.forget(found.ino, 1);
        let sticky = attr.perm & 0o1000 != 0;
        if sticky && !self.owns(&attr) && !self.owns(&found.attr) {
            return Err(Errno::EPERM);
        }
        Ok(Some((found.ino, found.attr)))
    }

    fn rename(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), cx: &Context<'_>) -> Result<()> {
        let moved = [self.remove(from.0, from.1, cx)?, self.remove(to.0, to.1, cx)?];
        if from.0 == to.0 {
            return Ok(());
        }
        // A directory that changes its parent is written; exchanged, either may be one.
        let directories =
            moved.iter().flatten().filter(|(_, attr)| attr.kind == FileKind::Directory);
        directories.into_iter().try_for_each(|(ino, attr)| self.permit_attr(*ino, attr, WRITE, cx))
    }

    fn xattr(&self, ino: Ino, name: &[u8], mask: u32, cx: &Context<'_>) -> Result<()> {
        let attr = self.attr(ino, cx)?;
        if name.starts_with(b"user.") {
            return self.permit_attr(ino, &attr, mask, cx);
        }
        if name.starts_with(b"trusted.") {
            return Err(Errno::EPERM);
        }
        let owner = name.starts_with(b"system.posix_acl_") && self.owns(&attr);
        if mask == READ || owner { Ok(()) } else { Err(Errno::EPERM) }
    }
}

/// What an open of a file is to be permitted.
fn mask_of(flags: u32) -> u32 {
    let flags = convert::open_flags(flags);
    let mask = match flags.access() {
        AccessMode::Read => READ,
        AccessMode::Write => WRITE,
        _ => READ | WRITE,
    };
    mask | if flags.has(OpenFlags::TRUNC) { WRITE } else { 0 }
}
