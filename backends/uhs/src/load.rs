//! Loading: from a device to the names of its files.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_block::{BlockDevice, BlockingQueue};
use defuse_fs::source::WorkWatch;

use crate::UhsOptions;
use crate::commit::{CurrentCopy, RecoveredState};
use crate::content::{BlockPool, INODE_MEMORY};
use crate::format::inode::{BlockPointer, DecodedBody, DiskInode, POINTERS_OF_BLOCK, pointers_of};
use crate::format::snapshot::{SnapshotHeader, SnapshotSegment};
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::names::{InodeLoader, LoadProblem, LoadedInode, NameStore, SnapshotSlots};
use crate::space::{BlockRun, BlockSpace, UNIT_MEMORY};
use crate::store::{
    SlotSurvey, StoreError, check_numbers, chunks_left, device_error, slots, snapshot,
};

/// The number of inodes after which loading may be interrupted.
const LOOKED_AT: u64 = 4096;

/// Loads the current copies of all inodes, one after the other, into an index of `limit` bytes at
/// most.
///
/// # Errors
///
/// A failure of the device, [`StoreError::Index`], and [`StoreError::Interrupted`]. Faults in the
/// content of the device are [`LoadProblem`]s.
pub(crate) fn load(
    device: &dyn BlockDevice,
    survey: &SlotSurvey,
    limit: u64,
    watch: &dyn WorkWatch,
) -> Result<(NameStore, Arc<BlockPool>, Vec<LoadProblem>), StoreError> {
    let (superblock, found) = (&survey.superblock, &survey.found);
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    let mut problems: Vec<LoadProblem> =
        found.damaged.keys().map(|ino| LoadProblem::Damaged { ino: *ino }).collect();
    problems
        .extend(survey.unreadable.iter().map(|block| LoadProblem::Unreadable { block: *block }));
    problems.extend(found.lost_removals.first().map(|_| LoadProblem::LostRemovals));
    let all = found.live.len() as u64;
    check_index(all, 0, limit)?;
    check_space(superblock, limit)?;
    let pool = Arc::new(BlockPool::new(space(superblock)));
    let mut loading = InodeLoader::begin(Arc::clone(&pool), found.next_ino);
    let mut at = 0;
    survey.for_each_body(device, false, |ino, body| {
        if at % LOOKED_AT == 0 && watch.report_progress("loading inodes", at, all) {
            return Err(StoreError::Interrupted);
        }
        at += 1;
        let whole = match DiskInode::decode(body) {
            Some(DecodedBody::Whole(inode)) => Some((inode, Vec::new())),
            Some(DecodedBody::Outside { inode, levels, bytes, pointers }) => {
                let claim = &mut |run| pool.space().claim(run);
                let spilled = records(&mut line, claim, (levels, bytes), pointers);
                let inode = inode.with_records(&spilled.bytes).filter(|_| spilled.whole);
                inode.map(|inode| (inode, spilled.blocks))
            }
            None => None,
        };
        match whole {
            Some((inode, records)) => loading.add(LoadedInode { ino, inode, records }),
            None => problems.push(LoadProblem::Damaged { ino }),
        }
        check_records(&pool, all, limit)
    })?;
    let (names, more) = loading.end();
    pool.set_slots(slots(superblock), chunks_left(superblock));
    problems.extend(more);
    Ok((names, pool, problems))
}

/// Checks that an index of so many inodes, and of `records` bytes for their additional records,
/// takes at most `limit` bytes.
///
/// # Errors
///
/// [`StoreError::Index`].
pub(crate) fn check_index(inodes: u64, records: u64, limit: u64) -> Result<(), StoreError> {
    let bytes = inodes.saturating_mul(INODE_MEMORY).saturating_add(records);
    match bytes <= limit {
        true => Ok(()),
        false => Err(StoreError::Index { inodes, bytes, limit }),
    }
}

/// Checks that the map of the space takes at most `limit` bytes, or without a limit the part of the
/// memory that an index may take by default: a sparse file can have any size, and its owner may be
/// another user than the user who mounts it.
///
/// # Errors
///
/// [`StoreError::Space`].
pub(crate) fn check_space(superblock: &Superblock, limit: u64) -> Result<(), StoreError> {
    let limit = if limit == u64::MAX { UhsOptions::default().index } else { limit };
    let units = superblock.blocks / UNIT_BLOCKS;
    let bytes = units * UNIT_MEMORY;
    if bytes <= limit { Ok(()) } else { Err(StoreError::Space { units, bytes, limit }) }
}

/// Checks the index as [`check_index`] does, for `inodes` of which a part is in memory already.
fn check_records(pool: &BlockPool, inodes: u64, limit: u64) -> Result<(), StoreError> {
    let loaded = pool.inodes().load(Ordering::Relaxed) * INODE_MEMORY;
    check_index(inodes, pool.index_bytes().0.saturating_sub(loaded), limit)
}

/// The inodes of the snapshot of the last clean end, if there is a snapshot without faults.
///
/// # Errors
///
/// [`StoreError::Index`], before memory is taken for them.
pub(crate) fn restore(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    index: u64,
) -> Result<Option<(SlotSurvey, NameStore, Arc<BlockPool>)>, StoreError> {
    let Some(header) = snapshot::header(device, superblock) else { return Ok(None) };
    check_numbers(superblock, &[header.durable, header.next_stamp])?;
    check_index(header.inodes, 0, index)?;
    check_space(superblock, index)?;
    Ok(restore_by(device, superblock, &header))
}

