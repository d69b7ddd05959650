//! Operations on open files, locks, and operations on a whole file.

use std::sync::Arc;
use std::time::Duration;

use defuse_fs::{
    AccessMode, CopyRange, Entry, Errno, Fallocate, Fh, File, FileKind, FileSystem, Ino, IoOp,
    IoctlArgs, LockOwner, LockType, Name, Notify, OpenArgs, OpenFlags, OpenReply, PollHandle,
    ReadArgs, ReadBuf, ReleaseArgs, Result, SliceSink, Whence,
};
use zerocopy::IntoBytes;

use super::names::new_node;
use super::{Dispatcher, HandlerOutcome, RequestCall, pod, send_success};
use crate::backing::BackingOffer;
use crate::transport::{DeferredKind, RequestReply};
use defuse_wire::abi;
use defuse_wire::convert::{self, CacheTimeouts};
use defuse_wire::reply::CreateOut;
use defuse_wire::request::RequestExtensions;
use defuse_wire::vendor;

impl Dispatcher {
    pub(super) fn open(
        &self,
        call: &RequestCall<'_>,
        args: &abi::OpenIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let wants_bytes = args.open_flags & vendor::OPEN_WANTS_BYTES != 0;
        let args = self.open_args(call, args.flags, args.open_flags);
        let opened = self.fs.open(&call.cx, call.ino, args)?;
        let mut out = self.open_out(&opened);
        self.give_backing(call.ino, &opened, args.flags, &mut out);
        self.note_open(File { ino: call.ino, fh: opened.fh }, args.flags);
        self.forget_times(call.ino, args.flags);
        let mut bytes = Vec::new();
        if wants_bytes && let Some(memory) = &self.memory {
            let whole = memory.read_whole(&call.cx, File { ino: call.ino, fh: opened.fh });
            if let Some((whole, read_is_due)) = whole {
                out.open_flags |= vendor::OPEN_HAS_BYTES;
                out.open_flags |= if read_is_due { vendor::OPEN_READ_IS_DUE } else { 0 };
                bytes = whole;
            }
        }
        if reply.send(&[out.as_bytes(), &bytes]).is_err() {
            self.undo_open(call, call.ino, &out, args.flags);
        }
        Ok(HandlerOutcome::Sent)
    }

    /// Creates a file, and never opens an existing one. The kernel takes the file for new, and
    /// checks no permission to open it (`fuse_create_open` in `fs/fuse/dir.c`).
    pub(super) fn create(
        &self,
        call: &RequestCall<'_>,
        args: &abi::CreateIn,
        name: &[u8],
        ext: &RequestExtensions<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let node = new_node(call, FileKind::Regular, args.mode, args.umask, ext)?;
        let requested = self.open_args(call, args.flags, args.open_flags);
        let open = OpenArgs { flags: OpenFlags(requested.flags.0 | OpenFlags::EXCL), ..requested };
        let made = self.fs.create(&call.cx, call.ino, Name::new(name)?, &node, open);
        let made = made.map_err(|errno| replace_create_error(errno, requested.flags))?;
        self.send_created(call, made, requested.flags, reply)
    }

    pub(super) fn tmpfile(
        &self,
        call: &RequestCall<'_>,
        args: &abi::CreateIn,
        ext: &RequestExtensions<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let node = new_node(call, FileKind::Regular, args.mode, args.umask, ext)?;
        let open = self.open_args(call, args.flags, args.open_flags);
        let made = self.fs.tmpfile(&call.cx, call.ino, &node, open)?;
        self.send_created(call, made, open.flags, reply)
    }

