//! Attributes and data of files.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use defuse_fs::posix::AccessTimeRule;
use defuse_fs::{
    AnswerLifetime, Attr, Context, CopyRange, Entry, Errno, Fallocate, Fh, File, FileKind, Ino,
    OpenArgs, OpenFlags, OpenReply, Origin, ReadArgs, ReadBuf, Result, SetAttr, SetTime, WriteArgs,
    WriteBuf,
};

use crate::MemoryFileSystem;
use crate::data::{CopyStep, FallocateProgress};
use crate::handles::HandleEntry;
use crate::inode::{InodeMeta, InodeRefs, MemoryInode};
use crate::names::check_openable;
use crate::pages::PAGE;
use crate::sync::{read, write};

const DAY_SECS: i64 = 24 * 60 * 60;

/// Pages and holes that one copy_file_range(2) copies at most, so that it ends soon: 64 MiB of
/// data, or more with holes.
const COPY_STEPS: u32 = 16_384;

/// Steps of a copy between two checks for interrupts.
const INTERRUPT_STEPS: u32 = 256;

impl MemoryFileSystem {
    pub(crate) fn entry(&self, inode: &MemoryInode, lifetime: AnswerLifetime) -> Entry {
        let attr = self.attr(inode, lifetime.attributes);
        // Inode numbers are never reused, so one generation is enough.
        Entry { ino: Ino(inode.ino), generation: 0, attr, valid_for: lifetime.name }
    }

    pub(crate) fn attr(&self, inode: &MemoryInode, valid_for: Duration) -> Attr {
        self.attr_of(inode, &inode.meta(), valid_for)
    }

    fn attr_of(&self, inode: &MemoryInode, meta: &InodeMeta, valid_for: Duration) -> Attr {
        if !inode.seen.load(Ordering::Relaxed) {
            inode.seen.store(true, Ordering::Relaxed);
        }
        Attr {
            st_ino: inode.ino,
            kind: inode.kind,
            perm: meta.perm,
            nlink: meta.nlink,
            uid: meta.uid,
            gid: meta.gid,
            rdev: inode.rdev,
            size: inode.size.load(Ordering::Relaxed),
            blocks: inode.pages.load(Ordering::Relaxed) * (PAGE as u64 / 512),
            blksize: PAGE as u32,
            atime: meta.atime,
            mtime: meta.mtime,
            ctime: meta.ctime,
            btime: Some(inode.btime),
            valid_for,
        }
    }

    pub(crate) fn setattr(&self, ino: Ino, set: &SetAttr) -> Result<Attr> {
        let inode = self.table.get(ino.0)?;
        // Held to the end, so that all changes take effect at once.
        let mut data = match set.size {
            Some(_) => Some(write(inode.data()?)),
            None => None,
        };
        let now = self.clock.exact();
        if let (Some(size), Some(data)) = (set.size, &mut data) {
            data.set_size(size)?;
            inode.publish(data);
        }
        let mut meta = inode.change_meta();
        if set.size.is_some() {
            meta.set_modified(now);
        }
        if set.uid.is_some() || set.gid.is_some() {
            meta.uid = set.uid.unwrap_or(meta.uid);
            meta.gid = set.gid.unwrap_or(meta.gid);
            if !inode.is_dir() {
                meta.kill_suidgid();
            }
        }
        if set.kill_suidgid && !inode.is_dir() {
            meta.kill_suidgid();
        }
        if let Some(perm) = set.perm {
            meta.chmod(perm);
        }
        let time = |time| match time {
            SetTime::Now => now,
            SetTime::At(time) => time,
        };
        meta.atime = set.atime.map_or(meta.atime, time);
        meta.mtime = set.mtime.map_or(meta.mtime, time);
        if !set.is_empty() {
            meta.ctime = set.ctime.unwrap_or(now);
        }
        if let Some(date) = set.ctime {
            self.clock.note(date);
        }
        Ok(self.attr_of(&inode, &meta, self.frontends.reply_attribute_lifetime()))
    }

    /// The result of opening `inode`, with a new handle unless it is a directory.
    pub(crate) fn make_open_reply(&self, inode: &Arc<MemoryInode>) -> OpenReply {
        let fh = match inode.is_dir() {
            true => Fh(0),
            false => self.handles.open(Arc::clone(inode)),
        };
        OpenReply {
            fh,
            cache: self.frontends.cache_mode(),
            // Flush has no effect other than releasing POSIX locks.
            no_flush: true,
            // Every write takes the lock of its file anyway.
            parallel_direct_writes: true,
            cache_dir: inode.is_dir() && self.frontends.caches_listings(),
            ..OpenReply::default()
        }
    }

