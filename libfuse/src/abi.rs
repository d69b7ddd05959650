//! The structures that a program and libfuse share, with the layouts of libfuse 2.9 and 3.14 on
//! 64-bit Linux.

use std::ffi::{c_char, c_double, c_int, c_uint, c_ulong, c_void};

use libc::{
    dev_t, flock, gid_t, mode_t, off_t, pid_t, size_t, ssize_t, stat, statvfs, timespec, uid_t,
    utimbuf,
};

/// A path or a name.
pub type PathPtr = *const c_char;
/// A `struct fuse_file_info`, [`FileInfoTwo`] or [`FileInfoThree`].
pub type InfoPtr = *mut c_void;

/// `struct fuse_file_info` of libfuse 3.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FileInfoThree {
    /// Flags of open(2).
    pub flags: c_int,
    /// The bits of [`info_bits`], in the order of the structure.
    pub bits: c_uint,
    /// Unused.
    pub padding: c_uint,
    /// The program's handle.
    pub fh: u64,
    /// Owner of locks.
    pub lock_owner: u64,
    /// Events that a poller waits for.
    pub poll_events: u32,
}

/// `struct fuse_file_info` of libfuse 2.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FileInfoTwo {
    /// Flags of open(2).
    pub flags: c_int,
    /// The handle of old programs.
    pub fh_old: c_ulong,
    /// The write comes from the page cache.
    pub writepage: c_int,
    /// The bits of [`info_bits`] without the first one, shifted by one.
    pub bits: c_uint,
    /// The program's handle.
    pub fh: u64,
    /// Owner of locks.
    pub lock_owner: u64,
}

/// Bits of [`FileInfoThree::bits`].
pub mod info_bits {
    /// The write comes from the page cache.
    pub const WRITEPAGE: u32 = 1;
    /// The page cache is bypassed.
    pub const DIRECT_IO: u32 = 1 << 1;
    /// The page cache is kept at open.
    pub const KEEP_CACHE: u32 = 1 << 2;
    /// The release is one of a descriptor that was flushed.
    pub const FLUSH: u32 = 1 << 3;
    /// The file has no positions.
    pub const NONSEEKABLE: u32 = 1 << 4;
    /// The release drops locks of flock(2).
    pub const FLOCK_RELEASE: u32 = 1 << 5;
    /// The listing may be cached.
    pub const CACHE_READDIR: u32 = 1 << 6;
    /// No flush at close.
    pub const NOFLUSH: u32 = 1 << 7;
    /// Direct writes of one file at the same time.
    pub const PARALLEL_WRITES: u32 = 1 << 8;
}

/// `struct fuse_context`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FuseContext {
    /// The `struct fuse`.
    pub fuse: *mut c_void,
    /// User of the caller.
    pub uid: uid_t,
    /// Group of the caller.
    pub gid: gid_t,
    /// Thread of the caller.
    pub pid: pid_t,
    /// The pointer that the program's `init` returned.
    pub private_data: *mut c_void,
    /// The umask of the caller.
    pub umask: mode_t,
}

/// `struct fuse_conn_info` of libfuse 3.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the fields have the names of INIT's")]
pub struct ConnInfoThree {
    pub proto_major: c_uint,
    pub proto_minor: c_uint,
    pub max_write: c_uint,
    pub max_read: c_uint,
    pub max_readahead: c_uint,
    pub capable: c_uint,
    pub want: c_uint,
    pub max_background: c_uint,
    pub congestion_threshold: c_uint,
    pub time_gran: c_uint,
    pub reserved: [c_uint; 22],
}

/// `struct fuse_conn_info` of libfuse 2.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the fields have the names of INIT's")]
pub struct ConnInfoTwo {
    pub proto_major: c_uint,
    pub proto_minor: c_uint,
    pub async_read: c_uint,
    pub max_write: c_uint,
    pub max_readahead: c_uint,
    pub capable: c_uint,
    pub want: c_uint,
    pub max_background: c_uint,
    pub congestion_threshold: c_uint,
    pub reserved: [c_uint; 23],
}

