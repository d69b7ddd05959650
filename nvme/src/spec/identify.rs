//! The structures of Identify, from bytes of a controller that is not trusted.

use std::fmt;

use super::{text, u16_at, u32_at, u64_at};

/// A controller, by Identify Controller (CNS 01h) and, for the limits, CNS 06h.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerFacts {
    /// Serial number.
    pub serial: String,
    /// Model.
    pub model: String,
    /// Firmware revision.
    pub firmware: String,
    /// The PCI vendor.
    pub vendor: u16,
    /// Pages of 4 KiB of the largest transfer (MDTS), if it has a limit.
    pub max_pages: Option<u32>,
    /// Abort commands at a time.
    pub aborts: u32,
    /// Asynchronous Event Request commands at a time.
    pub events: u32,
    /// Entries of the error log.
    pub error_entries: u32,
    /// Number of namespaces.
    pub namespaces: u32,
    /// The controller has Compare.
    pub compares: bool,
    /// The controller has Dataset Management.
    pub deallocates: bool,
    /// The controller has Write Zeroes.
    pub writes_zeroes: bool,
    /// The controller has a volatile write cache.
    pub volatile_cache: bool,
    /// Blocks that are written atomically at a power failure (AWUPF).
    pub atomic_blocks: u32,
    /// The controller takes scatter gather lists with any alignment that data here can have.
    pub sgl: bool,
}

/// The format of the logical blocks of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockFormat {
    /// Bytes of a block.
    pub block_size: u32,
    /// Bytes of metadata of a block.
    pub metadata: u16,
}

/// A namespace, by Identify Namespace (CNS 00h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceFacts {
    /// The number of the namespace.
    pub id: u32,
    /// Blocks.
    pub blocks: u64,
    /// The format of its blocks.
    pub format: BlockFormat,
    /// Blocks that an aligned write replaces whole or not at all at a power failure.
    pub atomic_blocks: u32,
    /// Blocks that are best deallocated together; 0 if the namespace does not report it.
    pub deallocate_blocks: u32,
}

/// A reason why a namespace cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnsupportedNamespace {
    /// The namespace has no blocks, or does not exist.
    Empty,
    /// Blocks of this many bytes are no power of two from 512 to 65,536.
    BlockSize(u8),
    /// The blocks carry metadata.
    Metadata(u16),
    /// The number of bytes does not fit into 64 bits.
    Huge,
}

impl ControllerFacts {
    /// Reads the structure. No value in it can be invalid, since it only restricts the driver.
    pub fn parse(bytes: &[u8]) -> Self {
        let (oncs, sgls) = (u16_at(bytes, 520), u32_at(bytes, 536));
        let mdts = bytes.get(77).copied().unwrap_or(0);
        let max_pages = (mdts != 0).then(|| 1_u32.checked_shl(u32::from(mdts)).unwrap_or(u32::MAX));
        ControllerFacts {
            vendor: u16_at(bytes, 0),
            serial: text(&bytes[4..24]),
            model: text(&bytes[24..64]),
            firmware: text(&bytes[64..72]),
            max_pages,
            aborts: u32::from(bytes[258]) + 1,
            events: u32::from(bytes[259]) + 1,
            error_entries: u32::from(bytes[262]) + 1,
            namespaces: u32_at(bytes, 516),
            compares: oncs & 1 != 0,
            deallocates: oncs & 1 << 2 != 0,
            writes_zeroes: oncs & 1 << 3 != 0,
            volatile_cache: bytes[525] & 1 != 0,
            atomic_blocks: u32::from(u16_at(bytes, 528)) + 1,
            sgl: matches!(sgls & 3, 1 | 2),
        }
    }
}

impl NamespaceFacts {
    /// Reads the structure of namespace `id`.
    ///
    /// # Errors
    ///
    /// See [`UnsupportedNamespace`].
    pub fn parse(id: u32, bytes: &[u8]) -> Result<Self, UnsupportedNamespace> {
        let blocks = u64_at(bytes, 0);
        if blocks == 0 {
            return Err(UnsupportedNamespace::Empty);
        }
        let flbas = usize::from(bytes[26]);
        let index = flbas & 0xf | (flbas >> 5 & 3) << 4;
        let format = u32_at(bytes, 128 + 4 * index);
        let (metadata, shift) = (format as u16, (format >> 16) as u8);
        if !(9..=16).contains(&shift) {
            return Err(UnsupportedNamespace::BlockSize(shift));
        }
        if metadata != 0 {
            return Err(UnsupportedNamespace::Metadata(metadata));
        }
        if blocks.checked_mul(1 << shift).is_none() {
            return Err(UnsupportedNamespace::Huge);
        }
        let format = BlockFormat { block_size: 1 << shift, metadata };
        let has_own = bytes[24] & 1 << 1 != 0;
        let preferred = bytes[24] & 1 << 4 != 0;
        let deallocate_blocks = if preferred { u32::from(u16_at(bytes, 66)) + 1 } else { 0 };
        let atomic_blocks = if has_own { atomic(bytes) } else { 1 };
        Ok(NamespaceFacts { id, blocks, format, atomic_blocks, deallocate_blocks })
    }
}

