//! The layer: each method checks the call, makes it, and records its result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_fs::{
    AccessMask, Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, FailureDomain, Fallocate, Fh,
    Figure, File, FileSystem, Ino, Io, IoOp, IoctlArgs, IoctlReply, Lifecycle, Lock, LockAnswer,
    LockKind, LockOwner, LockRequest, LockWait, Name, NewNode, Notify, OpenArgs, OpenFlags,
    OpenReply, Origin, PollHandle, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr,
    SetXattrFlags, Shortcuts, StatFs, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
};

use crate::connection::{PeerConnection, ServiceState};
use crate::listing::AccountedListing;
use crate::maps::MappedInode;
use crate::rules::{EXEC, READ, WRITE};
use crate::usage::CountedWait;

impl<F: FileSystem> FileSystem for PeerConnection<F> {
    /// Clients get no notification of each other's changes.
    fn caps(&self) -> Caps {
        Caps { exclusive: false, backing_files: false, ..self.behind.unchecked().caps() }
    }

    fn negative_lifetime(&self, origin: Origin) -> Duration {
        self.behind.unchecked().negative_lifetime(origin)
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        self.behind.unchecked().attach(origin, notify);
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.behind.unchecked().detach(origin)
    }

    /// Returns nothing. Figures concern all users, and are for the operator of the server, which
    /// reads them from the file system itself.
    fn figures(&self) -> Vec<Figure> {
        Vec::new()
    }

