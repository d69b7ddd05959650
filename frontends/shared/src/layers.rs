//! The layers of a server whose clients share memory with it.

use std::sync::Arc;

use defuse_connection::{PageSource, VersionSource};
use defuse_fs::FileSystem;
use defuse_session::TransportUpgrade;

use crate::counts::PartDivision;
use crate::lanes::{LaneLimits, LaneOffers};
use crate::paged::{PagedFileSystem, PagedOptions};
use crate::versioned::{UnseenChanges, VersionedFileSystem};

/// Settings of [`SharedLayers`].
pub struct SharedOptions {
    /// The memory for pages; `None` for a file system without pages.
    pub pages: Option<PagedOptions>,
    /// The parts whose pages are counted separately; `None` for one count of all.
    pub parts: Option<PartDivision>,
    /// The inodes that others may change, about which clients cache nothing.
    pub unseen: Option<UnseenChanges>,
    /// Limits of the memory for lanes.
    pub lanes: LaneLimits,
}

impl Default for SharedOptions {
    /// Everything that a server can offer, within default limits.
    fn default() -> Self {
        let (pages, lanes) = (Some(PagedOptions::default()), LaneLimits::default());
        SharedOptions { pages, parts: None, unseen: None, lanes }
    }
}

/// A file system with all that a server offers to clients on its machine. A call passes the pages,
/// the versions and then the file system; names have versions and files have pages only where all
/// changes come through the server.
pub struct SharedLayers {
    /// The uppermost layer, which the server serves.
    pub fs: Arc<dyn FileSystem>,
    /// The pages, unless the file system may change without them.
    pub paged: Option<Arc<PagedFileSystem>>,
    /// The versions, unless the file system may change without them.
    pub versioned: Option<Arc<VersionedFileSystem>>,
    lanes: Arc<LaneOffers>,
}

impl SharedLayers {
    /// Puts the layers on `fs` that it can have.
    pub fn build(fs: Arc<dyn FileSystem>, options: SharedOptions) -> SharedLayers {
        let versioned = VersionedFileSystem::wrap_except(Arc::clone(&fs), options.unseen);
        let fs = versioned.clone().map_or(fs, |versioned| versioned as Arc<dyn FileSystem>);
        let paged = options.pages.and_then(|pages| match options.parts {
            Some(parts) => PagedFileSystem::wrap_parts(Arc::clone(&fs), pages, parts),
            None => PagedFileSystem::wrap(Arc::clone(&fs), pages),
        });
        let fs = paged.clone().map_or(fs, |paged| paged as Arc<dyn FileSystem>);
        SharedLayers { fs, paged, versioned, lanes: Arc::new(LaneOffers::new(options.lanes)) }
    }

    /// The pages, as the server offers them.
    pub fn page_source(&self) -> Option<Arc<dyn PageSource>> {
        self.paged.clone().map(|paged| paged as _)
    }

    /// The versions, as the server offers them.
    pub fn version_source(&self) -> Option<Arc<dyn VersionSource>> {
        self.versioned.clone().map(|versioned| versioned as _)
    }

    /// The lanes, as the server offers them.
    pub fn transport(&self) -> Option<Arc<dyn TransportUpgrade>> {
        Some(Arc::clone(&self.lanes) as _)
    }
}
