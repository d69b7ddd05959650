//! The vocabulary of measurements: operations, and stages in the life of a request.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Defines the enum, its names and its lists from one line per operation.
macro_rules! ops {
    ($($name:ident $doc:literal,)*) => {
        /// An operation, named as in FUSE for every frontend.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[repr(u8)]
        pub enum Op {
            $(#[doc = concat!($doc, ".")] $name,)*
        }

        impl Op {
            /// Every operation, in the order of [`index`](Op::index).
            pub const ALL: &'static [Op] = &[$(Op::$name,)*];

            /// Number of operations.
            pub const COUNT: usize = Op::ALL.len();

            /// The name, such as `READDIRPLUS`. Files and tools depend on it, so it is stable.
            pub const fn name(self) -> &'static str {
                match self { $(Op::$name => stringify!($name),)* }
            }

            /// The operation called `name`, in upper or lower case.
            pub fn parse(name: &str) -> Option<Op> {
                $(if name.eq_ignore_ascii_case(stringify!($name)) {
                    return Some(Op::$name);
                })*
                None
            }
        }
    };
}

ops! {
    LOOKUP "A name in a directory, or `..` of one",
    FORGET "Lookups given back",
    GETATTR "stat(2)",
    SETATTR "chmod(2), chown(2), truncate(2), utimensat(2)",
    READLINK "readlink(2)",
    SYMLINK "symlink(2)",
    MKNOD "mknod(2)",
    MKDIR "mkdir(2)",
    UNLINK "unlink(2)",
    RMDIR "rmdir(2)",
    RENAME "rename(2)",
    LINK "link(2)",
    OPEN "open(2) of what is not a directory",
    READ "read(2)",
    WRITE "write(2)",
    STATFS "statfs(2)",
    RELEASE "The last close(2)",
    FSYNC "fsync(2)",
    SETXATTR "setxattr(2)",
    GETXATTR "getxattr(2)",
    LISTXATTR "listxattr(2)",
    REMOVEXATTR "removexattr(2)",
    FLUSH "Each close(2)",
    INIT "The start of a session",
    OPENDIR "open(2) of a directory",
    READDIR "getdents(2)",
    RELEASEDIR "The last close(2) of a directory",
    FSYNCDIR "fsync(2) of a directory",
    GETLK "fcntl(2) `F_GETLK`",
    SETLK "A lock, without waiting",
    SETLKW "A lock, waiting for it",
    ACCESS "access(2)",
    CREATE "open(2) with `O_CREAT`",
    INTERRUPT "A caller that gave up",
    BMAP "`FIBMAP`",
    DESTROY "The end of a session",
    IOCTL "ioctl(2)",
    POLL "poll(2)",
    NOTIFY_REPLY "The answer to a retrieval",
    BATCH_FORGET "Lookups of many inodes given back",
    FALLOCATE "fallocate(2)",
    READDIRPLUS "getdents(2), with attributes",
    RENAME2 "renameat2(2) with flags",
    LSEEK "lseek(2) for data or holes",
    COPY_FILE_RANGE "copy_file_range(2)",
    SETUPMAPPING "A window of shared memory opened (DAX)",
    REMOVEMAPPING "A window of shared memory closed (DAX)",
    SYNCFS "syncfs(2)",
    TMPFILE "open(2) with `O_TMPFILE`",
    STATX "statx(2)",
    COMPOUND "Several requests in one, each of which is counted, too",
    RESOLVE "A whole path, in the same process",
    UNKNOWN "Anything else",
}

impl Op {
    /// The index in [`ALL`](Op::ALL), below [`COUNT`](Op::COUNT).
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Op {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Op {
    /// An unknown name (from a newer version) becomes [`Op::UNKNOWN`].
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Op, D::Error> {
        struct OpNameVisitor;
        impl de::Visitor<'_> for OpNameVisitor {
            type Value = Op;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an operation")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Op, E> {
                Ok(Op::parse(name).unwrap_or(Op::UNKNOWN))
            }
        }
        deserializer.deserialize_str(OpNameVisitor)
    }
}

/// A stage in the life of a request, in which time is spent: the four of *To FUSE or Not to FUSE*
/// (FAST '17, section 3.2), and two more for tracing in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RequestStage {
    /// In the kernel's queue of background requests.
    Background,
    /// In the kernel's queue of requests that the daemon has not read yet.
    Pending,
    /// From being read by the daemon to the reply in the kernel, including user space.
    Processing,
    /// Pending and processing together, if the read by the daemon was not observed.
    #[serde(rename = "pending+processing")]
    Unsplit,
    /// In user space: from receiving the request to replying. Frontends record only this stage; the
    /// others need tracing in the kernel.
    User,
    /// The sum of the stages in the kernel: from queueing in the background queue, or otherwise
    /// sending, to the reply in the kernel.
    Total,
}

impl RequestStage {
    /// Every stage, in the order that a request passes them.
    pub const ALL: [RequestStage; 6] = [
        RequestStage::Background,
        RequestStage::Pending,
        RequestStage::Processing,
        RequestStage::Unsplit,
        RequestStage::User,
        RequestStage::Total,
    ];

    /// The name, such as `user`.
    pub const fn name(self) -> &'static str {
        match self {
            RequestStage::Background => "background",
            RequestStage::Pending => "pending",
            RequestStage::Processing => "processing",
            RequestStage::Unsplit => "pending+processing",
            RequestStage::User => "user",
            RequestStage::Total => "total",
        }
    }
}

impl fmt::Display for RequestStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_indexes_identify_the_operation() {
        for (index, &op) in Op::ALL.iter().enumerate() {
            assert_eq!(op.index(), index);
            assert_eq!(Op::parse(op.name()), Some(op));
            assert_eq!(Op::parse(&op.name().to_lowercase()), Some(op));
        }
        assert_eq!(Op::parse("LOOK"), None);
        assert_eq!(Op::COUNT, 53);
    }

    #[test]
    fn a_name_from_a_newer_version_is_unknown() {
        assert_eq!(serde_json::from_str::<Op>("\"SETLKW\"").unwrap(), Op::SETLKW);
        assert_eq!(serde_json::from_str::<Op>("\"TELEPORT\"").unwrap(), Op::UNKNOWN);
        assert_eq!(serde_json::to_string(&Op::RENAME2).unwrap(), "\"RENAME2\"");
    }
}
