//! Attributes and extended attributes.

use std::os::fd::{AsFd, BorrowedFd};

use defuse_fs::{
    Attr, Context, Errno, Fh, FileKind, Ino, NewNode, OwnerCapability, Result, SetAttr, SetTime,
    SetXattrFlags, Timestamp, Xattr, XattrName, posix,
};
use rustix::fs::{AtFlags, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};

use crate::creds::{CreateCredentials, become_owner, keep_suidgid, run_as_decided};
use crate::lower::{OrErrno, StatxResult};
use crate::options::CredentialsPolicy;
use crate::passthrough::Passthrough;
use crate::proc_path::ProcPath;
use crate::sys;
use crate::tables::inode::LowerInode;
use crate::tables::open_files::LowerOpenFile;

/// Maximum size of a value, and of a list of names: `XATTR_SIZE_MAX`.
const XATTR_MAX: usize = 64 << 10;

/// Room that is enough for most extended attributes.
const SHORT: usize = 512;

/// Names visible to privileged users only, xattr(7).
const TRUSTED: &[u8] = b"trusted.";
/// Access lists, acl(5).
const ACCESS_LISTS: &[u8] = b"system.posix_acl_";
/// File capabilities, capabilities(7).
const CAPABILITY: &[u8] = b"security.capability";

impl Passthrough {
    pub(crate) fn getattr(&self, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        let inode = self.inodes.get(ino)?;
        let stat = match fh.and_then(|fh| self.files.get(fh).ok()) {
            Some(open) => StatxResult::read(open.fd.as_fd())?,
            None => StatxResult::read(self.fd(&inode)?.as_fd())?,
        };
        self.attributes_of(&inode, &stat)
    }

    /// The attributes of an inode with this status. Its device may have changed
    /// (`changing_numbers.rs`).
    fn attributes_of(&self, inode: &LowerInode, stat: &StatxResult) -> Result<Attr> {
        let known = inode.key.mount;
        let mount = self.mounts.find(stat.mount_id(), known).unwrap_or(known);
        stat.attr(mount, self.options.attr_valid_for)
    }

