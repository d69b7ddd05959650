//! Backing files: descriptors that the kernel reads and writes without asking us
//! (`FOPEN_PASSTHROUGH`, Documentation/filesystems/fuse/fuse-passthrough.rst).

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use defuse_fs::{BackingFile, Errno, Fh, Ino, Result};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use defuse_wire::abi::{self, BackingMap};

const SHARDS: usize = 16;

/// Backing files without users that a shard keeps registered: few enough to be searched one by one.
const RECENT_MAX: usize = 64;

/// The backing files of a session. The kernel allows an inode one backing file at a time, so all
/// open files of an inode share its id.
///
/// The id of a file that was opened for reading is kept for a short time after its last user, so
/// that a later open reuses it. The kernel holds the file open as long; a file that is open for
/// writing could not be executed.
pub(crate) struct BackingFiles {
    device: Arc<OwnedFd>,
    shards: [Mutex<BackingShard>; SHARDS],
    /// Number of ids that are kept without users. The search for them is skipped while it is 0.
    kept: AtomicUsize,
}

#[derive(Default)]
struct BackingShard {
    used: HashMap<Ino, UsedBacking>,
    recent: Vec<RecentBacking>,
}

struct UsedBacking {
    /// `None`: there is none, or the kernel refused. It does not allow an inode to be open both
    /// with and without a backing file, so later opens follow the first one.
    id: Option<i32>,
    users: Vec<Fh>,
    only_reads: bool,
}

/// A backing file without users.
struct RecentBacking {
    ino: Ino,
    id: i32,
    /// Used since the last trim.
    fresh: bool,
}

/// The backing file that the file system offers for an open file.
#[derive(Clone, Copy)]
pub(crate) struct BackingOffer<'a> {
    pub(crate) backing: &'a BackingFile,
    /// It was opened for reading only.
    pub(crate) only_reads: bool,
}

impl BackingFiles {
    pub(crate) fn new(device: Arc<OwnedFd>) -> Self {
        let shards = std::array::from_fn(|_| Mutex::default());
        BackingFiles { device, shards, kept: AtomicUsize::new(0) }
    }

    /// Returns the id under which the kernel knows the backing file of `ino`, for the open file
    /// `fh`, or `None` if there is none. The first open decides: its offer becomes the backing
    /// file.
    pub(crate) fn open(&self, ino: Ino, fh: Fh, offer: Option<BackingOffer<'_>>) -> Option<i32> {
        let mut guard = self.shard(ino);
        let shard = &mut *guard;
        if let Some(backing) = shard.used.get_mut(&ino) {
            backing.users.push(fh);
            return backing.id;
        }
        let kept = self.take_recent(shard, ino);
        let (id, only_reads) = match (offer, kept) {
            (Some(_), Some(id)) => (Some(id), true),
            (Some(offer), None) => (self.register(ino, offer.backing), offer.only_reads),
            (None, kept) => {
                kept.inspect(|id| unregister(&self.device, *id));
                (None, false)
            }
        };
        shard.used.insert(ino, UsedBacking { id, users: vec![fh], only_reads });
        id
    }

    /// True if the kernel reads and writes a backing file of `ino`, and has no pages of the inode.
    pub(crate) fn is_backed(&self, ino: Ino) -> bool {
        self.shard(ino).used.get(&ino).is_some_and(|used| used.id.is_some())
    }

    fn register(&self, ino: Ino, backing: &BackingFile) -> Option<i32> {
        let id = match backing.without_fsetid {
            true => run_without_fsetid(|| register(&self.device, &backing.fd)),
            false => register(&self.device, &backing.fd),
        };
        id.inspect_err(|errno| log::debug!("no backing file for inode {}: {errno}", ino.0)).ok()
    }

