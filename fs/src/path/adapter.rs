//! The adapter from paths to inodes.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};

use crate::{
    AccessMask, Attr, Caps, Context, CopyRange, DirBuf, DirItem, Entry, Errno, Fallocate, Fh, File,
    FileKind, FileSystem, Ino, IoctlArgs, IoctlReply, Lock, LockOwner, LockRequest, Name, NewNode,
    Notify, OpenArgs, OpenFlags, OpenReply, Origin, PollHandle, PushOutcome, ReadArgs, ReadBuf,
    ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags, StatFs, Whence, WriteArgs, WriteBuf,
    Xattr, XattrName,
};

use super::handles::{OpenPathDir, OpenPathDirs};
use super::held::{HeldPaths, HoldRefusal, NeededPath, PathTreeLock};
use super::tree::NamedFile;
use super::{PathCaps, PathCopy, PathDirEntry, PathFile, PathFileSystem, PathOperand, PathRef};

/// A [`FileSystem`] over a [`PathFileSystem`]. The [module](super) describes concurrent operations.
///
/// An inode number is never reused, so that the generation is always 0. Without
/// [`PathCaps::stable_ino`] programs also see the adapter's numbers as `st_ino`.
#[derive(Debug)]
pub struct PathAdapter<P> {
    pub(super) inner: P,
    pub(super) caps: PathCaps,
    pub(super) names: PathTreeLock,
    dirs: OpenPathDirs,
    pub(super) hidden: AtomicU64,
}

impl<P: PathFileSystem> PathAdapter<P> {
    /// An adapter over `inner`.
    pub fn new(inner: P) -> Self {
        let caps = inner.path_caps();
        let (names, dirs) = (PathTreeLock::new(), OpenPathDirs::default());
        PathAdapter { inner, caps, names, dirs, hidden: AtomicU64::new(0) }
    }

    /// The inner file system.
    pub fn inner(&self) -> &P {
        &self.inner
    }

    /// The number of known inodes, including the root.
    #[cfg(test)]
    pub(crate) fn nodes(&self) -> usize {
        self.names.lock().len()
    }

    /// Returns the number of the inode at `path` (components, each after a `/`), if a frontend
    /// knows it. Backends use it to report external changes.
    pub fn ino_of(&self, path: &[u8]) -> Option<Ino> {
        let tree = self.names.lock();
        let mut parts = path.split(|&byte| byte == b'/').filter(|part| !part.is_empty());
        parts.try_fold(Ino::ROOT, |dir, name| tree.child(dir, name))
    }

