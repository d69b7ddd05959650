//! Flag words, in the kernel's names.

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $ty = $value;)*

        /// Name and value of every flag, for the comparison with the C header.
        #[cfg(test)]
        pub(super) const CONSTANTS: &[(&str, u64)] = &[$((stringify!($name), $name as u64),)*];
    };
}

constants! {
    // INIT, as one 64-bit word: bits 32 and up travel in `flags2`.

    /// Reads of one file may be sent concurrently.
    FUSE_ASYNC_READ: u64 = 1 << 0;
    /// The server handles POSIX locks.
    FUSE_POSIX_LOCKS: u64 = 1 << 1;
    /// Unused by the kernel.
    FUSE_FILE_OPS: u64 = 1 << 2;
    /// OPEN handles O_TRUNC.
    FUSE_ATOMIC_O_TRUNC: u64 = 1 << 3;
    /// LOOKUP handles `.` and `..`.
    FUSE_EXPORT_SUPPORT: u64 = 1 << 4;
    /// WRITE may be larger than 4 KiB.
    FUSE_BIG_WRITES: u64 = 1 << 5;
    /// The server applies the umask.
    FUSE_DONT_MASK: u64 = 1 << 6;
    /// The device can be written with splice.
    FUSE_SPLICE_WRITE: u64 = 1 << 7;
    /// The device can take pages by moving them.
    FUSE_SPLICE_MOVE: u64 = 1 << 8;
    /// The device can be read with splice.
    FUSE_SPLICE_READ: u64 = 1 << 9;
    /// The server handles BSD locks.
    FUSE_FLOCK_LOCKS: u64 = 1 << 10;
    /// Directories have ioctls.
    FUSE_HAS_IOCTL_DIR: u64 = 1 << 11;
    /// A changed mtime or size drops cached data.
    FUSE_AUTO_INVAL_DATA: u64 = 1 << 12;
    /// READDIRPLUS is available.
    FUSE_DO_READDIRPLUS: u64 = 1 << 13;
    /// READDIRPLUS only if it is likely to be useful.
    FUSE_READDIRPLUS_AUTO: u64 = 1 << 14;
    /// Direct I/O may be submitted asynchronously.
    FUSE_ASYNC_DIO: u64 = 1 << 15;
    /// Buffered writes are written back later.
    FUSE_WRITEBACK_CACHE: u64 = 1 << 16;
    /// The server may refuse OPEN with ENOSYS permanently.
    FUSE_NO_OPEN_SUPPORT: u64 = 1 << 17;
    /// LOOKUP and READDIR of one directory may run concurrently.
    FUSE_PARALLEL_DIROPS: u64 = 1 << 18;
    /// The server clears suid, sgid and capabilities (first version).
    FUSE_HANDLE_KILLPRIV: u64 = 1 << 19;
    /// POSIX ACLs.
    FUSE_POSIX_ACL: u64 = 1 << 20;
    /// Reading the device after an abort fails with ECONNABORTED.
    FUSE_ABORT_ERROR: u64 = 1 << 21;
    /// `init_out.max_pages` is valid.
    FUSE_MAX_PAGES: u64 = 1 << 22;
    /// READLINK replies may be cached.
    FUSE_CACHE_SYMLINKS: u64 = 1 << 23;
    /// The server may refuse OPENDIR with ENOSYS permanently.
    FUSE_NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    /// Cached data is dropped only on request.
    FUSE_EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    /// `init_out.map_alignment` is valid.
    FUSE_MAP_ALIGNMENT: u64 = 1 << 26;
    /// Directories may be automatic mount points.
    FUSE_SUBMOUNTS: u64 = 1 << 27;
    /// The server clears suid, sgid and capabilities as the VFS would, so the kernel need not
    /// request `security.capability` before each write.
    FUSE_HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// SETXATTR has its extended structure.
    FUSE_SETXATTR_EXT: u64 = 1 << 29;
    /// INIT has its extended structure, with `flags2`.
    FUSE_INIT_EXT: u64 = 1 << 30;
    /// Reserved.
    FUSE_INIT_RESERVED: u64 = 1 << 31;
    /// Creations carry security contexts.
    FUSE_SECURITY_CTX: u64 = 1 << 32;
    /// DAX per inode.
    FUSE_HAS_INODE_DAX: u64 = 1 << 33;
    /// Creations carry a matching supplementary group.
    FUSE_CREATE_SUPP_GROUP: u64 = 1 << 34;
    /// INVAL_ENTRY supports [`FUSE_EXPIRE_ONLY`].
    FUSE_HAS_EXPIRE_ONLY: u64 = 1 << 35;
    /// Shared mmap of files opened with [`FOPEN_DIRECT_IO`].
    FUSE_DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    /// Backing files ([`FOPEN_PASSTHROUGH`]).
    FUSE_PASSTHROUGH: u64 = 1 << 37;
    /// The file system cannot be exported over NFS.
    FUSE_NO_EXPORT_SUPPORT: u64 = 1 << 38;
    /// RESEND is available.
    FUSE_HAS_RESEND: u64 = 1 << 39;
    /// Idmapped mounts.
    FUSE_ALLOW_IDMAP: u64 = 1 << 40;
    /// Requests may travel over io_uring.
    FUSE_OVER_IO_URING: u64 = 1 << 41;
    /// `init_out.request_timeout` is valid.
    FUSE_REQUEST_TIMEOUT: u64 = 1 << 42;
    /// Buffers of ring entries may come from a pool of their queue (protocol 7.46, Linux 7.3).
    FUSE_HAS_IO_URING_BUFPOOL: u64 = 1 << 43;
    /// CUSE: ioctls without the kernel's restrictions.
    CUSE_UNRESTRICTED_IOCTL: u32 = 1 << 0;

    // Fields that SETATTR sets (`setattr_in.valid`).

    /// The mode.
    FATTR_MODE: u32 = 1 << 0;
    /// The owner.
    FATTR_UID: u32 = 1 << 1;
    /// The group.
    FATTR_GID: u32 = 1 << 2;
    /// The size.
    FATTR_SIZE: u32 = 1 << 3;
    /// The time of last access.
    FATTR_ATIME: u32 = 1 << 4;
    /// The time of last modification.
    FATTR_MTIME: u32 = 1 << 5;
    /// `fh` is valid.
    FATTR_FH: u32 = 1 << 6;
    /// The time of last access, to now.
    FATTR_ATIME_NOW: u32 = 1 << 7;
    /// The time of last modification, to now.
    FATTR_MTIME_NOW: u32 = 1 << 8;
    /// `lock_owner` is valid.
    FATTR_LOCKOWNER: u32 = 1 << 9;
    /// The time of last change.
    FATTR_CTIME: u32 = 1 << 10;
    /// Clear suid and sgid with it.
    FATTR_KILL_SUIDGID: u32 = 1 << 11;

    // Flags of the replies to OPEN, OPENDIR and CREATE (`open_out.open_flags`).

    /// Bypass the page cache.
    FOPEN_DIRECT_IO: u32 = 1 << 0;
    /// Keep the page cache.
    FOPEN_KEEP_CACHE: u32 = 1 << 1;
    /// No seeking.
    FOPEN_NONSEEKABLE: u32 = 1 << 2;
    /// Directory entries may be cached.
    FOPEN_CACHE_DIR: u32 = 1 << 3;
    /// No file position at all.
    FOPEN_STREAM: u32 = 1 << 4;
    /// No flush on close.
    FOPEN_NOFLUSH: u32 = 1 << 5;
    /// Direct writes to one inode may be concurrent.
    FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    /// `backing_id` is valid.
    FOPEN_PASSTHROUGH: u32 = 1 << 7;

    // Flags of single requests.

    /// OPEN, CREATE: clear suid and sgid.
    FUSE_OPEN_KILL_SUIDGID: u32 = 1 << 0;
    /// GETATTR, STATX: `fh` is valid.
    FUSE_GETATTR_FH: u32 = 1 << 0;
    /// RELEASE: flush first.
    FUSE_RELEASE_FLUSH: u32 = 1 << 0;
    /// RELEASE: drop the BSD lock of `lock_owner`.
    FUSE_RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
    /// SETLK, SETLKW: a BSD lock.
    FUSE_LK_FLOCK: u32 = 1 << 0;
    /// WRITE: from the page cache; `fh` may belong to another open.
    FUSE_WRITE_CACHE: u32 = 1 << 0;
    /// WRITE: `lock_owner` is valid.
    FUSE_WRITE_LOCKOWNER: u32 = 1 << 1;
    /// WRITE: clear suid and sgid.
    FUSE_WRITE_KILL_SUIDGID: u32 = 1 << 2;
    /// READ: `lock_owner` is valid.
    FUSE_READ_LOCKOWNER: u32 = 1 << 1;
    /// FSYNC, FSYNCDIR: data only.
    FUSE_FSYNC_FDATASYNC: u32 = 1 << 0;
    /// IOCTL: a 32-bit caller.
    FUSE_IOCTL_COMPAT: u32 = 1 << 0;
    /// IOCTL: not restricted to well-formed ioctls.
    FUSE_IOCTL_UNRESTRICTED: u32 = 1 << 1;
    /// IOCTL reply: retry with these iovecs.
    FUSE_IOCTL_RETRY: u32 = 1 << 2;
    /// IOCTL: a 32-bit ioctl.
    FUSE_IOCTL_32BIT: u32 = 1 << 3;
    /// IOCTL: on a directory.
    FUSE_IOCTL_DIR: u32 = 1 << 4;
    /// IOCTL: an x32 caller.
    FUSE_IOCTL_COMPAT_X32: u32 = 1 << 5;
    /// POLL: send a POLL notification.
    FUSE_POLL_SCHEDULE_NOTIFY: u32 = 1 << 0;
    /// SETXATTR: clear sgid with the access ACL.
    FUSE_SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
    /// INVAL_ENTRY: let the name expire, do not drop it.
    FUSE_EXPIRE_ONLY: u32 = 1 << 0;
    /// Attributes: an automatic mount point.
    FUSE_ATTR_SUBMOUNT: u32 = 1 << 0;
    /// Attributes: use DAX.
    FUSE_ATTR_DAX: u32 = 1 << 1;
    /// SETUPMAPPING: writable.
    FUSE_SETUPMAPPING_FLAG_WRITE: u64 = 1 << 0;
    /// SETUPMAPPING: readable.
    FUSE_SETUPMAPPING_FLAG_READ: u64 = 1 << 1;
}
