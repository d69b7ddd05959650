//! A file system in memory, like tmpfs.
