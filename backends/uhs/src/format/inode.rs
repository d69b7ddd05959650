//! Inodes: the body of their slots, and the records that have no room there.
//!
//! The body is a head of fixed fields and a sequence of records (names, extended attributes, the
//! target of a link, inline data, extents). Records that do not fit into the slot lie in record
//! blocks, to which the body points.

use super::bytes::{ByteReader, ByteWriter};
use super::slot::BODY;
use super::{BLOCK, NUMBERS};

/// Bytes of a file that lie in its inode at most.
pub(crate) const INLINE: usize = 3000;

/// Nanoseconds of a second.
const NANOS: u32 = 1_000_000_000;

/// Bytes of the head.
pub(crate) const HEAD: usize = 112;

/// The rest of a block of records is empty.
const PADDING: u8 = 0;
const NAME: u8 = 1;
const XATTR: u8 = 2;
const TARGET: u8 = 3;
const INLINE_DATA: u8 = 4;
const EXTENT: u8 = 5;
const XATTR_MORE: u8 = 6;
const UNWRITTEN: u8 = 7;

/// Bytes of the value of an extended attribute at most.
pub(crate) const VALUE_MAX: usize = 65536;

/// Bytes of a value that lie in its first record at most, so that the name fits, too.
const VALUE_PART: usize = 65_000;

/// Bytes of the record of an extent.
pub(crate) const EXTENT_BYTES: usize = 23;

/// Extents of a block without other records.
pub(crate) const EXTENTS_OF_BLOCK: usize = BLOCK / EXTENT_BYTES;

/// Bytes of the head of a record.
pub(crate) const RECORD_BYTES: usize = 3;

/// Bytes of the record of a name at most.
pub(crate) const NAME_BYTES: usize = LINK_BYTES + 255;

/// Bytes of the record of a name, without the name.
pub(crate) const LINK_BYTES: usize = RECORD_BYTES + 16;

/// A moment: seconds since 1970 and nanoseconds below 1,000,000,000.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DiskTime {
    pub(crate) sec: i64,
    pub(crate) nsec: u32,
}

/// A name of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InodeLink {
    /// The directory.
    pub(crate) parent: u64,
    /// Position of the entry in listings of the directory. Grows with every link that is made.
    pub(crate) stamp: u64,
    /// 1 to 255 bytes.
    pub(crate) name: Vec<u8>,
}

/// Neighbouring blocks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskExtent {
    /// The first page of the file that they hold.
    pub(crate) page: u64,
    /// The first block.
    pub(crate) block: u64,
    pub(crate) count: u32,
    /// The blocks belong to the file, and their pages read as zeros.
    pub(crate) unwritten: bool,
}

impl DiskExtent {
    /// The page after the last one.
    pub(crate) fn end(&self) -> u64 {
        self.page + u64::from(self.count)
    }
}

/// The data of an inode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum InodeData {
    /// None: a directory or special file.
    #[default]
    Nothing,
    /// The whole data of a small file.
    Inline(Vec<u8>),
    /// The target of a symbolic link.
    Target(Vec<u8>),
    /// Blocks, by page and without overlaps.
    Extents(Vec<DiskExtent>),
}

/// An inode, as the device stores it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskInode {
    /// Type and permissions, as in `st_mode`.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) rdev: u64,
    pub(crate) size: u64,
    pub(crate) atime: DiskTime,
    pub(crate) mtime: DiskTime,
    pub(crate) ctime: DiskTime,
    pub(crate) btime: DiskTime,
    pub(crate) links: Vec<InodeLink>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) data: InodeData,
}

/// Pointer to a block of records or of pointers, with the checksum of its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockPointer {
    pub(crate) block: u64,
    pub(crate) crc: u32,
}

impl InodeData {
    /// The most bytes that its records have.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            InodeData::Nothing => 0,
            InodeData::Inline(bytes) | InodeData::Target(bytes) => RECORD_BYTES + bytes.len(),
            InodeData::Extents(extents) => EXTENT_BYTES * (1 + extents.len()),
        }
    }
}

/// A body as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DecodedBody {
    /// All of the inode.
    Whole(DiskInode),
    /// An inode without its records. `bytes` bytes of records lie below `pointers`, in a tree of
    /// `levels` levels.
    Outside {
        /// The inode without links, extended attributes and data.
        inode: DiskInode,
        levels: u8,
        bytes: u64,
        pointers: Vec<BlockPointer>,
    },
}

/// Bytes of a pointer.
const POINTER: usize = 12;

