//! Chunks of slots: the superblock lists them, and a table of blocks lists those for which it has
//! no room.
//!
//! The table lies in blocks of chunks. Each change writes it anew, to blocks that were not slots
//! before or whose slots may be overwritten, and makes it durable before a superblock points to it.
//! The former blocks are slots again when no copy of the superblock points to them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_block::BlockingQueue;

use super::copies::write_superblock;
use super::error::{StoreError, device_error};
use super::places::SlotPlaces;
use super::{InodeStore, StoreState, UnitUse};
use crate::format::chunks::{TABLE_CHUNKS, TableBlock, TablePointer, table_blocks};
use crate::format::superblock::{CHUNKS, ChunkTable, SlotChunk, Superblock, SuperblockError};
use crate::format::{BLOCK, UNIT_BLOCKS};

/// Runs of units that are added at a time: each is a chunk.
const RUNS: usize = 256;

/// Chunks that giving back units leaves for new chunks: removing a unit from the middle of a chunk
/// makes two chunks.
pub(super) const CHUNKS_KEPT: usize = 32;

/// The table of a change: where it lies, and the blocks that could not be written.
#[derive(Default)]
struct WrittenTable {
    table: Option<ChunkTable>,
    bad: Vec<u64>,
}

impl WrittenTable {
    /// The blocks that are no slots from now on.
    fn blocks(&self) -> impl Iterator<Item = u64> {
        let blocks = self.table.iter().flat_map(|table| &table.blocks);
        blocks.chain(&self.bad).copied()
    }
}

/// Reads the table of a superblock, and adds its chunks.
///
/// # Errors
///
/// [`SuperblockError::Table`] where neither copy of a block can be used, and
/// [`SuperblockError::Damaged`] where the table cannot be that of a file system.
pub(super) fn read_table(
    line: &mut BlockingQueue,
    superblock: &mut Superblock,
) -> Result<(), StoreError> {
    let (mut blocks, mut chunks) = (Vec::new(), superblock.chunks.clone());
    let mut next = superblock.table.as_ref().map(|table| table.first);
    while let Some(pointer) = next {
        let (block, _) = read_block(line, superblock, &pointer)?;
        blocks.extend(pointer.blocks);
        chunks.extend(block.chunks);
        // Each block has a chunk, so that a list that leads to itself ends here.
        if chunks.len() as u64 > superblock.blocks / UNIT_BLOCKS {
            return Err(StoreError::Unusable(SuperblockError::Damaged));
        }
        next = block.next;
    }
    superblock.chunks = chunks;
    if let Some(table) = &mut superblock.table {
        table.blocks = blocks;
    }
    match superblock.is_sound() {
        true => Ok(()),
        false => Err(StoreError::Unusable(SuperblockError::Damaged)),
    }
}

/// The damaged copies of blocks of the table, which was read before.
pub(super) fn find_damaged(
    line: &mut BlockingQueue,
    superblock: &Superblock,
) -> Result<Vec<u64>, StoreError> {
    let mut damaged = Vec::new();
    visit_blocks(line, superblock, |_, _, bad| {
        damaged.extend(bad);
        Ok(())
    })?;
    Ok(damaged)
}

/// Writes damaged copies of blocks of the table, which was read before, anew in their places.
pub(super) fn mend_table(
    line: &mut BlockingQueue,
    superblock: &Superblock,
) -> Result<(), StoreError> {
    visit_blocks(line, superblock, |line, block, bad| {
        bad.iter().try_for_each(|place| {
            let written = line.write(*place, &block.encode(&superblock.uuid));
            written.map_err(device_error("write the list of inode slots"))
        })
    })
}

/// Calls `visit` with each block of the table, which was read before, and the places of its damaged
/// copies.
fn visit_blocks(
    line: &mut BlockingQueue,
    superblock: &Superblock,
    mut visit: impl FnMut(&mut BlockingQueue, &TableBlock, &[u64]) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut next = superblock.table.as_ref().map(|table| table.first);
    while let Some(pointer) = next {
        let (block, bad) = read_block(line, superblock, &pointer)?;
        visit(line, &block, &bad)?;
        next = block.next;
    }
    Ok(())
}