    /// Returns nothing. Notes are for the operator of the server, like the figures.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    fn failure_domain(&self, ino: Ino, name: Option<Name<'_>>) -> Option<FailureDomain> {
        self.behind.unchecked().failure_domain(ino, name)
    }

    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        self.behind.unchecked().lifecycle()
    }

    /// Returns `None`: a client names only inodes that it got by lookups, and no message is a
    /// shortcut.
    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        None
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        self.behind.unchecked().statfs(cx, ino)
    }

    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        let fs = self.behind.unchecked();
        let written = self.service.maps.write_back_all(fs);
        fs.syncfs(cx)?;
        written
    }

    // ---- names ----------------------------------------------------------------------------

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let call = self.check(cx, &[parent])?;
        self.ledger.admit_lookup()?;
        call.guard(|guard| guard.permit(parent, EXEC))?;
        call.fs.lookup(cx, parent, name).map(|entry| self.record_lookup(parent, name, entry))
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        let call = self.check(cx, &[ino])?;
        self.ledger.admit_lookup()?;
        call.guard(|guard| guard.permit(ino, EXEC))?;
        call.fs.lookup_parent(cx, ino).map(|entry| self.record_grant(entry))
    }

    /// Forgets as many lookups as the client holds.
    fn forget(&self, ino: Ino, lookups: u64) {
        match self.ledger.remove_lookups(ino, lookups) {
            0 => {}
            lookups => self.behind.unchecked().forget(ino, lookups),
        }
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let call = self.check(cx, &[parent])?;
        self.ledger.admit_lookup()?;
        let _held = self.service.holds.creation(parent);
        call.guard(|guard| guard.make(parent, node))?;
        call.fs.mknod(cx, parent, name, node).map(|entry| self.record_new_name(parent, name, entry))
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let call = self.check(cx, &[parent])?;
        self.ledger.admit_lookup()?;
        let _held = self.service.holds.creation(parent);
        call.guard(|guard| guard.make(parent, node))?;
        call.fs.mkdir(cx, parent, name, node).map(|entry| self.record_new_name(parent, name, entry))
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let call = self.check(cx, &[parent])?;
        self.ledger.admit_lookup()?;
        let _held = self.service.holds.creation(parent);
        call.guard(|guard| guard.make(parent, node))?;
        call.fs
            .symlink(cx, parent, name, target, node)
            .map(|entry| self.record_new_name(parent, name, entry))
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let call = self.check(cx, &[parent, ino])?;
        self.ledger.admit_lookup()?;
        let _held = self.service.holds.creation(parent);
        call.guard(|guard| guard.link(ino, parent))?;
        call.fs.link(cx, ino, parent, name).map(|entry| self.record_new_name(parent, name, entry))
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let call = self.check(cx, &[parent])?;
        let _held = self.service.holds.removal([parent, parent], self.is_guarded());
        call.guard(|guard| guard.remove(parent, name).map(drop))?;
        call.fs.unlink(cx, parent, name)
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let call = self.check(cx, &[parent])?;
        let _held = self.service.holds.removal([parent, parent], self.is_guarded());
        call.guard(|guard| guard.remove(parent, name).map(drop))?;
        call.fs.rmdir(cx, parent, name)
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let call = self.check(cx, &[from.0, to.0])?;
        let _held = self.service.holds.removal([from.0, to.0], self.is_guarded());
        call.guard(|guard| guard.rename(from, to, flags))?;
        call.fs.rename(cx, from, to, flags)
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.check(cx, &[ino])?.fs.readlink(cx, ino)
    }

    // ---- attributes -----------------------------------------------------------------------

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        let call = self.check(cx, &[ino])?;
        call.fs.getattr(cx, ino, self.lower_handle(ino, fh)?)
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        let call = self.check(cx, &[ino])?;
        let _held = self.service.holds.setattr(ino, set, self.is_guarded());
        call.guard(|guard| guard.setattr(ino, fh, set))?;
        let fh = self.lower_handle(ino, fh)?;
        let kill_suidgid = set.kill_suidgid || set.size.is_some() && self.is_guarded();
        let set = SetAttr { kill_suidgid, ..*set };
        let change = || call.fs.setattr(cx, ino, fh, &set);
        match set.size {
            Some(size) => {
                self.run_on_map(ino, change, |mapped, change| mapped.resize(call.fs, size, change))
            }
            None => change(),
        }
    }

    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        let call = self.check(cx, &[ino])?;
        call.guard(|guard| guard.permit(ino, mask.0 & (READ | WRITE | EXEC)))?;
        call.fs.access(cx, ino, mask)
    }

    /// The new access list of a user that is not in the group clears set-group-id.
    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        let call = self.check(cx, &[ino])?;
        let _held = self.service.holds.xattr(ino, self.is_guarded());
        call.guard(|guard| guard.xattr(ino, name, WRITE))?;
        let is_list = name.as_bytes() == b"system.posix_acl_access";
        let clears = match call.guard_if_user().filter(|_| is_list) {
            Some(guard) => guard.list_clears_sgid(ino)?,
            None => false,
        };
        let flags = SetXattrFlags { clear_sgid: flags.clear_sgid || clears, ..flags };
        call.fs.setxattr(cx, ino, name, value, flags)
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        let call = self.check(cx, &[ino])?;
        call.guard(|guard| guard.xattr(ino, name, READ))?;
        call.fs.getxattr(cx, ino, name, room)
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.check(cx, &[ino])?.fs.listxattr(cx, ino, room)
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        let call = self.check(cx, &[ino])?;
        let _held = self.service.holds.xattr(ino, self.is_guarded());
        call.guard(|guard| guard.xattr(ino, name, WRITE))?;
        call.fs.removexattr(cx, ino, name)
    }

    // ---- open files -----------------------------------------------------------------------

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let call = self.check(cx, &[ino])?;
        self.ledger.admit_open()?;
        call.guard(|guard| guard.open(ino, args.flags))?;
        let args = self.open_args(args);
        let open = || call.fs.open(cx, ino, args);
        let opened = match args.flags.has(OpenFlags::TRUNC) {
            true => self.run_on_map(ino, open, |mapped, open| mapped.resize(call.fs, 0, open)),
            false => open(),
        };
        opened.map(|opened| self.record_open(ino, opened, args.flags, false))
    }

    /// Never opens a file that exists: the permission to open it was not checked.
    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let call = self.check(cx, &[parent])?;
        self.ledger.admit_open()?;
        self.ledger.admit_lookup()?;
        let _held = self.service.holds.creation(parent);
        call.guard(|guard| guard.make(parent, node))?;
        let args = self.open_args(args);
        let flags = OpenFlags(args.flags.0 | OpenFlags::EXCL);
        let made = call.fs.create(cx, parent, name, node, OpenArgs { flags, ..args })?;
        self.ledger.record_lookup(parent, name, made.0.ino);
        self.ledger.record_report(made.0.ino);
        Ok(self.record_created(made, args.flags))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let call = self.check(cx, &[parent])?;
        self.ledger.admit_open()?;
        self.ledger.admit_lookup()?;
        call.guard(|guard| guard.make(parent, node))?;
        let args = self.open_args(args);
        let made = call.fs.tmpfile(cx, parent, node, args)?;
        Ok(self.record_created(made, args.flags))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let call = self.check(cx, &[file.ino])?;
        call.guard(|guard| guard.check_use(file, |modes| modes.reads))?;
        let (file, args) = (self.lower(file)?, self.read_args(args));
        let len = out.remaining();
        let mapped =
            self.service.maps.with(file.ino, |mapped| mapped.read(call.fs, cx, (file, args, len)));
        match mapped {
            Some(bytes) => out.put(&bytes?).map(drop),
            None => call.fs.read(cx, file, args, out),
        }
    }

    /// A user other than root may not request that set-user-id stays.
    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let call = self.check(cx, &[file.ino])?;
        call.guard(|guard| guard.check_use(file, |modes| modes.writes))?;
        let (file, args) = (self.lower(file)?, self.write_args(args));
        let mapped = self.service.maps.with(file.ino, |mapped| {
            let mut bytes = vec![0; data.remaining()];
            let count = data.take(&mut bytes)?;
            mapped.write(call.fs, cx, (file, args, &bytes[..count]))
        });
        match mapped {
            Some(written) => written,
            None => call.fs.write(cx, file, args, data),
        }
    }

    fn submit(&self, io: Io) {
        let op = io.op();
        if matches!(op, IoOp::Syncfs) && !self.service.maps.is_empty() {
            return io.perform(self);
        }
        let is_sync = matches!(op, IoOp::Fsync { .. });
        let concerns_maps = |ino| self.is_mapped(ino) || is_sync && self.service.maps.has_lost(ino);
        if file_of(op).is_some_and(|file| concerns_maps(file.ino)) {
            // The memory of a mapped file is part of the data.
            return io.perform(self);
        }
        match io.with_context(|cx| self.check_submitted(cx, op)) {
            Ok(op) => self.behind.unchecked().submit(io.map_op(|_| op)),
            Err(errno) => io.finish(Err(errno)),
        }
    }

    /// The locks of the owner stay if another connection of the family has them, too.
    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        let call = self.check(cx, &[file.ino])?;
        let lower = self.lower(file)?;
        if !self.ledger.release_flushed(file, owner) {
            return Ok(());
        }
        // A program that closes a file waits for this reply, and not for the reply to its release.
        if self.ledger.remove_flock(file, owner) {
            self.drop_locks(lower, &[(LockKind::Flock, owner)]);
        }
        call.fs.flush(cx, lower, self.ledger.owner(owner))
    }

    /// Not checked: a release arrives after the process has ended. The ledger knows the open file.
    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        let closed = self.ledger.record_close(file).ok_or(Errno::EBADF)?;
        let file = File { ino: file.ino, fh: closed.handle };
        self.drop_locks(file, &closed.locks);
        if !closed.release {
            return Ok(());
        }
        let flock_owner = args.flock_owner.map(|owner| self.ledger.owner(owner));
        self.behind.unchecked().release(cx, file, ReleaseArgs { flock_owner, ..args })
    }

    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        let call = self.check(cx, &[file.ino])?;
        let file = self.lower(file)?;
        self.write_back(call.fs, file.ino)?;
        call.fs.fsync(cx, file, datasync)?;
        self.service.maps.take_loss(file.ino)
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        let call = self.check(cx, &[file.ino])?;
        call.guard(|guard| guard.check_use(file, |modes| modes.writes))?;
        let file = self.lower(file)?;
        let change = || call.fs.fallocate(cx, file, range);
        // Some modes move the data behind the range.
        self.run_on_map(file.ino, change, |mapped, change| {
            mapped.change(call.fs, range.offset..u64::MAX, change)
        })
    }

    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        let call = self.check(cx, &[file.ino])?;
        let file = self.lower(file)?;
        self.write_back(call.fs, file.ino)?;
        call.fs.lseek(cx, file, offset, whence)
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let call = self.check(cx, &[copy.src.ino])?;
        call.guard(|guard| {
            guard.check_use(copy.src, |modes| modes.reads)?;
            guard.check_use(copy.dst, |modes| modes.writes)
        })?;
        let copy = CopyRange { src: self.lower(copy.src)?, dst: self.lower(copy.dst)?, ..*copy };
        self.write_back(call.fs, copy.src.ino)?;
        let change = || call.fs.copy_file_range(cx, &copy);
        let range = copy.dst_offset..copy.dst_offset.saturating_add(copy.length);
        self.run_on_map(copy.dst.ino, change, |mapped, change| {
            mapped.change(call.fs, range, change)
        })
    }

    /// The file system alone knows the meaning of a request, and which callers may make it. It is
    /// left to root.
    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        let call = self.check(cx, &[file.ino])?;
        call.guard(|_| Err(Errno::ENOTTY))?;
        call.fs.ioctl(cx, self.lower(file)?, args)
    }

    fn poll(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        let call = self.check(cx, &[file.ino])?;
        call.fs.poll(cx, self.lower(file)?, events, wake)
    }

    /// The blocks of a device are for root.
    fn bmap(&self, cx: &Context<'_>, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        let call = self.check(cx, &[ino])?;
        call.guard(|_| Err(Errno::EPERM))?;
        call.fs.bmap(cx, ino, block_size, index)
    }

    // ---- locks ----------------------------------------------------------------------------

    fn getlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        let call = self.check(cx, &[file.ino])?;
        let (file, request) = (self.lower(file)?, self.lower_request(request));
        let found = call.fs.getlk(cx, file, &request)?;
        if found.is_none() {
            return Ok(None);
        }
        // The holder may have ended in between, too: request the lock again in any case.
        self.await_ended();
        call.fs.getlk(cx, file, &request)
    }

    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        let call = self.check(cx, &[file.ino])?;
        self.ledger.admit_lock(request)?;
        call.guard(|guard| guard.lock(file, request))?;
        let (lower, lowered) = (self.lower(file)?, self.lower_request(request));
        self.ledger.record_lock_request(file, request);
        let mut taken = call.fs.setlk(cx, lower, &lowered);
        if taken == Err(Errno::EAGAIN) {
            // The holder may have ended in between, too: try again in any case.
            self.await_ended();
            taken = call.fs.setlk(cx, lower, &lowered);
        }
        if taken.is_ok() {
            self.ledger.record_lock(file.ino, request);
        }
        taken
    }

    fn setlkw(&self, wait: LockWait) {
        let (file, request) = (wait.file(), wait.request());
        let counted = match wait.with_context(|cx| self.check_wait(cx, file, &request)) {
            Ok(counted) => counted,
            Err(errno) => return wait.finish(Err(errno)),
        };
        let (ledger, service) = (Arc::clone(&self.ledger), Arc::clone(&self.service));
        let lowered = self.lower_request(&request);
        let listed = service.watch.wait(file.ino, lowered, Instant::now());
        let listed = RegisteredWait { service, number: listed };
        let account = |answer: LockAnswer| -> LockAnswer {
            Box::new(move |taken| {
                let _ended = (counted, listed);
                if taken.is_ok() {
                    ledger.record_lock(file.ino, &request);
                }
                answer(taken);
            })
        };
        match self.lower(file) {
            Ok(lower) => {
                let wait = wait.map_file(|_| lower).map_request(|_| lowered);
                self.behind.unchecked().setlkw(wait.map_answer(account));
            }
            Err(errno) => wait.finish(Err(errno)),
        }
    }

    // ---- directories ----------------------------------------------------------------------

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        let call = self.check(cx, &[ino])?;
        self.ledger.admit_open()?;
        call.guard(|guard| guard.opendir(ino, flags))?;
        call.fs.opendir(cx, ino, flags).map(|opened| self.record_open(ino, opened, flags, true))
    }

    /// A user that may read the directory but not search it gets names without inodes.
    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let call = self.check(cx, &[dir.ino])?;
        let searches = || call.guard(|guard| guard.permit(dir.ino, EXEC)).is_ok();
        let gives = out.wants_entries() && searches() && self.ledger.may_look_up();
        let lower = self.lower(dir)?;
        let mut listing = AccountedListing { out, ledger: &self.ledger, dir: dir.ino, gives };
        call.fs.readdir(cx, lower, from, &mut DirBuf::new(&mut listing))
    }

    /// Not checked, like [`release`](FileSystem::release).
    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        let closed = self.ledger.record_close(dir).ok_or(Errno::EBADF)?;
        let dir = File { ino: dir.ino, fh: closed.handle };
        self.drop_locks(dir, &closed.locks);
        if closed.release { self.behind.unchecked().releasedir(cx, dir) } else { Ok(()) }
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        let call = self.check(cx, &[dir.ino])?;
        call.fs.fsyncdir(cx, self.lower(dir)?, datasync)
    }
}

