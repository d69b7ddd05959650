//! The file system of a program: its operations as a [`PathFileSystem`].

use std::ffi::{CStr, CString};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use defuse_fs::path::{
    PathCaps, PathCopy, PathDirEntry, PathFile, PathFileSystem, PathOperand, PathRef,
};
use defuse_fs::{
    AccessMask, Attr, CacheMode, Caps, Context, Errno, Fallocate, Fh, FileKind, IoctlArgs,
    IoctlReply, Lock, LockKind, LockOwner, LockRequest, LockSupport, LockType, NewNode, Notify,
    OpenArgs, OpenFlags, OpenReply, Origin, PollHandle, ReadArgs, ReadBuf, ReleaseArgs,
    RenameFlags, Result, SetTime, SetXattrFlags, StatFs, Timestamp, Whence, WriteArgs, WriteBuf,
    Xattr, XattrName,
};

use crate::abi::{FuseConfig, info_bits};
use crate::buffers::poll_pointer;
use crate::calls::{OpenInfo, OperationTable, PathArg, ProgramEntry, text};
use crate::context::{CallScope, ProgramPointers};

/// Longest answer of ioctl(2), in bytes: its size is a field of 14 bits.
const IOCTL_MOST: usize = 1 << 14;

/// The inode number of an entry that the program has not given, as libfuse lists it.
const UNKNOWN_INO: u64 = 0xffff_ffff;

/// The wishes of a program for INIT.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnWishes {
    /// `O_TRUNC` comes with the open.
    pub open_truncates: bool,
    /// Granularity of times, in nanoseconds; 0 for one.
    pub time_gran: u32,
}

/// The operations of a program as a file system.
pub struct ProgramFileSystem {
    table: OperationTable,
    program: ProgramPointers,
    config: PlainConfig,
    wishes: ConnWishes,
    notify: OnceLock<Arc<dyn Notify>>,
    /// With `allow_root`: the only user beside root who has access.
    only_user: Option<u32>,
}

/// The settings of [`FuseConfig`] without its pointer.
#[derive(Clone, Copy, Debug)]
struct PlainConfig {
    uid: Option<u32>,
    gid: Option<u32>,
    umask: Option<u32>,
    entry_timeout: Duration,
    negative_timeout: Duration,
    attr_timeout: Duration,
    hard_remove: bool,
    use_ino: bool,
    direct_io: bool,
    kernel_cache: bool,
    no_rofd_flush: bool,
}

impl PlainConfig {
    fn new(config: &FuseConfig) -> Self {
        let given = |set: i32, value| (set != 0).then_some(value);
        PlainConfig {
            uid: given(config.set_uid, config.uid),
            gid: given(config.set_gid, config.gid),
            umask: given(config.set_mode, config.umask),
            entry_timeout: seconds(config.entry_timeout),
            negative_timeout: seconds(config.negative_timeout),
            attr_timeout: seconds(config.attr_timeout),
            hard_remove: config.hard_remove != 0,
            use_ino: config.use_ino != 0,
            direct_io: config.direct_io != 0,
            kernel_cache: config.kernel_cache != 0,
            no_rofd_flush: config.no_rofd_flush != 0,
        }
    }
}

/// The duration of so many seconds: none for a number that is none, and at most a year.
fn seconds(seconds: f64) -> Duration {
    const YEAR: f64 = 365.0 * 24.0 * 3600.0;
    if seconds > 0.0 { Duration::from_secs_f64(seconds.min(YEAR)) } else { Duration::ZERO }
}

impl ProgramFileSystem {
    /// The file system of the operations in `table`, after `init` of the program.
    pub fn new(
        table: OperationTable,
        program: ProgramPointers,
        config: &FuseConfig,
        wishes: ConnWishes,
    ) -> Self {
        let config = PlainConfig::new(config);
        let (notify, only_user) = (OnceLock::new(), None);
        ProgramFileSystem { table, program, config, wishes, notify, only_user }
    }

    /// Refuses all users but root and this one, which the kernel does not do for a mount with
    /// `allow_other`.
    #[must_use]
    pub fn for_user(self, only_user: Option<u32>) -> Self {
        ProgramFileSystem { only_user, ..self }
    }

    /// The frontend's notifier, once there is one.
    pub fn notify(&self) -> Option<&Arc<dyn Notify>> {
        self.notify.get()
    }

