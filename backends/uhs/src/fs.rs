//! The file system for frontends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use defuse_block::BlockDevice;
use defuse_fs::locks::LockQueue;
use defuse_fs::posix::{self, clears_mark};
use defuse_fs::source::{NoWatch, WorkWatch};
use defuse_fs::{
    Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, Fallocate, Fh, Figure, File, FileKind,
    FileSystem, Ino, Io, IoOp, Lock, LockKind, LockOwner, LockRequest, LockSupport, LockWait, Name,
    NewNode, NormalPath, Notify, OpenArgs, OpenFlags, OpenReply, Origin, PathResolution, ReadArgs,
    ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags, Shortcuts, StatFs, Whence,
    WriteArgs, WriteBuf, Xattr, XattrName,
};

use crate::commit::CommitRules;
use crate::engine::{SubmissionThreads, UhsEngine, VALID_FOR, is_direct};
use crate::format::BLOCK;
use crate::group::GroupReadGuard;
use crate::names::{InodeCreation, LoadProblem, NameStore};
use crate::store::StoreError;
use crate::{UhsOptions, engine};

/// The most bytes of a write that are taken at a time.
const LARGEST_WRITE: usize = 1 << 20;

/// A file system on a device.
pub struct Uhs {
    engine: Arc<UhsEngine>,
    locks: LockQueue,
    listings: Mutex<HashMap<u64, u64>>,
    next_listing: AtomicU64,
    /// The thread that commits changes without a sync. It starts with the first frontend, which may
    /// give up privileges before.
    thread: Mutex<Option<JoinHandle<()>>>,
    commit: Option<Duration>,
    /// Threads that perform submitted operations, for which no caller waits. None on a device with
    /// few queues.
    submitted: OnceLock<Option<SubmissionThreads>>,
}

