//! INIT from the kernel's side: the offered capabilities, and the meaning of the server's reply.

use defuse_fs::{Caller, Caps, Context, Errno, Ino, LockSupport, Result, SourceRestrictions};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::RemoteError;
use defuse_wire::abi::*;
use defuse_wire::encode::EncodedRequest;
use defuse_wire::vendor::{
    CALLER_GROUPS, COMPOUND, ConnectionNumbers, DECIDES_ON_NAMES, NO_BIRTH_TIMES, SHARED_IO_MAX,
    SOCKET_IO_MAX,
};

/// The oldest supported minor version. Since 7.12 no structure except INIT's own has changed its
/// size, and the flags of INIT describe other differences.
pub(super) const OLDEST_MINOR: u32 = 12;
/// `FUSE_COMPAT_22_INIT_OUT_SIZE`: the length of the reply of servers before 7.23.
const INIT_OUT_SIZE_7_22: usize = 24;
const PAGE: usize = 4096;

/// The offered capabilities. Not offered are those that need a device (splice, backing files,
/// io_uring), a write cache, or shared memory.
const OFFERED: u64 = FUSE_ASYNC_READ
    | FUSE_POSIX_LOCKS
    | FUSE_ATOMIC_O_TRUNC
    | FUSE_EXPORT_SUPPORT
    | FUSE_BIG_WRITES
    | FUSE_DONT_MASK
    | FUSE_FLOCK_LOCKS
    | FUSE_HAS_IOCTL_DIR
    | FUSE_AUTO_INVAL_DATA
    | FUSE_DO_READDIRPLUS
    | FUSE_READDIRPLUS_AUTO
    | FUSE_ASYNC_DIO
    | FUSE_NO_OPEN_SUPPORT
    | FUSE_PARALLEL_DIROPS
    | FUSE_HANDLE_KILLPRIV
    | FUSE_POSIX_ACL
    | FUSE_MAX_PAGES
    | FUSE_CACHE_SYMLINKS
    | FUSE_NO_OPENDIR_SUPPORT
    | FUSE_EXPLICIT_INVAL_DATA
    | FUSE_HANDLE_KILLPRIV_V2
    | FUSE_SETXATTR_EXT
    | FUSE_INIT_EXT
    | FUSE_SECURITY_CTX
    | FUSE_CREATE_SUPP_GROUP
    | FUSE_HAS_EXPIRE_ONLY
    | FUSE_NO_EXPORT_SUPPORT
    | NO_BIRTH_TIMES
    | CALLER_GROUPS
    | COMPOUND
    | DECIDES_ON_NAMES;

/// The INIT of the client.
pub(super) fn request(names: ConnectionNumbers) -> EncodedRequest {
    let cx = Context::new(Caller::default());
    EncodedRequest::new(Opcode::Init, &cx, Ino(0)).with(&init_in(names))
}

/// The answer to it, for [`ServerAgreement::from_init_reply`].
pub(super) fn answer(body: &[u8]) -> Result<Vec<u8>> {
    Ok(body[..body.len().min(size_of::<InitOut>())].to_vec())
}

fn init_in(names: ConnectionNumbers) -> InitIn {
    let mut init = InitIn {
        major: FUSE_KERNEL_VERSION,
        minor: FUSE_KERNEL_MINOR_VERSION,
        max_readahead: SOCKET_IO_MAX as u32,
        flags: OFFERED as u32,
        flags2: (OFFERED >> 32) as u32,
        ..InitIn::default()
    };
    names.store_in(&mut init);
    init
}

/// The agreement of a server and this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerAgreement {
    pub(super) minor: u32,
    pub(super) flags: u64,
    /// Maximum size of a WRITE, in bytes, through shared memory.
    pub(super) max_write: usize,
    /// Maximum size of a READ, in bytes, through shared memory.
    pub(super) max_read: usize,
    time_granularity_ns: u32,
}

impl ServerAgreement {
    /// Decodes the reply to INIT (`process_init_reply` in `fs/fuse/inode.c`).
    pub(super) fn from_init_reply(
        body: &[u8],
    ) -> std::result::Result<ServerAgreement, RemoteError> {
        let out = init_out(body).map_err(|_| RemoteError::BadInit(body.len()))?;
        if out.major != FUSE_KERNEL_VERSION || out.minor < OLDEST_MINOR {
            return Err(RemoteError::Version(out.major, out.minor));
        }
        let extended = if out.flags as u64 & FUSE_INIT_EXT != 0 { out.flags2 } else { 0 };
        let flags = (u64::from(out.flags) | u64::from(extended) << 32) & OFFERED;
        let pages =
            if flags & FUSE_MAX_PAGES != 0 { usize::from(out.max_pages).max(1) } else { 32 };
        let max_read = (pages * PAGE).min(SHARED_IO_MAX);
        let big = flags & FUSE_BIG_WRITES != 0;
        let max_write = if big { (out.max_write as usize).max(PAGE) } else { PAGE };
        let granularity = if out.minor >= 23 { out.time_gran } else { 1 };
        Ok(ServerAgreement {
            minor: out.minor.min(FUSE_KERNEL_MINOR_VERSION),
            flags,
            max_write: max_write.min(max_read),
            max_read,
            time_granularity_ns: granularity.clamp(1, 1_000_000_000),
        })
    }

