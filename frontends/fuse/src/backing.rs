//! Backing files: descriptors that the kernel reads and writes without asking us
//! (`FOPEN_PASSTHROUGH`, Documentation/filesystems/fuse/fuse-passthrough.rst).

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use defuse_fs::{Fh, Ino, Result};

use crate::abi::{self, BackingMap};

const SHARDS: usize = 16;

/// The backing files of a session. The kernel allows an inode one backing file at a time, so all
/// who have it open share its id.
pub(crate) struct Backings {
    device: Arc<OwnedFd>,
    shards: [Mutex<HashMap<Ino, Backing>>; SHARDS],
}

struct Backing {
    /// `None`: there is none, or the kernel refused. It does not allow an inode to be open both with
    /// and without a backing file, so those who come later do as the first did.
    id: Option<i32>,
    users: Vec<Fh>,
}

impl Backings {
    pub(crate) fn new(device: Arc<OwnedFd>) -> Self {
        Backings { device, shards: std::array::from_fn(|_| Mutex::default()) }
    }

    /// The id under which the kernel knows the backing file of `ino`, for the open file `fh`; or none,
    /// if it has to do without. The first open decides: its `fd` becomes the backing file.
    pub(crate) fn open(&self, ino: Ino, fh: Fh, fd: Option<BorrowedFd<'_>>) -> Option<i32> {
        let mut shard = self.shard(ino);
        if let Some(backing) = shard.get_mut(&ino) {
            backing.users.push(fh);
            return backing.id;
        }
        let id = fd.and_then(|fd| {
            let id = register(&self.device, fd);
            id.inspect_err(|errno| log::debug!("no backing file for inode {}: {errno}", ino.0)).ok()
        });
        shard.insert(ino, Backing { id, users: vec![fh] });
        id
    }

    /// Takes back [`open`](Backings::open), if there was one.
    pub(crate) fn close(&self, ino: Ino, fh: Fh) {
        let mut shard = self.shard(ino);
        let Some(backing) = shard.get_mut(&ino) else { return };
        let Some(place) = backing.users.iter().position(|&user| user == fh) else { return };
        backing.users.swap_remove(place);
        if backing.users.is_empty() {
            if let Some(id) = backing.id {
                unregister(&self.device, id);
            }
            shard.remove(&ino);
        }
    }

    fn shard(&self, ino: Ino) -> std::sync::MutexGuard<'_, HashMap<Ino, Backing>> {
        let shard = &self.shards[ino.0 as usize % SHARDS];
        shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Registers `fd` with the credentials of this thread, which the kernel then uses for every access
/// (see [`defuse_fs::Opened::backing`]). Errors: `EPERM` without `CAP_SYS_ADMIN`, `ELOOP` where file
/// systems are stacked too high, `EINVAL` where the file is not regular.
fn register(device: &OwnedFd, fd: BorrowedFd<'_>) -> Result<i32> {
    let map = BackingMap { fd: fd.as_raw_fd(), ..BackingMap::default() };
    // SAFETY: the request number says that the kernel reads one `fuse_backing_map`, which `map` is.
    let id = unsafe {
        let request = libc::c_ulong::from(abi::FUSE_DEV_IOC_BACKING_OPEN);
        libc::ioctl(device.as_raw_fd(), request, &map)
    };
    if id > 0 { Ok(id) } else { Err(std::io::Error::last_os_error().into()) }
}

fn unregister(device: &OwnedFd, id: i32) {
    // SAFETY: the request number says that the kernel reads one 32-bit number, which `id` is. An
    // error (the session is gone) leaves nothing to do.
    unsafe {
        libc::ioctl(device.as_raw_fd(), libc::c_ulong::from(abi::FUSE_DEV_IOC_BACKING_CLOSE), &id);
    }
}