/// `struct fuse_config` of libfuse 3.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields have the names of the options")]
pub struct FuseConfig {
    pub set_gid: c_int,
    pub gid: c_uint,
    pub set_uid: c_int,
    pub uid: c_uint,
    pub set_mode: c_int,
    pub umask: c_uint,
    pub entry_timeout: c_double,
    pub negative_timeout: c_double,
    pub attr_timeout: c_double,
    pub intr: c_int,
    pub intr_signal: c_int,
    pub remember: c_int,
    pub hard_remove: c_int,
    pub use_ino: c_int,
    pub readdir_ino: c_int,
    pub direct_io: c_int,
    pub kernel_cache: c_int,
    pub auto_cache: c_int,
    pub no_rofd_flush: c_int,
    pub ac_attr_timeout_set: c_int,
    pub ac_attr_timeout: c_double,
    pub nullpath_ok: c_int,
    pub show_help: c_int,
    pub modules: *mut c_char,
    pub debug: c_int,
}

impl Default for FuseConfig {
    /// The settings of libfuse without options.
    fn default() -> Self {
        FuseConfig {
            set_gid: 0,
            gid: 0,
            set_uid: 0,
            uid: 0,
            set_mode: 0,
            umask: 0,
            entry_timeout: 1.0,
            negative_timeout: 0.0,
            attr_timeout: 1.0,
            intr: 0,
            intr_signal: libc::SIGUSR1,
            remember: 0,
            hard_remove: 0,
            use_ino: 0,
            readdir_ino: 0,
            direct_io: 0,
            kernel_cache: 0,
            auto_cache: 0,
            no_rofd_flush: 0,
            ac_attr_timeout_set: 0,
            ac_attr_timeout: 0.0,
            nullpath_ok: 0,
            show_help: 0,
            modules: std::ptr::null_mut(),
            debug: 0,
        }
    }
}

/// Bits of `capable` and `want` (`FUSE_CAP_*`). Up to bit 16 they are those of INIT.
pub mod caps {
    /// Reads of one file at the same time.
    pub const ASYNC_READ: u32 = 1;
    /// Record locks.
    pub const POSIX_LOCKS: u32 = 1 << 1;
    /// `O_TRUNC` comes with the open.
    pub const ATOMIC_O_TRUNC: u32 = 1 << 3;
    /// The umask is applied by the program.
    pub const DONT_MASK: u32 = 1 << 6;
    /// Locks of flock(2).
    pub const FLOCK_LOCKS: u32 = 1 << 10;
    /// ioctl(2) of directories.
    pub const IOCTL_DIR: u32 = 1 << 11;
    /// Cached data is dropped when times change.
    pub const AUTO_INVAL_DATA: u32 = 1 << 12;
    /// Direct I/O in parallel.
    pub const ASYNC_DIO: u32 = 1 << 15;
    /// Writes are kept in the page cache.
    pub const WRITEBACK_CACHE: u32 = 1 << 16;
    /// Operations of one directory at the same time.
    pub const PARALLEL_DIROPS: u32 = 1 << 18;
    /// Access control lists.
    pub const POSIX_ACL: u32 = 1 << 19;
    /// Symbolic links are cached.
    pub const CACHE_SYMLINKS: u32 = 1 << 23;
}

/// `struct fuse_loop_config` before libfuse 3.12.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LoopConfigOld {
    /// A descriptor of the device for each thread.
    pub clone_fd: c_int,
    /// Most threads that wait.
    pub max_idle_threads: c_uint,
}

/// `struct fuse_cmdline_opts`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields have the names of the options")]
pub struct CmdlineOpts {
    pub singlethread: c_int,
    pub foreground: c_int,
    pub debug: c_int,
    pub nodefault_subtype: c_int,
    pub mountpoint: *mut c_char,
    pub show_version: c_int,
    pub show_help: c_int,
    pub clone_fd: c_int,
    pub max_idle_threads: c_uint,
    /// Only with [`fuse_parse_cmdline`](crate::cmdline) of libfuse 3.12.
    pub max_threads: c_uint,
}

