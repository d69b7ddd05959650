//! Data transfer: read, write and related calls. Nothing here allocates, or takes a lock that two
//! open files share.

use std::io::{IoSlice, IoSliceMut};

use std::sync::atomic::Ordering::Relaxed;

use defuse_fs::{
    Errno, Fallocate, File, FileKind, FileSystem, IoOp, IoctlArgs, IoctlReply, OpenFlags, ReadArgs,
    ReadBuf, ReadSink, SetAttr, Whence, WriteArgs, WriteBuf, WriteSource,
};
use defuse_probe::clock::ClockMoment;
use defuse_probe::{Op, ThreadCells, clock};

use crate::asynchronous::fsync_op;
use crate::attributes::set_attr;
use crate::buffers::{ReadArea, ReadVector, WriteArea, WriteVector};
use crate::call_target::CallTarget;
use crate::client::DirectClient;
use crate::description::FileDescription;
use crate::mount::{ClientMount, catch_panic};
use crate::stop::Result;
use crate::task::ClientTask;

/// The largest file offset, `OFFSET_MAX`.
pub(crate) const OFFSET_MAX: u64 = i64::MAX as u64;

/// The maximum number of bytes that one call transfers, `MAX_RW_COUNT` of Linux.
const MAX_COUNT: usize = 0x7fff_f000;

/// The flags of preadv2(2) and pwritev2(2), `RWF_*`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoFlags(pub u32);

impl IoFlags {
    const HIPRI: u32 = 0x01;
    const DSYNC: u32 = 0x02;
    const SYNC: u32 = 0x04;
    const NOWAIT: u32 = 0x08;
    const APPEND: u32 = 0x10;
    const NOAPPEND: u32 = 0x20;

    /// The flags of the open file combined with these. Fails with `EOPNOTSUPP` for an unknown flag,
    /// and for `RWF_NOWAIT`, which the client cannot guarantee.
    fn apply_to(self, flags: OpenFlags) -> Result<OpenFlags, Errno> {
        const KNOWN: u32 =
            IoFlags::HIPRI | IoFlags::DSYNC | IoFlags::SYNC | IoFlags::APPEND | IoFlags::NOAPPEND;
        if self.0 & !KNOWN != 0 || self.0 & Self::NOWAIT != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let mut flags = flags.0;
        if self.0 & Self::DSYNC != 0 {
            flags |= OpenFlags::DSYNC;
        }
        if self.0 & Self::SYNC != 0 {
            flags |= OpenFlags::SYNC;
        }
        if self.0 & Self::APPEND != 0 {
            flags |= OpenFlags::APPEND;
        }
        if self.0 & Self::NOAPPEND != 0 {
            flags &= !OpenFlags::APPEND;
        }
        Ok(OpenFlags(flags))
    }
}

impl ClientMount {
    /// Like [`ClientMount::call`], for data: every call is counted, but only some are timed,
    /// because reading the clock would cost more than the rest of the client.
    #[inline]
    pub(crate) fn move_data(
        &self,
        op: Op,
        expected: usize,
        call: impl FnOnce(&dyn FileSystem) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let recorder = self.recorder();
        // Count the expected bytes beforehand, so that the cells of this thread are looked up once.
        let start = recorder.with_cells(|cells| {
            cells.add_bytes(op, expected as u64);
            cells.count_sampled(op).then(clock::now)
        });
        let result = as_result(catch_panic(|| Ok(as_number(call(&*self.core.fs)))));
        if start.is_some() || result != Ok(expected) {
            recorder.with_cells(|cells| match (start, &result) {
                // `add_bytes` wraps, so this corrects the count in either direction.
                (None, Ok(moved)) => {
                    cells.add_bytes(op, (*moved as u64).wrapping_sub(expected as u64));
                }
                _ => amend(cells, op, expected, start.map(ClockMoment::elapsed_ns), &result),
            });
        }
        result
    }
}

/// Encodes a count or an error as one number, as system calls return it. The value passes through
/// memory, and a `Result` that is written in parts and read as a whole stalls the processor.
#[inline]
fn as_number(result: Result<usize, Errno>) -> i64 {
    match result {
        Ok(count) => count as i64,
        Err(errno) => -i64::from(errno.raw()),
    }
}

