//! Snapshots on a device: written at a clean end, and read by the next mount. DESIGN.md has the
//! rules.

use std::sync::atomic::Ordering;

use defuse_block::{BlockDevice, BlockingQueue};

use super::error::{StoreError, device_error};
use super::{InodeStore, StoreState};
use crate::commit::CommitState;
use crate::format::snapshot::{
    HEADER_BLOCKS, SEGMENT, SEGMENT_BLOCKS, SnapshotHeader, SnapshotPointer, SnapshotSegment,
};
use crate::format::superblock::Superblock;
use crate::format::{BLOCK, UNIT_BLOCKS};

/// The content of a snapshot.
pub(crate) struct SnapshotContent {
    pub(crate) inodes: u64,
    /// Whole entries each, of [`SEGMENT`] bytes at most.
    pub(crate) segments: Vec<Vec<u8>>,
}

/// The snapshot of a superblock.
enum Found {
    /// There is none, or an interrupted mount has begun to make it void.
    Nothing,
    Damaged,
    Whole(SnapshotHeader),
}

/// The header of the snapshot that the last clean end has left. `None` where there is none, or
/// where it is damaged.
pub(crate) fn header(device: &dyn BlockDevice, superblock: &Superblock) -> Option<SnapshotHeader> {
    match find(device, superblock) {
        Found::Whole(header) => Some(header),
        Found::Nothing => None,
        Found::Damaged => {
            log::warn!("the snapshot is damaged: all inodes are read");
            None
        }
    }
}

/// True if the next mount would find that the snapshot is damaged.
pub(crate) fn is_damaged(device: &dyn BlockDevice, superblock: &Superblock) -> bool {
    match find(device, superblock) {
        Found::Nothing => false,
        Found::Damaged => true,
        Found::Whole(header) => header.segments.iter().any(|one| segment(device, one).is_none()),
    }
}

fn find(device: &dyn BlockDevice, superblock: &Superblock) -> Found {
    let Some(SnapshotPointer { block, blocks, crc }) = superblock.snapshot else {
        return Found::Nothing;
    };
    let end = block.checked_add(blocks.into()).filter(|end| *end <= superblock.blocks);
    let read = || {
        let mut bytes = vec![0; blocks as usize * BLOCK];
        BlockingQueue::new(device).and_then(|mut line| line.read(block, &mut bytes)).ok()?;
        Some(bytes)
    };
    let bytes = end.filter(|_| (1..=HEADER_BLOCKS).contains(&blocks)).and_then(|_| read());
    // An interrupted mount has written only the first block of a long header with zeros.
    if bytes.as_ref().is_some_and(|bytes| bytes[..BLOCK].iter().all(|byte| *byte == 0)) {
        return Found::Nothing;
    }
    let whole = bytes.filter(|bytes| crc32c::crc32c(bytes) == crc);
    let header = whole.and_then(|bytes| SnapshotHeader::decode(&bytes, superblock.blocks));
    let header = header
        .filter(|header| (header.uuid, header.durable) == (superblock.uuid, superblock.durable));
    header.map_or(Found::Damaged, Found::Whole)
}

/// Reads a segment; `None` if it is damaged.
pub(crate) fn segment(device: &dyn BlockDevice, segment: &SnapshotSegment) -> Option<Vec<u8>> {
    let mut bytes = vec![0; segment.blocks() as usize * BLOCK];
    BlockingQueue::new(device).and_then(|mut line| line.read(segment.block, &mut bytes)).ok()?;
    bytes.truncate(segment.bytes as usize);
    (crc32c::crc32c(&bytes) == segment.crc).then_some(bytes)
}

/// Makes the snapshot of `superblock` void, if it has one. The caller flushes, and then writes a
/// superblock without it.
pub(super) fn void(line: &mut BlockingQueue, superblock: &Superblock) -> Result<(), StoreError> {
    let within = |at: &SnapshotPointer| at.block < superblock.blocks;
    match superblock.snapshot.filter(within) {
        // An older superblock must not lead to the snapshot, if it is one day the only copy left.
        Some(at) => line.write(at.block, &[0; BLOCK]).map_err(device_error("write")),
        None => Ok(()),
    }
}

