//! Options of a served directory.

use std::path::PathBuf;
use std::time::Duration;

use defuse_fs::CacheMode;
use defuse_fs::native::NativeOpener;
use defuse_fs::posix::AccessTimeRule;
use defuse_fs::source::{GrantedEffects, LockPlace};

/// Use of file handles to find inodes again, open_by_handle_at(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileHandles {
    /// If the process may (`CAP_DAC_READ_SEARCH`) and the file system can.
    #[default]
    Auto,
    /// Always. [`Passthrough::new`](crate::Passthrough::new) fails if it is not possible.
    On,
    /// Never. Inodes are found again by name, and checked by mount, number and birth time. Without
    /// birth times, each inode needs an `O_PATH` descriptor, up to `RLIMIT_NOFILE`.
    Off,
}

/// The kind of threads that operations run on, which decides whether changed credentials may stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CredentialsPolicy {
    /// Threads that only serve requests (a kernel mount). File-system user, group, umask,
    /// supplementary groups and `CAP_FSETID` stay after an operation, and are changed only if the
    /// next one needs others.
    #[default]
    Sticky,
    /// Threads of an application (in-process frontends). All credentials are restored before an
    /// operation returns. The umask of the process is not changed and applies in addition to
    /// [`NewNode::umask`](defuse_fs::NewNode::umask); below a default ACL neither applies.
    Restore,
    /// Threads of the callers, which have their credentials and their umask already. Nothing is
    /// changed, and open files are [native](defuse_fs::native).
    Callers(NativeOpener),
}

/// The settings of a [`Passthrough`](crate::Passthrough).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassthroughOptions {
    /// Validity time of attributes. Default 1 s.
    pub attr_valid_for: Duration,
    /// Validity time of names. Default 1 s.
    pub entry_valid_for: Duration,
    /// Validity time of the absence of a name. Default 0.
    pub negative_lifetime: Duration,
    /// Use of file handles. Default [`FileHandles::Auto`].
    pub file_handles: FileHandles,
    /// Return [`Opened::backing`](defuse_fs::OpenReply::backing) for regular files. Default true.
    pub backing_files: bool,
    /// Place of locks. Default [`LockPlace::Frontend`].
    pub locks: LockPlace,
    /// Data caching of the frontend. Default [`CacheMode::Cached`], which `exclusive` turns into
    /// [`CacheMode::Keep`].
    pub cache: CacheMode,
    /// Size of the cache of descriptors for inodes with file handles. 0 (the default) means half of
    /// `RLIMIT_NOFILE`, at most 8192.
    pub fd_cache: usize,
    /// The source changes only through this file system. Default false.
    pub exclusive: bool,
    /// Support extended attributes, and with them ACLs and security labels. Default true.
    pub xattrs: bool,
    /// Where the file system is mounted next
    /// ([`Frontend::mountpoint`](defuse_fs::source::FrontendProperties::mountpoint)).
    pub mountpoint: Option<PathBuf>,
    /// Only one user has access
    /// ([`Frontend::single_user`](defuse_fs::source::FrontendProperties::single_user)). Otherwise
    /// ACLs are supported also without `xattrs`: a frontend that checks mode bits alone would admit
    /// users whom an ACL denies. Default false.
    pub single_user: bool,
    /// The frontend delays writes (kernel write-back cache). Files opened for writing are opened
    /// for reading, too, because the frontend must read partly written pages, and `O_APPEND` is
    /// left to the frontend. Default false.
    pub writeback: bool,
    /// The rule by which reading updates access times on the source. For another one than the
    /// default a privileged process serves a clone of the mounts, which does not include file
    /// systems mounted below the source later. By default, the rule of the source's own mount
    /// applies.
    pub access_times: AccessTimeRule,
    /// Request a flush at every close(2), even if there is nothing to flush. Default false.
    pub flushes: bool,
    /// The kind of threads that operations run on. Default [`CredentialsPolicy::Sticky`].
    pub credentials: CredentialsPolicy,
    /// Lowest number for descriptors that outlive an operation, if any is free: an in-process
    /// frontend reserves the lower ones for its program. With 0 (the default) the kernel chooses
    /// the numbers. Otherwise the limit on descriptors is left unchanged.
    pub descriptors_from: u32,
    /// The effects that the frontend grants to files. Default: none.
    pub granted: GrantedEffects,
}

impl Default for PassthroughOptions {
    fn default() -> Self {
        PassthroughOptions {
            attr_valid_for: Duration::from_secs(1),
            entry_valid_for: Duration::from_secs(1),
            negative_lifetime: Duration::ZERO,
            file_handles: FileHandles::Auto,
            backing_files: true,
            locks: LockPlace::Frontend,
            cache: CacheMode::Cached,
            fd_cache: 0,
            exclusive: false,
            xattrs: true,
            single_user: false,
            writeback: false,
            access_times: AccessTimeRule::Relative,
            flushes: false,
            credentials: CredentialsPolicy::Sticky,
            descriptors_from: 0,
            granted: GrantedEffects::default(),
            mountpoint: None,
        }
    }
}

impl PassthroughOptions {
    /// The options that match the Stackfs of "To FUSE or Not to FUSE" (FAST '17), to compare with
    /// its numbers.
    ///
    /// It had no extended attributes: its `getxattr` returned `ENOSYS`, after which the kernel
    /// sends no more of them, and it was mounted for one user. It had no backing files, because
    /// kernel passthrough did not exist. It had no file handles and kept a path for each inode;
    /// here it is a cached descriptor, and names if that is evicted. It receives a flush at every
    /// close (Linux 5.16 can avoid that). Names and attributes are valid for 1 s. Its other
    /// settings (big writes, splice, threads) belong to the frontend.
    pub fn stackfs() -> Self {
        PassthroughOptions {
            file_handles: FileHandles::Off,
            backing_files: false,
            xattrs: false,
            single_user: true,
            flushes: true,
            ..PassthroughOptions::default()
        }
    }

    /// True if access lists are supported.
    pub(crate) fn has_acls(&self) -> bool {
        self.xattrs || !self.single_user
    }
}