/// The reverse of [`as_number`].
#[inline]
fn as_result(number: Result<i64, Errno>) -> Result<usize, Errno> {
    let number = number?;
    usize::try_from(number).map_err(|_| Errno::from_raw(-number as i32))
}

/// Records the facts that were unknown before an operation: the time it took, if it was timed, and
/// a result other than the expected one.
#[cold]
fn amend(
    cells: &ThreadCells,
    op: Op,
    expected: usize,
    took: Option<u64>,
    result: &Result<usize, Errno>,
) {
    match took {
        Some(ns) => cells.record_sample(op, ns, result.is_ok()),
        None if result.is_err() => cells.add_error(op),
        None => {}
    }
    let moved = *result.as_ref().unwrap_or(&0) as u64;
    cells.add_bytes(op, moved.wrapping_sub(expected as u64));
}

impl DirectClient {
    /// Reads at the file position and advances it, read(2). Fails with `EBADF` or `EISDIR`.
    #[inline]
    pub fn read(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        room: &mut [u8],
    ) -> Result<usize> {
        let len = room.len().min(MAX_COUNT);
        let room = &mut room[..len];
        Ok(read_on(task, file, &mut ReadArea::new(room), len, IoFlags::default())?)
    }

    /// Reads at `offset`, pread(2). Fails with `ESPIPE` on a stream.
    #[inline]
    pub fn pread(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        room: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        let len = room.len().min(MAX_COUNT);
        let room = &mut room[..len];
        Ok(read_at(task, file, &mut ReadArea::new(room), len, offset, IoFlags::default())?)
    }

