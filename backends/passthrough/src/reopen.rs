//! Inodes without file handles, found again by name.
//!
//! Without `CAP_DAC_READ_SEARCH` there are no handles, and a descriptor for every inode would end at the
//! limit of descriptors. So an inode remembers under which names it was found, in which directories.
//! Its descriptor lies in the cache, and when that has given it up, the inode is opened by name again,
//! from the next directory above that is still open. Mount, number and birth time tell whether what is
//! found there is the inode; where it is not (somebody moved it behind our back), it is stale. Inodes
//! keep a descriptor for themselves where the file system keeps no birth time, or no name is known.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::{Errno, Ino, Result};
use rustix::fs::{Mode, OFlags};

use crate::inode::Inode;
use crate::lower::{OrErrno, Stat};
use crate::mounts::Mount;
use crate::passthrough::{InodeFd, Passthrough};

/// Names of one inode that are remembered: more than one matters to hard links alone.
const MOST_PLACES: usize = 4;

/// A name under which an inode was found.
#[derive(Clone)]
pub(crate) struct Place {
    dir: Arc<Inode>,
    name: Box<[u8]>,
}

/// The places of an inode, the youngest last. They may be out of date, so each use is checked.
#[derive(Default)]
pub(crate) struct Places(Mutex<Vec<Place>>);

impl Places {
    fn add(&self, dir: &Arc<Inode>, name: &[u8]) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |place: &Place| place.dir.number == dir.number && *place.name == *name;
        if places.last().is_some_and(is_it) {
            return;
        }
        let old = match places.iter().position(is_it) {
            Some(at) => Some(places.remove(at)),
            None if places.len() == MOST_PLACES => Some(places.remove(0)),
            None => None,
        };
        places.push(Place { dir: Arc::clone(dir), name: name.into() });
        drop(places);
        drop(old);
    }

    fn all(&self) -> Vec<Place> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take(&mut self) -> Vec<Place> {
        std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Places {
    /// One after the other: a chain of directories may be as deep as a path can be made.
    fn drop(&mut self) {
        let mut left = self.take();
        while let Some(place) = left.pop() {
            if let Some(mut dir) = Arc::into_inner(place.dir)
                && let Some(places) = dir.places.as_mut()
            {
                left.extend(places.take());
            }
        }
    }
}

impl Mount {
    /// Whether inodes without handles are found again by name.
    pub(crate) fn reopens(&self) -> bool {
        !self.handles && self.birth_is_constant()
    }
}

impl Passthrough {
    /// Whether an inode with this status needs no descriptor of its own where a name of it is known.
    pub(crate) fn is_reopened(&self, stat: &Stat) -> bool {
        let mount = self.mounts.find(stat.mount_id(), 0).and_then(|at| self.mounts.get(at).ok());
        let reopens = mount.is_some_and(Mount::reopens);
        reopens && stat.birth().is_some() && stat.nlink() > 0 && !self.keeps_descriptors()
    }

    /// Remembers that the inode `ino` was found as `name` in `dir`, where that may be needed.
    pub(crate) fn note_place(&self, ino: Ino, dir: &Arc<Inode>, name: &[u8]) {
        // With handles there is nothing to do, and nothing to look for.
        if !self.mounts.get(dir.key.mount).is_ok_and(Mount::reopens) {
            return;
        }
        if let Ok(inode) = self.inodes.get(ino)
            && let Some(places) = &inode.places
            && ino != Ino::ROOT
        {
            places.add(dir, name);
        }
    }

    /// Remembers where an inode has been moved to.
    pub(crate) fn note_moved(&self, dir: &Arc<Inode>, fd: BorrowedFd<'_>, name: &[u8]) {
        if !self.mounts.get(dir.key.mount).is_ok_and(Mount::reopens) {
            return;
        }
        if let Ok(stat) = Stat::at(fd, name)
            && let Some(index) = self.mounts.find(stat.mount_id(), dir.key.mount)
            && let Ok(mount) = self.mounts.get(index)
            && let Some(key) = mount.key(index, &stat, None)
            && let Some(inode) = self.inodes.peek(&key)
        {
            self.note_place(inode.ino(), dir, name);
        }
    }

    /// An `O_PATH` descriptor of an inode without a handle. `ESTALE` where no name leads to it.
    pub(crate) fn reopen(&self, inode: &Inode) -> Result<OwnedFd> {
        let places = inode.places.as_ref().map(|places| places.all()).unwrap_or_default();
        for place in places.iter().rev() {
            let dir = self.directory(&place.dir);
            if let Ok(fd) = dir.and_then(|dir| self.open_checked(dir.as_fd(), &place.name, inode)) {
                return Ok(fd);
            }
        }
        Err(Errno::ESTALE)
    }

    /// Opens a directory from the next one above that is open.
    fn directory(&self, dir: &Arc<Inode>) -> Result<InodeFd> {
        const MAX_DEPTH: usize = 1 << 16;
        let (mut at, mut below) = (Arc::clone(dir), Vec::new());
        let mut fd = loop {
            if let Some(fd) = at.pin.load_full().or_else(|| self.cache.get(&at)) {
                break fd;
            }
            // A directory has one name, and the youngest is the best guess.
            let place = at.places.as_ref().and_then(|places| places.all().pop());
            let place = place.filter(|_| below.len() < MAX_DEPTH).ok_or(Errno::ESTALE)?;
            below.push((at, place.name));
            at = place.dir;
        };
        while let Some((inode, name)) = below.pop() {
            let opened = self.open_checked(fd.as_fd(), &name, &inode)?;
            fd = Arc::new(self.placed(opened));
            // What was forgotten is only on the way, and nobody would take it out of the cache.
            if self.inodes.get(inode.ino()).is_ok() {
                self.cache.put(&inode, &fd, true);
            }
        }
        Ok(fd)
    }

    /// Opens `name` in `dir` if it leads to `inode`.
    fn open_checked(&self, dir: BorrowedFd<'_>, name: &[u8], inode: &Inode) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(dir, name, flags, Mode::empty()).or_errno();
        let fd = self.with_spare_fds(open)?;
        let stat = Stat::of(fd.as_fd())?;
        let index = self.mounts.find(stat.mount_id(), inode.key.mount).ok_or(Errno::ESTALE)?;
        let key = self.mounts.get(index)?.key(index, &stat, None);
        if key == Some(inode.key) { Ok(fd) } else { Err(Errno::ESTALE) }
    }
}
