//! open(2) and related calls.

use std::sync::Arc;

use defuse_fs::{
    Attr, Entry, Errno, Fh, FileKind, NewNode, OpenArgs, OpenFlags, OpenOutcome, OpenReply,
    PathResolution, create_in_calls, shortcuts_of,
};
use defuse_probe::Op;

use crate::access::{self, NeededAccess};
use crate::call_target::{CallTarget, UncheckedOpen};
use crate::client::DirectClient;
use crate::credentials::TaskCredentials;
use crate::description::{DescriptionParts, FileDescription};
use crate::lifetime::CallMoment;
use crate::mounted_inode::MountedInode;
use crate::open_how::{OpenHow, ResolveFlags};
use crate::remaining_path::{ComponentKind, PathComponent};
use crate::stop::{CallError, Result};
use crate::task::ClientTask;
use crate::walk::{PathEnd, PathParent, PathWalk, WalkStart};

/// `O_PATH`.
pub(crate) const PATH: u32 = 0o10000000;
/// The bit that distinguishes `O_TMPFILE` from `O_DIRECTORY`.
const TMPFILE: u32 = 0o20000000;
/// `O_NOCTTY` and `O_LARGEFILE`, which do not concern the open file.
const FOREIGN: u32 = 0o400 | 0o100000;
/// Flags that only take effect during open(2).
const CREATION: u32 = OpenFlags::CREAT
    | OpenFlags::EXCL
    | OpenFlags::TRUNC
    | OpenFlags::DIRECTORY
    | OpenFlags::NOFOLLOW
    | OpenFlags::CLOEXEC
    | TMPFILE;
/// The flags among them without a meaning for a file system that opens an inode.
const OF_NAMES: u32 = CREATION & !(OpenFlags::TRUNC | OpenFlags::CLOEXEC);

impl DirectClient {
    /// Opens a file or directory, openat2(2). A relative path starts at `at`.
    ///
    /// Fails with the errors of open(2). Fifos, sockets and devices can only be opened with
    /// `O_PATH`, since they refer to objects in the kernel; otherwise open fails with `ENXIO`.
    pub fn open(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        how: OpenHow,
    ) -> Result<Arc<FileDescription>> {
        let who = task.credentials();
        let flags = normalize_flags(how.flags)?;
        if how.resolve.0 & !0x3f != 0 {
            return Err(Errno::EINVAL.into());
        }
        let opening = PendingOpen { client: self, task, who: &who, flags, mode: how.mode };
        let follow = flags & OpenFlags::NOFOLLOW == 0;
        // An open that changes something waits for the permission check.
        let open = (flags & (OpenFlags::TRUNC | OpenFlags::DIRECTORY | PATH) == 0)
            .then_some(OpenArgs { flags: OpenFlags(flags & !OF_NAMES), kill_suidgid: false });
        if opening.may_resolve() && how.resolve == ResolveFlags::default() {
            let run = |found: CallTarget<'_>| opening.open_resolved(found);
            let found = self.resolve_to_open(task, &who, (at, path), (follow, open), run)?;
            if let Some(file) = found {
                return Ok(file);
            }
        }
        let mut walk = self.walk_within(task, &who, (at, path), how.resolve)?;
        if flags & TMPFILE != 0 {
            let dir = walk.node(true)?;
            return opening.nameless(dir);
        }
        if flags & OpenFlags::CREAT != 0 {
            return opening.create(&mut walk, follow);
        }
        let (here, opened) = walk.node_to_open(follow, open)?;
        let known = walk.recent_attributes(&here);
        opening.open_existing(here, known, opened)
    }
}

