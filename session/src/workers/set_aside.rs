//! Requests that the watchdog received because every worker was stuck.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use defuse_fs::Errno;
use defuse_wire::abi::OutHeader;
use zerocopy::IntoBytes;

use crate::transport::RequestPort;
use crate::user_share::CountGuard;

const HEADER_LEN: usize = size_of::<OutHeader>();
/// Most requests set aside; beyond that they stay with the kernel or the client.
const MOST: usize = 256;
/// Total bytes of queued requests from which on no further one is set aside.
const BYTES_MOST: usize = 64 << 20;

/// A request, and the device through which it has to be answered.
pub(crate) struct QueuedRequest {
    pub(crate) unique: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) port: Arc<dyn RequestPort>,
    /// True if the caller was interrupted while the request waited.
    pub(crate) interrupted: bool,
    /// True if the user of the client may have more such requests.
    pub(crate) has_room: bool,
    /// The bytes of the request, counted for that user.
    pub(crate) _queued: Option<CountGuard>,
}

impl QueuedRequest {
    /// Replies with `EINTR`, because the caller was interrupted.
    pub(crate) fn refuse_interrupted(self) {
        self.refuse(Errno::EINTR);
    }

    pub(crate) fn refuse(self, errno: Errno) {
        let error = -errno.raw();
        let header = OutHeader { len: HEADER_LEN as u32, error, unique: self.unique };
        // An error means that the caller no longer waits.
        let _ = self.port.send(&[IoSlice::new(header.as_bytes())]);
    }
}

/// The requests set aside, oldest first.
#[derive(Default)]
pub(crate) struct RequestBacklog {
    count: AtomicUsize,
    /// Bytes of all queued requests.
    bytes: AtomicUsize,
    queue: Mutex<VecDeque<QueuedRequest>>,
}

impl RequestBacklog {
    /// True where there is one. Costs a load.
    pub(crate) fn is_waiting(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count.load(Ordering::Acquire) >= MOST
            || self.bytes.load(Ordering::Relaxed) >= BYTES_MOST
    }

    pub(crate) fn push(&self, request: QueuedRequest) {
        let mut queue = self.lock();
        self.bytes.fetch_add(request.bytes.len(), Ordering::Relaxed);
        queue.push_back(request);
        self.count.store(queue.len(), Ordering::Release);
    }

    pub(crate) fn pop(&self) -> Option<QueuedRequest> {
        if !self.is_waiting() {
            return None;
        }
        let mut queue = self.lock();
        let request = queue.pop_front();
        let bytes = request.as_ref().map_or(0, |request| request.bytes.len());
        let before = self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        assert!(before >= bytes, "{bytes} bytes were set aside of {before}");
        self.count.store(queue.len(), Ordering::Release);
        request
    }

    /// Marks the request `unique`; false where it is not here.
    pub(crate) fn interrupt(&self, unique: u64) -> bool {
        if !self.is_waiting() {
            return false;
        }
        let mut queue = self.lock();
        let found = queue.iter_mut().find(|request| request.unique == unique);
        found.map(|request| request.interrupted = true).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<QueuedRequest>> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::BorrowedFd;

    use defuse_fs::Result;

    use super::*;
    use crate::transport::ReplyPort;

    struct BacklogTestPort;

    impl ReplyPort for BacklogTestPort {
        fn send(&self, _: &[IoSlice<'_>]) -> Result<()> {
            Ok(())
        }
    }

    impl RequestPort for BacklogTestPort {
        fn receive(&self, _: &mut [u8]) -> Result<usize> {
            Ok(0)
        }
        fn fd(&self) -> BorrowedFd<'_> {
            unreachable!("nothing is received")
        }
    }

    /// A request of `len` bytes whose reply goes nowhere.
    pub(crate) fn request(unique: u64, len: usize) -> QueuedRequest {
        let bytes = vec![0; len];
        let (port, interrupted, has_room) = (Arc::new(BacklogTestPort), false, true);
        QueuedRequest { unique, bytes, port, interrupted, has_room, _queued: None }
    }

    /// A client may send data that no worker takes.
    #[test]
    fn their_number_and_their_bytes_are_bounded() {
        for (len, most) in [(40, MOST), (1 << 20, BYTES_MOST >> 20)] {
            let aside = RequestBacklog::default();
            let count = (1..).take_while(|&unique| {
                aside.push(request(unique, len));
                !aside.is_full()
            });
            assert_eq!(count.count() + 1, most);
            assert_eq!(aside.pop().map(|first| first.unique), Some(1));
            assert!(!aside.is_full());
        }
    }
}
