//! Slots: 4 KiB that hold a version of an inode, or a list of inodes that are gone.
//!
//! The identity stands at both ends, each with a checksum of its own. So a slot that was damaged at
//! rest still identifies its inode, and no older version of the inode comes back silently.

use super::bytes::{ByteReader, ByteWriter};
use super::{BLOCK, NUMBERS};

const MAGIC: u32 = u32::from_le_bytes(*b"UHSS");
const FORM: u8 = 1;

/// Bytes of an identity.
const IDENTITY: usize = 96;

/// Bytes of the body at most.
pub(crate) const BODY: usize = BLOCK - 2 * IDENTITY;

/// Inodes that a removal block lists at most.
pub(crate) const REMOVALS: usize = BODY / 8;

/// The contents of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotKind {
    /// A version of an inode.
    Inode,
    /// A list of inodes that are gone.
    Removals,
    /// Nothing: the slot only carries the number of the newest durable group.
    Nothing,
}

/// Facts about the file system that every slot repeats, so that no other bytes pass for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotIdentity {
    /// The identifier of the file system, as in the superblock.
    pub(crate) uuid: [u8; 16],
    /// The key of the chunk, a random number that files cannot know.
    pub(crate) key: u64,
    /// The number of the slot's block.
    pub(crate) block: u64,
}

/// Everything about a slot but its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotHeader {
    pub(crate) kind: SlotKind,
    /// 0 unless the kind is [`SlotKind::Inode`].
    pub(crate) ino: u64,
    /// Grows with every slot that is written.
    pub(crate) stamp: u64,
    pub(crate) group: u64,
    /// Position of the slot in its group.
    pub(crate) index: u32,
    /// Slots of the group.
    pub(crate) count: u32,
    /// The newest group that was known to be durable when this was written.
    pub(crate) durable: u64,
    /// Set by [`encode`].
    pub(crate) body_len: u32,
    /// Set by [`encode`].
    pub(crate) body_crc: u32,
    /// No removals slot with an older stamp is needed. 0 if the slot makes no such statement.
    pub(crate) removals_from: u64,
}

/// A slot as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FoundSlot<'a> {
    /// No slot of this file system.
    Nothing,
    /// A whole slot, and its body.
    Whole(SlotHeader, &'a [u8]),
    /// A slot that is torn or damaged: the identities that can be read, one or two.
    Broken(SlotHeader, Option<SlotHeader>),
}

impl SlotHeader {
    pub(crate) fn new(kind: SlotKind, ino: u64, stamp: u64) -> Self {
        let (group, index, count, durable, removals_from) = (0, 0, 0, 0, 0);
        let (body_len, body_crc) = (0, 0);
        SlotHeader {
            kind,
            ino,
            stamp,
            group,
            index,
            count,
            durable,
            body_len,
            body_crc,
            removals_from,
        }
    }

    fn encode(&self, place: &SlotIdentity) -> Vec<u8> {
        let kind = match self.kind {
            SlotKind::Inode => 1,
            SlotKind::Removals => 2,
            SlotKind::Nothing => 3,
        };
        let mut out = ByteWriter::with_capacity(IDENTITY);
        out.u32(MAGIC).u8(kind).u8(FORM).u16(0).bytes(&place.uuid).u64(place.key);
        out.u64(place.block).u64(self.ino).u64(self.stamp).u64(self.group).u32(self.index);
        out.u32(self.count).u64(self.durable).u32(self.body_len).u32(self.body_crc);
        // `removals_from` is stored as a distance, which is 1 if it is the stamp of this slot.
        let distance = self.stamp.saturating_add(1).checked_sub(self.removals_from);
        let distance = distance.filter(|_| self.removals_from > 0);
        out.u32(distance.and_then(|distance| u32::try_from(distance).ok()).unwrap_or(0));
        let crc = crc32c::crc32c(out.as_slice());
        out.u32(crc).pad(IDENTITY);
        out.finish()
    }

