//! Permission checks, by the rules of the kernel (`inode_permission()` in fs/namei.c).

use defuse_fs::{Attr, Errno, FileKind, Ino, Result, posix};

use crate::credentials::{TaskCredentials, cap};
use crate::mount::ClientMount;
use crate::node::CachedInode;

/// Access to an inode that an operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededAccess(u32);

impl NeededAccess {
    /// Search a directory, or execute a file.
    pub const EXEC: NeededAccess = NeededAccess(1);
    /// Write.
    pub const WRITE: NeededAccess = NeededAccess(2);
    /// Read.
    pub const READ: NeededAccess = NeededAccess(4);
    /// Add and remove names in a directory: write and search.
    pub const MODIFY_DIR: NeededAccess = NeededAccess(3);

    /// The bits of access(2): read 4, write 2, execute or search 1. Other bits are ignored.
    pub const fn from_bits(bits: u32) -> Self {
        NeededAccess(bits & 7)
    }

    /// The bits as access(2) takes them.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The union of two accesses.
    pub const fn with(self, other: NeededAccess) -> Self {
        NeededAccess(self.0 | other.0)
    }

    const fn includes(self, other: NeededAccess) -> bool {
        self.0 & other.0 != 0
    }
}

/// Checks whether `who` has `access` to the inode. Fails with `EROFS`, `EACCES`, or the error of
/// the file system.
pub(crate) fn check(
    mount: &ClientMount,
    node: &CachedInode,
    who: &TaskCredentials,
    access: NeededAccess,
) -> Result<()> {
    check_known(mount, (node, None), who, access)
}

/// Like [`check`], for an inode whose attributes may have just arrived from the file system.
pub(crate) fn check_known(
    mount: &ClientMount,
    (node, known): (&CachedInode, Option<Attr>),
    who: &TaskCredentials,
    access: NeededAccess,
) -> Result<()> {
    let with_acl = |decide: &mut dyn FnMut(&[u8]) -> bool| mount.with_acl(node, who, decide);
    let attr = || known.map_or_else(|| mount.attr(node, who), Ok);
    decide(mount, node.kind(), who, access, attr, with_acl)
}

/// Like [`check`], for an inode without a node, whose attributes are `attr`.
pub(crate) fn check_attr(
    mount: &ClientMount,
    ino: Ino,
    attr: &Attr,
    who: &TaskCredentials,
    access: NeededAccess,
) -> Result<()> {
    let with_acl = |decide: &mut dyn FnMut(&[u8]) -> bool| mount.with_fresh_acl(ino, who, decide);
    decide(mount, attr.kind, who, access, || Ok(*attr), with_acl)
}

/// The rules of [`check`]. Attributes and ACL are fetched only if they matter.
fn decide(
    mount: &ClientMount,
    kind: FileKind,
    who: &TaskCredentials,
    access: NeededAccess,
    attr: impl FnOnce() -> Result<Attr>,
    with_acl: impl FnOnce(&mut dyn FnMut(&[u8]) -> bool) -> Result<Option<bool>>,
) -> Result<()> {
    let plain = matches!(kind, FileKind::Regular | FileKind::Directory | FileKind::Symlink);
    if access.includes(NeededAccess::WRITE) && plain && mount.read_only() {
        return Err(Errno::EROFS);
    }
    if access.0 == 0 || privileged_directory(kind, who) {
        return Ok(());
    }
    let attr = attr()?;
    let mut granted = None;
    if mount.caps().posix_acl && posix::consults_acl(who, &attr) {
        granted = with_acl(&mut |list| posix::permits(who, &attr, Some(list), access.0))?;
    }
    let granted = granted.unwrap_or_else(|| posix::permits(who, &attr, None, access.0));
    if granted || overrides(&attr, who, access) { Ok(()) } else { Err(Errno::EACCES) }
}

/// `CAP_DAC_OVERRIDE` grants every access to a directory, so its mode need not be fetched.
fn privileged_directory(kind: FileKind, who: &TaskCredentials) -> bool {
    kind == FileKind::Directory && who.has(cap::DAC_OVERRIDE)
}

fn overrides(attr: &Attr, who: &TaskCredentials, access: NeededAccess) -> bool {
    let searches = who.has(cap::DAC_READ_SEARCH);
    if attr.kind == FileKind::Directory {
        return who.has(cap::DAC_OVERRIDE) || searches && !access.includes(NeededAccess::WRITE);
    }
    let executable = attr.perm & 0o111 != 0;
    searches && access == NeededAccess::READ
        || who.has(cap::DAC_OVERRIDE) && (executable || !access.includes(NeededAccess::EXEC))
}

/// True if `who` may perform operations reserved to the owner.
pub(crate) fn owns(attr: &Attr, who: &TaskCredentials) -> bool {
    posix::owns(who, attr)
}

/// Lets the owner of a name or of the directory remove it from a sticky directory: `EPERM` for
/// others.
pub(crate) fn check_sticky(dir: &Attr, child: &Attr, who: &TaskCredentials) -> Result<()> {
    if posix::may_remove(who, dir, child) { Ok(()) } else { Err(Errno::EPERM) }
}