    /// Runs `call` on the open file, with its path unless the backend does not need it.
    pub(super) fn with_file<T>(
        &self,
        cx: &Context<'_>,
        file: File,
        call: impl FnOnce(PathFile<'_>) -> Result<T>,
    ) -> Result<T> {
        let held = self.hold_for_handle(cx, file.ino)?;
        call(PathFile { path: held.as_ref().map(|held| held.path(0)), fh: file.fh })
    }

    /// Holds the path with which the backend gets an open file: `None` if it gets none.
    fn hold_for_handle(&self, cx: &Context<'_>, ino: Ino) -> Result<Option<HeldPaths<'_>>> {
        let survives = self.caps.handles_survive_unlink;
        if survives && !self.caps.paths_while_named {
            return Ok(None);
        }
        match self.names.hold(cx, &[NeededPath::Node(ino)]) {
            Ok(held) => Ok(Some(held)),
            Err(HoldRefusal::Gone) if survives => Ok(None),
            Err(refusal) => Err(refusal.into()),
        }
    }

    /// Does the work of [`with_file`](Self::with_file), for operations that also apply to
    /// directories.
    fn with_any<T>(
        &self,
        cx: &Context<'_>,
        file: File,
        call: impl FnOnce(PathFile<'_>) -> Result<T>,
    ) -> Result<T> {
        let is_dir = self.names.lock().node(file.ino)?.kind == FileKind::Directory;
        let fh = if is_dir { self.dirs.get(file.fh)?.fh } else { file.fh };
        self.with_file(cx, File { fh, ..file }, call)
    }

    /// Runs `call` on the inode: at its path, or through an open handle if it has no name. With
    /// `write`, the handle must be open for writing.
    fn with_target<T>(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        fh: Option<Fh>,
        write: bool,
        call: impl FnOnce(PathOperand<'_>) -> Result<T>,
    ) -> Result<T> {
        let survives = self.caps.handles_survive_unlink;
        // The handle of a directory belongs to the adapter and is unknown to the backend.
        let is_dir = self.names.lock().node(ino)?.kind == FileKind::Directory;
        match fh.filter(|_| !is_dir) {
            Some(fh) if survives => {
                let held = self.hold_for_handle(cx, ino)?;
                let path = held.as_ref().map(|held| held.path(0));
                call(PathOperand::Open(PathFile { path, fh }))
            }
            fh => match self.names.hold(cx, &[NeededPath::Node(ino)]) {
                Ok(held) => {
                    let path = held.path(0);
                    call(match fh {
                        Some(fh) => PathOperand::Open(PathFile { path: Some(path), fh }),
                        None => PathOperand::Path(path),
                    })
                }
                Err(HoldRefusal::Gone) if survives => {
                    let borrowed = self.names.borrow_handle(ino, write)?;
                    call(PathOperand::Open(PathFile { path: None, fh: borrowed.fh }))
                }
                Err(refusal) => Err(refusal.into()),
            },
        }
    }

    /// True if an open file that has a name comes with it.
    fn needs_path(&self) -> bool {
        !self.caps.handles_survive_unlink || self.caps.paths_while_named
    }

    /// The attributes of `ino` as reported to the frontend.
    fn attr(&self, ino: Ino, attr: Attr) -> Attr {
        let shows = self.caps.stable_ino || self.caps.shows_st_ino;
        if shows { attr } else { Attr { st_ino: ino.0, ..attr } }
    }

    /// Adds a lookup of the file at `name`, and returns its entry.
    fn enter(&self, parent: Ino, name: Name<'_>, attr: Attr, fresh: bool) -> Result<Entry> {
        let found = NamedFile { kind: attr.kind, st_ino: self.caps.identity(&attr), fresh };
        let ino = self.names.lock().bind(parent, name.as_bytes(), found)?;
        Ok(self.entry(ino, attr))
    }

    fn entry(&self, ino: Ino, attr: Attr) -> Entry {
        let attr = self.attr(ino, attr);
        Entry { ino, generation: 0, attr, valid_for: self.caps.entry_valid_for }
    }

    /// Creates a file at `name` by calling `make`.
    fn make(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        make: impl FnOnce(PathRef<'_>) -> Result<()>,
    ) -> Result<Entry> {
        let held = self.names.hold(cx, &[NeededPath::Change(parent, name.as_bytes())])?;
        make(held.path(0))?;
        let attr = self.inner.getattr(cx, PathOperand::Path(held.path(0)))?;
        self.enter(parent, name, attr, true)
    }

    /// Adds a file that was created and opened. Closes it on failure.
    fn enter_open(
        &self,
        cx: &Context<'_>,
        held: &HeldPaths<'_>,
        (parent, name): (Ino, Name<'_>),
        flags: OpenFlags,
        fh: Fh,
    ) -> Result<Entry> {
        let file = PathFile { path: self.needs_path().then(|| held.path(0)), fh };
        let entered = self.inner.getattr(cx, PathOperand::Open(file)).and_then(|attr| {
            let entry = self.enter(parent, name, attr, true)?;
            self.names.add_handle(entry.ino, fh, flags.writable())?;
            Ok(entry)
        });
        if entered.is_err() {
            // The earlier error is reported, not an error of release.
            let _ = self.inner.release(cx, file, ReleaseArgs::from_flags(flags));
        }
        entered
    }

    /// The listing of an open directory. Reads it again if `from` is the start.
    fn listing(&self, cx: &Context<'_>, file: File, from: u64) -> Result<Arc<[PathDirEntry]>> {
        let dir = self.dirs.get(file.fh)?;
        let lock =
            |dir: &OpenPathDir| dir.listing.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if from > 0
            && let Some(listing) = lock(&dir)
        {
            return Ok(listing);
        }
        let read = |dir: PathFile<'_>| self.inner.readdir(cx, dir);
        let mut entries = match self.with_file(cx, File { fh: dir.fh, ..file }, read) {
            Err(Errno::ESTALE) => Err(Errno::ENOENT),
            other => other,
        }?;
        entries.retain(|entry| Name::new(&entry.name).is_ok());
        let listing: Arc<[PathDirEntry]> = entries.into();
        *dir.listing.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&listing));
        Ok(listing)
    }
}

/// The first positions of a listing are `.` and `..`.
const DOTS: [&[u8]; 2] = [b".", b".."];

/// The attributes of a file without its hidden name: the clients have removed it.
fn unhidden(attr: Attr, is_hidden: bool) -> Attr {
    Attr { nlink: attr.nlink.saturating_sub(u32::from(is_hidden)), ..attr }
}

impl<P: PathFileSystem> FileSystem for PathAdapter<P> {
    fn caps(&self) -> Caps {
        // Numbers of forgotten inodes are invalid, and submit is the trait's default.
        Caps { submits: false, readdir_entries: false, ..self.caps.caps.clone() }
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        self.inner.attach(origin, notify);
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.inner.detach(origin)
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let held = self.names.hold(cx, &[NeededPath::Name(parent, name.as_bytes())])?;
        match self.inner.getattr(cx, PathOperand::Path(held.path(0))) {
            Ok(attr) => self.enter(parent, name, attr, false),
            Err(errno) => {
                if errno == Errno::ENOENT {
                    // Another client has removed it.
                    self.names.lock().detach(parent, name.as_bytes());
                }
                Err(errno)
            }
        }
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        let parent = if ino == Ino::ROOT {
            Ino::ROOT
        } else {
            let mut tree = self.names.lock();
            let parent = tree.node(ino)?.names.first().ok_or(Errno::ENOENT)?.0;
            tree.look_up_again(parent)?;
            parent
        };
        let found = self.getattr(cx, parent, None);
        if found.is_err() {
            self.forget(parent, 1);
        }
        Ok(self.entry(parent, found?))
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        self.names.lock().forget(ino, lookups);
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |path| self.inner.mknod(cx, path, node))
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |path| self.inner.mkdir(cx, path, node))
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |path| self.inner.symlink(cx, path, target, node))
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let wants = [NeededPath::Node(ino), NeededPath::Change(parent, name.as_bytes())];
        let held = self.names.hold(cx, &wants).map_err(|refusal| match refusal {
            // The new name is on the path of the old one, so that it exists.
            HoldRefusal::Nested(_) => Errno::EEXIST,
            other => other.into(),
        })?;
        self.inner.link(cx, held.path(0), held.path(1))?;
        let attr = self.inner.getattr(cx, PathOperand::Path(held.path(1)))?;
        // With stable numbers this finds `ino`. Otherwise each name is an inode.
        self.enter(parent, name, attr, !self.caps.stable_ino)
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.unlink_or_hide(cx, parent, name)
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let held = self.names.hold(cx, &[NeededPath::Change(parent, name.as_bytes())])?;
        self.inner.rmdir(cx, held.path(0))?;
        let mut tree = self.names.lock();
        if let Some(ino) = tree.child(parent, name.as_bytes()) {
            tree.forget_st_ino(ino);
            tree.detach(parent, name.as_bytes());
        }
        Ok(())
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        self.rename(cx, from, to, flags)
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        let held = self.names.hold(cx, &[NeededPath::Node(ino)])?;
        self.inner.readlink(cx, held.path(0))
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        let call = |target: PathOperand<'_>| self.inner.getattr(cx, target);
        let attr = self.with_target(cx, ino, fh, false, call)?;
        let (known, is_hidden) = {
            let names = self.names.lock();
            let node = names.node(ino)?;
            (node.st_ino, node.hidden.is_some())
        };
        let replaced = self.caps.stable_ino && known.is_some_and(|known| known != attr.st_ino);
        if replaced { Err(Errno::ESTALE) } else { Ok(self.attr(ino, unhidden(attr, is_hidden))) }
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        let call = |target: PathOperand<'_>| self.inner.setattr(cx, target, set);
        let attr = self.with_target(cx, ino, fh, set.size.is_some(), call)?;
        let is_hidden = self.names.lock().node(ino)?.hidden.is_some();
        Ok(self.attr(ino, unhidden(attr, is_hidden)))
    }

    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        self.with_target(cx, ino, None, false, |target| self.inner.access(cx, target, mask))
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        let call = |target: PathOperand<'_>| self.inner.setxattr(cx, target, name, value, flags);
        self.with_target(cx, ino, None, false, call)
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        let call = |target: PathOperand<'_>| self.inner.getxattr(cx, target, name, room);
        self.with_target(cx, ino, None, false, call)
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.with_target(cx, ino, None, false, |target| self.inner.listxattr(cx, target, room))
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        self.with_target(cx, ino, None, false, |target| self.inner.removexattr(cx, target, name))
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let held = self.names.hold(cx, &[NeededPath::Node(ino)])?;
        let opened = self.inner.open(cx, held.path(0), args)?;
        let added = self.names.add_handle(ino, opened.fh, args.flags.writable());
        if added.is_err() {
            let path = self.needs_path().then(|| held.path(0));
            let release = ReleaseArgs::from_flags(args.flags);
            let _ = self.inner.release(cx, PathFile { path, fh: opened.fh }, release);
        }
        added.map(|()| opened)
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let held = self.names.hold(cx, &[NeededPath::Change(parent, name.as_bytes())])?;
        let opened = self.inner.create(cx, held.path(0), node, args)?;
        let entry = self.enter_open(cx, &held, (parent, name), args.flags, opened.fh)?;
        Ok((entry, opened))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        self.with_file(cx, file, |file| self.inner.read(cx, file, args, out))
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.with_file(cx, file, |file| self.inner.write(cx, file, args, data))
    }

    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        self.with_file(cx, file, |file| self.inner.flush(cx, file, owner))
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        // Called only once, so that an interrupt must not end it.
        let cx = &Context::new(cx.caller).from_origin(cx.origin);
        self.names.close_handle(file.ino, file.fh);
        // A file that another client has removed is released nevertheless.
        let held = self.hold_for_handle(cx, file.ino).unwrap_or(None);
        let path = held.as_ref().map(|held| held.path(0));
        let result = self.inner.release(cx, PathFile { path, fh: file.fh }, args);
        let last = self.names.drop_handle(file.ino, file.fh);
        drop(held);
        if last {
            self.remove_hidden(cx, file.ino);
        }
        result
    }

    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        self.with_file(cx, file, |file| self.inner.fsync(cx, file, datasync))
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        self.with_file(cx, file, |file| self.inner.fallocate(cx, file, range))
    }

    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        self.with_file(cx, file, |file| self.inner.lseek(cx, file, offset, whence))
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let survives = self.caps.handles_survive_unlink;
        let wants = [NeededPath::Node(copy.src.ino), NeededPath::Node(copy.dst.ino)];
        let held = match self.needs_path().then(|| self.names.hold(cx, &wants)) {
            None => None,
            Some(Err(HoldRefusal::Gone)) if survives => None,
            Some(held) => Some(held?),
        };
        let path = |place| held.as_ref().map(|held| held.path(place));
        let copy = PathCopy {
            src: PathFile { path: path(0), fh: copy.src.fh },
            src_offset: copy.src_offset,
            dst: PathFile { path: path(1), fh: copy.dst.fh },
            dst_offset: copy.dst_offset,
            length: copy.length,
            flags: copy.flags,
        };
        self.inner.copy_file_range(cx, &copy)
    }

    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        self.with_any(cx, file, |file| self.inner.ioctl(cx, file, args))
    }

    fn poll(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        self.with_any(cx, file, |file| self.inner.poll(cx, file, events, wake))
    }

    fn bmap(&self, cx: &Context<'_>, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        let held = self.names.hold(cx, &[NeededPath::Node(ino)])?;
        self.inner.bmap(cx, held.path(0), block_size, index)
    }

    fn getlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        self.with_any(cx, file, |file| self.inner.getlk(cx, file, request))
    }

    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        // The path is copied, and its names are released, before the call that may wait.
        let (fh, path) = self.with_any(cx, file, |file| {
            Ok((file.fh, file.path.map(|path| path.as_bytes().to_vec())))
        })?;
        let path = path.as_deref().map(PathRef::from_checked);
        self.inner.setlk(cx, PathFile { path, fh }, request)
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        if self.names.lock().node(ino)?.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let held = self.names.hold(cx, &[NeededPath::Node(ino)])?;
        let opened = self.inner.opendir(cx, held.path(0), flags)?;
        Ok(OpenReply { fh: self.dirs.add(opened.fh), ..opened })
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let listing = self.listing(cx, dir, from)?;
        let start = usize::try_from(from).unwrap_or(usize::MAX);
        for (place, name) in DOTS.into_iter().enumerate().skip(start) {
            let (next, kind) = (place as u64 + 1, FileKind::Directory);
            if out.push(DirItem { ino: dir.ino.0, next, kind, name }) == PushOutcome::Full {
                return Ok(());
            }
        }
        let rest = listing.iter().enumerate().skip(start.saturating_sub(DOTS.len()));
        for (place, entry) in rest {
            let next = (place + DOTS.len() + 1) as u64;
            let (kind, name) = (entry.kind, &entry.name[..]);
            // Some programs take a d_ino of 0 for a removed entry.
            let item = DirItem { ino: entry.st_ino.max(1), next, kind, name };
            let look_up = || self.lookup(cx, dir.ino, Name::new(name).ok()?).ok();
            if out.push_with(item, look_up) == PushOutcome::Full {
                return Ok(());
            }
        }
        Ok(())
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        let cx = &Context::new(cx.caller).from_origin(cx.origin);
        let open = self.dirs.remove(dir.fh)?;
        let held = self.hold_for_handle(cx, dir.ino).unwrap_or(None);
        let path = held.as_ref().map(|held| held.path(0));
        self.inner.releasedir(cx, PathFile { path, fh: open.fh })
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        self.with_any(cx, dir, |dir| self.inner.fsyncdir(cx, dir, datasync))
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        self.with_target(cx, ino, None, false, |target| self.inner.statfs(cx, target))
    }

    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        self.inner.syncfs(cx)
    }
}
