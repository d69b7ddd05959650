//! The table of mounts: read without a lock, replaced as a whole.

use std::sync::{Arc, Mutex};

use arc_swap::{ArcSwap, Guard};
use defuse_fs::{Errno, Ino, Result};

use crate::mount::{ClientMount, MountSpot};
use crate::node::lock;

/// All mounts at one moment.
#[derive(Clone, Default)]
pub(crate) struct ClientMountTable {
    mounts: Vec<Arc<ClientMount>>,
    /// Number of mounts at paths of the kernel's name space.
    paths: usize,
}

impl ClientMountTable {
    pub fn iter(&self) -> impl Iterator<Item = &Arc<ClientMount>> {
        self.mounts.iter()
    }

    /// True if a path of the kernel's name space could lead into a mount at all.
    pub fn has_paths(&self) -> bool {
        self.paths > 0
    }

    fn mounts_with_paths(&self) -> impl Iterator<Item = (&Arc<ClientMount>, &[u8])> {
        self.mounts.iter().filter_map(|mount| match &mount.spot {
            MountSpot::Path(path) => Some((mount, &**path)),
            _ => None,
        })
    }

    /// The mount at exactly this path, which has no `.`, `..` or double slashes.
    pub fn find(&self, path: &[u8]) -> Option<&Arc<ClientMount>> {
        self.mounts_with_paths().find(|(_, at)| *at == path).map(|(mount, _)| mount)
    }

    /// True if a mount lies below `path`.
    pub fn has_mount_below(&self, path: &[u8]) -> bool {
        let below = |at: &[u8]| at.strip_prefix(path).is_some_and(|rest| rest.starts_with(b"/"));
        self.mounts_with_paths().any(|(_, at)| below(at))
    }

    /// The mount with the longest path that is a prefix of `path`, and the length of that prefix in
    /// `path`.
    pub fn prefix(&self, path: &[u8]) -> Option<(&Arc<ClientMount>, usize)> {
        let found = self
            .mounts_with_paths()
            .filter_map(|(mount, at)| Some((mount, match_prefix(path, at)?)));
        found.max_by_key(|(_, len)| *len)
    }

    /// The mount named by the first component of `path`, and the length of that component.
    pub fn find_named(&self, path: &[u8]) -> Option<(&Arc<ClientMount>, usize)> {
        let end = path.iter().position(|&byte| byte == b'/').unwrap_or(path.len());
        let name = path[..end].strip_suffix(b":")?;
        let is = |mount: &&Arc<ClientMount>| match &mount.spot {
            MountSpot::Name(own) => **own == *name,
            _ => false,
        };
        self.mounts.iter().find(is).map(|mount| (mount, end))
    }

    /// The mount that covers a directory of another one.
    pub fn find_covering(&self, below: u32, ino: Ino) -> Option<&Arc<ClientMount>> {
        let covers = |mount: &&Arc<ClientMount>| match &mount.spot {
            MountSpot::Covers { node, mount, .. } => mount.id == below && node.ino() == ino,
            _ => false,
        };
        // The latest mount is on top.
        self.mounts.iter().rev().find(covers)
    }
}

/// The number of bytes of `path` that name the mount point `at`. Compares whole components, so that
/// `//data/./x` is below `/data` and `/database` is not.
fn match_prefix(path: &[u8], at: &[u8]) -> Option<usize> {
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

/// The current table, and the lock for changing it.
#[derive(Default)]
pub(crate) struct ClientMounts {
    table: ArcSwap<ClientMountTable>,
    change: Mutex<()>,
}

impl ClientMounts {
    /// Returns the current table, as a reference to keep.
    pub fn load_full(&self) -> Arc<ClientMountTable> {
        self.table.load_full()
    }

    /// The current table.
    #[inline]
    pub fn load(&self) -> Guard<Arc<ClientMountTable>> {
        self.table.load()
    }

    /// Adds a mount. Fails with `EBUSY` if this path or name is a mount already.
    pub fn add(&self, mount: Arc<ClientMount>) -> Result<()> {
        let _change = lock(&self.change);
        let mut table = ClientMountTable::clone(&self.table.load());
        let taken = match &mount.spot {
            MountSpot::Path(path) => table.find(path).is_some(),
            MountSpot::Name(_) => table.find_named(&mount.target()).is_some(),
            MountSpot::Covers { .. } => false,
        };
        if taken {
            return Err(Errno::EBUSY);
        }
        match &mount.spot {
            MountSpot::Path(_) => table.paths += 1,
            MountSpot::Covers { node, mount, .. } => {
                node.covers.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                mount.covered.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            MountSpot::Name(_) => {}
        }
        table.mounts.push(mount);
        self.table.store(Arc::new(table));
        Ok(())
    }

    /// Removes a mount. Unless `lazily` is set, fails with `EBUSY` if it is in use or partly
    /// covered by another mount. Fails with `EINVAL` if it is gone already.
    pub fn remove(&self, mount: &Arc<ClientMount>, lazily: bool) -> Result<()> {
        let _change = lock(&self.change);
        let mut table = ClientMountTable::clone(&self.table.load());
        let place = table.mounts.iter().position(|other| Arc::ptr_eq(other, mount));
        let place = place.ok_or(Errno::EINVAL)?;
        let on_it = |other: &Arc<ClientMount>| match &other.spot {
            MountSpot::Covers { mount: below, .. } => Arc::ptr_eq(below, mount),
            _ => false,
        };
        let used = mount.users.load(std::sync::atomic::Ordering::Acquire) > 0;
        if !lazily && (used || table.mounts.iter().any(on_it)) {
            return Err(Errno::EBUSY);
        }
        let mount = table.mounts.remove(place);
        match &mount.spot {
            MountSpot::Path(_) => table.paths -= 1,
            MountSpot::Covers { node, mount, .. } => {
                node.covers.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
                mount.covered.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
            }
            MountSpot::Name(_) => {}
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
            assert_eq!(match_prefix(path.as_bytes(), at.as_bytes()), expected, "{path} {at}");
        }
    }
}
