//! The superblock: three copies, of which the newest whole copy counts.

use std::fmt;

use super::bytes::{ByteReader, ByteWriter};
use super::chunks::{TABLE_COPIES, TablePointer};
use super::snapshot;
use super::{BLOCK, NUMBERS, UNIT_BLOCKS, VERSION};

const MAGIC: &[u8; 8] = b"defuseUH";

/// The blocks of the copies. The smallest image, 16 MiB, has them all.
pub(crate) const COPIES: [u64; 3] = [0, 3 * UNIT_BLOCKS, 7 * UNIT_BLOCKS];

/// The fewest units of an image.
pub(crate) const FEWEST_UNITS: u64 = 8;

/// The most units of an image: they have 32-bit numbers.
pub(crate) const MOST_UNITS: u64 = u32::MAX as u64;

/// Chunks that the superblock lists at most.
pub(crate) const CHUNKS: usize = 220;

/// The place of the first chunk in a copy, and that of the pointer to the table.
const FIRST_CHUNK: usize = 112;
const TABLE: usize = FIRST_CHUNK + CHUNKS * 16;
/// The end of the pointer to the table.
const TABLE_END: usize = TABLE + 20;

/// The feature that records may be padded, so that a change of one extent writes the blocks that it
/// concerns.
pub(crate) const PADDED_RECORDS: u64 = 1;

/// The feature that the list of chunks may continue in a table.
pub(crate) const CHUNK_TABLE: u64 = 2;

/// The features of new file systems, which are those that this program knows.
pub(crate) const FEATURES: u64 = PADDED_RECORDS | CHUNK_TABLE;

/// Neighbouring units that hold slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotChunk {
    pub(crate) first_unit: u32,
    pub(crate) units: u32,
    /// A random number that the slots repeat.
    pub(crate) key: u64,
}

impl SlotChunk {
    pub(super) fn encode(&self, out: &mut ByteWriter) {
        out.u32(self.first_unit).u32(self.units).u64(self.key);
    }

    pub(super) fn decode(from: &mut ByteReader<'_>) -> Option<SlotChunk> {
        let (first_unit, units, key) = (from.u32()?, from.u32()?, from.u64()?);
        Some(SlotChunk { first_unit, units, key })
    }

    /// True if the unit belongs to the chunk.
    pub(crate) fn holds(&self, unit: u64) -> bool {
        let first = u64::from(self.first_unit);
        (first..first + u64::from(self.units)).contains(&unit)
    }
}

/// The part of the list of chunks that lies outside of the superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkTable {
    /// The first block.
    pub(crate) first: TablePointer,
    /// The number of chunks that the superblock itself lists.
    pub(crate) listed: usize,
    /// All blocks of the table, with both copies of each. Empty until the table is read.
    pub(crate) blocks: Vec<u64>,
}

/// The superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) uuid: [u8; 16],
    /// Grows with every version.
    pub(crate) epoch: u64,
    /// Blocks of the file system.
    pub(crate) blocks: u64,
    /// A group that is durable, with all before it.
    pub(crate) durable: u64,
    /// No inode has this number or a higher one, except inodes in slots.
    pub(crate) next_ino: u64,
    /// The snapshot that the last clean end has left, if nothing was written since.
    pub(crate) snapshot: Option<snapshot::SnapshotPointer>,
    /// All chunks: those that the superblock lists come first, then those of the table, once it is
    /// read.
    pub(crate) chunks: Vec<SlotChunk>,
    pub(crate) table: Option<ChunkTable>,
    /// Features that a program must know to use the file system.
    pub(crate) features: u64,
}

/// A reason why a block is no usable superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SuperblockError {
    /// Something else.
    Other,
    /// A superblock whose bytes have changed since they were written.
    Damaged,
    /// Neither copy of a block of the table of chunks can be used. The superblock is whole.
    Table {
        /// The blocks of the copies.
        blocks: [u64; TABLE_COPIES],
    },
    /// A superblock of a newer program.
    Newer {
        /// The version of the format.
        version: u32,
        /// Features that this program does not know.
        features: u64,
    },
}