    fn send_created(
        &self,
        call: &RequestCall<'_>,
        (entry, opened): (Entry, OpenReply),
        flags: OpenFlags,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let mut open = self.open_out(&opened);
        self.give_backing(entry.ino, &opened, flags, &mut open);
        self.note_open(File { ino: entry.ino, fh: opened.fh }, flags);
        let out = CreateOut { entry: self.entry_out(&entry), open };
        if reply.send(&[out.as_bytes()]).is_err() {
            self.undo_open(call, entry.ino, &out.open, flags);
            self.give_back(entry.ino, 1);
        }
        Ok(HandlerOutcome::Sent)
    }

    /// Returns the arguments of an open. Without `HANDLE_KILLPRIV_V2` the kernel clears set-user-id
    /// by separate requests, except for an open that also truncates. The request then does not show
    /// if the caller has `CAP_FSETID`, so that only root keeps the bits.
    fn open_args(&self, call: &RequestCall<'_>, flags: u32, open_flags: u32) -> OpenArgs {
        let flags = convert::open_flags(flags);
        let clears_privileges = self.negotiated.uses(abi::FUSE_HANDLE_KILLPRIV_V2);
        let unseen = !clears_privileges && flags.has(OpenFlags::TRUNC) && call.cx.caller.uid != 0;
        let requested = unseen || open_flags & abi::FUSE_OPEN_KILL_SUIDGID != 0;
        OpenArgs { flags, kill_suidgid: requested }
    }

    /// The reply for an open file or directory.
    fn open_out(&self, opened: &OpenReply) -> abi::OpenOut {
        let mut out = convert::open_out(opened);
        let mut set = |flag, on: bool| out.open_flags |= if on { flag } else { 0 };
        set(abi::FOPEN_DIRECT_IO, self.direct_io);
        // A file system that keeps locks drops them at FLUSH.
        let locks = self.negotiated.uses(abi::FUSE_POSIX_LOCKS);
        set(abi::FOPEN_NOFLUSH, opened.no_flush && !locks);
        set(vendor::OPEN_FLUSH_ENDS_LOCKS, opened.no_flush && !self.is_kernel);
        out
    }

    /// Passes the backing file of an open file to the kernel, which then reads and writes it, if it
    /// has one.
    fn give_backing(&self, ino: Ino, opened: &OpenReply, flags: OpenFlags, out: &mut abi::OpenOut) {
        let Some(backings) = &self.backings else { return };
        let only_reads = flags.access() == AccessMode::Read;
        let offer = opened.backing.as_ref().map(|backing| BackingOffer { backing, only_reads });
        let Some(id) = backings.open(ino, opened.fh, offer) else { return };
        out.backing_id = id;
        out.open_flags |= abi::FOPEN_PASSTHROUGH;
        out.open_flags &= !abi::FOPEN_KEEP_CACHE;
        // The kernel takes an exclusive lock for every direct write to a backing file. The file
        // system permits several writers at once.
        if flags.has(OpenFlags::DIRECT) && !only_reads && opened.parallel_direct_writes {
            out.open_flags |= abi::FOPEN_DIRECT_IO;
        }
        // The backing file of another open of the inode, by which the kernel would write past the
        // file system. Its writes come as requests, and its mappings are of the backing file.
        if opened.backing.is_none() && flags.writable() {
            out.open_flags |= abi::FOPEN_DIRECT_IO;
        }
    }

    /// Undoes an open whose reply was not delivered.
    fn undo_open(&self, call: &RequestCall<'_>, ino: Ino, out: &abi::OpenOut, flags: OpenFlags) {
        let file = File { ino, fh: Fh(out.fh) };
        self.close_backing(file);
        self.note_close(file, flags);
        let _ = self.fs.release(&call.cx, file, ReleaseArgs::from_flags(flags));
    }

    /// Notes an open file for writing, for kernel mounts only; see [`super::privileges`] and
    /// [`super::synced_opens`].
    fn note_open(&self, file: File, flags: OpenFlags) {
        if flags.writable() && self.is_kernel {
            self.writers.record_open(file.ino);
            self.synced_opens.record_open(file, flags);
        }
    }

