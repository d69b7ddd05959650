//! A connection, and the state that the connections of one file system share.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use defuse_fs::{
    Context, Errno, File, FileSystem, Ino, LockKind, LockOwner, ReadArgs, ReadBuf, Result,
    SliceSink,
};

use crate::call::{CheckedCall, UncheckedFileSystem};
use crate::credentials::PeerCredentials;
use crate::inode_locks::InodeLocks;
use crate::ledger::{ConnectionLedger, InheritedInode, drop_locks};
use crate::maps::MappedFiles;
use crate::pages::NameSource;
use crate::quotas::{ServiceQuotas, UserAccounts};
use crate::steps::UnpublishedName;
use crate::stopped::{LockWatch, ProcessStatus, WatchedClient};
use crate::usage::ClientHoldings;

/// The state that all connections of one served file system share.
pub struct ServiceState {
    pub(crate) maps: MappedFiles,
    pub(crate) holds: InodeLocks,
    pub(crate) watch: LockWatch,
    accounts: UserAccounts,
    keeps_paths: bool,
    await_ended: Box<dyn Fn() + Send + Sync>,
}

impl ServiceState {
    /// The state of a file system without connections, which are limited by `quotas`.
    ///
    /// `await_ended` waits for a moment until the connections of clients that have ended are
    /// [closed](PeerConnection::close). A lock that such a client held is free then: a parent that
    /// learns of the end of a child expects that.
    pub fn new(
        quotas: ServiceQuotas,
        await_ended: impl Fn() + Send + Sync + 'static,
    ) -> Arc<ServiceState> {
        ServiceState::with(quotas, false, Box::new(await_ended))
    }

    /// Like [`new`](ServiceState::new), for a server that calls
    /// [`release_stopped`](ServiceState::release_stopped). The connections keep the paths of their
    /// open files for its messages.
    pub fn with_watcher(
        quotas: ServiceQuotas,
        await_ended: impl Fn() + Send + Sync + 'static,
    ) -> Arc<ServiceState> {
        ServiceState::with(quotas, true, Box::new(await_ended))
    }

    fn with(
        quotas: ServiceQuotas,
        keeps_paths: bool,
        await_ended: Box<dyn Fn() + Send + Sync>,
    ) -> Arc<ServiceState> {
        let (maps, holds) =
            (MappedFiles::new(quotas.connection.mapped_bytes), InodeLocks::default());
        let (accounts, watch) = (UserAccounts::new(quotas), LockWatch::default());
        Arc::new(ServiceState { maps, holds, watch, accounts, keeps_paths, await_ended })
    }

    /// Releases each lock for which a waiter has waited for `limit`, if all processes that share
    /// the lock were stopped at every call of this method during that time. Their next calls get
    /// `EIO` once, and the log names them and the file. Must be called several times in each
    /// `limit`. Returns the number of locks.
    ///
    /// `look` returns the kernel's information about a process.
    pub fn release_stopped(
        &self,
        fs: &dyn FileSystem,
        limit: Duration,
        look: &dyn Fn(u32) -> Option<ProcessStatus>,
    ) -> usize {
        self.watch.release(fs, (limit, Instant::now()), look)
    }

    /// The number of locks that were released because their processes were stopped, since the
    /// beginning.
    pub fn locks_lost(&self) -> u64 {
        self.watch.count_released()
    }

    /// True where no client has mapped a file.
    pub fn maps_nothing(&self) -> bool {
        self.maps.is_empty()
    }
}

/// A [`FileSystem`] for one client, around the file system that all clients share.
pub struct PeerConnection<F> {
    pub(crate) behind: UncheckedFileSystem<F>,
    pub(crate) service: Arc<ServiceState>,
    pub(crate) who: Arc<PeerCredentials>,
    pub(crate) ledger: Arc<ConnectionLedger>,
    /// Names that are published later in the name memory.
    pub(crate) untold: Mutex<Vec<UnpublishedName>>,
    client: Arc<WatchedClient>,
}