impl DirectClient {
    /// Creates a file with the contents `data`: open(2) with `O_CREAT`, `O_EXCL` and `O_WRONLY`,
    /// write(2) and close(2) in one call. A file system in another process takes one message for
    /// it, if `data` is short (96 KiB). `mode` has the permission bits, before the umask is
    /// applied.
    ///
    /// Fails with the errors of the three calls. After an error of write(2) the file exists, with a
    /// part of the data.
    pub fn create_with(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        mode: u32,
        data: &[u8],
    ) -> Result<()> {
        let who = task.credentials();
        if data.len() as u64 > task.raw_file_size_limit() {
            return Err(Errno::EFBIG.into());
        }
        let flags = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::WRONLY;
        let opening = PendingOpen { client: self, task, who: &who, flags, mode };
        let mut walk = self.walk(task, &who, at, path)?;
        let PathParent { dir, last } = walk.parent()?;
        match last {
            PathEnd::Component(component) if component.part == ComponentKind::Name => {
                if component.slash {
                    return Err(Errno::EISDIR.into());
                }
                let mut exists =
                    |dir: &MountedInode| match walk.last_node(dir.clone(), &component, false) {
                        Err(CallError::Errno(Errno::ENOENT)) => Ok(()),
                        found => found.and(Err(Errno::EEXIST.into())),
                    };
                if !opening.may_make(&dir) {
                    exists(&dir)?;
                }
                match opening.make_with(&dir, &component, data) {
                    // EEXIST has precedence over a missing permission.
                    Err(stop @ CallError::Errno(Errno::EACCES | Errno::EROFS)) => {
                        exists(&dir).and(Err(stop))
                    }
                    made => made,
                }
            }
            _ => Err(Errno::EEXIST.into()),
        }
    }
}

/// Normalizes the flags. Fails with `EINVAL` for an invalid combination.
fn normalize_flags(flags: u32) -> Result<u32, Errno> {
    let flags = flags & !FOREIGN;
    if flags & PATH != 0 {
        return Ok(flags & (PATH | OpenFlags::DIRECTORY | OpenFlags::NOFOLLOW));
    }
    let both = OpenFlags::CREAT | OpenFlags::DIRECTORY;
    if flags & TMPFILE != 0 {
        let fine = flags & OpenFlags::DIRECTORY != 0 && flags & 3 != 0 && flags & both != both;
        return if fine { Ok(flags) } else { Err(Errno::EINVAL) };
    }
    if flags & both == both { Err(Errno::EINVAL) } else { Ok(flags) }
}

/// An open in progress.
struct PendingOpen<'a> {
    client: &'a DirectClient,
    task: &'a ClientTask,
    who: &'a Arc<TaskCredentials>,
    flags: u32,
    mode: u32,
}

/// The result of looking for a file to create.
enum CreateLookup {
    Opened(Arc<FileDescription>),
    Missing,
    /// A walk decides.
    Walk,
}