    /// The agreement of the previously executed program.
    pub(super) fn from_predecessor(
        minor: u32,
        flags: u64,
        (max_write, max_read): (usize, usize),
        time_granularity_ns: u32,
    ) -> ServerAgreement {
        let most = |len: usize| len.clamp(PAGE, SHARED_IO_MAX);
        let (max_write, max_read) = (most(max_write), most(max_read));
        let flags = flags & OFFERED;
        ServerAgreement { minor, flags, max_write, max_read, time_granularity_ns }
    }

    /// Maximum size of a WRITE in any message.
    pub(super) fn max_sent(&self) -> usize {
        self.max_write.min(SOCKET_IO_MAX)
    }

    /// Maximum size of a reply in any message.
    pub(super) fn max_received(&self) -> usize {
        self.max_read.min(SOCKET_IO_MAX)
    }

    pub(super) fn time_granularity_ns(&self) -> u32 {
        self.time_granularity_ns
    }

    pub(super) fn uses(&self, flags: u64) -> bool {
        self.flags & flags != 0
    }

    /// The agreement as properties of the contract.
    pub(super) fn caps(&self) -> Caps {
        let locks = self.uses(FUSE_POSIX_LOCKS | FUSE_FLOCK_LOCKS);
        Caps {
            read_only: false,
            blocking: true,
            exclusive: self.uses(FUSE_EXPLICIT_INVAL_DATA),
            readdir_entries: self.uses(FUSE_DO_READDIRPLUS),
            posix_acl: self.uses(FUSE_POSIX_ACL),
            xattrs: true,
            kill_suidgid: self.uses(FUSE_HANDLE_KILLPRIV_V2),
            open_truncates: self.uses(FUSE_ATOMIC_O_TRUNC),
            locks: if locks { LockSupport::FileSystem } else { LockSupport::Frontend },
            submits: false,
            backing_files: false,
            security_labels: self.uses(FUSE_SECURITY_CTX),
            time_granularity_ns: self.time_granularity_ns,
            birth_times: !self.uses(NO_BIRTH_TIMES),
            asks_for_groups: self.uses(CALLER_GROUPS),
            decides_on_names: self.uses(DECIDES_ON_NAMES),
            // Its server does, and makes them durable in time.
            delays_changes: false,
            // The server can report any mode, owner and device number.
            denied: SourceRestrictions { suid: true, dev: true, exec: false },
            ..Caps::default()
        }
    }
}

/// Decodes the reply, whose structure has grown: fields missing from an older server are zero, and
/// additional fields of a newer one are ignored.
fn init_out(body: &[u8]) -> Result<InitOut> {
    if body.len() < INIT_OUT_SIZE_7_22 {
        return Err(Errno::EIO);
    }
    let mut out = InitOut::new_zeroed();
    let len = body.len().min(size_of::<InitOut>());
    out.as_mut_bytes()[..len].copy_from_slice(&body[..len]);
    InitOut::read_from_bytes(out.as_bytes()).map_err(|_| Errno::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_offered_capabilities_are_used_and_no_limit_exceeds_a_message() {
        let out = InitOut {
            major: 7,
            minor: 99,
            flags: u32::MAX,
            flags2: u32::MAX,
            max_write: u32::MAX,
            max_pages: u16::MAX,
            ..InitOut::default()
        };
        let agreed = ServerAgreement::from_init_reply(out.as_bytes()).unwrap();
        assert_eq!((agreed.minor, agreed.flags & !OFFERED), (FUSE_KERNEL_MINOR_VERSION, 0));
        assert_eq!((agreed.max_write, agreed.max_read), (SHARED_IO_MAX, SHARED_IO_MAX));
        assert_eq!((agreed.max_sent(), agreed.max_received()), (SOCKET_IO_MAX, SOCKET_IO_MAX));
        let nothing = InitOut { major: 7, minor: 31, ..InitOut::default() };
        let agreed = ServerAgreement::from_init_reply(nothing.as_bytes()).unwrap();
        assert_eq!((agreed.max_write, agreed.max_read), (4096, 32 * PAGE));
        assert_eq!(agreed.caps().locks, LockSupport::Frontend);
    }

    #[test]
    fn too_old_servers_and_invalid_replies_are_refused() {
        let out = |major, minor| InitOut { major, minor, ..InitOut::default() };
        assert!(ServerAgreement::from_init_reply(&out(7, 12).as_bytes()[..24]).is_ok());
        assert!(matches!(
            ServerAgreement::from_init_reply(out(7, 11).as_bytes()),
            Err(RemoteError::Version(7, 11))
        ));
        assert!(matches!(
            ServerAgreement::from_init_reply(out(8, 0).as_bytes()),
            Err(RemoteError::Version(8, 0))
        ));
        assert!(matches!(
            ServerAgreement::from_init_reply(&[0; 23]),
            Err(RemoteError::BadInit(23))
        ));
    }
}