    /// Applies `set`, in an order that gives the result of the whole. Changes of owner and size may
    /// clear set-user-id, so the mode comes after them. A change of size updates the timestamps, so
    /// these come last.
    pub(crate) fn setattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        fh: Option<Fh>,
        set: &SetAttr,
    ) -> Result<Attr> {
        let inode = self.inodes.get(ino)?;
        let open = fh.and_then(|fh| self.files.get(fh).ok());
        let pinned;
        let fd = match &open {
            Some(open) => open.fd.as_fd(),
            None => {
                pinned = self.fd(&inode)?;
                pinned.as_fd()
            }
        };
        let target = AttributeTarget { fd, is_open: open.is_some() };
        let how = self.options.credentials;
        let changes_owner = set.uid.is_some() || set.gid.is_some();
        let only_kills = set.kill_suidgid && set.size.is_none() && !changes_owner;
        let rights = OwnerRights { files: self, cx, inode: &inode, fd };
        if changes_owner || only_kills {
            // For a change of owner, the kernel clears set-user-id, set-group-id and
            // security.capability for every caller. CAP_FSETID only preserves set-group-id without
            // group execution.
            let _guard = keep_suidgid(cx.caller.uid == 0, how);
            let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
            // The thread has CAP_CHOWN, so that the lower file system does not ask for the owner.
            if changes_owner && how == CredentialsPolicy::Sticky && cx.caller.uid != 0 {
                rights.check_new_owner(set)?;
            }
            let may_raise = || rights.is_only_clearing(set) || rights.is_held();
            run_as_decided(how, may_raise, || target.chown(uid, gid))?;
        }
        if let Some(size) = set.size {
            let _guard = keep_suidgid(!set.kill_suidgid, how);
            self.change_size(&inode, fd, open.as_deref(), size)?;
        }
        if let Some(perm) = set.perm {
            // The frontend knows the caller's groups, and has decided whether set-group-id stays.
            let _guard = keep_suidgid(true, how);
            set_mode(target, perm & 0o7777, how, |stat| rights.may_set_mode(stat, set))?;
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let times = Timestamps {
                last_access: timespec(set.atime),
                last_modification: timespec(set.mtime),
            };
            let may_raise = || posix::are_times_free(fh, set) || rights.is_held();
            run_as_decided(how, may_raise, || target.utimens(&times))?;
        }
        if set.unanswered {
            return Ok(Attr::for_new(ino, &NewNode::new(inode.kind, 0, cx.caller)));
        }
        self.attributes_of(&inode, &StatxResult::read(fd)?)
    }

    fn change_size(
        &self,
        inode: &LowerInode,
        fd: BorrowedFd<'_>,
        open: Option<&LowerOpenFile>,
        size: u64,
    ) -> Result<()> {
        match inode.kind {
            FileKind::Regular => {}
            FileKind::Directory => return Err(Errno::EISDIR),
            _ => return Err(Errno::EINVAL),
        }
        let by_handle = match open {
            Some(open) => rustix::fs::ftruncate(open.fd.as_fd(), size).or_errno(),
            None => Err(Errno::EINVAL),
        };
        match by_handle {
            // There is no handle, or it is not open for writing.
            Err(Errno::EINVAL | Errno::EBADF) => sys::truncate(ProcPath::new(fd).as_c_str(), size),
            other => other,
        }
    }

    // ---- extended attributes --------------------------------------------------------------
    //
    // These use the path of the descriptor: the system calls of Linux 6.13 that take a descriptor
    // refuse O_PATH.

    pub(crate) fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        // Before anything else: after ENOSYS the kernel sends no further requests.
        self.check_namespace(name.as_bytes())?;
        if is_hidden(cx, name.as_bytes()) {
            return Err(Errno::ENODATA);
        }
        let capability = name.as_bytes() == CAPABILITY;
        if capability && self.inodes.get(ino)?.without_capability.holds() {
            return Err(Errno::ENODATA);
        }
        let found = self.with_path(ino, |path| {
            let (path, name) = (path.as_c_str(), name.as_bytes());
            let length = || rustix::fs::getxattr_query(path, name);
            read_sized(room, length, |buf| rustix::fs::getxattr(path, name, buf))
        });
        if capability && found == Err(Errno::ENODATA) {
            self.inodes.get(ino)?.without_capability.hold_for(self.options.attr_valid_for);
        }
        found
    }

    pub(crate) fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.check_namespace(b"")?;
        self.with_path(ino, |path| {
            let length = || rustix::fs::listxattr_query(path.as_c_str());
            let list = |buf: &mut [u8]| rustix::fs::listxattr(path.as_c_str(), buf);
            if cx.caller.uid == 0 {
                return read_sized(room, length, list);
            }
            let Xattr::Value(names) = read_sized(XATTR_MAX, length, list)? else {
                return Err(Errno::EIO);
            };
            let shown = names.split_inclusive(|byte| *byte == 0);
            let shown = shown.filter(|name| !name.starts_with(TRUSTED));
            Xattr::answer(shown.flatten().copied().collect(), room)
        })
    }

    pub(crate) fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        self.check_namespace(name.as_bytes())?;
        if is_hidden(cx, name.as_bytes()) {
            return Err(Errno::EPERM);
        }
        let how = self.options.credentials;
        let mut bits = XattrFlags::empty();
        bits.set(XattrFlags::CREATE, flags.create);
        bits.set(XattrFlags::REPLACE, flags.replace);
        // With an access ACL, the kernel clears set-group-id if the thread is neither in the group
        // nor privileged. The guard makes the thread act as such a caller.
        let _guard = if flags.clear_sgid {
            let (uid, gid) = (cx.caller.uid, cx.caller.gid);
            let owner =
                CreateCredentials { uid, gid, supplementary_gid: None, umask: 0o022, sgid: false };
            let owner = become_owner(owner, how)?;
            [Some(owner), Some(keep_suidgid(false, how))]
        } else {
            [Some(keep_suidgid(true, how)), None]
        };
        if name.as_bytes() == CAPABILITY {
            self.inodes.get(ino)?.without_capability.end();
        }
        self.with_inode_path(ino, |inode, fd, path| {
            let rights = OwnerRights { files: self, cx, inode, fd };
            run_as_decided(
                how,
                || rights.is_held(),
                || rustix::fs::setxattr(path.as_c_str(), name.as_bytes(), value, bits).or_errno(),
            )
        })
    }

    pub(crate) fn removexattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
    ) -> Result<()> {
        self.check_namespace(name.as_bytes())?;
        if is_hidden(cx, name.as_bytes()) {
            return Err(Errno::EPERM);
        }
        self.with_inode_path(ino, |inode, fd, path| {
            let rights = OwnerRights { files: self, cx, inode, fd };
            run_as_decided(
                self.options.credentials,
                || rights.is_held(),
                || rustix::fs::removexattr(path.as_c_str(), name.as_bytes()).or_errno(),
            )
        })
    }

    /// Fails if attributes of this name do not exist: with `ENOSYS` if none does.
    fn check_namespace(&self, name: &[u8]) -> Result<()> {
        match (self.options.xattrs, self.options.has_acls()) {
            (true, _) => Ok(()),
            (false, true) if name.starts_with(ACCESS_LISTS) => Ok(()),
            (false, true) => Err(Errno::EOPNOTSUPP),
            (false, false) => Err(Errno::ENOSYS),
        }
    }

    fn with_path<T>(&self, ino: Ino, run: impl FnOnce(&ProcPath) -> Result<T>) -> Result<T> {
        self.with_inode_path(ino, |_, _, path| run(path))
    }

    fn with_inode_path<T>(
        &self,
        ino: Ino,
        run: impl FnOnce(&LowerInode, BorrowedFd<'_>, &ProcPath) -> Result<T>,
    ) -> Result<T> {
        let inode = self.inodes.get(ino)?;
        let fd = self.fd(&inode)?;
        run(&inode, fd.as_fd(), &ProcPath::new(fd.as_fd()))
    }
}