impl InodeStore {
    /// Ends a file system whose changes are all durable: writes the result of `save` to units that
    /// `unit` takes, each of them free, and records in the superblock that all groups are durable.
    /// Without space there is no snapshot. Nothing may be written after that.
    ///
    /// # Errors
    ///
    /// A failure of the device.
    pub(crate) fn end(
        &self,
        save: impl FnOnce(&CommitState) -> Option<SnapshotContent>,
        unit: impl FnMut() -> Option<u32>,
    ) -> Result<(), StoreError> {
        self.check()?;
        let mut state = self.lock();
        let wanted = self.rules.snapshots && !self.replaced.load(Ordering::Relaxed);
        let saved = wanted.then(|| save(&state.groups)).flatten();
        let snapshot = match saved.and_then(|saved| PlacedSnapshot::new(&state, saved, unit)) {
            Some(placed) => self.write(&state, &placed)?,
            None => None,
        };
        if snapshot.is_none() && state.groups.is_mentioned() {
            return Ok(());
        }
        let durable = state.groups.newest_durable();
        self.update(&mut state, |superblock| {
            (superblock.durable, superblock.snapshot) = (durable, snapshot);
        })
    }

    /// Writes a snapshot and makes it durable. `None` if it cannot be written.
    fn write(
        &self,
        state: &StoreState,
        placed: &PlacedSnapshot,
    ) -> Result<Option<SnapshotPointer>, StoreError> {
        let mut line = BlockingQueue::new(&*self.device).map_err(device_error("open a queue"))?;
        for (block, bytes) in &placed.writes {
            if let Err(errno) = line.write(*block, bytes) {
                log::warn!("no snapshot: block {block} cannot be written: {errno}");
                return Ok(None);
            }
        }
        // After a failed flush the content of the device is unknown.
        line.flush().map_err(device_error("flush")).inspect_err(|_| self.give_up(state))?;
        Ok(Some(placed.at))
    }
}

/// A snapshot with its places.
struct PlacedSnapshot {
    at: SnapshotPointer,
    /// Block and content.
    writes: Vec<(u64, Vec<u8>)>,
}

impl PlacedSnapshot {
    /// Places for all parts. `None` where there are too few units.
    fn new(
        state: &StoreState,
        saved: SnapshotContent,
        mut unit: impl FnMut() -> Option<u32>,
    ) -> Option<PlacedSnapshot> {
        let mut header = SnapshotHeader {
            uuid: state.superblock.uuid,
            durable: state.groups.newest_durable(),
            next_stamp: state.groups.next_stamp(),
            inodes: saved.inodes,
            segments: Vec::new(),
        };
        let nowhere = SnapshotSegment { block: 0, bytes: 0, crc: 0 };
        header.segments.resize(saved.segments.len(), nowhere);
        let blocks = (header.encode()?.len() / BLOCK) as u32;
        let mut place = allocate_in_units(&mut unit);
        let block = place(blocks)?;
        let mut writes = Vec::with_capacity(saved.segments.len() + 1);
        for (mut bytes, segment) in saved.segments.into_iter().zip(&mut header.segments) {
            debug_assert!((1..=SEGMENT).contains(&bytes.len()), "{} bytes", bytes.len());
            let crc = crc32c::crc32c(&bytes);
            *segment = SnapshotSegment { block: 0, bytes: bytes.len() as u32, crc };
            segment.block = place(segment.blocks())?;
            bytes.resize(segment.blocks() as usize * BLOCK, 0);
            writes.push((segment.block, bytes));
        }
        let bytes = header.encode()?;
        let at = SnapshotPointer { block, blocks, crc: crc32c::crc32c(&bytes) };
        writes.push((block, bytes));
        Some(PlacedSnapshot { at, writes })
    }
}

/// Runs of blocks in units, one after the other.
fn allocate_in_units(unit: &mut dyn FnMut() -> Option<u32>) -> impl FnMut(u32) -> Option<u64> {
    const { assert!(SEGMENT_BLOCKS as u64 <= UNIT_BLOCKS && HEADER_BLOCKS as u64 <= UNIT_BLOCKS) };
    let (mut next, mut end) = (0, 0);
    move |blocks: u32| {
        if end - next < u64::from(blocks) {
            next = u64::from(unit()?) * UNIT_BLOCKS;
            end = next + UNIT_BLOCKS;
        }
        next += u64::from(blocks);
        Some(next - u64::from(blocks))
    }
}
