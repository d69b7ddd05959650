//! Hints from the process that uses a file system.

/// Optional reactions of a file system to the process that uses it
/// ([`FileSystem::lifecycle`](crate::FileSystem::lifecycle)). A frontend may leave all of them out: the
/// answers of the file system are the same. Any thread may call, at the same time as operations.
pub trait Lifecycle: Send + Sync {
    /// Releases what is kept only because it may be wanted again soon, and was not wanted since the
    /// previous call: the descriptor of a file that was closed, say. A kernel mount calls it about once
    /// a second while requests come, and twice soon after the last. A frontend in an application also
    /// calls it in a child of fork(2), where the file system releases what belongs to the parent alone.
    fn trim(&self) {}

    /// Memory is short: releases everything that is kept only to be faster. A kernel mount calls it
    /// where tasks of the machine (or control group) wait for memory, psi; an application asks for it by
    /// its in-process client.
    fn memory_pressure(&self) {}

    /// From now on the threads that call may have fewer privileges than those that made the file
    /// system. Everything must keep working without them, for inodes that are already known, too. A
    /// frontend in an application calls it before that changes its credentials.
    fn without_privileges(&self) {}
}