/// A wait in the list of the service, until it is dropped.
struct RegisteredWait {
    service: Arc<ServiceState>,
    number: u64,
}

impl Drop for RegisteredWait {
    fn drop(&mut self) {
        self.service.watch.end_wait(self.number);
    }
}

impl<F: FileSystem> PeerConnection<F> {
    /// Records a lookup of `name` in `parent`.
    fn record_lookup(&self, parent: Ino, name: Name<'_>, entry: Entry) -> Entry {
        self.ledger.record_lookup(parent, name, entry.ino);
        self.record_grant(entry)
    }

    /// Records a lookup that the client gets.
    fn record_grant(&self, entry: Entry) -> Entry {
        self.ledger.count_lookup(entry.ino);
        entry
    }

    /// Records that the client has made `name` in `parent`. It knows the attributes of the inode,
    /// and may name the inode for some time after it has returned the lookup, as after a report.
    fn record_new_name(&self, parent: Ino, name: Name<'_>, entry: Entry) -> Entry {
        self.ledger.record_report(entry.ino);
        self.record_lookup(parent, name, entry)
    }

    /// Records an open file that the client gets. The client uses no descriptor of a lower file:
    /// its reads and writes go through this layer, and so does a flush after a lock, which it ends.
    fn record_open(&self, ino: Ino, opened: OpenReply, flags: OpenFlags, dir: bool) -> OpenReply {
        let fh = self.ledger.record_open(File { ino, fh: opened.fh }, dir, flags);
        OpenReply { fh, backing: None, lower: None, ..opened }
    }

