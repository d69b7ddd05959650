//! stat, access, chmod, chown, utimens, truncate, statfs.

use std::sync::atomic::Ordering::Relaxed;

use defuse_fs::{
    AccessMask, Attr, Errno, Fh, FileKind, Ino, SetAttr, SetTime, StatFs, Timestamp, posix,
};
use defuse_probe::Op;
use rustix::time::{ClockId, clock_gettime};

use crate::access::{self, NeededAccess, owns};
use crate::call_target::CallTarget;
use crate::client::DirectClient;
use crate::credentials::{TaskCredentials, cap};
use crate::description::FileDescription;
use crate::mount::ClientMount;
use crate::mounted_inode::MountedInode;
use crate::stop::Result;
use crate::task::ClientTask;
use crate::walk::{ReachedInode, WalkStart};

/// The attributes of an inode, and of the mount that it is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// The attributes that the file system returned.
    pub attr: Attr,
    /// `st_dev`, different for each mount.
    pub dev: u64,
    /// `STATX_ATTR_MOUNT_ROOT`: the inode is the root of a mount.
    pub mount_root: bool,
    /// `stx_mnt_id`.
    pub mount_id: u32,
}

/// New timestamps for utimensat(2). `None` leaves a timestamp unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewTimes {
    /// Time of last access.
    pub atime: Option<SetTime>,
    /// Time of last data modification.
    pub mtime: Option<SetTime>,
}

impl NewTimes {
    /// Sets both timestamps to the current time. Write permission is enough for this.
    pub const NOW: NewTimes = NewTimes { atime: Some(SetTime::Now), mtime: Some(SetTime::Now) };

    /// Converts the two values of utimensat(2), each in seconds and nanoseconds. Fails with
    /// `EINVAL`.
    pub fn from_raw(atime: (i64, i64), mtime: (i64, i64)) -> Result<Self, Errno> {
        Ok(NewTimes { atime: time(atime)?, mtime: time(mtime)? })
    }
}

fn time((secs, nanos): (i64, i64)) -> Result<Option<SetTime>, Errno> {
    const UTIME_NOW: i64 = (1 << 30) - 1;
    const UTIME_OMIT: i64 = (1 << 30) - 2;
    match nanos {
        UTIME_NOW => Ok(Some(SetTime::Now)),
        UTIME_OMIT => Ok(None),
        0..1_000_000_000 => Ok(Some(SetTime::At(Timestamp { secs, nanos: nanos as u32 }))),
        _ => Err(Errno::EINVAL),
    }
}

/// New owner and group for chown(2). `None` leaves an id unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewOwner {
    /// User id.
    pub uid: Option<u32>,
    /// Group id.
    pub gid: Option<u32>,
}

impl DirectClient {
    /// Attributes of the file at `path`, fstatat(2). If `follow` is false, a final symbolic link is
    /// not followed.
    pub fn stat(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        follow: bool,
    ) -> Result<FileStat> {
        let who = task.current_credentials();
        let found = self.resolve(task, &who, (at, path), follow, |found| {
            Ok(Some(stat_as(found.mount, found.ino, found.attr(&who)?)))
        });
        if let Some(stat) = found? {
            return Ok(stat);
        }
        let mut walk = self.walk(task, &who, at, path)?;
        let here = match walk.attr_or_node(follow)? {
            ReachedInode::Peeked(MountedInode { mount, .. }, attr) => {
                let (dev, mount_id) = (mount.device(), mount.id);
                return Ok(FileStat { attr, dev, mount_root: false, mount_id });
            }
            ReachedInode::Node(here) => here,
        };
        match walk.final_attributes(&here) {
            Some(attr) => Ok(stat_as(&here.mount, here.node.ino(), attr)),
            None => self.stat_of(&here, None, &who, true),
        }
    }

    /// Attributes of an open file, fstat(2).
    pub fn fstat(&self, task: &ClientTask, file: &FileDescription) -> Result<FileStat> {
        self.fstat_with(task, file, true)
    }

    /// Returns attributes of an open file like [`fstat`](DirectClient::fstat). Unless `birth` is
    /// set, the time of creation may be missing, which saves a request if only this time is
    /// unknown.
    pub fn fstat_with(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        birth: bool,
    ) -> Result<FileStat> {
        // The handle of a directory returns no more attributes than its inode.
        let fh = file.fh().filter(|_| file.kind != FileKind::Directory);
        self.stat_of(file.inode(), fh, &task.credentials(), birth)
    }

