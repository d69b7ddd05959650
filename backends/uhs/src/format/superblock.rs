//! The superblock: three copies, of which the newest whole copy counts.

use std::fmt;

use super::bytes::{ByteReader, ByteWriter};
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

/// The feature that records may be padded, so that a change of one extent writes the blocks that it concerns.
pub(crate) const PADDED_RECORDS: u64 = 1;

/// Features of the format that this program knows.
const KNOWN: u64 = PADDED_RECORDS;

/// Neighbouring units that hold slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotChunk {
    pub(crate) first_unit: u32,
    pub(crate) units: u32,
    /// A random number that the slots repeat.
    pub(crate) key: u64,
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
    pub(crate) chunks: Vec<SlotChunk>,
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
        out.u32(snapshot.blocks).u32(self.chunks.len() as u32).u32(0);
        for chunk in &self.chunks {
            out.u32(chunk.first_unit).u32(chunk.units).u64(chunk.key);
        }
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
        let mut chunks = Vec::new();
        for _ in 0..count.min(CHUNKS + 1) {
            let (first_unit, units, key) = (from.u32()?, from.u32()?, from.u64()?);
            chunks.push(SlotChunk { first_unit, units, key });
        }
        let features = incompatible;
        let superblock =
            Superblock { uuid, epoch, blocks, durable, next_ino, snapshot, chunks, features };
        Some((superblock, version, incompatible & !KNOWN | read_only))
    }

    /// True if `bytes` may be a mix of sectors of this version and of versions that are written beside it. Then every
    /// field can be from such a version.
    pub(crate) fn may_be_torn(&self, bytes: &[u8]) -> bool {
        const LISTED: usize = 112 + CHUNKS * 16;
        let zeros = |range: std::ops::Range<usize>| bytes[range].iter().all(|byte| *byte == 0);
        let Some((found, version, features)) = Superblock::fields(&bytes[MAGIC.len()..BLOCK - 4])
        else {
            return false;
        };
        let all_chunks = bytes[112..LISTED].chunks_exact(16);
        let units = found.blocks / UNIT_BLOCKS;
        let is_chunk = |chunk: &[u8]| {
            let number =
                |at: usize| u64::from(u32::from_le_bytes([0, 1, 2, 3].map(|n| chunk[at + n])));
            let (first, count) = (number(0), number(4));
            (first > 0 && count > 0 && first + count <= units)
                || chunk.iter().all(|byte| *byte == 0)
        };
        let near = self.epoch.saturating_sub(COPIES.len() as u64)..=self.epoch + 1;
        bytes.starts_with(MAGIC)
            && (version, features, found.uuid) == (VERSION, 0, self.uuid)
            && near.contains(&found.epoch)
            && (FEWEST_UNITS..=MOST_UNITS).contains(&units)
            && found.next_ino > 0
            && found.next_ino.max(found.durable) < 2 * NUMBERS
            && found.chunks.len() <= CHUNKS
            && all_chunks.into_iter().all(is_chunk)
            && [12..16, 48..56, 108..112, LISTED..BLOCK - 4].into_iter().all(zeros)
    }

    /// Chunks lie within the image, and neither on each other nor on a copy of the superblock.
    fn is_sound(&self) -> bool {
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
            && self.chunks.len() <= CHUNKS
            && apart
            && ranges.iter().all(|range| range.0 < range.1 && range.1 <= units)
    }
}

impl fmt::Display for SuperblockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SuperblockError::Other => f.write_str("no uhs file system"),
            SuperblockError::Damaged => f.write_str("the superblock is damaged"),
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
        let features = PADDED_RECORDS;
        Superblock { uuid, epoch, blocks, durable: 4, next_ino: 100, snapshot, chunks, features }
    }

    #[test]
    fn a_superblock_is_read_as_it_was_written() {
        let mut full = superblock();
        assert_eq!(Superblock::decode(&full.encode()), Ok(full.clone()));
        full.blocks = 1 << 30;
        let chunk = |at| SlotChunk { first_unit: 8 + 3 * at, units: 2, key: u64::from(at) };
        full.chunks = (0..CHUNKS as u32).map(chunk).collect();
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