    /// Undoes [`open`](BackingFiles::open), if it was called for this open file.
    pub(crate) fn close(&self, ino: Ino, fh: Fh) {
        let mut guard = self.shard(ino);
        let shard = &mut *guard;
        let Some(backing) = shard.used.get_mut(&ino) else { return };
        let Some(place) = backing.users.iter().position(|&user| user == fh) else { return };
        backing.users.swap_remove(place);
        if !backing.users.is_empty() {
            return;
        }
        let (id, only_reads) = (backing.id, backing.only_reads);
        shard.used.remove(&ino);
        match id {
            Some(id) if only_reads && shard.recent.len() < RECENT_MAX => {
                shard.recent.push(RecentBacking { ino, id, fresh: true });
                self.kept.fetch_add(1, Ordering::Relaxed);
            }
            Some(id) => unregister(&self.device, id),
            None => {}
        }
    }

    /// Drops the kept id of an inode that the kernel has forgotten. If another worker still handles
    /// the last RELEASE, which the kernel sent before, `trim` drops the id.
    pub(crate) fn forget(&self, ino: Ino) {
        if self.kept.load(Ordering::Relaxed) > 0
            && let Some(id) = self.take_recent(&mut self.shard(ino), ino)
        {
            unregister(&self.device, id);
        }
    }

    /// Drops the ids that were not used since the previous call.
    pub(crate) fn trim(&self) {
        if self.kept.load(Ordering::Relaxed) == 0 {
            return;
        }
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            shard.recent.retain_mut(|recent| {
                let fresh = std::mem::take(&mut recent.fresh);
                if !fresh {
                    unregister(&self.device, recent.id);
                    self.kept.fetch_sub(1, Ordering::Relaxed);
                }
                fresh
            });
        }
    }

    fn take_recent(&self, shard: &mut BackingShard, ino: Ino) -> Option<i32> {
        let place = shard.recent.iter().position(|recent| recent.ino == ino)?;
        self.kept.fetch_sub(1, Ordering::Relaxed);
        Some(shard.recent.swap_remove(place).id)
    }

    fn shard(&self, ino: Ino) -> std::sync::MutexGuard<'_, BackingShard> {
        let shard = &self.shards[ino.0 as usize % SHARDS];
        shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Runs `register` while this thread lacks `CAP_FSETID`. Fails with `EPERM` if the thread cannot
/// give the capability up.
fn run_without_fsetid(register: impl FnOnce() -> Result<i32>) -> Result<i32> {
    let own = capabilities(None).map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
    if !own.effective.contains(CapabilitySet::FSETID) {
        return register();
    }
    let without = CapabilitySets { effective: own.effective - CapabilitySet::FSETID, ..own };
    set_capabilities(None, without).map_err(|_| Errno::EPERM)?;
    let registered = register();
    if let Err(errno) = set_capabilities(None, own) {
        // The capability is still permitted, so this does not happen.
        log::warn!("a worker has lost CAP_FSETID: {errno}");
    }
    registered
}

/// Registers `fd` with the credentials of this thread, which the kernel then uses for every access.
/// Fails with `EPERM` without `CAP_SYS_ADMIN`, `ELOOP` if file systems are stacked too high, and
/// `EINVAL` if the file is not regular.
fn register(device: &OwnedFd, fd: &OwnedFd) -> Result<i32> {
    let map = BackingMap { fd: fd.as_raw_fd(), ..BackingMap::default() };
    // SAFETY: for this request number the kernel reads one `fuse_backing_map`, which `map` is.
    let id = unsafe {
        let request = libc::c_ulong::from(abi::FUSE_DEV_IOC_BACKING_OPEN);
        libc::ioctl(device.as_raw_fd(), request, &map)
    };
    if id > 0 { Ok(id) } else { Err(std::io::Error::last_os_error().into()) }
}

fn unregister(device: &OwnedFd, id: i32) {
    // SAFETY: for this request number the kernel reads one 32-bit number, which `id` is. An error
    // (the session is gone) leaves nothing to do.
    unsafe {
        libc::ioctl(device.as_raw_fd(), libc::c_ulong::from(abi::FUSE_DEV_IOC_BACKING_CLOSE), &id);
    }
}
