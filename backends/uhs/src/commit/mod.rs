//! Commit groups: changes of inodes become durable together, with neither a journal nor a bitmap.
//!
//! This module does no I/O. [`CommitState::close`] turns changes into slots to write,
//! [`CommitState::durable`] records that they survive a power failure, and [`recover`] turns the
//! slots of a device into its current state. DESIGN.md has the rule and the reasons; each sentence
//! of the rule that a test can switch off is a field of [`CommitRules`].

mod copies;
mod groups;
mod recover;
mod slots;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::crashes;

pub(crate) use groups::InodeChange;
pub(crate) use groups::{ClosedGroup, CommitState, NoSlots};
pub(crate) use recover::{CurrentCopy, RecoveredState, ScannedSlot, recover};
pub(crate) use slots::SlotTable;

use crate::format::UNIT_BLOCKS;
use crate::format::superblock::CHUNKS;

/// The sentences of the commit rule that tests switch off, to prove that the crash suite notices.
/// Every other build has all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommitRules {
    /// A slot that a group freed is used again only when the group is durable.
    pub(crate) reuse_waits_for_group: bool,
    /// A freed slot is used again only when a durable slot or superblock states that the group is
    /// durable.
    pub(crate) reuse_waits_for_mention: bool,
    /// A removal record stays until every older copy of its inode is durably overwritten.
    pub(crate) removals_outlive_copies: bool,
    /// A removal record stays until a durable slot states that it is not needed.
    pub(crate) removals_wait_for_mention: bool,
    /// A group counts only when all its members are there.
    pub(crate) groups_are_counted: bool,
    /// Slots of groups that do not count are cleared before any slot is used again.
    pub(crate) void_slots_are_zeroed: bool,
    /// The newest group that counts is in the superblock before slots are used again.
    pub(crate) mount_is_recorded: bool,
    /// A mount flushes before it records: the content that it read may lie only in the cache of the
    /// device.
    pub(crate) mount_flushes_first: bool,
    /// A unit of slots leaves the superblock before data uses its blocks.
    pub(crate) units_leave_first: bool,
    /// The table of chunks is durable before a superblock points to it.
    pub(crate) tables_come_first: bool,
    /// Data is durable before an inode that points to it is written.
    pub(crate) data_is_first: bool,
    /// A group waits for data that was begun before it closed.
    pub(crate) groups_wait_for_early: bool,
    /// A group that frees blocks waits for data that was begun to be written there.
    pub(crate) lost_blocks_wait_for_early: bool,
    /// A data group is overtaken only by groups that write none of its inodes.
    pub(crate) data_groups_keep_order: bool,
    /// A sync of a file waits for the data group that has it.
    pub(crate) syncs_wait_for_data_groups: bool,
    /// Data is synced without a group only if size and blocks are as a group recorded them.
    pub(crate) syncs_in_place_know_extents: bool,
    /// A group closes when no data in place is on its way.
    pub(crate) groups_wait_for_data_in_place: bool,
    /// Syncs in place of one file write one after the other.
    pub(crate) syncs_in_place_take_turns: bool,
    /// Data in place is flushed by whoever may be acknowledged before its own flush.
    pub(crate) syncs_in_place_are_flushed: bool,
    /// A block that a group freed is used again only when the group is durable.
    pub(crate) blocks_wait_for_group: bool,
    /// The end of a file that was cut becomes zeros in another block.
    pub(crate) tails_move: bool,
    /// A block that a durable inode has at another page of the file is not overwritten.
    pub(crate) shifted_blocks_move: bool,
    /// The data of a file waits for another group only if nothing else of the inode has changed.
    pub(crate) changes_do_not_wait: bool,
    /// The data of a file waits for another group only if the file has given up no block.
    pub(crate) lost_blocks_do_not_wait: bool,
    /// A snapshot is void before anything else is written.
    pub(crate) snapshots_are_voided: bool,
    /// A clean end leaves a snapshot.
    pub(crate) snapshots: bool,
    /// Inodes that one thread changes before it writes the group.
    pub(crate) full_group: usize,
    /// Pages to be written for which a file may wait while another one is synced.
    pub(crate) waiting_pages: usize,
    /// Pages that are written in place by a sync of data at most.
    pub(crate) pages_in_place: usize,
    /// Pages of a run of new data that is written before its group closes.
    pub(crate) early_run: u64,
    /// Chunks that the superblock lists itself.
    pub(crate) listed_chunks: usize,
    /// Slots that may be used: with few of them, each is used again soon.
    pub(crate) usable: usize,
    /// Bytes that a scan keeps of the bodies of inodes: beyond them, slots are read a second time.
    pub(crate) kept: u64,
    /// The times of inodes come from a clock that every look steps, so that a seed repeats all
    /// bytes.
    pub(crate) stepped_time: bool,
}

impl CommitRules {
    /// The whole rule.
    pub(crate) const ALL: CommitRules = CommitRules {
        reuse_waits_for_group: true,
        reuse_waits_for_mention: true,
        removals_outlive_copies: true,
        removals_wait_for_mention: true,
        groups_are_counted: true,
        void_slots_are_zeroed: true,
        mount_is_recorded: true,
        mount_flushes_first: true,
        units_leave_first: true,
        tables_come_first: true,
        data_is_first: true,
        groups_wait_for_early: true,
        lost_blocks_wait_for_early: true,
        data_groups_keep_order: true,
        syncs_wait_for_data_groups: true,
        syncs_in_place_know_extents: true,
        groups_wait_for_data_in_place: true,
        syncs_in_place_take_turns: true,
        syncs_in_place_are_flushed: true,
        blocks_wait_for_group: true,
        tails_move: true,
        shifted_blocks_move: true,
        changes_do_not_wait: true,
        lost_blocks_do_not_wait: true,
        snapshots_are_voided: true,
        snapshots: true,
        // Closing stops all changes for some tenths of a millisecond, and writes are long.
        full_group: 1024,
        // Less data costs about as much as a group of its own.
        waiting_pages: 64,
        pages_in_place: 64,
        early_run: UNIT_BLOCKS,
        listed_chunks: CHUNKS,
        usable: usize::MAX,
        // Enough for more than a million inodes with names of usual length.
        kept: 256 << 20,
        stepped_time: false,
    };
}