/// Blocks of the largest aligned power of two that is atomic and crosses no boundary: NAWUPF,
/// NABSPF and NABO. AWUPF of the controller is not used: controllers do not agree on the size of
/// the blocks that it counts.
fn atomic(bytes: &[u8]) -> u32 {
    let unit = u32::from(u16_at(bytes, 36)) + 1;
    let largest = 1 << unit.ilog2();
    let (boundary, offset) = (u16_at(bytes, 42), u16_at(bytes, 40));
    if boundary == 0 {
        return largest;
    }
    let aligned = |number: u32| if number == 0 { 1 << 16 } else { number & number.wrapping_neg() };
    largest.min(aligned(u32::from(boundary) + 1)).min(aligned(u32::from(offset)))
}

impl fmt::Display for UnsupportedNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnsupportedNamespace::Empty => write!(f, "has no blocks"),
            UnsupportedNamespace::BlockSize(shift) => write!(f, "has blocks of 2^{shift} bytes"),
            UnsupportedNamespace::Metadata(bytes) => {
                write!(f, "has {bytes} bytes of metadata with each block: format it without")
            }
            UnsupportedNamespace::Huge => write!(f, "claims more bytes than 2^64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(change: impl FnOnce(&mut [u8])) -> Result<NamespaceFacts, UnsupportedNamespace> {
        let mut bytes = vec![0; 4096];
        bytes[0] = 100;
        bytes[128 + 2] = 12;
        change(&mut bytes);
        NamespaceFacts::parse(1, &bytes)
    }

    #[test]
    fn an_aligned_write_is_atomic_up_to_the_boundary_of_the_namespace() {
        let atomic = |nawupf: u8, boundary: u8, offset: u8| {
            let facts = namespace(|bytes| {
                bytes[24] = 2;
                (bytes[36], bytes[42], bytes[40]) = (nawupf, boundary, offset);
            });
            facts.unwrap().atomic_blocks
        };
        assert_eq!(atomic(0, 0, 0), 1);
        assert_eq!(atomic(7, 0, 0), 8);
        assert_eq!(atomic(10, 0, 0), 8, "eleven blocks hold aligned eights");
        assert_eq!(atomic(7, 3, 0), 4, "a boundary every four blocks");
        assert_eq!(atomic(7, 7, 2), 2, "boundaries begin at the second block");
        let untold = namespace(|bytes| bytes[36] = 7).unwrap();
        assert_eq!(untold.atomic_blocks, 1, "a namespace that does not say so");
    }

    #[test]
    fn a_namespace_that_cannot_be_used_is_told_why() {
        assert_eq!(namespace(|_| ()).unwrap().format.block_size, 4096);
        assert_eq!(namespace(|bytes| bytes[0] = 0), Err(UnsupportedNamespace::Empty));
        assert_eq!(namespace(|bytes| bytes[130] = 200), Err(UnsupportedNamespace::BlockSize(200)));
        assert_eq!(namespace(|bytes| bytes[128] = 8), Err(UnsupportedNamespace::Metadata(8)));
        assert_eq!(namespace(|bytes| bytes[7] = 255), Err(UnsupportedNamespace::Huge));
        assert_eq!(
            namespace(|bytes| bytes[26] = 0x6f),
            Err(UnsupportedNamespace::BlockSize(0)),
            "format 63"
        );
    }

    #[test]
    fn names_of_a_controller_print() {
        let mut bytes = vec![0; 4096];
        bytes[24..64].fill(b' ');
        bytes[24..29].copy_from_slice(b"a\x1b[2J");
        bytes[77] = 255;
        let facts = ControllerFacts::parse(&bytes);
        assert_eq!((facts.model.as_str(), facts.max_pages), ("a.[2J", Some(u32::MAX)));
    }
}