/// `struct fuse_args`.
#[repr(C)]
#[derive(Debug)]
pub struct FuseArgs {
    /// The number of arguments.
    pub argc: c_int,
    /// The arguments, with a null pointer behind them.
    pub argv: *mut *mut c_char,
    /// Nonzero if `argv` and its strings are from malloc(3), and belong to the structure.
    pub allocated: c_int,
}

/// `struct fuse_opt`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FuseOpt {
    /// The template; a null pointer ends the list.
    pub templ: *const c_char,
    /// Offset of the variable, or `-1U`.
    pub offset: c_ulong,
    /// The value of the variable, or the key of the processing function.
    pub value: c_int,
}

/// `fuse_opt_proc_t`.
// SAFETY: a type; each call says why it is right.
pub type OptProc = unsafe extern "C" fn(*mut c_void, *const c_char, c_int, *mut FuseArgs) -> c_int;

/// `struct fuse_buf`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DataPart {
    /// Bytes.
    pub size: size_t,
    /// [`BUF_IS_FD`], [`BUF_FD_SEEK`], [`BUF_FD_RETRY`].
    pub flags: c_int,
    /// The memory, unless the part is a file.
    pub mem: *mut c_void,
    /// The file.
    pub fd: c_int,
    /// Its offset, with [`BUF_FD_SEEK`].
    pub pos: off_t,
}

/// The part is a file.
pub const BUF_IS_FD: c_int = 1 << 1;
/// The part begins at an offset of its file.
pub const BUF_FD_SEEK: c_int = 1 << 2;
/// Short transfers are continued.
pub const BUF_FD_RETRY: c_int = 1 << 3;

/// `struct fuse_bufvec`. There are `count` parts.
#[repr(C)]
#[derive(Debug)]
pub struct DataParts {
    /// Number of parts.
    pub count: size_t,
    /// The present part.
    pub idx: size_t,
    /// The offset in it.
    pub off: size_t,
    /// The first part.
    pub buf: [DataPart; 1],
}

/// `fuse_fill_dir_t` of libfuse 2.
// SAFETY: a type; the functions of this type say what they need.
pub type FillDirTwo = unsafe extern "C" fn(*mut c_void, PathPtr, *const stat, off_t) -> c_int;
/// `fuse_fill_dir_t` of libfuse 3.
// SAFETY: a type; the functions of this type say what they need.
pub type FillDirThree =
    unsafe extern "C" fn(*mut c_void, PathPtr, *const stat, off_t, c_int) -> c_int;
/// `fuse_dirfil_t` of libfuse 2.
// SAFETY: a type; the functions of this type say what they need.
pub type FillDirOld = unsafe extern "C" fn(*mut c_void, PathPtr, c_int, libc::ino_t) -> c_int;

