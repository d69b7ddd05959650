//! One client at the other end of a connected socket, without a listener.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use defuse_connection::{PeerConnection, PeerCredentials, ServiceQuotas, ServiceState};
use defuse_fs::{Errno, FileSystem, Result};
use defuse_session::abi::InitIn;
use defuse_session::{
    ClientHooks, RequestSource, Session, SessionEnd, SessionOptions, StartError, TransportUpgrade,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::messages::{self, MessageSource};
use crate::peer::FusePeer;
use crate::server::{ServerOptions, disable_caches, with_locks};
use crate::waiting::INIT_PATIENCE;

/// Serves `fs` to the one process at the other end of `socket`, a connected `SOCK_SEQPACKET`
/// socket, which acts for all users: the caller trusts it to check their rights. It may name every
/// inode by its number, which `fs` accepts without a lookup
/// ([`Shortcuts::resolve`](defuse_fs::Shortcuts::resolve)). Calls `ready` when the process has sent
/// INIT. Returns when either side has shut the socket down for the other one, and everything that
/// the client held is released.
///
/// Of the limits in `options`, the limits of a user apply.
///
/// # Errors
///
/// `ETIMEDOUT` if the client sends nothing in ten seconds, `EPROTO` if it does not speak FUSE, and
/// the errors of the file system if not everything could be made durable at the end.
pub fn serve_one(
    socket: OwnedFd,
    fs: Arc<dyn FileSystem>,
    options: &ServerOptions,
    ready: impl FnOnce(),
) -> Result<()> {
    if !wait_for_message(&socket, INIT_PATIENCE) {
        return Err(Errno::ETIMEDOUT);
    }
    let fs = with_locks(fs);
    let quotas = ServiceQuotas {
        connection: options.user_limits,
        user: options.user_limits,
        mapped_bytes: options.mapped_bytes,
    };
    let all_users = PeerCredentials { pid: 0, uid: 0, groups: vec![0] };
    let service = ServiceState::new(quotas, || {});
    let mut session = options.session.clone();
    disable_caches(&mut session, &*fs);
    let peer = Arc::new(FusePeer {
        connection: PeerConnection::new(fs, service, all_users),
        pages: None,
        versions: None,
    });
    // The client may have got numbers from an earlier server of the same file system.
    peer.connection.trust_numbers();
    let served = Arc::clone(&peer) as Arc<dyn FileSystem>;
    let groups = Arc::new(peer.connection.credentials().clone());
    let client = ClientHooks { groups: Some(groups), tells_groups: true, ..ClientHooks::default() };
    let mut source: Arc<dyn RequestSource> = Arc::new(MessageSource::new(Arc::new(socket), None));
    if let Some(lanes) = &options.lanes {
        source = lanes.upgrade(0, source)?;
    }
    let session = Session::start_on(
        source,
        served,
        &messages::options(&session, options.lanes.is_some()),
        client,
    );
    let session = session.map_err(|error| {
        log::warn!("the process at the other end is not served: {error}");
        Errno::EPROTO
    })?;
    ready();
    let SessionEnd { durable, .. } = session.wait();
    peer.connection.close();
    durable
}

/// Answers INIT on `socket`, a connected `SOCK_SEQPACKET` socket, and starts to serve the file
/// system that `choose` returns for it, with the options that it returns as far as there is no
/// device. The one process at the other end is trusted as the kernel is: it checks the rights of
/// users, and nothing is released for it at its end. With `lanes`, requests may come through shared
/// memory, too.
///
/// # Errors
///
/// The errors of [`Session::start`].
pub fn start_trusted(
    socket: OwnedFd,
    lanes: Option<&dyn TransportUpgrade>,
    choose: impl FnOnce(&InitIn) -> (Arc<dyn FileSystem>, SessionOptions),
) -> std::result::Result<Session, StartError> {
    let mut source: Arc<dyn RequestSource> = Arc::new(MessageSource::new(Arc::new(socket), None));
    if let Some(lanes) = lanes {
        source = lanes.upgrade(0, source).map_err(StartError::Device)?;
    }
    let client = ClientHooks { tells_groups: true, ..ClientHooks::default() };
    Session::start_chosen_on(&source, client, |init| {
        let (fs, chosen) = choose(init);
        let SessionOptions { forward_locks, atomic_o_trunc, answers_parents, .. } = chosen;
        let limited = messages::options(&chosen, lanes.is_some());
        let options = SessionOptions { forward_locks, atomic_o_trunc, answers_parents, ..limited };
        (fs, options)
    })
}

/// Waits for the first message.
fn wait_for_message(socket: &OwnedFd, patience: Duration) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let patience = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: 0 };
    poll(&mut fds, Some(&patience)).is_ok_and(|ready| ready > 0)
}
