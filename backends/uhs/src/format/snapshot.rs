//! Snapshots: all inodes as a mount needs them in memory, written at a clean end. They repeat the
//! content of the slots, and are never needed.

use super::bytes::{ByteReader, ByteWriter};
use super::{BLOCK, NUMBERS};

const MAGIC: &[u8; 8] = b"defuseSN";

/// Blocks of a segment at most: 1 MiB.
pub(crate) const SEGMENT_BLOCKS: u32 = 256;

/// Bytes of a segment at most.
pub(crate) const SEGMENT: usize = SEGMENT_BLOCKS as usize * BLOCK;

/// Blocks of a header at most.
pub(crate) const HEADER_BLOCKS: u32 = 64;

/// Bytes of a header before its segments.
const HEAD: usize = 64;

/// Bytes of the description of a segment.
const DESCRIPTION: usize = 16;

/// Segments at most: 16 GiB.
const SEGMENTS: usize = (HEADER_BLOCKS as usize * BLOCK - HEAD) / DESCRIPTION;

/// Bytes of the shortest inode: so many of them there are at most.
pub(crate) const SHORTEST: usize = 85;

/// The place of a header, in the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotPointer {
    pub(crate) block: u64,
    pub(crate) blocks: u32,
    /// The checksum of these blocks.
    pub(crate) crc: u32,
}

/// The head of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotHeader {
    pub(crate) uuid: [u8; 16],
    /// The newest group. It is durable.
    pub(crate) durable: u64,
    /// Higher than the stamps of all slots.
    pub(crate) next_stamp: u64,
    pub(crate) inodes: u64,
    pub(crate) segments: Vec<SnapshotSegment>,
}

/// Neighbouring blocks with whole entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotSegment {
    pub(crate) block: u64,
    pub(crate) bytes: u32,
    pub(crate) crc: u32,
}

/// A part of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SnapshotEntry<'a> {
    /// An inode for which little must be in memory.
    Short(ShortInode<'a>),
    /// An inode with its whole body, which includes all records, and the blocks in which the device
    /// keeps its overflow records.
    Full { ino: u64, slot: u64, body: &'a [u8], records: Vec<(u64, u32)> },
    /// A slot with a stale copy of an inode.
    Stale { ino: u64, slot: u64 },
    /// A removal slot, and the inodes that need it.
    Removals { slot: u64, inos: Vec<u64> },
}

/// An inode with one name, or the root, and little else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShortInode<'a> {
    pub(crate) ino: u64,
    /// The block of its slot.
    pub(crate) slot: u64,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    /// Nanoseconds since 1970: access, modification, change, birth.
    pub(crate) times: [i64; 4],
    /// 0 for the root.
    pub(crate) parent: u64,
    pub(crate) stamp: u64,
    pub(crate) name: &'a [u8],
    pub(crate) data: ShortData,
}

/// The data of a [`ShortInode`] inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShortData {
    /// In the slot, or none.
    Stored,
    /// Blocks that begin with the first page.
    Blocks {
        block: u64,
        count: u32,
    },
    Device(u64),
    Directory,
}

impl SnapshotHeader {
    /// The blocks of the header; `None` for more segments than it can have.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let mut out = ByteWriter::with_capacity(BLOCK);
        out.bytes(MAGIC).bytes(&self.uuid).u64(self.durable).u64(self.next_stamp);
        out.u64(self.inodes).u32(self.segments.len() as u32).u32(0).u64(0);
        for segment in &self.segments {
            out.u64(segment.block).u32(segment.bytes).u32(segment.crc);
        }
        let blocks = out.as_slice().len().div_ceil(BLOCK);
        out.pad(blocks * BLOCK);
        (self.segments.len() <= SEGMENTS).then(|| out.finish())
    }

    /// Reads a header with a correct checksum. Segments lie within `blocks` blocks.
    pub(crate) fn decode(bytes: &[u8], blocks: u64) -> Option<SnapshotHeader> {
        let mut from = ByteReader::new(bytes.strip_prefix(MAGIC)?);
        let (uuid, durable, next_stamp) = (from.uuid()?, from.u64()?, from.u64()?);
        let (inodes, count) = (from.u64()?, from.u32()? as usize);
        let (_, _) = (from.u32()?, from.u64()?);
        let segment =
            |_| Some(SnapshotSegment { block: from.u64()?, bytes: from.u32()?, crc: from.u32()? });
        let segments: Vec<SnapshotSegment> =
            (0..count.min(SEGMENTS + 1)).map(segment).collect::<Option<_>>()?;
        let fits = |segment: &SnapshotSegment| {
            let end = segment.block.checked_add(u64::from(segment.blocks()));
            (1..=SEGMENT).contains(&(segment.bytes as usize))
                && end.is_some_and(|end| end <= blocks)
        };
        let most = segments.iter().map(|segment| u64::from(segment.bytes)).sum::<u64>();
        let sound = segments.len() <= SEGMENTS
            && segments.iter().all(fits)
            && durable.max(next_stamp) < NUMBERS
            && inodes <= most / SHORTEST as u64;
        sound.then_some(SnapshotHeader { uuid, durable, next_stamp, inodes, segments })
    }
}

