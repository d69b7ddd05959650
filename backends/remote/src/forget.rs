//! Returned lookups. Nobody waits for them, so that they are sent in batches.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_fs::{Caller, Ino};
use zerocopy::IntoBytes;

use super::{Shared, lock};
use defuse_wire::abi::{self, ForgetOne, Opcode};
use defuse_wire::encode::Request;

/// Number of inodes in a batch.
const BATCH: usize = 64;
/// The number of requests without a reply. No other request uses it.
const UNANSWERED: u64 = 2;

/// Lookups that were returned and not yet sent.
#[derive(Default)]
pub(super) struct Forgets {
    items: Mutex<Vec<ForgetOne>>,
    /// A name was removed: the next returned lookup may be the last reference to the file.
    soon: AtomicBool,
}

impl Forgets {
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
        items.len() >= BATCH || self.soon.swap(false, Ordering::Relaxed)
    }

    /// Makes the next returned lookup be sent at once.
    pub(super) fn hurry(&self) {
        self.soon.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> Vec<ForgetOne> {
        std::mem::take(&mut *lock(&self.items))
    }
}

impl Shared {
    pub(super) fn forget(&self, ino: Ino, lookups: u64) {
        if self.forgets.add(ino, lookups) {
            self.send_forgets();
        }
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
            let head = Request::for_caller(Opcode::BatchForget, Caller::default(), Ino(0));
            self.tell(head.with(&args).with_bytes(items.as_bytes()))
        } else {
            items.iter().try_for_each(|item| {
                let head = Request::for_caller(Opcode::Forget, Caller::default(), Ino(item.nodeid));
                self.tell(head.with(&abi::ForgetIn { nlookup: item.nlookup }))
            })
        };
        // Fails only if the server has ended, and its lookups with it.
        if let Err(errno) = sent {
            log::debug!("{} lookups are not returned: {errno}", items.len());
        }
    }

    fn tell(&self, mut request: Request) -> defuse_fs::Result<()> {
        let head = request.finish(0);
        let at = std::mem::offset_of!(abi::InHeader, unique);
        head[at..at + 8].copy_from_slice(&UNANSWERED.to_ne_bytes());
        self.connection.tell(head, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_of_one_inode_are_added_up_and_a_batch_is_bounded() {
        let forgets = Forgets::default();
        assert!(!forgets.add(Ino(2), 1) && !forgets.add(Ino(2), 3) && !forgets.add(Ino::ROOT, 9));
        let items = forgets.take();
        assert_eq!(items, [ForgetOne { nodeid: 2, nlookup: 4 }]);
        let full = (2..).take_while(|&ino| !forgets.add(Ino(ino), 1)).count();
        assert_eq!(full, BATCH - 1);
    }

    #[test]
    fn after_a_name_was_removed_the_next_lookup_is_returned_at_once() {
        let forgets = Forgets::default();
        assert!(!forgets.add(Ino(2), 1));
        forgets.hurry();
        assert!(forgets.add(Ino(3), 1));
        assert!(!forgets.add(Ino(4), 1));
    }
}
