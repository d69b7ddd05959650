//! The properties of a frontend that matter to a file system.

use std::path::PathBuf;

use crate::posix::AccessTimeRule;

/// The properties of the frontend that opens a file system. A backend may derive settings from
/// them.
///
/// The default describes a frontend with threads of its own in one process, such as a kernel mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendProperties {
    /// The threads that call.
    pub threads: CallingThreads,
    /// The place of file locks.
    pub locks: LockPlace,
    /// Other processes open the same source at the same time without notifying each other:
    /// attributes and names must not be cached.
    pub concurrent: bool,
    /// The frontend holds writes back (the kernel's write-back cache).
    pub writeback: bool,
    /// The rule by which reading updates access times.
    pub access_times: AccessTimeRule,
    /// Nothing is changed through the frontend: a source need not be opened for writing. A file
    /// system that changes nothing then sets [`Caps::read_only`](crate::Caps::read_only).
    pub read_only: bool,
    /// The frontend can use [`OpenReply::backing`](crate::OpenReply::backing).
    pub backing_files: bool,
    /// The effects of files that the frontend permits.
    pub granted: GrantedEffects,
    /// Only the user who opens the file system has access through the frontend, or permissions are
    /// not checked at all. Otherwise the access lists of files are consulted, also where a file
    /// system has no other extended attributes.
    pub single_user: bool,
    /// The directory that a mount is about to cover. A file system that serves this directory, too,
    /// shows it as it was, and never enters its own mount.
    pub mountpoint: Option<PathBuf>,
    /// The lowest number for descriptors that outlive an operation. With 0, any number is allowed,
    /// and the file system may raise the limit of descriptors. An in-process frontend reserves the
    /// lower numbers for its program.
    pub descriptors_from: u32,
    /// Maximum number of descriptors that the file system keeps open for inodes; 0: its own choice.
    pub descriptors_kept: usize,
    /// Omit all features that Stackfs of "To FUSE or Not to FUSE" (FAST '17) did not have, for
    /// comparison.
    pub stackfs: bool,
}

impl Default for FrontendProperties {
    fn default() -> Self {
        FrontendProperties {
            threads: CallingThreads::Serving,
            locks: LockPlace::Frontend,
            concurrent: false,
            writeback: false,
            access_times: AccessTimeRule::Relative,
            read_only: false,
            backing_files: true,
            granted: GrantedEffects::default(),
            single_user: false,
            mountpoint: None,
            descriptors_from: 0,
            descriptors_kept: 0,
            stackfs: false,
        }
    }
}

/// The threads that call a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallingThreads {
    /// They only serve requests: an operation may change their credentials.
    #[default]
    Serving,
    /// They belong to an application: an operation must restore everything that it changes.
    Application,
    /// The threads are the callers' own, with the credentials and the umask that the operation
    /// names: the kernel decides by itself what they may do, and nothing is changed. The program
    /// gets the descriptors of open files, which are [`native`](crate::native).
    Callers,
}

/// Place of POSIX and flock locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockPlace {
    /// In the frontend. They apply among all its callers, and cost nothing in the file system.
    #[default]
    Frontend,
    /// In the file system; for a directory in the lower one, so that they also apply to processes
    /// that use the source directly.
    FileSystem,
    /// Locks are in the file system, as with `FileSystem`, in a process that forks: child processes
    /// and the next program share its open files and their locks.
    ///
    /// Open files come with [`OpenReply::lower`](crate::OpenReply::lower), on which the frontend
    /// takes the locks of an open file. A release closes the descriptor and unlocks nothing,
    /// because another process may still have the open file. A conflicting lock is `EAGAIN`, and
    /// the frontend retries. A waiting thread would not exist in a child, which would find the
    /// thread's mutex locked and its descriptors open.
    Inherited,
}

/// Effects that a frontend may grant to files, see
/// [`SourceRestrictions`](crate::SourceRestrictions). A mount below the source that denies one of
/// them is then not served (`EACCES`). The restrictions of the source itself are in
/// [`Caps::denied`](crate::Caps::denied), which the frontend must obey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantedEffects {
    /// Run set-user-id programs.
    pub suid: bool,
    /// Open device files.
    pub dev: bool,
}
