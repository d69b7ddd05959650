//! The report of a repair.

use std::fmt;

/// A change that a repair makes. Names are shown with escapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairAction {
    /// A root directory was made.
    Root,
    /// The type of an inode, or its size, did not fit its data.
    Kind {
        /// The inode.
        ino: u64,
    },
    /// The data of an inode that is no regular file became a file in lost+found.
    Data {
        /// The inode that had the data.
        ino: u64,
        /// The file.
        file: u64,
    },
    /// Pages of a file had blocks of another file, or blocks outside of the device: they are holes
    /// now.
    Blocks {
        /// The inode.
        ino: u64,
        /// Pages of 4 KiB.
        pages: u64,
    },
    /// A name was removed: its directory does not exist, or another inode has the name there.
    Name {
        /// The inode.
        ino: u64,
        /// The directory.
        parent: u64,
        /// The name.
        name: Vec<u8>,
    },
    /// A position in listings was also the position of another name.
    Position {
        /// The inode.
        ino: u64,
    },
    /// An inode without a name got one in lost+found.
    Found {
        /// The inode.
        ino: u64,
        /// Its name there.
        name: Vec<u8>,
    },
    /// A damaged inode was kept as far as it can be read.
    Salvaged {
        /// The inode.
        ino: u64,
    },
    /// A damaged inode without any readable part was removed.
    Removed {
        /// The inode.
        ino: u64,
    },
    /// A slot that could not be read was written with zeros.
    Slot {
        /// The block.
        block: u64,
    },
    /// A copy of the superblock was written anew.
    Superblock {
        /// The block.
        block: u64,
    },
    /// A copy of a list of inode slots was written anew.
    Table {
        /// The block.
        block: u64,
    },
    /// The snapshot of the last clean end was damaged, and is given up. The slots contain the same
    /// inodes.
    Snapshot,
    /// Slots that a power failure had left half written were cleared.
    Unfinished {
        /// The number of slots.
        slots: usize,
    },
}

impl fmt::Display for RepairAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RepairAction::Root => f.write_str("made a root directory"),
            RepairAction::Kind { ino } => {
                write!(f, "inode {ino}: its type and size fit its data now")
            }
            RepairAction::Data { ino, file } => {
                write!(f, "inode {ino}: its data is file {file} in lost+found now")
            }
            RepairAction::Blocks { ino, pages } => {
                write!(f, "inode {ino}: {pages} pages that were not its own are holes now")
            }
            RepairAction::Name { ino, parent, name } => {
                let name = name.escape_ascii();
                write!(f, "inode {ino}: gave up its name \"{name}\" in directory {parent}")
            }
            RepairAction::Position { ino } => {
                write!(f, "inode {ino}: got another place in listings")
            }
            RepairAction::Found { ino, name } => {
                write!(f, "inode {ino}: is lost+found/{} now", name.escape_ascii())
            }
            RepairAction::Salvaged { ino } => {
                write!(f, "inode {ino}: damaged, and kept as far as it can be read")
            }
            RepairAction::Removed { ino } => {
                write!(f, "inode {ino}: cannot be read, and was removed")
            }
            RepairAction::Slot { block } => {
                write!(f, "block {block}: cleared a slot that has no sense")
            }
            RepairAction::Superblock { block } => {
                write!(f, "block {block}: wrote the copy of the superblock anew")
            }
            RepairAction::Table { block } => {
                write!(f, "block {block}: wrote the copy of a list of inode slots anew")
            }
            RepairAction::Snapshot => {
                f.write_str("gave up the damaged snapshot of the last clean end")
            }
            RepairAction::Unfinished { slots } => write!(f, "cleared {slots} half-written slots"),
        }
    }
}
