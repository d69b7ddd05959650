//! A session's dispatcher without threads and without a transport, for fuzzers of other crates.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{Errno, FileSystem, Interrupted, Origin, ReadSink, Result, WriteSource};
use defuse_probe::clock;
use defuse_wire::abi::InitIn;
use defuse_wire::request::Request;

use crate::dispatch::{ClientHooks, Dispatcher, Peer};
use crate::init::negotiate;
use crate::notify::KernelNotify;
use crate::options::SessionOptions;
use crate::transport::{Deferred, DeferredReply, Reply, ReplyPort};

/// Handles requests one after the other.
pub struct Handler(Arc<Dispatcher>);

impl Handler {
    /// Serves `fs` to a client, with everything negotiated but backing files.
    pub fn new(fs: Arc<dyn FileSystem>, client: ClientHooks) -> Handler {
        let init =
            InitIn { major: 7, minor: 45, flags: u32::MAX, flags2: u32::MAX, ..InitIn::default() };
        let options = SessionOptions { passthrough: false, ..SessionOptions::default() };
        let (_, negotiated) = negotiate(&init, &fs.caps(), &options).expect("INIT is agreed");
        let port: Arc<dyn ReplyPort> = Arc::new(Nowhere);
        let notify = Arc::new(KernelNotify::new(&port, negotiated.minor, false));
        let from = (fs, Origin::NONE);
        Handler(Arc::new(Dispatcher::new(from, notify, negotiated, &options, Peer::Client(client))))
    }

    /// Handles a request that wants an answer.
    pub fn handle(&self, request: &Request<'_>) -> Answer {
        let mut answer = Answer::default();
        self.0.handle(request, &mut answer, &Never, clock::now());
        answer
    }
}

struct Never;
impl Interrupted for Never {
    fn interrupted(&self) -> bool {
        false
    }
}

struct Nowhere;
impl ReplyPort for Nowhere {
    fn send(&self, _: &[std::io::IoSlice<'_>]) -> Result<()> {
        Ok(())
    }
}

/// The answer to a request.
#[derive(Default)]
pub struct Answer {
    /// The error, or 0 for success without a body; `None` for success with one.
    pub errno: Option<i32>,
    /// The body.
    pub bytes: Vec<u8>,
    /// The descriptor that was sent along.
    pub fd: Option<OwnedFd>,
}

impl Reply for Answer {
    fn send(&mut self, body: &[&[u8]]) -> Result<()> {
        self.bytes = body.concat();
        Ok(())
    }
    fn send_errno(&mut self, errno: i32) -> Result<()> {
        self.errno = Some(errno);
        Ok(())
    }
    fn send_descriptor(&mut self, fd: BorrowedFd<'_>) -> Result<()> {
        self.fd = Some(fd.try_clone_to_owned()?);
        Ok(())
    }
    fn room(&mut self, len: usize) -> &mut [u8] {
        self.bytes.resize(len, 0);
        &mut self.bytes
    }
    fn send_room(&mut self, len: usize) -> Result<()> {
        self.bytes.truncate(len);
        Ok(())
    }
    fn data(&mut self, _: usize) -> &mut dyn ReadSink {
        self.bytes.clear();
        self
    }
    fn send_data(&mut self) -> Result<()> {
        Ok(())
    }
    fn piped(&mut self) -> &mut dyn WriteSource {
        unreachable!("nothing is in a pipe")
    }
    fn defer(&mut self, _: Deferred) -> Box<dyn DeferredReply> {
        unreachable!("nothing is answered later")
    }
}

impl ReadSink for Answer {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
    fn put_zeros(&mut self, len: usize) -> Result<()> {
        self.bytes.resize(self.bytes.len() + len, 0);
        Ok(())
    }
    fn fill_from(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> Result<usize> {
        Err(Errno::ENOSYS)
    }
}