    /// Reads into several buffers, preadv2(2). `None` reads at the file position.
    pub fn preadv2(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        room: &mut [IoSliceMut<'_>],
        offset: Option<u64>,
        flags: IoFlags,
    ) -> Result<usize> {
        let len = total(room.iter().map(|piece| piece.len()))?;
        let sink = &mut ReadVector::new(room);
        Ok(match offset {
            Some(offset) => read_at(task, file, sink, len, offset, flags)?,
            None => read_on(task, file, sink, len, flags)?,
        })
    }

    /// Writes at the file position and advances it, write(2); with `O_APPEND`, at the end. Fails
    /// with `EBADF` or `EFBIG`.
    #[inline]
    pub fn write(&self, task: &ClientTask, file: &FileDescription, bytes: &[u8]) -> Result<usize> {
        let bytes = &bytes[..bytes.len().min(MAX_COUNT)];
        Ok(write_on(task, file, bytes.len(), IoFlags::default(), |limit| {
            WriteArea::new(&bytes[..limit])
        })?)
    }

    /// Writes at `offset`, pwrite(2). As on Linux, a file with `O_APPEND` is written at its end.
    #[inline]
    pub fn pwrite(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        bytes: &[u8],
        offset: u64,
    ) -> Result<usize> {
        let bytes = &bytes[..bytes.len().min(MAX_COUNT)];
        Ok(write_at(task, file, bytes.len(), offset, IoFlags::default(), |limit| {
            WriteArea::new(&bytes[..limit])
        })?)
    }

    /// Writes several buffers, pwritev2(2). `None` writes at the file position.
    pub fn pwritev2(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        pieces: &[IoSlice<'_>],
        offset: Option<u64>,
        flags: IoFlags,
    ) -> Result<usize> {
        let len = total(pieces.iter().map(|piece| piece.len()))?;
        let source = |limit| WriteVector::new(pieces, limit);
        Ok(match offset {
            Some(offset) => write_at(task, file, len, offset, flags, source)?,
            None => write_on(task, file, len, flags, source)?,
        })
    }

    /// Sets the file position, lseek(2). `whence` is numbered as in C: 0 set, 1 current, 2 end, 3
    /// data, 4 hole. Fails with `EINVAL`, `ENXIO` or `ESPIPE`.
    pub fn lseek(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        offset: i64,
        whence: u32,
    ) -> Result<u64> {
        let open = file.file()?;
        if file.stream {
            return Err(Errno::ESPIPE.into());
        }
        let moved = file.with_position(|position| {
            let to = target(task, file, open, (position, offset), whence);
            (*to.as_ref().unwrap_or(&position), to)
        });
        Ok(moved?)
    }

    /// Sets the size of an open file, ftruncate(2). Fails with `EINVAL` unless it is a regular file
    /// open for writing.
    pub fn ftruncate(&self, task: &ClientTask, file: &FileDescription, length: i64) -> Result<()> {
        let length = u64::try_from(length).map_err(|_| Errno::EINVAL)?;
        file.file()?;
        if file.kind != FileKind::Regular || !file.writes() {
            return Err(Errno::EINVAL.into());
        }
        if file.mount().read_only() {
            return Err(Errno::EROFS.into());
        }
        self.set_size(task, file.inode(), file.fh(), length)
    }

    pub(crate) fn set_size(
        &self,
        task: &ClientTask,
        here: &crate::mounted_inode::MountedInode,
        fh: Option<defuse_fs::Fh>,
        length: u64,
    ) -> Result<()> {
        let who = task.credentials();
        if length > task.raw_file_size_limit()
            && length > here.mount.fetch_attr(&here.node, fh, &who)?.size
        {
            return Err(Errno::EFBIG.into());
        }
        let set =
            SetAttr { size: Some(length), kill_suidgid: !task.keeps_suid(), ..SetAttr::default() };
        Ok(set_attr(&CallTarget::from_node(here), fh, &set, &who)?)
    }

    /// Allocates or releases space, fallocate(2). Fails with `EBADF`, `EINVAL`, `EFBIG`,
    /// `EOPNOTSUPP`, `EISDIR` or `ENODEV`.
    pub fn fallocate(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        mode: u32,
        (offset, length): (i64, i64),
    ) -> Result<()> {
        let open = file.file()?;
        let range = fallocate_range(task, file, mode, (offset, length))?;
        let cx = task.context(file.mount().origin);
        let result = file.mount().call(Op::FALLOCATE, |fs| fs.fallocate(&cx, open, range));
        file.inode().node.invalidate();
        result.map_err(replace_enosys)?;
        Ok(sync_changed(task, file, file.flags())?)
    }

    /// Makes the data of an open file durable, fdatasync(2); unless `datasync` is set, its
    /// attributes, too, fsync(2).
    pub fn fsync(&self, task: &ClientTask, file: &FileDescription, datasync: bool) -> Result<()> {
        Ok(sync(task, file, fsync_op(file, datasync)?)?)
    }

    /// Makes all changes to the file system of an open file durable, syncfs(2).
    pub fn syncfs(&self, task: &ClientTask, file: &FileDescription) -> Result<()> {
        file.file()?;
        Ok(sync(task, file, IoOp::Syncfs)?)
    }

    /// Makes all changes to all mounts durable. Like sync(2), it reports no errors.
    pub fn sync(&self, task: &ClientTask) {
        for mount in self.mounts.load_full().iter() {
            let cx = task.context(mount.origin);
            let _ = mount.call(Op::SYNCFS, |fs| fs.syncfs(&cx));
        }
    }

    /// Returns the `events` of poll(2) that are ready. A file system without poll is always ready,
    /// like a regular file.
    pub fn poll(&self, task: &ClientTask, file: &FileDescription, events: u32) -> Result<u32> {
        const ALWAYS: u32 = 0x001 | 0x004 | 0x040 | 0x100;
        let open = file.file()?;
        let cx = task.context(file.mount().origin);
        if file.kind == FileKind::Directory {
            return Ok(events & ALWAYS);
        }
        match file.mount().call(Op::POLL, |fs| fs.poll(&cx, open, events, None)) {
            Err(Errno::ENOSYS) => Ok(events & ALWAYS),
            result => Ok(result?),
        }
    }

    /// Controls a device, ioctl(2). Fails with `ENOTTY` if the file system does not know the
    /// request.
    pub fn ioctl(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        args: &IoctlArgs<'_>,
    ) -> Result<IoctlReply> {
        let open = file.file()?;
        let cx = task.context(file.mount().origin);
        let args = IoctlArgs { dir: file.kind == FileKind::Directory, ..*args };
        let reply = file.mount().call(Op::IOCTL, |fs| fs.ioctl(&cx, open, &args));
        file.inode().node.invalidate();
        Ok(reply?)
    }

    /// Changes the status flags of an open file, `F_SETFL`. Only the owner of the file may set
    /// `O_NOATIME`; others get `EPERM`.
    pub fn set_flags(&self, task: &ClientTask, file: &FileDescription, flags: u32) -> Result<()> {
        file.file()?;
        if flags & OpenFlags::NOATIME != 0 && !file.flags().has(OpenFlags::NOATIME) {
            let who = task.credentials();
            let attr = file.mount().attr(&file.inode().node, &who)?;
            if !crate::access::owns(&attr, &who) {
                return Err(Errno::EPERM.into());
            }
        }
        file.set_flags(flags);
        Ok(())
    }
}

fn fallocate_range(
    task: &ClientTask,
    file: &FileDescription,
    mode: u32,
    (offset, length): (i64, i64),
) -> Result<Fallocate, Errno> {
    let (Ok(offset), Ok(length)) = (u64::try_from(offset), u64::try_from(length)) else {
        return Err(Errno::EINVAL);
    };
    if length == 0 {
        return Err(Errno::EINVAL);
    }
    if !file.writes() {
        return Err(Errno::EBADF);
    }
    match file.kind {
        FileKind::Regular => {}
        FileKind::Directory => return Err(Errno::EISDIR),
        FileKind::Fifo => return Err(Errno::ESPIPE),
        _ => return Err(Errno::ENODEV),
    }
    let end = offset.checked_add(length).filter(|&end| end <= OFFSET_MAX).ok_or(Errno::EFBIG)?;
    if mode & Fallocate::KEEP_SIZE == 0 && end > task.raw_file_size_limit() {
        return Err(Errno::EFBIG);
    }
    Ok(Fallocate { mode, offset, length })
}

fn total(lengths: impl Iterator<Item = usize>) -> Result<usize, Errno> {
    let mut sum = 0usize;
    for (number, len) in lengths.enumerate() {
        sum =
            sum.checked_add(len).filter(|&sum| sum <= isize::MAX as usize).ok_or(Errno::EINVAL)?;
        // `UIO_MAXIOV`.
        if number >= 1024 {
            return Err(Errno::EINVAL);
        }
    }
    Ok(sum.min(MAX_COUNT))
}

/// A file system that does not implement the operation has nothing to make durable.
pub(crate) fn ignore_missing(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::ENOSYS) => Ok(()),
        result => result,
    }
}

