//! Writes that GlusterFS's client has acknowledged, but the servers may not have yet (its `write-behind`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The acknowledged writes of an open file.
#[derive(Debug, Default)]
pub struct WriteTracker {
    /// Writes were acknowledged since the last flush.
    unflushed: AtomicBool,
    /// Number of acknowledged writes at an offset.
    placed: AtomicU64,
    /// Number of writes at an offset that the servers have for certain.
    placed_on_servers: AtomicU64,
}

/// The place of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePosition {
    Offset,
    End,
}

impl WriteTracker {
    /// Records that a write was acknowledged. Its caller does not know it yet.
    pub fn add(&self, at: WritePosition) {
        if at == WritePosition::Offset {
            self.placed.fetch_add(1, Ordering::AcqRel);
        }
        self.unflushed.store(true, Ordering::Release);
    }

    /// True if a flush is needed. The caller must perform it.
    pub fn take_unflushed(&self) -> bool {
        self.unflushed.swap(false, Ordering::AcqRel)
    }

    /// The number of writes at an offset, if the servers may not have all of them.
    pub fn unacknowledged_writes(&self) -> Option<u64> {
        let on_servers = self.placed_on_servers.load(Ordering::Acquire);
        let placed = self.placed.load(Ordering::Acquire);
        (placed > on_servers).then_some(placed)
    }

    /// Records that the servers have this number of writes at an offset.
    pub fn record_durable(&self, placed: u64) {
        self.placed_on_servers.fetch_max(placed, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_during_a_wait_is_waited_for_by_the_next_one() {
        let writes = WriteTracker::default();
        assert_eq!(writes.unacknowledged_writes(), None);
        writes.add(WritePosition::End);
        assert_eq!(writes.unacknowledged_writes(), None);
        writes.add(WritePosition::Offset);
        writes.add(WritePosition::Offset);
        assert_eq!(writes.unacknowledged_writes(), Some(2));
        writes.add(WritePosition::Offset);
        assert_eq!(
            writes.unacknowledged_writes(),
            Some(3),
            "a second wait begins before the first has ended"
        );
        writes.record_durable(2);
        assert_eq!(writes.unacknowledged_writes(), Some(3));
        writes.record_durable(3);
        writes.record_durable(2);
        assert_eq!(writes.unacknowledged_writes(), None);
    }

    #[test]
    fn a_flush_is_needed_once_after_writes() {
        let writes = WriteTracker::default();
        assert!(!writes.take_unflushed());
        writes.add(WritePosition::Offset);
        writes.add(WritePosition::End);
        assert!(writes.take_unflushed() && !writes.take_unflushed());
    }
}