impl SnapshotSegment {
    /// The number of blocks of the segment.
    pub(crate) fn blocks(&self) -> u32 {
        self.bytes.div_ceil(BLOCK as u32)
    }
}

const SHORT: u8 = 1;
const FULL: u8 = 2;
const STALE: u8 = 3;
const REMOVALS: u8 = 4;

impl SnapshotEntry<'_> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = ByteWriter::with_capacity(128);
        match self {
            SnapshotEntry::Short(short) => {
                let (kind, place, count) = match short.data {
                    ShortData::Stored => (0, 0, 0),
                    ShortData::Blocks { block, count } => (1, block, count),
                    ShortData::Device(number) => (2, number, 0),
                    ShortData::Directory => (3, 0, 0),
                };
                out.u8(SHORT).u8(kind).u8(short.name.len() as u8).u16(short.mode as u16);
                out.u64(short.ino).u64(short.slot).u32(short.uid).u32(short.gid).u64(short.size);
                for time in short.times {
                    out.bytes(&time.to_le_bytes());
                }
                out.u64(short.parent).u64(short.stamp);
                if kind == 1 || kind == 2 {
                    out.u64(place).u32(count);
                }
                out.bytes(short.name);
            }
            SnapshotEntry::Full { ino, slot, body, records } => {
                out.u8(FULL).u64(*ino).u64(*slot).u32(body.len() as u32).u32(records.len() as u32);
                for (block, count) in records {
                    out.u64(*block).u32(*count);
                }
                out.bytes(body);
            }
            SnapshotEntry::Stale { ino, slot } => {
                out.u8(STALE).u64(*ino).u64(*slot);
            }
            SnapshotEntry::Removals { slot, inos } => {
                out.u8(REMOVALS).u64(*slot).u32(inos.len() as u32);
                for ino in inos {
                    out.u64(*ino);
                }
            }
        }
        out.finish()
    }
}

/// The entries of a segment. `None` for an invalid entry, which is the last one.
pub(crate) fn entries(bytes: &[u8]) -> impl Iterator<Item = Option<SnapshotEntry<'_>>> {
    let mut from = Some(ByteReader::new(bytes));
    std::iter::from_fn(move || {
        let reader = from.as_mut().filter(|reader| !reader.is_empty())?;
        let entry = entry(reader);
        if entry.is_none() {
            from = None;
        }
        Some(entry)
    })
}

