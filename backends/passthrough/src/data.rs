//! Open files and their data.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::native::NativeOpener;
use defuse_fs::{
    BackingFile, CacheMode, Context, CopyRange, Errno, Fallocate, File, FileKind, Ino, OpenArgs,
    OpenFlags, OpenReply, ReadArgs, ReadBuf, Result, Whence, WriteArgs, WriteBuf,
};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::FdFlags;

use crate::creds::{keep_suidgid, run_as_decided};
use crate::handle::is_made_up;
use crate::lower::OrErrno;
use crate::options::CredentialsPolicy;
use crate::passthrough::Passthrough;
use crate::tables::inode::LowerInode;
use crate::tables::open_files::LowerOpenFile;

/// The caller's flags that are passed to the lower file system. `O_NONBLOCK` is left out unless the
/// program gets the descriptor: it has no meaning for a regular file, but makes open fail where a
/// lease is held.
const PASSED_ON: u32 =
    OpenFlags::APPEND | OpenFlags::SYNC | OpenFlags::DIRECT | OpenFlags::NOATIME | OpenFlags::TRUNC;

/// The descriptors of an open file.
pub(crate) struct OpenDescriptors {
    /// The descriptor of the file system.
    pub own: Arc<OwnedFd>,
    /// The descriptor of the program.
    first: Option<Arc<OwnedFd>>,
    /// The frontend may use `own` for data.
    is_backed: bool,
    /// Its size does not bound its data, so that a cache would have no data.
    has_no_size: bool,
    /// Opened with `O_APPEND` in spite of a write-back cache: the file takes nothing but appends
    /// (chattr(1) `+a`).
    appends: bool,
}

impl Passthrough {
    /// The flags for opening the lower file, without creation flags.
    pub(crate) fn lower_flags(&self, flags: OpenFlags) -> OFlags {
        let access = match flags.0 & 3 {
            OpenFlags::WRONLY if self.options.writeback => OpenFlags::RDWR,
            // An access mode of 3 needs the permissions of reading and writing. The frontend checks
            // what the open file permits, unless the program gets the descriptor.
            3 if !self.gives_descriptors() => OpenFlags::RDWR,
            access => access,
        };
        let own = if self.gives_descriptors() { OpenFlags::NONBLOCK } else { 0 };
        OFlags::from_bits_retain(access | flags.0 & (PASSED_ON | own) & !self.ignored_flags())
            | self.extra_flags()
    }

    /// Flags that are added whenever a file or directory is opened.
    pub(crate) fn extra_flags(&self) -> OFlags {
        if self.opens_without_atime { OFlags::NOATIME } else { OFlags::empty() }
    }

    /// Flags that the frontend implements: with a write-back cache it knows the end of the file.
    fn ignored_flags(&self) -> u32 {
        if self.options.writeback { OpenFlags::APPEND } else { 0 }
    }