    /// The time for which the kernel may cache attributes of an inode: 0 while a file with a
    /// backing file is open for writing, since the kernel does not see that a store through a
    /// mapping changes the times. Options do not change this, because they concern changes by
    /// others.
    pub(super) fn timeouts_of(&self, ino: Ino) -> CacheTimeouts {
        if !self.writers.has_any(ino) {
            return self.timeouts;
        }
        let attr = if self.backings.is_some() { Some(Duration::ZERO) } else { self.timeouts.attr };
        let has_unwritten_pages = self.has_unwritten_pages(ino);
        CacheTimeouts { attr, has_unwritten_pages, ..self.timeouts }
    }

    /// True if the kernel may have pages of the inode that were stored by a mapping, or wait for
    /// their write-back: a file is open for writing, or was closed while it is mapped, and has no
    /// backing file.
    fn has_unwritten_pages(&self, ino: Ino) -> bool {
        self.writers.has_any(ino)
            && !self.backings.as_ref().is_some_and(|backings| backings.is_backed(ino))
    }

    /// Invalidates attributes that the kernel cached before the inode was opened for writing; see
    /// [`timeouts_of`](Self::timeouts_of).
    fn forget_times(&self, ino: Ino, flags: OpenFlags) {
        if self.backings.is_some() && flags.writable() {
            // On an error the kernel no longer knows the inode, and caches nothing for it.
            let _ = self.notify.invalidate_inode(ino, None);
        }
    }

    fn note_close(&self, file: File, flags: OpenFlags) {
        if flags.writable() && self.is_kernel {
            self.writers.record_close(file.ino);
            self.synced_opens.record_close(file, flags);
        }
    }

    fn close_backing(&self, file: File) {
        if let Some(backings) = &self.backings {
            backings.close(file.ino, file.fh);
        }
    }

    pub(super) fn release(
        &self,
        call: &RequestCall<'_>,
        args: &abi::ReleaseIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let unlock = args.release_flags & abi::FUSE_RELEASE_FLOCK_UNLOCK != 0;
        let flags = convert::open_flags(args.flags);
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        self.close_backing(file);
        self.note_close(file, flags);
        let flock_owner = unlock.then_some(LockOwner(args.lock_owner));
        if args.release_flags & vendor::RELEASE_HAS_READ != 0 && !self.is_kernel {
            self.has_read(call, file);
        }
        let args = ReleaseArgs { flock_owner, ..ReleaseArgs::from_flags(flags) };
        send_success(self.fs.release(&call.cx, file, args), reply)
    }

    /// The client has read bytes that came with the reply to OPEN: the access time follows.
    fn has_read(&self, call: &RequestCall<'_>, file: File) {
        let mut byte = [0];
        let mut sink = SliceSink::new(&mut byte);
        let mut out = ReadBuf::new(&mut sink, 1);
        let _ = self.fs.read(&call.cx, file, ReadArgs::default(), &mut out);
    }

    pub(super) fn flush(
        &self,
        call: &RequestCall<'_>,
        args: &abi::FlushIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        send_success(self.fs.flush(&call.cx, file, LockOwner(args.lock_owner)), reply)
    }

    pub(super) fn fsync(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        args: &abi::FsyncIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let datasync = args.fsync_flags & abi::FUSE_FSYNC_FDATASYNC != 0;
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        self.sync_by(call, IoOp::Fsync { file, datasync }, reply, |fs| {
            fs.fsync(&call.cx, file, datasync)
        })
    }

    pub(super) fn fsyncdir(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        args: &abi::FsyncIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let datasync = args.fsync_flags & abi::FUSE_FSYNC_FDATASYNC != 0;
        let dir = File { ino: call.ino, fh: Fh(args.fh) };
        self.sync_by(call, IoOp::Fsyncdir { dir, datasync }, reply, |fs| {
            fs.fsyncdir(&call.cx, dir, datasync)
        })
    }

