//! The client at the other end of a socket: its credentials, and its connection.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use defuse_connection::{
    InheritedInode, PageSource, PeerConnection, PeerCredentials, VersionSource,
};
use defuse_fs::{
    Context, Errno, Fh, File, FileSystem, Ino, IoctlArgs, IoctlReply, OpenFlags, Result, delegate,
};
use defuse_session::SharedMemory;
use defuse_wire::vendor::{
    NAMES, OPEN_AHEAD, OPEN_BYTES_MAX, RESOLVE, TAKE_OVER, TAKE_OVER_MAX, TakeOver,
};
use zerocopy::FromBytes;

use crate::{prefetch, steps};

/// A client that speaks FUSE.
pub(crate) struct FusePeer {
    pub(crate) connection: PeerConnection<Arc<dyn FileSystem>>,
    pub(crate) pages: Option<Arc<dyn PageSource>>,
    pub(crate) versions: Option<Arc<dyn VersionSource>>,
}

impl FileSystem for FusePeer {
    delegate!(to connection, except ioctl);

    /// Some requests concern the connection itself.
    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        match args.cmd {
            TAKE_OVER => self.take_over(args),
            RESOLVE => steps::resolve(&self.connection, cx, file.ino, args),
            NAMES => steps::names(&self.connection, cx, file.ino, args),
            OPEN_AHEAD => match &self.versions {
                Some(versions) => prefetch::open(&self.connection, &**versions, cx, file.ino, args),
                // Without versions, the client could not know how long the bytes hold.
                None => Err(Errno::ENOSYS),
            },
            _ => self.connection.ioctl(cx, file, args),
        }
    }
}

impl FusePeer {
    fn take_over(&self, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        let (all, rest) = args.input.as_chunks::<{ size_of::<TakeOver>() }>();
        let fits = all.len() <= TAKE_OVER_MAX && all.len() * size_of::<i32>() <= args.output_len;
        if !rest.is_empty() || !fits {
            return Err(Errno::EINVAL);
        }
        let errors = all.iter().map(|bytes| {
            let done = TakeOver::read_from_bytes(bytes)
                .map_err(|_| Errno::EINVAL)
                .and_then(|what| self.take_over_one(&what));
            done.map_or_else(Errno::raw, |()| 0)
        });
        Ok(IoctlReply { result: 0, output: errors.flat_map(i32::to_ne_bytes).collect() })
    }

    fn take_over_one(&self, what: &TakeOver) -> Result<()> {
        if what.flags & TakeOver::SETTLE != 0 {
            self.connection.settle();
            return Ok(());
        }
        self.connection.take_over(&InheritedInode {
            ino: Ino(what.ino),
            fh: (what.flags & TakeOver::OPEN != 0).then_some(Fh(what.fh)),
            mode: OpenFlags(what.open_flags as u32).access(),
            process_locks: what.flags & TakeOver::PROCESS_LOCKS != 0,
        })
    }
}

impl SharedMemory for FusePeer {
    fn map(
        &self,
        cx: &Context<'_>,
        file: File,
        range: (u64, u64),
        writes: bool,
    ) -> Result<OwnedFd> {
        let memory = self.connection.map(cx, file, range, writes)?;
        // The client can change the file unseen as soon as it has the descriptor.
        if let Some(pages) = &self.pages {
            pages.stop(file.ino);
        }
        if let Some(versions) = &self.versions {
            versions.record_mapping(file.ino);
        }
        Ok(memory)
    }

    fn pages(&self, cx: &Context<'_>, file: File) -> Result<OwnedFd> {
        let pages = self.pages.as_ref().ok_or(Errno::ENOSYS)?;
        self.connection.may_read(cx, file)?;
        pages.pages(file.ino, self.connection.credentials().uid)
    }

    /// Without versions, the client could not know how long the bytes hold.
    fn read_whole(&self, cx: &Context<'_>, file: File) -> Option<(Vec<u8>, bool)> {
        self.versions.as_ref().filter(|versions| versions.covers(file.ino))?;
        let whole = self.connection.read_whole(cx, file, OPEN_BYTES_MAX)?;
        Some((whole.bytes, whole.read_is_due))
    }

    fn versions(&self) -> Result<OwnedFd> {
        self.versions.as_ref().ok_or(Errno::ENOSYS)?.versions()
    }

    fn name_memory(&self) -> Result<OwnedFd> {
        self.connection.shared_names()
    }

    fn finish_ioctl(&self) {
        self.connection.share_names();
    }

    fn unmap(&self, cx: &Context<'_>, ino: Ino) -> Result<()> {
        self.connection.unmap(cx, ino)
    }
}

/// The process, user and groups that connected `socket`, at that time: `SO_PEERCRED` and
/// `SO_PEERGROUPS`, unix(7) and socket(7).
pub(crate) fn credentials(socket: &OwnedFd) -> Result<PeerCredentials> {
    let libc::ucred { pid, uid, gid } = peer_credentials(socket)?;
    let mut groups = vec![gid];
    groups.extend(peer_groups(socket)?);
    Ok(PeerCredentials { pid, uid, groups })
}

/// Returns the process and user at the other end of a connected socket, as the kernel reports them
/// (`SO_PEERCRED`, unix(7)). The process is 0 if it is not in this process's PID namespace, which
/// the type of rustix cannot represent.
fn peer_credentials(socket: impl AsFd) -> Result<libc::ucred> {
    let mut all = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of_val(&all) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `all`, which has that many and holds any
    // bytes, and the number of bytes to `len`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut all).cast(),
            &mut len,
        )
    };
    if rc == 0 { Ok(all) } else { Err(std::io::Error::last_os_error().into()) }
}

/// The memory of messages that the peer has not received, by the kernel's count.
pub(crate) fn count_unreceived(socket: &OwnedFd) -> Option<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: `TIOCOUTQ` (unix(7)) writes one int, to `bytes`.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if rc == 0 { usize::try_from(bytes).ok() } else { None }
}

fn peer_groups(socket: &OwnedFd) -> Result<Vec<u32>> {
    let mut groups: Vec<u32> = vec![0; 64];
    loop {
        let mut len = size_of_val(&groups[..]) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to the memory of `groups`, which has that
        // many, and the number of bytes to `len`.
        let rc = unsafe {
            let room = groups.as_mut_ptr().cast();
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                room,
                &mut len,
            )
        };
        let count = len as usize / size_of::<u32>();
        if rc == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error: Errno = std::io::Error::last_os_error().into();
        // If there is too little room, the kernel returns the length that it needs.
        if error != Errno::ERANGE || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_pair_tells_this_process() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let credentials = credentials(&one.into()).unwrap();
        assert_eq!(credentials.pid, std::process::id() as i32);
        assert_eq!(credentials.uid, rustix::process::geteuid().as_raw());
        assert_eq!(credentials.groups[0], rustix::process::getegid().as_raw());
    }
}