fn entry<'a>(from: &mut ByteReader<'a>) -> Option<SnapshotEntry<'a>> {
    Some(match from.u8()? {
        SHORT => {
            let (kind, name, mode) = (from.u8()?, from.u8()?, from.u16()?);
            let (ino, slot, uid, gid, size) =
                (from.u64()?, from.u64()?, from.u32()?, from.u32()?, from.u64()?);
            let mut times = [0; 4];
            for time in &mut times {
                *time = from.u64()? as i64;
            }
            let (parent, stamp) = (from.u64()?, from.u64()?);
            let data = match kind {
                0 => ShortData::Stored,
                1 => ShortData::Blocks { block: from.u64()?, count: from.u32()? },
                2 => {
                    let (number, _) = (from.u64()?, from.u32()?);
                    ShortData::Device(number)
                }
                3 => ShortData::Directory,
                _ => return None,
            };
            let name = from.bytes(name.into())?;
            let mode = mode.into();
            SnapshotEntry::Short(ShortInode {
                ino,
                slot,
                mode,
                uid,
                gid,
                size,
                times,
                parent,
                stamp,
                name,
                data,
            })
        }
        FULL => {
            let (ino, slot, len, count) = (from.u64()?, from.u64()?, from.u32()?, from.u32()?);
            let run = |_| Some((from.u64()?, from.u32()?));
            let records = (0..count.min(SEGMENT as u32)).map(run).collect::<Option<_>>()?;
            SnapshotEntry::Full { ino, slot, body: from.bytes(len as usize)?, records }
        }
        STALE => SnapshotEntry::Stale { ino: from.u64()?, slot: from.u64()? },
        REMOVALS => {
            let (slot, count) = (from.u64()?, from.u32()?);
            let inos = (0..count.min(SEGMENT as u32)).map(|_| from.u64()).collect::<Option<_>>()?;
            SnapshotEntry::Removals { slot, inos }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_they_were_written() {
        let short = |data| {
            SnapshotEntry::Short(ShortInode {
                ino: 5,
                slot: 600,
                mode: 0o100_644,
                uid: 1,
                gid: 2,
                size: 3,
                times: [1, -1, i64::MAX, 4],
                parent: 1,
                stamp: 9,
                name: b"name",
                data,
            })
        };
        let all = [
            short(ShortData::Stored),
            short(ShortData::Blocks { block: 1 << 40, count: 7 }),
            short(ShortData::Device(77)),
            short(ShortData::Directory),
            SnapshotEntry::Full { ino: 6, slot: 601, body: b"body", records: vec![(8, 1), (9, 2)] },
            SnapshotEntry::Stale { ino: 7, slot: 602 },
            SnapshotEntry::Removals { slot: 603, inos: vec![1, 2, 3] },
        ];
        let bytes: Vec<u8> = all.iter().flat_map(SnapshotEntry::encode).collect();
        let read: Option<Vec<SnapshotEntry<'_>>> = entries(&bytes).collect();
        assert_eq!(read.as_deref(), Some(&all[..]));
        for len in 0..bytes.len() {
            // Any prefix is read without a panic.
            assert!(entries(&bytes[..len]).count() <= all.len());
        }
        let least = short(ShortData::Stored).encode().len() - b"name".len();
        assert_eq!(least, SHORTEST);
    }

    #[test]
    fn a_header_that_makes_no_sense_is_refused() {
        let segment = SnapshotSegment { block: 600, bytes: 5000, crc: 1 };
        let good = SnapshotHeader {
            uuid: [3; 16],
            durable: 4,
            next_stamp: 5,
            inodes: 50,
            segments: vec![segment; 300],
        };
        let bytes = good.encode().unwrap();
        assert_eq!(bytes.len(), 2 * BLOCK);
        assert_eq!(SnapshotHeader::decode(&bytes, 602), Some(good.clone()));
        assert_eq!(SnapshotHeader::decode(&bytes, 601), None);
        for change in [
            |header: &mut SnapshotHeader| header.next_stamp = u64::MAX,
            |header: &mut SnapshotHeader| header.durable = NUMBERS,
            |header: &mut SnapshotHeader| header.inodes = u64::MAX,
            |header: &mut SnapshotHeader| header.segments[7].block = u64::MAX,
            |header: &mut SnapshotHeader| header.segments[7].bytes = 0,
            |header: &mut SnapshotHeader| header.segments[7].bytes = SEGMENT as u32 + 1,
        ] {
            let mut forged = good.clone();
            change(&mut forged);
            assert_eq!(SnapshotHeader::decode(&forged.encode().unwrap(), 602), None, "{forged:?}");
        }
        let many = SnapshotHeader { segments: vec![segment; SEGMENTS + 1], ..good };
        assert_eq!(many.encode(), None);
        assert_eq!(SnapshotHeader::decode(&bytes[..BLOCK], 602), None);
    }
}
