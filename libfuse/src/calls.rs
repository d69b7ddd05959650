//! Calls of the program's operations, of either version.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::BorrowedFd;
use std::ptr::{null, null_mut};

use defuse_fs::{Errno, FileKind, ReadBuf, Result};
use libc::{flock, stat, statvfs, timespec};

use crate::abi::{
    BUF_FD_SEEK, BUF_IS_FD, ConnInfoThree, ConnInfoTwo, DataPart, DataParts, FileInfoThree,
    FileInfoTwo, FuseConfig, InfoPtr, OLD_PROGRAM, OperationsThree, OperationsTwo, PathPtr,
    UTIME_OMIT_OK, info_bits,
};
use crate::options::ApiVersion;

/// Most parts of the data of one read.
const PARTS_MOST: usize = 1 << 16;

/// Most entries of one listing.
const ENTRIES_MOST: usize = 1 << 24;

/// The operations of a program.
#[derive(Clone)]
pub enum OperationTable {
    /// Those of libfuse 2.
    Two(Box<OperationsTwo>),
    /// Those of libfuse 3.
    Three(Box<OperationsThree>),
}

/// A `struct fuse_file_info` in the terms of libfuse 3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenInfo {
    /// Flags of open(2).
    pub flags: i32,
    /// [`info_bits`].
    pub bits: u32,
    /// The program's handle.
    pub fh: u64,
    /// Owner of locks.
    pub lock_owner: u64,
    /// Events of poll(2).
    pub events: u32,
}

impl OpenInfo {
    fn has(&self, bits: u32) -> u32 {
        u32::from(self.bits & bits == bits)
    }
}

/// The structure of the version of a program.
pub(crate) enum RawInfo {
    Two(FileInfoTwo),
    Three(FileInfoThree),
}

impl RawInfo {
    /// The structure for `info`.
    pub(crate) fn new(version: ApiVersion, info: &OpenInfo) -> RawInfo {
        match version {
            ApiVersion::Two => RawInfo::Two(FileInfoTwo {
                flags: info.flags,
                fh_old: info.fh,
                writepage: info.has(info_bits::WRITEPAGE) as c_int,
                bits: info.bits >> 1,
                fh: info.fh,
                lock_owner: info.lock_owner,
            }),
            ApiVersion::Three => RawInfo::Three(FileInfoThree {
                flags: info.flags,
                bits: info.bits,
                padding: 0,
                fh: info.fh,
                lock_owner: info.lock_owner,
                poll_events: info.events,
            }),
        }
    }

    /// The structure that a program passes.
    ///
    /// # Safety
    ///
    /// `info` is a `struct fuse_file_info` of this version.
    pub(crate) unsafe fn at(version: ApiVersion, info: *const c_void) -> RawInfo {
        // SAFETY: the caller's promise.
        unsafe {
            match version {
                ApiVersion::Two => RawInfo::Two(info.cast::<FileInfoTwo>().read()),
                ApiVersion::Three => RawInfo::Three(info.cast::<FileInfoThree>().read()),
            }
        }
    }

    /// The pointer for the program.
    pub(crate) fn pointer(&mut self) -> InfoPtr {
        match self {
            RawInfo::Two(info) => (info as *mut FileInfoTwo).cast(),
            RawInfo::Three(info) => (info as *mut FileInfoThree).cast(),
        }
    }

    /// The values that the program has left in it.
    pub(crate) fn read(&self) -> OpenInfo {
        match self {
            RawInfo::Two(info) => OpenInfo {
                flags: info.flags,
                bits: info.bits << 1,
                fh: info.fh,
                lock_owner: info.lock_owner,
                events: 0,
            },
            RawInfo::Three(info) => OpenInfo {
                flags: info.flags,
                bits: info.bits,
                fh: info.fh,
                lock_owner: info.lock_owner,
                events: info.poll_events,
            },
        }
    }
}

/// The path of an operation; `None` is a null pointer, for an open file without a name.
pub type PathArg<'a> = Option<&'a CStr>;

fn pointer(path: PathArg<'_>) -> PathPtr {
    path.map_or(null(), CStr::as_ptr)
}

/// Converts the result of an operation: a negated error number, or a number.
fn check_result(result: c_long) -> Result<u64> {
    match result {
        0.. => Ok(result as u64),
        -4095..0 => Err(Errno::from_raw(-result as i32)),
        // No error number: what the program returned is not a result.
        _ => Err(Errno::EIO),
    }
}

/// Calls an operation, or fails with `ENOSYS`.
macro_rules! call {
    ($op:expr, $($arg:expr),*) => {
        match $op {
            // SAFETY: the program has given this function for this operation (`OperationTable`),
            // and each pointer is null where libfuse passes null, or leads to a value that lives
            // until the function returns.
            Some(function) => check_result(unsafe { function($($arg),*) } as c_long),
            None => Err(Errno::ENOSYS),
        }
    };
}

