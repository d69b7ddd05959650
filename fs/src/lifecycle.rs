//! Hints from the process that uses a file system.

/// Optional reactions of a file system to the process that uses it
/// ([`FileSystem::lifecycle`](crate::FileSystem::lifecycle)). A frontend need not call any of them:
/// they do not change results. Any thread may call them, at the same time as operations.
pub trait Lifecycle: Send + Sync {
    /// Releases resources that are kept for reuse and were not used since the previous call, such
    /// as the descriptor of a closed file. A kernel mount calls it about once a second while
    /// requests arrive, and twice soon after the last. A frontend in an application also calls it
    /// in a child of fork(2), where the file system releases resources that belong to the parent
    /// only.
    fn trim(&self) {}

    /// Memory is short: releases everything that only serves speed. A kernel mount calls it when
    /// tasks of the machine or control group stall on memory (psi). An application calls it through
    /// its in-process client.
    fn memory_pressure(&self) {}

    /// From now on the calling threads may have fewer privileges than those that created the file
    /// system. Everything must continue to work without them, also for known inodes. A frontend in
    /// an application calls it before the application changes its credentials.
    fn prepare_privilege_drop(&self) {}
}
