//! The bytes on the device: pure codecs, without I/O. SPEC.md has every field.

pub(crate) mod bytes;
pub(crate) mod chunks;
pub(crate) mod inode;
pub(crate) mod slot;
pub(crate) mod snapshot;
pub(crate) mod superblock;

/// Bytes of a block, of a slot, and of a page.
pub(crate) const BLOCK: usize = 4096;

/// Blocks of a unit: 2 MiB.
pub(crate) const UNIT_BLOCKS: u64 = 512;

/// Numbers that only grow (inodes, stamps, groups, epochs) stay below this. An image with a larger
/// one is forged: counting on from it must not overflow.
pub(crate) const NUMBERS: u64 = 1 << 62;

/// An image with a number from here on leaves no room for further ones: it is refused, or read-only
/// where a repair can give out other numbers. All that is written has smaller numbers, so that no
/// later mount refuses it.
pub(crate) const LAST: u64 = NUMBERS - (1 << 33);

/// An image with slots, groups or superblocks from here on is not opened for writing.
pub(crate) const LAST_OPENED: u64 = LAST - (1 << 32);

/// Groups with slots from here on are refused.
pub(crate) const LAST_WRITTEN: u64 = LAST - (1 << 31);

/// Numbers of new inodes, and positions of new names, stay below this.
pub(crate) const LAST_NEW: u64 = LAST - (1 << 33);

/// The version of the format.
pub(crate) const VERSION: u32 = 1;

/// True if these blocks, each of which is listed once, are a run without gaps, in any order.
pub(crate) fn are_neighbours(blocks: impl ExactSizeIterator<Item = u64> + Clone) -> bool {
    let ends = blocks.clone().min().zip(blocks.clone().max());
    ends.is_some_and(|(first, last)| last - first < blocks.len() as u64)
}