    fn decode(bytes: &[u8], place: &SlotIdentity) -> Option<SlotHeader> {
        let (checked, crc) = bytes.split_at_checked(IDENTITY - 4)?;
        if crc32c::crc32c(checked).to_le_bytes() != crc {
            return None;
        }
        let mut from = ByteReader::new(checked);
        let (magic, kind, form, _) = (from.u32()?, from.u8()?, from.u8()?, from.u16()?);
        let found = SlotIdentity { uuid: from.uuid()?, key: from.u64()?, block: from.u64()? };
        let kind = match kind {
            1 => SlotKind::Inode,
            2 => SlotKind::Removals,
            3 => SlotKind::Nothing,
            _ => return None,
        };
        let mut identity = SlotHeader {
            kind,
            ino: from.u64()?,
            stamp: from.u64()?,
            group: from.u64()?,
            index: from.u32()?,
            count: from.u32()?,
            durable: from.u64()?,
            body_len: from.u32()?,
            body_crc: from.u32()?,
            removals_from: 0,
        };
        let distance = u64::from(from.u32()?);
        if distance > 0 {
            identity.removals_from = (identity.stamp.saturating_add(1)).saturating_sub(distance);
        }
        let sound = magic == MAGIC
            && form == FORM
            && found == *place
            && identity.body_len as usize <= BODY
            && identity.index < identity.count
            && identity.durable < identity.group
            && identity.group.max(identity.stamp).max(identity.ino) < NUMBERS
            && (identity.kind == SlotKind::Inode) == (identity.ino != 0);
        sound.then_some(identity)
    }
}

/// Puts the slot of `identity` with `body` into the 4 KiB `out`.
///
/// # Panics
///
/// When the body has more than [`BODY`] bytes.
pub(crate) fn encode(mut identity: SlotHeader, body: &[u8], place: &SlotIdentity, out: &mut [u8]) {
    assert!(body.len() <= BODY, "a body of {} bytes fits into no slot", body.len());
    identity.body_len = body.len() as u32;
    identity.body_crc = crc32c::crc32c(body);
    let ends = identity.encode(place);
    out[..IDENTITY].copy_from_slice(&ends);
    out[IDENTITY..][..body.len()].copy_from_slice(body);
    out[IDENTITY + body.len()..BLOCK - IDENTITY].fill(0);
    out[BLOCK - IDENTITY..BLOCK].copy_from_slice(&ends);
}

/// The body of a slot that [`encode`] has made.
pub(crate) fn body_of(slot: &[u8]) -> &[u8] {
    let at = IDENTITY - 16;
    let len = slot[at..at + 4].try_into().map_or(0, u32::from_le_bytes) as usize;
    &slot[IDENTITY..][..len.min(BODY)]
}

/// The bytes that the body of `identity` has in a damaged slot.
pub(crate) fn damaged_body<'a>(slot: &'a [u8], identity: &SlotHeader) -> &'a [u8] {
    &slot[IDENTITY..][..(identity.body_len as usize).min(BODY)]
}

/// Examines the 4 KiB that lie at `place`.
pub(crate) fn decode<'a>(bytes: &'a [u8], place: &SlotIdentity) -> FoundSlot<'a> {
    let head = SlotHeader::decode(&bytes[..IDENTITY], place);
    let tail = SlotHeader::decode(&bytes[BLOCK - IDENTITY..], place);
    match (head, tail) {
        (None, None) => FoundSlot::Nothing,
        (Some(one), None) | (None, Some(one)) => FoundSlot::Broken(one, None),
        (Some(head), Some(tail)) if head != tail => FoundSlot::Broken(head, Some(tail)),
        (Some(head), Some(_)) => {
            let body = &bytes[IDENTITY..][..head.body_len as usize];
            match crc32c::crc32c(body) == head.body_crc {
                true => FoundSlot::Whole(head, body),
                false => FoundSlot::Broken(head, None),
            }
        }
    }
}

/// The body of a removal block.
pub(crate) fn removals(inos: &[u64]) -> Vec<u8> {
    inos.iter().flat_map(|ino| ino.to_le_bytes()).collect()
}