/// A block of the table, and the places of its damaged copies.
fn read_block(
    line: &mut BlockingQueue,
    superblock: &Superblock,
    pointer: &TablePointer,
) -> Result<(TableBlock, Vec<u64>), StoreError> {
    let (mut found, mut bad) = (None, Vec::new());
    for block in pointer.blocks {
        let mut bytes = vec![0; BLOCK];
        let is_read = block < superblock.blocks && line.read(block, &mut bytes).is_ok();
        let is_whole = is_read && crc32c::crc32c(&bytes) == pointer.crc;
        match is_whole.then(|| TableBlock::decode(&bytes, &superblock.uuid)).flatten() {
            Some(block) => found = found.or(Some(block)),
            None => bad.push(block),
        }
    }
    let lost = StoreError::Unusable(SuperblockError::Table { blocks: pointer.blocks });
    Ok((found.ok_or(lost)?, bad))
}

/// Chunks that there can still be.
pub(crate) fn chunks_left(superblock: &Superblock) -> u64 {
    superblock.most_chunks().saturating_sub(superblock.chunks.len()) as u64
}

/// Slots of all chunks. The blocks of the table are none.
pub(crate) fn slots(superblock: &Superblock) -> u64 {
    let units = superblock.chunks.iter().map(|chunk| u64::from(chunk.units)).sum::<u64>();
    units * UNIT_BLOCKS - superblock.table_blocks().len() as u64
}

/// The chunks without a unit of one of them. `None` if it is the last unit, or if there would be
/// more than `most`.
pub(super) fn remove_unit(chunks: &[SlotChunk], unit: u32, most: usize) -> Option<Vec<SlotChunk>> {
    let mut left = Vec::with_capacity(chunks.len() + 1);
    for chunk in chunks {
        if !chunk.holds(unit.into()) {
            left.push(*chunk);
            continue;
        }
        let before = unit - chunk.first_unit;
        let after = chunk.units - before - 1;
        let parts = [
            SlotChunk { units: before, ..*chunk },
            SlotChunk { first_unit: unit + 1, units: after, ..*chunk },
        ];
        left.extend(parts.into_iter().filter(|part| part.units > 0));
    }
    let fits = left.len() <= chunks.len() || left.len() <= most.saturating_sub(CHUNKS_KEPT);
    (!left.is_empty() && fits).then_some(left)
}

impl InodeStore {
    /// Adds a chunk before slots for `count` changes are scattered, if there is much space.
    pub(super) fn avoid_scattering(
        &self,
        count: usize,
        units: &mut dyn FnMut(u32, UnitUse) -> Option<(u32, u32)>,
    ) -> Result<(), StoreError> {
        let mut state = self.lock();
        let has_room = chunks_left(&state.superblock) > CHUNKS_KEPT as u64;
        if !has_room || !state.groups.is_scattered(count) {
            return Ok(());
        }
        let wanted = self.chunk_to_add(&state)?;
        drop(state);
        match units(wanted, UnitUse::Runs) {
            Some(run) => self.add_chunks(&[run]),
            None => Ok(()),
        }
    }

    /// Adds chunks because no slots are left: as many units as are wanted, in few runs where there
    /// are some.
    pub(crate) fn add_slots(
        &self,
        units: &mut dyn FnMut(u32, UnitUse) -> Option<(u32, u32)>,
    ) -> Result<(), StoreError> {
        let (wanted, most) = {
            let state = self.lock();
            let most = usize::try_from(chunks_left(&state.superblock)).unwrap_or(usize::MAX);
            (self.chunk_to_add(&state)?, most.min(RUNS))
        };
        let (mut runs, mut missing) = (Vec::new(), wanted);
        while missing > 0 && runs.len() < most {
            let need = if runs.is_empty() { UnitUse::Slots } else { UnitUse::MoreSlots };
            let Some((first, count)) = units(missing, need) else { break };
            runs.push((first, count));
            missing -= count;
        }
        match runs.is_empty() {
            true => Err(StoreError::Full),
            false => self.add_chunks(&runs),
        }
    }

