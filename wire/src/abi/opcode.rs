//! The tables of opcodes and of notification codes.

macro_rules! opcodes {
    ($($(#[$doc:meta])* $variant:ident = $value:literal, $name:literal, $reply:literal;)*) => {
        /// `enum fuse_opcode`: the operations that the kernel requests.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Opcode {
            $($(#[$doc])* $variant = $value,)*
        }

        impl Opcode {
            /// Every opcode, ascending by number.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$variant,)*];
            /// The number of opcodes.
            pub const COUNT: usize = Self::ALL.len();

            /// The opcode of a number from [`InHeader::opcode`](super::InHeader).
            pub const fn from_u32(value: u32) -> Option<Opcode> {
                match value {
                    $($value => Some(Opcode::$variant),)*
                    _ => None,
                }
            }

            /// The kernel's name without its `FUSE_` prefix.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Opcode::$variant => $name,)*
                }
            }

            /// True if the kernel waits for a reply. A reply to another opcode is an error (ENOENT
            /// from the device).
            pub const fn has_reply(self) -> bool {
                match self {
                    $(Opcode::$variant => $reply,)*
                }
            }
        }
    };
}

opcodes! {
    /// Look a name up in a directory; adds a lookup.
    Lookup = 1, "LOOKUP", true;
    /// Drop lookups of one inode.
    Forget = 2, "FORGET", false;
    /// Attributes of an inode.
    Getattr = 3, "GETATTR", true;
    /// Change attributes.
    Setattr = 4, "SETATTR", true;
    /// Target of a symbolic link.
    Readlink = 5, "READLINK", true;
    /// Create a symbolic link.
    Symlink = 6, "SYMLINK", true;
    /// Create a node.
    Mknod = 8, "MKNOD", true;
    /// Create a directory.
    Mkdir = 9, "MKDIR", true;
    /// Remove a file.
    Unlink = 10, "UNLINK", true;
    /// Remove a directory.
    Rmdir = 11, "RMDIR", true;
    /// Rename without flags.
    Rename = 12, "RENAME", true;
    /// Create a hard link.
    Link = 13, "LINK", true;
    /// Open a file.
    Open = 14, "OPEN", true;
    /// Read data.
    Read = 15, "READ", true;
    /// Write data.
    Write = 16, "WRITE", true;
    /// Sizes of the file system.
    Statfs = 17, "STATFS", true;
    /// The last reference to an open file is gone.
    Release = 18, "RELEASE", true;
    /// Make a file durable.
    Fsync = 20, "FSYNC", true;
    /// Set an extended attribute.
    Setxattr = 21, "SETXATTR", true;
    /// Get an extended attribute.
    Getxattr = 22, "GETXATTR", true;
    /// List the names of extended attributes.
    Listxattr = 23, "LISTXATTR", true;
    /// Remove an extended attribute.
    Removexattr = 24, "REMOVEXATTR", true;
    /// A file descriptor was closed.
    Flush = 25, "FLUSH", true;
    /// Negotiate the connection.
    Init = 26, "INIT", true;
    /// Open a directory.
    Opendir = 27, "OPENDIR", true;
    /// Read directory entries.
    Readdir = 28, "READDIR", true;
    /// The last reference to an open directory is gone.
    Releasedir = 29, "RELEASEDIR", true;
    /// Make a directory durable.
    Fsyncdir = 30, "FSYNCDIR", true;
    /// Test for a POSIX lock.
    Getlk = 31, "GETLK", true;
    /// Take or drop a lock without waiting.
    Setlk = 32, "SETLK", true;
    /// Take a lock, and wait for it.
    Setlkw = 33, "SETLKW", true;
    /// `access(2)`.
    Access = 34, "ACCESS", true;
    /// Create and open a file.
    Create = 35, "CREATE", true;
    /// A caller was interrupted. The kernel reads a reply only to learn EAGAIN
    /// (try again) or ENOSYS (never try again).
    Interrupt = 36, "INTERRUPT", false;
    /// Map a file's block to a device's block (fuseblk only).
    Bmap = 37, "BMAP", true;
    /// The file system was unmounted.
    Destroy = 38, "DESTROY", true;
    /// `ioctl(2)`.
    Ioctl = 39, "IOCTL", true;
    /// `poll(2)`.
    Poll = 40, "POLL", true;
    /// The answer to a RETRIEVE notification.
    NotifyReply = 41, "NOTIFY_REPLY", false;
    /// Drop lookups of many inodes.
    BatchForget = 42, "BATCH_FORGET", false;
    /// `fallocate(2)`.
    Fallocate = 43, "FALLOCATE", true;
    /// Read directory entries with their attributes; adds lookups.
    Readdirplus = 44, "READDIRPLUS", true;
    /// Rename with flags.
    Rename2 = 45, "RENAME2", true;
    /// Seek to data or to a hole.
    Lseek = 46, "LSEEK", true;
    /// `copy_file_range(2)`, replying with 32 bits.
    CopyFileRange = 47, "COPY_FILE_RANGE", true;
    /// Map a file's range into the DAX window (virtiofs).
    Setupmapping = 48, "SETUPMAPPING", true;
    /// Remove DAX mappings (virtiofs).
    Removemapping = 49, "REMOVEMAPPING", true;
    /// `syncfs(2)`.
    Syncfs = 50, "SYNCFS", true;
    /// `open(2)` with O_TMPFILE.
    Tmpfile = 51, "TMPFILE", true;
    /// `statx(2)`.
    Statx = 52, "STATX", true;
    /// `copy_file_range(2)`, replying with 64 bits.
    CopyFileRange64 = 53, "COPY_FILE_RANGE_64", true;
    /// Several requests in one ([`chain`](crate::chain)). No kernel sends it yet; the number is the
    /// next free one.
    Compound = 54, "COMPOUND", true;
    /// Negotiate a character device.
    CuseInit = 4096, "CUSE_INIT", true;
}

macro_rules! notify_codes {
    ($($(#[$doc:meta])* $variant:ident = $value:literal, $name:literal;)*) => {
        /// `enum fuse_notify_code`: the notifications of a server to the kernel, in the error field
        /// of a reply.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum NotifyCode {
            $($(#[$doc])* $variant = $value,)*
        }

        impl NotifyCode {
            /// Every code, ascending.
            pub const ALL: &'static [NotifyCode] = &[$(NotifyCode::$variant,)*];

            /// The kernel's name without its `FUSE_NOTIFY_` prefix.
            pub const fn name(self) -> &'static str {
                match self {
                    $(NotifyCode::$variant => $name,)*
                }
            }
        }
    };
}

notify_codes! {
    /// A poll may have become ready.
    Poll = 1, "POLL";
    /// Drop cached attributes and data of an inode.
    InvalInode = 2, "INVAL_INODE";
    /// Drop or expire a cached name.
    InvalEntry = 3, "INVAL_ENTRY";
    /// Store data in the page cache.
    Store = 4, "STORE";
    /// Get data from the page cache.
    Retrieve = 5, "RETRIEVE";
    /// A name was removed.
    Delete = 6, "DELETE";
    /// Send every unanswered request again (7.40).
    Resend = 7, "RESEND";
    /// Every cached name is stale (7.44).
    IncEpoch = 8, "INC_EPOCH";
    /// Drop unused inodes (7.45).
    Prune = 9, "PRUNE";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_round_trip() {
        for pair in Opcode::ALL.windows(2) {
            assert!(pair[0] < pair[1]);
        }
        for &opcode in Opcode::ALL {
            assert_eq!(Opcode::from_u32(opcode as u32), Some(opcode));
            assert!(
                opcode.name().chars().all(|c| c.is_ascii_uppercase() || "_0123456789".contains(c))
            );
        }
        // 1..=54 without the two unassigned numbers, and CUSE_INIT.
        assert_eq!(Opcode::COUNT, 54 - 2 + 1);
        for unknown in [0, 7, 19, 55, 4095, 4097, u32::MAX] {
            assert_eq!(Opcode::from_u32(unknown), None);
        }
        assert_eq!(Opcode::Lookup.name(), "LOOKUP");
        assert_eq!(NotifyCode::ALL.len(), 9);
    }
}
