//! A file system that moves: at one time this process serves it, at another time another process,
//! whose client this is then.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_fs::{
    Attr, Caller, Caps, Context, Errno, FailureDomain, Fh, Figure, FileSystem, Ino, LockSupport,
    Name, NoNotify, Notify, Origin, Result, StatFs, delegate,
};

use super::ReconnectingClient;
use super::connected::CallServer;
use super::last_reply::LastAnswer;
use super::link::ServerLink;
use super::table::ReconnectTable;
use crate::{RemoteClient, lock};

/// A file system whose server is at one time in this process, at another time in another process.
///
/// Its inodes and open files outlive each server, like the inodes and files of
/// [`ReconnectingClient`]. The file system itself assigns the numbers of inodes, which stay from
/// one server to the next. So an inode is found by its number, and by its path if the number is
/// another file now. Frontends cache nothing, because the process that serves the file system
/// changes it unseen.
pub struct MovingClient {
    inner: ReconnectingClient,
    attr: LastAnswer<Attr>,
    space: LastAnswer<StatFs>,
}

impl MovingClient {
    /// Creates a file system without a server. Until there is one, calls wait up to `limit`, and
    /// then fail with `EIO`. `name` is for messages.
    pub fn new(name: String, limit: Duration) -> MovingClient {
        let table = Arc::new(Mutex::new(ReconnectTable::new()));
        let link = ServerLink::new_unconnected(name, limit, Arc::clone(&table));
        let caps = Caps {
            exclusive: false,
            blocking: true,
            readdir_entries: true,
            posix_acl: true,
            xattrs: true,
            kill_suidgid: true,
            open_truncates: true,
            locks: LockSupport::FileSystem,
            ..Caps::default()
        };
        let has_locked = AtomicBool::new(false);
        let inner = ReconnectingClient { link, caps, table, has_locked, moves: true };
        MovingClient { inner, attr: LastAnswer::default(), space: LastAnswer::default() }
    }

    /// Continues with a file system of this process, after
    /// [`leave_server`](MovingClient::leave_server) or [`lose`](MovingClient::lose). It must have
    /// the inode numbers of all earlier servers.
    pub fn give_own(&self, fs: Arc<dyn FileSystem>) {
        // This is its only frontend, and caches nothing.
        fs.attach(Origin::new(), Arc::new(NoNotify));
        self.inner.link.give(CallServer::Own(fs));
    }

    /// Continues with the server of another process.
    pub fn give_remote(&self, remote: RemoteClient) {
        self.inner.link.give(CallServer::Remote(Box::new(remote)));
    }

    /// Makes everything durable, and ends the present server when nothing is in progress. Calls
    /// wait from then on.
    ///
    /// # Errors
    ///
    /// `EBUSY` if a call has not ended within `patience`, and the errors of [`FileSystem::syncfs`]:
    /// calls then go on with the server.
    pub fn leave_server(&self, patience: Duration) -> Result<()> {
        if !self.inner.link.part(patience) {
            return Err(Errno::EBUSY);
        }
        let present = self.inner.link.present();
        let cx = Context::new(Caller::default());
        let synced = match present.fs().syncfs(&cx) {
            Err(Errno::ENOSYS) => Ok(()),
            other => other,
        };
        if let Err(errno) = synced {
            self.inner.link.stay();
            return Err(errno);
        }
        lock(&self.inner.table).record_syncfs();
        drop(present);
        self.inner.link.take();
        Ok(())
    }

    /// Ends the present server, regardless of calls in progress: it has ended or does not answer.
    pub fn lose(&self) {
        if let Some(remote) = self.inner.link.present().remote() {
            remote.shared.connection.end("");
        }
        self.inner.link.take();
    }

    /// True while a server is there that has not ended.
    pub fn is_served(&self) -> bool {
        let present = self.inner.link.present();
        present.check_for_end();
        !present.is_dead()
    }
}

impl std::fmt::Debug for MovingClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl FileSystem for MovingClient {
    delegate!(to inner, except attach, detach, figures, notes, negative_lifetime, failure_domain,
        getattr, statfs);

    /// For the root directory, which every path leads through, a server that does not answer holds
    /// up few calls.
    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        let ask = || self.inner.getattr(cx, ino, fh);
        if (ino, fh) == (Ino::ROOT, None) { self.attr.get_or_request(ask) } else { ask() }
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        let ask = || self.inner.statfs(cx, ino);
        if ino == Ino::ROOT { self.space.get_or_request(ask) } else { ask() }
    }

    /// Frontends cache nothing, so that no notification is needed. A server of another process
    /// could also send so many that frontends do nothing else.
    fn attach(&self, _: Origin, _: Arc<dyn Notify>) {}

    fn detach(&self, origin: Origin) -> Result<()> {
        match self.inner.link.present().local_file_system() {
            Some(fs) => fs.detach(origin),
            None => Ok(()),
        }
    }

    fn negative_lifetime(&self, _: Origin) -> Duration {
        Duration::ZERO
    }

    /// The whole file system is one domain: a process that does not answer holds up only its own
    /// file system.
    fn failure_domain(&self, _: Ino, _: Option<Name<'_>>) -> Option<FailureDomain> {
        Some(FailureDomain(1))
    }

    /// Returns the figures of the present server.
    fn figures(&self) -> Vec<Figure> {
        let present = self.inner.link.present();
        if present.is_dead() { Vec::new() } else { present.fs().figures() }
    }

    fn notes(&self) -> Vec<String> {
        let present = self.inner.link.present();
        if present.is_dead() { Vec::new() } else { present.fs().notes() }
    }
}
