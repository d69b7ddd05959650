//! Implements the `Filesystem` trait of the crate by system calls, with one short method each.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{
    self as sys, AtFlags, CWD, DirEntry, Gid, Mode, OFlags, Timestamps, Uid, XattrFlags,
};

use crate::attr::{errno, from_stat, kind, timespec};
use crate::tables::{
    DirPosition, HandleCounter, OpenDir, PinnedInode, PinnedInodes, ShardedMap, with_buffer,
};

const ROOT: u64 = 1;
const ZERO: Generation = Generation(0);

/// Settings from the command line.
#[derive(Debug, Clone, Copy)]
pub struct MountTuning {
    /// Validity time of entries and attributes.
    pub timeout: Duration,
    /// Request the write-back cache.
    pub writeback: bool,
    /// Request `HANDLE_KILLPRIV_V2`: the system calls below clear the bits themselves.
    pub killpriv: bool,
    /// Serve extended attributes.
    pub xattr: bool,
}

/// A directory served as a file system.
pub struct FuserPassthrough {
    tuning: MountTuning,
    inodes: PinnedInodes,
    files: ShardedMap<OwnedFd>,
    dirs: ShardedMap<OpenDir>,
    handles: HandleCounter,
}

type ErrnoResult<T> = std::result::Result<T, Errno>;

impl FuserPassthrough {
    /// Creates a file system with the root `source`.
    pub fn new(source: &Path, tuning: MountTuning) -> io::Result<Self> {
        let root = sys::open(source, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
        let inodes = PinnedInodes::new();
        inodes.insert(ROOT, PinnedInode::new(root));
        let (files, dirs) = (ShardedMap::new(), ShardedMap::new());
        Ok(Self { tuning, inodes, files, dirs, handles: HandleCounter::default() })
    }

    fn inode(&self, ino: INodeNo) -> ErrnoResult<Arc<PinnedInode>> {
        self.inodes.get(ino.0).ok_or(Errno::ESTALE)
    }

    fn file(&self, fh: FileHandle) -> ErrnoResult<Arc<OwnedFd>> {
        self.files.get(fh.0).ok_or(Errno::EBADF)
    }

    /// Looks up a name and counts the lookup.
    fn enter(&self, parent: &PinnedInode, name: &OsStr) -> ErrnoResult<FileAttr> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let fd = sys::openat(&parent.fd, name, flags, Mode::empty()).map_err(errno)?;
        let stat = sys::fstat(&fd).map_err(errno)?;
        let node = stat.st_ino;
        self.inodes.remember(node, fd);
        Ok(from_stat(node, &stat))
    }

    fn stat(&self, ino: INodeNo) -> ErrnoResult<FileAttr> {
        let stat = sys::fstat(&self.inode(ino)?.fd).map_err(errno)?;
        Ok(from_stat(ino.0, &stat))
    }