/// Pointers of a body, and of a block of pointers, at most.
pub(crate) const POINTERS: usize = (BODY - HEAD - 16) / POINTER;
pub(crate) const POINTERS_OF_BLOCK: usize = BLOCK / POINTER;

impl DiskInode {
    /// Begins a body with the head, to which records of about so many bytes are added.
    pub(crate) fn begin(&self, records: usize) -> RecordWriter {
        RecordWriter(self.head(0, records))
    }

    /// The head and all records. Together they may be too large for a slot.
    pub(crate) fn body(&self) -> Vec<u8> {
        let mut out = self.begin(self.data.bytes());
        self.links.iter().for_each(|link| out.link(link.parent, link.stamp, &link.name));
        self.xattrs.iter().for_each(|(name, value)| out.xattr(name, value));
        out.data(&self.data);
        out.finish()
    }

    /// The body that points to records elsewhere.
    pub(crate) fn body_outside(
        &self,
        levels: u8,
        bytes: u64,
        pointers: &[BlockPointer],
    ) -> Vec<u8> {
        assert!(levels > 0 && pointers.len() <= POINTERS, "{} pointers", pointers.len());
        let mut out = self.head(levels, 16 + pointers.len() * POINTER);
        out.u64(bytes).u32(pointers.len() as u32).u32(0);
        for pointer in pointers {
            out.u64(pointer.block).u32(pointer.crc);
        }
        out.finish()
    }

    fn head(&self, levels: u8, more: usize) -> ByteWriter {
        let mut out = ByteWriter::with_capacity(HEAD + more);
        out.u32(self.mode).u32(self.uid).u32(self.gid).u8(levels).u8(0).u16(0);
        out.u64(self.rdev).u64(self.size);
        for moment in [self.atime, self.mtime, self.ctime, self.btime] {
            out.u64(moment.sec as u64).u32(moment.nsec);
        }
        out.pad(HEAD);
        out
    }

    /// Reads a body. `None` where it makes no sense.
    pub(crate) fn decode(body: &[u8]) -> Option<DecodedBody> {
        let (inode, levels, rest) = DiskInode::decode_head(body)?;
        let moments = [inode.atime, inode.mtime, inode.ctime, inode.btime];
        moments.iter().all(|moment| moment.nsec < NANOS).then_some(())?;
        match levels {
            0 => inode.with_records(rest).map(DecodedBody::Whole),
            _ => inode.decode_outside(levels, rest),
        }
    }

    /// Reads a body as if its records lay `levels` away, and as far as it is valid: for the repair
    /// of damage. `None` if they do not lie there.
    pub(crate) fn decode_readable(body: &[u8], levels: u8) -> Option<DecodedBody> {
        let (mut inode, _, rest) = DiskInode::decode_head(body)?;
        for moment in [&mut inode.atime, &mut inode.mtime, &mut inode.ctime, &mut inode.btime] {
            moment.nsec = moment.nsec.min(NANOS - 1);
        }
        match levels {
            0 => Some(DecodedBody::Whole(inode.with_readable_records(rest))),
            _ => inode.decode_outside(levels, rest),
        }
    }

    /// The length of a body without inline data at its end. The data of an inode with other records
    /// than one name counts, because it stays in memory.
    pub(crate) fn length_without_data(body: &[u8]) -> usize {
        let short = || {
            let (_, levels, rest) = DiskInode::decode_head(body)?;
            let mut from = ByteReader::new(rest);
            let name = (from.u8()?, usize::from(from.u16()?));
            from.bytes(name.1)?;
            let data = (from.u8()?, usize::from(from.u16()?));
            let is_short = levels == 0 && name.0 == NAME && data.0 == INLINE_DATA;
            let len = HEAD + 2 * RECORD_BYTES + name.1;
            (is_short && len + data.1 == body.len()).then_some(len)
        };
        short().unwrap_or(body.len())
    }

    /// The fixed fields, the levels, and the rest of a body.
    fn decode_head(body: &[u8]) -> Option<(DiskInode, u8, &[u8])> {
        let (head, rest) = body.split_at_checked(HEAD)?;
        let mut from = ByteReader::new(head);
        let (mode, uid, gid) = (from.u32()?, from.u32()?, from.u32()?);
        let (levels, _, _) = (from.u8()?, from.u8()?, from.u16()?);
        let (rdev, size) = (from.u64()?, from.u64()?);
        let mut moment = || Some(DiskTime { sec: from.u64()? as i64, nsec: from.u32()? });
        let (atime, mtime, ctime, btime) = (moment()?, moment()?, moment()?, moment()?);
        let (links, xattrs, data) = Default::default();
        #[rustfmt::skip]
        let inode = DiskInode { mode, uid, gid, rdev, size, atime, mtime, ctime, btime, links, xattrs, data };
        Some((inode, levels, rest))
    }