/// The inodes that a removal block lists.
pub(crate) fn list_removed(body: &[u8]) -> Vec<u64> {
    let mut from = ByteReader::new(body);
    std::iter::from_fn(|| from.u64()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: SlotIdentity = SlotIdentity { uuid: [7; 16], key: 99, block: 1234 };

    fn identity() -> SlotHeader {
        let (kind, ino, stamp) = (SlotKind::Inode, 5, 77);
        SlotHeader { group: 9, index: 1, count: 3, durable: 8, ..SlotHeader::new(kind, ino, stamp) }
    }

    fn slot(body: &[u8]) -> Vec<u8> {
        let mut out = vec![0xaa; BLOCK];
        encode(identity(), body, &PLACE, &mut out);
        out
    }

    #[test]
    fn a_slot_is_read_as_it_was_written() {
        for len in [0, 1, 100, BODY] {
            let body = vec![3; len];
            let bytes = slot(&body);
            let FoundSlot::Whole(found, read) = decode(&bytes, &PLACE) else { panic!("{len}") };
            assert!(body_of(&bytes) == body);
            assert_eq!((found.ino, found.stamp, found.group), (5, 77, 9));
            assert!(read == body);
        }
    }

    #[test]
    fn a_slot_of_another_place_key_or_file_system_is_none() {
        let bytes = slot(b"x");
        for place in [
            SlotIdentity { block: 1235, ..PLACE },
            SlotIdentity { key: 98, ..PLACE },
            SlotIdentity { uuid: [8; 16], ..PLACE },
        ] {
            assert_eq!(decode(&bytes, &place), FoundSlot::Nothing);
        }
        assert_eq!(decode(&[0; BLOCK], &PLACE), FoundSlot::Nothing);
    }

    /// Damage at rest once brought back an older version of a file, because the inode of an
    /// unreadable slot was unknown.
    #[test]
    fn a_damaged_byte_is_noticed_and_the_slot_still_says_whose_it_was() {
        let body = vec![3; 2000];
        let good = slot(&body);
        for at in 0..BLOCK {
            let mut bytes = good.clone();
            bytes[at] ^= 0x10;
            match decode(&bytes, &PLACE) {
                FoundSlot::Broken(one, other) => {
                    assert_eq!((one.ino, one.stamp, other), (5, 77, None), "byte {at}");
                }
                // Bytes between the body and its end mean nothing.
                FoundSlot::Whole(..) => assert!((IDENTITY + 2000..BLOCK - IDENTITY).contains(&at)),
                FoundSlot::Nothing => panic!("byte {at} hides the slot"),
            }
        }
    }

    #[test]
    fn a_slot_that_is_torn_over_another_one_shows_both() {
        let mut bytes = slot(b"new");
        let mut old = vec![0; BLOCK];
        let older = SlotHeader { ino: 6, stamp: 3, group: 2, durable: 1, ..identity() };
        encode(older, b"old", &PLACE, &mut old);
        bytes[512..].copy_from_slice(&old[512..]);
        let FoundSlot::Broken(head, Some(tail)) = decode(&bytes, &PLACE) else { panic!() };
        assert_eq!((head.ino, tail.ino), (5, 6));
    }

    /// Mounting continued from the largest numbers of an image, and overflowed.
    #[test]
    fn numbers_that_cannot_be_counted_on_from_are_no_slot() {
        for change in [
            |identity: &mut SlotHeader| identity.stamp = u64::MAX,
            |identity: &mut SlotHeader| identity.group = u64::MAX,
            |identity: &mut SlotHeader| identity.ino = u64::MAX,
        ] {
            let mut forged = identity();
            change(&mut forged);
            let mut out = vec![0; BLOCK];
            encode(forged, b"x", &PLACE, &mut out);
            assert_eq!(decode(&out, &PLACE), FoundSlot::Nothing, "{forged:?}");
        }
    }

    #[test]
    fn removal_blocks_list_inodes() {
        let inos: Vec<u64> = (1..=REMOVALS as u64).collect();
        let body = removals(&inos);
        assert!(body.len() <= BODY && list_removed(&body) == inos);
    }
}
