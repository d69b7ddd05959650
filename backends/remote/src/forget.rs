//! Returned lookups. No caller waits for them, so that they are sent in batches.
//!
//! A server may forget an inode with its last lookup, and a program with several threads may handle
//! FORGET before an earlier RELEASE. So the lookups of an inode stay here until its RELEASE is
//! answered, as in the kernel, where an open file holds the inode (`fuse_release_end` in
//! fs/fuse/file.c). libfuse ends a program that gets RELEASE for an inode that is forgotten ("node
//! not found").

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use defuse_fs::{Caller, Ino};
use zerocopy::IntoBytes;

use super::{RemoteShared, lock};
use defuse_wire::abi::{self, ForgetOne, Opcode};
use defuse_wire::encode::EncodedRequest;

/// Number of inodes in a batch.
const BATCH: usize = 64;
/// The number of requests without a reply. No other request uses it.
const UNANSWERED: u64 = 2;

/// Lookups that were returned and not yet sent.
#[derive(Default)]
pub(super) struct PendingForgets {
    items: Mutex<Vec<ForgetOne>>,
    /// The inodes of the RELEASE and RELEASEDIR requests without a reply, at most one for each slot
    /// of a connection. Locked after `items`.
    releasing: Mutex<Vec<Ino>>,
    /// A name was removed: the next returned lookup may be the last reference to the file.
    soon: AtomicBool,
}

impl PendingForgets {
    /// Adds `lookups` of `ino`. Returns true if the batch must be sent.
    pub(super) fn add(&self, ino: Ino, lookups: u64) -> bool {
        if lookups == 0 || ino == Ino::ROOT {
            return false;
        }
        let mut items = lock(&self.items);
        match items.iter_mut().find(|item| item.nodeid == ino.0) {
            Some(item) => item.nlookup = item.nlookup.saturating_add(lookups),
            None => items.push(ForgetOne { nodeid: ino.0, nlookup: lookups }),
        }
        // Items that wait for a reply may be more than a batch.
        items.len().is_multiple_of(BATCH) || self.soon.load(Ordering::Relaxed)
    }

    /// Keeps the lookups of `ino` until [`end_release`](Self::end_release).
    pub(super) fn begin_release(&self, ino: Ino) {
        lock(&self.releasing).push(ino);
    }

    /// One RELEASE of `ino` was answered.
    pub(super) fn end_release(&self, ino: Ino) {
        let mut releasing = lock(&self.releasing);
        if let Some(at) = releasing.iter().position(|other| *other == ino) {
            releasing.swap_remove(at);
        }
    }

    /// True if the next returned lookup is sent at once.
    pub(super) fn is_urgent(&self) -> bool {
        self.soon.load(Ordering::Relaxed)
    }

    /// True if lookups wait that should be sent at once.
    fn has_overdue(&self) -> bool {
        self.is_urgent() && !lock(&self.items).is_empty()
    }

    /// Makes the next returned lookup be sent at once.
    pub(super) fn send_next_at_once(&self) {
        self.soon.store(true, Ordering::Relaxed);
    }

    /// The lookups that may be sent.
    fn take(&self) -> Vec<ForgetOne> {
        let mut items = lock(&self.items);
        let releasing = lock(&self.releasing);
        let waits = |item: &ForgetOne| releasing.contains(&Ino(item.nodeid));
        let (later, now): (Vec<_>, Vec<_>) = items.drain(..).partition(waits);
        *items = later;
        self.soon.store(self.soon.load(Ordering::Relaxed) && !items.is_empty(), Ordering::Relaxed);
        now
    }
}

impl RemoteShared {
    pub(super) fn forget(&self, ino: Ino, lookups: u64) {
        if self.forgets.add(ino, lookups) {
            self.send_forgets();
        }
    }

    /// A name in `dir` was removed. Lookups that were returned before may have been the last
    /// references to its file, and so may be the next one.
    pub(super) fn record_removed_name(&self, dir: Ino) {
        self.close_removed(dir);
        self.forgets.send_next_at_once();
        self.send_overdue();
        self.forgets.send_next_at_once();
    }