impl<F: FileSystem + Clone> PeerConnection<F> {
    /// A connection of a client that holds nothing yet.
    pub fn new(fs: F, service: Arc<ServiceState>, who: PeerCredentials) -> Self {
        let accounts = &service.accounts;
        let (limits, account) = (accounts.quotas.connection, accounts.account_of(who.uid));
        let ledger = ConnectionLedger::new(limits, account, service.keeps_paths);
        PeerConnection::with(fs, service, Arc::new(who), ledger)
    }

    /// Returns a connection for a child process, which begins with everything that this connection
    /// holds, except the record locks of the process. It acts for the same user.
    ///
    /// # Errors
    ///
    /// `ENFILE`, `EMFILE` and `ENOMEM` where the user may not have all that twice.
    pub fn copy(&self) -> Result<Self> {
        let ledger = self.ledger.copy()?;
        ledger.keep_maps(|ino, users| self.service.maps.add_users(ino, users));
        Ok(self.with_ledger(Arc::clone(&self.who), ledger))
    }

    /// A connection for the next program of the process, which acts for `who`. It holds nothing,
    /// and may [take over](PeerConnection::take_over) from this one until it is
    /// [settled](PeerConnection::settle).
    #[must_use]
    pub fn prepare_exec(&self, who: PeerCredentials) -> Self {
        let account = self.service.accounts.account_of(who.uid);
        self.with_ledger(Arc::new(who), self.ledger.prepare_exec(account))
    }

    fn with_ledger(&self, who: Arc<PeerCredentials>, ledger: ConnectionLedger) -> Self {
        let fs = self.behind.unchecked().clone();
        PeerConnection::with(fs, Arc::clone(&self.service), who, ledger)
    }

    fn with(
        fs: F,
        service: Arc<ServiceState>,
        who: Arc<PeerCredentials>,
        ledger: ConnectionLedger,
    ) -> Self {
        let ledger = Arc::new(ledger);
        let client = WatchedClient::new(Arc::clone(&who), Arc::clone(&ledger));
        service.watch.add(&client);
        let untold = Mutex::default();
        PeerConnection {
            behind: UncheckedFileSystem::new(fs),
            service,
            who,
            ledger,
            untold,
            client,
        }
    }
}

impl<F: FileSystem> PeerConnection<F> {
    /// From now on the client may name every inode, by a number that it learned from another
    /// process with the same file system. For a client that is trusted with the whole file system,
    /// and a file system that accepts such numbers
    /// ([`Shortcuts::resolve`](defuse_fs::Shortcuts::resolve)).
    pub fn trust_numbers(&self) {
        self.ledger.allow_any_inode();
    }

    /// From now on the client shares these names, which are for clients with its
    /// [rights](PeerConnection::credentials).
    pub fn share(&self, names: Arc<dyn NameSource>) {
        self.ledger.share(names);
    }

    /// Returns a descriptor of the name memory of the client.
    ///
    /// # Errors
    ///
    /// `ENOSYS` if there is none; the errors of open(2).
    pub fn shared_names(&self) -> Result<OwnedFd> {
        self.ledger.names().ok_or(Errno::ENOSYS)?.memory()
    }

    /// The client.
    pub fn credentials(&self) -> &PeerCredentials {
        &self.who
    }

    /// Returns the objects that the client holds now.
    pub fn holdings(&self) -> ClientHoldings {
        self.client.holdings()
    }

    /// Takes over an inode or an open file from the connection for whose [next
    /// program](PeerConnection::prepare_exec) this connection was made.
    ///
    /// # Errors
    ///
    /// `EPERM` if this connection takes over from no other, or is settled; `ESTALE` and `EBADF` for
    /// objects that the other connection does not have.
    pub fn take_over(&self, inherited: &InheritedInode) -> Result<()> {
        self.ledger.take_over(inherited)
    }

    /// Ends the right to take over.
    pub fn settle(&self) {
        self.ledger.settle();
    }