    fn decode_outside(self, levels: u8, rest: &[u8]) -> Option<DecodedBody> {
        let mut from = ByteReader::new(rest);
        let (bytes, count, _) = (from.u64()?, from.u32()? as usize, from.u32()?);
        if levels > 2 || count > POINTERS {
            return None;
        }
        let pointers = pointers(&mut from, count)?;
        Some(DecodedBody::Outside { inode: self, levels, bytes, pointers })
    }

    /// The inode with its records. `None` where they make no sense.
    pub(crate) fn with_records(mut self, records: &[u8]) -> Option<DiskInode> {
        let mut from = ByteReader::new(records);
        while let Some(kind) = from.u8() {
            match kind {
                PADDING => pass_padding(records, &mut from)?,
                kind => self.add_record(kind, &mut from)?,
            }
        }
        Some(self)
    }

    /// The inode with its records up to the first that makes no sense: for the repair of damage.
    pub(crate) fn with_readable_records(mut self, records: &[u8]) -> DiskInode {
        let mut from = ByteReader::new(records);
        while let Some(kind) = from.u8() {
            let read = match kind {
                PADDING => pass_padding(records, &mut from),
                kind => self.add_record(kind, &mut from),
            };
            if read.is_none() {
                break;
            }
        }
        self
    }

    fn add_record(&mut self, kind: u8, from: &mut ByteReader<'_>) -> Option<()> {
        let len = from.u16()? as usize;
        let mut of = ByteReader::new(from.bytes(len)?);
        match kind {
            NAME => {
                let (parent, stamp) = (of.u64()?, of.u64()?);
                let name = of.bytes(len.checked_sub(16)?)?.to_vec();
                let sound = stamp < NUMBERS && is_name(&name);
                sound.then(|| self.links.push(InodeLink { parent, stamp, name }))?;
            }
            XATTR => {
                let name = of.u8().and_then(|len| of.bytes(len.into()))?.to_vec();
                let value = of.bytes(len.checked_sub(1 + name.len())?)?.to_vec();
                let sound = !name.is_empty() && !name.contains(&0);
                sound.then(|| self.xattrs.push((name, value)))?;
            }
            XATTR_MORE => {
                let (_, value) = self.xattrs.last_mut()?;
                value.extend_from_slice(of.bytes(len)?);
                (value.len() <= VALUE_MAX).then_some(())?;
            }
            INLINE_DATA if len <= INLINE && self.data == InodeData::Nothing => {
                self.data = InodeData::Inline(of.bytes(len)?.to_vec());
            }
            TARGET if (1..BLOCK).contains(&len) && self.data == InodeData::Nothing => {
                self.data = InodeData::Target(of.bytes(len)?.to_vec());
            }
            EXTENT if len == 0 && self.data == InodeData::Nothing => {
                self.data = InodeData::Extents(Vec::new());
            }
            EXTENT | UNWRITTEN if len == 20 => {
                let (page, block, count) = (of.u64()?, of.u64()?, of.u32()?);
                let extent = DiskExtent { page, block, count, unwritten: kind == UNWRITTEN };
                let InodeData::Extents(extents) = &mut self.data else { return None };
                let after = extents.last().map_or(0, DiskExtent::end);
                let ends = |at: u64| at.checked_add(u64::from(extent.count)).is_some();
                let sound = extent.page >= after && extent.count > 0;
                (sound && ends(extent.page) && ends(extent.block)).then(|| extents.push(extent))?;
            }
            _ => return None,
        }
        Some(())
    }
}

/// Records, one after the other.
#[derive(Default)]
pub(crate) struct RecordWriter(ByteWriter);

impl RecordWriter {
    pub(crate) fn link(&mut self, parent: u64, stamp: u64, name: &[u8]) {
        record(&mut self.0, NAME, 16 + name.len());
        self.0.u64(parent).u64(stamp).bytes(name);
    }

    pub(crate) fn xattr(&mut self, name: &[u8], value: &[u8]) {
        let (value, more) = value.split_at(value.len().min(VALUE_PART));
        record(&mut self.0, XATTR, 1 + name.len() + value.len());
        self.0.u8(name.len() as u8).bytes(name).bytes(value);
        if !more.is_empty() {
            record(&mut self.0, XATTR_MORE, more.len());
            self.0.bytes(more);
        }
    }

