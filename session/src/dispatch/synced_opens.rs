//! Open files whose changes are durable when they are answered (`O_SYNC`, `O_DSYNC`).
//!
//! After a write the kernel sends FSYNC by itself (`generic_write_sync` in `fs/sync.c`). It leaves
//! FALLOCATE and COPY_FILE_RANGE to the file system, which learns the flags at OPEN. The file
//! systems of the kernel sync after both.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::{Context, Errno, File, FileSystem, OpenFlags, Result};

/// The open files of a kernel mount with `O_DSYNC`, and for each whether its attributes may be
/// lost.
#[derive(Default)]
pub(super) struct SyncedOpens {
    count: AtomicUsize,
    files: Mutex<HashMap<(u64, u64), bool>>,
}

impl SyncedOpens {
    fn files(&self) -> MutexGuard<'_, HashMap<(u64, u64), bool>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a file that was opened with `flags`.
    pub(super) fn record_open(&self, file: File, flags: OpenFlags) {
        if flags.writable() && flags.has(OpenFlags::DSYNC) {
            let mut files = self.files();
            files.insert(key(file), !flags.has(OpenFlags::SYNC));
            self.count.store(files.len(), Ordering::Release);
        }
    }

    /// The file is closed.
    pub(super) fn record_close(&self, file: File) {
        if self.count.load(Ordering::Acquire) > 0 {
            let mut files = self.files();
            files.remove(&key(file));
            self.count.store(files.len(), Ordering::Release);
        }
    }

    /// Makes a change of `file` durable if it was opened so. A file system without fsync has
    /// nothing to do.
    pub(super) fn sync_changed(
        &self,
        fs: &dyn FileSystem,
        cx: &Context<'_>,
        file: File,
    ) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let Some(datasync) = self.files().get(&key(file)).copied() else { return Ok(()) };
        match fs.fsync(cx, file, datasync) {
            Err(Errno::ENOSYS) => Ok(()),
            synced => synced,
        }
    }
}

fn key(file: File) -> (u64, u64) {
    (file.ino.0, file.fh.0)
}