    /// Maps an open file: returns the memory that all its mappings share, filled with `len` bytes
    /// at `offset` at least. An offset in the file is the offset in the memory. The client releases
    /// it by [`unmap`](PeerConnection::unmap).
    ///
    /// # Errors
    ///
    /// `EPERM`, `ESTALE` and `EBADF` as for every call; `EACCES` where the file is not open for
    /// reading, or not for writing and the mapping `writes`; `EOVERFLOW` beyond the longest file;
    /// `ENOMEM` beyond the limit; `ENOSYS` for a file system that only takes submissions.
    pub fn map(
        &self,
        cx: &Context<'_>,
        file: File,
        (offset, len): (u64, u64),
        writes: bool,
    ) -> Result<OwnedFd> {
        let call = self.check(cx, &[file.ino])?;
        let modes = self.ledger.modes(file).ok_or(Errno::EBADF)?;
        if !modes.reads || writes && !modes.writes {
            return Err(Errno::EACCES);
        }
        if call.fs.caps().submits {
            // File systems that only take submissions refuse such a read, even of zero bytes.
            let mut nothing = SliceSink::new(&mut []);
            let mut out = ReadBuf::new(&mut nothing, 0);
            let lower = self.lower(file)?;
            if call.fs.read(cx, lower, ReadArgs::default(), &mut out) == Err(Errno::ENOSYS) {
                return Err(Errno::ENOSYS);
            }
        }
        let end = offset.checked_add(len).filter(|&end| end <= i64::MAX as u64);
        let range: Range<u64> = offset..end.ok_or(Errno::EOVERFLOW)?;
        let memory = self.ledger.map(file.ino, len, |room| {
            self.service.maps.map(call.fs, file.ino, range, (writes, room))
        })?;
        Ok(memory.fd)
    }

    /// True if a client has mapped the file.
    pub(crate) fn is_mapped(&self, ino: Ino) -> bool {
        self.service.maps.with(ino, |_| ()).is_some()
    }

    /// Ends one mapping of a file. The changes through it are in the file system afterwards.
    ///
    /// # Errors
    ///
    /// `EPERM` and `ESTALE` as for every call; `EINVAL` where the client has no mapping of the
    /// file. The mapping has ended, and changes are not in the file system, with the errors of a
    /// write: `ENOSPC`.
    pub fn unmap(&self, cx: &Context<'_>, ino: Ino) -> Result<()> {
        let call = self.check(cx, &[ino])?;
        if !self.ledger.record_unmap(ino) {
            return Err(Errno::EINVAL);
        }
        let written = self.service.maps.release(call.fs, ino, 1);
        if written.is_err() {
            // This call has reported the loss to the client.
            let _ = self.service.maps.take_loss(ino);
        }
        written
    }

    /// Releases everything that the client still holds and no other client of its family holds: the
    /// client has ended. Must be called once, after the last call.
    pub fn close(&self) {
        let fs = self.behind.unchecked();
        for (ino, users) in self.ledger.take_maps() {
            let _ = self.service.maps.release(fs, ino, users);
        }
        self.ledger.take_back(fs);
    }

    /// Asserts the invariants of the ledger, for fuzzers.
    pub fn audit(&self) {
        self.ledger.audit();
    }

    pub(crate) fn check<'a>(
        &'a self,
        cx: &'a Context<'_>,
        inodes: &[Ino],
    ) -> Result<CheckedCall<'a, F>> {
        self.behind.check(&self.client, cx, inodes)
    }

    #[cfg(test)]
    pub(crate) fn client(&self) -> &Arc<WatchedClient> {
        &self.client
    }

    /// True if the client has lost a lock, and no call has reported it yet.
    pub(crate) fn has_lost(&self) -> bool {
        self.client.has_lost()
    }

    pub(crate) fn is_guarded(&self) -> bool {
        !self.who.is_root()
    }

    /// Returns the open file by its handle in the file system: `EBADF` if the client does not have
    /// it.
    pub(crate) fn lower(&self, file: File) -> Result<File> {
        Ok(File { ino: file.ino, fh: self.ledger.handle(file)? })
    }

    pub(crate) fn await_ended(&self) {
        (self.service.await_ended)();
    }

    /// Drops locks of an open file. The owners have the numbers that the client chose.
    pub(crate) fn drop_locks(&self, file: File, locks: &[(LockKind, LockOwner)]) {
        for &(kind, owner) in locks {
            drop_locks(self.behind.unchecked(), file, kind, self.ledger.owner(owner));
        }
    }
}