    /// Sends lookups that should have been sent, and waited for the answer to a RELEASE.
    pub(super) fn send_overdue(&self) {
        if self.forgets.has_overdue() {
            // With lanes, no other thread receives these replies soon.
            self.connection.drain();
            self.send_forgets();
        }
    }

    /// Sends RELEASE or RELEASEDIR of `ino`, and does not wait for the answer.
    pub(super) fn send_release(
        &self,
        ino: Ino,
        mut request: EncodedRequest,
    ) -> defuse_fs::Result<()> {
        self.forgets.begin_release(ino);
        let forgets = Arc::clone(&self.forgets);
        let answered = Box::new(move |_: defuse_fs::Result<&[u8]>| forgets.end_release(ino));
        let sent = self.connection.request_in_background(request.finish(0), answered);
        sent.inspect_err(|_| self.forgets.end_release(ino))
    }

    /// Sends the batch.
    pub(super) fn send_forgets(&self) {
        let items = self.forgets.take();
        if items.is_empty() {
            return;
        }
        // BATCH_FORGET exists since 7.16.
        let sent = if items.len() > 1 && self.agreement.minor >= 16 {
            let args = abi::BatchForgetIn { count: items.len() as u32, dummy: 0 };
            let head = EncodedRequest::for_caller(Opcode::BatchForget, Caller::default(), Ino(0));
            self.send_oneway(head.with(&args).with_bytes(items.as_bytes()))
        } else {
            items.iter().try_for_each(|item| {
                let head =
                    EncodedRequest::for_caller(Opcode::Forget, Caller::default(), Ino(item.nodeid));
                self.send_oneway(head.with(&abi::ForgetIn { nlookup: item.nlookup }))
            })
        };
        // Fails only if the server has ended, and its lookups with it.
        if let Err(errno) = sent {
            log::debug!("{} lookups are not returned: {errno}", items.len());
        }
    }

    fn send_oneway(&self, mut request: EncodedRequest) -> defuse_fs::Result<()> {
        let head = request.finish(0);
        let at = std::mem::offset_of!(abi::InHeader, unique);
        head[at..at + 8].copy_from_slice(&UNANSWERED.to_ne_bytes());
        self.connection.send_oneway(head, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_of_one_inode_are_added_up_and_a_batch_is_bounded() {
        let forgets = PendingForgets::default();
        assert!(!forgets.add(Ino(2), 1) && !forgets.add(Ino(2), 3) && !forgets.add(Ino::ROOT, 9));
        let items = forgets.take();
        assert_eq!(items, [ForgetOne { nodeid: 2, nlookup: 4 }]);
        let full = (2..).take_while(|&ino| !forgets.add(Ino(ino), 1)).count();
        assert_eq!(full, BATCH - 1);
    }

    #[test]
    fn lookups_of_an_inode_wait_until_its_release_is_answered() {
        let forgets = PendingForgets::default();
        forgets.begin_release(Ino(2));
        forgets.begin_release(Ino(2));
        forgets.send_next_at_once();
        assert!(forgets.add(Ino(2), 1) && forgets.add(Ino(3), 1));
        assert_eq!(forgets.take(), [ForgetOne { nodeid: 3, nlookup: 1 }]);
        forgets.end_release(Ino(2));
        assert_eq!(forgets.take(), []);
        forgets.end_release(Ino(2));
        // The lookups that waited must still be sent soon.
        assert!(forgets.add(Ino(4), 1));
        let numbers: Vec<_> = forgets.take().iter().map(|item| item.nodeid).collect();
        assert_eq!(numbers, [2, 4]);
        assert!(!forgets.add(Ino(5), 1));
    }

    #[test]
    fn after_a_name_was_removed_the_next_lookup_is_returned_at_once() {
        let forgets = PendingForgets::default();
        assert!(!forgets.add(Ino(2), 1));
        forgets.send_next_at_once();
        assert!(forgets.add(Ino(3), 1));
        assert_eq!(forgets.take().len(), 2);
        assert!(!forgets.add(Ino(4), 1));
    }
}
