//! The table of the chunks that have no room in the superblock: a list of blocks, each in two
//! copies.

use super::BLOCK;
use super::bytes::{ByteReader, ByteWriter};
use super::superblock::SlotChunk;

const MAGIC: &[u8; 8] = b"defuseCT";

/// Copies of each block of the table.
pub(crate) const TABLE_COPIES: usize = 2;

/// Chunks that a block of the table lists at most.
pub(crate) const TABLE_CHUNKS: usize = (BLOCK - 48) / 16;

/// Blocks of the table of so many chunks.
pub(crate) fn table_blocks(chunks: usize) -> usize {
    chunks.div_ceil(TABLE_CHUNKS) * TABLE_COPIES
}

/// A block of the table, with its content verified by a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TablePointer {
    /// The blocks of its copies.
    pub(crate) blocks: [u64; TABLE_COPIES],
    /// The crc32c of the block.
    pub(crate) crc: u32,
}

/// The content of a block of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableBlock {
    pub(crate) next: Option<TablePointer>,
    /// At least one, at most [`TABLE_CHUNKS`].
    pub(crate) chunks: Vec<SlotChunk>,
}

impl TablePointer {
    /// Appends a pointer; zeros for none.
    pub(super) fn encode(pointer: Option<TablePointer>, out: &mut ByteWriter) {
        let none = TablePointer { blocks: [0; TABLE_COPIES], crc: 0 };
        let TablePointer { blocks, crc } = pointer.unwrap_or(none);
        out.u64(blocks[0]).u64(blocks[1]).u32(crc);
    }

    pub(super) fn decode(from: &mut ByteReader<'_>) -> Option<Option<TablePointer>> {
        let (blocks, crc) = ([from.u64()?, from.u64()?], from.u32()?);
        Some((blocks != [0; TABLE_COPIES]).then_some(TablePointer { blocks, crc }))
    }
}

impl TableBlock {
    /// The 4 KiB of a copy in the file system of this uuid.
    pub(crate) fn encode(&self, uuid: &[u8; 16]) -> Vec<u8> {
        debug_assert!((1..=TABLE_CHUNKS).contains(&self.chunks.len()), "{}", self.chunks.len());
        let mut out = ByteWriter::default();
        out.bytes(MAGIC).bytes(uuid);
        TablePointer::encode(self.next, &mut out);
        out.u32(self.chunks.len() as u32);
        self.chunks.iter().for_each(|chunk| chunk.encode(&mut out));
        out.pad(BLOCK);
        out.finish()
    }

    /// Reads a copy whose checksum is that of its pointer.
    pub(crate) fn decode(bytes: &[u8], uuid: &[u8; 16]) -> Option<TableBlock> {
        let mut from = ByteReader::new(bytes.strip_prefix(MAGIC)?);
        let found = from.uuid()?;
        let next = TablePointer::decode(&mut from)?;
        let count = from.u32()? as usize;
        if found != *uuid || !(1..=TABLE_CHUNKS).contains(&count) {
            return None;
        }
        let chunks = (0..count).map(|_| SlotChunk::decode(&mut from)).collect::<Option<_>>()?;
        Some(TableBlock { next, chunks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_the_table_is_read_as_it_was_written() {
        let chunk = |at: u32| SlotChunk { first_unit: 8 + at, units: 1, key: u64::from(at) };
        let next = TablePointer { blocks: [700, 900], crc: 9 };
        for (count, next) in [(1, None), (TABLE_CHUNKS as u32, Some(next))] {
            let block = TableBlock { next, chunks: (0..count).map(chunk).collect() };
            let bytes = block.encode(&[3; 16]);
            assert_eq!(bytes.len(), BLOCK);
            assert_eq!(TableBlock::decode(&bytes, &[3; 16]), Some(block));
            assert_eq!(TableBlock::decode(&bytes, &[4; 16]), None);
        }
    }

    #[test]
    fn a_block_without_chunks_or_with_too_many_is_refused() {
        let chunks = vec![SlotChunk { first_unit: 8, units: 1, key: 1 }];
        let good = TableBlock { next: None, chunks }.encode(&[3; 16]);
        for count in [0, TABLE_CHUNKS as u32 + 1, u32::MAX] {
            let mut bad = good.clone();
            bad[44..48].copy_from_slice(&count.to_le_bytes());
            assert_eq!(TableBlock::decode(&bad, &[3; 16]), None, "{count}");
        }
    }
}
