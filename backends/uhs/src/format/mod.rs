//! The bytes on the device: pure codecs, without I/O. SPEC.md has every field.

pub(crate) mod bytes;
pub(crate) mod inode;
pub(crate) mod slot;
pub(crate) mod snapshot;
pub(crate) mod superblock;

/// Bytes of a block, of a slot, and of a page.
pub(crate) const BLOCK: usize = 4096;

/// Blocks of a unit: 2 MiB.
pub(crate) const UNIT_BLOCKS: u64 = 512;

/// Numbers that only grow (inodes, stamps, groups, epochs) stay below this. An image with a larger one is
/// forged: counting on from it must not overflow.
pub(crate) const NUMBERS: u64 = 1 << 62;

/// The version of the format.
pub(crate) const VERSION: u32 = 1;

/// True if these blocks, each of which is there once, are a run without gaps, in any order.
pub(crate) fn are_neighbours(blocks: impl ExactSizeIterator<Item = u64> + Clone) -> bool {
    let ends = blocks.clone().min().zip(blocks.clone().max());
    ends.is_some_and(|(first, last)| last - first < blocks.len() as u64)
}