    /// The scope of an operation. Fails with `EACCES` for a user without access.
    fn scope(&self, cx: &Context<'_>) -> Result<CallScope> {
        self.scope_with(cx, 0)
    }

    /// The scope of an operation that makes a file.
    fn enter_creation(&self, cx: &Context<'_>, node: &NewNode<'_>) -> Result<CallScope> {
        self.scope_with(cx, node.umask)
    }

    fn scope_with(&self, cx: &Context<'_>, umask: u32) -> Result<CallScope> {
        let uid = cx.caller.uid;
        if self.only_user.is_some_and(|only| uid != 0 && uid != only) {
            return Err(Errno::EACCES);
        }
        Ok(CallScope::new(self.program, cx, umask))
    }

    /// The attributes of the structure, with the changes of the options.
    fn attr(&self, found: &libc::stat) -> Result<Attr> {
        let mut perm = found.st_mode & 0o7777;
        if let Some(umask) = self.config.umask {
            perm = 0o777 & !umask;
        }
        Ok(Attr {
            st_ino: found.st_ino,
            kind: FileKind::from_mode(found.st_mode).ok_or(Errno::EIO)?,
            perm,
            nlink: u32::try_from(found.st_nlink).unwrap_or(u32::MAX),
            uid: self.config.uid.unwrap_or(found.st_uid),
            gid: self.config.gid.unwrap_or(found.st_gid),
            rdev: found.st_rdev,
            size: u64::try_from(found.st_size).map_err(|_| Errno::EIO)?,
            blocks: u64::try_from(found.st_blocks).unwrap_or(0),
            blksize: u32::try_from(found.st_blksize).unwrap_or(4096),
            atime: time(found.st_atime, found.st_atime_nsec),
            mtime: time(found.st_mtime, found.st_mtime_nsec),
            ctime: time(found.st_ctime, found.st_ctime_nsec),
            btime: None,
            valid_for: self.config.attr_timeout,
        })
    }

    /// The answer to an open, from what the program has left in `info`.
    fn make_open_reply(&self, info: &OpenInfo) -> OpenReply {
        let has = |bits| info.bits & bits != 0;
        let cache = match (has(info_bits::DIRECT_IO), has(info_bits::KEEP_CACHE)) {
            (true, _) => CacheMode::Direct,
            (false, true) => CacheMode::Keep,
            (false, false) => CacheMode::Cached,
        };
        let is_read_only = !OpenFlags(info.flags as u32).writable();
        OpenReply {
            cache,
            no_flush: has(info_bits::NOFLUSH) || self.config.no_rofd_flush && is_read_only,
            stream: has(info_bits::NONSEEKABLE),
            cache_dir: has(info_bits::CACHE_READDIR),
            ..OpenReply::new(Fh(info.fh))
        }
    }

    /// The structure for an open, with the bits that the options set.
    fn opening(&self, flags: OpenFlags) -> OpenInfo {
        let mut bits = 0;
        if self.config.direct_io {
            bits |= info_bits::DIRECT_IO;
        }
        if self.config.kernel_cache {
            bits |= info_bits::KEEP_CACHE;
        }
        OpenInfo { flags: flags.0 as i32, bits, ..OpenInfo::default() }
    }

