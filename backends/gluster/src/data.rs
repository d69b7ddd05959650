//! Open files, their data, and changes of attributes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::posix::drop_set_id;
use defuse_fs::{
    Attr, CacheMode, Context, Errno, Fallocate, Fh, FileKind, Ino, Io, IoOp, LockOwner, OpenArgs,
    OpenFlags, OpenReply, ReadArgs, ReadBuf, ReleaseArgs, Result, SetAttr, WriteArgs, WriteBuf,
};

use crate::answers::{ChangeSubject, QueryContext};
use crate::attributes::{changes, with_changes};
use crate::changes::ClientChange;
use crate::contents;
use crate::contents::{FileContents, OpenOnDemand, SmallFile};
use crate::file::GfapiHandle;
use crate::gluster::{ActingUser, Gluster, OpenObject as Open, OpenVolumeFile, PlainModeCache};
use crate::transfer::{self, TransferFile};
use crate::volume::{Gfid, set, zeroed_stat};
use crate::writes::WritePosition;

/// The place of a write on the servers.
struct WriteTarget {
    handle: Arc<GfapiHandle>,
    offset: u64,
    at: WritePosition,
}

/// The flags of open(2) that the servers know.
pub(crate) fn open_flags(flags: OpenFlags) -> i32 {
    let known = 3 | OpenFlags::APPEND | OpenFlags::DIRECT | OpenFlags::SYNC | OpenFlags::NOATIME;
    (flags.0 & known) as i32
}

impl Gluster {
    pub(crate) fn open_file(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        args: OpenArgs,
    ) -> Result<OpenReply> {
        let acting = self.act(cx);
        let flags = open_flags(args.flags);
        let gfid = self.nodes.gfid(ino)?;
        let handle = match self.small_file(cx, gfid, args.flags) {
            Some(small) => {
                let handle = OpenOnDemand::from_small_file(small);
                self.unopened.add(&handle);
                handle
            }
            None => OpenOnDemand::from_handle(
                self.open_known(ino, |object| self.volume.open(object, flags))?,
            ),
        };
        if !self.watch.is_on() {
            // Another client may have closed the file with a new size.
            drop(self.begin_own_change_of(ino));
        }
        // Messages about earlier changes have come before the answer of the servers.
        let keeps = self.keeps_pages(ino, gfid, &acting.query);
        // With contents of the size that the kernel knows, it need not ask for the size again.
        let is_known = keeps || handle.unopened_file().is_some_and(SmallFile::has_size);
        if !is_known {
            self.changes.expire_attributes(gfid);
            self.watch.record_open(&self.nodes, &self.volume, ino);
        }
        let file = OpenVolumeFile {
            ino,
            flags: args.flags,
            handle,
            plain: Mutex::default(),
            writes: Arc::default(),
            plain_mode: PlainModeCache::default(),
        };
        let cache = if keeps { CacheMode::Keep } else { CacheMode::Cached };
        Ok(OpenReply { cache, ..self.add_open_file(file) })
    }

    /// True if the pages that a kernel has of a file are valid: the servers tell of changes, and
    /// have told of none since an open that dropped the pages. Otherwise, this open is to drop
    /// them.
    fn keeps_pages(&self, ino: Ino, gfid: Gfid, query: &QueryContext) -> bool {
        let Some(long) = self.watch.long().filter(|_| !self.settings.takes_turns) else {
            return false;
        };
        let is_watched = |since| self.watch.inbox.has_report_since(gfid, since);
        let is_valid = self.watch.is_unchanged(&self.nodes, &self.volume, ino)
            && self.pages.last_drop(gfid, long).is_some_and(|since| !is_watched(since));
        if !is_valid {
            self.pages.drop_at(gfid, query.since);
        }
        is_valid
    }