impl Uhs {
    /// Makes an empty file system that occupies all of `device`. Its root directory has the
    /// permission bits, the user and the group `root`. `random` generates secrets: its seed must be
    /// unpredictable.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn make(
        device: Arc<dyn BlockDevice>,
        root: (u32, u32, u32),
        random: &mut fastrand::Rng,
    ) -> std::result::Result<(), StoreError> {
        let mut uuid = [0; 16];
        random.fill(&mut uuid);
        engine::make(device, uuid, root, random)
    }

    /// Opens the file system on `device`, and undoes changes that a power failure has left
    /// unfinished. Returns its problems beside it; if there are any, nothing is written.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn open(
        device: Arc<dyn BlockDevice>,
        options: UhsOptions,
        random: fastrand::Rng,
    ) -> std::result::Result<(Uhs, Vec<LoadProblem>), StoreError> {
        Uhs::open_watched(device, options, (CommitRules::ALL, random), &NoWatch)
    }

    pub(crate) fn open_by(
        device: Arc<dyn BlockDevice>,
        options: UhsOptions,
        rules: CommitRules,
        random: fastrand::Rng,
    ) -> std::result::Result<(Uhs, Vec<LoadProblem>), StoreError> {
        Uhs::open_watched(device, options, (rules, random), &NoWatch)
    }

    /// Performs [`open`](Uhs::open); `watch` sees the reading of all inodes, and can end it
    /// ([`StoreError::Interrupted`]).
    pub(crate) fn open_watched(
        device: Arc<dyn BlockDevice>,
        options: UhsOptions,
        (rules, random): (CommitRules, fastrand::Rng),
        watch: &dyn WorkWatch,
    ) -> std::result::Result<(Uhs, Vec<LoadProblem>), StoreError> {
        let (engine, problems) = UhsEngine::open(device, options, rules, random, watch)?;
        let engine = Arc::new(engine);
        let uhs = Uhs {
            engine,
            locks: LockQueue::default(),
            listings: Mutex::default(),
            next_listing: AtomicU64::new(1),
            thread: Mutex::default(),
            commit: options.commit,
            submitted: OnceLock::new(),
        };
        Ok((uhs, problems))
    }

    /// Starts the committing thread, once. Without it, everything is durable after a sync only.
    fn start_committing(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(interval) = self.commit.filter(|_| thread.is_none()) else { return };
        match self.engine.start(interval) {
            Ok(started) => *thread = Some(started),
            Err(error) => log::error!("uhs: nothing is durable without a sync: no thread: {error}"),
        }
    }

    /// Ends without writing anything, as at a power failure.
    #[cfg(test)]
    pub(crate) fn abandon(self) {
        self.engine.abandon();
    }

    #[cfg(test)]
    pub(crate) fn engine(&self) -> &UhsEngine {
        &self.engine
    }

    /// Makes an inode with a name, and notifies the other frontends.
    fn entry(
        &self,
        cx: &Context<'_>,
        (parent, name): (Ino, Name<'_>),
        node: &NewNode<'_>,
        target: Option<&[u8]>,
        opens: bool,
    ) -> Result<Entry> {
        let (keeps_sgid, lifetime) =
            (cx.caller.uid == 0, self.engine.frontends().name_lifetime(cx.origin));
        let making = InodeCreation { node, target, keeps_sgid, opens, sure: false, lifetime };
        self.change_names(cx, || {
            let make = |names: &NameStore, handle: &GroupReadGuard<'_>| {
                names.make(handle, parent.0, name, making)
            };
            Ok((self.engine.change(make)?, [parent]))
        })
    }

    /// Makes a change of names by `cx`, and notifies the other frontends. `change` also returns the
    /// inodes whose attributes it has changed.
    fn change_names<T, const N: usize>(
        &self,
        cx: &Context<'_>,
        change: impl FnOnce() -> Result<(T, [Ino; N])>,
    ) -> Result<T> {
        let (answer, inodes) = change()?;
        self.engine.frontends().notify_names(cx.origin, &inodes);
        Ok(answer)
    }

    /// Makes a change of the attributes of `inodes` by `cx`, and notifies the other frontends. A
    /// change that fails may have changed something.
    fn change_attributes<T, const N: usize>(
        &self,
        cx: &Context<'_>,
        inodes: [Ino; N],
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let answer = change();
        self.engine.frontends().notify_attributes(cx.origin, &inodes);
        answer
    }

    /// Clears set-group-id before a change that `kills` the set-id bits, if that depends on the
    /// groups of the caller.
    fn clear_mark(&self, cx: &Context<'_>, ino: Ino, kills: bool) {
        // Root keeps the bit, and need not wait for the lock of the inode.
        let may = kills && cx.caller.uid != 0;
        if may && self.engine.names().is_marked(ino.0, |perm, gid| clears_mark(cx, perm, gid)) {
            // The change itself reports problems of the inode.
            let _ = self.engine.change(|names, handle| names.clear_mark(handle, ino.0));
        }
    }

    fn set_attributes(&self, cx: &Context<'_>, ino: Ino, set: &SetAttr) -> Result<Attr> {
        let valid_for = self.engine.frontends().reply_attribute_lifetime();
        self.change_attributes(cx, [ino], || self.engine.setattr(ino.0, set, valid_for))
    }

    fn make_open_reply(&self) -> OpenReply {
        let cache = self.engine.frontends().cache_mode();
        OpenReply { cache, no_flush: true, parallel_direct_writes: true, ..OpenReply::default() }
    }
}

/// Reads, and notifies the other frontends if the access time has changed.
fn read(
    engine: &UhsEngine,
    origin: Origin,
    file: File,
    args: ReadArgs,
    out: &mut ReadBuf<'_>,
) -> Result<()> {
    if engine.read(file.ino.0, (args.offset, args.flags), out)? {
        engine.frontends().notify_attributes(origin, &[file.ino]);
    }
    Ok(())
}

/// Writes, and notifies the other frontends.
fn write(
    engine: &UhsEngine,
    origin: Origin,
    file: File,
    args: WriteArgs,
    data: &mut WriteBuf<'_>,
) -> Result<usize> {
    let taken = write_parts(engine, file, args, data);
    engine.frontends().notify_attributes(origin, &[file.ino]);
    let taken = taken?;
    if args.flags.0 & OpenFlags::SYNC != 0 {
        let datasync = args.flags.0 & OpenFlags::SYNC == OpenFlags::DSYNC;
        engine.sync_file(file.ino.0, datasync)?;
    }
    Ok(taken)
}