/// Replaces `ENOSYS` by the error that programs expect of an unsupported operation.
pub(crate) fn replace_enosys(errno: Errno) -> Errno {
    if errno == Errno::ENOSYS { Errno::EOPNOTSUPP } else { errno }
}

#[inline]
fn read_on(
    task: &ClientTask,
    file: &FileDescription,
    sink: &mut dyn ReadSink,
    len: usize,
    flags: IoFlags,
) -> Result<usize, Errno> {
    let open = readable(file)?;
    let flags = flags.apply_to(file.flags())?;
    if len == 0 {
        return Ok(0);
    }
    file.with_position(|position| {
        let read = read_from(task, file, open, sink, (position, len), flags);
        (position + *read.as_ref().unwrap_or(&0) as u64, read)
    })
}

#[inline]
fn read_at(
    task: &ClientTask,
    file: &FileDescription,
    sink: &mut dyn ReadSink,
    len: usize,
    offset: u64,
    flags: IoFlags,
) -> Result<usize, Errno> {
    let open = readable(file)?;
    let flags = flags.apply_to(file.flags())?;
    check_offset(file, offset)?;
    if len == 0 {
        return Ok(0);
    }
    read_from(task, file, open, sink, (offset, len), flags)
}

#[inline]
fn readable(file: &FileDescription) -> Result<File, Errno> {
    let open = file.file()?;
    if !file.reads() {
        return Err(Errno::EBADF);
    }
    if file.kind == FileKind::Directory {
        return Err(Errno::EISDIR);
    }
    Ok(open)
}