    /// Makes the caller the owner, because the daemon creates files as root.
    fn give_to_caller(&self, req: &Request, parent: &PinnedInode, name: &OsStr) -> ErrnoResult<()> {
        if req.uid() == 0 && req.gid() == 0 {
            return Ok(());
        }
        let (uid, gid) = (Uid::from_raw(req.uid()), Gid::from_raw(req.gid()));
        sys::chownat(&parent.fd, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(errno)
    }

    fn make(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        make: impl FnOnce(&OwnedFd) -> rustix::io::Result<()>,
    ) -> ErrnoResult<FileAttr> {
        let parent = self.inode(parent)?;
        make(&parent.fd).map_err(errno)?;
        self.give_to_caller(req, &parent, name)?;
        self.enter(&parent, name)
    }

    fn keep_file(&self, fd: OwnedFd) -> FileHandle {
        let fh = self.handles.next();
        self.files.insert(fh, fd);
        FileHandle(fh)
    }

    /// Cached pages may outlive a close if attributes may be cached at all.
    fn open_flags(&self) -> FopenFlags {
        if self.tuning.timeout.is_zero() {
            FopenFlags::empty()
        } else {
            FopenFlags::FOPEN_KEEP_CACHE
        }
    }

    /// Flags for the lower file. With the write-back cache the kernel must be able to read partly
    /// written pages, and handles O_APPEND itself.
    fn flags_below(&self, flags: i32) -> OFlags {
        let mut flags = OFlags::from_bits_retain(flags as u32);
        if self.tuning.writeback {
            if flags & OFlags::RWMODE == OFlags::WRONLY {
                flags = (flags - OFlags::RWMODE) | OFlags::RDWR;
            }
            flags -= OFlags::APPEND;
        }
        flags - OFlags::NOFOLLOW
    }

    /// Passes entries from `offset` on to `add`, which returns true if the reply is full.
    fn for_each_entry(
        &self,
        fh: FileHandle,
        offset: u64,
        mut add: impl FnMut(&DirEntry) -> bool,
    ) -> ErrnoResult<()> {
        let dir = self.dirs.get(fh.0).ok_or(Errno::EBADF)?;
        let mut stream = dir.stream.lock().unwrap();
        if stream.at != Some(offset) {
            stream.dir.seek(offset as i64).map_err(errno)?;
            stream.at = Some(offset);
        }
        while let Some(entry) = stream.dir.read() {
            let entry = entry.map_err(errno)?;
            if add(&entry) {
                stream.at = None;
                break;
            }
            stream.at = Some(entry.offset() as u64);
        }
        Ok(())
    }

    /// Applies a setattr, with one system call for each kind of change.
    fn change(
        &self,
        ino: INodeNo,
        fh: Option<FileHandle>,
        change: &AttributeChange,
    ) -> ErrnoResult<FileAttr> {
        let inode = self.inode(ino)?;
        let path = proc_path(&inode);
        if let Some(mode) = change.mode {
            sys::chmod(&path, Mode::from_raw_mode(mode)).map_err(errno)?;
        }
        if change.uid.is_some() || change.gid.is_some() {
            let (uid, gid) = (change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw));
            sys::chownat(&inode.fd, "", uid, gid, AtFlags::EMPTY_PATH).map_err(errno)?;
        }
        if let Some(size) = change.size {
            match fh {
                Some(fh) => sys::ftruncate(&*self.file(fh)?, size),
                None => sys::open(&path, OFlags::WRONLY, Mode::empty())
                    .and_then(|fd| sys::ftruncate(fd, size)),
            }
            .map_err(errno)?;
        }
        if let Some(times) = &change.times {
            sys::utimensat(CWD, &path, times, AtFlags::empty()).map_err(errno)?;
        }
        self.stat(ino)
    }
}

/// The parts of a setattr that this file system supports.
struct AttributeChange {
    mode: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    size: Option<u64>,
    times: Option<Timestamps>,
}

/// The path by which an `O_PATH` descriptor is reopened.
fn proc_path(inode: &PinnedInode) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", inode.fd.as_raw_fd())
}

/// Sends the value through `ok`, or the error through the method of the reply.
macro_rules! answer {
    ($reply:ident, $result:expr, $ok:expr) => {
        match $result {
            Ok(value) => $ok($reply, value),
            Err(error) => $reply.error(error),
        }
    };
}