    fn record_created(
        &self,
        (entry, opened): (Entry, OpenReply),
        flags: OpenFlags,
    ) -> (Entry, OpenReply) {
        let entry = self.record_grant(entry);
        (entry, self.record_open(entry.ino, opened, flags, false))
    }

    fn lower_handle(&self, ino: Ino, fh: Option<Fh>) -> Result<Option<Fh>> {
        fh.map(|fh| self.ledger.handle(File { ino, fh })).transpose()
    }

    fn lower_request(&self, request: &LockRequest) -> LockRequest {
        LockRequest { owner: self.ledger.owner(request.owner), ..*request }
    }

    fn open_args(&self, args: OpenArgs) -> OpenArgs {
        OpenArgs { kill_suidgid: args.kill_suidgid || self.is_guarded(), ..args }
    }

    fn read_args(&self, args: ReadArgs) -> ReadArgs {
        ReadArgs { lock_owner: args.lock_owner.map(|owner| self.ledger.owner(owner)), ..args }
    }

    fn write_args(&self, args: WriteArgs) -> WriteArgs {
        let lock_owner = args.lock_owner.map(|owner| self.ledger.owner(owner));
        let kill_suidgid = args.kill_suidgid || self.is_guarded();
        WriteArgs { lock_owner, kill_suidgid, ..args }
    }

