//! Who asks, as far as permissions depend on it.

use defuse_fs::{Caller, Errno};

/// Numbers of the capabilities that decide here, capabilities(7).
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
pub struct Credentials {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Real user id: the one that access(2) asks for.
    pub real_uid: u32,
    /// Real group id.
    pub real_gid: u32,
    /// Supplementary groups.
    pub groups: Box<[u32]>,
    /// Effective capabilities, a bit for each number in [`cap`].
    pub caps: u64,
    /// Process id, for locks and for the file systems' logs.
    pub pid: u32,
}

impl Credentials {
    /// A user without capabilities; all of them for user 0.
    pub fn user(uid: u32, gid: u32, groups: &[u32]) -> Self {
        let caps = if uid == 0 { u64::MAX } else { 0 };
        let pid = std::process::id();
        Credentials { uid, gid, real_uid: uid, real_gid: gid, groups: groups.into(), caps, pid }
    }

    /// Those of the calling thread, by getresuid(2), getgroups(2) and capget(2). The file-system
    /// ids are taken for the effective ones, which they are unless setfsuid(2) was called.
    pub fn of_this_process() -> Result<Self, Errno> {
        let raw = |errno: rustix::io::Errno| Errno::from_raw(errno.raw_os_error());
        let groups = rustix::process::getgroups().map_err(raw)?;
        let caps = rustix::thread::capabilities(None).map_err(raw)?;
        Ok(Credentials {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            real_uid: rustix::process::getuid().as_raw(),
            real_gid: rustix::process::getgid().as_raw(),
            groups: groups.into_iter().map(|gid| gid.as_raw()).collect(),
            caps: caps.effective.bits(),
            pid: std::process::id(),
        })
    }

    /// Whether the capability is effective.
    pub fn has(&self, cap: u32) -> bool {
        self.caps >> cap & 1 != 0
    }

    /// Whether `gid` is the group or one of the supplementary ones.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Those by which access(2) decides: the real ids, with all capabilities only for a real user
    /// 0.
    pub fn real(&self) -> Self {
        let caps = if self.real_uid == 0 { self.caps | Self::FILE_CAPS } else { 0 };
        Credentials { uid: self.real_uid, gid: self.real_gid, caps, ..self.clone() }
    }

    const FILE_CAPS: u64 = 1 << cap::DAC_OVERRIDE | 1 << cap::DAC_READ_SEARCH;

    /// As file systems see them.
    pub fn caller(&self) -> Caller {
        Caller { uid: self.uid, gid: self.gid, pid: self.pid }
    }
}