    pub(crate) fn open(&self, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let inode = self.inodes.get(ino)?;
        match inode.kind {
            FileKind::Regular => {}
            FileKind::Directory if args.flags.writable() => return Err(Errno::EISDIR),
            FileKind::Directory => {}
            FileKind::Symlink => return Err(Errno::ELOOP),
            // Special files refer to objects of the caller's kernel. Opening them here would open
            // the daemon's devices.
            _ => return Err(Errno::ENXIO),
        }
        if args.flags.0 & OpenFlags::EXEC != 0 && self.mounts.get(inode.key.mount)?.denied.exec {
            return Err(Errno::EACCES);
        }
        let flags = self.lower_flags(args.flags);
        let _guard = flags
            .contains(OFlags::TRUNC)
            .then(|| keep_suidgid(!args.kill_suidgid, self.options.credentials));
        if flags == self.lower_flags(OpenFlags::default())
            && self.is_reusable(&inode)
            && let Some(fd) = self.open_again(&inode)?
        {
            let (first, is_backed) = (None, true);
            let file =
                OpenDescriptors { own: fd, first, is_backed, has_no_size: false, appends: false };
            return self.add_open_file(inode.key.mount, file, args.flags);
        }
        let access = OFlags::from_bits_retain(args.flags.0 & 3);
        let (fd, appends) = match self.open_without_atime(&inode, flags) {
            // The file can be written but not read. Only the write-back cache would have needed to
            // read it.
            Err(Errno::EACCES) if self.options.writeback => {
                (self.open_without_atime(&inode, (flags - OFlags::RWMODE) | access)?, false)
            }
            // chattr(1) `+a`.
            Err(Errno::EPERM) if self.options.writeback && args.flags.has(OpenFlags::APPEND) => {
                let flags = (flags - OFlags::RWMODE) | access | OFlags::APPEND;
                (self.open_without_atime(&inode, flags)?, true)
            }
            other => (other?, false),
        };
        let keeps_bits = args.flags.writable()
            && keeps_bits(args.flags, rustix::fs::fstat(&fd).or_errno()?.st_mode);
        let has_no_size = self.has_no_size(&inode, &fd)?;
        let is_cached = !appends && !has_no_size;
        let is_backed = inode.kind == FileKind::Regular && !keeps_bits && is_cached;
        let file = self.divide((fd, OFlags::CLOEXEC), args.flags, is_backed);
        self.add_open_file(
            inode.key.mount,
            OpenDescriptors { appends, has_no_size, ..file },
            args.flags,
        )
    }

    /// True for a file that can be read though its size is 0, as most are in /proc, or whose size
    /// is a guess, as in sysfs.
    fn has_no_size(&self, inode: &LowerInode, fd: &OwnedFd) -> Result<bool> {
        let mount = self.mounts.get(inode.key.mount)?;
        if mount.is_local() || inode.kind != FileKind::Regular {
            return Ok(false);
        }
        Ok(is_made_up(mount.f_type) || rustix::fs::fstat(fd).or_errno()?.st_size == 0)
    }

    /// Opens an inode, with `O_NOATIME` even if the caller is not its owner: the frontend has
    /// permitted it to this caller, or for all. If the daemon is not permitted to, the flag is
    /// dropped.
    pub(crate) fn open_without_atime(&self, inode: &LowerInode, flags: OFlags) -> Result<OwnedFd> {
        if !flags.contains(OFlags::NOATIME) {
            return self.open_inode(inode, flags);
        }
        match run_as_decided(self.options.credentials, || true, || self.open_inode(inode, flags)) {
            Err(Errno::EPERM) => self.open_inode(inode, flags - self.extra_flags()),
            other => other,
        }
    }

    /// True if a read-only descriptor of `inode` can serve the next open. It cannot without file
    /// handles, because each open is then checked by the lower file system; nor for a pinned inode,
    /// which has lost its name; nor with locks in the lower file system, which end with the close;
    /// nor where the program gets the descriptor, whose position would go on.
    fn is_reusable(&self, inode: &LowerInode) -> bool {
        !self.gives_descriptors()
            && !self.forwards_locks()
            && inode.kind == FileKind::Regular
            && inode.handle.is_some()
            && !inode.is_pinned()
            && !self.is_foreign(inode.key.mount)
    }

    /// Returns the descriptor with which `inode` was recently open for reading. Fails with `ESTALE`
    /// if the file was removed on the source since then: a file handle would not find it either.
    fn open_again(&self, inode: &LowerInode) -> Result<Option<Arc<OwnedFd>>> {
        let Some(fd) = self.recent.take(inode.number) else { return Ok(None) };
        if rustix::fs::fstat(&fd).or_errno()?.st_nlink == 0 {
            self.inodes.unhash(inode);
            return Err(Errno::ESTALE);
        }
        Ok(Some(fd))
    }

