//! Open files whose changes are durable when they are answered (`O_SYNC`, `O_DSYNC`).
//!
//! After a write the kernel sends FSYNC by itself (`generic_write_sync` in `fs/sync.c`). It leaves
//! FALLOCATE and COPY_FILE_RANGE to the file system, which learns the flags at OPEN. The file
//! systems of the kernel sync after both.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::{Context, Errno, File, FileSystem, OpenFlags, Result};

/// The open files of a kernel mount with `O_DSYNC`. A file system may give one handle for every
/// open of an inode, so that opens with other flags may have the same handle.
#[derive(Default)]
pub(super) struct SyncedOpens {
    count: AtomicUsize,
    files: Mutex<HashMap<(u64, u64), SyncedHandle>>,
}

/// The opens with `O_DSYNC` that have one handle.
#[derive(Clone, Copy, Default)]
struct SyncedHandle {
    opens: u64,
    /// One of them has `O_SYNC`: its attributes are durable, too.
    syncs_attributes: bool,
}

impl SyncedOpens {
    fn files(&self) -> MutexGuard<'_, HashMap<(u64, u64), SyncedHandle>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a file that was opened with `flags`.
    pub(super) fn record_open(&self, file: File, flags: OpenFlags) {
        if is_synced(flags) {
            let mut files = self.files();
            let handle = files.entry(key(file)).or_default();
            handle.opens += 1;
            handle.syncs_attributes |= flags.has(OpenFlags::SYNC);
            self.count.store(files.len(), Ordering::Release);
        }
    }

    /// A file that was opened with `flags` is closed.
    pub(super) fn record_close(&self, file: File, flags: OpenFlags) {
        if is_synced(flags) {
            let mut files = self.files();
            if let Some(handle) = files.get_mut(&key(file)) {
                handle.opens -= 1;
                if handle.opens == 0 {
                    files.remove(&key(file));
                }
            }
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
        let Some(handle) = self.files().get(&key(file)).copied() else { return Ok(()) };
        match fs.fsync(cx, file, !handle.syncs_attributes) {
            Err(Errno::ENOSYS) => Ok(()),
            synced => synced,
        }
    }
}

fn is_synced(flags: OpenFlags) -> bool {
    flags.writable() && flags.has(OpenFlags::DSYNC)
}

fn key(file: File) -> (u64, u64) {
    (file.ino.0, file.fh.0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use defuse_fs::{Attr, Caller, DirBuf, Entry, Fh, Ino, Name};

    use super::*;

    /// A file system that counts its syncs.
    #[derive(Default)]
    struct SyncCounter(AtomicU32);

    impl FileSystem for SyncCounter {
        fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
            Err(Errno::ENOSYS)
        }

        fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
            Err(Errno::ENOSYS)
        }

        fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
            Err(Errno::ENOSYS)
        }

        fn fsync(&self, _: &Context<'_>, _: File, _: bool) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    /// memory and uhs have one handle for all opens of an inode.
    #[test]
    fn a_close_of_another_open_with_the_same_handle_leaves_the_file_synced() {
        let (opens, fs) = (SyncedOpens::default(), SyncCounter::default());
        let file = File { ino: Ino(7), fh: Fh(0) };
        let plain = OpenFlags(1);
        let [data, all] = [OpenFlags::DSYNC, OpenFlags::SYNC].map(|flag| OpenFlags(1 | flag));
        let syncs = || {
            let before = fs.0.load(Ordering::Relaxed);
            opens.sync_changed(&fs, &Context::new(Caller::default()), file).unwrap();
            fs.0.load(Ordering::Relaxed) - before
        };
        opens.record_open(file, data);
        opens.record_open(file, plain);
        opens.record_close(file, plain);
        assert_eq!(syncs(), 1);
        opens.record_open(file, all);
        opens.record_close(file, data);
        assert_eq!(syncs(), 1);
        opens.record_close(file, all);
        assert_eq!(syncs(), 0);
    }
}
