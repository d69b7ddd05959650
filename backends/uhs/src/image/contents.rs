//! The contents of a device: nothing, a format that is recognised by its magic number, or other
//! data.

use defuse_block::{BlockDevice, BlockingQueue};

use crate::StoreError;
use crate::format::superblock::SuperblockError;
use crate::store::read_superblock;

/// Bytes at the beginning that are examined. All formats below have their magic number there.
const HEAD: usize = 1 << 20;

/// Bytes at the end that are examined: copies of partition tables, labels of arrays.
const TAIL: usize = 64 << 10;

/// Data on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceContents {
    /// A uhs file system, perhaps a damaged one.
    Uhs,
    /// A format.
    Known(&'static str),
    /// Bytes other than 0.
    Data,
    /// The device cannot be read.
    Unreadable,
}

impl DeviceContents {
    pub(super) fn is_uhs(self) -> bool {
        self == DeviceContents::Uhs
    }

    /// The name for messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            DeviceContents::Uhs => "a uhs file system",
            DeviceContents::Known(name) => name,
            DeviceContents::Data => "data",
            DeviceContents::Unreadable => "parts that cannot be read",
        }
    }
}

/// The contents of `device`; `None` if the parts that formats use have nothing but zeros.
pub(super) fn detect(device: &dyn BlockDevice) -> Option<DeviceContents> {
    let Ok(mut line) = BlockingQueue::new(device) else { return Some(DeviceContents::Unreadable) };
    let facts = device.properties();
    let other = StoreError::Unusable(SuperblockError::Other);
    match read_superblock(&mut line, facts.blocks) {
        Err(error) if error == other => {}
        Err(StoreError::Device { .. }) => return Some(DeviceContents::Unreadable),
        _ => return Some(DeviceContents::Uhs),
    }
    let block = facts.block_size as usize;
    let part = |wanted: usize| wanted.min(facts.bytes() as usize) / block * block;
    let (mut head, mut tail) = (vec![0; part(HEAD)], vec![0; part(TAIL)]);
    let last = facts.blocks - (tail.len() / block) as u64;
    if line.read(0, &mut head).is_err() || line.read(last, &mut tail).is_err() {
        return Some(DeviceContents::Unreadable);
    }
    match detect_type(&head) {
        Some(name) => Some(DeviceContents::Known(name)),
        None if head.iter().chain(&tail).any(|byte| *byte != 0) => Some(DeviceContents::Data),
        None => None,
    }
}

/// Magic numbers: offset, bytes, name. From libblkid of util-linux and file(1). The magic numbers
/// of partition tables come last, because file systems may have boot sectors.
const MAGIC: &[(usize, &[u8], &str)] = &[
    (1080, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x1_0040, b"_BHRfS_M", "a btrfs file system"),
    (1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS file system"),
    (0, b"hsqs", "a squashfs file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT1", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (0x8000, b"JFS1", "a JFS file system"),
    (0x1_0034, b"ReIsEr", "a ReiserFS file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (0x1018, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca], "a bcachefs file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (512, b"LABELONE", "a physical volume of LVM"),
    (4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a member of a RAID array"),
    (0, b"QFI\xfb", "an image of QEMU"),
    (0, b"SQLite format 3\0", "a database of SQLite"),
    (0, b"\x7fELF", "a program"),
    (0, &[0x1f, 0x8b], "compressed data"),
    (0, b"\xfd7zXZ\0", "compressed data"),
    (0, &[0x28, 0xb5, 0x2f, 0xfd], "compressed data"),
    (0, b"PK\x03\x04", "an archive"),
    (257, b"ustar", "an archive"),
    (512, b"EFI PART", "a partition table"),
    (4096, b"EFI PART", "a partition table"),
    (510, &[0x55, 0xaa], "a partition table"),
];

fn detect_type(head: &[u8]) -> Option<&'static str> {
    let has = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    MAGIC.iter().find(|(at, magic, _)| has(*at, magic)).map(|(.., name)| *name)
}

#[cfg(test)]
mod tests {
    use defuse_block::RamDevice;

    use super::*;
    use crate::Uhs;

    fn with(block: u64, offset: usize, bytes: &[u8]) -> Option<DeviceContents> {
        let disk = RamDevice::new(4096, 4096);
        let mut content = vec![0; 4096];
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
        BlockingQueue::new(&disk).unwrap().write(block, &content).unwrap();
        detect(&disk)
    }

    #[test]
    fn every_magic_number_is_found_at_its_place() {
        for (at, magic, name) in MAGIC {
            let mut head = vec![0; HEAD];
            head[*at..*at + magic.len()].copy_from_slice(magic);
            assert_eq!(detect_type(&head), Some(*name));
        }
        assert_eq!(detect_type(&vec![0; HEAD]), None);
    }

    #[test]
    fn a_device_is_empty_if_both_its_ends_are() {
        assert_eq!(with(0, 0, &[]), None);
        assert_eq!(
            with(0, 1080, &[0x53, 0xef]).unwrap().name(),
            "an ext2, ext3 or ext4 file system"
        );
        assert_eq!(with(255, 4095, &[1]), Some(DeviceContents::Data));
        assert_eq!(with(4095, 4095, &[1]), Some(DeviceContents::Data));
    }

    /// Any copy of the superblock is enough, and a damaged one still is no free space.
    #[test]
    fn a_file_system_is_recognised_by_any_copy_of_its_superblock() {
        let disk = std::sync::Arc::new(RamDevice::new(4096, 4096));
        let mut random = fastrand::Rng::with_seed(1);
        Uhs::make(disk.clone(), (0o755, 0, 0), &mut random).unwrap();
        assert_eq!(detect(&*disk), Some(DeviceContents::Uhs));
        BlockingQueue::new(&*disk).unwrap().write(0, &[0; 4096]).unwrap();
        assert_eq!(detect(&*disk), Some(DeviceContents::Uhs));
        for block in [3 * 512, 7 * 512] {
            BlockingQueue::new(&*disk).unwrap().write(block, &[0; 4096]).unwrap();
        }
        assert_eq!(detect(&*disk), None);
        assert_eq!(with(0, 0, b"defuseUH"), Some(DeviceContents::Uhs));
    }
}