impl OperationTable {
    /// Copies a `struct fuse_operations` of libfuse 3 with `size` bytes. Operations that it does
    /// not have are missing, later ones are left out.
    ///
    /// # Safety
    ///
    /// `operations` has `size` readable bytes, and the functions in it can be called from any
    /// thread until the program ends.
    pub unsafe fn three(operations: *const c_void, size: usize) -> OperationTable {
        let mut table = OperationsThree::default();
        // SAFETY: all fields are optional functions, for which zeros mean none; the rest is the
        // caller's promise.
        unsafe { copy(operations, size, &mut table) };
        OperationTable::Three(Box::new(table))
    }

    /// Copies a `struct fuse_operations` of libfuse 2 with `size` bytes.
    ///
    /// # Safety
    ///
    /// The conditions of [`three`](OperationTable::three).
    pub unsafe fn two(operations: *const c_void, size: usize) -> OperationTable {
        let mut table = OperationsTwo::default();
        // SAFETY: all fields are optional functions and bits, for which zeros mean none; the rest
        // is the caller's promise.
        unsafe { copy(operations, size, &mut table) };
        table.bits &= !OLD_PROGRAM;
        OperationTable::Two(Box::new(table))
    }

    /// Copies a structure of libfuse 2.2 to 2.4 with `size` bytes.
    ///
    /// # Safety
    ///
    /// The conditions of [`three`](OperationTable::three).
    pub unsafe fn oldest(operations: *const c_void, size: usize) -> OperationTable {
        // The structure ended with `destroy`.
        let size = size.min(std::mem::offset_of!(OperationsTwo, first.access));
        // SAFETY: the caller's promise.
        let mut table = unsafe { OperationTable::two(operations, size) };
        if let OperationTable::Two(table) = &mut table {
            table.bits |= OLD_PROGRAM;
        }
        table
    }

    fn is_old(&self) -> bool {
        matches!(self, OperationTable::Two(table) if table.bits & OLD_PROGRAM != 0)
    }

    fn version(&self) -> ApiVersion {
        match self {
            OperationTable::Two(_) => ApiVersion::Two,
            OperationTable::Three(_) => ApiVersion::Three,
        }
    }

    /// Calls `run` with the structure of `info`, and takes over what the program has changed in it.
    fn with_info<T>(
        &self,
        info: Option<&mut OpenInfo>,
        run: impl FnOnce(InfoPtr) -> Result<T>,
    ) -> Result<T> {
        let Some(info) = info else { return run(null_mut()) };
        let mut raw = RawInfo::new(self.version(), info);
        let result = run(raw.pointer());
        if let RawInfo::Two(raw) = &mut raw
            && self.is_old()
        {
            raw.fh = raw.fh_old;
        }
        *info = raw.read();
        result
    }

    /// Calls `init` of the program.
    pub fn init(&self, conn: &mut ConnInfoThree, config: &mut FuseConfig) -> Option<*mut c_void> {
        match self {
            // SAFETY: `OperationTable` says that the function is the program's, and both structures
            // live longer than the call.
            OperationTable::Three(table) => table.init.map(|init| unsafe { init(conn, config) }),
            OperationTable::Two(table) => {
                let init = table.first.init?;
                let mut older = older(conn);
                // SAFETY: `OperationTable` says that the function is the program's, and the
                // structure lives longer than the call.
                let data = unsafe { init(&mut older) };
                take_older(conn, &older);
                Some(data)
            }
        }
    }

    /// Calls `destroy` of the program with what its `init` returned.
    pub(crate) fn destroy(&self, data: *mut c_void) {
        let destroy = match self {
            OperationTable::Two(table) => table.first.destroy,
            OperationTable::Three(table) => table.destroy,
        };
        if let Some(destroy) = destroy {
            // SAFETY: the function is the program's (`OperationTable`), and the pointer is its own.
            unsafe { destroy(data) };
        }
    }

    /// True if the program keeps record locks, and those of flock(2).
    pub fn keeps_locks(&self) -> (bool, bool) {
        match self {
            OperationTable::Two(table) => (table.first.lock.is_some(), table.last.flock.is_some()),
            OperationTable::Three(table) => (table.lock.is_some(), table.flock.is_some()),
        }
    }

    /// True if the program opens a file that it creates.
    pub fn creates(&self) -> bool {
        match self {
            OperationTable::Two(table) => table.first.create.is_some(),
            OperationTable::Three(table) => table.create.is_some(),
        }
    }

    /// True if the program has extended attributes.
    pub fn has_xattrs(&self) -> bool {
        match self {
            OperationTable::Two(table) => table.first.getxattr.is_some(),
            OperationTable::Three(table) => table.getxattr.is_some(),
        }
    }

    pub(crate) fn getattr(&self, path: PathArg<'_>, info: Option<&mut OpenInfo>) -> Result<stat> {
        let mut attr = MaybeUninit::<stat>::zeroed();
        let (path, to) = (pointer(path), attr.as_mut_ptr());
        match self {
            OperationTable::Three(table) => {
                self.with_info(info, |info| call!(table.getattr, path, to, info))
            }
            OperationTable::Two(table) => match (info, table.first.fgetattr) {
                (Some(info), get @ Some(_)) => {
                    self.with_info(Some(info), |info| call!(get, path, to, info))
                }
                _ if path.is_null() => Err(Errno::ESTALE),
                _ => call!(table.first.getattr, path, to),
            },
        }?;
        // SAFETY: all bytes were zero, which is a valid structure of numbers, and the program has
        // written numbers.
        Ok(unsafe { attr.assume_init() })
    }

