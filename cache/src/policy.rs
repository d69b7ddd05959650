//! The trait of all policies.

/// The name of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExtentKey {
    /// The file.
    pub file: u64,
    /// The number of the extent in the file.
    pub index: u64,
}

impl ExtentKey {
    /// The extent of this number in this file.
    pub const fn new(file: u64, index: u64) -> ExtentKey {
        ExtentKey { file, index }
    }
}

/// A use of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentUse {
    /// The extent.
    pub key: ExtentKey,
    /// Its size in bytes, which is the same at each use.
    pub size: u64,
    /// The number of the process that uses it. Policies distinguish 64 processes: numbers that are
    /// equal modulo 64 are one.
    pub user: u32,
}

impl ExtentUse {
    /// True if a cache of so many bytes can hold it.
    pub(crate) fn fits(&self, capacity: u64) -> bool {
        (1..=capacity).contains(&self.size)
    }
}

/// Extents that may not leave, at which an eviction looks at most.
pub const TRIES: usize = 16;

/// Decides which extents stay in a cache of so many bytes.
pub trait ReplacementPolicy: Send {
    /// Uses an extent. Returns true if it was in the cache. Otherwise it is now, and those that
    /// left for it are added to `evicted`. An extent that is larger than the cache, or empty, does
    /// not enter.
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool;

    /// Evicts one extent that `may_leave`, the least valuable. Looks at no more than [`TRIES`]
    /// extents that may not; then, and where there is none, returns `None`.
    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey>;

    /// Removes an extent, as if it had never been there. Returns false if it was not.
    fn remove(&mut self, key: ExtentKey) -> bool;

    /// True if the extent is in the cache.
    fn contains(&self, key: ExtentKey) -> bool;

    /// The bytes in the cache. Never more than the capacity.
    fn bytes(&self) -> u64;

    /// Returns the maximum number of bytes.
    fn capacity(&self) -> u64;

    /// The extents that are remembered, in the cache or not; a bound of the policy's own memory.
    fn tracked_extents(&self) -> usize;
}