    /// The size of further chunks in units: about an eighth of the present units of slots.
    fn chunk_to_add(&self, state: &StoreState) -> Result<u32, StoreError> {
        if chunks_left(&state.superblock) == 0 || self.rules.usable < usize::MAX {
            return Err(StoreError::Full);
        }
        let have: u32 = state.superblock.chunks.iter().map(|chunk| chunk.units).sum();
        Ok((have / 8).max(1))
    }

    /// Makes units that nothing uses chunks of slots.
    fn add_chunks(&self, runs: &[(u32, u32)]) -> Result<(), StoreError> {
        let mut state = self.lock();
        let new: Vec<SlotChunk> = runs
            .iter()
            .map(|(first_unit, units)| SlotChunk {
                first_unit: *first_unit,
                units: *units,
                key: state.random.u64(..),
            })
            .collect();
        let mut chunks = state.superblock.chunks.clone();
        chunks.extend(&new);
        // No slot lies in these units until a durable superblock lists them.
        let blocks = new.iter().flat_map(|chunk| {
            let first = u64::from(chunk.first_unit) * UNIT_BLOCKS;
            first..first + u64::from(chunk.units) * UNIT_BLOCKS
        });
        let written = self.write_table(&state, &chunks, blocks)?;
        let former = self.list_chunks(&mut state, chunks, &written, None)?;
        new.iter().for_each(|chunk| state.groups.add(chunk));
        state.groups.hold_table(written.blocks());
        if !former.is_empty() {
            self.flush_superblocks(&state)?;
            state.groups.release_table(&former);
        }
        Ok(())
    }

    /// Gives back up to `most` units all of whose slots may be overwritten, and leaves `keep` such
    /// slots. No copy of the superblock lists the units any more. With `now`, slots that only wait
    /// for a superblock count, too.
    ///
    /// # Errors
    ///
    /// A failure of the device, after which every call fails.
    pub(crate) fn give_back(
        &self,
        keep: usize,
        most: usize,
        now: bool,
    ) -> Result<Vec<u32>, StoreError> {
        self.check()?;
        let mut state = self.lock();
        if now && !state.groups.is_mentioned() {
            self.mention(&mut state)?;
        }
        let mut units = state.groups.empty_units(keep);
        units.truncate(most);
        let most_chunks = state.superblock.most_chunks();
        let mut chunks = state.superblock.chunks.clone();
        units.retain(|unit| match remove_unit(&chunks, *unit, most_chunks) {
            Some(less) => {
                chunks = less;
                true
            }
            None => false,
        });
        if units.is_empty() {
            return Ok(units);
        }
        if !self.rules.units_leave_first {
            state.superblock.chunks = chunks;
            units.iter().for_each(|unit| state.groups.remove_unit(*unit));
            return Ok(units);
        }
        let count = table_blocks(chunks.len().saturating_sub(self.rules.listed_chunks));
        let leaves = |block: &u64| units.contains(&((block / UNIT_BLOCKS) as u32));
        let Some(blocks) = state.groups.take_for_table(count, &|block| !leaves(block)) else {
            return Ok(Vec::new());
        };
        let written = self.write_table(&state, &chunks, blocks.into_iter())?;
        // Slots in these units may have been the only ones that state that a group is durable.
        let durable = state.groups.newest_durable();
        let former = self.list_chunks(&mut state, chunks, &written, Some(durable))?;
        // If the newest copy of the superblock is lost, an older copy must not treat the data of a
        // file as slots.
        self.flush_superblocks(&state)?;
        state.groups.record_durable(durable);
        units.iter().for_each(|unit| state.groups.remove_unit(*unit));
        state.groups.hold_table(written.blocks());
        state.groups.release_table(&former);
        Ok(units)
    }

