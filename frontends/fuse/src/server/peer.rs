//! Who is at the other end of a socket, and what that user may ask for.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use defuse_fs::{Caller, Context, Errno, Fh, File, FileSystem, Ino, OpenFlags, Result};

use super::Shared;
use super::guard::Guard;
use super::holds::{Held, Holds};
use super::ledger::{Ledger, Legacy};
use super::maps::Maps;
use defuse_wire::abi;
use defuse_wire::request::Body;
use defuse_wire::vendor::TakeOver;

/// The user of a client, as the kernel vouches for it.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    /// All groups, the effective one first.
    pub(crate) groups: Vec<u32>,
}

impl Credentials {
    /// Those of whoever connected `socket`, at that time: `SO_PEERCRED` and `SO_PEERGROUPS`,
    /// unix(7) and socket(7).
    pub(crate) fn of(socket: &OwnedFd) -> Result<Credentials> {
        let libc::ucred { pid, uid, gid } = peer_credentials(socket)?;
        let mut groups = vec![gid];
        groups.extend(peer_groups(socket)?);
        Ok(Credentials { pid, uid, groups })
    }

    /// Root acts for anybody; everybody else for themselves.
    fn may_act_as(&self, caller: Caller) -> bool {
        self.uid == 0 || caller.uid == self.uid && self.groups.contains(&caller.gid)
    }
}

/// The process and user at the other end of a connected socket, as the kernel vouches for them
/// (`SO_PEERCRED`, unix(7)). The process is 0 where it is not of this process's PID namespace, which the
/// type of rustix cannot hold.
fn peer_credentials(socket: impl AsFd) -> Result<libc::ucred> {
    let mut all = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of_val(&all) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `all`, which has that many and holds any bytes,
    // and the number of bytes to `len`.
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
        // Where there is too little room, the kernel says how much it takes.
        if error != Errno::ERANGE || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// A client: who it is, and what it has been given.
#[derive(Clone)]
pub(crate) struct Peer {
    pub(super) server: Weak<Shared>,
    pub(crate) credentials: Arc<Credentials>,
    pub(crate) ledger: Arc<Ledger>,
    /// What it and others have mapped.
    pub(crate) maps: Arc<Maps>,
    /// What all clients do one after the other.
    pub(crate) holds: Arc<Holds>,
    /// Its user is not root, and may do what that user may.
    pub(crate) is_guarded: bool,
}

impl Peer {
    /// Takes over what the client is the heir of: [`TakeOver`].
    pub(crate) fn take_over(&self, ino: Ino, what: &TakeOver) -> Result<()> {
        if what.flags & TakeOver::SETTLE != 0 {
            self.ledger.settle();
            return Ok(());
        }
        self.ledger.take_over(&Legacy {
            ino,
            fh: (what.flags & TakeOver::OPEN != 0).then_some(Fh(what.fh)),
            mode: OpenFlags(what.open_flags as u32).access(),
            process_locks: what.flags & TakeOver::PROCESS_LOCKS != 0,
        })
    }

    /// Whether the client may ask for `body` on `ino` for `caller`. `EPERM` where it acts for somebody
    /// else, `ESTALE` for inodes that it was not given.
    pub(crate) fn check(&self, body: &Body<'_>, ino: Ino, caller: Caller) -> Result<()> {
        let named = match body {
            Body::Init(_) | Body::Destroy | Body::Statfs | Body::Syncfs(_) => return Ok(()),
            // Nobody asks for these: they come when a process is gone.
            Body::Release(_) | Body::Releasedir(_) => return Ok(()),
            Body::Rename { args, .. } => Some(args.newdir),
            Body::Rename2 { args, .. } => Some(args.newdir),
            Body::Link { args, .. } => Some(args.oldnodeid),
            _ => None,
        };
        if !self.credentials.may_act_as(caller) || !self.may_give_away(body) {
            return Err(Errno::EPERM);
        }
        if !self.ledger.holds(ino) || named.is_some_and(|ino| !self.ledger.holds(Ino(ino))) {
            return Err(Errno::ESTALE);
        }
        Ok(())
    }

    /// The request with the handles of the file system in place of the numbers by which the client
    /// names open files. `EBADF` for those that it does not have.
    pub(crate) fn with_handles<'a>(&self, body: &Body<'a>, ino: Ino) -> Result<Body<'a>> {
        let mut body = *body;
        if let Body::CopyFileRange(args) | Body::CopyFileRange64(args) = &mut body {
            let copied = File { ino: Ino(args.nodeid_out), fh: Fh(args.fh_out) };
            args.fh_out = self.ledger.handle(copied)?.0;
        }
        if let Some(fh) = handle(&mut body) {
            *fh = self.ledger.handle(File { ino, fh: Fh(*fh) })?.0;
        }
        Ok(body)
    }

    /// Whether the client's user may do that: root may do everything.
    pub(crate) fn guard(
        &self,
        fs: &dyn FileSystem,
        body: &Body<'_>,
        ino: Ino,
        cx: &Context<'_>,
    ) -> Result<()> {
        self.guarded(fs).map_or(Ok(()), |guard| guard.check(body, ino, cx))
    }

    /// The rules for the client, where there are some.
    pub(crate) fn guarded<'a>(&'a self, fs: &'a dyn FileSystem) -> Option<Guard<'a>> {
        let guard = || Guard { fs, ledger: &self.ledger, who: &self.credentials };
        self.is_guarded.then(guard)
    }

    /// Waits for the locks of clients that are gone. A process has no locks any more when its parent
    /// learns of its end; that its connection has ended, the server learns a moment later. False where
    /// nobody was gone.
    pub(crate) fn await_ended(&self) -> bool {
        self.server.upgrade().is_some_and(|server| server.await_ended())
    }

    /// Keeps apart what one client checks and another one changes, until the request is done.
    pub(crate) fn hold<'a>(&'a self, body: &Body<'_>, ino: Ino) -> Held<'a> {
        self.holds.hold(body, ino, self.is_guarded)
    }

    /// Only root gives files away, chown(2).
    fn may_give_away(&self, body: &Body<'_>) -> bool {
        let Body::Setattr(args) = body else { return true };
        let who = &self.credentials;
        let user = args.valid & abi::FATTR_UID == 0 || args.uid == who.uid;
        who.uid == 0 || user
    }
}

