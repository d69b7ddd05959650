//! What a client may do whose user is not root.
//!
//! The process at the other end checks permissions, as the kernel does for a mount, but nobody can
//! know that it does. So the server checks every request of such a client by the [rules](super::rules)
//! of the kernel. A client that checks by itself never notices.

use defuse_fs::{
    Attr, Context, Errno, Fh, File, FileKind, FileSystem, Ino, LockKind, LockType, Name, OpenFlags,
    Result, Xattr, XattrName, posix,
};

use super::ledger::{Ledger, Modes};
use super::peer::Credentials;
use super::rules::{self, EXEC, READ, WRITE};
use defuse_wire::abi;
use defuse_wire::convert;
use defuse_wire::request::{Body, Extensions};

/// RENAME_EXCHANGE and RENAME_WHITEOUT of renameat2(2).
const EXCHANGE: u32 = 2;
const WHITEOUT: u32 = 4;

/// The rules for one client.
pub(crate) struct Guard<'a> {
    pub(super) fs: &'a dyn FileSystem,
    pub(super) ledger: &'a Ledger,
    pub(super) who: &'a Credentials,
}

impl Guard<'_> {
    /// `EACCES`, `EPERM`, `EBADF`, or what the file system answers. Every opcode is named, so that a
    /// new one is decided here.
    pub(super) fn check(&self, body: &Body<'_>, ino: Ino, cx: &Context<'_>) -> Result<()> {
        match body {
            Body::Lookup { .. } => self.permit(ino, EXEC, cx),
            Body::Setattr(args) => self.setattr(ino, args, cx),
            Body::Access(args) => self.permit(ino, args.mask & 7, cx),
            Body::Open(args) => self.open(ino, convert::open_flags(args.flags), cx),
            Body::Opendir(args) => {
                let flags = convert::open_flags(args.flags).without(OpenFlags::TRUNC);
                self.open(ino, flags.without(3), cx)
            }
            // What is there already is never opened.
            Body::Create { ext, .. } | Body::Tmpfile { ext, .. } => self.make(ino, ext, cx),
            Body::Mknod { args, ext, .. } => match convert::node_kind(args.mode)? {
                FileKind::CharDevice | FileKind::BlockDevice => Err(Errno::EPERM),
                _ => self.make(ino, ext, cx),
            },
            Body::Mkdir { ext, .. } | Body::Symlink { ext, .. } => self.make(ino, ext, cx),
            Body::Link { args, .. } => self.link(ino, Ino(args.oldnodeid), cx),
            Body::Unlink { name } | Body::Rmdir { name } => self.remove(ino, name, cx).map(drop),
            Body::Rename { args, name, newname } => {
                self.rename((ino, name), (Ino(args.newdir), newname), 0, cx)
            }
            Body::Rename2 { args, name, newname } => {
                self.rename((ino, name), (Ino(args.newdir), newname), args.flags, cx)
            }
            Body::Getxattr { name, .. } => self.xattr(ino, name, READ, cx),
            Body::Setxattr { name, .. } | Body::Removexattr { name } => {
                self.xattr(ino, name, WRITE, cx)
            }
            Body::Read(args) => self.uses(ino, args.fh, |modes| modes.reads),
            Body::Write { args, .. } => self.uses(ino, args.fh, |modes| modes.writes),
            Body::Fallocate(args) => self.uses(ino, args.fh, |modes| modes.writes),
            Body::CopyFileRange(args) | Body::CopyFileRange64(args) => {
                self.uses(ino, args.fh_in, |modes| modes.reads)?;
                self.uses(Ino(args.nodeid_out), args.fh_out, |modes| modes.writes)
            }
            Body::Setlk(args) | Body::Setlkw(args) => self.lock(ino, args),
            // The block numbers of a device are for root alone.
            Body::Bmap(_) => Err(Errno::EPERM),
            // What a request does, and who may have it done, only the file system knows.
            Body::Ioctl { .. } => Err(Errno::ENOTTY),
            // READDIRPLUS gives inodes only to who may search the directory: see `may_search`.
            Body::Readdir(_) | Body::Readdirplus(_) => Ok(()),
            // They take an inode or an open file that the client was given, and no permission.
            Body::Getattr(_)
            | Body::Statx(_)
            | Body::Readlink
            | Body::Listxattr(_)
            | Body::Statfs
            | Body::Syncfs(_)
            | Body::Fsync(_)
            | Body::Fsyncdir(_)
            | Body::Flush(_)
            | Body::Release(_)
            | Body::Releasedir(_)
            | Body::Getlk(_)
            | Body::Poll(_)
            | Body::Lseek(_)
            // The books say what the file is open for.
            | Body::Setupmapping(_)
            | Body::Removemapping(_)
            | Body::Forget(_)
            | Body::BatchForget(_)
            | Body::Interrupt(_)
            | Body::NotifyReply { .. }
            | Body::Init(_)
            | Body::Destroy
            | Body::CuseInit(_) => Ok(()),
        }
    }

    /// Whether what is at `ino` may be opened with `flags`.
    fn open(&self, ino: Ino, flags: OpenFlags, cx: &Context<'_>) -> Result<()> {
        let attr = self.attr(ino, cx)?;
        rules::may_open(self.who, &attr, flags)?;
        self.permit_attr(ino, &attr, rules::open_mask(flags), cx)
    }

    /// Whether a new name may be made in `dir`, with an inode that has these extensions.
    fn make(&self, dir: Ino, ext: &Extensions<'_>, cx: &Context<'_>) -> Result<()> {
        self.permit(dir, WRITE | EXEC, cx)?;
        // Security labels are attributes of the kernel, and it gives them to nobody else.
        let labels = ext.security_contexts().next().is_some();
        let foreign = ext.groups().any(|gid| !rules::in_group(self.who, gid));
        if labels || foreign { Err(Errno::EPERM) } else { Ok(()) }
    }

    /// Whether the inodes of a directory's entries may be had.
    pub(crate) fn may_search(&self, dir: Ino, cx: &Context<'_>) -> bool {
        self.permit(dir, EXEC, cx).is_ok()
    }

    /// Whether a new access list takes set-group-id away: it does, unless the user is in the group.
    pub(crate) fn list_clears_sgid(&self, ino: Ino, cx: &Context<'_>) -> Result<bool> {
        let attr = self.attr(ino, cx)?;
        Ok(!rules::in_group(self.who, attr.gid))
    }

    fn attr(&self, ino: Ino, cx: &Context<'_>) -> Result<Attr> {
        self.fs.getattr(cx, ino, None)
    }

    fn permit(&self, ino: Ino, mask: u32, cx: &Context<'_>) -> Result<()> {
        let attr = self.attr(ino, cx)?;
        self.permit_attr(ino, &attr, mask, cx)
    }

    fn permit_attr(&self, ino: Ino, attr: &Attr, mask: u32, cx: &Context<'_>) -> Result<()> {
        let list = match posix::consults_acl(self.who, attr) && self.fs.caps().posix_acl {
            true => self.access_list(ino, cx)?,
            false => None,
        };
        rules::permit(self.who, attr, list.as_deref(), mask)
    }

    fn access_list(&self, ino: Ino, cx: &Context<'_>) -> Result<Option<Vec<u8>>> {
        let name = XattrName::new(b"system.posix_acl_access")?;
        match self.fs.getxattr(cx, ino, name, 1 << 16) {
            Ok(Xattr::Value(list)) => Ok(Some(list)),
            Ok(Xattr::Size(_)) => Err(Errno::EIO),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// `EBADF` where the file is not open for it.
    fn uses(&self, ino: Ino, fh: u64, how: impl FnOnce(Modes) -> bool) -> Result<()> {
        let modes = self.ledger.modes(File { ino, fh: Fh(fh) });
        if modes.is_some_and(how) { Ok(()) } else { Err(Errno::EBADF) }
    }

    fn setattr(&self, ino: Ino, args: &abi::SetattrIn, cx: &Context<'_>) -> Result<()> {
        let attr = self.attr(ino, cx)?;
        let touches = rules::may_set(self.who, &attr, args)?;
        let has = |bits: u32| args.valid & bits != 0;
        match (has(abi::FATTR_SIZE), has(abi::FATTR_FH)) {
            (true, true) => self.uses(ino, args.fh, |modes| modes.writes),
            (true, false) => self.permit_attr(ino, &attr, WRITE, cx),
            (false, _) if touches => self.permit_attr(ino, &attr, WRITE, cx),
            (false, _) => Ok(()),
        }
    }

    /// fcntl(2) wants the file open for what is locked; flock(2) does not care.
    fn lock(&self, ino: Ino, args: &abi::LkIn) -> Result<()> {
        let request = convert::lock_request(args, false)?;
        match (request.kind, request.lock.typ) {
            (LockKind::Posix, LockType::Read) => self.uses(ino, args.fh, |modes| modes.reads),
            (LockKind::Posix, LockType::Write) => self.uses(ino, args.fh, |modes| modes.writes),
            _ => Ok(()),
        }
    }

    fn link(&self, dir: Ino, old: Ino, cx: &Context<'_>) -> Result<()> {
        self.permit(dir, WRITE | EXEC, cx)?;
        let attr = self.attr(old, cx)?;
        let accessible = || self.permit_attr(old, &attr, READ | WRITE, cx).is_ok();
        rules::may_link(self.who, &attr, accessible)
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
        rules::may_remove(self.who, &attr, &found.attr)?;
        Ok(Some((found.ino, found.attr)))
    }

    fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
        cx: &Context<'_>,
    ) -> Result<()> {
        // What stays behind would be a device.
        if flags & WHITEOUT != 0 {
            return Err(Errno::EPERM);
        }
        let (moved, other) = (self.remove(from.0, from.1, cx)?, self.remove(to.0, to.1, cx)?);
        if from.0 == to.0 {
            return Ok(());
        }
        // A directory that changes its parent is written; exchanged, either may be one.
        let other = other.filter(|_| flags & EXCHANGE != 0);
        let directories = [moved, other].into_iter().flatten();
        directories
            .filter(|(_, attr)| attr.kind == FileKind::Directory)
            .try_for_each(|(ino, attr)| self.permit_attr(ino, &attr, WRITE, cx))
    }

    fn xattr(&self, ino: Ino, name: &[u8], mask: u32, cx: &Context<'_>) -> Result<()> {
        let attr = self.attr(ino, cx)?;
        match rules::may_xattr(self.who, &attr, name, mask)? {
            true => self.permit_attr(ino, &attr, mask, cx),
            false => Ok(()),
        }
    }
}