impl Superblock {
    /// The 4 KiB of a copy.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = ByteWriter::default();
        out.bytes(MAGIC).u32(VERSION).u32(0).bytes(&self.uuid).u64(self.epoch).u64(self.blocks);
        // Features: compatible, read-only compatible, incompatible.
        out.u64(0).u64(0).u64(self.features);
        let none = snapshot::SnapshotPointer { block: 0, blocks: 0, crc: 0 };
        let snapshot = self.snapshot.unwrap_or(none);
        out.u64(self.durable).u64(self.next_ino).u64(snapshot.block).u32(snapshot.crc);
        let listed = &self.chunks[..self.listed_count()];
        out.u32(snapshot.blocks).u32(listed.len() as u32).u32(0);
        listed.iter().for_each(|chunk| chunk.encode(&mut out));
        out.pad(TABLE);
        TablePointer::encode(self.table.as_ref().map(|table| table.first), &mut out);
        out.pad(BLOCK - 4);
        let crc = crc32c::crc32c(out.as_slice());
        out.u32(crc);
        out.finish()
    }

    /// Reads a copy.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Superblock, SuperblockError> {
        if !bytes.starts_with(MAGIC) {
            return Err(SuperblockError::Other);
        }
        let (checked, crc) = bytes.split_at(BLOCK - 4);
        if crc32c::crc32c(checked).to_le_bytes() != crc {
            return Err(SuperblockError::Damaged);
        }
        let found = Superblock::fields(&checked[MAGIC.len()..]).ok_or(SuperblockError::Damaged)?;
        let (superblock, version, features) = found;
        if version != VERSION || features != 0 {
            return Err(SuperblockError::Newer { version, features });
        }
        if superblock.is_sound() { Ok(superblock) } else { Err(SuperblockError::Damaged) }
    }

    fn fields(bytes: &[u8]) -> Option<(Superblock, u32, u64)> {
        let mut from = ByteReader::new(bytes);
        let (version, _) = (from.u32()?, from.u32()?);
        let (uuid, epoch, blocks) = (from.uuid()?, from.u64()?, from.u64()?);
        let (_compatible, read_only, incompatible) = (from.u64()?, from.u64()?, from.u64()?);
        let (durable, next_ino) = (from.u64()?, from.u64()?);
        let (block, crc, blocks_of_header) = (from.u64()?, from.u32()?, from.u32()?);
        let snapshot = (block != 0).then_some(snapshot::SnapshotPointer {
            block,
            blocks: blocks_of_header,
            crc,
        });
        let (count, _) = (from.u32()? as usize, from.u32()?);
        let chunks = (0..count.min(CHUNKS + 1)).map(|_| SlotChunk::decode(&mut from));
        let chunks: Vec<SlotChunk> = chunks.collect::<Option<_>>()?;
        let mut from = ByteReader::new(bytes.get(TABLE - MAGIC.len()..)?);
        let first = TablePointer::decode(&mut from)?.filter(|_| incompatible & CHUNK_TABLE != 0);
        let listed = chunks.len();
        let table = first.map(|first| ChunkTable { first, listed, blocks: Vec::new() });
        let features = incompatible;
        let superblock = Superblock {
            uuid,
            epoch,
            blocks,
            durable,
            next_ino,
            snapshot,
            chunks,
            table,
            features,
        };
        Some((superblock, version, incompatible & !FEATURES | read_only))
    }

    /// True if `bytes` may be a mix of sectors of this version and of versions that are written
    /// beside it. Then every field can be from such a version.
    pub(crate) fn may_be_torn(&self, bytes: &[u8]) -> bool {
        let zeros = |range: std::ops::Range<usize>| bytes[range].iter().all(|byte| *byte == 0);
        let Some((found, version, features)) = Superblock::fields(&bytes[MAGIC.len()..BLOCK - 4])
        else {
            return false;
        };
        let all_chunks = bytes[FIRST_CHUNK..TABLE].chunks_exact(16);
        let units = found.blocks / UNIT_BLOCKS;
        let is_chunk = |chunk: &[u8]| {
            let number =
                |at: usize| u64::from(u32::from_le_bytes([0, 1, 2, 3].map(|n| chunk[at + n])));
            let (first, count) = (number(0), number(4));
            (first > 0 && count > 0 && first + count <= units)
                || chunk.iter().all(|byte| *byte == 0)
        };
        let of_table = if self.features & CHUNK_TABLE != 0 { TABLE_END } else { TABLE };
        let near = self.epoch.saturating_sub(COPIES.len() as u64)..=self.epoch + 1;
        bytes.starts_with(MAGIC)
            && (version, features, found.uuid) == (VERSION, 0, self.uuid)
            && near.contains(&found.epoch)
            && (FEWEST_UNITS..=MOST_UNITS).contains(&units)
            && found.next_ino > 0
            && found.next_ino.max(found.durable) < 2 * NUMBERS
            && found.chunks.len() <= CHUNKS
            && all_chunks.into_iter().all(is_chunk)
            && [12..16, 48..56, 108..112, of_table..BLOCK - 4].into_iter().all(zeros)
    }

    /// The number of chunks that the superblock itself lists.
    fn listed_count(&self) -> usize {
        self.table.as_ref().map_or(self.chunks.len(), |table| table.listed)
    }

    /// The number of chunks that can be listed. With a table there is no bound but the number of
    /// units.
    pub(crate) fn most_chunks(&self) -> usize {
        if self.features & CHUNK_TABLE == 0 { CHUNKS } else { MOST_UNITS as usize }
    }

    /// Blocks of chunks that hold the table, and no slots.
    pub(crate) fn table_blocks(&self) -> &[u64] {
        self.table.as_ref().map_or(&[], |table| &table.blocks)
    }

    /// True if chunks lie within the image, and neither on each other nor on a copy of the
    /// superblock, and the blocks of the table, as far as it is read, lie in chunks, each in
    /// another place.
    pub(crate) fn is_sound(&self) -> bool {
        let units = self.blocks / UNIT_BLOCKS;
        let mut ranges: Vec<(u64, u64)> = self
            .chunks
            .iter()
            .map(|chunk| {
                let first = u64::from(chunk.first_unit);
                (first, first + u64::from(chunk.units))
            })
            .chain(COPIES.map(|block| (block / UNIT_BLOCKS, block / UNIT_BLOCKS + 1)))
            .collect();
        ranges.sort_unstable();
        let apart = ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0);
        (FEWEST_UNITS..=MOST_UNITS).contains(&units)
            && self.next_ino > 0
            // Mounting adds a little to the largest numbers of slots.
            && self.next_ino.max(self.epoch).max(self.durable) < 2 * NUMBERS
            && self.listed_count() <= CHUNKS
            && apart
            && self.has_sound_table()
            && ranges.iter().all(|range| range.0 < range.1 && range.1 <= units)
    }

    fn has_sound_table(&self) -> bool {
        let mut blocks = self.table_blocks().to_vec();
        blocks.sort_unstable();
        let mut chunks = self.chunks.clone();
        chunks.sort_unstable_by_key(|chunk| chunk.first_unit);
        let lies_in_chunk = |block: &u64| {
            let unit = block / UNIT_BLOCKS;
            let after = chunks.partition_point(|chunk| u64::from(chunk.first_unit) <= unit);
            after.checked_sub(1).is_some_and(|at| chunks[at].holds(unit))
        };
        blocks.is_sorted_by(|a, b| a < b) && blocks.iter().all(lies_in_chunk)
    }
}