    /// Closes an open file. Keeps its descriptor for a while if it may serve the next open.
    pub(crate) fn close_file(&self, file: File) -> Result<Arc<LowerOpenFile>> {
        let open = self.files.remove(file.fh)?;
        if open.only_reads()
            && let Ok(inode) = self.inodes.get(file.ino)
            && self.is_reusable(&inode)
        {
            self.recent.put(inode.number, Arc::clone(&open.fd));
            // The inode was forgotten meanwhile, so nothing else would remove the descriptor.
            if self.inodes.get(file.ino).is_err() {
                drop(self.recent.take(inode.number));
            }
        }
        Ok(open)
    }

    /// True if the program gets the descriptors of open files.
    pub(crate) fn gives_descriptors(&self) -> bool {
        self.native_opener().is_some()
    }

    /// The right to make native files.
    fn native_opener(&self) -> Option<NativeOpener> {
        match self.options.credentials {
            CredentialsPolicy::Callers(opener) if self.options.backing_files => Some(opener),
            _ => None,
        }
    }

    /// True if a file is opened by its name in a lookup: by a program, whose own open it is. A
    /// daemon must not wait for a fifo that takes the name of a file at this moment, nor open a
    /// device.
    pub(crate) fn opens_by_name(&self, flags: OpenFlags) -> bool {
        self.gives_descriptors() && self.extra_flags().is_empty() && !flags.has(OpenFlags::TRUNC)
    }

    /// True if the program gets the first descriptor of an open file, and the file another one.
    fn gives_first(&self) -> bool {
        self.options.descriptors_from > 0 && self.gives_descriptors()
    }

    /// `O_CLOEXEC`, unless the program that gets the descriptor has not requested the flag.
    pub(crate) fn close_on_exec(&self, flags: OpenFlags) -> OFlags {
        if self.gives_first() && !flags.has(OpenFlags::CLOEXEC) {
            OFlags::empty()
        } else {
            OFlags::CLOEXEC
        }
    }

    /// Divides the descriptor of a file that was opened just now, by `how`, between the program and
    /// the file. Without `is_backed`, the program gets none, and the file has no backing file.
    pub(crate) fn divide(
        &self,
        (fd, how): (OwnedFd, OFlags),
        flags: OpenFlags,
        is_backed: bool,
    ) -> OpenDescriptors {
        let from = self.options.descriptors_from as i32;
        let gives = is_backed && self.gives_first();
        let own = if gives { rustix::io::fcntl_dupfd_cloexec(&fd, from).ok() } else { None };
        let at_exec = if own.is_some() { self.close_on_exec(flags) } else { OFlags::CLOEXEC };
        if at_exec != how & OFlags::CLOEXEC {
            let closes = !at_exec.is_empty();
            let flags = if closes { FdFlags::CLOEXEC } else { FdFlags::empty() };
            let _ = rustix::io::fcntl_setfd(&fd, flags);
        }
        let (own, first) = match own {
            Some(own) => (own, Some(Arc::new(fd))),
            // Without a free number, the file has this one alone.
            None if gives => (fd, None),
            None => (self.place_descriptor(fd), None),
        };
        OpenDescriptors { own: Arc::new(own), first, is_backed, has_no_size: false, appends: false }
    }

    /// Adds an open regular file to the table.
    pub(crate) fn add_open_file(
        &self,
        mount: u32,
        file: OpenDescriptors,
        flags: OpenFlags,
    ) -> Result<OpenReply> {
        let OpenDescriptors { own: fd, first, is_backed, has_no_size, appends } = file;
        let local = self.mounts.get(mount)?.is_local();
        let native = self.native_opener().map(|opener| match opener.file(first) {
            file if self.options.attr_valid_for.is_zero() => file.with_attributes(),
            file => file,
        });
        let backing = || BackingFile { fd: Arc::clone(&fd), without_fsetid: true, native };
        let backing = (self.options.backing_files && is_backed).then(backing);
        if backing.is_some() && self.options.credentials == CredentialsPolicy::Sticky {
            // A frontend that registers the file with the kernel drops the capability itself. A
            // thread that remembers to lack it spares that frontend two system calls.
            let _ = keep_suidgid(false, self.options.credentials);
        }
        let lower = self.is_inherited().then(|| Arc::clone(&fd));
        let mut flags = self.lower_flags(flags) - self.extra_flags();
        flags.set(OFlags::APPEND, appends || flags.contains(OFlags::APPEND));
        let ignored = if appends { 0 } else { self.ignored_flags() };
        let fh = self.files.insert(LowerOpenFile::file(fd, flags, ignored, local))?;
        let cache = match self.options.cache {
            // Pages would be written back at their offsets.
            _ if appends || has_no_size => CacheMode::Direct,
            CacheMode::Cached if self.options.exclusive => CacheMode::Keep,
            other => other,
        };
        Ok(OpenReply {
            cache,
            backing,
            lower,
            no_flush: local && !self.options.flushes,
            parallel_direct_writes: true,
            ..OpenReply::new(fh)
        })
    }