    pub(crate) fn readlink(&self, path: &CStr) -> Result<Vec<u8>> {
        let mut text = vec![0_u8; libc::PATH_MAX as usize + 1];
        let (to, len) = (text.as_mut_ptr().cast::<c_char>(), text.len());
        match self {
            OperationTable::Three(table) => call!(table.readlink, path.as_ptr(), to, len),
            OperationTable::Two(table) => call!(table.first.readlink, path.as_ptr(), to, len),
        }?;
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len() - 1);
        text.truncate(end);
        Ok(text)
    }

    pub(crate) fn mknod(&self, path: &CStr, mode: u32, rdev: u64) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.mknod, path.as_ptr(), mode, rdev),
            OperationTable::Two(table) => call!(table.first.mknod, path.as_ptr(), mode, rdev),
        }
        .map(drop)
    }

    pub(crate) fn mkdir(&self, path: &CStr, mode: u32) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.mkdir, path.as_ptr(), mode),
            OperationTable::Two(table) => call!(table.first.mkdir, path.as_ptr(), mode),
        }
        .map(drop)
    }

    pub(crate) fn unlink(&self, path: &CStr) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.unlink, path.as_ptr()),
            OperationTable::Two(table) => call!(table.first.unlink, path.as_ptr()),
        }
        .map(drop)
    }

    pub(crate) fn rmdir(&self, path: &CStr) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.rmdir, path.as_ptr()),
            OperationTable::Two(table) => call!(table.first.rmdir, path.as_ptr()),
        }
        .map(drop)
    }

    pub(crate) fn symlink(&self, text: &CStr, path: &CStr) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.symlink, text.as_ptr(), path.as_ptr()),
            OperationTable::Two(table) => call!(table.first.symlink, text.as_ptr(), path.as_ptr()),
        }
        .map(drop)
    }

    pub(crate) fn rename(&self, from: &CStr, to: &CStr, flags: u32) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.rename, from.as_ptr(), to.as_ptr(), flags),
            OperationTable::Two(_) if flags != 0 => Err(Errno::EINVAL),
            OperationTable::Two(table) => call!(table.first.rename, from.as_ptr(), to.as_ptr()),
        }
        .map(drop)
    }

    pub(crate) fn link(&self, old: &CStr, new: &CStr) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.link, old.as_ptr(), new.as_ptr()),
            OperationTable::Two(table) => call!(table.first.link, old.as_ptr(), new.as_ptr()),
        }
        .map(drop)
    }

    pub(crate) fn chmod(
        &self,
        path: PathArg<'_>,
        mode: u32,
        info: Option<&mut OpenInfo>,
    ) -> Result<()> {
        let path = pointer(path);
        match self {
            OperationTable::Three(table) => {
                self.with_info(info, |info| call!(table.chmod, path, mode, info))
            }
            OperationTable::Two(_) if path.is_null() => Err(Errno::ESTALE),
            OperationTable::Two(table) => call!(table.first.chmod, path, mode),
        }
        .map(drop)
    }

    pub(crate) fn chown(
        &self,
        path: PathArg<'_>,
        (uid, gid): (u32, u32),
        info: Option<&mut OpenInfo>,
    ) -> Result<()> {
        let path = pointer(path);
        match self {
            OperationTable::Three(table) => {
                self.with_info(info, |info| call!(table.chown, path, uid, gid, info))
            }
            OperationTable::Two(_) if path.is_null() => Err(Errno::ESTALE),
            OperationTable::Two(table) => call!(table.first.chown, path, uid, gid),
        }
        .map(drop)
    }

    pub(crate) fn truncate(
        &self,
        path: PathArg<'_>,
        size: i64,
        info: Option<&mut OpenInfo>,
    ) -> Result<()> {
        let path = pointer(path);
        match self {
            OperationTable::Three(table) => {
                self.with_info(info, |info| call!(table.truncate, path, size, info))
            }
            OperationTable::Two(table) => match (info, table.first.ftruncate) {
                (Some(info), set @ Some(_)) => {
                    self.with_info(Some(info), |info| call!(set, path, size, info))
                }
                _ if path.is_null() => Err(Errno::ESTALE),
                _ => call!(table.first.truncate, path, size),
            },
        }
        .map(drop)
    }

    /// True if `utimens` understands `UTIME_NOW` and `UTIME_OMIT`.
    pub(crate) fn sets_single_times(&self) -> bool {
        match self {
            OperationTable::Three(_) => true,
            OperationTable::Two(table) => {
                table.bits & UTIME_OMIT_OK != 0 && table.first.utimens.is_some()
            }
        }
    }

    pub(crate) fn utimens(
        &self,
        path: PathArg<'_>,
        times: &[timespec; 2],
        info: Option<&mut OpenInfo>,
    ) -> Result<()> {
        let (path, times_at) = (pointer(path), times.as_ptr());
        match self {
            OperationTable::Three(table) => {
                self.with_info(info, |info| call!(table.utimens, path, times_at, info))
            }
            OperationTable::Two(_) if path.is_null() => Err(Errno::ESTALE),
            OperationTable::Two(table) => match table.first.utimens {
                set @ Some(_) => call!(set, path, times_at),
                None => {
                    let [atime, mtime] = times;
                    let mut seconds = libc::utimbuf { actime: atime.tv_sec, modtime: mtime.tv_sec };
                    call!(table.first.utime, path, &mut seconds)
                }
            },
        }
        .map(drop)
    }

    /// Opens a file; a program without `open` keeps no state of open files.
    pub(crate) fn open(&self, path: &CStr, info: &mut OpenInfo) -> Result<()> {
        let opened = self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.open, path.as_ptr(), info),
            OperationTable::Two(table) => call!(table.first.open, path.as_ptr(), info),
        });
        ignore_missing(opened)
    }

    pub(crate) fn create(&self, path: &CStr, mode: u32, info: &mut OpenInfo) -> Result<()> {
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.create, path.as_ptr(), mode, info),
            OperationTable::Two(table) => call!(table.first.create, path.as_ptr(), mode, info),
        })
        .map(drop)
    }

    pub(crate) fn opendir(&self, path: &CStr, info: &mut OpenInfo) -> Result<()> {
        let opened = self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.opendir, path.as_ptr(), info),
            OperationTable::Two(table) => call!(table.first.opendir, path.as_ptr(), info),
        });
        ignore_missing(opened)
    }

    pub(crate) fn release(&self, path: PathArg<'_>, info: &mut OpenInfo) -> Result<()> {
        let path = pointer(path);
        let released = self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.release, path, info),
            OperationTable::Two(table) => call!(table.first.release, path, info),
        });
        ignore_missing(released)
    }

    pub(crate) fn releasedir(&self, path: PathArg<'_>, info: &mut OpenInfo) -> Result<()> {
        let path = pointer(path);
        let released = self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.releasedir, path, info),
            OperationTable::Two(table) => call!(table.first.releasedir, path, info),
        });
        ignore_missing(released)
    }

    pub(crate) fn flush(&self, path: PathArg<'_>, info: &mut OpenInfo) -> Result<()> {
        let path = pointer(path);
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.flush, path, info),
            OperationTable::Two(table) => call!(table.first.flush, path, info),
        })
        .map(drop)
    }

    pub(crate) fn fsync(
        &self,
        path: PathArg<'_>,
        datasync: bool,
        info: &mut OpenInfo,
    ) -> Result<()> {
        let (path, datasync) = (pointer(path), c_int::from(datasync));
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.fsync, path, datasync, info),
            OperationTable::Two(table) => call!(table.first.fsync, path, datasync, info),
        })
        .map(drop)
    }

    pub(crate) fn fsyncdir(
        &self,
        path: PathArg<'_>,
        datasync: bool,
        info: &mut OpenInfo,
    ) -> Result<()> {
        let (path, datasync) = (pointer(path), c_int::from(datasync));
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.fsyncdir, path, datasync, info),
            OperationTable::Two(table) => call!(table.first.fsyncdir, path, datasync, info),
        })
        .map(drop)
    }

    /// Fills `out` from `offset` on.
    pub(crate) fn read(
        &self,
        path: PathArg<'_>,
        offset: i64,
        info: &mut OpenInfo,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let (path, room) = (pointer(path), out.remaining());
        let (read_buf, read) = match self {
            OperationTable::Three(table) => (table.read_buf, table.read),
            OperationTable::Two(table) => (table.last.read_buf, table.first.read),
        };
        if read_buf.is_some() {
            let mut parts: *mut DataParts = null_mut();
            let to = &mut parts as *mut *mut DataParts;
            let result =
                self.with_info(Some(info), |info| call!(read_buf, path, to, room, offset, info));
            // SAFETY: the program has left null or a structure there that it allocated for us, as
            // `read_buf` is documented.
            return unsafe { take_parts(result, parts, out) };
        }
        let mut own = Vec::new();
        let mut read_to = |to: *mut c_char, room: usize| {
            let result =
                self.with_info(Some(info), |info| call!(read, path, to, room, offset, info))?;
            // More than there was room for: the program has written behind the end.
            if result > room as u64 { Err(Errno::EIO) } else { Ok(result as usize) }
        };
        if let Some(lent) = out.lend() {
            let filled = read_to(lent.as_mut_ptr().cast(), lent.len())?;
            return out.advance(filled);
        }
        own.resize(room, 0_u8);
        let filled = read_to(own.as_mut_ptr().cast(), room)?;
        out.put(&own[..filled]).map(drop)
    }

    pub(crate) fn write(
        &self,
        path: PathArg<'_>,
        data: &[u8],
        offset: i64,
        info: &mut OpenInfo,
    ) -> Result<usize> {
        let (path, len) = (pointer(path), data.len());
        let (write_buf, write) = match self {
            OperationTable::Three(table) => (table.write_buf, table.write),
            OperationTable::Two(table) => (table.last.write_buf, table.first.write),
        };
        let written = if write_buf.is_some() {
            let part = DataPart {
                size: len,
                flags: 0,
                mem: data.as_ptr().cast_mut().cast(),
                fd: -1,
                pos: 0,
            };
            let mut parts = DataParts { count: 1, idx: 0, off: 0, buf: [part] };
            self.with_info(Some(info), |info| call!(write_buf, path, &mut parts, offset, info))
        } else {
            let from = data.as_ptr().cast::<c_char>();
            self.with_info(Some(info), |info| call!(write, path, from, len, offset, info))
        }?;
        if written > len as u64 { Err(Errno::EIO) } else { Ok(written as usize) }
    }

    /// True if a directory can be listed.
    pub(crate) fn lists(&self) -> bool {
        match self {
            OperationTable::Three(table) => table.readdir.is_some(),
            OperationTable::Two(table) => {
                table.first.readdir.is_some() || table.first.getdir.is_some()
            }
        }
    }

    /// Returns all entries of a directory.
    pub(crate) fn readdir(
        &self,
        path: PathArg<'_>,
        info: &mut OpenInfo,
    ) -> Result<Vec<ProgramEntry>> {
        let mut listing = ProgramListing::default();
        let (path, to) = (pointer(path), (&mut listing as *mut ProgramListing).cast::<c_void>());
        match self {
            OperationTable::Three(table) => self.with_info(Some(info), |info| {
                call!(table.readdir, path, to, fill_three, 0, info, 0)
            }),
            OperationTable::Two(table) if table.first.readdir.is_some() => self
                .with_info(Some(info), |info| {
                    call!(table.first.readdir, path, to, fill_two, 0, info)
                }),
            OperationTable::Two(_) if path.is_null() => Err(Errno::ESTALE),
            OperationTable::Two(table) => call!(table.first.getdir, path, to, fill_old),
        }?;
        listing.error.map_or(Ok(listing.entries), Err)
    }

    pub(crate) fn statfs(&self, path: &CStr) -> Result<statvfs> {
        if self.is_old() {
            return self.old_statfs(path);
        }
        let mut facts = MaybeUninit::<statvfs>::zeroed();
        let (path, to) = (path.as_ptr(), facts.as_mut_ptr());
        match self {
            OperationTable::Three(table) => call!(table.statfs, path, to),
            OperationTable::Two(table) => call!(table.first.statfs, path, to),
        }?;
        // SAFETY: all bytes were zero, which is a valid structure of numbers, and the program has
        // written numbers.
        Ok(unsafe { facts.assume_init() })
    }

    /// The facts from a program that fills a `struct statfs`.
    fn old_statfs(&self, path: &CStr) -> Result<statvfs> {
        let OperationTable::Two(table) = self else { return Err(Errno::ENOSYS) };
        // SAFETY: types of a function; `oldest` says that the program has given one of the older
        // type.
        type NewerStatFs = unsafe extern "C" fn(PathPtr, *mut statvfs) -> c_int;
        // SAFETY: a type, as above.
        type OldStatFs = unsafe extern "C" fn(PathPtr, *mut libc::statfs) -> c_int;
        let older = |newer: NewerStatFs| {
            // SAFETY: both are pointers to functions, and `oldest` says that this one has the older
            // type.
            unsafe { std::mem::transmute::<NewerStatFs, OldStatFs>(newer) }
        };
        let statfs = table.first.statfs.map(older);
        let mut facts = MaybeUninit::<libc::statfs>::zeroed();
        call!(statfs, path.as_ptr(), facts.as_mut_ptr())?;
        // SAFETY: all bytes were zero, which is a valid structure of numbers, and the program has
        // written numbers; so for the structure that is filled from it.
        let (facts, mut newer) =
            unsafe { (facts.assume_init(), MaybeUninit::<statvfs>::zeroed().assume_init()) };
        newer.f_bsize = facts.f_bsize as u64;
        newer.f_frsize = facts.f_bsize as u64;
        newer.f_blocks = facts.f_blocks;
        newer.f_bfree = facts.f_bfree;
        newer.f_bavail = facts.f_bavail;
        newer.f_files = facts.f_files;
        newer.f_ffree = facts.f_ffree;
        newer.f_namemax = facts.f_namelen as u64;
        Ok(newer)
    }

    pub(crate) fn setxattr(
        &self,
        path: &CStr,
        name: &CStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        let (value, len) = (value.as_ptr().cast::<c_char>(), value.len());
        let (path, name) = (path.as_ptr(), name.as_ptr());
        match self {
            OperationTable::Three(table) => call!(table.setxattr, path, name, value, len, flags),
            OperationTable::Two(table) => {
                call!(table.first.setxattr, path, name, value, len, flags)
            }
        }
        .map(drop)
    }

    /// Returns the value into `room` bytes; without room, its length.
    pub(crate) fn getxattr(&self, path: &CStr, name: &CStr, room: &mut [u8]) -> Result<u64> {
        let (to, len) = place(room);
        let (path, name) = (path.as_ptr(), name.as_ptr());
        match self {
            OperationTable::Three(table) => call!(table.getxattr, path, name, to, len),
            OperationTable::Two(table) => call!(table.first.getxattr, path, name, to, len),
        }
    }

    /// Returns the names into `room` bytes; without room, their length.
    pub(crate) fn listxattr(&self, path: &CStr, room: &mut [u8]) -> Result<u64> {
        let (to, len) = place(room);
        match self {
            OperationTable::Three(table) => call!(table.listxattr, path.as_ptr(), to, len),
            OperationTable::Two(table) => call!(table.first.listxattr, path.as_ptr(), to, len),
        }
    }

    pub(crate) fn removexattr(&self, path: &CStr, name: &CStr) -> Result<()> {
        let (path, name) = (path.as_ptr(), name.as_ptr());
        match self {
            OperationTable::Three(table) => call!(table.removexattr, path, name),
            OperationTable::Two(table) => call!(table.first.removexattr, path, name),
        }
        .map(drop)
    }

    pub(crate) fn access(&self, path: &CStr, mask: i32) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.access, path.as_ptr(), mask),
            OperationTable::Two(table) => call!(table.first.access, path.as_ptr(), mask),
        }
        .map(drop)
    }

    pub(crate) fn lock(
        &self,
        path: PathArg<'_>,
        info: &mut OpenInfo,
        command: i32,
        lock: &mut flock,
    ) -> Result<()> {
        let (path, lock) = (pointer(path), lock as *mut flock);
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.lock, path, info, command, lock),
            OperationTable::Two(table) => call!(table.first.lock, path, info, command, lock),
        })
        .map(drop)
    }

    pub(crate) fn flock(
        &self,
        path: PathArg<'_>,
        info: &mut OpenInfo,
        operation: i32,
    ) -> Result<()> {
        let path = pointer(path);
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.flock, path, info, operation),
            OperationTable::Two(table) => call!(table.last.flock, path, info, operation),
        })
        .map(drop)
    }

    pub(crate) fn bmap(&self, path: &CStr, block_size: usize, index: &mut u64) -> Result<()> {
        match self {
            OperationTable::Three(table) => call!(table.bmap, path.as_ptr(), block_size, index),
            OperationTable::Two(table) => call!(table.first.bmap, path.as_ptr(), block_size, index),
        }
        .map(drop)
    }

    /// Performs an ioctl(2) on `data`, which is input and output.
    pub(crate) fn ioctl(
        &self,
        path: PathArg<'_>,
        (command, arg, flags): (u32, u64, u32),
        info: &mut OpenInfo,
        data: &mut [u8],
    ) -> Result<u64> {
        let path = pointer(path);
        let arg = std::ptr::without_provenance_mut::<c_void>(arg as usize);
        let data = if data.is_empty() { null_mut() } else { data.as_mut_ptr().cast::<c_void>() };
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => {
                call!(table.ioctl, path, command, arg, info, flags, data)
            }
            OperationTable::Two(table) => {
                call!(table.last.ioctl, path, command as c_int, arg, info, flags, data)
            }
        })
    }

    /// Returns the events that are ready. `wake` is a `struct fuse_pollhandle` that the program
    /// destroys, or null.
    pub(crate) fn poll(
        &self,
        path: PathArg<'_>,
        info: &mut OpenInfo,
        wake: *mut c_void,
    ) -> Result<u32> {
        let (path, mut events) = (pointer(path), 0);
        let to = &mut events as *mut u32;
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => call!(table.poll, path, info, wake, to),
            OperationTable::Two(table) => call!(table.last.poll, path, info, wake, to),
        })?;
        Ok(events)
    }

    /// True if the program has poll(2).
    pub(crate) fn polls(&self) -> bool {
        match self {
            OperationTable::Three(table) => table.poll.is_some(),
            OperationTable::Two(table) => table.last.poll.is_some(),
        }
    }

    pub(crate) fn fallocate(
        &self,
        path: PathArg<'_>,
        mode: i32,
        (offset, length): (i64, i64),
        info: &mut OpenInfo,
    ) -> Result<()> {
        let path = pointer(path);
        self.with_info(Some(info), |info| match self {
            OperationTable::Three(table) => {
                call!(table.fallocate, path, mode, offset, length, info)
            }
            OperationTable::Two(table) => {
                call!(table.last.fallocate, path, mode, offset, length, info)
            }
        })
        .map(drop)
    }

    pub(crate) fn lseek(
        &self,
        path: PathArg<'_>,
        offset: i64,
        whence: i32,
        info: &mut OpenInfo,
    ) -> Result<u64> {
        let OperationTable::Three(table) = self else { return Err(Errno::ENOSYS) };
        let path = pointer(path);
        self.with_info(Some(info), |info| call!(table.lseek, path, offset, whence, info))
    }

    pub(crate) fn copy_file_range(
        &self,
        from: (PathArg<'_>, i64, &mut OpenInfo),
        to: (PathArg<'_>, i64, &mut OpenInfo),
        length: usize,
        flags: i32,
    ) -> Result<u64> {
        let OperationTable::Three(table) = self else { return Err(Errno::ENOSYS) };
        let (from_path, to_path) = (pointer(from.0), pointer(to.0));
        self.with_info(Some(from.2), |from_info| {
            self.with_info(Some(to.2), |to_info| {
                let copy = table.copy_file_range;
                call!(copy, from_path, from_info, from.1, to_path, to_info, to.1, length, flags)
            })
        })
    }
}

/// Success for an operation that the program does not have, and does not need.
fn ignore_missing(result: Result<u64>) -> Result<()> {
    match result {
        Err(Errno::ENOSYS) => Ok(()),
        other => other.map(drop),
    }
}

/// The place and the length of `room`; null for none.
fn place(room: &mut [u8]) -> (*mut c_char, usize) {
    let to = if room.is_empty() { null_mut() } else { room.as_mut_ptr().cast() };
    (to, room.len())
}

/// Copies the beginning of a structure.
///
/// # Safety
///
/// `from` has `size` readable bytes, and all bytes are valid for `T`.
pub(crate) unsafe fn copy<T>(from: *const c_void, size: usize, to: &mut T) {
    if !from.is_null() {
        let to = (to as *mut T).cast::<u8>();
        // SAFETY: at most the size of `T` is copied, and the caller promises the rest.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to, size.min(size_of::<T>())) };
    }
}

/// The structure of libfuse 2 about INIT.
pub(crate) fn older(conn: &ConnInfoThree) -> ConnInfoTwo {
    ConnInfoTwo {
        proto_major: conn.proto_major,
        proto_minor: conn.proto_minor,
        async_read: conn.want & crate::abi::caps::ASYNC_READ,
        max_write: conn.max_write,
        max_readahead: conn.max_readahead,
        capable: conn.capable,
        want: conn.want,
        max_background: conn.max_background,
        congestion_threshold: conn.congestion_threshold,
        reserved: [0; 23],
    }
}

/// Takes over what a program of libfuse 2 has changed.
pub(crate) fn take_older(conn: &mut ConnInfoThree, older: &ConnInfoTwo) {
    conn.want = older.want;
    if older.async_read == 0 {
        conn.want &= !crate::abi::caps::ASYNC_READ;
    }
    conn.max_write = older.max_write;
    conn.max_readahead = older.max_readahead;
    conn.max_background = older.max_background;
    conn.congestion_threshold = older.congestion_threshold;
}

/// Appends the data of a `struct fuse_bufvec` that `read_buf` has returned, and frees it: the
/// structure, and the memory of each part, are from malloc(3).
///
/// # Safety
///
/// `parts` is null, or leads to such a structure with its number of parts.
unsafe fn take_parts(
    result: Result<u64>,
    parts: *mut DataParts,
    out: &mut ReadBuf<'_>,
) -> Result<()> {
    if parts.is_null() {
        return result.and(Err(Errno::EIO));
    }
    // SAFETY: the caller says that the structure is there, and its parts follow each other from
    // `buf` on.
    let slice = unsafe {
        let count = (*parts).count.min(PARTS_MOST);
        std::slice::from_raw_parts((&raw const (*parts).buf).cast::<DataPart>(), count)
    };
    let taken = result.and_then(|_| slice.iter().try_for_each(|part| append(part, out)));
    for part in slice.iter().filter(|part| part.flags & BUF_IS_FD == 0) {
        // SAFETY: the memory is the program's gift.
        unsafe { libc::free(part.mem) };
    }
    // SAFETY: the structure is the program's gift, and `slice` is not used any more.
    unsafe { libc::free(parts.cast()) };
    taken
}

fn append(part: &DataPart, out: &mut ReadBuf<'_>) -> Result<()> {
    let len = part.size.min(out.remaining());
    if len == 0 {
        return Ok(());
    }
    if part.flags & BUF_IS_FD == 0 {
        if part.mem.is_null() {
            return Err(Errno::EIO);
        }
        // SAFETY: a part that is not a file has `size` bytes of memory.
        let bytes = unsafe { std::slice::from_raw_parts(part.mem.cast::<u8>(), len) };
        return out.put(bytes).map(drop);
    }
    if part.fd < 0 {
        return Err(Errno::EBADF);
    }
    // SAFETY: the program has this file open until its `release`, which no thread calls before this
    // operation has ended.
    let fd = unsafe { BorrowedFd::borrow_raw(part.fd) };
    if part.flags & BUF_FD_SEEK != 0 {
        let offset = u64::try_from(part.pos).map_err(|_| Errno::EIO)?;
        return out.with_limit(len, |out| out.fill_from(fd, offset)).map(drop);
    }
    let mut bytes = vec![0; len];
    let got = rustix::io::read(fd, &mut bytes[..])
        .map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
    out.put(&bytes[..got]).map(drop)
}

/// An entry that a program has listed.
pub(crate) struct ProgramEntry {
    pub(crate) name: Vec<u8>,
    /// `None` if the program has not said.
    pub(crate) kind: Option<FileKind>,
    pub(crate) st_ino: u64,
}

/// The entries that a program has listed so far.
#[derive(Default)]
struct ProgramListing {
    entries: Vec<ProgramEntry>,
    error: Option<Errno>,
}

impl ProgramListing {
    /// Adds an entry. Returns 1 if there is no room, as a filler of libfuse does.
    fn add(&mut self, name: &CStr, mode: u32, st_ino: u64) -> c_int {
        if self.entries.len() >= ENTRIES_MOST {
            self.error = Some(Errno::ENOMEM);
            return 1;
        }
        let kind = FileKind::from_mode(mode);
        self.entries.push(ProgramEntry { name: name.to_bytes().to_vec(), kind, st_ino });
        0
    }
}

/// # Safety
///
/// `to` is the pointer to a [`ProgramListing`] of the call of `readdir` in which the program calls
/// this, `name` is a string, and `attr` is null or a structure.
unsafe fn fill(to: *mut c_void, name: PathPtr, attr: *const stat) -> c_int {
    if to.is_null() || name.is_null() {
        return 1;
    }
    // SAFETY: the caller's promise.
    let (listing, name) = unsafe { (&mut *to.cast::<ProgramListing>(), CStr::from_ptr(name)) };
    // SAFETY: null, or a structure.
    let (mode, st_ino) =
        unsafe { attr.as_ref() }.map_or((0, 0), |attr| (attr.st_mode, attr.st_ino));
    listing.add(name, mode, st_ino)
}

/// The function that `readdir` of the program calls for each entry.
// SAFETY: needs a string as the name, and the pointer that `readdir` got.
unsafe extern "C" fn fill_three(
    to: *mut c_void,
    name: PathPtr,
    attr: *const stat,
    _offset: i64,
    _flags: c_int,
) -> c_int {
    // SAFETY: the program passes what it got, as `fuse_fill_dir_t` is documented.
    unsafe { fill(to, name, attr) }
}

/// The function that `readdir` of the program calls for each entry.
// SAFETY: needs a string as the name, and the pointer that `readdir` got.
unsafe extern "C" fn fill_two(
    to: *mut c_void,
    name: PathPtr,
    attr: *const stat,
    _offset: i64,
) -> c_int {
    // SAFETY: the program passes what it got, as `fuse_fill_dir_t` is documented.
    unsafe { fill(to, name, attr) }
}

/// The function that `readdir` of the program calls for each entry.
// SAFETY: needs a string as the name, and the pointer that `readdir` got.
unsafe extern "C" fn fill_old(to: *mut c_void, name: PathPtr, kind: c_int, ino: u64) -> c_int {
    if to.is_null() || name.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: the program passes what it got, as `fuse_dirfil_t` is documented.
    let (listing, name) = unsafe { (&mut *to.cast::<ProgramListing>(), CStr::from_ptr(name)) };
    listing.add(name, (kind as u32) << 12, ino)
}

/// The path or name as C has it. Fails with `EINVAL` for a NUL in it.
pub(crate) fn text(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_fs::SliceSink;

    // SAFETY: reads nothing.
    unsafe extern "C" fn minus_hundred_thousand(_: PathPtr) -> c_int {
        -100_000
    }

    // SAFETY: reads nothing.
    unsafe extern "C" fn reads_too_much(
        _: PathPtr,
        _: *mut c_char,
        room: usize,
        _: i64,
        _: InfoPtr,
    ) -> c_int {
        room as c_int + 1
    }

    #[test]
    fn a_result_that_is_no_result_is_an_input_output_error() {
        let operations = OperationsThree {
            unlink: Some(minus_hundred_thousand),
            read: Some(reads_too_much),
            ..OperationsThree::default()
        };
        let table = OperationTable::Three(Box::new(operations));
        assert_eq!(table.unlink(c"/x"), Err(Errno::EIO));
        assert_eq!(table.rmdir(c"/x"), Err(Errno::ENOSYS));
        let mut room = [0; 16];
        let mut sink = SliceSink::new(&mut room);
        let read = table.read(None, 0, &mut OpenInfo::default(), &mut ReadBuf::new(&mut sink, 16));
        assert_eq!(read, Err(Errno::EIO));
    }

    #[test]
    fn operations_behind_the_size_of_an_older_program_are_missing() {
        let operations = OperationsThree {
            unlink: Some(minus_hundred_thousand),
            read: Some(reads_too_much),
            ..OperationsThree::default()
        };
        let size = std::mem::offset_of!(OperationsThree, read);
        let from = (&raw const operations).cast();
        // SAFETY: the structure is longer than `size`.
        let OperationTable::Three(table) = (unsafe { OperationTable::three(from, size) }) else {
            panic!("another version");
        };
        assert!(table.unlink.is_some() && table.read.is_none());
    }

    #[test]
    fn bits_of_open_files_are_those_of_both_versions() {
        let all = OpenInfo { flags: 2, bits: 0x3f, fh: 7, lock_owner: 8, events: 0 };
        let RawInfo::Two(raw) = RawInfo::new(ApiVersion::Two, &all) else {
            panic!("another version")
        };
        assert_eq!((raw.writepage, raw.bits, raw.fh, raw.fh_old), (1, 0x1f, 7, 7));
        assert_eq!(RawInfo::new(ApiVersion::Three, &all).read(), all);
    }
}