fn restore_by(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    header: &SnapshotHeader,
) -> Option<(SlotSurvey, NameStore, Arc<BlockPool>)> {
    let pool = Arc::new(BlockPool::new(space(superblock)));
    let parts = (header.inodes, &header.segments[..]);
    let read = |segment: &SnapshotSegment| snapshot::segment(device, segment);
    let restored = NameStore::restore(Arc::clone(&pool), superblock.next_ino, parts, &read);
    let found = restored.and_then(|(names, snapshot_slots)| {
        Some((names, recover_state(superblock, header, snapshot_slots)?))
    });
    if found.is_none() {
        log::warn!("the snapshot is damaged: all inodes are read");
    }
    let (names, found) = found?;
    pool.set_slots(slots(superblock), chunks_left(superblock));
    Some((SlotSurvey::from_snapshot(superblock.clone(), found), names, pool))
}

/// The state of the slots; `None` if they cannot be so.
fn recover_state(
    superblock: &Superblock,
    header: &SnapshotHeader,
    snapshot_slots: SnapshotSlots,
) -> Option<RecoveredState> {
    let SnapshotSlots { live, stale, removals } = snapshot_slots;
    let blocks = live.iter().chain(&stale).map(|(_, block)| *block);
    let blocks = blocks.chain(removals.iter().map(|(block, _)| *block));
    if !are_slots(superblock, blocks) {
        return None;
    }
    let counts = live.iter().map(|(ino, block)| (*ino, CurrentCopy { block: *block, stamp: 0 }));
    Some(RecoveredState {
        durable: header.durable,
        next_stamp: header.next_stamp,
        next_ino: superblock.next_ino,
        live: counts.collect(),
        copies: [live, stale].concat(),
        removals,
        ..RecoveredState::default()
    })
}

/// True if each of these blocks is a slot, and none is there twice.
fn are_slots(superblock: &Superblock, mut blocks: impl Iterator<Item = u64>) -> bool {
    let mut seen: Vec<(u64, Vec<bool>)> = superblock
        .chunks
        .iter()
        .map(|chunk| {
            let slots = u64::from(chunk.units) * UNIT_BLOCKS;
            (u64::from(chunk.first_unit) * UNIT_BLOCKS, vec![false; slots as usize])
        })
        .collect();
    seen.sort_unstable_by_key(|(first, _)| *first);
    let mut is_new = |block: u64| {
        let after = seen.partition_point(|(first, _)| *first <= block);
        let chunk = after.checked_sub(1).map(|at| &mut seen[at]);
        let slot = chunk.and_then(|(first, slots)| slots.get_mut((block - *first) as usize));
        slot.is_some_and(|seen| !std::mem::replace(seen, true))
    };
    superblock.table_blocks().iter().copied().all(&mut is_new) && blocks.all(is_new)
}

/// The space of a file system without files.
pub(crate) fn space(superblock: &Superblock) -> BlockSpace {
    let mut space = BlockSpace::new((superblock.blocks / UNIT_BLOCKS) as u32);
    for block in COPIES {
        // The rest of the unit is for data.
        space.claim(BlockRun { block, count: 1 });
    }
    for chunk in &superblock.chunks {
        space.reserve(chunk.first_unit, chunk.units);
    }
    space
}

/// Records that lie in blocks of their own, as far as they can be read.
pub(crate) struct SpilledRecords {
    pub(crate) bytes: Vec<u8>,
    pub(crate) blocks: Vec<BlockRun>,
    /// Nothing is missing or has changed.
    pub(crate) whole: bool,
}

/// Reads the records below `pointers`, in a tree of `levels` levels. Calls `claim` before it reads
/// a block: `claim` allows each block once, so that a forged image cannot make a mount read more
/// blocks than there are.
pub(crate) fn records(
    line: &mut BlockingQueue,
    claim: &mut dyn FnMut(BlockRun) -> bool,
    (levels, bytes): (u8, u64),
    mut pointers: Vec<BlockPointer>,
) -> SpilledRecords {
    let mut spilled = SpilledRecords { bytes: Vec::new(), blocks: Vec::new(), whole: false };
    let leaves = bytes.div_ceil(BLOCK as u64);
    let mut read = |pointer: &BlockPointer, blocks: &mut Vec<BlockRun>| -> Option<Vec<u8>> {
        let mut content = vec![0; BLOCK];
        let run = BlockRun { block: pointer.block, count: 1 };
        claim(run).then_some(())?;
        line.read(pointer.block, &mut content).ok()?;
        blocks.push(run);
        (crc32c::crc32c(&content) == pointer.crc).then_some(content)
    };
    if levels == 2 {
        let mut below = Vec::new();
        for pointer in &pointers {
            let count = leaves.saturating_sub(below.len() as u64).min(POINTERS_OF_BLOCK as u64);
            let Some(block) = read(pointer, &mut spilled.blocks) else { break };
            below.extend(pointers_of(&block, count as usize).unwrap_or_default());
        }
        pointers = below;
    }
    for pointer in &pointers {
        let Some(content) = read(pointer, &mut spilled.blocks) else { return spilled };
        spilled.bytes.extend(content);
    }
    spilled.whole = pointers.len() as u64 == leaves;
    spilled.bytes.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
    spilled
}