    pub(crate) fn read(&self, file: File, args: ReadArgs, out: &mut ReadBuf<'_>) -> Result<()> {
        let open = self.files.get(file.fh)?;
        out.fill_from(open.fd_as(args.flags), args.offset).map(drop)
    }

    pub(crate) fn write(
        &self,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let open = self.files.get(file.fh)?;
        let _guard = keep_suidgid(!args.kill_suidgid, self.options.credentials);
        if args.from_cache {
            return data.drain_to(open.fd_for_pages(), args.offset);
        }
        let fd = open.fd_as(args.flags);
        let written = data.drain_to(fd, args.offset)?;
        open.sync_written(fd, args.flags)?;
        Ok(written)
    }

    /// Reports the errors of close(2), by closing a duplicate of the descriptor.
    pub(crate) fn flush(&self, file: File) -> Result<()> {
        let open = self.files.get(file.fh)?;
        if open.local {
            return Ok(());
        }
        let duplicate = rustix::io::fcntl_dupfd_cloexec(open.fd.as_fd(), 0).or_errno()?;
        crate::sys::close(duplicate)
    }

    pub(crate) fn fsync(&self, file: File, datasync: bool) -> Result<()> {
        let open = self.files.get(file.fh)?;
        let fd = open.fd.as_fd();
        if datasync { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) }.or_errno()
    }

    pub(crate) fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        let open = self.files.get(file.fh)?;
        // The request does not state whether to clear set-user-id. Natively it is cleared unless
        // the caller is privileged.
        let _guard = keep_suidgid(cx.caller.uid == 0, self.options.credentials);
        let mode = FallocateFlags::from_bits_retain(range.mode);
        rustix::fs::fallocate(open.fd.as_fd(), mode, range.offset, range.length).or_errno()
    }

    pub(crate) fn lseek(&self, file: File, offset: u64, whence: Whence) -> Result<u64> {
        let open = self.files.get(file.fh)?;
        // No data can be beyond the range of loff_t.
        if i64::try_from(offset).is_err() {
            return Err(Errno::ENXIO);
        }
        let to = match whence {
            Whence::Data => SeekFrom::Data(offset),
            Whence::Hole => SeekFrom::Hole(offset),
        };
        rustix::fs::seek(open.fd.as_fd(), to).or_errno()
    }

    pub(crate) fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        if copy.flags != 0 {
            return Err(Errno::EINVAL);
        }
        let (src, dst) = (self.files.get(copy.src.fh)?, self.files.get(copy.dst.fh)?);
        let _guard = keep_suidgid(cx.caller.uid == 0, self.options.credentials);
        let (mut from, mut to) = (copy.src_offset, copy.dst_offset);
        let len = usize::try_from(copy.length).unwrap_or(usize::MAX);
        rustix::fs::copy_file_range(
            src.fd.as_fd(),
            Some(&mut from),
            dst.fd_for_pages(),
            Some(&mut to),
            len,
        )
        .or_errno()
        .map(|count| count as u64)
    }
}

/// True if the file must not be written past this daemon: a write decides whether the set-id bits
/// are cleared, and only the daemon knows by which caller.
pub(crate) fn keeps_bits(flags: OpenFlags, mode: u32) -> bool {
    flags.writable() && mode & 0o6000 != 0
}