#[inline]
fn check_offset(file: &FileDescription, offset: u64) -> Result<(), Errno> {
    if file.stream {
        return Err(Errno::ESPIPE);
    }
    if offset > OFFSET_MAX { Err(Errno::EINVAL) } else { Ok(()) }
}

#[inline]
fn read_from(
    task: &ClientTask,
    file: &FileDescription,
    open: File,
    sink: &mut dyn ReadSink,
    (offset, len): (u64, usize),
    flags: OpenFlags,
) -> Result<usize, Errno> {
    check_range(offset, len)?;
    let mount = file.mount();
    if file.inode().node.ends_before(offset) {
        return Ok(0);
    }
    // Build the arguments where they are used: copying a structure just written in parts stalls the
    // processor.
    let args = || ReadArgs { offset, flags, lock_owner: None };
    if mount.requires_submit() {
        return crate::asynchronous::read_now(task, file, sink, len, args());
    }
    let cx = task.context(mount.origin);
    let read = mount.move_data(Op::READ, len, |fs| {
        let mut out = ReadBuf::new(sink, len);
        fs.read(&cx, open, args(), &mut out)?;
        Ok(out.filled_len())
    });
    let count = match read {
        Err(Errno::ENOSYS) if mount.caps().submits => {
            mount.lacks_calls.store(true, Relaxed);
            return crate::asynchronous::read_now(task, file, sink, len, args());
        }
        read => read?,
    };
    if !flags.has(OpenFlags::NOATIME) {
        file.inode().node.record_read();
    }
    Ok(count)
}

#[inline]
fn write_on<S: WriteSource>(
    task: &ClientTask,
    file: &FileDescription,
    len: usize,
    flags: IoFlags,
    source: impl FnOnce(usize) -> S,
) -> Result<usize, Errno> {
    let open = writable(file)?;
    let flags = flags.apply_to(file.flags())?;
    if len == 0 {
        return Ok(0);
    }
    file.with_position(|position| {
        let written = write_to(task, file, open, (position, len), flags, source);
        let end = match &written {
            Err(_) => position,
            // An append leaves the file position at the new end of the file.
            Ok(_) if flags.has(OpenFlags::APPEND) => size(task, file).unwrap_or(position),
            Ok(count) => position + *count as u64,
        };
        (end, written)
    })
}

#[inline]
fn write_at<S: WriteSource>(
    task: &ClientTask,
    file: &FileDescription,
    len: usize,
    offset: u64,
    flags: IoFlags,
    source: impl FnOnce(usize) -> S,
) -> Result<usize, Errno> {
    let open = writable(file)?;
    let flags = flags.apply_to(file.flags())?;
    check_offset(file, offset)?;
    if len == 0 {
        return Ok(0);
    }
    write_to(task, file, open, (offset, len), flags, source)
}

#[inline]
fn writable(file: &FileDescription) -> Result<File, Errno> {
    let open = file.file()?;
    if !file.writes() { Err(Errno::EBADF) } else { Ok(open) }
}

/// Fails with `EINVAL` if the range ends beyond the largest offset, regardless of the size of the
/// file.
#[inline]
fn check_range(offset: u64, len: usize) -> Result<(), Errno> {
    if offset > OFFSET_MAX - len as u64 { Err(Errno::EINVAL) } else { Ok(()) }
}

fn size(task: &ClientTask, file: &FileDescription) -> Result<u64, Errno> {
    let who = task.credentials();
    Ok(file.mount().fetch_attr(&file.inode().node, file.fh(), &who)?.size)
}

/// The number of bytes, of `len`, that may be written at `offset`. Fails with `EFBIG`.
#[inline]
fn limit_length(
    task: &ClientTask,
    file: &FileDescription,
    (offset, len): (u64, usize),
    append: bool,
) -> Result<usize, Errno> {
    let limit = task.raw_file_size_limit();
    let offset = if append && limit != u64::MAX { size(task, file)? } else { offset };
    let room = limit.min(OFFSET_MAX).saturating_sub(offset);
    if room == 0 && file.kind == FileKind::Regular {
        return Err(Errno::EFBIG);
    }
    Ok(len.min(usize::try_from(room).unwrap_or(usize::MAX)))
}