    pub(crate) fn data(&mut self, data: &InodeData) {
        let out = &mut self.0;
        match data {
            InodeData::Nothing => {}
            InodeData::Inline(bytes) => {
                record(out, INLINE_DATA, bytes.len());
                out.bytes(bytes);
            }
            InodeData::Target(bytes) => {
                record(out, TARGET, bytes.len());
                out.bytes(bytes);
            }
            InodeData::Extents(extents) => self.extents(extents.iter().copied()),
        }
    }

    pub(crate) fn extents(&mut self, extents: impl Iterator<Item = DiskExtent>) {
        // An empty list is not the same as no data: a file that was made larger has one.
        record(&mut self.0, EXTENT, 0);
        extents.for_each(|extent| put_extent(&mut self.0, &extent));
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0.finish()
    }
}

/// True for bytes that can be the name of a directory entry.
pub(crate) fn is_name(name: &[u8]) -> bool {
    (1..=255).contains(&name.len())
        && !name.iter().any(|byte| matches!(byte, b'/' | 0))
        && !matches!(name, b"." | b"..")
}

fn put_extent(out: &mut ByteWriter, extent: &DiskExtent) {
    record(out, if extent.unwritten { UNWRITTEN } else { EXTENT }, 20);
    out.u64(extent.page).u64(extent.block).u32(extent.count);
}

/// A block of records with these extents, [`EXTENTS_OF_BLOCK`] at most.
pub(crate) fn block_of_extents(extents: impl Iterator<Item = DiskExtent>) -> [u8; BLOCK] {
    let mut out = ByteWriter::with_capacity(BLOCK);
    extents.for_each(|extent| put_extent(&mut out, &extent));
    let mut bytes = [0; BLOCK];
    bytes[..out.as_slice().len()].copy_from_slice(out.as_slice());
    bytes
}

/// Skips the padding of a block of records. `None` if the records do not lie in whole blocks.
fn pass_padding(records: &[u8], from: &mut ByteReader<'_>) -> Option<()> {
    records.len().is_multiple_of(BLOCK).then_some(())?;
    from.bytes(from.remaining() % BLOCK).map(drop)
}

fn record(out: &mut ByteWriter, kind: u8, len: usize) {
    out.u8(kind).u16(u16::try_from(len).unwrap_or_else(|_| panic!("a record of {len} bytes")));
}

fn pointers(from: &mut ByteReader<'_>, count: usize) -> Option<Vec<BlockPointer>> {
    (0..count).map(|_| Some(BlockPointer { block: from.u64()?, crc: from.u32()? })).collect()
}

/// Puts records that do not fit into a body into blocks of their own, each of which `place` takes.
/// Returns the levels and the pointers of the body; `None` if a body cannot point to so many
/// records.
pub(crate) fn write_overflow<E>(
    records: &[u8],
    mut place: impl FnMut([u8; BLOCK]) -> Result<BlockPointer, E>,
) -> Result<Option<(u8, Vec<BlockPointer>)>, E> {
    let mut write = |content: &[u8]| {
        let mut bytes = [0; BLOCK];
        bytes[..content.len()].copy_from_slice(content);
        place(bytes)
    };
    let pointers: Vec<BlockPointer> =
        records.chunks(BLOCK).map(&mut write).collect::<Result<_, E>>()?;
    if pointers.len() <= POINTERS {
        return Ok(Some((1, pointers)));
    }
    let parts = pointers.chunks(POINTERS_OF_BLOCK);
    let pointers: Vec<BlockPointer> =
        parts.map(|part| write(&pointer_block(part))).collect::<Result<_, E>>()?;
    Ok((pointers.len() <= POINTERS).then_some((2, pointers)))
}

/// A block of pointers.
pub(crate) fn pointer_block(pointers: &[BlockPointer]) -> Vec<u8> {
    let mut out = ByteWriter::default();
    for pointer in pointers {
        out.u64(pointer.block).u32(pointer.crc);
    }
    out.pad(BLOCK);
    out.finish()
}

