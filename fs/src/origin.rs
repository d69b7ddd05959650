//! The identity of a frontend or connection.

use std::sync::atomic::{AtomicU64, Ordering};

/// The frontend or connection from which an operation comes: a kernel mount, a mount of the
/// in-process client, or a client of a server. Unique within the process, and never used again.
///
/// A frontend passes it to [`FileSystem::attach`](crate::FileSystem::attach), and with each
/// operation in [`Context::origin`](crate::Context::origin). A file system with several frontends
/// can therefore notify all of them of a change but its origin, and say to each how long it may
/// cache an answer. [`Frontends`](crate::Frontends) does so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin(u64);

impl Origin {
    /// The origin of an operation that comes from no attached frontend, such as an operation that a
    /// server performs by itself. All frontends are notified of its changes, and its answers may
    /// not be cached.
    pub const NONE: Origin = Origin(0);

    /// The identity of another frontend.
    #[allow(clippy::new_without_default, reason = "the default is NONE, which is not new")]
    pub fn new() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Origin(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_origin_is_another_one_and_none_is_the_default() {
        let (a, b) = (Origin::new(), Origin::new());
        assert!(a != b && a != Origin::NONE && b != Origin::NONE);
        assert_eq!(Origin::default(), Origin::NONE);
    }
}