/// The number of the open file that a request uses. Those that close one, or map it, find it in the
/// books by themselves.
fn handle<'a>(body: &'a mut Body<'_>) -> Option<&'a mut u64> {
    Some(match body {
        Body::Getattr(args) if args.getattr_flags & abi::FUSE_GETATTR_FH != 0 => &mut args.fh,
        Body::Statx(args) if args.getattr_flags & abi::FUSE_GETATTR_FH != 0 => &mut args.fh,
        Body::Setattr(args) if args.valid & abi::FATTR_FH != 0 => &mut args.fh,
        Body::Read(args) | Body::Readdir(args) | Body::Readdirplus(args) => &mut args.fh,
        Body::Write { args, .. } => &mut args.fh,
        Body::Fsync(args) | Body::Fsyncdir(args) => &mut args.fh,
        Body::Flush(args) => &mut args.fh,
        Body::Getlk(args) | Body::Setlk(args) | Body::Setlkw(args) => &mut args.fh,
        Body::Ioctl { args, .. } => &mut args.fh,
        Body::Poll(args) => &mut args.fh,
        Body::Fallocate(args) => &mut args.fh,
        Body::Lseek(args) => &mut args.fh,
        Body::CopyFileRange(args) | Body::CopyFileRange64(args) => &mut args.fh_in,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_acts_for_others() {
        let of = |uid| Credentials { pid: 1, uid, groups: vec![uid, 20] };
        let caller = |uid, gid| Caller { uid, gid, pid: 1 };
        assert!(of(0).may_act_as(caller(1000, 1000)));
        assert!(of(1000).may_act_as(caller(1000, 1000)) && of(1000).may_act_as(caller(1000, 20)));
        assert!(!of(1000).may_act_as(caller(0, 1000)) && !of(1000).may_act_as(caller(1000, 0)));
    }

    #[test]
    fn a_socket_pair_tells_this_process() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let credentials = Credentials::of(&one.into()).unwrap();
        assert_eq!(credentials.pid, std::process::id() as i32);
        assert_eq!(credentials.uid, rustix::process::geteuid().as_raw());
        assert_eq!(credentials.groups[0], rustix::process::getegid().as_raw());
    }
}
