//! A server with all that `defuse serve --shared` offers.

use std::sync::Arc;

use defuse_connection::VersionSource;
use defuse_fs::FileSystem;
use defuse_remote::{LaneUse, RemoteOptions};
use defuse_shared::{LaneOffers, PagedFileSystem, PagedOptions, VersionedFileSystem};
use defuse_socket::ServerOptions;

use crate::served::TestServer;

/// Serves `fs` by lanes, with pages and versions where it can have them.
pub fn serve(fs: Arc<dyn FileSystem>) -> TestServer {
    let lines = Some(Arc::new(LaneOffers::default()) as _);
    let versioned = VersionedFileSystem::wrap(Arc::clone(&fs));
    let fs = versioned.clone().map_or(fs, |versioned| versioned as _);
    let paged = PagedFileSystem::wrap(Arc::clone(&fs), PagedOptions::default());
    let fs = paged.clone().map_or(fs, |paged| paged as _);
    let pages = paged.map(|paged| paged as _);
    let versions = versioned.map(|versioned| versioned as Arc<dyn VersionSource>);
    let options = ServerOptions { lines, pages, versions, ..ServerOptions::default() };
    let clients = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    TestServer::new(fs, options, clients)
}
