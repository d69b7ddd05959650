//! The structures, in the kernel's order and with the kernel's field names.
//!
//! Field names are the kernel's, except that `type` is `type_`. A trailing flexible array is not
//! part of the structure; the documentation describes the data that follows.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The layout of a structure, for comparison with the C header.
#[cfg(test)]
pub(super) struct StructLayout {
    pub(super) name: &'static str,
    pub(super) size: usize,
    pub(super) fields: &'static [(&'static str, usize)],
}

macro_rules! structs {
    ($($(#[$doc:meta])* $name:ident = $c_name:ident { $($field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[doc = concat!("\n\nKernel: `struct ", stringify!($c_name), "`.")]
            #[allow(missing_docs, reason = "the fields are the kernel's, and documented there")]
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            #[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            pub struct $name {
                $(pub $field: $ty,)*
            }

            impl Default for $name {
                fn default() -> Self {
                    Self::new_zeroed()
                }
            }
        )*

        #[cfg(test)]
        pub(super) const LAYOUTS: &[StructLayout] = &[$(StructLayout {
            name: stringify!($c_name),
            size: size_of::<$name>(),
            fields: &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
        },)*];
    };
}

structs! {
    // Attributes.

    /// Attributes of an inode, in replies.
    Attr = fuse_attr {
        ino: u64,
        size: u64,
        blocks: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        nlink: u32,
        uid: u32,
        gid: u32,
        rdev: u32,
        blksize: u32,
        flags: u32,
    }
    /// A time of [`Statx`].
    SxTime = fuse_sx_time {
        tv_sec: i64,
        tv_nsec: u32,
        __reserved: i32,
    }
    /// Attributes in the form of `statx(2)`.
    Statx = fuse_statx {
        mask: u32,
        blksize: u32,
        attributes: u64,
        nlink: u32,
        uid: u32,
        gid: u32,
        mode: u16,
        __spare0: [u16; 1],
        ino: u64,
        size: u64,
        blocks: u64,
        attributes_mask: u64,
        atime: SxTime,
        btime: SxTime,
        ctime: SxTime,
        mtime: SxTime,
        rdev_major: u32,
        rdev_minor: u32,
        dev_major: u32,
        dev_minor: u32,
        __spare2: [u64; 14],
    }
    /// Sizes of the file system.
    Kstatfs = fuse_kstatfs {
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
        padding: u32,
        spare: [u32; 6],
    }
    /// A lock; `end` is inclusive.
    FileLock = fuse_file_lock {
        start: u64,
        end: u64,
        type_: u32,
        pid: u32,
    }

    // Headers.

    /// The header of every request. `total_extlen` counts units of 8 bytes.
    InHeader = fuse_in_header {
        len: u32,
        opcode: u32,
        unique: u64,
        nodeid: u64,
        uid: u32,
        gid: u32,
        pid: u32,
        total_extlen: u16,
        padding: u16,
    }
    /// The header of every reply and notification.
    OutHeader = fuse_out_header {
        len: u32,
        error: i32,
        unique: u64,
    }
    /// The header of every extension of a creation; `size` includes it.
    ExtHeader = fuse_ext_header {
        size: u32,
        type_: u32,
    }
    /// The header of an extension that consists of security contexts, in the same eight bytes as
    /// `ExtHeader`.
    SecctxHeader = fuse_secctx_header {
        size: u32,
        nr_secctx: u32,
    }
    /// The header of a security context; the name with NUL and `size` bytes follow.
    Secctx = fuse_secctx {
        size: u32,
        padding: u32,
    }
    /// The header of the supplementary groups; `nr_groups` numbers follow.
    SuppGroups = fuse_supp_groups {
        nr_groups: u32,
    }

    // Requests.

    /// FORGET.
    ForgetIn = fuse_forget_in {
        nlookup: u64,
    }
    /// One item of BATCH_FORGET.
    ForgetOne = fuse_forget_one {
        nodeid: u64,
        nlookup: u64,
    }
    /// BATCH_FORGET: `count` times [`ForgetOne`] follow.
    BatchForgetIn = fuse_batch_forget_in {
        count: u32,
        dummy: u32,
    }
    /// GETATTR.
    GetattrIn = fuse_getattr_in {
        getattr_flags: u32,
        dummy: u32,
        fh: u64,
    }
    /// STATX.
    StatxIn = fuse_statx_in {
        getattr_flags: u32,
        reserved: u32,
        fh: u64,
        sx_flags: u32,
        sx_mask: u32,
    }
    /// SETATTR.
    SetattrIn = fuse_setattr_in {
        valid: u32,
        padding: u32,
        fh: u64,
        size: u64,
        lock_owner: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        unused4: u32,
        uid: u32,
        gid: u32,
        unused5: u32,
    }
    /// MKNOD: the name follows.
    MknodIn = fuse_mknod_in {
        mode: u32,
        rdev: u32,
        umask: u32,
        padding: u32,
    }
    /// MKDIR: the name follows.
    MkdirIn = fuse_mkdir_in {
        mode: u32,
        umask: u32,
    }
    /// RENAME: two names follow.
    RenameIn = fuse_rename_in {
        newdir: u64,
    }
    /// RENAME2: two names follow.
    Rename2In = fuse_rename2_in {
        newdir: u64,
        flags: u32,
        padding: u32,
    }
    /// LINK: the new name follows.
    LinkIn = fuse_link_in {
        oldnodeid: u64,
    }
    /// OPEN, OPENDIR.
    OpenIn = fuse_open_in {
        flags: u32,
        open_flags: u32,
    }
    /// CREATE, TMPFILE: the name follows.
    CreateIn = fuse_create_in {
        flags: u32,
        mode: u32,
        umask: u32,
        open_flags: u32,
    }
    /// RELEASE, RELEASEDIR.
    ReleaseIn = fuse_release_in {
        fh: u64,
        flags: u32,
        release_flags: u32,
        lock_owner: u64,
    }
    /// FLUSH.
    FlushIn = fuse_flush_in {
        fh: u64,
        unused: u32,
        padding: u32,
        lock_owner: u64,
    }
    /// READ, READDIR, READDIRPLUS.
    ReadIn = fuse_read_in {
        fh: u64,
        offset: u64,
        size: u32,
        read_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }
    /// WRITE: `size` bytes follow.
    WriteIn = fuse_write_in {
        fh: u64,
        offset: u64,
        size: u32,
        write_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }
    /// FSYNC, FSYNCDIR.
    FsyncIn = fuse_fsync_in {
        fh: u64,
        fsync_flags: u32,
        padding: u32,
    }
    /// SETXATTR: the name and `size` bytes follow. Without SETXATTR_EXT, only the first 8 bytes are
    /// sent.
    SetxattrIn = fuse_setxattr_in {
        size: u32,
        flags: u32,
        setxattr_flags: u32,
        padding: u32,
    }
    /// GETXATTR (the name follows), LISTXATTR.
    GetxattrIn = fuse_getxattr_in {
        size: u32,
        padding: u32,
    }
    /// GETLK, SETLK, SETLKW.
    LkIn = fuse_lk_in {
        fh: u64,
        owner: u64,
        lk: FileLock,
        lk_flags: u32,
        padding: u32,
    }
    /// ACCESS.
    AccessIn = fuse_access_in {
        mask: u32,
        padding: u32,
    }
    /// INIT. Kernels before 7.36 send the first 16 bytes.
    InitIn = fuse_init_in {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
        flags2: u32,
        unused: [u32; 11],
    }
    /// CUSE_INIT.
    CuseInitIn = cuse_init_in {
        major: u32,
        minor: u32,
        unused: u32,
        flags: u32,
    }
    /// INTERRUPT.
    InterruptIn = fuse_interrupt_in {
        unique: u64,
    }
    /// BMAP.
    BmapIn = fuse_bmap_in {
        block: u64,
        blocksize: u32,
        padding: u32,
    }
    /// IOCTL: `in_size` bytes follow.
    IoctlIn = fuse_ioctl_in {
        fh: u64,
        flags: u32,
        cmd: u32,
        arg: u64,
        in_size: u32,
        out_size: u32,
    }
    /// One range of a retried ioctl.
    IoctlIovec = fuse_ioctl_iovec {
        base: u64,
        len: u64,
    }
    /// POLL.
    PollIn = fuse_poll_in {
        fh: u64,
        kh: u64,
        flags: u32,
        events: u32,
    }
    /// FALLOCATE.
    FallocateIn = fuse_fallocate_in {
        fh: u64,
        offset: u64,
        length: u64,
        mode: u32,
        padding: u32,
    }
    /// LSEEK.
    LseekIn = fuse_lseek_in {
        fh: u64,
        offset: u64,
        whence: u32,
        padding: u32,
    }
    /// COPY_FILE_RANGE, COPY_FILE_RANGE_64.
    CopyFileRangeIn = fuse_copy_file_range_in {
        fh_in: u64,
        off_in: u64,
        nodeid_out: u64,
        fh_out: u64,
        off_out: u64,
        len: u64,
        flags: u64,
    }
    /// SETUPMAPPING.
    SetupmappingIn = fuse_setupmapping_in {
        fh: u64,
        foffset: u64,
        len: u64,
        flags: u64,
        moffset: u64,
    }
    /// REMOVEMAPPING: `count` times [`RemovemappingOne`] follow.
    RemovemappingIn = fuse_removemapping_in {
        count: u32,
    }
    /// One item of REMOVEMAPPING.
    RemovemappingOne = fuse_removemapping_one {
        moffset: u64,
        len: u64,
    }
    /// SYNCFS.
    SyncfsIn = fuse_syncfs_in {
        padding: u64,
    }
    /// NOTIFY_REPLY: `size` bytes follow. As large as [`WriteIn`].
    NotifyRetrieveIn = fuse_notify_retrieve_in {
        dummy1: u64,
        offset: u64,
        size: u32,
        dummy2: u32,
        dummy3: u64,
        dummy4: u64,
    }

    // Replies.

    /// LOOKUP, creations, and part of READDIRPLUS. A `nodeid` of 0 means that the name does not
    /// exist, which may be cached.
    EntryOut = fuse_entry_out {
        nodeid: u64,
        generation: u64,
        entry_valid: u64,
        attr_valid: u64,
        entry_valid_nsec: u32,
        attr_valid_nsec: u32,
        attr: Attr,
    }
    /// GETATTR, SETATTR.
    AttrOut = fuse_attr_out {
        attr_valid: u64,
        attr_valid_nsec: u32,
        dummy: u32,
        attr: Attr,
    }
    /// STATX.
    StatxOut = fuse_statx_out {
        attr_valid: u64,
        attr_valid_nsec: u32,
        flags: u32,
        spare: [u64; 2],
        stat: Statx,
    }
    /// OPEN, OPENDIR; after [`EntryOut`] for CREATE and TMPFILE.
    OpenOut = fuse_open_out {
        fh: u64,
        open_flags: u32,
        backing_id: i32,
    }
    /// WRITE, COPY_FILE_RANGE.
    WriteOut = fuse_write_out {
        size: u32,
        padding: u32,
    }
    /// STATFS.
    StatfsOut = fuse_statfs_out {
        st: Kstatfs,
    }
    /// GETXATTR and LISTXATTR with a size of 0.
    GetxattrOut = fuse_getxattr_out {
        size: u32,
        padding: u32,
    }
    /// GETLK.
    LkOut = fuse_lk_out {
        lk: FileLock,
    }
    /// INIT.
    InitOut = fuse_init_out {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
        max_background: u16,
        congestion_threshold: u16,
        max_write: u32,
        time_gran: u32,
        max_pages: u16,
        map_alignment: u16,
        flags2: u32,
        max_stack_depth: u32,
        request_timeout: u16,
        unused: [u16; 11],
    }
    /// CUSE_INIT.
    CuseInitOut = cuse_init_out {
        major: u32,
        minor: u32,
        unused: u32,
        flags: u32,
        max_read: u32,
        max_write: u32,
        dev_major: u32,
        dev_minor: u32,
        spare: [u32; 10],
    }
    /// BMAP.
    BmapOut = fuse_bmap_out {
        block: u64,
    }
    /// IOCTL; data or iovecs follow.
    IoctlOut = fuse_ioctl_out {
        result: i32,
        flags: u32,
        in_iovs: u32,
        out_iovs: u32,
    }
    /// POLL.
    PollOut = fuse_poll_out {
        revents: u32,
        padding: u32,
    }
    /// LSEEK.
    LseekOut = fuse_lseek_out {
        offset: u64,
    }
    /// COPY_FILE_RANGE_64.
    CopyFileRangeOut = fuse_copy_file_range_out {
        bytes_copied: u64,
    }
    /// The header of a directory entry; the name follows, padded to 8 bytes.
    Dirent = fuse_dirent {
        ino: u64,
        off: u64,
        namelen: u32,
        type_: u32,
    }
    /// The header of a directory entry of READDIRPLUS.
    Direntplus = fuse_direntplus {
        entry_out: EntryOut,
        dirent: Dirent,
    }

    // Notifications.

    /// POLL.
    NotifyPollWakeupOut = fuse_notify_poll_wakeup_out {
        kh: u64,
    }
    /// INVAL_INODE. A negative `off` drops attributes only; a `len` of 0 or
    /// less reaches to the end.
    NotifyInvalInodeOut = fuse_notify_inval_inode_out {
        ino: u64,
        off: i64,
        len: i64,
    }
    /// INVAL_ENTRY: the name with NUL follows.
    NotifyInvalEntryOut = fuse_notify_inval_entry_out {
        parent: u64,
        namelen: u32,
        flags: u32,
    }
    /// DELETE: the name with NUL follows.
    NotifyDeleteOut = fuse_notify_delete_out {
        parent: u64,
        child: u64,
        namelen: u32,
        padding: u32,
    }
    /// STORE: `size` bytes follow.
    NotifyStoreOut = fuse_notify_store_out {
        nodeid: u64,
        offset: u64,
        size: u32,
        padding: u32,
    }
    /// RETRIEVE: answered by NOTIFY_REPLY.
    NotifyRetrieveOut = fuse_notify_retrieve_out {
        notify_unique: u64,
        nodeid: u64,
        offset: u64,
        size: u32,
        padding: u32,
    }
    /// PRUNE: `count` node ids follow.
    NotifyPruneOut = fuse_notify_prune_out {
        count: u32,
        padding: u32,
        spare: u64,
    }

    // Device ioctls and io_uring.

    /// Argument of BACKING_OPEN.
    BackingMap = fuse_backing_map {
        fd: i32,
        flags: u32,
        padding: u64,
    }
    /// The control data of a ring entry.
    UringEntInOut = fuse_uring_ent_in_out {
        flags: u64,
        commit_id: u64,
        payload_sz: u32,
        padding: u32,
        reserved: u64,
    }
    /// The header buffer of a ring entry.
    UringReqHeader = fuse_uring_req_header {
        in_out: [u8; 128],
        op_in: [u8; 128],
        ring_ent_in_out: UringEntInOut,
    }
    /// In the command area of a 128-byte SQE.
    UringCmdReq = fuse_uring_cmd_req {
        flags: u64,
        commit_id: u64,
        qid: u16,
        padding: [u8; 6],
    }
}