    /// A small file that root opens to read it through a kernel, with the contents of this moment.
    /// Servers check the rights of other users when they open a file.
    fn small_file(&self, cx: &Context<'_>, gfid: Gfid, flags: OpenFlags) -> Option<SmallFile> {
        const OTHERS: u32 = OpenFlags::APPEND | OpenFlags::DIRECT | OpenFlags::NOATIME;
        let is_plain = !flags.writable() && !flags.has(OTHERS);
        if self.settings.takes_turns || !is_plain || cx.caller.uid != 0 {
            return None;
        }
        let attr =
            self.changes.kernel_attributes(gfid).filter(|attr| attr.kind == FileKind::Regular)?;
        let since = self.changes.now();
        // After an error, the open itself tells what is wrong.
        let contents = FileContents::read(&self.volume, gfid, attr.size).ok().flatten()?;
        let file = (gfid, open_flags(flags));
        Some(SmallFile::new(&self.volume, file, contents, (since, attr)))
    }

    /// The part of the contents of an open file that a read gets, if it may, or must because the
    /// file is gone.
    fn find_unopened_part<'a>(
        &self,
        file: &'a OpenVolumeFile,
        offset: u64,
        len: usize,
    ) -> Option<&'a [u8]> {
        let small = file.handle.unopened_file()?;
        let part = small.part(offset, len);
        let is_new = small.is_young(self.watch.short_lifetime())
            && !self.changes.has_changed(small.gfid(), small.since)
            && self.changes.still_has(small.gfid(), &small.attr);
        (is_new || matches!(file.handle(), Err(Errno::ENOENT | Errno::ESTALE))).then_some(part)
    }

    /// Opens the files that are opened on demand, before their last name may be removed: those of
    /// an inode, or those found in a directory.
    pub(crate) fn open_before(&self, is_meant: impl Fn(Ino) -> bool) {
        if !contents::has_unopened() {
            return;
        }
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let files: Vec<_> = open
            .values()
            .filter_map(|open| match open {
                Open::File(file) if file.handle.unopened_file().is_some() => Some(Arc::clone(file)),
                _ => None,
            })
            .collect();
        drop(open);
        for file in files.iter().filter(|file| is_meant(file.ino)) {
            // If it fails, the contents remain.
            let _ = file.handle();
        }
    }

    /// Records that this client changes an inode, until the result is dropped, if a kernel uses the
    /// volume.
    pub(crate) fn client_change(&self, ino: Ino) -> Option<ClientChange> {
        let gfid = self.nodes.gfid(ino).ok()?;
        (!self.settings.takes_turns).then(|| self.changes.begin(gfid))
    }

    /// Adds an open file, and makes the reply to the frontend.
    pub(crate) fn add_open_file(&self, file: OpenVolumeFile) -> OpenReply {
        let fh = self.add_open(Open::File(Arc::new(file)));
        OpenReply { parallel_direct_writes: true, ..OpenReply::new(fh) }
    }

    /// Flushes writes that the client of GlusterFS has delayed, and drops the locks of `owner`.
    pub(crate) fn flush_file(&self, file: &OpenVolumeFile, owner: LockOwner) -> Result<()> {
        if self.locks.drop_owner(file.ino, owner)? {
            // Closing the owner's handle was a flush.
            file.writes.take_unflushed();
        }
        // Without `write-behind`, the servers have all writes that were acknowledged.
        if file.writes.take_unflushed() && self.watch.holds_writes() {
            // Closing another handle is the only flush of libgfapi.
            file.handle()?.duplicate()?.close()?;
        }
        Ok(())
    }

    pub(crate) fn release_file(&self, fh: Fh, args: ReleaseArgs) {
        let Some(Open::File(file)) = self.remove_open(fh) else { return };
        self.nodes.record_release(file.ino, fh);
        self.locks.release(file.ino, fh);
        if let Some(owner) = args.flock_owner {
            self.locks.flocks.drop_owner(file.ino.0, defuse_fs::LockKind::Flock, owner);
        }
    }

    pub(crate) fn read_file(
        &self,
        file: &OpenVolumeFile,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let len = out.remaining();
        if let Some(part) = self.find_unopened_part(file, args.offset, len) {
            return out.put(part).map(drop);
        }
        if let Some(room) = out.lend()
            && room.len() == len
        {
            let count = file.handle()?.read(room, args.offset)?;
            return out.advance(count);
        }
        let mut room = self.pool.take(len);
        let read = file.handle()?.read(&mut room[..len], args.offset);
        let put = read.and_then(|count| out.put(&room[..count]).map(drop));
        self.pool.give(room);
        put
    }

    pub(crate) fn write_file(
        &self,
        cx: &Context<'_>,
        file: &OpenVolumeFile,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let WriteTarget { handle, offset, at } = self.target(file, args)?;
        self.prepare_write(cx, file, args)?;
        let own = self.client_change(file.ino);
        let wrote = |count: usize| match own {
            Some(own) if at == WritePosition::Offset => own.finish_write(offset + count as u64),
            _ => {}
        };
        let len = data.remaining();
        let by = file.writes.begin();
        if let Some(bytes) = data.borrow()
            && bytes.len() == len
        {
            let count = handle.write(bytes, offset, by.flags())?;
            file.writes.add(at, by);
            wrote(count);
            data.skip(count)?;
            return Ok(count);
        }
        let mut room = self.pool.take(len);
        let mut filled = 0;
        let mut written = Ok(0);
        while filled < len {
            match data.take(&mut room[filled..len]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(errno) => {
                    written = Err(errno);
                    break;
                }
            }
        }
        let written =
            written.and_then(|_: usize| handle.write(&room[..filled], offset, by.flags()));
        self.pool.give(room);
        if let Ok(count) = written {
            file.writes.add(at, by);
            wrote(count);
        }
        written
    }

    /// The target of a write. The flags of an open file may have changed since it was opened on the
    /// servers, where only `O_APPEND` matters.
    fn target(&self, file: &OpenVolumeFile, args: WriteArgs) -> Result<WriteTarget> {
        let placed = |handle: &Arc<GfapiHandle>, offset| {
            Ok(WriteTarget { handle: Arc::clone(handle), offset, at: WritePosition::Offset })
        };
        let appends = args.flags.has(OpenFlags::APPEND) && !args.from_cache;
        match (appends, file.flags.has(OpenFlags::APPEND)) {
            (true, false) => {
                let handle = file.handle()?;
                placed(&handle, handle.stat()?.st_size as u64)
            }
            (true, true) => {
                self.wait_for_placed_writes(file)?;
                Ok(WriteTarget { at: WritePosition::End, ..placed(&file.handle()?, args.offset)? })
            }
            (false, true) => {
                let mut plain = file.plain.lock().unwrap_or_else(PoisonError::into_inner);
                let handle = match &*plain {
                    Some(handle) => Arc::clone(handle),
                    None => {
                        let flags = open_flags(file.flags.difference(OpenFlags::APPEND));
                        Arc::new(self.volume.open(&self.object(file.ino)?, flags)?)
                    }
                };
                placed(plain.insert(handle), args.offset)
            }
            (false, false) => placed(&file.handle()?, args.offset),
        }
    }

    /// Waits until the servers have all writes at offsets, before a write at the end of the file.
    /// GlusterFS's client sends them at the same time, so that a server may determine the end
    /// before it has the other writes.
    fn wait_for_placed_writes(&self, file: &OpenVolumeFile) -> Result<()> {
        let open = self.nodes.open_files(file.ino);
        let writes =
            open.into_iter().filter_map(|fh| Some(Arc::clone(&self.file(fh).ok()?.writes)));
        let held_back: Vec<_> = writes
            .filter_map(|writes| writes.unacknowledged_writes().map(|placed| (writes, placed)))
            .collect();
        if !held_back.is_empty() {
            // The client returns the size after all writes.
            file.handle()?.stat()?;
            held_back.iter().for_each(|(writes, placed)| writes.record_durable(*placed));
        }
        Ok(())
    }

    /// Starts a transfer. A thread of libgfapi finishes it.
    pub(crate) fn start(&self, io: Io) {
        let started = match io.op() {
            IoOp::Read { file, .. } | IoOp::Write { file, .. } | IoOp::Fsync { file, .. } => {
                self.file(file.fh)
            }
            IoOp::Fsyncdir { .. } | IoOp::Syncfs => Err(Errno::ENOSYS),
        };
        let file = match started {
            Ok(file) => file,
            Err(errno) => return io.finish(Err(errno)),
        };
        let _acting = io.with_context(|cx| self.act_on_open(cx));
        if let IoOp::Read { args, len, .. } = io.op()
            && let Some(part) = self.find_unopened_part(&file, args.offset, len)
        {
            let mut io = io;
            let put = io.with_read_buf(|_, out| out.put(part).map(drop));
            return io.finish_filled(put);
        }
        let (handle, on) = (file.handle(), self.settings.answer_on);
        let handle = match handle {
            Ok(handle) => handle,
            Err(errno) => return io.finish(Err(errno)),
        };
        match io.op() {
            IoOp::Read { args, len, .. } => {
                // The read changes the access time.
                let change = self.begin_own_change_of(file.ino);
                let file = TransferFile { handle, write: None, change, own: None };
                transfer::read(io, (file, args.offset), len, &self.pool, on);
            }
            IoOp::Write { args, .. } => {
                let change = self.begin_own_change_of(file.ino);
                let ready = io.with_context(|cx| self.prepare_write(cx, &file, args));
                match ready.and_then(|()| self.target(&file, args)) {
                    Ok(WriteTarget { handle, offset, at }) => {
                        let write = Some((Arc::clone(&file.writes), at, file.writes.begin()));
                        let own = self.client_change(file.ino).map(|own| (own, offset));
                        let file = TransferFile { handle, write, change, own };
                        transfer::write(io, (file, offset), &self.pool, on);
                    }
                    Err(errno) => io.finish(Err(errno)),
                }
            }
            IoOp::Fsync { datasync, .. } => transfer::sync(io, handle, datasync, &self.pool, on),
            IoOp::Fsyncdir { .. } | IoOp::Syncfs => io.finish(Err(Errno::ENOSYS)),
        }
    }

    pub(crate) fn allocate(
        &self,
        cx: &Context<'_>,
        file: &OpenVolumeFile,
        range: Fallocate,
        query: &QueryContext,
    ) -> Result<()> {
        const HOLE: u32 = Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE;
        const KEEP: u32 = Fallocate::KEEP_SIZE;
        let Fallocate { mode, offset, length } = range;
        let _change = self.client_change(file.ino);
        match mode {
            0 | KEEP => file.handle()?.allocate(mode == KEEP, offset, length)?,
            HOLE => file.handle()?.discard(offset, length)?,
            Fallocate::ZERO_RANGE => file.handle()?.zero(offset, length)?,
            _ => return Err(Errno::EOPNOTSUPP),
        }
        if cx.caller.uid != 0 {
            self.drop_set_id(file.ino, query)?;
        }
        Ok(())
    }

    pub(crate) fn set_attributes(
        &self,
        cx: &Context<'_>,
        (ino, fh): (Ino, Option<Fh>),
        change: &SetAttr,
    ) -> Result<Attr> {
        let acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        let _change = self.watch.begin_change(&[gfid]);
        let own = self.client_change(ino);
        let _own =
            self.begin_own_change(&[ChangeSubject::Attributes(gfid), ChangeSubject::Rights(gfid)]);
        if change.perm.is_some() || change.uid.is_some() || change.gid.is_some() {
            // The counter changes before and after the change: a write in between reads the mode
            // again.
            let changes = || self.mode_changes.fetch_add(1, Ordering::AcqRel);
            changes();
            let changed = self.change((ino, fh), change, (&acting, own));
            changes();
            return changed;
        }
        self.change((ino, fh), change, (&acting, own))
    }

    fn change(
        &self,
        (ino, fh): (Ino, Option<Fh>),
        change: &SetAttr,
        (acting, own): (&ActingUser<'_>, Option<ClientChange>),
    ) -> Result<Attr> {
        if let Some(size) = change.size {
            self.set_size((ino, fh), size)?;
        }
        let (stat, valid) = changes(change);
        if valid != 0 {
            match self.set_named(ino, (&stat, valid)) {
                Err(Errno::EPERM) if self.is_set_id_drop(ino, change, &acting.query)? => {
                    // A write by a user other than the owner drops the bits. The frontend has
                    // allowed the write; a server would only let the owner change them.
                    self.volume.act_as(0, 0, &[]);
                    self.set_named(ino, (&stat, valid))?;
                }
                set => set?,
            }
        }
        if change.size.is_some() && change.kill_suidgid {
            self.drop_set_id(ino, &acting.query)?;
        }
        // The kernel gets what it has, with the change, and asks again when it needs the time of
        // the change.
        if let Some(own) = own
            && let Some(before) = own.previous_attributes()
            && let Some(attr) = with_changes(before, change.size, (&stat, valid))
        {
            own.finish_with(attr);
            return Ok(attr);
        }
        // An answer to a query within a change is not kept.
        self.fetch_attributes(ino, &acting.query)
    }

    /// Drops set-user-id and set-group-id before a write if the frontend requests it. The servers
    /// drop file capabilities by themselves, but write with the rights of root, and keep these
    /// bits.
    fn prepare_write(
        &self,
        cx: &Context<'_>,
        file: &OpenVolumeFile,
        args: WriteArgs,
    ) -> Result<()> {
        let changes = self.mode_changes.load(Ordering::Acquire);
        if !args.kill_suidgid || file.plain_mode.is_known(changes) {
            return Ok(());
        }
        let Some(plain) = file.plain_mode.record_mode(file.handle()?.stat()?.st_mode, changes)
        else {
            return Ok(());
        };
        let _change = self.watch.begin_change(&[self.nodes.gfid(file.ino)?]);
        // A server would only let the owner change the mode, but the frontend has allowed the
        // write.
        self.volume.act_as(0, 0, &[]);
        let dropped = file.handle()?.chmod(plain);
        self.volume.act_as(cx.caller.uid, cx.caller.gid, &[]);
        dropped
    }

    /// Drops the bits that a change of the data drops. This thread acts as root afterwards: a
    /// server would only let the owner change them, but the frontend has allowed it.
    fn drop_set_id(&self, ino: Ino, query: &QueryContext) -> Result<()> {
        let perm = self.fetch_attributes(ino, query)?.perm;
        let mut stat = zeroed_stat();
        stat.st_mode = drop_set_id(perm, true);
        if stat.st_mode == perm {
            return Ok(());
        }
        self.volume.act_as(0, 0, &[]);
        self.set_named(ino, (&stat, set::MODE))
    }

    fn set_size(&self, (ino, fh): (Ino, Option<Fh>), size: u64) -> Result<()> {
        match fh.map(|fh| self.file(fh)).transpose()? {
            // The rights of an open file last as long as it is open.
            Some(file) if file.flags.writable() => file.handle()?.truncate(size),
            _ => self.reach(
                ino,
                |object| self.volume.truncate(object, size),
                |file| file.handle()?.truncate(size),
            ),
        }
    }

    fn set_named(&self, ino: Ino, (stat, valid): (&libc::stat, i32)) -> Result<()> {
        self.reach(
            ino,
            |object| self.volume.set_attributes(object, *stat, valid),
            |file| set_open(file, (stat, valid)),
        )
    }

    fn is_set_id_drop(&self, ino: Ino, change: &SetAttr, query: &QueryContext) -> Result<bool> {
        let only_perm = SetAttr { perm: change.perm, size: change.size, ..SetAttr::default() };
        let requested = SetAttr { kill_suidgid: false, unanswered: false, ..*change };
        let Some(perm) = change.perm.filter(|_| requested == only_perm) else {
            return Ok(false);
        };
        let old = self.fetch_attributes(ino, query)?.perm;
        Ok(old & !perm & !0o6000 == 0 && perm & !old == 0)
    }
}

/// Changes the attributes of an open file without a name.
fn set_open(file: &OpenVolumeFile, (stat, valid): (&libc::stat, i32)) -> Result<()> {
    let old = file.handle()?.stat()?;
    if valid & set::MODE != 0 {
        file.handle()?.chmod(stat.st_mode)?;
    }
    if valid & (set::UID | set::GID) != 0 {
        let choose = |bit, value| if valid & bit != 0 { value } else { u32::MAX };
        file.handle()?.chown(choose(set::UID, stat.st_uid), choose(set::GID, stat.st_gid))?;
    }
    if valid & (set::ATIME | set::MTIME) != 0 {
        let (a, m) = (valid & set::ATIME != 0, valid & set::MTIME != 0);
        let (a, m) = (if a { stat } else { &old }, if m { stat } else { &old });
        let time = |tv_sec, tv_nsec| libc::timespec { tv_sec, tv_nsec };
        let atime = time(a.st_atime, a.st_atime_nsec);
        file.handle()?.set_times([atime, time(m.st_mtime, m.st_mtime_nsec)])?;
    }
    Ok(())
}
