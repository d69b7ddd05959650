//! Calls that create, rename and remove names.

use std::sync::Arc;

use defuse_fs::posix::rename::{self, DirectoryRelation, check_flags, check_kinds};
use defuse_fs::{Errno, FileKind, Ino, RenameFlags};
use defuse_probe::Op;

use crate::access::{self, NeededAccess, check_sticky};
use crate::attributes::writable;
use crate::call_target::CallTarget;
use crate::client::DirectClient;
use crate::credentials::{TaskCredentials, cap};
use crate::description::FileDescription;
use crate::lifetime::CallMoment;
use crate::mounted_inode::MountedInode;
use crate::remaining_path::{ComponentKind, PathComponent};
use crate::stop::{CallError, OutsidePaths, Result};
use crate::task::ClientTask;
use crate::walk::{PathEnd, PathParent, WalkStart};

/// The place of a new name: the directory, and the last component with any slashes after it.
struct NewNamePlace<'a> {
    dir: MountedInode,
    last: PathComponent<'a>,
    /// The name was not looked up: the file system finds out that it is free.
    is_unseen: bool,
}

impl DirectClient {
    /// Creates a directory, mkdirat(2).
    pub fn mkdir(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        mode: u32,
    ) -> Result<()> {
        let who = task.credentials();
        let spot = self.spot_for_new(task, &who, (at, path), true)?;
        spot.check(&who)?;
        // Linux ignores all other bits in mkdir.
        let node = self.new_node(&spot.dir, FileKind::Directory, mode & 0o1777, task, &who)?;
        let (cx, name) = (who.context(spot.dir.mount.origin), spot.last.name()?);
        let MountedInode { node: dir, mount } = &spot.dir;
        let _changing = mount.change_name(dir, name.as_bytes());
        let entry = mount.call(Op::MKDIR, |fs| fs.mkdir(&cx, dir.ino(), name, &node));
        self.finish_creation(&spot, &who, entry.map_err(map_missing_operation))
    }

    /// Creates a file, fifo, socket or device, mknodat(2). A `mode` without a type means a regular
    /// file. A device needs `CAP_MKNOD` (`EPERM`).
    pub fn mknod(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        mode: u32,
        rdev: u64,
    ) -> Result<()> {
        let who = task.credentials();
        let kind = match mode & 0o170000 {
            0 => FileKind::Regular,
            bits => FileKind::from_mode(bits).ok_or(Errno::EINVAL)?,
        };
        match kind {
            FileKind::Directory => return Err(Errno::EPERM.into()),
            FileKind::Symlink => return Err(Errno::EINVAL.into()),
            _ => {}
        }
        let spot = self.spot_for_new(task, &who, (at, path), false)?;
        spot.check(&who)?;
        let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        // A character device 0/0 is a whiteout, which needs no capability.
        let whiteout = kind == FileKind::CharDevice && rdev == 0;
        if device && !whiteout && !who.has(cap::MKNOD) {
            return Err(spot.after_lookup(&who, Errno::EPERM).into());
        }
        let mut node = self.new_node(&spot.dir, kind, mode, task, &who)?;
        node.rdev = if device { rdev } else { 0 };
        let (cx, name) = (who.context(spot.dir.mount.origin), spot.last.name()?);
        let MountedInode { node: dir, mount } = &spot.dir;
        let _changing = mount.change_name(dir, name.as_bytes());
        let entry = mount.call(Op::MKNOD, |fs| fs.mknod(&cx, dir.ino(), name, &node));
        self.finish_creation(&spot, &who, entry.map_err(map_missing_operation))
    }

