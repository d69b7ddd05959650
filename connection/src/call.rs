//! The access to the file system behind a connection.
//!
//! The file system is private to this module, so that no method of the layer reaches it without
//! [`UncheckedFileSystem::check`], except through [`UncheckedFileSystem::unchecked`].

use defuse_fs::{Context, Errno, FileSystem, Ino, Result};

use crate::guard::CallGuard;
use crate::stopped::WatchedClient;

/// The file system that all clients share.
pub(crate) struct UncheckedFileSystem<F>(F);

/// A call whose caller and inodes were checked.
pub(crate) struct CheckedCall<'a, F> {
    /// The file system behind the connection.
    pub(crate) fs: &'a F,
    guard: Option<CallGuard<'a>>,
}

impl<F: FileSystem> UncheckedFileSystem<F> {
    pub(crate) fn new(fs: F) -> Self {
        UncheckedFileSystem(fs)
    }

    /// Checks a call by `cx` that names `inodes`. `EPERM` if the client acts for another user;
    /// `ESTALE` for inodes that the client did not get; `EIO` once after it has lost a lock.
    pub(crate) fn check<'a>(
        &'a self,
        client: &'a WatchedClient,
        cx: &'a Context<'_>,
        inodes: &[Ino],
    ) -> Result<CheckedCall<'a, F>> {
        let (who, ledger) = (&*client.who, &*client.ledger);
        if !who.may_act_as(cx.caller) {
            return Err(Errno::EPERM);
        }
        client.calls(cx.caller.pid)?;
        if !inodes.iter().all(|&ino| ledger.holds(ino)) {
            return Err(Errno::ESTALE);
        }
        let guard = || CallGuard { fs: &self.0, ledger, who, cx };
        Ok(CheckedCall { fs: &self.0, guard: (!who.is_root()).then(guard) })
    }

    /// Returns the file system, for calls that name neither a caller nor an inode, and for
    /// returning what the client holds by the ledger.
    pub(crate) fn unchecked(&self) -> &F {
        &self.0
    }
}

impl<F> CheckedCall<'_, F> {
    /// Checks the rights of the client's user; root may do everything.
    pub(crate) fn guard(&self, check: impl FnOnce(&CallGuard<'_>) -> Result<()>) -> Result<()> {
        self.guard.as_ref().map_or(Ok(()), check)
    }

    /// The guard, unless the user of the client is root.
    pub(crate) fn guard_if_user(&self) -> Option<&CallGuard<'_>> {
        self.guard.as_ref()
    }
}
