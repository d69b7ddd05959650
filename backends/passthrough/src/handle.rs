//! File handles of the lower file system, name_to_handle_at(2). They find an inode again without a
//! descriptor.

use std::hash::Hasher;

/// `MAX_HANDLE_SZ` of the kernel.
pub(crate) const MAX_HANDLE_BYTES: usize = 128;

/// Bytes stored inline. Handles of ext4 (8), tmpfs and xfs (12), and btrfs (20) fit; handles of
/// overlayfs and NFS are on the heap.
const SMALL: usize = 22;

/// The kernel's `struct file_handle`, compact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CompactHandle {
    kind: i32,
    bytes: HandleBytes,
}

/// `FILEID_INO32_GEN`: inode number and generation, 32 bits each.
const INO32_GEN: i32 = 1;
/// `FILEID_INO32_GEN_PARENT`: the same two of the inode, and then of its parent.
const INO32_GEN_PARENT: i32 = 2;
/// The kinds of btrfs: number, subvolume (64 bits each) and generation.
const BTRFS_KINDS: [i32; 3] = [0x4d, 0x4e, 0x4f];

#[derive(Clone, Debug, PartialEq, Eq)]
enum HandleBytes {
    Small(u8, [u8; SMALL]),
    Large(Box<[u8]>),
}

impl CompactHandle {
    /// Creates a handle of the type `kind`. `bytes` has at most [`MAX_HANDLE_BYTES`].
    pub(crate) fn new(kind: i32, bytes: &[u8]) -> Self {
        debug_assert!(bytes.len() <= MAX_HANDLE_BYTES);
        let bytes = if bytes.len() <= SMALL {
            let mut small = [0; SMALL];
            small[..bytes.len()].copy_from_slice(bytes);
            HandleBytes::Small(bytes.len() as u8, small)
        } else {
            HandleBytes::Large(bytes.into())
        };
        CompactHandle { kind, bytes }
    }

    /// True if the file system `f_type` compares the generation of an inode with that in this
    /// handle, so that the handle opens no successor of the inode. ext4, f2fs and btrfs take
    /// generation 0, which inodes of images can have, for any (`ext4_nfs_get_inode()`,
    /// `f2fs_nfs_get_inode()`, `btrfs_get_dentry()`).
    pub(crate) fn is_exact(&self, f_type: u64) -> bool {
        match f_type {
            fs_type::TMPFS => true,
            fs_type::XFS => [1, 2, 0x81, 0x82].contains(&self.kind),
            fs_type::EXT | fs_type::F2FS => {
                [INO32_GEN, INO32_GEN_PARENT].contains(&self.kind) && self.word(4) != Some(0)
            }
            fs_type::BTRFS => BTRFS_KINDS.contains(&self.kind) && self.word(16) != Some(0),
            _ => false,
        }
    }

    /// The four bytes from `at` on.
    fn word(&self, at: usize) -> Option<u32> {
        let bytes = self.bytes().get(at..at + 4)?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    }

    /// `handle_type`.
    pub(crate) fn kind(&self) -> i32 {
        self.kind
    }

    /// `f_handle`.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.bytes {
            HandleBytes::Small(len, bytes) => &bytes[..usize::from(*len)],
            HandleBytes::Large(bytes) => bytes,
        }
    }

    /// Memory on the heap in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        match &self.bytes {
            HandleBytes::Small(..) => 0,
            HandleBytes::Large(bytes) => bytes.len(),
        }
    }

    /// A hash of the handle, which differs between an inode and its successor with the same number.
    /// For file systems without birth times. Never 0.
    pub(crate) fn digest(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        hasher.write_i32(self.kind);
        hasher.write(self.bytes());
        hasher.finish() | 1
    }

    /// True if this is a handle of the inode with the number `ino`; `None` if the layout is
    /// unknown. The kernel's `enum fid_type` (exportfs.h) and mm/shmem.c define the layouts.
    pub(crate) fn names(&self, f_type: u64, ino: u64) -> Option<bool> {
        const XFS_INO64: [i32; 2] = [0x81, 0x82];
        let word = |at| self.word(at).map(u64::from);
        let found = match (f_type, self.kind) {
            (fs_type::TMPFS, _) => word(4)? | word(8)? << 32,
            (fs_type::EXT | fs_type::F2FS | fs_type::XFS, INO32_GEN | INO32_GEN_PARENT) => word(0)?,
            (fs_type::XFS, kind) if XFS_INO64.contains(&kind) => word(0)? | word(4)? << 32,
            (fs_type::BTRFS, kind) if BTRFS_KINDS.contains(&kind) => word(0)? | word(4)? << 32,
            _ => return None,
        };
        Some(found == ino)
    }
}