    /// Creates a symbolic link with the text `target`, symlinkat(2).
    pub fn symlink(
        &self,
        task: &ClientTask,
        target: &[u8],
        at: WalkStart<'_>,
        path: &[u8],
    ) -> Result<()> {
        match target.len() {
            0 => return Err(Errno::ENOENT.into()),
            1..=4095 => {}
            _ => return Err(Errno::ENAMETOOLONG.into()),
        }
        let who = task.credentials();
        let spot = self.spot_for_new(task, &who, (at, path), false)?;
        spot.check(&who)?;
        let node = self.new_node(&spot.dir, FileKind::Symlink, 0o777, task, &who)?;
        let (cx, name) = (who.context(spot.dir.mount.origin), spot.last.name()?);
        let MountedInode { node: dir, mount } = &spot.dir;
        let _changing = mount.change_name(dir, name.as_bytes());
        let entry = mount.call(Op::SYMLINK, |fs| fs.symlink(&cx, dir.ino(), name, target, &node));
        self.finish_creation(&spot, &who, entry.map_err(map_missing_operation))
    }

    /// Reads a symbolic link, readlinkat(2). Fails with `EINVAL` if it is no link.
    pub fn readlink(&self, task: &ClientTask, at: WalkStart<'_>, path: &[u8]) -> Result<Vec<u8>> {
        let who = task.credentials();
        let here = self.walk(task, &who, at, path)?.node(false)?;
        self.text_of(&here, &who)
    }

    /// Reads a symbolic link that is open with `O_PATH`.
    pub fn freadlink(&self, task: &ClientTask, file: &FileDescription) -> Result<Vec<u8>> {
        self.text_of(file.inode(), &task.credentials())
    }

    fn text_of(&self, here: &MountedInode, who: &TaskCredentials) -> Result<Vec<u8>> {
        if here.node.kind() != FileKind::Symlink {
            return Err(Errno::EINVAL.into());
        }
        let cx = who.context(here.mount.origin);
        Ok(here.mount.call(Op::READLINK, |fs| fs.readlink(&cx, here.node.ino()))?)
    }