/// The rights of a caller over a file by the owner that it has below. The frontend may know an
/// earlier owner: the kernel checks a change by an open file with what it has cached, however old
/// that is.
struct OwnerRights<'a> {
    files: &'a Passthrough,
    cx: &'a Context<'a>,
    inode: &'a LowerInode,
    fd: BorrowedFd<'a>,
}

impl OwnerRights<'_> {
    /// True if the caller is root, or has `CAP_FOWNER` over the file as root of a user namespace.
    fn is_held(&self) -> bool {
        StatxResult::read(self.fd).is_ok_and(|stat| self.is_held_over(&stat))
    }

    fn is_held_over(&self, stat: &StatxResult) -> bool {
        let fowner = OwnerCapability::Fowner;
        let is_held =
            self.cx.caller.uid == 0 || self.cx.has_capability(fowner, (stat.uid(), stat.gid()));
        if !is_held {
            self.files.pruning.drop_attributes(self.inode.ino());
        }
        is_held
    }

    /// True if the mode in `set` requires no ownership, or the caller has the rights.
    fn may_set_mode(&self, stat: &StatxResult, set: &SetAttr) -> bool {
        self.attr(stat).is_ok_and(|attr| posix::is_mode_free(&attr, set)) || self.is_held_over(stat)
    }

    fn is_only_clearing(&self, set: &SetAttr) -> bool {
        let attr = StatxResult::read(self.fd).and_then(|stat| self.attr(&stat));
        attr.is_ok_and(|attr| posix::is_only_clearing(&attr, set))
    }

    fn check_new_owner(&self, set: &SetAttr) -> Result<()> {
        let attr = self.attr(&StatxResult::read(self.fd)?)?;
        posix::check_new_owner(self.cx, &attr, set).inspect_err(|_| {
            self.files.pruning.drop_attributes(self.inode.ino());
        })
    }

    fn attr(&self, stat: &StatxResult) -> Result<Attr> {
        stat.attr(self.inode.key.mount, self.files.options.attr_valid_for)
    }
}

