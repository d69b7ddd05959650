//! The kernel's restrictions on links and on files of others in shared directories.

use defuse_fs::{Errno, FileKind, posix};

use crate::access;
use crate::call_target::CallTarget;
use crate::credentials::TaskCredentials;
use crate::mounted_inode::MountedInode;

/// The kernel's restrictions on links in /proc/sys/fs, proc_sys_fs(5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkProtection {
    /// `protected_symlinks` is not 0.
    pub symlinks: bool,
    /// `protected_hardlinks` is not 0.
    pub hardlinks: bool,
    /// `protected_regular`, 0 to 2.
    pub regular: u8,
}

impl LinkProtection {
    /// Reads the current settings. A setting that cannot be read counts as 0.
    pub fn read() -> Self {
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/fs/protected_{name}"));
            text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0u8)
        };
        LinkProtection {
            symlinks: read("symlinks") > 0,
            hardlinks: read("hardlinks") > 0,
            regular: read("regular"),
        }
    }

    /// In a sticky directory that is world-writable, a link is followed only by its owner, or if
    /// the owner of the directory created it (`may_follow_link()` in fs/namei.c).
    pub(crate) fn check_link(
        self,
        dir: &MountedInode,
        link: &MountedInode,
        who: &TaskCredentials,
    ) -> Result<(), Errno> {
        if !self.symlinks {
            return Ok(());
        }
        let parent = dir.mount.attr(&dir.node, who)?;
        if parent.perm & 0o1002 != 0o1002 {
            return Ok(());
        }
        let link = link.mount.attr(&link.node, who)?;
        let own = link.uid == who.uid || link.uid == parent.uid;
        if own { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Other users than the owner may link only a regular file without privileges that they can
    /// read and write (`may_linkat()` in fs/namei.c).
    pub(crate) fn check_source(
        self,
        source: &MountedInode,
        who: &TaskCredentials,
    ) -> Result<(), Errno> {
        if !self.hardlinks {
            return Ok(());
        }
        let attr = source.mount.attr(&source.node, who)?;
        let rights = access::NeededAccess::READ.with(access::NeededAccess::WRITE);
        let accessible = || access::check(&source.mount, &source.node, who, rights).is_ok();
        if posix::may_link(who, &attr, accessible) { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// In a sticky directory that is world-writable (at level 2: group-writable, too), `O_CREAT`
    /// does not open a file of another user (`may_create_in_sticky()` in fs/namei.c).
    pub(crate) fn check_creation(
        self,
        dir: &MountedInode,
        found: &CallTarget<'_>,
        who: &TaskCredentials,
    ) -> Result<(), Errno> {
        if self.regular == 0 || found.kind != FileKind::Regular {
            return Ok(());
        }
        let parent = dir.mount.attr(&dir.node, who)?;
        let open_to = if self.regular > 1 { 0o022 } else { 0o002 };
        if parent.perm & 0o1000 == 0 || parent.perm & open_to == 0 {
            return Ok(());
        }
        let attr = found.attr(who)?;
        let fine = attr.uid == parent.uid || attr.uid == who.uid;
        if fine { Ok(()) } else { Err(Errno::EACCES) }
    }
}