    /// Opens a file, or a directory if `dir` is set, and notifies the other frontends of the
    /// resulting changes.
    pub(crate) fn open_inode(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        args: OpenArgs,
        dir: bool,
    ) -> Result<OpenReply> {
        let inode = self.table.get(ino.0)?;
        if dir {
            inode.dir()?;
        }
        check_openable(&inode, args.flags)?;
        inode.change_refs(|refs| refs.opens += 1)?;
        let truncates = args.flags.has(OpenFlags::TRUNC) && inode.kind == FileKind::Regular;
        let truncated = || self.truncate_on_open(&inode, args);
        if truncates && let Err(errno) = self.change_attributes(cx, ino, truncated) {
            self.drop_refs(&inode, |refs| refs.opens -= 1);
            return Err(errno);
        }
        if self.access_times != AccessTimeRule::Never && !args.flags.has(OpenFlags::NOATIME) {
            self.access_at_open(cx.origin, &inode, args.flags);
        }
        Ok(self.make_open_reply(&inode))
    }

    /// Updates the access time of a file that is opened where no read does: once a day, because
    /// reads do not read the clock, and for a frontend that reads from its own pages.
    fn access_at_open(&self, origin: Origin, inode: &MemoryInode, flags: OpenFlags) {
        let reads_pages = inode.kind == FileKind::Regular
            && flags.readable()
            && inode.atime_is_due(self.access_times)
            && self.frontends.reads_own_pages(origin);
        if reads_pages {
            self.touch_atime(inode);
            self.frontends.notify_access_time(Ino(inode.ino));
        } else if inode.meta().atime.secs + DAY_SECS <= self.clock.exact().secs {
            inode.change_meta().atime = self.clock.exact();
            self.frontends.notify_attributes(origin, &[Ino(inode.ino)]);
        }
    }

    fn truncate_on_open(&self, inode: &MemoryInode, args: OpenArgs) -> Result<()> {
        let mut data = write(inode.data()?);
        data.set_size(0)?;
        inode.publish(&data);
        self.record_data_change(inode, args.kill_suidgid);
        Ok(())
    }

    /// Ends an open file or directory.
    pub(crate) fn close(&self, inode: &MemoryInode) {
        let mut waiting = Vec::new();
        self.drop_refs(inode, |refs| {
            refs.opens = refs.opens.saturating_sub(1);
            // Without an open file, no lock remains. Linux does not notify a FUSE server that a
            // lock of an open file description (F_OFD_SETLK) ends, so it ends here.
            if refs.opens == 0 {
                waiting = self.locks.take_file(inode.ino);
            }
        });
        self.locks.refuse(waiting);
    }

    /// Changes the references of `inode`, and frees it with the last one.
    pub(crate) fn drop_refs(&self, inode: &MemoryInode, change: impl FnOnce(&mut InodeRefs)) {
        if inode.change_refs(change) == Ok(true) {
            self.table.remove(inode.ino);
            self.locks.refuse(self.locks.take_file(inode.ino));
        }
    }

    /// Updates the access time by the rule of the mount. True if that has changed it.
    pub(crate) fn touch_atime(&self, inode: &MemoryInode) -> bool {
        let due = inode.atime_is_due(self.access_times);
        if due {
            inode.change_meta().atime = self.clock.exact();
        }
        due
    }

    fn record_data_change(&self, inode: &MemoryInode, kill_suidgid: bool) {
        let mut meta = inode.change_meta();
        // The attributes were read since the last change, so the next reader must see a new time.
        let now = if inode.seen.load(Ordering::Relaxed) {
            inode.seen.store(false, Ordering::Relaxed);
            self.clock.exact()
        } else {
            self.clock.coarse()
        };
        meta.set_modified(now);
        if kill_suidgid {
            meta.kill_suidgid();
        }
    }

    /// Runs `operation` on the inode of an open file, which is not closed meanwhile. A handle that
    /// is not known, such as 0, leads to the inode, too.
    fn with_open<T>(
        &self,
        file: File,
        operation: impl FnOnce(&MemoryInode) -> Result<T>,
    ) -> Result<T> {
        if let Some(HandleEntry(handle)) = self.handles.get(file.fh)
            && let Some(inode) = &*read(handle)
            && inode.ino == file.ino.0
        {
            return operation(inode);
        }
        operation(&*self.table.get(file.ino.0)?)
    }

