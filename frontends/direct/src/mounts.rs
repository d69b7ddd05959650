//! The table of mounts: read without a lock, replaced as a whole.

use std::sync::{Arc, Mutex};

use arc_swap::{ArcSwap, Guard};
use defuse_fs::{Errno, Ino, Result};

use crate::mount::{Mount, Spot};
use crate::node::lock;

/// All mounts at one moment.
#[derive(Clone, Default)]
pub(crate) struct Table {
    mounts: Vec<Arc<Mount>>,
    /// How many are at paths of the kernel's name space.
    paths: usize,
}

impl Table {
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Mount>> {
        self.mounts.iter()
    }

    /// Whether a path of the kernel could lead into a mount at all.
    pub fn has_paths(&self) -> bool {
        self.paths > 0
    }

    fn at_paths(&self) -> impl Iterator<Item = (&Arc<Mount>, &[u8])> {
        self.mounts.iter().filter_map(|mount| match &mount.spot {
            Spot::Path(path) => Some((mount, &**path)),
            _ => None,
        })
    }

    /// The mount at exactly this path, which has no `.`, `..` or double slashes.
    pub fn at(&self, path: &[u8]) -> Option<&Arc<Mount>> {
        self.at_paths().find(|(_, at)| *at == path).map(|(mount, _)| mount)
    }

    /// Whether a mount lies further down from `path`.
    pub fn below(&self, path: &[u8]) -> bool {
        let below = |at: &[u8]| at.strip_prefix(path).is_some_and(|rest| rest.starts_with(b"/"));
        self.at_paths().any(|(_, at)| below(at))
    }

    /// The mount of the longest path that `path` begins with, and how many bytes of it that is.
    pub fn prefix(&self, path: &[u8]) -> Option<(&Arc<Mount>, usize)> {
        let found = self.at_paths().filter_map(|(mount, at)| Some((mount, matches(path, at)?)));
        found.max_by_key(|(_, len)| *len)
    }

    /// The mount that the first component of `path` names, and the length of that component.
    pub fn named(&self, path: &[u8]) -> Option<(&Arc<Mount>, usize)> {
        let end = path.iter().position(|&byte| byte == b'/').unwrap_or(path.len());
        let name = path[..end].strip_suffix(b":")?;
        let is = |mount: &&Arc<Mount>| matches!(&mount.spot, Spot::Name(own) if **own == *name);
        self.mounts.iter().find(is).map(|mount| (mount, end))
    }

    /// The mount that covers a directory of another one.
    pub fn covering(&self, below: u32, ino: Ino) -> Option<&Arc<Mount>> {
        let covers = |mount: &&Arc<Mount>| match &mount.spot {
            Spot::Covers { node, mount, .. } => mount.id == below && node.ino() == ino,
            _ => false,
        };
        // The latest lies on top.
        self.mounts.iter().rev().find(covers)
    }
}

/// How many bytes of `path` stand for the mount point `at`: component by component, so that
/// `//data/./x` is below `/data` and `/database` is not.
fn matches(path: &[u8], at: &[u8]) -> Option<usize> {
    let mut from = 0;
    for wanted in at.split(|&byte| byte == b'/').filter(|part| !part.is_empty()) {
        loop {
            let start = from + path.get(from..)?.iter().position(|&byte| byte != b'/')?;
            let len = path[start..].iter().position(|&byte| byte == b'/');
            let end = len.map_or(path.len(), |len| start + len);
            from = end;
            match &path[start..end] {
                b"." => {}
                part if part == wanted => break,
                _ => return None,
            }
        }
    }
    Some(from)
}

/// The table as it is now, and the way to change it.
#[derive(Default)]
pub(crate) struct Mounts {
    table: ArcSwap<Table>,
    change: Mutex<()>,
}

impl Mounts {
    /// The present table, to keep.
    pub fn load_full(&self) -> Arc<Table> {
        self.table.load_full()
    }

    /// The present table.
    #[inline]
    pub fn load(&self) -> Guard<Arc<Table>> {
        self.table.load()
    }

    /// Adds a mount. `EBUSY` where one is at this path or has this name.
    pub fn add(&self, mount: Arc<Mount>) -> Result<()> {
        let _change = lock(&self.change);
        let mut table = Table::clone(&self.table.load());
        let taken = match &mount.spot {
            Spot::Path(path) => table.at(path).is_some(),
            Spot::Name(_) => table.named(&mount.target()).is_some(),
            Spot::Covers { .. } => false,
        };
        if taken {
            return Err(Errno::EBUSY);
        }
        match &mount.spot {
            Spot::Path(_) => table.paths += 1,
            Spot::Covers { node, .. } => {
                node.covers.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            Spot::Name(_) => {}
        }
        table.mounts.push(mount);
        self.table.store(Arc::new(table));
        Ok(())
    }

    /// Takes a mount out. `EBUSY` where it is in use, or another one covers a part of it, and it is
    /// not to be detached `lazily`; `EINVAL` where it is gone already.
    pub fn remove(&self, mount: &Arc<Mount>, lazily: bool) -> Result<()> {
        let _change = lock(&self.change);
        let mut table = Table::clone(&self.table.load());
        let place = table.mounts.iter().position(|other| Arc::ptr_eq(other, mount));
        let place = place.ok_or(Errno::EINVAL)?;
        let on_it = |other: &Arc<Mount>| matches!(&other.spot, Spot::Covers { mount: below, .. } if Arc::ptr_eq(below, mount));
        let used = mount.users.load(std::sync::atomic::Ordering::Acquire) > 0;
        if !lazily && (used || table.mounts.iter().any(on_it)) {
            return Err(Errno::EBUSY);
        }
        let mount = table.mounts.remove(place);
        match &mount.spot {
            Spot::Path(_) => table.paths -= 1,
            Spot::Covers { node, .. } => {
                node.covers.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
            }
            Spot::Name(_) => {}
        }
        self.table.store(Arc::new(table));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_is_matched_by_whole_components() {
        for (path, at, expected) in [
            ("/data", "/data", Some(5)),
            ("/data/x", "/data", Some(5)),
            ("//data/./x", "/data", Some(6)),
            ("/./data", "/data", Some(7)),
            ("/database", "/data", None),
            ("/dat", "/data", None),
            ("/a/b/c", "/a/b", Some(4)),
            ("/a/../a/b", "/a/b", None),
            ("/a", "/a/b", None),
        ] {
            assert_eq!(matches(path.as_bytes(), at.as_bytes()), expected, "{path} {at}");
        }
    }
}