    /// Runs `call` with path and handle of `target`.
    fn with_target<T>(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        call: impl FnOnce(PathArg<'_>, Option<&mut OpenInfo>) -> Result<T>,
    ) -> Result<T> {
        let _scope = self.scope(cx)?;
        let path = match target {
            PathOperand::Path(path) => Some(path),
            PathOperand::Open(file) => file.path,
        };
        let path = path.map(|path| text(path.as_bytes())).transpose()?;
        let mut info = target.fh().map(|fh| OpenInfo { fh: fh.0, ..OpenInfo::default() });
        call(path.as_deref(), info.as_mut())
    }

    /// Runs `call` with the path of `target`, for operations that need one.
    fn with_path<T>(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        call: impl FnOnce(&CStr) -> Result<T>,
    ) -> Result<T> {
        let path = text(target.path()?.as_bytes())?;
        let _scope = self.scope(cx)?;
        call(&path)
    }

    /// Runs `call` with path and structure of an open file.
    fn with_file<T>(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        call: impl FnOnce(PathArg<'_>, &mut OpenInfo) -> Result<T>,
    ) -> Result<T> {
        let path = file.path.map(|path| text(path.as_bytes())).transpose()?;
        // Access was decided when the file was opened.
        let _scope = CallScope::new(self.program, cx, 0);
        call(path.as_deref(), &mut OpenInfo { fh: file.fh.0, ..OpenInfo::default() })
    }

    /// The entry with its type, for which the program is asked if it has not said so: programs that
    /// walk trees, such as find(1), rely on it.
    fn add_kind(&self, dir: PathArg<'_>, entry: ProgramEntry) -> PathDirEntry {
        let is_dots = matches!(&entry.name[..], b"." | b"..");
        let found = || {
            let dir = dir.filter(|_| !is_dots)?.to_bytes();
            let separator: &[u8] = if dir.ends_with(b"/") { b"" } else { b"/" };
            let path = text(&[dir, separator, &entry.name].concat()).ok()?;
            FileKind::from_mode(self.table.getattr(Some(&path), None).ok()?.st_mode)
        };
        let kind = entry.kind.or_else(found).unwrap_or(FileKind::Regular);
        let st_ino = if self.config.use_ino { entry.st_ino } else { UNKNOWN_INO };
        PathDirEntry { name: entry.name, kind, st_ino }
    }

    /// Drops the record locks of `owner`, at a close.
    fn drop_locks(&self, path: PathArg<'_>, info: &mut OpenInfo) -> Result<()> {
        let mut lock = whole_file(libc::F_UNLCK);
        self.table.lock(path, info, libc::F_SETLK, &mut lock)
    }
}

fn time(secs: i64, nanos: i64) -> Timestamp {
    // A number of the program that is no nanosecond would be refused by the kernel.
    Timestamp { secs, nanos: u32::try_from(nanos).unwrap_or(0).min(999_999_999) }
}

fn whole_file(typ: i32) -> libc::flock {
    libc::flock {
        l_type: typ as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn c_path(path: PathRef<'_>) -> Result<CString> {
    text(path.as_bytes())
}

fn offset(offset: u64) -> Result<i64> {
    i64::try_from(offset).map_err(|_| Errno::EFBIG)
}

impl PathFileSystem for ProgramFileSystem {
    fn path_caps(&self) -> PathCaps {
        let (record, flock) = self.table.keeps_locks();
        let locks = if record || flock { LockSupport::FileSystem } else { LockSupport::Frontend };
        PathCaps {
            caps: Caps {
                locks,
                xattrs: self.table.has_xattrs(),

                open_truncates: self.wishes.open_truncates,
                negative_lifetime: self.config.negative_timeout,
                time_granularity_ns: self.wishes.time_gran.max(1),
                birth_times: false,
                ..Caps::default()
            },
            stable_ino: false,
            shows_st_ino: self.config.use_ino,
            handles_survive_unlink: self.config.hard_remove,
            // Programs may do without, and listings need it.
            paths_while_named: true,
            entry_valid_for: self.config.entry_timeout,
        }
    }

    fn attach(&self, _: Origin, notify: Arc<dyn Notify>) {
        let _ = self.notify.set(notify);
    }

    fn getattr(&self, cx: &Context<'_>, target: PathOperand<'_>) -> Result<Attr> {
        let found = self.with_target(cx, target, |path, info| self.table.getattr(path, info))?;
        self.attr(&found)
    }

    fn readlink(&self, cx: &Context<'_>, path: PathRef<'_>) -> Result<Vec<u8>> {
        self.with_path(cx, PathOperand::Path(path), |path| self.table.readlink(path))
    }

    fn mknod(&self, cx: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        let _scope = self.enter_creation(cx, node)?;
        let (path, mode) = (c_path(path)?, node.kind.mode_bits() | node.perm);
        if node.kind == FileKind::Regular && self.table.creates() {
            let flags = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::WRONLY;
            let mut info = OpenInfo { flags: flags as i32, ..OpenInfo::default() };
            match self.table.create(&path, mode, &mut info) {
                Err(Errno::ENOSYS) => {}
                other => {
                    other?;
                    return self.table.release(Some(&path), &mut info);
                }
            }
        }
        self.table.mknod(&path, mode, node.rdev)
    }

    fn mkdir(&self, cx: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        let _scope = self.enter_creation(cx, node)?;
        self.table.mkdir(&c_path(path)?, node.perm)
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<()> {
        let _scope = self.enter_creation(cx, node)?;
        self.table.symlink(&text(target)?, &c_path(path)?)
    }

    fn link(&self, cx: &Context<'_>, old: PathRef<'_>, new: PathRef<'_>) -> Result<()> {
        let _scope = self.scope(cx)?;
        self.table.link(&c_path(old)?, &c_path(new)?)
    }

    fn unlink(&self, cx: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        self.with_path(cx, PathOperand::Path(path), |path| self.table.unlink(path))
    }

    fn rmdir(&self, cx: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        self.with_path(cx, PathOperand::Path(path), |path| self.table.rmdir(path))
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: PathRef<'_>,
        to: PathRef<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        let _scope = self.scope(cx)?;
        self.table.rename(&c_path(from)?, &c_path(to)?, flags.0)
    }

    fn chmod(&self, cx: &Context<'_>, target: PathOperand<'_>, perm: u32) -> Result<()> {
        // libfuse passes the kernel's mode, which has the type.
        let kind = self.getattr(cx, target)?.kind;
        let mode = kind.mode_bits() | perm;
        self.with_target(cx, target, |path, info| self.table.chmod(path, mode, info))
    }

    fn chown(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        // chown(2): a number of all ones keeps the owner.
        let ids = (uid.unwrap_or(u32::MAX), gid.unwrap_or(u32::MAX));
        self.with_target(cx, target, |path, info| self.table.chown(path, ids, info))
    }

    fn truncate(&self, cx: &Context<'_>, target: PathOperand<'_>, size: u64) -> Result<()> {
        let size = offset(size)?;
        self.with_target(cx, target, |path, info| self.table.truncate(path, size, info))
    }

    fn utimens(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
    ) -> Result<()> {
        let times = if self.table.sets_single_times() {
            [special_time(atime), special_time(mtime)]
        } else {
            let missing = atime.is_none() || mtime.is_none();
            let old = if missing { Some(self.getattr(cx, target)?) } else { None };
            [
                plain_time(atime, old.map(|old| old.atime)),
                plain_time(mtime, old.map(|old| old.mtime)),
            ]
        };
        self.with_target(cx, target, |path, info| self.table.utimens(path, &times, info))
    }

    fn access(&self, cx: &Context<'_>, target: PathOperand<'_>, mask: AccessMask) -> Result<()> {
        self.with_path(cx, target, |path| self.table.access(path, mask.0 as i32))
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        let name = text(name.as_bytes())?;
        let bit = |set, bit| if set { bit } else { 0 };
        let flags = bit(flags.create, libc::XATTR_CREATE) | bit(flags.replace, libc::XATTR_REPLACE);
        self.with_path(cx, target, |path| self.table.setxattr(path, &name, value, flags))
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        let name = text(name.as_bytes())?;
        self.with_path(cx, target, |path| {
            xattr(room, |room| self.table.getxattr(path, &name, room))
        })
    }

    fn listxattr(&self, cx: &Context<'_>, target: PathOperand<'_>, room: usize) -> Result<Xattr> {
        self.with_path(cx, target, |path| xattr(room, |room| self.table.listxattr(path, room)))
    }

    fn removexattr(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
    ) -> Result<()> {
        let name = text(name.as_bytes())?;
        self.with_path(cx, target, |path| self.table.removexattr(path, &name))
    }

    fn open(&self, cx: &Context<'_>, path: PathRef<'_>, args: OpenArgs) -> Result<OpenReply> {
        let _scope = self.scope(cx)?;
        let mut info = self.opening(args.flags);
        self.table.open(&c_path(path)?, &mut info)?;
        Ok(self.make_open_reply(&info))
    }

    fn create(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenReply> {
        if !self.table.creates() {
            self.mknod(cx, path, node)?;
            let creation = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::TRUNC;
            return self.open(
                cx,
                path,
                OpenArgs { flags: args.flags.difference(creation), ..args },
            );
        }
        let _scope = self.enter_creation(cx, node)?;
        let mut info = self.opening(args.flags);
        self.table.create(&c_path(path)?, FileKind::Regular.mode_bits() | node.perm, &mut info)?;
        Ok(self.make_open_reply(&info))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let offset = offset(args.offset)?;
        self.with_file(cx, file, |path, info| {
            info.flags = args.flags.0 as i32;
            info.lock_owner = args.lock_owner.map_or(0, |owner| owner.0);
            self.table.read(path, offset, info, out)
        })
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let offset = offset(args.offset)?;
        let mut own = Vec::new();
        let bytes = match data.borrow() {
            Some(bytes) => bytes,
            None => {
                own.resize(data.remaining(), 0);
                let taken = data.take(&mut own)?;
                &own[..taken]
            }
        };
        self.with_file(cx, file, |path, info| {
            info.flags = args.flags.0 as i32;
            info.lock_owner = args.lock_owner.map_or(0, |owner| owner.0);
            if args.from_cache {
                info.bits |= info_bits::WRITEPAGE;
            }
            self.table.write(path, bytes, offset, info)
        })
    }

    fn flush(&self, cx: &Context<'_>, file: PathFile<'_>, owner: LockOwner) -> Result<()> {
        self.with_file(cx, file, |path, info| {
            info.lock_owner = owner.0;
            info.bits |= info_bits::FLUSH;
            let flushed = self.table.flush(path, info);
            match self.drop_locks(path, info) {
                Err(Errno::ENOSYS) => flushed,
                // The program keeps locks, and must hear of the next close, too.
                _ if flushed == Err(Errno::ENOSYS) => Ok(()),
                _ => flushed,
            }
        })
    }

    fn release(&self, cx: &Context<'_>, file: PathFile<'_>, args: ReleaseArgs) -> Result<()> {
        self.with_file(cx, file, |path, info| {
            info.flags = args.flags.0 as i32;
            if let Some(owner) = args.flock_owner {
                info.lock_owner = owner.0;
                info.bits |= info_bits::FLOCK_RELEASE;
                // close(2) drops the lock of the open file; a program without these locks has none.
                let _ = self.table.flock(path, info, libc::LOCK_UN);
            }
            self.table.release(path, info)
        })
    }

    fn fsync(&self, cx: &Context<'_>, file: PathFile<'_>, datasync: bool) -> Result<()> {
        self.with_file(cx, file, |path, info| self.table.fsync(path, datasync, info))
    }

    fn fallocate(&self, cx: &Context<'_>, file: PathFile<'_>, range: Fallocate) -> Result<()> {
        let part = (offset(range.offset)?, offset(range.length)?);
        self.with_file(cx, file, |path, info| {
            self.table.fallocate(path, range.mode as i32, part, info)
        })
    }

    fn lseek(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        from: u64,
        whence: Whence,
    ) -> Result<u64> {
        let from = offset(from)?;
        let whence = match whence {
            Whence::Data => libc::SEEK_DATA,
            Whence::Hole => libc::SEEK_HOLE,
        };
        self.with_file(cx, file, |path, info| self.table.lseek(path, from, whence, info))
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &PathCopy<'_>) -> Result<u64> {
        let (src_offset, dst_offset) = (offset(copy.src_offset)?, offset(copy.dst_offset)?);
        let length = usize::try_from(copy.length).map_err(|_| Errno::EINVAL)?;
        let copied = self.with_file(cx, copy.src, |src, src_info| {
            self.with_file(cx, copy.dst, |dst, dst_info| {
                let (from, to) = ((src, src_offset, src_info), (dst, dst_offset, dst_info));
                self.table.copy_file_range(from, to, length, copy.flags as i32)
            })
        })?;
        if copied > copy.length { Err(Errno::EIO) } else { Ok(copied) }
    }

    fn ioctl(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        args: &IoctlArgs<'_>,
    ) -> Result<IoctlReply> {
        let len = args.input.len().max(args.output_len).min(IOCTL_MOST);
        let mut data = vec![0; len];
        let given = args.input.len().min(len);
        data[..given].copy_from_slice(&args.input[..given]);
        // FUSE_IOCTL_COMPAT and FUSE_IOCTL_DIR.
        let flags = u32::from(args.compat32) | u32::from(args.dir) << 4;
        let command = (args.cmd, args.arg, flags);
        let result =
            self.with_file(cx, file, |path, info| self.table.ioctl(path, command, info, &mut data));
        let result = match result {
            Err(Errno::ENOSYS) => Err(Errno::ENOTTY),
            other => other,
        }?;
        data.truncate(args.output_len);
        Ok(IoctlReply { result: i32::try_from(result).map_err(|_| Errno::EIO)?, output: data })
    }

    fn poll(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        if !self.table.polls() {
            return Err(Errno::ENOSYS);
        }
        let wake = poll_pointer(wake.zip(self.notify.get().cloned()));
        self.with_file(cx, file, |path, info| {
            info.events = events;
            self.table.poll(path, info, wake)
        })
    }

    fn bmap(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        block_size: u32,
        index: u64,
    ) -> Result<u64> {
        let mut block = index;
        self.with_path(cx, PathOperand::Path(path), |path| {
            self.table.bmap(path, block_size as usize, &mut block)
        })?;
        Ok(block)
    }

    fn getlk(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        request: &LockRequest,
    ) -> Result<Option<Lock>> {
        let mut lock = c_lock(&request.lock)?;
        self.with_file(cx, file, |path, info| {
            info.lock_owner = request.owner.0;
            self.table.lock(path, info, libc::F_GETLK, &mut lock)
        })?;
        found_lock(&lock)
    }

    fn setlk(&self, cx: &Context<'_>, file: PathFile<'_>, request: &LockRequest) -> Result<()> {
        let mut lock = c_lock(&request.lock)?;
        self.with_file(cx, file, |path, info| {
            info.lock_owner = request.owner.0;
            match request.kind {
                LockKind::Posix => {
                    let command = if request.wait { libc::F_SETLKW } else { libc::F_SETLK };
                    self.table.lock(path, info, command, &mut lock)
                }
                LockKind::Flock => {
                    let operation = match request.lock.typ {
                        LockType::Read => libc::LOCK_SH,
                        LockType::Write => libc::LOCK_EX,
                        LockType::Unlock => libc::LOCK_UN,
                    };
                    let now = if request.wait { 0 } else { libc::LOCK_NB };
                    self.table.flock(path, info, operation | now)
                }
            }
        })
    }

    fn opendir(&self, cx: &Context<'_>, path: PathRef<'_>, flags: OpenFlags) -> Result<OpenReply> {
        let _scope = self.scope(cx)?;
        let mut info = OpenInfo { flags: flags.0 as i32, ..OpenInfo::default() };
        self.table.opendir(&c_path(path)?, &mut info)?;
        Ok(self.make_open_reply(&info))
    }

    fn readdir(&self, cx: &Context<'_>, dir: PathFile<'_>) -> Result<Vec<PathDirEntry>> {
        if !self.table.lists() {
            return Err(Errno::ENOSYS);
        }
        self.with_file(cx, dir, |path, info| {
            let listed = self.table.readdir(path, info)?;
            Ok(listed.into_iter().map(|entry| self.add_kind(path, entry)).collect())
        })
    }

    fn releasedir(&self, cx: &Context<'_>, dir: PathFile<'_>) -> Result<()> {
        self.with_file(cx, dir, |path, info| self.table.releasedir(path, info))
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: PathFile<'_>, datasync: bool) -> Result<()> {
        self.with_file(cx, dir, |path, info| self.table.fsyncdir(path, datasync, info))
    }

    fn statfs(&self, cx: &Context<'_>, target: PathOperand<'_>) -> Result<StatFs> {
        // Without a name, the facts are those of the root.
        let target = PathOperand::Path(target.path().unwrap_or(PathRef::ROOT));
        let facts = match self.with_path(cx, target, |path| self.table.statfs(path)) {
            Err(Errno::ENOSYS) => {
                return Ok(StatFs { bsize: 512, name_max: 255, ..StatFs::default() });
            }
            other => other?,
        };
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        Ok(StatFs {
            blocks: facts.f_blocks,
            blocks_free: facts.f_bfree,
            blocks_available: facts.f_bavail,
            files: facts.f_files,
            files_free: facts.f_ffree,
            bsize: small(facts.f_bsize),
            frsize: small(facts.f_frsize),
            name_max: small(facts.f_namemax),
        })
    }
}

/// The structure for utimensat(2).
fn special_time(time: Option<SetTime>) -> libc::timespec {
    match time {
        None => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
        Some(SetTime::Now) => libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW },
        Some(SetTime::At(time)) => timespec(time),
    }
}

/// The structure of a time, where the program knows no special ones.
fn plain_time(time: Option<SetTime>, old: Option<Timestamp>) -> libc::timespec {
    match time {
        Some(SetTime::At(time)) => timespec(time),
        Some(SetTime::Now) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            libc::timespec { tv_sec: now.as_secs() as i64, tv_nsec: i64::from(now.subsec_nanos()) }
        }
        None => timespec(old.unwrap_or_default()),
    }
}

fn timespec(time: Timestamp) -> libc::timespec {
    libc::timespec { tv_sec: time.secs, tv_nsec: i64::from(time.nanos) }
}

/// Reads an extended attribute, or its size where there is no room.
fn xattr(room: usize, read: impl FnOnce(&mut [u8]) -> Result<u64>) -> Result<Xattr> {
    let mut value = vec![0; room];
    let len = usize::try_from(read(&mut value)?).map_err(|_| Errno::EIO)?;
    if room == 0 {
        return u32::try_from(len).map(Xattr::Size).map_err(|_| Errno::E2BIG);
    }
    if len > room {
        return Err(Errno::EIO);
    }
    value.truncate(len);
    Ok(Xattr::Value(value))
}

fn c_lock(lock: &Lock) -> Result<libc::flock> {
    let typ = match lock.typ {
        LockType::Read => libc::F_RDLCK,
        LockType::Write => libc::F_WRLCK,
        LockType::Unlock => libc::F_UNLCK,
    };
    let start = offset(lock.start)?;
    // fcntl(2): a length of 0 is up to the end of the file.
    let to_end = i64::try_from(lock.end).map_or(true, |end| end == i64::MAX);
    let len = if to_end { 0 } else { (lock.end - lock.start.min(lock.end)) as i64 + 1 };
    Ok(libc::flock { l_start: start, l_len: len, l_pid: lock.pid as i32, ..whole_file(typ) })
}

fn found_lock(lock: &libc::flock) -> Result<Option<Lock>> {
    let typ = match i32::from(lock.l_type) {
        libc::F_UNLCK => return Ok(None),
        libc::F_RDLCK => LockType::Read,
        libc::F_WRLCK => LockType::Write,
        _ => return Err(Errno::EIO),
    };
    let start = u64::try_from(lock.l_start).map_err(|_| Errno::EIO)?;
    let end = match u64::try_from(lock.l_len).map_err(|_| Errno::EIO)? {
        0 => i64::MAX as u64,
        len => start.saturating_add(len - 1).min(i64::MAX as u64),
    };
    Ok(Some(Lock { typ, start, end, pid: lock.l_pid as u32 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_the_same_in_c_and_here() {
        for (start, end) in [(0, i64::MAX as u64), (5, 5), (3, 9)] {
            let lock = Lock { typ: LockType::Write, start, end, pid: 7 };
            assert_eq!(found_lock(&c_lock(&lock).unwrap()), Ok(Some(lock)));
        }
        let free = Lock { typ: LockType::Unlock, start: 0, end: 1, pid: 0 };
        assert_eq!(found_lock(&c_lock(&free).unwrap()), Ok(None));
        assert_eq!(
            found_lock(&libc::flock { l_start: -1, ..whole_file(libc::F_RDLCK) }),
            Err(Errno::EIO)
        );
    }

    #[test]
    fn a_timeout_that_is_no_number_caches_nothing() {
        assert_eq!(seconds(f64::NAN), Duration::ZERO);
        assert_eq!(seconds(-3.0), Duration::ZERO);
        assert_eq!(seconds(0.5), Duration::from_millis(500));
        assert!(seconds(f64::INFINITY) > Duration::from_secs(1000));
    }

    #[test]
    fn an_attribute_longer_than_its_room_is_an_error() {
        assert_eq!(xattr(0, |_| Ok(9)), Ok(Xattr::Size(9)));
        assert_eq!(xattr(4, |_| Ok(9)), Err(Errno::EIO));
        assert_eq!(
            xattr(4, |room| {
                room[0] = 1;
                Ok(1)
            }),
            Ok(Xattr::Value(vec![1]))
        );
    }
}