/// Writes in parts. Returns the number of bytes written before an error.
fn write_parts(
    engine: &UhsEngine,
    file: File,
    args: WriteArgs,
    data: &mut WriteBuf<'_>,
) -> Result<usize> {
    let append = args.flags.has(OpenFlags::APPEND) && !args.from_cache;
    let way = args.flags.into();
    let mut taken = 0;
    while data.remaining() > 0 {
        let offset = (!append).then_some(args.offset + taken as u64);
        let write = |bytes: &[u8]| {
            (bytes.len(), engine.write(file.ino.0, offset, way, bytes, args.kill_suidgid))
        };
        let lent = data.borrow().map(|bytes| write(&bytes[..bytes.len().min(LARGEST_WRITE)]));
        let (len, done) = match lent {
            Some((len, done)) => {
                data.skip(*done.as_ref().unwrap_or(&0))?;
                (len, done)
            }
            None => {
                let mut bytes = vec![0; data.remaining().min(LARGEST_WRITE)];
                let len = data.take(&mut bytes)?;
                write(&bytes[..len])
            }
        };
        match done {
            Ok(more) => {
                taken += more;
                if more < len {
                    break;
                }
            }
            Err(errno) if taken == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(taken)
}

/// Performs a submitted operation, and answers it.
fn carry_out(engine: &UhsEngine, mut io: Io) {
    match io.op() {
        IoOp::Read { file, args, .. } => {
            let read = io.with_read_buf(|cx, out| read(engine, cx.origin, file, args, out));
            io.finish_filled(read);
        }
        IoOp::Write { file, args, .. } => {
            let written = io.with_write_buf(|cx, data| write(engine, cx.origin, file, args, data));
            io.finish(written);
        }
        IoOp::Fsync { file, datasync } => {
            io.finish(engine.sync_file(file.ino.0, datasync).map(|()| 0));
        }
        IoOp::Fsyncdir { dir, datasync } => {
            io.finish(engine.sync_directory(dir.ino.0, datasync).map(|()| 0));
        }
        IoOp::Syncfs => io.finish(engine.sync_all().map(|()| 0)),
    }
}

impl Drop for Uhs {
    fn drop(&mut self) {
        self.engine.end();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        if let Some(submitted) = self.submitted.take().flatten() {
            submitted.end();
        }
        self.engine.commit_last();
    }
}

impl FileSystem for Uhs {
    fn caps(&self) -> Caps {
        Caps {
            read_only: self.engine.is_read_only(),
            exclusive: true,
            readdir_entries: true,
            posix_acl: true,
            security_labels: true,
            kill_suidgid: true,
            open_truncates: true,
            locks: LockSupport::Either,
            negative_lifetime: VALID_FOR,
            decides_on_names: true,
            delays_changes: true,
            of_one_process: true,
            ..Caps::default()
        }
    }

    fn negative_lifetime(&self, origin: Origin) -> Duration {
        self.engine.frontends().negative_lifetime(origin)
    }

    fn figures(&self) -> Vec<Figure> {
        self.engine.figures()
    }

    fn notes(&self) -> Vec<String> {
        self.engine.notes()
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        self.engine.frontends().attach(origin, notify, || self.engine.names().list_known());
        self.start_committing();
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.engine.frontends().detach(origin);
        self.engine.sync_all()
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let lifetime = self.engine.frontends().name_lifetime(cx.origin);
        self.engine.names().lookup(lifetime, parent.0, name)
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        let lifetime = self.engine.frontends().name_lifetime(cx.origin);
        self.engine.names().lookup_parent(lifetime, ino.0)
    }

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        if ino != Ino::ROOT && self.engine.forget(ino.0, lookups) {
            self.engine.frontends().record_forget(ino);
        }
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        match node.kind {
            FileKind::Directory => Err(Errno::EPERM),
            FileKind::CharDevice | FileKind::BlockDevice => {
                self.entry(cx, (parent, name), node, None, false)
            }
            _ => {
                let node = NewNode { rdev: 0, ..*node };
                self.entry(cx, (parent, name), &node, None, false)
            }
        }
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let node = NewNode { kind: FileKind::Directory, rdev: 0, ..*node };
        self.entry(cx, (parent, name), &node, None, false)
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let node = NewNode { kind: FileKind::Symlink, perm: 0o777, rdev: 0, ..*node };
        self.entry(cx, (parent, name), &node, Some(target), false)
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let lifetime = self.engine.frontends().name_lifetime(cx.origin);
        self.change_names(cx, || {
            Ok((self.engine.link(ino.0, (parent.0, name), lifetime)?, [parent, ino]))
        })
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.change_names(cx, || {
            let unlink = |names: &NameStore, handle: &GroupReadGuard<'_>| {
                names.unlink(handle, parent.0, name)
            };
            Ok(((), [parent, self.engine.change(unlink)?]))
        })
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.change_names(cx, || {
            let rmdir = |names: &NameStore, handle: &GroupReadGuard<'_>| {
                names.rmdir(handle, parent.0, name)
            };
            Ok(((), [parent, self.engine.change(rmdir)?]))
        })
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let whiteout = NewNode::new(FileKind::CharDevice, 0, cx.caller);
        self.change_names(cx, || {
            let [source, target] = self.engine.change(|names, handle| {
                let (from, to) = ((from.0.0, from.1), (to.0.0, to.1));
                names.rename(handle, from, to, flags, &whiteout)
            })?;
            Ok(((), [from.0, to.0, source, target]))
        })
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        let target = self.engine.readlink(ino.0)?;
        if self.engine.names().record_access(ino.0) {
            self.engine.frontends().notify_attributes(cx.origin, &[ino]);
        }
        Ok(target)
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        let valid_for = self.engine.frontends().attribute_lifetime(cx.origin, ino);
        self.engine.names().attr(ino.0, valid_for)
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        posix::check_owner_change(cx, &self.engine.names().attr(ino.0, Duration::ZERO)?, fh, set)?;
        self.clear_mark(cx, ino, set.kill_suidgid || set.uid.or(set.gid).is_some());
        self.set_attributes(cx, ino, set)
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        posix::check_owner_xattr(cx, &self.engine.names().attr(ino.0, Duration::ZERO)?, name)?;
        self.change_attributes(cx, [ino], || self.engine.setxattr(ino.0, (name, value), flags))
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        if name.is_acl() {
            // The kernel caches it with the attributes.
            self.engine.frontends().attribute_lifetime(cx.origin, ino);
        }
        self.engine.names().getxattr(ino.0, name, room)
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.engine.names().listxattr(ino.0, cx.caller.uid == 0, room)
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        posix::check_owner_xattr(cx, &self.engine.names().attr(ino.0, Duration::ZERO)?, name)?;
        self.change_attributes(cx, [ino], || self.engine.removexattr(ino.0, name))
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        self.engine.names().check_open(ino.0, args.flags.writable())?;
        if args.flags.has(OpenFlags::TRUNC) {
            let kill_suidgid = args.kill_suidgid;
            self.clear_mark(cx, ino, kill_suidgid);
            let set = SetAttr { size: Some(0), kill_suidgid, ..SetAttr::default() };
            self.set_attributes(cx, ino, &set)?;
        }
        let names = self.engine.names();
        names.record_open(ino.0)?;
        let dates = args.flags.readable() && !args.flags.has(OpenFlags::NOATIME);
        // The reads that follow come from pages of the frontend.
        if dates && self.engine.frontends().reads_own_pages(cx.origin) && names.record_access(ino.0)
        {
            self.engine.frontends().notify_access_time(ino);
        }
        Ok(self.make_open_reply())
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        _: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let node = NewNode { kind: FileKind::Regular, rdev: 0, ..*node };
        let entry = self.entry(cx, (parent, name), &node, None, true)?;
        Ok((entry, self.make_open_reply()))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let node = NewNode { kind: FileKind::Regular, rdev: 0, ..*node };
        let linkable = !args.flags.has(OpenFlags::EXCL);
        let (keeps_sgid, lifetime) =
            (cx.caller.uid == 0, self.engine.frontends().name_lifetime(cx.origin));
        let making = InodeCreation {
            node: &node,
            target: None,
            keeps_sgid,
            opens: true,
            sure: false,
            lifetime,
        };
        let entry =
            self.engine.change(|names, _| names.make_nameless(parent.0, making, linkable))?;
        Ok((entry, self.make_open_reply()))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        read(&self.engine, cx.origin, file, args, out)
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.clear_mark(cx, file.ino, args.kill_suidgid);
        write(&self.engine, cx.origin, file, args, data)
    }

    fn flush(&self, _: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        self.locks.drop_owner(file.ino.0, LockKind::Posix, owner);
        Ok(())
    }

    fn release(&self, _: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        if let Some(owner) = args.flock_owner {
            self.locks.drop_owner(file.ino.0, LockKind::Flock, owner);
        }
        self.engine.record_close(file.ino.0);
        // The blocks of a file without names go with the next group.
        self.engine.has_changes();
        Ok(())
    }

    fn fsync(&self, _: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        self.engine.sync_file(file.ino.0, datasync)
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        self.clear_mark(cx, file.ino, true);
        self.change_attributes(cx, [file.ino], || {
            self.engine.fallocate(file.ino.0, &range, cx.caller.uid != 0)
        })
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        self.clear_mark(cx, copy.dst.ino, true);
        // The access time of the source may be another one, too.
        self.change_attributes(cx, [copy.src.ino, copy.dst.ino], || {
            self.engine.copy(copy, cx.caller.uid != 0)
        })
    }

    fn lseek(&self, _: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        self.engine.seek(file.ino.0, offset, whence)
    }

    fn getlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        self.locks.conflict(file.ino.0, request)
    }

    fn setlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        self.locks.set(file.ino.0, request)
    }

    fn setlkw(&self, wait: LockWait) {
        self.locks.wait(wait.file().ino.0, wait);
    }

    fn opendir(&self, _: &Context<'_>, ino: Ino, _: OpenFlags) -> Result<OpenReply> {
        let names = self.engine.names();
        if !names.is_directory(ino.0)? {
            return Err(Errno::ENOTDIR);
        }
        names.record_open(ino.0)?;
        let cache_dir = self.engine.frontends().caches_listings();
        let fh = self.next_listing.fetch_add(1, Ordering::Relaxed);
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).insert(fh, u64::MAX);
        Ok(OpenReply { fh: Fh(fh), cache_dir, ..self.make_open_reply() })
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let names = self.engine.names();
        // New names come at the end: a listing ends where the directory ended when it began.
        let end = {
            let mut listings = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
            let end = listings.entry(dir.fh.0).or_insert(u64::MAX);
            if from == 0 {
                *end = names.next_stamp();
            }
            *end
        };
        if names.record_access(dir.ino.0) {
            self.engine.frontends().notify_attributes(cx.origin, &[dir.ino]);
        }
        let frontends = &self.engine.frontends();
        let lifetime = frontends.lists_entries().then(|| frontends.name_lifetime(cx.origin));
        names.list(dir.ino.0, (from, end), lifetime, out)
    }

    fn releasedir(&self, _: &Context<'_>, dir: File) -> Result<()> {
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).remove(&dir.fh.0);
        self.engine.record_close(dir.ino.0);
        Ok(())
    }

    fn fsyncdir(&self, _: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        self.engine.sync_directory(dir.ino.0, datasync)
    }

    fn statfs(&self, _: &Context<'_>, _: Ino) -> Result<StatFs> {
        let (files, more) = self.engine.names().count();
        let pool = self.engine.pool();
        let (blocks, free) = pool.count_blocks();
        Ok(StatFs {
            blocks,
            blocks_free: free,
            blocks_available: free,
            files: files + more,
            files_free: more,
            bsize: BLOCK as u32,
            frsize: BLOCK as u32,
            name_max: defuse_fs::NAME_MAX as u32,
        })
    }

    fn syncfs(&self, _: &Context<'_>) -> Result<()> {
        self.engine.sync_all()
    }

    fn submit(&self, io: Io) {
        let op = io.op();
        if let IoOp::Write { file, args, .. } = op
            && args.kill_suidgid
        {
            io.with_context(|cx| self.clear_mark(cx, file.ino, true));
        }
        let syncs = !matches!(op, IoOp::Read { .. } | IoOp::Write { .. });
        if !syncs && !is_direct(op) && !SubmissionThreads::is_line() {
            return carry_out(&self.engine, io);
        }
        let start = || SubmissionThreads::start(&self.engine, carry_out);
        match self.submitted.get_or_init(start) {
            Some(submitted) if is_direct(op) => submitted.begin(io),
            Some(submitted) => submitted.forward(io),
            None => carry_out(&self.engine, io),
        }
    }
}

impl Shortcuts for Uhs {
    fn resolve(&self, _: &Context<'_>, from: Ino, path: NormalPath<'_>) -> Result<PathResolution> {
        self.engine.names().resolve(
            from.0,
            path,
            self.engine.frontends().reply_attribute_lifetime(),
        )
    }
}