impl Filesystem for FuserPassthrough {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_ATOMIC_O_TRUNC
            | InitFlags::FUSE_AUTO_INVAL_DATA;
        wanted.set(InitFlags::FUSE_WRITEBACK_CACHE, self.tuning.writeback);
        wanted.set(InitFlags::FUSE_HANDLE_KILLPRIV_V2, self.tuning.killpriv);
        // An older kernel lacks some of these, and works without them.
        let _ = config.add_capabilities(wanted & config.capabilities());
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.inode(parent).and_then(|parent| self.enter(&parent, name));
        answer!(reply, found, |r: ReplyEntry, attr| r.entry(&self.tuning.timeout, &attr, ZERO));
    }

    fn forget(&self, _req: &Request, ino: INodeNo, lookups: u64) {
        self.inodes.forget(ino.0, lookups);
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        answer!(reply, self.stat(ino), |r: ReplyAttr, attr| r.attr(&self.tuning.timeout, &attr));
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let times = (atime.is_some() || mtime.is_some()).then(|| Timestamps {
            last_access: timespec(atime),
            last_modification: timespec(mtime),
        });
        let change = AttributeChange { mode, uid, gid, size, times };
        let changed = self.change(ino, fh, &change);
        answer!(reply, changed, |r: ReplyAttr, attr| r.attr(&self.tuning.timeout, &attr));
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        let target = self.inode(ino).and_then(|inode| {
            sys::readlinkat(&inode.fd, "", Vec::with_capacity(256)).map_err(errno)
        });
        answer!(reply, target, |r: ReplyData, t: std::ffi::CString| r.data(t.as_bytes()));
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let kind = sys::FileType::from_raw_mode(mode);
        let mode = Mode::from_raw_mode(mode & !umask);
        let made = self.make(req, parent, name, |dir| {
            sys::mknodat(dir, name, kind, mode, sys::Dev::from(rdev))
        });
        answer!(reply, made, |r: ReplyEntry, attr| r.entry(&self.tuning.timeout, &attr, ZERO));
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let mode = Mode::from_raw_mode(mode & !umask);
        let made = self.make(req, parent, name, |dir| sys::mkdirat(dir, name, mode));
        answer!(reply, made, |r: ReplyEntry, attr| r.entry(&self.tuning.timeout, &attr, ZERO));
    }

    fn symlink(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let made = self.make(req, parent, name, |dir| sys::symlinkat(target, dir, name));
        answer!(reply, made, |r: ReplyEntry, attr| r.entry(&self.tuning.timeout, &attr, ZERO));
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self
            .inode(parent)
            .and_then(|parent| sys::unlinkat(&parent.fd, name, AtFlags::empty()).map_err(errno));
        answer!(reply, done, |r: ReplyEmpty, ()| r.ok());
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self
            .inode(parent)
            .and_then(|parent| sys::unlinkat(&parent.fd, name, AtFlags::REMOVEDIR).map_err(errno));
        answer!(reply, done, |r: ReplyEmpty, ()| r.ok());
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let flags = sys::RenameFlags::from_bits_retain(flags.bits());
        let done = self.inode(parent).and_then(|from| {
            let to = self.inode(newparent)?;
            sys::renameat_with(&from.fd, name, &to.fd, newname, flags).map_err(errno)
        });
        answer!(reply, done, |r: ReplyEmpty, ()| r.ok());
    }

    fn link(
        &self,
        _req: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let linked = self.inode(ino).and_then(|inode| {
            let parent = self.inode(newparent)?;
            let flags = AtFlags::SYMLINK_FOLLOW;
            sys::linkat(CWD, proc_path(&inode), &parent.fd, newname, flags).map_err(errno)?;
            self.enter(&parent, newname)
        });
        answer!(reply, linked, |r: ReplyEntry, attr| r.entry(&self.tuning.timeout, &attr, ZERO));
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.inode(ino).and_then(|inode| {
            let flags = self.flags_below(flags.0);
            sys::open(proc_path(&inode), flags, Mode::empty()).map_err(errno)
        });
        answer!(reply, opened, |r: ReplyOpen, fd| r.opened(self.keep_file(fd), self.open_flags()));
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let created = self.inode(parent).and_then(|parent| {
            let flags = self.flags_below(flags) | OFlags::CREATE | OFlags::NOFOLLOW;
            let mode = Mode::from_raw_mode(mode & !umask);
            let fd = sys::openat(&parent.fd, name, flags, mode).map_err(errno)?;
            self.give_to_caller(req, &parent, name)?;
            Ok((self.enter(&parent, name)?, fd))
        });
        answer!(reply, created, |r: ReplyCreate, (attr, fd)| {
            let (fh, open_flags) = (self.keep_file(fd), self.open_flags());
            r.created(&self.tuning.timeout, &attr, ZERO, fh, open_flags);
        });
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let file = match self.file(fh) {
            Ok(file) => file,
            Err(error) => return reply.error(error),
        };
        with_buffer(size as usize, |buffer| {
            match rustix::io::pread(&*file, &mut *buffer, offset) {
                Ok(read) => reply.data(&buffer[..read]),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let direct = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::DIRECT);
        let written = self.file(fh).and_then(|file| {
            if !direct {
                return rustix::io::pwrite(&*file, data, offset).map_err(errno);
            }
            // The crate passes the data as it follows the request's header, which is not aligned
            // for O_DIRECT.
            with_buffer(data.len(), |buffer| {
                buffer.copy_from_slice(data);
                rustix::io::pwrite(&*file, buffer, offset).map_err(errno)
            })
        });
        answer!(reply, written, |r: ReplyWrite, size| r.written(size as u32));
    }

    // `flush` keeps the default ENOSYS of the crate: the kernel then stops sending it, and nothing
    // is buffered here.

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.files.remove(fh.0);
        reply.ok();
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        let synced = self.file(fh).and_then(|file| {
            if datasync { sys::fdatasync(&*file) } else { sys::fsync(&*file) }.map_err(errno)
        });
        answer!(reply, synced, |r: ReplyEmpty, ()| r.ok());
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.inode(ino).and_then(|inode| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            let fd = sys::openat(&inode.fd, ".", flags, Mode::empty()).map_err(errno)?;
            rustix::fs::Dir::new(fd).map_err(errno)
        });
        answer!(reply, opened, |r: ReplyOpen, dir| {
            let fh = self.handles.next();
            self.dirs.insert(fh, OpenDir { stream: Mutex::new(DirPosition { dir, at: Some(0) }) });
            let mut flags = self.open_flags();
            flags.set(FopenFlags::FOPEN_CACHE_DIR, !flags.is_empty());
            r.opened(FileHandle(fh), flags);
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let done = self.for_each_entry(fh, offset, |entry| {
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            let next = entry.offset() as u64;
            reply.add(INodeNo(entry.ino()), next, kind(entry.file_type()), name)
        });
        answer!(reply, done, |r: ReplyDirectory, ()| r.ok());
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let done = self.inode(ino).and_then(|parent| {
            self.for_each_entry(fh, offset, |entry| {
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                // The kernel resolves `.` and `..` itself, so they do not count as lookups.
                let dots = matches!(name.as_bytes(), b"." | b"..");
                let found = if dots { self.stat(ino) } else { self.enter(&parent, name) };
                // A name removed meanwhile is left out, as in a later readdir.
                let Ok(attr) = found else { return false };
                let (node, next) = (attr.ino, entry.offset() as u64);
                let full = reply.add(node, next, name, &self.tuning.timeout, &attr, ZERO);
                if full && !dots {
                    self.inodes.forget(node.0, 1);
                }
                full
            })
        });
        answer!(reply, done, |r: ReplyDirectoryPlus, ()| r.ok());
    }

    fn releasedir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.dirs.remove(fh.0);
        reply.ok();
    }

    fn statfs(&self, _req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let stat = self.inode(ino).and_then(|inode| sys::fstatvfs(&inode.fd).map_err(errno));
        answer!(reply, stat, |r: ReplyStatfs, s: sys::StatVfs| {
            let (block, fragment) = (s.f_bsize as u32, s.f_frsize as u32);
            let name = s.f_namemax as u32;
            let (blocks, files) = (s.f_blocks, s.f_files);
            r.statfs(blocks, s.f_bfree, s.f_bavail, files, s.f_ffree, block, name, fragment);
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if !self.tuning.xattr {
            return reply.error(Errno::ENOSYS);
        }
        let mut value = vec![0; size as usize];
        let length = self.inode(ino).and_then(|inode| {
            let path = proc_path(&inode);
            match size {
                0 => sys::getxattr_query(path, name),
                _ => sys::getxattr(path, name, &mut value[..]),
            }
            .map_err(errno)
        });
        answer!(reply, length, |r, length| xattr_reply(r, &value, length));
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        if !self.tuning.xattr {
            return reply.error(Errno::ENOSYS);
        }
        let mut names = vec![0; size as usize];
        let length = self.inode(ino).and_then(|inode| {
            let path = proc_path(&inode);
            match size {
                0 => sys::listxattr_query(path),
                _ => sys::listxattr(path, &mut names[..]),
            }
            .map_err(errno)
        });
        answer!(reply, length, |r, length| xattr_reply(r, &names, length));
    }

    fn setxattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        if !self.tuning.xattr {
            return reply.error(Errno::ENOSYS);
        }
        let flags = XattrFlags::from_bits_retain(flags as u32);
        let done = self
            .inode(ino)
            .and_then(|inode| sys::setxattr(proc_path(&inode), name, value, flags).map_err(errno));
        answer!(reply, done, |r: ReplyEmpty, ()| r.ok());
    }

    fn removexattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if !self.tuning.xattr {
            return reply.error(Errno::ENOSYS);
        }
        let done = self
            .inode(ino)
            .and_then(|inode| sys::removexattr(proc_path(&inode), name).map_err(errno));
        answer!(reply, done, |r: ReplyEmpty, ()| r.ok());
    }
}

/// A request of size 0 reads the length, any other the value.
fn xattr_reply(reply: ReplyXattr, value: &[u8], length: usize) {
    if value.is_empty() { reply.size(length as u32) } else { reply.data(&value[..length]) }
}