/// Names in `trusted.` are for privileged callers. The daemon is privileged, its caller may not be.
fn is_hidden(cx: &Context<'_>, name: &[u8]) -> bool {
    cx.caller.uid != 0 && name.starts_with(TRUSTED)
}

/// Returns the size if `room` is 0, otherwise reads into a buffer of `room` bytes.
fn read_sized(
    room: usize,
    length: impl FnOnce() -> rustix::io::Result<usize>,
    read: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
) -> Result<Xattr> {
    if room == 0 {
        return u32::try_from(length().or_errno()?).map(Xattr::Size).map_err(|_| Errno::E2BIG);
    }
    // Most values are short, or there is none, and it takes a while to clear room for the longest.
    let mut value = vec![0; room.min(SHORT)];
    let mut len = read(&mut value);
    if len == Err(rustix::io::Errno::RANGE) && room > SHORT {
        value.resize(room.min(XATTR_MAX), 0);
        len = read(&mut value);
    }
    let len = len.or_errno()?;
    value.truncate(len);
    Ok(Xattr::Value(value))
}

/// The file whose attributes change.
#[derive(Clone, Copy)]
struct AttributeTarget<'a> {
    fd: BorrowedFd<'a>,
    /// The descriptor is not `O_PATH`. Calls on it take no path, and for an empty one the kernel
    /// needs two thirds more time.
    is_open: bool,
}

impl AttributeTarget<'_> {
    fn chown(self, uid: Option<Uid>, gid: Option<Gid>) -> Result<()> {
        if self.is_open {
            return rustix::fs::fchown(self.fd, uid, gid).or_errno();
        }
        rustix::fs::chownat(self.fd, c"", uid, gid, AtFlags::EMPTY_PATH).or_errno()
    }

    fn utimens(self, times: &Timestamps) -> Result<()> {
        if self.is_open {
            return rustix::fs::futimens(self.fd, times).or_errno();
        }
        rustix::fs::utimensat(self.fd, c"", times, AtFlags::EMPTY_PATH).or_errno()
    }

    /// Without an open file by fchmodat2(2), or through `/proc` before Linux 6.6.
    fn chmod(self, perm: u32) -> Result<()> {
        let mode = Mode::from_raw_mode(perm);
        if self.is_open {
            return rustix::fs::fchmod(self.fd, mode).or_errno();
        }
        match sys::fchmod_path(self.fd, perm) {
            Err(Errno::ENOSYS) => {
                let path = ProcPath::new(self.fd);
                let flags = AtFlags::empty();
                rustix::fs::chmodat(rustix::fs::CWD, path.as_c_str(), mode, flags).or_errno()
            }
            other => other,
        }
    }
}

/// chmod(2) as the caller that the thread acts as. If the lower file system does not consider the
/// caller the owner, set-user-id and set-group-id are not added: the frontend may have decided by
/// an owner that has changed since.
fn set_mode(
    target: AttributeTarget<'_>,
    perm: u32,
    how: CredentialsPolicy,
    may_raise: impl FnOnce(&StatxResult) -> bool,
) -> Result<()> {
    let may_raise = || {
        StatxResult::read(target.fd)
            .is_ok_and(|stat| perm & 0o6000 & !stat.perm() == 0 && may_raise(&stat))
    };
    run_as_decided(how, may_raise, || target.chmod(perm))
}

fn timespec(time: Option<SetTime>) -> Timespec {
    let special = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    match time {
        None => special(rustix::fs::UTIME_OMIT),
        Some(SetTime::Now) => special(rustix::fs::UTIME_NOW),
        Some(SetTime::At(Timestamp { secs, nanos })) => {
            Timespec { tv_sec: secs, tv_nsec: nanos.min(999_999_999).into() }
        }
    }
}