    /// Returns true if the access time was changed.
    pub(crate) fn read(
        &self,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<((), bool)> {
        self.with_open(file, |inode| {
            read(inode.data()?).read(args.offset, out)?;
            let accessed = !args.flags.has(OpenFlags::NOATIME) && self.touch_atime(inode);
            Ok(((), accessed))
        })
    }

    pub(crate) fn write(
        &self,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.with_open(file, |inode| {
            let mut bytes = write(inode.data()?);
            if data.remaining() == 0 {
                return Ok(0);
            }
            let append = args.flags.has(OpenFlags::APPEND) && !args.from_cache;
            let offset = if append { bytes.size() } else { args.offset };
            let result = bytes.write(offset, data);
            if result.is_ok() {
                inode.publish(&bytes);
                self.record_data_change(inode, args.kill_suidgid);
            }
            result
        })
    }

    pub(crate) fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        let inode = self.table.get(file.ino.0)?;
        let data = inode.data().map_err(|_| Errno::ENODEV)?;
        let mut allocation = FallocateProgress::new(&self.pool);
        // No interrupt ends it: few programs call again after EINTR, and a timer would end each
        // call.
        loop {
            let mut data = write(data);
            let step = data.fallocate(range, &mut allocation);
            // Publish after an error, too, because some pages may be allocated.
            inode.publish(&data);
            drop(data);
            if step? {
                break;
            }
            // Others use the file between two steps.
            std::thread::yield_now();
        }
        self.record_data_change(&inode, cx.caller.uid != 0);
        Ok(())
    }

    /// Fails with `EINVAL` for flags, and for overlapping ranges of one file.
    pub(crate) fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let src = self.table.get(copy.src.ino.0)?;
        let dst = self.table.get(copy.dst.ino.0)?;
        let both_fit = copy.src_offset.checked_add(copy.length).is_some()
            && copy.dst_offset.checked_add(copy.length).is_some();
        if copy.flags != 0 || !both_fit {
            return Err(if both_fit { Errno::EINVAL } else { Errno::EOVERFLOW });
        }
        let done = if src.ino == dst.ino {
            let mut data = write(dst.data()?);
            let size = data.size();
            // Only existing data can overlap, as on Linux.
            let length = copy.length.min(size.saturating_sub(copy.src_offset));
            if copy.src_offset.abs_diff(copy.dst_offset) < length {
                return Err(Errno::EINVAL);
            }
            let result = copy_steps(cx, copy, size, |at| data.copy_within(at));
            dst.publish(&data);
            result?
        } else {
            // Lock in the order of inode numbers, as everywhere that two files are locked.
            let (from, mut to);
            if src.ino < dst.ino {
                from = read(src.data()?);
                to = write(dst.data()?);
            } else {
                to = write(dst.data()?);
                from = read(src.data()?);
            }
            let result = copy_steps(cx, copy, from.size(), |at| to.copy_from(&from, at));
            dst.publish(&to);
            result?
        };
        if done > 0 {
            self.record_data_change(&dst, cx.caller.uid != 0);
        }
        Ok(done)
    }

    /// Returns true if the access time was changed.
    pub(crate) fn readlink(&self, ino: Ino) -> Result<(Vec<u8>, bool)> {
        let inode = self.table.get(ino.0)?;
        match &inode.body {
            crate::inode::InodeContent::Symlink(target, _) => {
                let accessed = self.touch_atime(&inode);
                Ok((target.to_vec(), accessed))
            }
            _ => Err(Errno::EINVAL),
        }
    }

    pub(crate) fn inode(&self, ino: Ino) -> Result<Arc<MemoryInode>> {
        self.table.get(ino.0)
    }
}

/// Copies page by page and hole by hole until the length is reached, the source ends, or an error
/// or interrupt occurs, which is a short copy if some bytes were copied. After [`COPY_STEPS`] the
/// copy is short, too. The source ends at `size`, its size at the start, because a copy within one
/// file may move the end.
fn copy_steps(
    cx: &Context<'_>,
    copy: &CopyRange,
    size: u64,
    mut step: impl FnMut(CopyStep) -> Result<u64>,
) -> Result<u64> {
    let length = copy.length.min(size.saturating_sub(copy.src_offset));
    let mut done = 0;
    for steps in 1..=COPY_STEPS {
        if done >= length {
            break;
        }
        let len = length - done;
        let at = CopyStep { src: copy.src_offset + done, dst: copy.dst_offset + done, len };
        match step(at) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
        if steps % INTERRUPT_STEPS == 0 && cx.is_interrupted() {
            break;
        }
    }
    Ok(done)
}