impl PendingOpen<'_> {
    /// True if a name need not be looked up before it is created. Only a file system of this
    /// project is trusted to leave an existing file unchanged.
    fn may_make(&self, dir: &MountedInode) -> bool {
        dir.mount.keeps_answers() || dir.mount.decides_on_names()
    }

    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// True if a path that the file system resolves may be opened without a walk. The number of an
    /// inode is valid without a lookup only while the file is open, which `O_PATH` does not do.
    fn may_resolve(&self) -> bool {
        !self.has(OpenFlags::CREAT | PATH | TMPFILE)
    }

    /// Opens a file or directory that the file system has resolved. Leaves all other kinds to a
    /// walk, and directories if names below them need more than their number.
    fn open_resolved(&self, found: CallTarget<'_>) -> Result<Option<Arc<FileDescription>>> {
        match found.kind {
            FileKind::Regular if !self.has(OpenFlags::DIRECTORY) => {
                self.check(&found)?;
                self.regular(found).map(Some)
            }
            FileKind::Directory if found.mount.keeps_answers() => {
                self.check(&found)?;
                self.directory(found).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Opens an existing file, unless it is `opened` already. The attributes may be known from the
    /// walk.
    fn open_existing(
        &self,
        here: MountedInode,
        known: Option<Attr>,
        opened: Option<UncheckedOpen>,
    ) -> Result<Arc<FileDescription>> {
        let kind = here.node.kind();
        if self.has(OpenFlags::DIRECTORY) && kind != FileKind::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        if self.has(PATH) {
            return self.path_only(here);
        }
        if !opened.as_ref().is_some_and(UncheckedOpen::is_permitted) {
            self.check(&CallTarget::from_node_with_attr(&here, known))?;
        }
        match kind {
            FileKind::Directory => self.directory(CallTarget::from_node(&here)),
            FileKind::Regular => self.regular(CallTarget::from_node(&here).with_open(opened)),
            _ => Err(Errno::ENXIO.into()),
        }
    }

    /// The checks of `may_open()` in fs/namei.c.
    fn check(&self, found: &CallTarget<'_>) -> Result<()> {
        let mut wanted = match self.flags & 3 {
            0 => NeededAccess::READ,
            1 => NeededAccess::WRITE,
            _ => NeededAccess::READ.with(NeededAccess::WRITE),
        };
        if self.has(OpenFlags::TRUNC) {
            wanted = wanted.with(NeededAccess::WRITE);
        }
        let writes = wanted != NeededAccess::READ;
        match found.kind {
            FileKind::Symlink => return Err(Errno::ELOOP.into()),
            FileKind::Directory if writes || self.has(OpenFlags::CREAT) => {
                return Err(Errno::EISDIR.into());
            }
            _ => {}
        }
        found.check(self.who, wanted)?;
        if self.has(OpenFlags::NOATIME) && !access::owns(&found.attr(self.who)?, self.who) {
            return Err(Errno::EPERM.into());
        }
        Ok(())
    }

    fn directory(&self, found: CallTarget<'_>) -> Result<Arc<FileDescription>> {
        let cx = self.who.context(found.mount.origin);
        let flags = OpenFlags(self.flags);
        let opened = found.mount.call(Op::OPENDIR, |fs| fs.opendir(&cx, found.ino, flags))?;
        self.describe(found.open_node(), Some(opened))
    }

    fn regular(&self, mut found: CallTarget<'_>) -> Result<Arc<FileDescription>> {
        let cx = self.who.context(found.mount.origin);
        let truncates = self.has(OpenFlags::TRUNC);
        let by_open = truncates && found.mount.caps().open_truncates;
        let left_out = OF_NAMES | if by_open { 0 } else { OpenFlags::TRUNC };
        let args = OpenArgs {
            flags: OpenFlags(self.flags & !left_out),
            kill_suidgid: truncates && !self.task.keeps_suid(),
        };
        let opened = match found.take_opened() {
            Some(opened) => opened,
            None => found.mount.call(Op::OPEN, |fs| fs.open(&cx, found.ino, args))?,
        };
        let file = self.describe(found.open_node(), Some(opened))?;
        if truncates {
            file.inode().node.invalidate();
            if !by_open {
                self.client.set_size(self.task, file.inode(), file.fh(), 0)?;
            }
        }
        Ok(file)
    }

    fn describe(
        &self,
        here: MountedInode,
        opened: Option<OpenReply>,
    ) -> Result<Arc<FileDescription>> {
        self.describe_pinned(here, opened, None)
    }

    /// Opens with `O_PATH`. The inode may come from an open file which the file system has
    /// resolved, so that it has no lookup.
    fn path_only(&self, here: MountedInode) -> Result<Arc<FileDescription>> {
        let pin = if here.node.has_lookups() || here.node.kind() != FileKind::Regular {
            None
        } else {
            let cx = self.who.context(here.mount.origin);
            let args = OpenArgs { flags: OpenFlags(OpenFlags::CLOEXEC), kill_suidgid: false };
            let opened = here.mount.call(Op::OPEN, |fs| fs.open(&cx, here.node.ino(), args))?;
            Some(opened.fh)
        };
        self.describe_pinned(here, None, pin)
    }

    fn describe_pinned(
        &self,
        here: MountedInode,
        opened: Option<OpenReply>,
        pin: Option<Fh>,
    ) -> Result<Arc<FileDescription>> {
        let flags = self.flags & !CREATION;
        let parts = DescriptionParts { here, opened, pin, flags, who: Arc::clone(self.who) };
        Ok(FileDescription::new(parts, self.client.options.arena.as_ref()).ok_or(Errno::ENFILE)?)
    }

    fn create(&self, walk: &mut PathWalk<'_>, follow: bool) -> Result<Arc<FileDescription>> {
        walk.follow_last = follow && !self.has(OpenFlags::EXCL);
        loop {
            let PathParent { dir, last } = walk.parent()?;
            let component = match last {
                PathEnd::Component(component) if component.part == ComponentKind::Name => component,
                // The path exists and is a directory.
                _ if self.has(OpenFlags::EXCL) => return Err(Errno::EEXIST.into()),
                _ => return Err(Errno::EISDIR.into()),
            };
            if component.slash {
                return Err(Errno::EISDIR.into());
            }
            if let Some(file) = self.create_in(walk, dir, &component)? {
                return Ok(file);
            }
        }
    }

    /// Creates or opens `component` in `dir`. Returns `None` if it is a symbolic link, which the
    /// caller walks next.
    fn create_in(
        &self,
        walk: &mut PathWalk<'_>,
        dir: MountedInode,
        component: &PathComponent<'_>,
    ) -> Result<Option<Arc<FileDescription>>> {
        if self.has(OpenFlags::EXCL) && self.may_make(&dir) {
            // Most often the name is free; otherwise the file system returns an error.
            match self.make(&dir, component) {
                // EEXIST has precedence over a missing permission.
                Err(CallError::Errno(Errno::EACCES | Errno::EROFS)) => {}
                made => return made.map(Some),
            }
        }
        if !self.has(OpenFlags::EXCL)
            && let CreateLookup::Opened(file) = self.create_or_find(&dir, component)?
        {
            return Ok(Some(file));
        }
        // Another process may create or remove the name between lookup and create, so the loop
        // retries a few times.
        for _ in 0..8 {
            match self.open_component(&dir, component)? {
                CreateLookup::Walk => {}
                CreateLookup::Opened(file) => return Ok(Some(file)),
                CreateLookup::Missing => match self.make(&dir, component) {
                    Err(CallError::Errno(Errno::EEXIST)) if !self.has(OpenFlags::EXCL) => continue,
                    result => return result.map(Some),
                },
            }
            match walk.last_node(dir.clone(), component, false) {
                Ok(found) => {
                    let Some(found) = found else { return Ok(None) };
                    if self.has(OpenFlags::EXCL) {
                        return Err(Errno::EEXIST.into());
                    }
                    if found.node.kind() == FileKind::Symlink && walk.follow_last {
                        walk.follow_found(&dir, &found)?;
                        return Ok(None);
                    }
                    self.client.protected.check_creation(
                        &dir,
                        &CallTarget::from_node(&found),
                        self.who,
                    )?;
                    return self.open_existing(found, None, None).map(Some);
                }
                Err(CallError::Errno(Errno::ENOENT)) => {}
                Err(stop) => return Err(stop),
            }
            match self.make(&dir, component) {
                Err(CallError::Errno(Errno::EEXIST)) if !self.has(OpenFlags::EXCL) => {
                    dir.mount.record_name_change(&dir.node, component.bytes());
                }
                result => return result.map(Some),
            }
        }
        Err(Errno::EIO.into())
    }

    /// Opens `component` in `dir` without a walk if it is a regular file.
    fn open_component(
        &self,
        dir: &MountedInode,
        component: &PathComponent<'_>,
    ) -> Result<CreateLookup> {
        if !dir.mount.may_resolve() {
            return Ok(CreateLookup::Walk);
        }
        let found = match dir.mount.subject(&dir.node, component.name()?, self.who) {
            Ok(found) => found,
            Err(Errno::ENOENT) => return Ok(CreateLookup::Missing),
            Err(errno) => return Err(errno.into()),
        };
        if self.has(OpenFlags::EXCL) {
            return Err(Errno::EEXIST.into());
        }
        self.open_found(dir, found)
    }

    /// Creates `component` in `dir`, or opens it if it is a regular file, where the file system
    /// decides which by one call. The caller goes on with a walk otherwise, also after an error,
    /// which may concern the creation alone.
    fn create_or_find(
        &self,
        dir: &MountedInode,
        component: &PathComponent<'_>,
    ) -> Result<CreateLookup> {
        let mount = &dir.mount;
        let modify = NeededAccess::MODIFY_DIR;
        if !mount.may_open_or_create() || access::check(mount, &dir.node, self.who, modify).is_err()
        {
            return Ok(CreateLookup::Walk);
        }
        let name = component.name()?;
        let node = self.client.new_node(dir, FileKind::Regular, self.mode, self.task, self.who)?;
        let (cx, moment) = (self.who.context(mount.origin), mount.current_moment());
        let flags = OpenFlags(self.flags & !OF_NAMES | OpenFlags::CREAT);
        let args = OpenArgs { flags, kill_suidgid: false };
        let _changing = mount.change_name(&dir.node, name.as_bytes());
        match mount.create_or_resolve(&cx, (&dir.node, name), &node, args)? {
            Some(OpenOutcome::Created(entry, opened)) => {
                let made = (entry, opened, moment);
                self.describe_new(dir, component, made).map(CreateLookup::Opened)
            }
            Some(OpenOutcome::Opened(entry, opened)) => {
                let node = mount.adopt(&entry, moment);
                let here = MountedInode { node, mount: Arc::clone(mount) };
                self.describe(here, Some(opened)).map(CreateLookup::Opened)
            }
            Some(OpenOutcome::Found(PathResolution::Inode { ino, attr, .. })) => {
                self.open_found(dir, CallTarget::from_resolved(mount, ino, attr, moment))
            }
            Some(OpenOutcome::Found(_)) | None => Ok(CreateLookup::Walk),
        }
    }

    /// Opens `found` in `dir` without a walk if it is a regular file.
    fn open_found(&self, dir: &MountedInode, found: CallTarget<'_>) -> Result<CreateLookup> {
        if found.kind != FileKind::Regular || self.has(PATH) {
            return Ok(CreateLookup::Walk);
        }
        self.client.protected.check_creation(dir, &found, self.who)?;
        match self.open_resolved(found) {
            // Another call has removed the file meanwhile.
            Err(CallError::Errno(Errno::ESTALE)) => Ok(CreateLookup::Missing),
            Ok(None) => Ok(CreateLookup::Walk),
            Ok(Some(file)) => Ok(CreateLookup::Opened(file)),
            Err(stop) => Err(stop),
        }
    }

    /// Creates `component` in `dir` with these contents.
    fn make_with(
        &self,
        dir: &MountedInode,
        component: &PathComponent<'_>,
        data: &[u8],
    ) -> Result<()> {
        let name = component.name()?;
        access::check(&dir.mount, &dir.node, self.who, NeededAccess::MODIFY_DIR)?;
        let node = self.client.new_node(dir, FileKind::Regular, self.mode, self.task, self.who)?;
        let (cx, moment) = (self.who.context(dir.mount.origin), dir.mount.current_moment());
        let place = (dir.node.ino(), name);
        let _changing = dir.mount.change_name(&dir.node, name.as_bytes());
        let made = dir.mount.call(Op::CREATE, |fs| {
            match shortcuts_of(fs).create_with(&cx, place.0, name, &node, data) {
                Err(Errno::ENOSYS) => create_in_calls(fs, &cx, place, &node, data),
                made => made,
            }
        });
        let entry =
            made.inspect_err(|_| dir.mount.record_name_change(&dir.node, component.bytes()))?;
        drop(dir.mount.name_made(&dir.node, component.bytes(), (&entry, moment)));
        Ok(())
    }

    /// Creates a file. Fails with `EEXIST` if there is one, regardless of the flags.
    fn make(
        &self,
        dir: &MountedInode,
        component: &PathComponent<'_>,
    ) -> Result<Arc<FileDescription>> {
        let name = component.name()?;
        access::check(&dir.mount, &dir.node, self.who, NeededAccess::MODIFY_DIR)?;
        let node = self.client.new_node(dir, FileKind::Regular, self.mode, self.task, self.who)?;
        let args = self.creation_args();
        let (cx, moment) = (self.who.context(dir.mount.origin), dir.mount.current_moment());
        let _changing = dir.mount.change_name(&dir.node, name.as_bytes());
        let made =
            dir.mount.call(Op::CREATE, |fs| fs.create(&cx, dir.node.ino(), name, &node, args));
        let (entry, opened) = made?;
        self.describe_new(dir, component, (entry, opened, moment))
    }

    /// O_EXCL even if the caller did not set it: a file that another process created meanwhile must
    /// be checked before it is opened.
    fn creation_args(&self) -> OpenArgs {
        let flags = self.flags & !(OF_NAMES | OpenFlags::TRUNC);
        let flags = OpenFlags(flags | OpenFlags::CREAT | OpenFlags::EXCL);
        OpenArgs { flags, kill_suidgid: false }
    }

    /// A file that was made just now, by a call that began at the moment.
    fn describe_new(
        &self,
        dir: &MountedInode,
        component: &PathComponent<'_>,
        (entry, opened, moment): (Entry, OpenReply, CallMoment),
    ) -> Result<Arc<FileDescription>> {
        let node = dir.mount.name_made(&dir.node, component.bytes(), (&entry, moment));
        self.describe(MountedInode { node, mount: Arc::clone(&dir.mount) }, Some(opened))
    }

    /// Opens an unnamed file, `O_TMPFILE`.
    fn nameless(&self, dir: MountedInode) -> Result<Arc<FileDescription>> {
        if !dir.node.is_dir() {
            return Err(Errno::ENOTDIR.into());
        }
        access::check(&dir.mount, &dir.node, self.who, NeededAccess::MODIFY_DIR)?;
        let node = self.client.new_node(&dir, FileKind::Regular, self.mode, self.task, self.who)?;
        let kept = OpenFlags::EXCL | OpenFlags::CLOEXEC;
        let flags = OpenFlags(self.flags & !(CREATION & !kept));
        let args = OpenArgs { flags, kill_suidgid: false };
        let cx = self.who.context(dir.mount.origin);
        let ino = dir.node.ino();
        let made = dir.mount.call(Op::TMPFILE, |fs| fs.tmpfile(&cx, ino, &node, args));
        let (entry, opened) = made.map_err(crate::data::replace_enosys)?;
        let node = dir.mount.adopt(&entry, crate::lifetime::CallMoment::default());
        self.describe(MountedInode { node, mount: dir.mount }, Some(opened))
    }
}

impl DirectClient {
    /// The attributes of a new inode in `dir`: owner, group and umask come from the task.
    pub(crate) fn new_node(
        &self,
        dir: &MountedInode,
        kind: FileKind,
        mode: u32,
        task: &ClientTask,
        who: &TaskCredentials,
    ) -> Result<NewNode<'static>> {
        let supplementary_gid = if who.groups.is_empty() {
            None
        } else {
            let gid = dir.mount.attr(&dir.node, who)?.gid;
            who.groups.contains(&gid).then_some(gid)
        };
        Ok(NewNode {
            umask: task.umask(),
            supplementary_gid,
            ..NewNode::new(kind, mode & 0o7777, who.caller())
        })
    }
}
