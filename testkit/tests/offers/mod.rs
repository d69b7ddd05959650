//! A server with all that `defuse serve --shared` offers.

use std::sync::Arc;

use defuse_fs::FileSystem;
use defuse_remote::{LaneUse, RemoteOptions};
use defuse_shared::{SharedLayers, SharedOptions};
use defuse_socket::ServerOptions;

use crate::served::TestServer;

/// Serves `fs` by lanes, with pages and versions where it can have them.
pub fn serve(fs: Arc<dyn FileSystem>) -> TestServer {
    let layers = SharedLayers::build(fs, SharedOptions::default());
    let options = ServerOptions {
        lanes: layers.transport(),
        pages: layers.page_source(),
        versions: layers.version_source(),
        ..ServerOptions::default()
    };
    let clients = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    TestServer::new(layers.fs, options, clients)
}