    pub(super) fn syncfs(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        self.sync_by(call, IoOp::Syncfs, reply, |fs| fs.syncfs(&call.cx))
    }

    /// Submits `op`, or performs it by `run`.
    fn sync_by(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        op: IoOp,
        reply: &mut dyn RequestReply,
        run: impl FnOnce(&dyn FileSystem) -> Result<()>,
    ) -> Result<HandlerOutcome> {
        if !self.submits_call(call) {
            let result = run(&*self.fs);
            if !self.must_submit(call, &result) {
                return send_success(result, reply);
            }
        }
        self.submit(call, op, reply.defer(DeferredKind::Plain));
        Ok(HandlerOutcome::Deferred)
    }

    pub(super) fn opendir(
        &self,
        call: &RequestCall<'_>,
        args: &abi::OpenIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let opened = self.fs.opendir(&call.cx, call.ino, convert::open_flags(args.flags))?;
        let out = self.open_out(&opened);
        if reply.send(&[out.as_bytes()]).is_err() {
            let _ = self.fs.releasedir(&call.cx, File { ino: call.ino, fh: opened.fh });
        }
        Ok(HandlerOutcome::Sent)
    }

    pub(super) fn getlk(
        &self,
        call: &RequestCall<'_>,
        args: &abi::LkIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let request = convert::lock_request(args, false)?;
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        pod(reply, &convert::lk_out(self.fs.getlk(&call.cx, file, &request)?))
    }

    pub(super) fn setlk(
        &self,
        call: &RequestCall<'_>,
        args: &abi::LkIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let request = convert::lock_request(args, false)?;
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        send_success(self.fs.setlk(&call.cx, file, &request), reply)
    }

    /// Waits for a lock without occupying a worker. If all workers waited, none could receive the
    /// unlock.
    pub(super) fn setlkw(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        args: &abi::LkIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let lock = convert::lock_request(args, true)?;
        if lock.lock.typ == LockType::Unlock {
            // flock(2) sends an unlock as SETLKW.
            return self.setlk(call, args, reply);
        }
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        let deferred = reply.defer(DeferredKind::Plain);
        self.wait_for_lock(call, (file, lock), deferred);
        Ok(HandlerOutcome::Deferred)
    }

    pub(super) fn ioctl(
        &self,
        call: &RequestCall<'_>,
        args: &abi::IoctlIn,
        data: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        // Only character devices (CUSE) send unrestricted requests, which need a description of the
        // caller's memory.
        if args.flags & abi::FUSE_IOCTL_UNRESTRICTED != 0 {
            return Err(Errno::ENOSYS);
        }
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        let compat = abi::FUSE_IOCTL_COMPAT | abi::FUSE_IOCTL_32BIT;
        let ioctl = IoctlArgs {
            cmd: args.cmd,
            arg: args.arg,
            input: data,
            output_len: args.out_size as usize,
            dir: args.flags & abi::FUSE_IOCTL_DIR != 0,
            compat32: args.flags & compat != 0,
        };
        let answer = self.fs.ioctl(&call.cx, file, &ioctl)?;
        let too_long = answer.output.len() > ioctl.output_len;
        if too_long || answer.output.len() > self.negotiated.max_read {
            return Err(Errno::EIO);
        }
        // The kernel keeps its attributes, although a request with data may have changed them:
        // FS_IOC_SETFLAGS moves the change time.
        if !data.is_empty() && self.notify.reads_own_pages() {
            let _ = self.notify.invalidate_inode(call.ino, None);
        }
        let out = abi::IoctlOut { result: answer.result, ..abi::IoctlOut::default() };
        let _ = reply.send(&[out.as_bytes(), &answer.output]);
        Ok(HandlerOutcome::Sent)
    }

