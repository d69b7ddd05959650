//! Counts of cached pages, by parts of the file system. They change under the lock of the pages,
//! which their users take anyway.

use std::fmt;
use std::sync::Arc;

use defuse_fs::{Figure, Ino};
use defuse_ring::pages::{GROUP_BYTES, PAGE};

/// The division of a file system into parts whose pages are counted separately, such as the devices
/// of a manager.
#[derive(Clone)]
pub struct PartDivision {
    /// The number of parts.
    pub count: usize,
    /// The part of a file, below `count`; `None` for a file of none.
    pub of: Arc<dyn Fn(Ino) -> Option<usize> + Send + Sync>,
    /// Parts whose files have no pages: others may change them unseen.
    pub without: Vec<usize>,
}

impl fmt::Debug for PartDivision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parts({})", self.count)
    }
}

/// Counts of one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartCount {
    /// Files that have pages.
    pub(crate) files: u64,
    /// Groups in memory, hidden ones included.
    pub(crate) groups: u64,
    /// Requests of clients that read a file with pages.
    pub(crate) requests: u64,
    /// Pages put in.
    pub(crate) filled: u64,
    /// Changes of files with pages.
    pub(crate) changes: u64,
    /// Groups that were hidden, that were missed while hidden, and that left.
    pub(crate) hidden: u64,
    pub(crate) missed: u64,
    pub(crate) evicted: u64,
}

/// Counts of all parts. The last one counts files in no part.
pub(crate) struct PartCounts {
    parts: Option<PartDivision>,
    all: Vec<PartCount>,
}

impl PartCounts {
    pub(crate) fn new(parts: Option<PartDivision>) -> PartCounts {
        let count = parts.as_ref().map_or(0, |parts| parts.count);
        PartCounts { parts, all: vec![PartCount::default(); count + 1] }
    }

    /// True if there are no parts, so that one count is the count of everything.
    pub(crate) fn is_whole(&self) -> bool {
        self.parts.is_none()
    }

    pub(crate) fn count_mut(&mut self, ino: Ino) -> &mut PartCount {
        let last = self.all.len() - 1;
        let part = self.parts.as_ref().and_then(|parts| (parts.of)(ino));
        &mut self.all[part.map_or(last, |part| part.min(last))]
    }

    /// True for a file that has no pages, see [`PartDivision::without`].
    pub(crate) fn is_without(&self, ino: Ino) -> bool {
        let Some(parts) = &self.parts else { return false };
        !parts.without.is_empty()
            && (parts.of)(ino).is_some_and(|part| parts.without.contains(&part))
    }

    /// Returns the count of a part. Without parts, number 0 is the count of everything.
    pub(crate) fn part(&self, part: usize) -> PartCount {
        self.all.get(part).copied().unwrap_or_default()
    }

    #[cfg(test)]
    pub(crate) fn groups(&self) -> u64 {
        self.all.iter().map(|count| count.groups).sum()
    }
}

impl PartCount {
    /// Returns the counts as figures of a file system.
    pub(crate) fn figures(&self) -> Vec<Figure> {
        let total = |name, value| Figure::count(name, value).since_start();
        vec![
            Figure::count("pages_files", self.files),
            Figure::bytes("pages_used", self.groups * GROUP_BYTES),
            total("pages_requests", self.requests),
            Figure::bytes("pages_filled", self.filled * PAGE as u64).since_start(),
            total("pages_changes", self.changes),
            total("pages_groups_hidden", self.hidden),
            total("pages_groups_missed", self.missed),
            total("pages_groups_evicted", self.evicted),
        ]
    }
}
