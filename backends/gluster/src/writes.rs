//! Writes that GlusterFS's client has acknowledged, but the servers may not have yet (its
//! `write-behind`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The acknowledged writes of an open file.
#[derive(Debug, Default)]
pub struct WriteTracker {
    /// Writes were acknowledged since the last flush.
    unflushed: AtomicBool,
    /// A write has begun.
    has_begun: AtomicBool,
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

/// The side that acknowledges a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteAnswer {
    /// The servers have the write.
    FromServers,
    /// GlusterFS's client may have kept the write.
    FromClient,
}

impl WriteAnswer {
    /// The flags of a write for libgfapi, whose `write-behind` keeps no write with `O_DIRECT`. The
    /// servers write as the file was opened.
    pub fn flags(self) -> i32 {
        match self {
            WriteAnswer::FromServers => libc::O_DIRECT,
            WriteAnswer::FromClient => 0,
        }
    }
}

impl WriteTracker {
    /// Records that a write begins. The first one of an open file, which often is the only one,
    /// goes through to the servers: the file needs no flush if no other write follows.
    pub fn begin(&self) -> WriteAnswer {
        match self.has_begun.swap(true, Ordering::AcqRel) {
            false => WriteAnswer::FromServers,
            true => WriteAnswer::FromClient,
        }
    }

    /// Records that a write was acknowledged. Its caller does not know it yet.
    pub fn add(&self, at: WritePosition, by: WriteAnswer) {
        if by == WriteAnswer::FromServers {
            return;
        }
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
        writes.add(WritePosition::End, WriteAnswer::FromClient);
        assert_eq!(writes.unacknowledged_writes(), None);
        writes.add(WritePosition::Offset, WriteAnswer::FromClient);
        writes.add(WritePosition::Offset, WriteAnswer::FromClient);
        assert_eq!(writes.unacknowledged_writes(), Some(2));
        writes.add(WritePosition::Offset, WriteAnswer::FromClient);
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
        writes.add(WritePosition::Offset, WriteAnswer::FromClient);
        writes.add(WritePosition::End, WriteAnswer::FromClient);
        assert!(writes.take_unflushed() && !writes.take_unflushed());
    }

    #[test]
    fn the_first_write_of_an_open_file_needs_no_flush() {
        let writes = WriteTracker::default();
        let first = writes.begin();
        assert_eq!((first, first.flags()), (WriteAnswer::FromServers, libc::O_DIRECT));
        writes.add(WritePosition::Offset, first);
        assert!(!writes.take_unflushed() && writes.unacknowledged_writes().is_none());
        let second = writes.begin();
        assert_eq!((second, second.flags()), (WriteAnswer::FromClient, 0));
        writes.add(WritePosition::Offset, second);
        assert!(writes.take_unflushed() && writes.unacknowledged_writes() == Some(1));
    }
}