impl fmt::Display for SuperblockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SuperblockError::Other => f.write_str("no uhs file system"),
            SuperblockError::Damaged => f.write_str("the superblock is damaged"),
            SuperblockError::Table { blocks: [one, other] } => {
                write!(
                    f,
                    "both copies of a list of inode slots, in blocks {one} and {other}, are damaged"
                )
            }
            SuperblockError::Newer { version, features } => {
                write!(f, "format {version} with features {features:#x} is newer than this program")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        let chunks = vec![
            SlotChunk { first_unit: 1, units: 2, key: 11 },
            SlotChunk { first_unit: 4, units: 1, key: 12 },
        ];
        let (uuid, epoch, blocks) = ([3; 16], 9, 10 * UNIT_BLOCKS);
        let snapshot = Some(snapshot::SnapshotPointer { block: 700, blocks: 2, crc: 9 });
        let first = TablePointer { blocks: [600, 601], crc: 5 };
        let table = Some(ChunkTable { first, listed: 2, blocks: Vec::new() });
        let (durable, next_ino, features) = (4, 100, FEATURES);
        Superblock { uuid, epoch, blocks, durable, next_ino, snapshot, chunks, table, features }
    }

    #[test]
    fn a_superblock_is_read_as_it_was_written() {
        let mut full = superblock();
        assert_eq!(Superblock::decode(&full.encode()), Ok(full.clone()));
        full.blocks = 1 << 30;
        let chunk = |at| SlotChunk { first_unit: 8 + 3 * at, units: 2, key: u64::from(at) };
        full.chunks = (0..CHUNKS as u32).map(chunk).collect();
        full.table.as_mut().unwrap().listed = CHUNKS;
        assert_eq!(full.encode().len(), BLOCK);
        assert_eq!(Superblock::decode(&full.encode()), Ok(full));
    }

    #[test]
    fn a_damaged_byte_anywhere_is_noticed() {
        let good = superblock().encode();
        for at in 0..BLOCK {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            let found = Superblock::decode(&bytes);
            assert!(
                matches!(found, Err(SuperblockError::Other | SuperblockError::Damaged)),
                "byte {at}"
            );
        }
    }

    /// A right checksum proves nothing, since an image may be forged.
    #[test]
    fn fields_that_make_no_sense_are_refused_with_a_right_checksum() {
        let changes: [fn(&mut Superblock); 9] = [
            |s| s.chunks[0].units = 3,
            |s| s.chunks[0].first_unit = 0,
            |s| s.chunks[1].first_unit = 10,
            |s| s.chunks[1].units = u32::MAX,
            |s| s.chunks[1].units = 0,
            |s| s.blocks = 7 * UNIT_BLOCKS,
            |s| s.epoch = u64::MAX,
            |s| s.durable = u64::MAX,
            |s| s.next_ino = u64::MAX,
        ];
        for change in changes {
            let mut bad = superblock();
            change(&mut bad);
            assert_eq!(Superblock::decode(&bad.encode()), Err(SuperblockError::Damaged), "{bad:?}");
        }
    }

    #[test]
    fn a_newer_format_is_told_apart_from_damage() {
        let mut bytes = superblock().encode();
        bytes[8] = 2;
        let crc = crc32c::crc32c(&bytes[..BLOCK - 4]);
        bytes[BLOCK - 4..].copy_from_slice(&crc.to_le_bytes());
        let newer = SuperblockError::Newer { version: 2, features: 0 };
        assert_eq!(Superblock::decode(&bytes), Err(newer));
    }
}