    /// Creates a hard link, linkat(2). Fails with `EXDEV` between mounts, and with `EPERM` for a
    /// directory.
    pub fn link(
        &self,
        task: &ClientTask,
        from: (WalkStart<'_>, &[u8]),
        to: (WalkStart<'_>, &[u8]),
        follow: bool,
    ) -> Result<()> {
        let who = task.credentials();
        let source = self.walk(task, &who, from.0, from.1).and_then(|mut walk| walk.node(follow));
        let spot = self.spot_for_new(task, &who, to, false);
        let (source, spot) = combine(source, spot)?;
        self.link_to(&source, &spot, &who)
    }

    /// Creates a name for an open file, linkat(2) with `AT_EMPTY_PATH`; also for a file from
    /// `O_TMPFILE`.
    pub fn flink(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        to: (WalkStart<'_>, &[u8]),
    ) -> Result<()> {
        let who = task.credentials();
        let spot = self.spot_for_new(task, &who, to, false)?;
        self.link_to(file.inode(), &spot, &who)
    }

    fn link_to(
        &self,
        source: &MountedInode,
        spot: &NewNamePlace<'_>,
        who: &TaskCredentials,
    ) -> Result<()> {
        if !Arc::ptr_eq(&source.mount, &spot.dir.mount) {
            return Err(spot.after_lookup(who, Errno::EXDEV).into());
        }
        let is_free = |errno| spot.after_lookup(who, errno);
        self.protected.check_source(source, who).map_err(is_free)?;
        spot.check(who)?;
        if source.node.is_dir() {
            return Err(is_free(Errno::EPERM).into());
        }
        let (cx, name) = (who.context(spot.dir.mount.origin), spot.last.name()?);
        let (ino, dir) = (source.node.ino(), spot.dir.node.ino());
        let _changing = spot.dir.mount.change_name(&spot.dir.node, name.as_bytes());
        let entry = spot.dir.mount.call(Op::LINK, |fs| fs.link(&cx, ino, dir, name));
        source.node.invalidate();
        self.finish_creation(spot, who, entry.map_err(map_missing_operation))
    }

    /// Removes the name of a file that is no directory, unlinkat(2).
    pub fn unlink(&self, task: &ClientTask, at: WalkStart<'_>, path: &[u8]) -> Result<()> {
        let who = task.credentials();
        let PathParent { dir, last } = self.walk(task, &who, at, path)?.parent()?;
        let last = to_name(last).ok_or(Errno::EISDIR)?;
        writable(&dir)?;
        let unseen = !last.slash && may_remove_unseen(&dir, &who);
        let found = if unseen { None } else { Some(victim(&dir, &last, &who)?) };
        if let Some(found) = &found {
            if last.slash {
                let is_dir = found.is_dir();
                return Err(if is_dir { Errno::EISDIR } else { Errno::ENOTDIR }.into());
            }
            may_delete(&dir, found, &who)?;
            if found.is_dir() {
                return Err(Errno::EISDIR.into());
            }
        }
        let (cx, name) = (who.context(dir.mount.origin), last.name()?);
        let MountedInode { node, mount } = &dir;
        let _changing = mount.change_name(node, name.as_bytes());
        let result = mount.call(Op::UNLINK, |fs| fs.unlink(&cx, node.ino(), name));
        if let Some(found) = found {
            found.invalidate();
        }
        mount.record_name_change(node, last.bytes());
        Ok(result.map_err(map_missing_operation)?)
    }

    /// Removes an empty directory, rmdir(2).
    pub fn rmdir(&self, task: &ClientTask, at: WalkStart<'_>, path: &[u8]) -> Result<()> {
        let who = task.credentials();
        let PathParent { dir, last } = self.walk(task, &who, at, path)?.parent()?;
        let last = match last {
            PathEnd::Nothing => return Err(Errno::EBUSY.into()),
            PathEnd::Component(last) => match last.part {
                ComponentKind::Dot => return Err(Errno::EINVAL.into()),
                ComponentKind::DotDot => return Err(Errno::ENOTEMPTY.into()),
                ComponentKind::Name => last,
            },
        };
        writable(&dir)?;
        let found = victim(&dir, &last, &who)?;
        may_delete(&dir, &found, &who)?;
        if !found.is_dir() {
            return Err(Errno::ENOTDIR.into());
        }
        if found.is_mount_point() {
            return Err(Errno::EBUSY.into());
        }
        let (cx, name) = (who.context(dir.mount.origin), last.name()?);
        let MountedInode { node, mount } = &dir;
        let _changing = mount.change_name(node, name.as_bytes());
        let result = mount.call(Op::RMDIR, |fs| fs.rmdir(&cx, node.ino(), name));
        mount.record_path_change();
        found.invalidate();
        mount.record_name_change(node, last.bytes());
        Ok(result.map_err(map_missing_operation)?)
    }

    /// Renames a file, renameat2(2). Fails with `EXDEV` between mounts.
    pub fn rename(
        &self,
        task: &ClientTask,
        from: (WalkStart<'_>, &[u8]),
        to: (WalkStart<'_>, &[u8]),
        flags: RenameFlags,
    ) -> Result<()> {
        check_flags(flags)?;
        let exchange = flags.has(RenameFlags::EXCHANGE);
        let who = task.credentials();
        let old = self.walk(task, &who, from.0, from.1).and_then(|mut walk| walk.parent());
        let new = self.walk(task, &who, to.0, to.1).and_then(|mut walk| walk.parent());
        let (old, new) = combine(old, new)?;
        if !Arc::ptr_eq(&old.dir.mount, &new.dir.mount) {
            return Err(Errno::EXDEV.into());
        }
        let old_name = to_name(old.last).ok_or(Errno::EBUSY)?;
        let noreplace = flags.has(RenameFlags::NOREPLACE);
        let taken = if noreplace { Errno::EEXIST } else { Errno::EBUSY };
        let new_name = to_name(new.last).ok_or(taken)?;
        writable(&old.dir)?;
        let moving =
            PendingRename { old: (old.dir, old_name), new: (new.dir, new_name), flags, exchange };
        self.rename_found(&moving, &who)
    }

    fn rename_found(&self, moving: &PendingRename<'_>, who: &TaskCredentials) -> Result<()> {
        let PendingRename { old: (old_dir, old), new: (new_dir, new), flags, exchange } = moving;
        if moving.may_be_unseen(who) {
            let source = victim(old_dir, old, who)?;
            if !source.is_dir() {
                return moving.perform(who, &source, None);
            }
        }
        let source = find_renamed(old_dir, old, who)?;
        let target = match find_renamed(new_dir, new, who) {
            Ok(target) => Some(target),
            Err(Errno::ENOENT) if !exchange => None,
            Err(errno) => return Err(errno.into()),
        };
        if flags.has(RenameFlags::NOREPLACE) && target.is_some() {
            return Err(Errno::EEXIST.into());
        }
        moving.check_slashes(&source, target.as_ref())?;
        moving.check_loops(&source, target.as_ref(), who)?;
        let same = target.as_ref().is_some_and(|target| target.ino == source.ino);
        if !same {
            moving.check_permissions(&source, target.as_ref(), who)?;
        }
        let busy =
            source.is_mount_point() || target.as_ref().is_some_and(CallTarget::is_mount_point);
        if busy {
            return Err(Errno::EBUSY.into());
        }
        moving.perform(who, &source, target.as_ref())
    }

    /// Finds the place of a new file. Fails with `EEXIST`, `EROFS` or `EACCES`, and with `ENOENT`
    /// for a trailing slash unless a directory is created.
    fn spot_for_new<'a>(
        &'a self,
        task: &ClientTask,
        who: &'a TaskCredentials,
        (at, path): (WalkStart<'_>, &'a [u8]),
        directory: bool,
    ) -> Result<NewNamePlace<'a>> {
        let PathParent { dir, last } = self.walk(task, who, at, path)?.parent()?;
        let last = to_name(last).ok_or(Errno::EEXIST)?;
        last.name()?;
        let is_unseen = dir.mount.removes_unseen() && (directory || !last.slash);
        let spot = NewNamePlace { dir, last, is_unseen };
        if is_unseen {
            writable(&spot.dir).map_err(|errno| spot.after_lookup(who, errno))?;
            return Ok(spot);
        }
        match victim(&spot.dir, &spot.last, who) {
            Ok(_) => return Err(Errno::EEXIST.into()),
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        if spot.last.slash && !directory {
            return Err(Errno::ENOENT.into());
        }
        writable(&spot.dir)?;
        Ok(spot)
    }

    fn finish_creation(
        &self,
        spot: &NewNamePlace<'_>,
        who: &TaskCredentials,
        entry: Result<defuse_fs::Entry, Errno>,
    ) -> Result<()> {
        let MountedInode { node, mount } = &spot.dir;
        match entry {
            Ok(entry) => {
                mount.name_made(node, spot.last.bytes(), (&entry, CallMoment::default()));
                Ok(())
            }
            Err(errno) => {
                // Another process may have created the name, so drop a cached negative entry.
                mount.record_name_change(node, spot.last.bytes());
                Err(spot.after_lookup(who, errno).into())
            }
        }
    }
}

impl NewNamePlace<'_> {
    /// Checks that `who` may create a name here. It is a separate step because link(2) checks its
    /// source first.
    fn check(&self, who: &TaskCredentials) -> Result<(), Errno> {
        let MountedInode { node, mount } = &self.dir;
        access::check(mount, node, who, NeededAccess::MODIFY_DIR)
            .map_err(|errno| self.after_lookup(who, errno))
    }

    /// Returns the error of a creation that has failed with `errno`. EEXIST has precedence over all
    /// others, so that a name that was not looked up before is looked up now. A request that was
    /// lost with its server, or interrupted, may itself have made the name.
    fn after_lookup(&self, who: &TaskCredentials, errno: Errno) -> Errno {
        if !self.is_unseen
            || matches!(errno, Errno::EEXIST | Errno::ENOTCONN | Errno::EIO | Errno::EINTR)
        {
            return errno;
        }
        if victim(&self.dir, &self.last, who).is_ok() { Errno::EEXIST } else { errno }
    }
}

/// Replaces `ENOSYS` by the error that programs expect of a file system without the operation.
fn map_missing_operation(errno: Errno) -> Errno {
    if errno == Errno::ENOSYS { Errno::EPERM } else { errno }
}

fn to_name(last: PathEnd<'_>) -> Option<PathComponent<'_>> {
    match last {
        PathEnd::Component(component) if component.part == ComponentKind::Name => Some(component),
        _ => None,
    }
}

/// Looks up a file to be removed. Unlike a walk, it does not enter a mount on it.
fn victim<'a>(
    dir: &'a MountedInode,
    last: &PathComponent<'_>,
    who: &TaskCredentials,
) -> Result<CallTarget<'a>, Errno> {
    match dir.mount.peek(&dir.node, last.name()?, who)? {
        Some(attr) => Ok(CallTarget::from_attr(&dir.mount, attr)),
        None => find_renamed(dir, last, who),
    }
}

/// Looks up a file to be renamed or replaced. The numbers of two such files show if they are the
/// same file. Does not enter a mount on the file, either.
fn find_renamed<'a>(
    dir: &'a MountedInode,
    last: &PathComponent<'_>,
    who: &TaskCredentials,
) -> Result<CallTarget<'a>, Errno> {
    dir.mount.subject(&dir.node, last.name()?, who)
}