/// `f_type` of statfs(2), from linux/magic.h.
pub(crate) mod fs_type {
    pub(crate) const EXT: u64 = 0xef53;
    pub(crate) const TMPFS: u64 = 0x0102_1994;
    pub(crate) const XFS: u64 = 0x5846_5342;
    pub(crate) const BTRFS: u64 = 0x9123_683e;
    pub(crate) const F2FS: u64 = 0xf2f5_2010;
    pub(crate) const OVERLAY: u64 = 0x794c_7630;
    pub(crate) const FUSE: u64 = 0x6573_5546;
    pub(crate) const BCACHEFS: u64 = 0xca45_1a4e;
    pub(crate) const RAMFS: u64 = 0x8584_58f6;
    pub(crate) const ZFS: u64 = 0x2fc1_2fc1;
    pub(crate) const PROC: u64 = 0x9fa0;
    pub(crate) const SYSFS: u64 = 0x6265_6572;
    pub(crate) const CGROUP: u64 = 0x0027_e0eb;
    pub(crate) const CGROUP2: u64 = 0x6367_7270;
    pub(crate) const DEBUGFS: u64 = 0x6462_6720;
    pub(crate) const TRACEFS: u64 = 0x7472_6163;
    pub(crate) const SECURITYFS: u64 = 0x7363_6673;
    pub(crate) const CONFIGFS: u64 = 0x6265_6570;
    pub(crate) const BPF: u64 = 0xcafe_4a11;
}

/// True if nothing is delayed until close(2): the file system stores its data locally, and reports
/// every error at the operation itself or at fsync.
pub(crate) fn is_local(f_type: u64) -> bool {
    use fs_type::{BCACHEFS, BTRFS, EXT, F2FS, OVERLAY, RAMFS, TMPFS, XFS, ZFS};
    [EXT, TMPFS, XFS, BTRFS, F2FS, OVERLAY, BCACHEFS, RAMFS, ZFS].contains(&f_type)
}

/// True if the kernel makes the data of a file when it is read, so that its size is a guess.
pub(crate) fn is_made_up(f_type: u64) -> bool {
    use fs_type::{BPF, CGROUP, CGROUP2, CONFIGFS, DEBUGFS, PROC, SECURITYFS, SYSFS, TRACEFS};
    [PROC, SYSFS, CGROUP, CGROUP2, DEBUGFS, TRACEFS, SECURITYFS, CONFIGFS, BPF].contains(&f_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_keep_their_bytes_small_and_large() {
        for len in [0, 8, SMALL, SMALL + 1, MAX_HANDLE_BYTES] {
            let bytes: Vec<u8> = (0..len as u8).collect();
            let handle = CompactHandle::new(7, &bytes);
            assert_eq!((handle.kind(), handle.bytes()), (7, &bytes[..]));
        }
        assert!(size_of::<CompactHandle>() <= 32);
    }

    #[test]
    fn a_handle_of_known_layout_contains_its_inode_number() {
        let ext4 = CompactHandle::new(1, &[0xa3, 0xc4, 3, 0, 9, 9, 9, 9]);
        assert_eq!(ext4.names(fs_type::EXT, 0x3c4a3), Some(true));
        assert_eq!(ext4.names(fs_type::EXT, 0x3c4a4), Some(false));
        assert_eq!(ext4.names(fs_type::OVERLAY, 0x3c4a3), None);
        let tmpfs = CompactHandle::new(1, &[9, 9, 9, 9, 5, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(tmpfs.names(fs_type::TMPFS, 0x1_0000_0005), Some(true));
    }

    #[test]
    fn a_handle_without_a_generation_is_exact_on_no_file_system_that_ignores_it() {
        let with = |generation: u8| CompactHandle::new(1, &[0xa3, 0xc4, 3, 0, generation, 0, 0, 0]);
        for f_type in [fs_type::EXT, fs_type::F2FS] {
            assert!(with(9).is_exact(f_type));
            assert!(!with(0).is_exact(f_type));
        }
        const SQUASHFS: u64 = 0x7371_7368;
        for f_type in [SQUASHFS, fs_type::OVERLAY] {
            assert!(!with(9).is_exact(f_type), "its handles are not known here");
        }
        let btrfs = |generation: u8| {
            let mut bytes = [1; 20];
            bytes[16..].copy_from_slice(&[generation, 0, 0, 0]);
            CompactHandle::new(0x4d, &bytes)
        };
        assert!(btrfs(7).is_exact(fs_type::BTRFS) && !btrfs(0).is_exact(fs_type::BTRFS));
    }
}