#[inline]
fn write_to<S: WriteSource>(
    task: &ClientTask,
    file: &FileDescription,
    open: File,
    (offset, len): (u64, usize),
    flags: OpenFlags,
    source: impl FnOnce(usize) -> S,
) -> Result<usize, Errno> {
    check_range(offset, len)?;
    let len = limit_length(task, file, (offset, len), flags.has(OpenFlags::APPEND))?;
    let mount = file.mount();
    let kill_suidgid = !task.keeps_suid();
    // The arguments are built in place, for the reason in `read_from`.
    let args = || WriteArgs { offset, flags, lock_owner: None, kill_suidgid, from_cache: false };
    let mut source = source(len);
    let cx = task.context(mount.origin);
    let mut result = Err(Errno::ENOSYS);
    if !mount.requires_submit() {
        result = mount.move_data(Op::WRITE, len, |fs| {
            fs.write(&cx, open, args(), &mut WriteBuf::new(&mut source))
        });
    }
    if result == Err(Errno::ENOSYS) && mount.caps().submits {
        mount.lacks_calls.store(true, Relaxed);
        result = crate::asynchronous::write_now(task, file, &mut source, args());
    }
    file.inode().node.invalidate_data();
    let count = result?;
    sync_changed(task, file, flags)?;
    Ok(count)
}

/// Makes a change of an open file durable if `flags`, of the file or of the call, ask for it.
pub(crate) fn sync_changed(
    task: &ClientTask,
    file: &FileDescription,
    flags: OpenFlags,
) -> Result<(), Errno> {
    if flags.has(OpenFlags::DSYNC) {
        let datasync = !flags.has(OpenFlags::SYNC);
        sync(task, file, IoOp::Fsync { file: file.file()?, datasync })?;
    }
    Ok(())
}

/// Makes changes durable by `op`, which moves no data. A file system without the operation has
/// nothing to do.
fn sync(task: &ClientTask, file: &FileDescription, op: IoOp) -> Result<(), Errno> {
    let mount = file.mount();
    if mount.caps().submits {
        return ignore_missing(crate::asynchronous::sync_now(task, file, op));
    }
    let cx = task.context(mount.origin);
    ignore_missing(match op {
        IoOp::Fsync { file, datasync } => mount.call(Op::FSYNC, |fs| fs.fsync(&cx, file, datasync)),
        IoOp::Fsyncdir { dir, datasync } => {
            mount.call(Op::FSYNCDIR, |fs| fs.fsyncdir(&cx, dir, datasync))
        }
        IoOp::Syncfs => mount.call(Op::SYNCFS, |fs| fs.syncfs(&cx)),
        IoOp::Read { .. } | IoOp::Write { .. } => Err(Errno::EINVAL),
    })
}

fn target(
    task: &ClientTask,
    file: &FileDescription,
    open: File,
    (position, offset): (u64, i64),
    whence: u32,
) -> Result<u64, Errno> {
    let base = match whence {
        0 => 0,
        1 => position,
        2 if file.kind == FileKind::Directory => return Err(Errno::EINVAL),
        2 => size(task, file)?,
        3 | 4 => {
            let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
            return find(task, file, open, from, whence == 3);
        }
        _ => return Err(Errno::EINVAL),
    };
    // A file's position is a signed number. A directory's position is any number that its file
    // system chose.
    let to = i128::from(base) + i128::from(offset);
    match u64::try_from(to) {
        Ok(to) if to <= OFFSET_MAX || file.kind == FileKind::Directory => Ok(to),
        _ => Err(Errno::EINVAL),
    }
}

fn find(
    task: &ClientTask,
    file: &FileDescription,
    open: File,
    from: u64,
    data: bool,
) -> Result<u64, Errno> {
    let cx = task.context(file.mount().origin);
    let whence = if data { Whence::Data } else { Whence::Hole };
    match file.mount().call(Op::LSEEK, |fs| fs.lseek(&cx, open, from, whence)) {
        // If the file system has no lseek, the whole file is data, with a hole at its end.
        Err(Errno::ENOSYS) => {
            let size = size(task, file)?;
            if from >= size {
                return Err(Errno::ENXIO);
            }
            Ok(if data { from } else { size })
        }
        result => result,
    }
}