macro_rules! operations {
    ($(#[$doc:meta])* $name:ident { $($op:ident($($arg:ty),*) $(-> $ret:ty)?;)* }) => {
        $(#[$doc])*
        // SAFETY: types of functions; `calls.rs` and `low/dispatch.rs` call them.
        #[repr(C)]
        #[derive(Clone, Copy, Default)]
        #[allow(missing_docs, reason = "the fields are the operations")]
        pub struct $name {
            // SAFETY: types of functions; the callers say why each call is right.
            $(pub $op: Option<unsafe extern "C" fn($($arg),*) $(-> $ret)?>,)* }
    };
}

pub(crate) use operations;

operations! {
    /// `struct fuse_operations` of libfuse 3.14.
    OperationsThree {
        getattr(PathPtr, *mut stat, InfoPtr) -> c_int;
        readlink(PathPtr, *mut c_char, size_t) -> c_int;
        mknod(PathPtr, mode_t, dev_t) -> c_int;
        mkdir(PathPtr, mode_t) -> c_int;
        unlink(PathPtr) -> c_int;
        rmdir(PathPtr) -> c_int;
        symlink(PathPtr, PathPtr) -> c_int;
        rename(PathPtr, PathPtr, c_uint) -> c_int;
        link(PathPtr, PathPtr) -> c_int;
        chmod(PathPtr, mode_t, InfoPtr) -> c_int;
        chown(PathPtr, uid_t, gid_t, InfoPtr) -> c_int;
        truncate(PathPtr, off_t, InfoPtr) -> c_int;
        open(PathPtr, InfoPtr) -> c_int;
        read(PathPtr, *mut c_char, size_t, off_t, InfoPtr) -> c_int;
        write(PathPtr, *const c_char, size_t, off_t, InfoPtr) -> c_int;
        statfs(PathPtr, *mut statvfs) -> c_int;
        flush(PathPtr, InfoPtr) -> c_int;
        release(PathPtr, InfoPtr) -> c_int;
        fsync(PathPtr, c_int, InfoPtr) -> c_int;
        setxattr(PathPtr, PathPtr, *const c_char, size_t, c_int) -> c_int;
        getxattr(PathPtr, PathPtr, *mut c_char, size_t) -> c_int;
        listxattr(PathPtr, *mut c_char, size_t) -> c_int;
        removexattr(PathPtr, PathPtr) -> c_int;
        opendir(PathPtr, InfoPtr) -> c_int;
        readdir(PathPtr, *mut c_void, FillDirThree, off_t, InfoPtr, c_int) -> c_int;
        releasedir(PathPtr, InfoPtr) -> c_int;
        fsyncdir(PathPtr, c_int, InfoPtr) -> c_int;
        init(*mut ConnInfoThree, *mut FuseConfig) -> *mut c_void;
        destroy(*mut c_void);
        access(PathPtr, c_int) -> c_int;
        create(PathPtr, mode_t, InfoPtr) -> c_int;
        lock(PathPtr, InfoPtr, c_int, *mut flock) -> c_int;
        utimens(PathPtr, *const timespec, InfoPtr) -> c_int;
        bmap(PathPtr, size_t, *mut u64) -> c_int;
        ioctl(PathPtr, c_uint, *mut c_void, InfoPtr, c_uint, *mut c_void) -> c_int;
        poll(PathPtr, InfoPtr, *mut c_void, *mut c_uint) -> c_int;
        write_buf(PathPtr, *mut DataParts, off_t, InfoPtr) -> c_int;
        read_buf(PathPtr, *mut *mut DataParts, size_t, off_t, InfoPtr) -> c_int;
        flock(PathPtr, InfoPtr, c_int) -> c_int;
        fallocate(PathPtr, c_int, off_t, off_t, InfoPtr) -> c_int;
        copy_file_range(PathPtr, InfoPtr, off_t, PathPtr, InfoPtr, off_t, size_t, c_int) -> ssize_t;
        lseek(PathPtr, off_t, c_int, InfoPtr) -> off_t;
    }
}

/// `struct fuse_operations` of libfuse 2.9.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct OperationsTwo {
    /// The operations before the bits.
    pub first: OperationsTwoFirst,
    /// [`UTIME_OMIT_OK`] and its neighbours.
    pub bits: c_uint,
    /// The operations behind the bits.
    pub last: OperationsTwoLast,
}

/// Not of the structure: the program is older than libfuse 2.5. Its `struct fuse_file_info` ends
/// with [`FileInfoTwo::bits`], its handle is [`FileInfoTwo::fh_old`], and its `statfs` fills a
/// `struct statfs`.
pub const OLD_PROGRAM: u32 = 1 << 31;
/// `utimens` understands `UTIME_NOW` and `UTIME_OMIT`.
pub const UTIME_OMIT_OK: u32 = 1 << 2;

operations! {
    /// The beginning of [`OperationsTwo`].
    OperationsTwoFirst {
        getattr(PathPtr, *mut stat) -> c_int;
        readlink(PathPtr, *mut c_char, size_t) -> c_int;
        getdir(PathPtr, *mut c_void, FillDirOld) -> c_int;
        mknod(PathPtr, mode_t, dev_t) -> c_int;
        mkdir(PathPtr, mode_t) -> c_int;
        unlink(PathPtr) -> c_int;
        rmdir(PathPtr) -> c_int;
        symlink(PathPtr, PathPtr) -> c_int;
        rename(PathPtr, PathPtr) -> c_int;
        link(PathPtr, PathPtr) -> c_int;
        chmod(PathPtr, mode_t) -> c_int;
        chown(PathPtr, uid_t, gid_t) -> c_int;
        truncate(PathPtr, off_t) -> c_int;
        utime(PathPtr, *mut utimbuf) -> c_int;
        open(PathPtr, InfoPtr) -> c_int;
        read(PathPtr, *mut c_char, size_t, off_t, InfoPtr) -> c_int;
        write(PathPtr, *const c_char, size_t, off_t, InfoPtr) -> c_int;
        statfs(PathPtr, *mut statvfs) -> c_int;
        flush(PathPtr, InfoPtr) -> c_int;
        release(PathPtr, InfoPtr) -> c_int;
        fsync(PathPtr, c_int, InfoPtr) -> c_int;
        setxattr(PathPtr, PathPtr, *const c_char, size_t, c_int) -> c_int;
        getxattr(PathPtr, PathPtr, *mut c_char, size_t) -> c_int;
        listxattr(PathPtr, *mut c_char, size_t) -> c_int;
        removexattr(PathPtr, PathPtr) -> c_int;
        opendir(PathPtr, InfoPtr) -> c_int;
        readdir(PathPtr, *mut c_void, FillDirTwo, off_t, InfoPtr) -> c_int;
        releasedir(PathPtr, InfoPtr) -> c_int;
        fsyncdir(PathPtr, c_int, InfoPtr) -> c_int;
        init(*mut ConnInfoTwo) -> *mut c_void;
        destroy(*mut c_void);
        access(PathPtr, c_int) -> c_int;
        create(PathPtr, mode_t, InfoPtr) -> c_int;
        ftruncate(PathPtr, off_t, InfoPtr) -> c_int;
        fgetattr(PathPtr, *mut stat, InfoPtr) -> c_int;
        lock(PathPtr, InfoPtr, c_int, *mut flock) -> c_int;
        utimens(PathPtr, *const timespec) -> c_int;
        bmap(PathPtr, size_t, *mut u64) -> c_int;
    }
}

operations! {
    /// The end of [`OperationsTwo`].
    OperationsTwoLast {
        ioctl(PathPtr, c_int, *mut c_void, InfoPtr, c_uint, *mut c_void) -> c_int;
        poll(PathPtr, InfoPtr, *mut c_void, *mut c_uint) -> c_int;
        write_buf(PathPtr, *mut DataParts, off_t, InfoPtr) -> c_int;
        read_buf(PathPtr, *mut *mut DataParts, size_t, off_t, InfoPtr) -> c_int;
        flock(PathPtr, InfoPtr, c_int) -> c_int;
        fallocate(PathPtr, c_int, off_t, off_t, InfoPtr) -> c_int;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// The sizes and offsets that a C compiler gives the structures of the headers of 2.9.9 and
    /// 3.14.0 on x86-64.
    #[test]
    fn layouts_are_those_of_the_headers() {
        assert_eq!(size_of::<FileInfoThree>(), 40);
        assert_eq!(
            (offset_of!(FileInfoThree, fh), offset_of!(FileInfoThree, lock_owner)),
            (16, 24)
        );
        assert_eq!(offset_of!(FileInfoThree, poll_events), 32);
        assert_eq!(size_of::<FileInfoTwo>(), 40);
        assert_eq!((offset_of!(FileInfoTwo, bits), offset_of!(FileInfoTwo, fh)), (20, 24));
        assert_eq!((size_of::<OperationsThree>(), size_of::<OperationsTwo>()), (336, 360));
        assert_eq!(offset_of!(OperationsThree, lseek), 328);
        assert_eq!((offset_of!(OperationsTwo, bits), offset_of!(OperationsTwo, last)), (304, 312));
        assert_eq!((size_of::<ConnInfoThree>(), size_of::<ConnInfoTwo>()), (128, 128));
        assert_eq!((size_of::<FuseConfig>(), offset_of!(FuseConfig, modules)), (128, 112));
        assert_eq!((size_of::<FuseContext>(), size_of::<CmdlineOpts>()), (40, 48));
        assert_eq!((size_of::<DataPart>(), size_of::<DataParts>()), (40, 64));
        assert_eq!((size_of::<FuseArgs>(), size_of::<FuseOpt>()), (24, 24));
    }
}