    /// Runs `change`; through `run` if the file is mapped.
    fn run_on_map<T, C: FnOnce() -> Result<T>>(
        &self,
        ino: Ino,
        change: C,
        run: impl FnOnce(&mut MappedInode, C) -> Result<T>,
    ) -> Result<T> {
        let mut change = Some(change);
        let maps = &self.service.maps;
        let done = maps.with(ino, |mapped| change.take().map(|change| run(mapped, change)));
        match (done.flatten(), change) {
            (Some(result), _) => result,
            (None, Some(change)) => change(),
            (None, None) => Err(Errno::EIO),
        }
    }

    /// Writes changes through mappings to the file system, before a request for the data.
    fn write_back(&self, fs: &F, ino: Ino) -> Result<()> {
        let written = self.service.maps.with(ino, |mapped| mapped.write_back(fs, 0..u64::MAX));
        written.unwrap_or(Ok(()))
    }

    /// Checks a submitted operation. Returns it with the numbers of the file system.
    fn check_submitted(&self, cx: &Context<'_>, op: IoOp) -> Result<IoOp> {
        match op {
            IoOp::Read { file, args, len } => {
                let call = self.check(cx, &[file.ino])?;
                call.guard(|guard| guard.check_use(file, |modes| modes.reads))?;
                Ok(IoOp::Read { file: self.lower(file)?, args: self.read_args(args), len })
            }
            IoOp::Write { file, args, len } => {
                let call = self.check(cx, &[file.ino])?;
                call.guard(|guard| guard.check_use(file, |modes| modes.writes))?;
                Ok(IoOp::Write { file: self.lower(file)?, args: self.write_args(args), len })
            }
            IoOp::Fsync { file, datasync } => {
                self.check(cx, &[file.ino])?;
                Ok(IoOp::Fsync { file: self.lower(file)?, datasync })
            }
            IoOp::Fsyncdir { dir, datasync } => {
                self.check(cx, &[dir.ino])?;
                Ok(IoOp::Fsyncdir { dir: self.lower(dir)?, datasync })
            }
            IoOp::Syncfs => Ok(op),
        }
    }

    /// Checks a wait for a lock, and counts it.
    fn check_wait(
        &self,
        cx: &Context<'_>,
        file: File,
        request: &LockRequest,
    ) -> Result<CountedWait> {
        let call = self.check(cx, &[file.ino])?;
        self.ledger.admit_lock(request)?;
        call.guard(|guard| guard.lock(file, request))?;
        self.lower(file)?;
        let wait = self.ledger.begin_wait()?;
        self.ledger.record_lock_request(file, request);
        Ok(wait)
    }
}

/// The open file of an operation on data.
fn file_of(op: IoOp) -> Option<File> {
    match op {
        IoOp::Read { file, .. } | IoOp::Write { file, .. } | IoOp::Fsync { file, .. } => Some(file),
        IoOp::Fsyncdir { .. } | IoOp::Syncfs => None,
    }
}
