//! Changes of one inode that a server has acknowledged and not yet made durable.

use defuse_fs::{Errno, Result};

use super::table::ConnectionEpoch;

/// The changes of an inode. If the connection in which they were acknowledged has ended, they may
/// be lost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UnsyncedChanges {
    changes: u64,
    synced: u64,
    /// The connection of the oldest change that is not durable.
    since: ConnectionEpoch,
    /// The number of times that changes may have been lost.
    losses: u64,
    /// True if a call has failed for the last loss.
    reported: bool,
}

/// The losses that an open file has reported.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KnownLosses {
    /// The number of losses that the open file need not report.
    reported: u64,
    /// The number of losses before the file was opened.
    earlier: u64,
}

impl UnsyncedChanges {
    pub(super) fn record_change(&mut self, epoch: ConnectionEpoch) {
        self.since = if self.is_clean() { epoch } else { self.since.min(epoch) };
        self.changes += 1;
    }

    pub(super) fn is_clean(&self) -> bool {
        self.changes == self.synced
    }

    /// Returns the losses that a new open file need not report: all, unless no call has reported
    /// the last one.
    pub(super) fn losses_at_open(&mut self, epoch: ConnectionEpoch) -> KnownLosses {
        self.lose(epoch);
        let reported = self.losses - u64::from(self.losses > 0 && !self.reported);
        KnownLosses { reported, earlier: self.losses }
    }

    /// Counts changes of earlier connections as lost. True if there are some.
    pub(super) fn lose(&mut self, epoch: ConnectionEpoch) -> bool {
        let lost = !self.is_clean() && self.since < epoch;
        if lost {
            self.synced = self.changes;
            self.losses += 1;
            self.reported = false;
        }
        lost
    }

    pub(super) fn is_news(&mut self, heard: KnownLosses, epoch: ConnectionEpoch) -> bool {
        self.lose(epoch);
        heard.reported < self.losses
    }

    /// True for a loss while the file was open, which no call on it has reported. A sync reports an
    /// earlier loss, and a close does not.
    pub(super) fn is_news_at_close(&mut self, heard: KnownLosses, epoch: ConnectionEpoch) -> bool {
        self.is_news(heard, epoch) && heard.earlier < self.losses
    }

    pub(super) fn begin_sync(
        &mut self,
        heard: &mut KnownLosses,
        epoch: ConnectionEpoch,
    ) -> Result<u64> {
        if self.is_news(*heard, epoch) {
            heard.reported = self.losses;
            self.reported = true;
            return Err(Errno::EIO);
        }
        Ok(self.changes)
    }

    /// The first `count` changes are durable.
    pub(super) fn record_sync(&mut self, count: u64) {
        self.synced = self.synced.max(count);
    }

    /// All changes are durable.
    pub(super) fn record_sync_all(&mut self) {
        self.synced = self.changes;
    }

    /// Takes over the changes of a forgotten inode.
    pub(super) fn add(&mut self, other: &UnsyncedChanges) {
        if !other.is_clean() {
            self.record_change(other.since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_open_file_is_told_once_of_changes_that_may_be_lost() {
        let mut inode = UnsyncedChanges::default();
        let (mut one, mut two) = (inode.losses_at_open(1), inode.losses_at_open(1));
        inode.record_change(1);
        let count = inode.begin_sync(&mut one, 1).unwrap();
        // This change happens while the first one becomes durable.
        inode.record_change(1);
        inode.record_sync(count);
        assert_eq!(inode.begin_sync(&mut one, 2), Err(Errno::EIO));
        assert!(inode.begin_sync(&mut one, 2).is_ok());
        assert!(inode.is_news(two, 2));
        assert_eq!(inode.begin_sync(&mut two, 2), Err(Errno::EIO));
        let mut later = inode.losses_at_open(2);
        assert!(inode.begin_sync(&mut later, 2).is_ok());
    }

    #[test]
    fn durable_changes_are_not_lost() {
        let mut inode = UnsyncedChanges::default();
        let mut open = inode.losses_at_open(1);
        inode.record_change(1);
        let count = inode.begin_sync(&mut open, 1).unwrap();
        inode.record_sync(count);
        assert!(inode.begin_sync(&mut open, 2).is_ok());
        // A change of the second connection is no change of the first one.
        inode.record_change(2);
        assert!(inode.begin_sync(&mut open, 2).is_ok());
    }

    /// A second application took the device before any call had reported the losses of the first
    /// one.
    #[test]
    fn what_was_lost_stays_lost_when_everything_else_becomes_durable() {
        let mut inode = UnsyncedChanges::default();
        let mut open = inode.losses_at_open(1);
        inode.record_change(1);
        inode.lose(2);
        inode.record_change(2);
        inode.record_sync_all();
        assert_eq!(inode.begin_sync(&mut open, 3), Err(Errno::EIO));
        assert!(inode.begin_sync(&mut open, 3).is_ok());
    }

    #[test]
    fn a_loss_of_which_nobody_was_told_is_told_to_the_next_opener() {
        let mut inode = UnsyncedChanges::default();
        inode.record_change(1);
        assert!(inode.lose(2));
        let mut open = inode.losses_at_open(2);
        assert_eq!(inode.begin_sync(&mut open, 2), Err(Errno::EIO));
    }

    /// Every later open of the file, by any user, failed at close until a caller synced it.
    #[test]
    fn a_close_tells_of_a_loss_that_came_while_the_file_was_open_and_of_no_earlier_one() {
        let mut inode = UnsyncedChanges::default();
        let before = inode.losses_at_open(1);
        inode.record_change(1);
        // The loss is counted at the next check.
        let after = inode.losses_at_open(2);
        assert!(inode.is_news_at_close(before, 2) && inode.is_news_at_close(before, 2));
        assert!(!inode.is_news_at_close(after, 2) && inode.is_news(after, 2));
        inode.record_change(2);
        assert!(inode.is_news_at_close(after, 3));
    }
}
