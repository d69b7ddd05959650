//! Failures.

use std::fmt;

use defuse_block::Errno;

use crate::format::superblock::SuperblockError;
use crate::repair::DoubtfulGroups;

/// A failure of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The device failed.
    Device {
        /// The operation.
        action: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// No copy of the superblock can be used.
    Unusable(SuperblockError),
    /// The device is shorter than the file system.
    Short {
        /// Blocks of the device.
        blocks: u64,
        /// Blocks of the file system.
        wanted: u64,
    },
    /// Blocks of the device are not of 4 KiB.
    BlockSize(u32),
    /// Fewer units than the smallest file system has.
    TooSmall {
        /// Bytes of the device.
        bytes: u64,
    },
    /// Names and attributes of all inodes take more memory than they may.
    Index {
        /// Inodes in the file system.
        inodes: u64,
        /// Memory for them.
        bytes: u64,
        /// The most that they may take.
        limit: u64,
    },
    /// The map of the space takes more memory than it may.
    Space {
        /// Units of the file system.
        units: u64,
        /// Memory for the map.
        bytes: u64,
        /// The most that it may take.
        limit: u64,
    },
    /// Numbers of inodes, slots or groups that leave no room for further ones.
    Numbers,
    /// The slot of an inode does not hold the inode any more.
    Lost,
    /// No unit is free for more inodes.
    Full,
    /// Parts of the newest groups cannot be read, so that it is unknown if these groups were
    /// complete.
    Doubtful(DoubtfulGroups),
    /// The watch ended the work.
    Interrupted,
    /// A write or a flush has failed before, so that the content of the device is unknown.
    Failed,
}

pub(crate) fn device_error(action: &'static str) -> impl Fn(Errno) -> StoreError {
    move |errno| StoreError::Device { action, errno }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Device { action, errno } => write!(f, "cannot {action}: {errno}"),
            StoreError::Unusable(reason) => write!(f, "{reason}"),
            StoreError::Short { blocks, wanted } => write!(
                f,
                "the device has {blocks} blocks and the file system {wanted}: it was cut short"
            ),
            StoreError::BlockSize(bytes) => write!(f, "blocks of {bytes} bytes are not supported"),
            StoreError::TooSmall { bytes } => {
                write!(f, "{bytes} bytes are too few: the smallest file system has 16 MiB")
            }
            StoreError::Index { inodes, bytes, limit } => write!(
                f,
                "names and attributes of its {inodes} files take {bytes} bytes of memory, and {limit} are allowed"
            ),
            StoreError::Space { units, bytes, limit } => write!(
                f,
                "the map of its {units} units of 2 MiB takes {bytes} bytes of memory, and {limit} are allowed"
            ),
            StoreError::Numbers => f.write_str(
                "numbers of its inodes, slots or groups leave no room for further ones: no program \
                 has written it so; restore it from a backup",
            ),
            StoreError::Lost => f.write_str("an inode was overwritten by another program"),
            StoreError::Full => f.write_str("no space is left for inodes"),
            StoreError::Doubtful(doubt) => write!(f, "{doubt}"),
            StoreError::Interrupted => f.write_str("interrupted"),
            StoreError::Failed => {
                f.write_str("the device failed before; nothing is written any more")
            }
        }
    }
}

impl std::error::Error for StoreError {}
