//! A session's dispatcher without threads and without a transport, for fuzzers of other crates.

use std::sync::Arc;

use defuse_fs::{FileSystem, InterruptCheck, Origin, Result};
use defuse_probe::clock;
use defuse_wire::abi::InitIn;
use defuse_wire::request::DecodedRequest;

use crate::dispatch::{ClientHooks, Dispatcher, SessionPeer};
use crate::init::negotiate;
use crate::notify::KernelNotify;
use crate::options::SessionOptions;
use crate::transport::{ReplyPort, RequestAnswer};

/// Handles requests one after the other.
pub struct Handler(Arc<Dispatcher>);

impl Handler {
    /// Serves `fs` to a client, with all capabilities negotiated except backing files.
    pub fn new(fs: Arc<dyn FileSystem>, client: ClientHooks) -> Handler {
        let init =
            InitIn { major: 7, minor: 45, flags: u32::MAX, flags2: u32::MAX, ..InitIn::default() };
        let options = SessionOptions { passthrough: false, ..SessionOptions::default() };
        let (_, negotiated) = negotiate(&init, &fs.caps(), &options).expect("INIT is agreed");
        let port: Arc<dyn ReplyPort> = Arc::new(Nowhere);
        let notify = Arc::new(KernelNotify::new(&port, negotiated.minor, false));
        let from = (fs, Origin::NONE);
        Handler(Arc::new(Dispatcher::new(
            from,
            notify,
            negotiated,
            &options,
            SessionPeer::Client(client),
        )))
    }

    /// Handles a request that needs a reply.
    pub fn handle(&self, request: &DecodedRequest<'_>) -> RequestAnswer {
        let mut answer = RequestAnswer::default();
        self.0.handle(request, &mut answer, &Never, clock::now());
        answer
    }
}

struct Never;
impl InterruptCheck for Never {
    fn is_interrupted(&self) -> bool {
        false
    }
}

struct Nowhere;
impl ReplyPort for Nowhere {
    fn send(&self, _: &[std::io::IoSlice<'_>]) -> Result<()> {
        Ok(())
    }
}
