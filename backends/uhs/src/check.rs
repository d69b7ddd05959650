//! A check of a file system, which changes nothing.

use std::sync::Arc;

use defuse_block::BlockDevice;
use defuse_fs::source::{NoWatch, WorkWatch};

use crate::commit::CommitRules;
use crate::load;
use crate::names::LoadProblem;
use crate::store::{StoreError, find_bad, snapshot, survey_with_slots};

/// The findings of a [`check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckReport {
    /// Everything that is wrong.
    pub problems: Vec<LoadProblem>,
    /// Inodes, the root among them.
    pub inodes: u64,
    /// Blocks of the device.
    pub blocks: u64,
    /// Blocks that nothing uses.
    pub free_blocks: u64,
    /// Slots that a power failure has left half written. Mounting clears them.
    pub unfinished: usize,
    /// Blocks of copies of the superblock that hold something else. A mount that may write writes
    /// them anew.
    pub lost_superblocks: Vec<u64>,
    /// Blocks of copies of the superblock that a power failure may have left half written. A mount
    /// that may write writes them anew.
    pub unfinished_superblocks: Vec<u64>,
    /// Blocks of copies of the list of inode slots that hold something else. A mount that may write
    /// writes them anew.
    pub lost_tables: Vec<u64>,
    /// The snapshot of the last clean end is damaged. A mount then reads all inodes.
    pub has_damaged_snapshot: bool,
}

/// Reads everything but the data of files on `device`, and writes nothing.
///
/// # Errors
///
/// See [`StoreError`]: the file system cannot be mounted at all.
pub fn check(device: &Arc<dyn BlockDevice>) -> Result<CheckReport, StoreError> {
    check_watched(device, &NoWatch)
}

/// Performs [`check`]; `watch` sees the work, and can end it ([`StoreError::Interrupted`]).
pub(crate) fn check_watched(
    device: &Arc<dyn BlockDevice>,
    watch: &dyn WorkWatch,
) -> Result<CheckReport, StoreError> {
    let survey = survey_with_slots(&**device, CommitRules::ALL, |_| {}, watch)?;
    let (names, pool, problems) = load::load(&**device, &survey, u64::MAX, watch)?;
    let copies = find_bad(&**device)?;
    Ok(CheckReport {
        problems,
        inodes: names.count().0,
        blocks: survey.superblock.blocks,
        free_blocks: pool.space().free_blocks(),
        unfinished: survey.found.void.len(),
        lost_superblocks: copies.lost,
        unfinished_superblocks: copies.torn,
        lost_tables: copies.tables,
        has_damaged_snapshot: snapshot::is_damaged(&**device, &survey.superblock),
    })
}