/// The first `count` pointers of a block.
pub(crate) fn pointers_of(block: &[u8], count: usize) -> Option<Vec<BlockPointer>> {
    pointers(&mut ByteReader::new(block), count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inode() -> DiskInode {
        let moment = |sec| DiskTime { sec, nsec: 999_999_999 };
        let link = |stamp, name: &[u8]| InodeLink { parent: 1, stamp, name: name.to_vec() };
        DiskInode {
            mode: 0o100_644,
            uid: 1,
            gid: 2,
            rdev: 3,
            size: 1 << 40,
            atime: moment(-5),
            mtime: moment(6),
            ctime: moment(1 << 40),
            btime: moment(8),
            links: vec![link(9, b"a"), link(10, &[b'x'; 255])],
            xattrs: vec![(b"user.k".to_vec(), vec![7; 100]), (b"user.e".to_vec(), Vec::new())],
            data: InodeData::Extents(vec![
                DiskExtent { page: 0, block: 100, count: 5, unwritten: false },
                DiskExtent { page: 9, block: 7, count: 1, unwritten: true },
            ]),
        }
    }

    #[test]
    fn only_inline_data_of_inodes_with_one_name_and_nothing_else_is_left_out() {
        let data = || InodeData::Inline(vec![5; 1000]);
        let links = vec![inode().links[0].clone()];
        let short = DiskInode { links, xattrs: Vec::new(), data: data(), ..inode() };
        let (body, len) = (short.body(), HEAD + 2 * RECORD_BYTES + 16 + 1);
        assert_eq!((DiskInode::length_without_data(&body), body.len()), (len, len + 1000));
        for cut in 0..body.len() {
            assert_eq!(DiskInode::length_without_data(&body[..cut]), cut, "the record has no end");
        }
        let more = [body.as_slice(), &[0]].concat();
        assert_eq!(DiskInode::length_without_data(&more), more.len());
        let others = [
            DiskInode { links: inode().links, ..short.clone() },
            DiskInode { xattrs: inode().xattrs, ..short.clone() },
            DiskInode { links: Vec::new(), ..short.clone() },
            DiskInode { data: InodeData::Target(vec![b'x'; 100]), ..short.clone() },
            DiskInode { data: inode().data, ..short },
        ];
        for other in others {
            assert_eq!(
                DiskInode::length_without_data(&other.body()),
                other.body().len(),
                "{other:?}"
            );
        }
    }

    #[test]
    fn an_inode_is_read_as_it_was_written() {
        let data = [
            InodeData::Nothing,
            InodeData::Inline(vec![1; INLINE]),
            InodeData::Target(b"to".to_vec()),
            InodeData::Extents(Vec::new()),
            inode().data,
        ];
        for data in data {
            let inode = DiskInode { data, ..inode() };
            let body = inode.body();
            assert_eq!(DiskInode::decode(&body), Some(DecodedBody::Whole(inode)));
        }
    }

    #[test]
    fn records_elsewhere_come_back() {
        let inode = inode();
        let pointers: Vec<BlockPointer> =
            (0..POINTERS as u64).map(|block| BlockPointer { block, crc: 4 }).collect();
        let records = inode.body()[HEAD..].to_vec();
        let body = inode.body_outside(1, records.len() as u64, &pointers);
        assert!(body.len() <= BODY);
        let Some(DecodedBody::Outside { inode: bare, levels: 1, bytes, pointers: read }) =
            DiskInode::decode(&body)
        else {
            panic!()
        };
        assert_eq!((bytes, &read), (records.len() as u64, &pointers));
        assert_eq!(bare.with_records(&records), Some(inode));
        let block = pointer_block(&pointers);
        assert_eq!(pointers_of(&block, pointers.len()), Some(pointers));
    }

    /// A correct checksum does not make bytes valid: an image may be forged.
    #[test]
    fn any_bytes_are_decoded_or_refused() {
        let good = inode().body();
        let mut random = fastrand::Rng::with_seed(3);
        let (mut whole, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            bytes.truncate(random.usize(..=bytes.len()));
            match DiskInode::decode(&bytes) {
                Some(_) => whole += 1,
                None => refused += 1,
            }
        }
        assert!(whole > 0 && refused > 0, "{whole} {refused}");
    }

    #[test]
    fn records_that_make_no_sense_are_refused() {
        let with = |kind: u8, body: &[u8]| {
            let mut out = ByteWriter::default();
            record(&mut out, kind, body.len());
            out.bytes(body);
            DiskInode::default().with_records(out.as_slice())
        };
        let name = |name: &[u8]| with(NAME, &[&[0; 16], name].concat());
        assert!(name(b"good").is_some());
        for bad in [&b""[..], b"a/b", b".", b"..", b"a\0", &[b'x'; 256]] {
            assert!(name(bad).is_none(), "{bad:?}");
        }
        assert!(with(EXTENT, &[0; 20]).is_none(), "an extent without a list");
        assert!(with(9, b"").is_none() && with(INLINE_DATA, &[0; INLINE + 1]).is_none());
        let overlap = DiskInode {
            data: InodeData::Extents(vec![
                DiskExtent { page: 4, block: 1, count: 2, unwritten: false },
                DiskExtent { page: 5, block: 9, count: 1, unwritten: false },
            ]),
            ..DiskInode::default()
        };
        assert_eq!(DiskInode::default().with_records(&overlap.body()[HEAD..]), None);
    }
}
