//! Versions of names and attributes, and names, in memory of the server.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use defuse_fs::{Caller, Context, Fh, File, Ino, Versions};
use defuse_ring::names::NameReader;
use defuse_ring::versions::{VersionReader, VersionedItem};
use defuse_wire::vendor::{TOLD_NAMES, VERSIONS};

use super::paths::SharedNames;
use super::{LaneUse, RemoteShared};

/// The versions of a server.
struct ServerVersions(VersionReader);

impl RemoteShared {
    /// The versions, if shared memory is used and the server has them.
    pub(super) fn request_versions(&self) -> Option<Arc<dyn Versions>> {
        if self.options.lanes == LaneUse::Never {
            return None;
        }
        let reader = self.memory_of_names(VERSIONS, VersionReader::from_fd)?;
        Some(Arc::new(ServerVersions(reader)))
    }

    /// Returns the name memory of clients with the rights of this one. `None` if the server has
    /// none.
    pub(super) fn request_shared_names(&self) -> SharedNames {
        self.memory_of_names(TOLD_NAMES, NameReader::from_fd).map(Arc::new)
    }

    fn memory_of_names<T>(
        &self,
        flag: u64,
        open: impl FnOnce(OwnedFd) -> rustix::io::Result<T>,
    ) -> Option<T> {
        let cx = Context::new(Caller::default());
        let fd = self.mapping(&cx, File { ino: Ino::ROOT, fh: Fh(0) }, 0..0, flag);
        let fd = fd.map_err(|errno| log::debug!("no memory of names: {errno}")).ok()?;
        open(fd).map_err(|error| log::warn!("the memory of names: {error}")).ok()
    }
}

impl Versions for ServerVersions {
    fn all(&self) -> Option<u64> {
        self.0.global_version()
    }

    fn successor_of(&self, all: u64) -> u64 {
        VersionReader::version_after_one(all)
    }

    fn attributes(&self, ino: Ino) -> Option<u64> {
        self.0.version_of(VersionedItem::Attributes(ino.0))
    }

    fn rights(&self, ino: Ino) -> Option<u64> {
        self.0.version_of(VersionedItem::Rights(ino.0))
    }

    fn name(&self, dir: Ino, name: &[u8]) -> Option<u64> {
        self.0.version_of(VersionedItem::Name(dir.0, name))
    }
}