    /// Writes the table for these chunks, if they need one, to some of the blocks in `places`, and
    /// makes it durable. The first copies go to the first blocks, the others to the last.
    /// [`StoreError::Full`] if there are too few blocks.
    fn write_table(
        &self,
        state: &StoreState,
        chunks: &[SlotChunk],
        mut places: impl DoubleEndedIterator<Item = u64>,
    ) -> Result<WrittenTable, StoreError> {
        let listed = self.rules.listed_chunks.min(chunks.len());
        let mut written = WrittenTable::default();
        if listed == chunks.len() {
            return Ok(written);
        }
        debug_assert!(state.superblock.most_chunks() > CHUNKS, "the format has no table");
        let line = BlockingQueue::new(&*self.device).map_err(device_error("open a queue"));
        let mut line = line.inspect_err(|_| self.give_up(state))?;
        let mut write = |line: &mut BlockingQueue, bytes: &[u8], from_end: bool| loop {
            let place = if from_end { places.next_back() } else { places.next() };
            let Some(place) = place else { return Err(StoreError::Full) };
            match line.write(place, bytes) {
                Ok(()) => return Ok(place),
                Err(errno) => {
                    log::warn!("the list of inode slots at block {place}: {errno}");
                    written.bad.push(place);
                }
            }
        };
        let (mut next, mut all) = (None, Vec::new());
        for part in chunks[listed..].chunks(TABLE_CHUNKS).rev() {
            let block = TableBlock { next, chunks: part.to_vec() };
            let bytes = block.encode(&state.superblock.uuid);
            let blocks = [write(&mut line, &bytes, false)?, write(&mut line, &bytes, true)?];
            next = Some(TablePointer { blocks, crc: crc32c::crc32c(&bytes) });
            all.extend(blocks);
        }
        if self.rules.tables_come_first {
            line.flush().map_err(device_error("flush")).inspect_err(|_| self.give_up(state))?;
        }
        written.table = next.map(|first| ChunkTable { first, listed, blocks: all });
        Ok(written)
    }

    /// Lists these chunks in the superblock on the device, which says with `durable` that the group
    /// is. Returns the blocks of the former table.
    fn list_chunks(
        &self,
        state: &mut StoreState,
        chunks: Vec<SlotChunk>,
        written: &WrittenTable,
        durable: Option<u64>,
    ) -> Result<Vec<u64>, StoreError> {
        let former = state.superblock.table_blocks().to_vec();
        self.update(state, |superblock| {
            superblock.chunks = chunks;
            superblock.table.clone_from(&written.table);
            superblock.durable = durable.unwrap_or(superblock.durable);
        })?;
        state.places = Arc::new(SlotPlaces::from_superblock(&state.superblock));
        Ok(former)
    }

    /// Makes all copies of the superblock durable.
    fn flush_superblocks(&self, state: &StoreState) -> Result<(), StoreError> {
        let line = BlockingQueue::new(&*self.device).map_err(device_error("open a queue"));
        line.and_then(|mut line| line.flush().map_err(device_error("flush")))
            .inspect_err(|_| self.give_up(state))
    }

    /// Writes another version of the superblock.
    pub(super) fn update(
        &self,
        state: &mut StoreState,
        change: impl FnOnce(&mut Superblock),
    ) -> Result<(), StoreError> {
        let mut superblock = state.superblock.clone();
        superblock.epoch += 1;
        self.superblocks.fetch_add(1, Ordering::Relaxed);
        change(&mut superblock);
        debug_assert!(superblock.is_sound(), "no mount would take {superblock:?}");
        let line = BlockingQueue::new(&*self.device).map_err(device_error("open a queue"));
        line.and_then(|mut line| write_superblock(&mut line, &superblock))
            .inspect_err(|_| self.give_up(state))?;
        state.superblock = superblock;
        Ok(())
    }
}