/// True if `who` may remove any name from `dir`, and the file system itself checks the kind of the
/// removed file. Otherwise a lookup of the name decides on the error.
fn may_remove_unseen(dir: &MountedInode, who: &TaskCredentials) -> bool {
    if !dir.mount.removes_unseen() {
        return false;
    }
    let known = match who.has(cap::FOWNER) {
        true => None,
        false => match dir.mount.attr(&dir.node, who) {
            Ok(attr) if attr.perm & 0o1000 == 0 => Some(attr),
            _ => return false,
        },
    };
    access::check_known(&dir.mount, (&dir.node, known), who, NeededAccess::MODIFY_DIR).is_ok()
}

/// Checks that `who` may remove the name of `found` from `dir`.
fn may_delete(
    dir: &MountedInode,
    found: &CallTarget<'_>,
    who: &TaskCredentials,
) -> Result<(), Errno> {
    access::check(&dir.mount, &dir.node, who, NeededAccess::MODIFY_DIR)?;
    if who.has(cap::FOWNER) {
        return Ok(());
    }
    let parent = dir.mount.attr(&dir.node, who)?;
    if parent.perm & 0o1000 == 0 {
        return Ok(());
    }
    check_sticky(&parent, &found.attr(who)?, who)
}

/// Returns the child of `upper` through which `lower` is reached, if `lower` is below `upper` and
/// the file system reports parents.
fn child_towards(
    upper: &MountedInode,
    lower: &MountedInode,
    who: &TaskCredentials,
) -> Result<Option<Ino>, Errno> {
    let mut at = Arc::clone(&lower.node);
    rename::child_towards(upper.node.ino(), lower.node.ino(), |_| {
        match lower.mount.parent(&at, who) {
            Ok(Some(parent)) => at = parent,
            Ok(None) | Err(Errno::ENOSYS) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        Ok(Some(at.ino()))
    })
}

/// A rename in progress.
struct PendingRename<'a> {
    old: (MountedInode, PathComponent<'a>),
    new: (MountedInode, PathComponent<'a>),
    flags: RenameFlags,
    exchange: bool,
}

impl PendingRename<'_> {
    /// True if `who` may give and remove any name in both directories, so that the file system
    /// itself can check what the names lead to.
    fn may_be_unseen(&self, who: &TaskCredentials) -> bool {
        let PendingRename { old: (old_dir, old), new: (new_dir, new), flags, .. } = self;
        let has_slash = old.slash || new.slash;
        flags.0 == 0
            && !has_slash
            && may_remove_unseen(old_dir, who)
            && may_remove_unseen(new_dir, who)
    }

    /// Renames `source`. A `target` that was not looked up is no directory if `source` is none.
    fn perform(
        &self,
        who: &TaskCredentials,
        source: &CallTarget<'_>,
        target: Option<&CallTarget<'_>>,
    ) -> Result<()> {
        let PendingRename { old: (old_dir, old), new: (new_dir, new), flags, .. } = self;
        let cx = who.context(old_dir.mount.origin);
        let (from, to) = ((old_dir.node.ino(), old.name()?), (new_dir.node.ino(), new.name()?));
        let mount = &old_dir.mount;
        let op = if flags.0 == 0 { Op::RENAME } else { Op::RENAME2 };
        let _changing = (
            mount.change_name(&old_dir.node, old.bytes()),
            mount.change_name(&new_dir.node, new.bytes()),
        );
        let result = mount.call(op, |fs| fs.rename(&cx, from, to, *flags));
        if source.is_dir() || target.is_some_and(CallTarget::is_dir) {
            mount.record_path_change();
        }
        source.invalidate();
        if let Some(target) = target {
            target.invalidate();
        }
        mount.record_name_change(&old_dir.node, old.bytes());
        mount.record_name_change(&new_dir.node, new.bytes());
        Ok(result.map_err(map_missing_operation)?)
    }

    /// A trailing slash requires a directory: `ENOTDIR`.
    fn check_slashes(
        &self,
        source: &CallTarget<'_>,
        target: Option<&CallTarget<'_>>,
    ) -> Result<(), Errno> {
        let slashes = self.old.1.slash || !self.exchange && self.new.1.slash;
        if slashes && !source.is_dir() {
            return Err(Errno::ENOTDIR);
        }
        let target_is_dir = target.is_some_and(|target| target.is_dir());
        if self.exchange && self.new.1.slash && !target_is_dir {
            return Err(Errno::ENOTDIR);
        }
        Ok(())
    }

    /// A directory cannot move below itself (`EINVAL`) or replace one of its ancestors
    /// (`ENOTEMPTY`). Like the kernel, this checks it before permissions.
    fn check_loops(
        &self,
        source: &CallTarget<'_>,
        target: Option<&CallTarget<'_>>,
        who: &TaskCredentials,
    ) -> Result<(), Errno> {
        let (old, new) = (&self.old.0, &self.new.0);
        if old.node.ino() == new.node.ino() {
            return Ok(());
        }
        let target = target.filter(|target| target.is_dir());
        let lineage = DirectoryRelation {
            to_is_below: match source.is_dir() {
                true => child_towards(old, new, who)?,
                false => None,
            },
            from_is_below: match target {
                Some(_) => child_towards(new, old, who)?,
                None => None,
            },
        };
        lineage.check(source.ino, target.map(|target| target.ino), self.flags)
    }

    fn check_permissions(
        &self,
        source: &CallTarget<'_>,
        target: Option<&CallTarget<'_>>,
        who: &TaskCredentials,
    ) -> Result<(), Errno> {
        may_delete(&self.old.0, source, who)?;
        match target {
            None => {
                let dir = &self.new.0;
                access::check(&dir.mount, &dir.node, who, NeededAccess::MODIFY_DIR)?;
            }
            Some(target) => {
                may_delete(&self.new.0, target, who)?;
                if !self.exchange {
                    check_kinds(source.is_dir(), target.is_dir())?;
                }
            }
        }
        // The `..` entry of a directory changes if it moves, which needs write permission to it.
        if self.old.0.node.ino() != self.new.0.node.ino() {
            let moved = [Some(source), target.filter(|_| self.exchange)];
            for found in moved.into_iter().flatten().filter(|found| found.is_dir()) {
                found.check(who, NeededAccess::WRITE)?;
            }
        }
        Ok(())
    }
}

/// Combines the two walks of a call with two paths. If only one is outside of all mounts, the call
/// crosses devices (`EXDEV`).
fn combine<T, U>(first: Result<T>, second: Result<U>) -> Result<(T, U)> {
    match (first, second) {
        (Ok(first), Ok(second)) => Ok((first, second)),
        (Err(CallError::Outside(first)), Err(CallError::Outside(second))) => {
            Err(CallError::Outside(OutsidePaths { path: first.path, second: second.path }))
        }
        (Err(CallError::Errno(errno)), _) | (_, Err(CallError::Errno(errno))) => Err(errno.into()),
        _ => Err(Errno::EXDEV.into()),
    }
}