    fn stat_of(
        &self,
        here: &MountedInode,
        fh: Option<Fh>,
        who: &TaskCredentials,
        birth: bool,
    ) -> Result<FileStat> {
        let attr = match here.node.find_cached_attr(birth) {
            Some(attr) => attr,
            None => here.mount.fetch_attr(&here.node, fh, who)?,
        };
        Ok(stat_as(&here.mount, here.node.ino(), attr))
    }

    /// Calls `run` with the inode at `path`, resolved by one call or by a walk.
    pub(crate) fn with_subject<T>(
        &self,
        task: &ClientTask,
        who: &TaskCredentials,
        (at, path): (WalkStart<'_>, &[u8]),
        follow: bool,
        run: impl Fn(&CallTarget<'_>) -> Result<T>,
    ) -> Result<T> {
        let done =
            self.resolve(task, who, (at, path), follow, |subject| run(&subject).map(Some))?;
        match done {
            Some(value) => Ok(value),
            None => run(&CallTarget::from_node(&self.walk(task, who, at, path)?.node(follow)?)),
        }
    }

    /// Checks whether `access` is granted, faccessat2(2): to the effective ids if `effective` is
    /// set, otherwise to the real ids.
    pub fn access(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        access: NeededAccess,
        (follow, effective): (bool, bool),
    ) -> Result<()> {
        let own = task.credentials();
        let who = if effective { (*own).clone() } else { own.to_real() };
        self.with_subject(task, &who, (at, path), follow, |found| self.may(found, &who, access))
    }

    /// Checks access to an open file, faccessat2(2) with `AT_EMPTY_PATH`.
    pub fn faccess(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        access: NeededAccess,
        effective: bool,
    ) -> Result<()> {
        let own = task.credentials();
        let who = if effective { (*own).clone() } else { own.to_real() };
        self.may(&CallTarget::open(file), &who, access)
    }

    fn may(
        &self,
        found: &CallTarget<'_>,
        who: &TaskCredentials,
        access: NeededAccess,
    ) -> Result<()> {
        let executes = access.bits() & NeededAccess::EXEC.bits() != 0;
        let mount = found.mount;
        if executes && found.kind == FileKind::Regular && mount.noexec {
            return Err(Errno::EACCES.into());
        }
        found.check(who, access)?;
        // The file system may deny access that the mode bits allow.
        if access.bits() == 0 || mount.lacks_access.load(Relaxed) {
            return Ok(());
        }
        let cx = who.context(mount.origin);
        let mask = AccessMask(access.bits());
        match mount.call(Op::ACCESS, |fs| fs.access(&cx, found.ino, mask)) {
            Err(Errno::ENOSYS) => {
                mount.lacks_access.store(true, Relaxed);
                Ok(())
            }
            result => Ok(result?),
        }
    }

    /// Changes the permission bits, fchmodat(2). Fails with `EPERM` if the caller is not the owner,
    /// and with `EOPNOTSUPP` for a symbolic link.
    pub fn chmod(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        mode: u32,
        follow: bool,
    ) -> Result<()> {
        let who = task.credentials();
        self.with_subject(task, &who, (at, path), follow, |found| {
            self.change_mode(found, None, mode, &who)
        })
    }

    /// Changes the permission bits of an open file, fchmod(2).
    pub fn fchmod(&self, task: &ClientTask, file: &FileDescription, mode: u32) -> Result<()> {
        file.file()?;
        self.change_mode(&CallTarget::open(file), attr_handle(file), mode, &task.credentials())
    }

    fn change_mode(
        &self,
        found: &CallTarget<'_>,
        fh: Option<Fh>,
        mode: u32,
        who: &TaskCredentials,
    ) -> Result<()> {
        found.writable()?;
        if found.kind == FileKind::Symlink {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let mut perm = mode & 0o7777;
        // A caller that may change any file, and set any bit, needs no attributes.
        if !(who.has(cap::FOWNER) && (perm & 0o2000 == 0 || who.has(cap::FSETID))) {
            let attr = found.attr(who)?;
            if !owns(&attr, who) {
                return Err(Errno::EPERM.into());
            }
            if !keeps_sgid(who, attr.gid) {
                perm &= !0o2000;
            }
        }
        let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
        Ok(set_attr(found, fh, &set, who)?)
    }

    /// Changes owner and group, fchownat(2). Fails with `EPERM`.
    pub fn chown(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        owner: NewOwner,
        follow: bool,
    ) -> Result<()> {
        let who = task.credentials();
        self.with_subject(task, &who, (at, path), follow, |found| {
            self.change_owner(found, None, owner, &who)
        })
    }

    /// Changes owner and group of an open file, fchown(2).
    pub fn fchown(&self, task: &ClientTask, file: &FileDescription, owner: NewOwner) -> Result<()> {
        file.file()?;
        self.change_owner(&CallTarget::open(file), attr_handle(file), owner, &task.credentials())
    }

    fn change_owner(
        &self,
        found: &CallTarget<'_>,
        fh: Option<Fh>,
        owner: NewOwner,
        who: &TaskCredentials,
    ) -> Result<()> {
        found.writable()?;
        let kill_suidgid = !found.is_dir();
        let mut set =
            SetAttr { uid: owner.uid, gid: owner.gid, kill_suidgid, ..SetAttr::default() };
        let changes_ids = owner.uid.is_some() || owner.gid.is_some();
        // A caller that may give any file to any user needs no attributes.
        if !(changes_ids && who.has(cap::CHOWN)) {
            let attr = found.attr(who)?;
            let own = attr.uid == who.uid;
            let may_user = owner.uid.is_none_or(|uid| own && uid == attr.uid);
            let may_group =
                owner.gid.is_none_or(|gid| own && (gid == attr.gid || who.is_in_group(gid)));
            if !(who.has(cap::CHOWN) || may_user && may_group) {
                return Err(Errno::EPERM.into());
            }
            // chown(2) clears the set-id bits even if it changes neither id (`chown_common()` in
            // fs/open.c). That is a change of the mode. The file system sees it as a change to the
            // current owner.
            if kill_suidgid && !changes_ids && loses_bits(&attr, who) {
                if !owns(&attr, who) {
                    return Err(Errno::EPERM.into());
                }
                set.uid = Some(attr.uid);
            }
        }
        if is_invisible_change(found, owner) {
            return Ok(());
        }
        Ok(set_attr(found, fh, &set, who)?)
    }

    /// Changes timestamps, utimensat(2). Fails with `EPERM` and `EACCES`, as documented in the
    /// manual page.
    pub fn utimens(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        times: NewTimes,
        follow: bool,
    ) -> Result<()> {
        if times.atime.is_none() && times.mtime.is_none() {
            return Ok(());
        }
        let who = task.credentials();
        self.with_subject(task, &who, (at, path), follow, |found| {
            self.change_times(found, None, times, &who)
        })
    }

    /// Changes the timestamps of an open file, futimens(3).
    pub fn futimens(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        times: NewTimes,
    ) -> Result<()> {
        if times.atime.is_none() && times.mtime.is_none() {
            return Ok(());
        }
        file.file()?;
        self.change_times(&CallTarget::open(file), attr_handle(file), times, &task.credentials())
    }

    fn change_times(
        &self,
        found: &CallTarget<'_>,
        fh: Option<Fh>,
        times: NewTimes,
        who: &TaskCredentials,
    ) -> Result<()> {
        found.writable()?;
        if !who.has(cap::FOWNER) && !owns(&found.attr(who)?, who) {
            if times != NewTimes::NOW {
                return Err(Errno::EPERM.into());
            }
            found.check(who, NeededAccess::WRITE)?;
        }
        let set = SetAttr { atime: times.atime, mtime: times.mtime, ..SetAttr::default() };
        Ok(set_attr(found, fh, &set, who)?)
    }

    /// Sets the size of a file, truncate(2). Fails with `EISDIR`, `EINVAL`, `EACCES` or `EFBIG`.
    pub fn truncate(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        length: i64,
    ) -> Result<()> {
        let length = u64::try_from(length).map_err(|_| Errno::EINVAL)?;
        let who = task.credentials();
        let here = self.walk(task, &who, at, path)?.node(true)?;
        match here.node.kind() {
            FileKind::Directory => return Err(Errno::EISDIR.into()),
            FileKind::Regular => {}
            _ => return Err(Errno::EINVAL.into()),
        }
        access::check(&here.mount, &here.node, &who, NeededAccess::WRITE)?;
        self.set_size(task, &here, None, length)
    }

    /// Reports free space and inodes, statvfs(3).
    pub fn statfs(&self, task: &ClientTask, at: WalkStart<'_>, path: &[u8]) -> Result<StatFs> {
        let who = task.credentials();
        let here = self.walk(task, &who, at, path)?.node(true)?;
        self.space(&here, &who)
    }

    /// Reports free space and inodes of the file system of an open file, fstatvfs(3).
    pub fn fstatfs(&self, task: &ClientTask, file: &FileDescription) -> Result<StatFs> {
        self.space(file.inode(), &task.credentials())
    }

    fn space(&self, here: &MountedInode, who: &TaskCredentials) -> Result<StatFs> {
        let cx = who.context(here.mount.origin);
        Ok(here.mount.call(Op::STATFS, |fs| fs.statfs(&cx, here.node.ino()))?)
    }
}

pub(crate) fn set_attr(
    found: &CallTarget<'_>,
    fh: Option<Fh>,
    set: &SetAttr,
    who: &TaskCredentials,
) -> Result<(), Errno> {
    let (cx, moment) = (who.context(found.mount.origin), found.mount.current_moment());
    let unanswered = !found.mount.keeps_answers();
    let set = SetAttr { unanswered, ..*set };
    let changed = found.mount.call(Op::SETATTR, |fs| fs.setattr(&cx, found.ino, fh, &set));
    if found.is_dir() && (set.perm.is_some() || set.uid.is_some() || set.gid.is_some()) {
        found.mount.record_path_change();
    }
    found.invalidate();
    if let Ok(attr) = &changed {
        found.keep_after_change(attr, moment);
    }
    changed.map(drop).map_err(crate::data::replace_enosys)
}

fn stat_as(mount: &ClientMount, ino: Ino, attr: Attr) -> FileStat {
    FileStat { attr, dev: mount.device(), mount_root: ino == Ino::ROOT, mount_id: mount.id }
}

/// Fails with `EROFS` on a read-only mount.
pub(crate) fn writable(here: &MountedInode) -> Result<(), Errno> {
    if here.mount.read_only() { Err(Errno::EROFS) } else { Ok(()) }
}

/// The handle for changing attributes of an open file. Only a handle open for writing is used: a
/// directory's or a reader's may not allow it.
fn attr_handle(file: &FileDescription) -> Option<Fh> {
    file.fh().filter(|_| file.writes() && file.kind != FileKind::Directory)
}

/// True if the change of the owner would be invisible: the file has this owner, no set-id bits and
/// no capability that it would lose, and its time of change is within this tick of the kernel's
/// clock. Archivers set the owner of each file that they have just written to the owner that it
/// already has.
fn is_invisible_change(found: &CallTarget<'_>, owner: NewOwner) -> bool {
    // A capability matters only to a file that is executed.
    const SET_ID_OR_EXECUTABLE: u32 = 0o6111;
    let has = |attr: &Attr| {
        owner.uid.is_none_or(|uid| uid == attr.uid) && owner.gid.is_none_or(|gid| gid == attr.gid)
    };
    found.kind == FileKind::Regular
        && found.present_attr().is_some_and(|attr| {
            has(&attr) && attr.perm & SET_ID_OR_EXECUTABLE == 0 && is_in_this_tick(attr.ctime)
        })
}

/// True if the kernel, whose times of changes are the ticks of its clock, would give a file this
/// time now.
fn is_in_this_tick(time: Timestamp) -> bool {
    let tick = clock_gettime(ClockId::RealtimeCoarse);
    let tick = Timestamp { secs: tick.tv_sec, nanos: tick.tv_nsec as u32 };
    (tick..=Timestamp::now()).contains(&time)
}

fn loses_bits(attr: &Attr, who: &TaskCredentials) -> bool {
    let is_member = who.is_in_group(attr.gid) || who.has(cap::FSETID);
    posix::drop_set_id(attr.perm, is_member) != attr.perm
}

/// True if `who` may keep the set-group-id bit on a file of the group `gid`.
pub(crate) fn keeps_sgid(who: &TaskCredentials, gid: u32) -> bool {
    who.is_in_group(gid) || who.has(cap::FSETID)
}
