//! Permissions, decided as the kernel decides them (inode_permission of fs/namei.c).

use defuse_fs::{Attr, Errno, FileKind, Result, acl};

use crate::credentials::{Credentials, cap};
use crate::mount::Mount;
use crate::node::Node;

/// What is to be done with an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// Search of a directory, or execution.
    pub const EXEC: Access = Access(1);
    /// Writing.
    pub const WRITE: Access = Access(2);
    /// Reading.
    pub const READ: Access = Access(4);
    /// Changing the names in a directory.
    pub const MODIFY_DIR: Access = Access(3);

    /// Any of the bits of access(2): read 4, write 2, execute or search 1.
    pub const fn from_bits(bits: u32) -> Self {
        Access(bits & 7)
    }

    /// The bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Both.
    pub const fn with(self, other: Access) -> Self {
        Access(self.0 | other.0)
    }

    const fn includes(self, other: Access) -> bool {
        self.0 & other.0 != 0
    }
}

/// `EROFS`, `EACCES`, or what the file system itself answers.
pub(crate) fn check(mount: &Mount, node: &Node, who: &Credentials, access: Access) -> Result<()> {
    let kind = node.kind();
    let plain = matches!(kind, FileKind::Regular | FileKind::Directory | FileKind::Symlink);
    if access.includes(Access::WRITE) && plain && mount.read_only() {
        return Err(Errno::EROFS);
    }
    if access.0 == 0 || privileged_directory(kind, who) {
        return Ok(());
    }
    let attr = mount.attr(node, who)?;
    if by_mode(mount, node, &attr, who, access)? || overrides(&attr, who, access) {
        return Ok(());
    }
    Err(Errno::EACCES)
}

/// Nothing in a directory is kept from one with `CAP_DAC_OVERRIDE`, so its mode need not be known.
fn privileged_directory(kind: FileKind, who: &Credentials) -> bool {
    kind == FileKind::Directory && who.has(cap::DAC_OVERRIDE)
}

fn by_mode(
    mount: &Mount,
    node: &Node,
    attr: &Attr,
    who: &Credentials,
    access: Access,
) -> Result<bool> {
    let grants = |bits: u32| bits & access.0 == access.0;
    if attr.uid == who.uid {
        return Ok(grants(attr.perm >> 6));
    }
    // With an access list the group bits are its mask: without any, it can grant nothing more.
    if mount.caps().posix_acl && attr.perm & 0o070 != 0 && attr.kind != FileKind::Symlink {
        let in_group = |group| who.in_group(group);
        let owner = (attr.uid, attr.gid);
        let decide = |list: &[u8]| {
            acl::permits(list, (who.uid, &in_group), owner, access.0).unwrap_or(false)
        };
        if let Some(granted) = mount.with_acl(node, who, decide)? {
            return Ok(granted);
        }
    }
    Ok(grants(if who.in_group(attr.gid) { attr.perm >> 3 } else { attr.perm }))
}

fn overrides(attr: &Attr, who: &Credentials, access: Access) -> bool {
    let searches = who.has(cap::DAC_READ_SEARCH);
    if attr.kind == FileKind::Directory {
        return who.has(cap::DAC_OVERRIDE) || searches && !access.includes(Access::WRITE);
    }
    let executable = attr.perm & 0o111 != 0;
    searches && access == Access::READ
        || who.has(cap::DAC_OVERRIDE) && (executable || !access.includes(Access::EXEC))
}

/// Whether `who` may do what only the owner may.
pub(crate) fn owns(attr: &Attr, who: &Credentials) -> bool {
    attr.uid == who.uid || who.has(cap::FOWNER)
}

/// In a sticky directory, only the owner of a name or of the directory removes it: `EPERM`.
pub(crate) fn check_sticky(dir: &Attr, child: &Attr, who: &Credentials) -> Result<()> {
    let free = dir.perm & 0o1000 == 0
        || child.uid == who.uid
        || dir.uid == who.uid
        || who.has(cap::FOWNER);
    if free { Ok(()) } else { Err(Errno::EPERM) }
}
