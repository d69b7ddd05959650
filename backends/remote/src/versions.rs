//! Versions of names and attributes in memory of the server.

use std::sync::Arc;

use defuse_fs::{Caller, Context, Fh, File, Ino, Versions};
use defuse_ring::versions::{Thing, VersionReader};
use defuse_wire::vendor::VERSIONS;

use super::{LaneUse, Shared};

/// The versions of a server.
struct Told(VersionReader);

impl Shared {
    /// The versions, if shared memory is used and the server has them.
    pub(super) fn ask_for_versions(&self) -> Option<Arc<dyn Versions>> {
        if self.options.lanes == LaneUse::Never {
            return None;
        }
        let cx = Context::new(Caller::default());
        let fd = self.mapping(&cx, File { ino: Ino::ROOT, fh: Fh(0) }, 0..0, VERSIONS);
        let fd = fd.map_err(|errno| log::debug!("no versions of names: {errno}")).ok()?;
        let reader = VersionReader::of(fd);
        let reader = reader.map_err(|error| log::warn!("the versions of names: {error}")).ok()?;
        Some(Arc::new(Told(reader)))
    }
}

impl Versions for Told {
    fn all(&self) -> Option<u64> {
        self.0.all()
    }

    fn after_one(&self, all: u64) -> u64 {
        VersionReader::after_one(all)
    }

    fn attributes(&self, ino: Ino) -> Option<u64> {
        self.0.of_thing(Thing::Attributes(ino.0))
    }

    fn rights(&self, ino: Ino) -> Option<u64> {
        self.0.of_thing(Thing::Rights(ino.0))
    }

    fn name(&self, dir: Ino, name: &[u8]) -> Option<u64> {
        self.0.of_thing(Thing::Name(dir.0, name))
    }
}