    pub(super) fn poll(
        &self,
        call: &RequestCall<'_>,
        args: &abi::PollIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let wake = args.flags & abi::FUSE_POLL_SCHEDULE_NOTIFY != 0;
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        let wake = wake.then_some(PollHandle(args.kh));
        let revents = self.fs.poll(&call.cx, file, args.events, wake)?;
        pod(reply, &abi::PollOut { revents, padding: 0 })
    }

    pub(super) fn fallocate(
        &self,
        call: &RequestCall<'_>,
        args: &abi::FallocateIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        if args.length == 0 {
            return Err(Errno::EINVAL);
        }
        let range = Fallocate { mode: args.mode, offset: args.offset, length: args.length };
        let changed = self.fs.fallocate(&call.cx, file, range);
        let changed = changed.and_then(|()| self.sync_changed(call, file));
        send_success(changed, reply)
    }

    fn sync_changed(&self, call: &RequestCall<'_>, file: File) -> Result<()> {
        self.synced_opens.sync_changed(&*self.fs, &call.cx, file)
    }

    pub(super) fn lseek(
        &self,
        call: &RequestCall<'_>,
        args: &abi::LseekIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        // SEEK_DATA and SEEK_HOLE of lseek(2). The kernel handles the others.
        let whence = match args.whence {
            3 => Whence::Data,
            4 => Whence::Hole,
            _ => return Err(Errno::EINVAL),
        };
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        let offset = match self.has_unwritten_pages(call.ino) {
            true => self.lseek_without_holes(call, file, args.offset, whence)?,
            false => self.fs.lseek(&call.cx, file, args.offset, whence)?,
        };
        pod(reply, &abi::LseekOut { offset })
    }

    /// Reports data up to the end of the file: the kernel writes no pages back before it requests
    /// holes, so the file system's holes may be in the wrong place. With a write-back cache the
    /// kernel also has the end of the file, and after `ENOSYS` it answers without the session, from
    /// then on for all files.
    fn lseek_without_holes(
        &self,
        call: &RequestCall<'_>,
        file: File,
        offset: u64,
        whence: Whence,
    ) -> Result<u64> {
        if self.negotiated.uses(abi::FUSE_WRITEBACK_CACHE) {
            return Err(Errno::ENOSYS);
        }
        let size = self.fs.getattr(&call.cx, file.ino, Some(file.fh))?.size;
        match whence {
            _ if offset >= size => Err(Errno::ENXIO),
            Whence::Data => Ok(offset),
            Whence::Hole => Ok(size),
        }
    }

    pub(super) fn copy_file_range(
        &self,
        call: &RequestCall<'_>,
        args: &abi::CopyFileRangeIn,
        wide: bool,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        // The reply to the older request has a 32-bit count.
        let longest = if wide { u64::MAX } else { u64::from(u32::MAX) & !0xfff };
        let copy = CopyRange {
            src: File { ino: call.ino, fh: Fh(args.fh_in) },
            src_offset: args.off_in,
            dst: File { ino: Ino(args.nodeid_out), fh: Fh(args.fh_out) },
            dst_offset: args.off_out,
            length: args.len.min(longest),
            flags: args.flags,
        };
        let count = self.fs.copy_file_range(&call.cx, &copy)?;
        self.sync_changed(call, copy.dst)?;
        if wide {
            pod(reply, &abi::CopyFileRangeOut { bytes_copied: count })
        } else {
            pod(reply, &abi::WriteOut { size: count as u32, padding: 0 })
        }
    }
}

/// The error of a CREATE with `flags` that failed with `errno`: `ESTALE` if the file exists by now
/// and the caller did not set `O_EXCL`. The kernel then walks the path again (`LOOKUP_REVAL`,
/// `do_filp_open` in `fs/namei.c`), finds the file, checks its permissions, and opens it.
fn replace_create_error(errno: Errno, flags: OpenFlags) -> Errno {
    if errno == Errno::EEXIST && !flags.has(OpenFlags::EXCL) { Errno::ESTALE } else { errno }
}
