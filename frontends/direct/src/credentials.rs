//! The credentials that permission checks use.

use defuse_fs::{Caller, Context, Errno, Origin, OwnerCapability, SupplementaryGroups, posix};

/// The capabilities that permission checks use, capabilities(7).
pub mod cap {
    /// `CAP_CHOWN`.
    pub const CHOWN: u32 = 0;
    /// `CAP_DAC_OVERRIDE`.
    pub const DAC_OVERRIDE: u32 = 1;
    /// `CAP_DAC_READ_SEARCH`.
    pub const DAC_READ_SEARCH: u32 = 2;
    /// `CAP_FOWNER`.
    pub const FOWNER: u32 = 3;
    /// `CAP_FSETID`.
    pub const FSETID: u32 = 4;
    /// `CAP_SYS_ADMIN`.
    pub const SYS_ADMIN: u32 = 21;
    /// `CAP_MKNOD`.
    pub const MKNOD: u32 = 27;
    /// `CAP_SETFCAP`.
    pub const SETFCAP: u32 = 31;
}

/// A user with groups and capabilities, credentials(7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskCredentials {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Real user id, which access(2) checks.
    pub real_uid: u32,
    /// Real group id.
    pub real_gid: u32,
    /// Supplementary groups.
    pub groups: Box<[u32]>,
    /// Effective capabilities, one bit per number in [`cap`].
    pub caps: u64,
    /// Process id, for locks and for logs.
    pub pid: u32,
}

impl TaskCredentials {
    /// True if `other` has the same rights in file systems.
    pub(crate) fn has_rights_of(&self, other: &TaskCredentials) -> bool {
        (self.uid, self.gid, self.caps) == (other.uid, other.gid, other.caps)
            && self.groups == other.groups
    }

    /// A user with the given groups. User 0 has all capabilities, other users have none.
    pub fn user(uid: u32, gid: u32, groups: &[u32]) -> Self {
        let caps = if uid == 0 { u64::MAX } else { 0 };
        let pid = std::process::id();
        TaskCredentials { uid, gid, real_uid: uid, real_gid: gid, groups: groups.into(), caps, pid }
    }

    /// The credentials of the calling thread, from getresuid(2), getgroups(2) and capget(2). The
    /// file-system ids are assumed to equal the effective ids, which holds unless the thread called
    /// setfsuid(2).
    pub fn read_calling_thread() -> Result<Self, Errno> {
        let raw = |errno: rustix::io::Errno| Errno::from_raw(errno.raw_os_error());
        let groups = rustix::process::getgroups().map_err(raw)?;
        let caps = rustix::thread::capabilities(None).map_err(raw)?;
        Ok(TaskCredentials {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            real_uid: rustix::process::getuid().as_raw(),
            real_gid: rustix::process::getgid().as_raw(),
            groups: groups.into_iter().map(|gid| gid.as_raw()).collect(),
            caps: caps.effective.bits(),
            pid: std::process::id(),
        })
    }

    /// True if the capability is effective.
    pub fn has(&self, cap: u32) -> bool {
        self.caps >> cap & 1 != 0
    }

    /// True if `gid` is the group or one of the supplementary groups.
    pub fn is_in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// The credentials that access(2) checks: the real ids. Only a real user id of 0 keeps the
    /// capabilities.
    pub fn to_real(&self) -> Self {
        let caps = if self.real_uid == 0 { self.caps | Self::FILE_CAPS } else { 0 };
        TaskCredentials { uid: self.real_uid, gid: self.real_gid, caps, ..self.clone() }
    }

    const FILE_CAPS: u64 = 1 << cap::DAC_OVERRIDE | 1 << cap::DAC_READ_SEARCH;

    /// Returns the caller for requests to file systems.
    pub fn caller(&self) -> Caller {
        Caller { uid: self.uid, gid: self.gid, pid: self.pid }
    }

    /// Returns the context of an operation with these credentials on the mount `origin`.
    #[inline]
    pub(crate) fn context(&self, origin: Origin) -> Context<'_> {
        Context::new(self.caller()).with_groups(self).from_origin(origin)
    }
}

impl posix::PosixUser for TaskCredentials {
    fn uid(&self) -> u32 {
        self.uid
    }

    fn in_group(&self, gid: u32) -> bool {
        TaskCredentials::is_in_group(self, gid)
    }

    fn is_owner_of_all(&self) -> bool {
        self.has(cap::FOWNER)
    }
}

impl SupplementaryGroups for TaskCredentials {
    fn are_known(&self) -> bool {
        true
    }

    fn groups_of(&self, _: Caller) -> Result<Vec<u32>, Errno> {
        Ok(self.groups.to_vec())
    }

    fn has_capability(&self, _: Caller, number: OwnerCapability, _: (u32, u32)) -> bool {
        self.has(number as u32)
    }
}
