//! The bytes on the device: pure codecs, without I/O. SPEC.md has every field.

pub(crate) mod bytes;
pub(crate) mod inode;
pub(crate) mod slot;
pub(crate) mod superblock;

/// Bytes of a block, of a slot, and of a page.
pub(crate) const BLOCK: usize = 4096;

/// Blocks of a unit: 2 MiB.
pub(crate) const UNIT_BLOCKS: u64 = 512;

/// The version of the format.
pub(crate) const VERSION: u32 = 1;
