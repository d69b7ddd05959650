//! Permission checks for a client whose user is not root.
//!
//! The process at the other end checks permissions, as the kernel does for a mount, but the server
//! cannot verify that it does. So every call of such a client is checked by the rules of the kernel
//! ([`rules`]). A client that checks permissions itself never notices.

use defuse_fs::{
    Attr, Context, Errno, Fh, File, FileKind, FileSystem, Ino, LockKind, LockRequest, LockType,
    Name, NewNode, OpenFlags, RenameFlags, Result, SetAttr, Xattr, XattrName, posix,
};

use crate::credentials::PeerCredentials;
use crate::ledger::{AccessModes, ConnectionLedger};
use crate::rules::{self, EXEC, READ, WRITE};

/// The checks of one call. Each returns `EACCES`, `EPERM`, `EBADF`, or the error of the file
/// system.
pub(crate) struct CallGuard<'a> {
    pub(crate) fs: &'a dyn FileSystem,
    pub(crate) ledger: &'a ConnectionLedger,
    pub(crate) who: &'a PeerCredentials,
    pub(crate) cx: &'a Context<'a>,
}

impl CallGuard<'_> {
    /// Checks the permission `mask` on an inode.
    pub(crate) fn permit(&self, ino: Ino, mask: u32) -> Result<()> {
        let attr = self.attr(ino)?;
        self.permit_attr(ino, &attr, mask)
    }

    /// Checks opening `ino` with `flags`.
    pub(crate) fn open(&self, ino: Ino, flags: OpenFlags) -> Result<()> {
        let attr = self.attr(ino)?;
        rules::may_open(self.who, &attr, flags)?;
        self.permit_attr(ino, &attr, rules::open_mask(flags))
    }

    /// Checks opening the directory `ino` with `flags`.
    pub(crate) fn opendir(&self, ino: Ino, flags: OpenFlags) -> Result<()> {
        const ACCESS_MODE: u32 = 3;
        self.open(ino, flags.difference(OpenFlags::TRUNC).difference(ACCESS_MODE))
    }

    /// Checks the creation of `node` in `dir`. Users create no devices.
    pub(crate) fn make(&self, dir: Ino, node: &NewNode<'_>) -> Result<()> {
        if let FileKind::CharDevice | FileKind::BlockDevice = node.kind {
            return Err(Errno::EPERM);
        }
        self.permit(dir, WRITE | EXEC)?;
        let own = node.uid == self.who.uid && rules::is_in_group(self.who, node.gid);
        let foreign = node.supplementary_gid.is_some_and(|gid| !rules::is_in_group(self.who, gid));
        // The kernel alone sets security labels.
        let labelled = node.security.is_some();
        if !own || foreign || labelled { Err(Errno::EPERM) } else { Ok(()) }
    }

    /// Checks a new name for `ino`, in `dir`.
    pub(crate) fn link(&self, ino: Ino, dir: Ino) -> Result<()> {
        self.permit(dir, WRITE | EXEC)?;
        let attr = self.attr(ino)?;
        let accessible = || self.permit_attr(ino, &attr, READ | WRITE).is_ok();
        rules::may_link(self.who, &attr, accessible)
    }

    /// Checks the removal of a name. Returns the inode with this name, if there is one.
    pub(crate) fn remove(&self, dir: Ino, name: Name<'_>) -> Result<Option<(Ino, Attr)>> {
        let attr = self.attr(dir)?;
        self.permit_attr(dir, &attr, WRITE | EXEC)?;
        let found = match self.fs.lookup(self.cx, dir, name) {
            Ok(found) => found,
            Err(Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        self.fs.forget(found.ino, 1);
        rules::may_remove(self.who, &attr, &found.attr)?;
        Ok(Some((found.ino, found.attr)))
    }

    /// Checks renaming.
    pub(crate) fn rename(
        &self,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        // A whiteout is a device node.
        if flags.has(RenameFlags::WHITEOUT) {
            return Err(Errno::EPERM);
        }
        let (moved, other) = (self.remove(from.0, from.1)?, self.remove(to.0, to.1)?);
        if from.0 == to.0 {
            return Ok(());
        }
        // Moving a directory to another parent writes to it; in an exchange either may be a
        // directory.
        let other = other.filter(|_| flags.has(RenameFlags::EXCHANGE));
        let directories = [moved, other].into_iter().flatten();
        directories
            .filter(|(_, attr)| attr.kind == FileKind::Directory)
            .try_for_each(|(ino, attr)| self.permit_attr(ino, &attr, WRITE))
    }

    /// Checks a change of attributes, through the open file `fh` if there is one.
    pub(crate) fn setattr(&self, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<()> {
        let attr = self.attr(ino)?;
        let writes = rules::may_set(self.who, &attr, set)?;
        match (set.size, fh) {
            (Some(_), Some(fh)) => self.check_use(File { ino, fh }, |modes| modes.writes),
            (Some(_), None) => self.permit_attr(ino, &attr, WRITE),
            (None, _) if writes => self.permit_attr(ino, &attr, WRITE),
            (None, _) => Ok(()),
        }
    }

    /// Checks reading (`READ`) or changing (`WRITE`) an extended attribute.
    pub(crate) fn xattr(&self, ino: Ino, name: XattrName<'_>, mask: u32) -> Result<()> {
        let attr = self.attr(ino)?;
        match rules::may_xattr(self.who, &attr, name.as_bytes(), mask)? {
            true => self.permit_attr(ino, &attr, mask),
            false => Ok(()),
        }
    }

    /// True where a new access list clears set-group-id, because the user is not in the group.
    pub(crate) fn list_clears_sgid(&self, ino: Ino) -> Result<bool> {
        let attr = self.attr(ino)?;
        Ok(!rules::is_in_group(self.who, attr.gid))
    }

    /// Checks the use of an open file, by the function `how` of its modes: `EBADF`.
    pub(crate) fn check_use(
        &self,
        file: File,
        how: impl FnOnce(AccessModes) -> bool,
    ) -> Result<()> {
        let modes = self.ledger.modes(file);
        if modes.is_some_and(how) { Ok(()) } else { Err(Errno::EBADF) }
    }

    /// Checks a lock request. fcntl(2) requires the file to be open for the kind of access that is
    /// locked; flock(2) does not.
    pub(crate) fn lock(&self, file: File, request: &LockRequest) -> Result<()> {
        match (request.kind, request.lock.typ) {
            (LockKind::Posix, LockType::Read) => self.check_use(file, |modes| modes.reads),
            (LockKind::Posix, LockType::Write) => self.check_use(file, |modes| modes.writes),
            _ => Ok(()),
        }
    }

    fn attr(&self, ino: Ino) -> Result<Attr> {
        self.fs.getattr(self.cx, ino, None)
    }

    fn permit_attr(&self, ino: Ino, attr: &Attr, mask: u32) -> Result<()> {
        let list = match posix::consults_acl(self.who, attr) && self.fs.caps().posix_acl {
            true => self.access_list(ino)?,
            false => None,
        };
        rules::permit(self.who, attr, list.as_deref(), mask)
    }

    fn access_list(&self, ino: Ino) -> Result<Option<Vec<u8>>> {
        let name = XattrName::new(b"system.posix_acl_access")?;
        match self.fs.getxattr(self.cx, ino, name, 1 << 16) {
            Ok(Xattr::Value(list)) => Ok(Some(list)),
            Ok(Xattr::Size(_)) => Err(Errno::EIO),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}
