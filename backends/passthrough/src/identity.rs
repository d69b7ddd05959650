//! The identity of inodes: the numbers that make it unique, and for how long.
//!
//! A lower file system gives the number of a removed inode to the next one, and the clock of its
//! birth times ticks every 1 to 10 ms. A file that was made within the same tick can thus have the
//! number and the birth time of a removed one, and its owner may be another user. Three rules keep
//! such a *successor* apart:
//!
//! - An inode is opened by its whole file handle, with the generation. Where the file system may
//!   take a handle for a handle of a successor (generation 0, and layouts that are not known here),
//!   the handle opens a path, which is compared before anything is opened by it.
//! - Number and birth time find a known inode again ([`InodeKey`]) if it has a descriptor, so that
//!   its number is in use, or if the clock had passed its birth time while the inode was there.
//!   Otherwise the handles are compared.
//! - An inode without a handle keeps a descriptor until the clock has passed its birth time.
//!
//! The attributes of a lookup are read after the handle. If the name leads to a successor
//! meanwhile, the handle belongs to the removed inode and opens nothing. Where operations have the
//! credentials of their callers ([`CredentialsPolicy::Callers`]), only a caller who could open a
//! successor by name opens it, and the last two rules do not apply.
//!
//! The rules for birth times assume that the clock of the machine is not set back to the same
//! nanosecond. Handles do not depend on it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use defuse_fs::{Errno, Ino, Result};
use rustix::fs::{Mode, OFlags};

use crate::handle::CompactHandle;
use crate::lower::{OrErrno, StatxResult};
use crate::options::CredentialsPolicy;
use crate::passthrough::Passthrough;
use crate::proc_path::ProcPath;
use crate::sys;
use crate::tables::inode::{InodeKey, LowerInode};
use crate::tables::mounts::LowerMount;
use crate::tables::young::ClockTick;

impl LowerMount {
    /// The identity of an inode on this mount, which has the number `index`. Returns `None` if the
    /// file handle is needed, because the file system has no reliable birth times.
    pub(crate) fn key(
        &self,
        index: u32,
        stat: &StatxResult,
        handle: Option<&CompactHandle>,
    ) -> Option<InodeKey> {
        let birth = match (self.birth_is_constant(), self.handles) {
            (true, _) if stat.birth().is_some() => stat.birth()?,
            (_, true) => handle?.digest(),
            // Every such inode has an open descriptor, so its number cannot be reused.
            (_, false) => 0,
        };
        Some(InodeKey { ino: stat.ino(), birth, mount: index })
    }
}

impl Passthrough {
    /// True if no later inode can have the key of the inode with this status, which existed at
    /// `tick`.
    pub(crate) fn is_unique(
        &self,
        mount: &LowerMount,
        stat: &StatxResult,
        tick: ClockTick,
    ) -> bool {
        let by_birth = mount.birth_is_constant().then(|| stat.birth()).flatten();
        matches!(self.options.credentials, CredentialsPolicy::Callers(_))
            || by_birth.is_none_or(|birth| tick.is_after(birth))
    }

    /// True if the open inode `fd`, which has the key of `inode`, is that inode and not a
    /// successor.
    pub(crate) fn is_same(&self, inode: &LowerInode, fd: BorrowedFd<'_>) -> bool {
        if inode.has_unique_key() {
            return true;
        }
        let Some(handle) = &inode.handle else { return false };
        sys::name_to_handle(fd, c"").is_ok_and(|found| found == *handle)
    }

    /// Opens an inode by its handle.
    pub(crate) fn open_by_handle(
        &self,
        inode: &LowerInode,
        handle: &CompactHandle,
        flags: OFlags,
    ) -> Result<OwnedFd> {
        let mount = self.mounts.get(inode.key.mount)?;
        let root = self.root_fd(inode.key.mount)?;
        let root = root.as_fd();
        if handle.is_exact(mount.f_type) {
            return sys::open_by_handle(root, handle, flags.bits());
        }
        let found = sys::open_by_handle(root, handle, (OFlags::PATH | OFlags::CLOEXEC).bits())?;
        let found_handle = sys::name_to_handle(found.as_fd(), c"")?;
        let stat = StatxResult::read(found.as_fd())?;
        let key = mount.key(inode.key.mount, &stat, Some(&found_handle));
        if found_handle != *handle || key != Some(inode.key) {
            return Err(Errno::ESTALE);
        }
        if flags.contains(OFlags::PATH) {
            return Ok(found);
        }
        // The next one gets the lowest number, which a program may be given.
        let found = self.place_descriptor(found);
        let path = ProcPath::new(found.as_fd());
        rustix::fs::open(path.as_c_str(), flags - OFlags::NOFOLLOW, Mode::empty()).or_errno()
    }

    /// Lets the inode `ino`, which was pinned because it is young, go on without the pin in a
    /// while. The caller records its name.
    pub(crate) fn note_young(&self, ino: Ino) {
        /// More than are added by one operation, so that their number falls.
        const MOST: usize = 4;
        if let Ok(inode) = self.inodes.get(ino) {
            self.young.add(inode);
        }
        self.release_grown(MOST);
    }

    /// Releases the pins of up to `most` inodes that are no longer young.
    pub(crate) fn release_grown(&self, most: usize) {
        for inode in self.young.take_grown(ClockTick::now(), most) {
            if self.inodes.get(inode.ino()).is_err() {
                continue;
            }
            // Its lookup records the name next.
            if inode.places.as_ref().is_some_and(|places| places.is_empty()) {
                self.young.add(inode);
                continue;
            }
            inode.set_unique_key();
            let Some(fd) = self.unpin_named(&inode) else { continue };
            if self.inodes.get(inode.ino()).is_ok() {
                self.cache_fd(&inode, &fd, false);
            }
        }
    }

    /// Waits until no inode is young, and releases their pins: descriptors are short.
    pub(crate) fn wait_for_young(&self) {
        /// Longer than a tick of any kernel.
        const TICK: Duration = Duration::from_millis(11);
        if !self.young.is_empty() {
            std::thread::sleep(TICK);
            self.release_grown(usize::MAX);
        }
    }
}
