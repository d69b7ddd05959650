//! A reply that stays in memory, to a request that did not arrive through a transport.

use std::os::fd::{BorrowedFd, OwnedFd};

use defuse_fs::{ReadSink, Result, WriteSource};

use super::dev::pread_full;
use super::{DeferredKind, DeferredReply, RequestReply};

/// The answer to a request.
#[derive(Default)]
pub struct RequestAnswer {
    /// The error, or 0 for success without a body; `None` for success with one.
    pub errno: Option<i32>,
    /// The body.
    pub bytes: Vec<u8>,
    /// The descriptor that was sent along.
    pub fd: Option<OwnedFd>,
}

impl RequestReply for RequestAnswer {
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

    fn write_source(&mut self) -> &mut dyn WriteSource {
        unreachable!("nothing is in a pipe")
    }

    fn defer(&mut self, _: DeferredKind) -> Box<dyn DeferredReply> {
        unreachable!("nothing is answered later")
    }
}

impl ReadSink for RequestAnswer {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn put_zeros(&mut self, len: usize) -> Result<()> {
        self.bytes.resize(self.bytes.len() + len, 0);
        Ok(())
    }

    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let filled = self.bytes.len();
        self.bytes.resize(filled + len, 0);
        let count = pread_full(fd, offset, &mut self.bytes[filled..]);
        self.bytes.truncate(filled + count.unwrap_or(0));
        count
    }
}
