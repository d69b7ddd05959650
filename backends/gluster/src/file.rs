//! Open files and directories of a volume, as a safe type over the functions of libgfapi.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use defuse_fs::{Errno, Result};

use crate::ffi::GlfsFd;
use crate::volume::{Gfid, RetainedObject, VolumeConnection, check, check_len, extract, last};

/// An open file or directory. Closed when dropped, also on a thread of libgfapi.
pub struct GfapiHandle {
    volume: Arc<VolumeConnection>,
    raw: *mut GlfsFd,
    is_dir: bool,
}

// SAFETY: libgfapi locks an open file by itself; it does not lock listings, which the caller
// protects by a mutex.
unsafe impl Send for GfapiHandle {}
// SAFETY: libgfapi locks an open file by itself; it does not lock listings, which the caller
// protects by a mutex.
unsafe impl Sync for GfapiHandle {}

/// The lock owner of handles that take no locks.
const NOBODY: u64 = u64::MAX;

/// The error of an operation on an open file that a brick does not know.
pub(crate) const NOT_OPEN_THERE: Errno = Errno::from_raw(libc::EBADFD);

/// Pauses until a brick knows an open file again.
pub(crate) const REOPEN_PAUSES_MS: [u64; 4] = [2, 10, 40, 100];

thread_local! {
    /// True on a thread of libgfapi that runs a callback.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

impl GfapiHandle {
    /// The handle `raw`, or the error of the call that returned null.
    pub(crate) fn from_raw(
        volume: &Arc<VolumeConnection>,
        raw: *mut GlfsFd,
        is_dir: bool,
    ) -> Result<GfapiHandle> {
        if raw.is_null() {
            return Err(last());
        }
        let handle = GfapiHandle { volume: Arc::clone(volume), raw, is_dir };
        if !is_dir {
            // Without an owner, closing sends the owner of the last lock of this thread, whose
            // locks the servers then drop.
            handle.set_lock_owner(NOBODY)?;
        }
        Ok(handle)
    }

    /// The connection.
    pub(crate) fn volume(&self) -> &Arc<VolumeConnection> {
        &self.volume
    }

    /// The pointer of libgfapi, valid as long as this handle.
    pub(crate) fn raw(&self) -> *mut GlfsFd {
        self.raw
    }

    /// Another handle of the same open file, with a lock owner of its own.
    pub fn duplicate(&self) -> Result<GfapiHandle> {
        // SAFETY: the handle is open.
        let raw = unsafe { (self.volume.library().glfs_dup)(self.raw) };
        GfapiHandle::from_raw(&self.volume, raw, self.is_dir)
    }

    /// Names the owner of the locks that are taken through this handle.
    pub fn set_lock_owner(&self, owner: u64) -> Result<()> {
        let mut owner = owner.to_ne_bytes();
        // SAFETY: the owner is as long as stated, and copied.
        let done = unsafe {
            (self.volume.library().glfs_fd_set_lkowner)(self.raw, owner.as_mut_ptr().cast(), 8)
        };
        check(done).map(drop)
    }

    /// `F_SETLK` or `F_GETLK` of fcntl(2).
    pub fn posix_lock(&self, command: c_int, lock: &mut libc::flock) -> Result<()> {
        run_on_open(|| {
            // SAFETY: `lock` is read, and written for F_GETLK.
            let done = unsafe { (self.volume.library().glfs_posix_lock)(self.raw, command, lock) };
            check(done).map(drop)
        })
    }

    /// Reads from `offset` on. Returns the number of bytes.
    pub fn read(&self, room: &mut [u8], offset: u64) -> Result<usize> {
        let (start, len, offset) = (room.as_mut_ptr().cast(), room.len(), position(offset)?);
        // SAFETY: at most `len` bytes are written.
        check_len(unsafe {
            (self.volume.library().glfs_pread)(self.raw, start, len, offset, 0, null_mut())
        })
    }

    /// Writes from `offset` on, with flags of an open file for this write alone. Returns the number
    /// of bytes.
    pub fn write(&self, bytes: &[u8], offset: u64, flags: c_int) -> Result<usize> {
        let (start, len, offset) = (bytes.as_ptr().cast(), bytes.len(), position(offset)?);
        let write = self.volume.library().glfs_pwrite;
        // SAFETY: `len` bytes are read.
        check_len(unsafe { write(self.raw, start, len, offset, flags, null_mut(), null_mut()) })
    }

    /// Makes the data durable, and all attributes unless `datasync` is set.
    pub fn sync(&self, datasync: bool) -> Result<()> {
        let library = self.volume.library();
        let sync = if datasync { library.glfs_fdatasync } else { library.glfs_fsync };
        // SAFETY: the handle is open.
        check(unsafe { sync(self.raw, null_mut(), null_mut()) }).map(drop)
    }

    /// The attributes.
    pub fn stat(&self) -> Result<libc::stat> {
        run_on_open(|| {
            let mut stat = MaybeUninit::zeroed();
            // SAFETY: `stat` is set on success, and all-zero bytes are a valid value.
            unsafe {
                check((self.volume.library().glfs_fstat)(self.raw, stat.as_mut_ptr()))?;
                Ok(stat.assume_init())
            }
        })
    }

    /// Sets the size.
    pub fn truncate(&self, size: u64) -> Result<()> {
        run_on_open(|| {
            let (size, truncate) = (position(size)?, self.volume.library().glfs_ftruncate);
            // SAFETY: the handle is open.
            check(unsafe { truncate(self.raw, size, null_mut(), null_mut()) }).map(drop)
        })
    }

    /// Sets permission bits.
    pub fn chmod(&self, mode: u32) -> Result<()> {
        run_on_open(|| {
            // SAFETY: the handle is open.
            check(unsafe { (self.volume.library().glfs_fchmod)(self.raw, mode) }).map(drop)
        })
    }

    /// Sets owner and group. `u32::MAX` keeps the present one.
    pub fn chown(&self, uid: u32, gid: u32) -> Result<()> {
        run_on_open(|| {
            // SAFETY: the handle is open.
            check(unsafe { (self.volume.library().glfs_fchown)(self.raw, uid, gid) }).map(drop)
        })
    }

    /// Sets the times of last access and of last change of the data.
    pub fn set_times(&self, times: [libc::timespec; 2]) -> Result<()> {
        run_on_open(|| {
            // SAFETY: two times are read.
            check(unsafe { (self.volume.library().glfs_futimens)(self.raw, times.as_ptr()) })
                .map(drop)
        })
    }

    /// An extended attribute, or the list of names without `name`; see
    /// [`VolumeConnection::get_xattr`](crate::volume::VolumeConnection::get_xattr).
    pub fn get_xattr(&self, name: Option<&CStr>, room: &mut [u8]) -> Result<usize> {
        run_on_open(|| {
            let (value, size) = (room.as_mut_ptr().cast(), room.len());
            let library = self.volume.library();
            // SAFETY: at most `size` bytes are written.
            check_len(unsafe {
                match name {
                    Some(name) => (library.glfs_fgetxattr)(self.raw, name.as_ptr(), value, size),
                    None => (library.glfs_flistxattr)(self.raw, value, size),
                }
            })
        })
    }

    /// Sets an extended attribute, with the flags of setxattr(2).
    pub fn set_xattr(&self, name: &CStr, value: &[u8], flags: c_int) -> Result<()> {
        run_on_open(|| {
            let (name, size, value) = (name.as_ptr(), value.len(), value.as_ptr().cast());
            // SAFETY: the value is as long as stated.
            check(unsafe {
                (self.volume.library().glfs_fsetxattr)(self.raw, name, value, size, flags)
            })
            .map(drop)
        })
    }

    /// Removes an extended attribute.
    pub fn remove_xattr(&self, name: &CStr) -> Result<()> {
        run_on_open(|| {
            // SAFETY: the name ends with NUL.
            check(unsafe { (self.volume.library().glfs_fremovexattr)(self.raw, name.as_ptr()) })
                .map(drop)
        })
    }

    /// The next data or hole, by `SEEK_DATA` or `SEEK_HOLE`.
    pub fn seek(&self, offset: u64, whence: c_int) -> Result<u64> {
        run_on_open(|| {
            let offset = position(offset)?;
            // SAFETY: the handle is open.
            let found = unsafe { (self.volume.library().glfs_lseek)(self.raw, offset, whence) };
            u64::try_from(found).map_err(|_| last())
        })
    }

    /// Allocates space.
    pub fn allocate(&self, keep_size: bool, offset: u64, len: u64) -> Result<()> {
        run_on_open(|| {
            let (keep, offset) = (c_int::from(keep_size), position(offset)?);
            // SAFETY: the handle is open.
            let done = unsafe {
                (self.volume.library().glfs_fallocate)(self.raw, keep, offset, len as usize)
            };
            check(done).map(drop)
        })
    }

    /// Makes a hole.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        run_on_open(|| {
            let offset = position(offset)?;
            // SAFETY: the handle is open.
            check(unsafe { (self.volume.library().glfs_discard)(self.raw, offset, len as usize) })
                .map(drop)
        })
    }

    /// Writes zeros.
    pub fn zero(&self, offset: u64, len: u64) -> Result<()> {
        run_on_open(|| {
            let (offset, len) = (position(offset)?, position(len)?);
            // SAFETY: the handle is open.
            check(unsafe { (self.volume.library().glfs_zerofill)(self.raw, offset, len) }).map(drop)
        })
    }

    /// Continues a listing after the entry with this position; 0 is the start.
    pub fn seek_dir(&self, position: u64) {
        // SAFETY: the handle is a directory's.
        unsafe { (self.volume.library().glfs_seekdir)(self.raw, position as i64) };
    }

    /// The next entry of a listing, with attributes and identity if `plus` is set; `None` at the
    /// end. With `keeps`, libgfapi keeps the inode. No other thread may list through this handle at
    /// the same time.
    pub fn next_entry(&self, plus: bool, keeps: bool) -> Result<Option<VolumeDirEntry>> {
        /// `GFAPI_XREADDIRP_STAT` and `GFAPI_XREADDIRP_HANDLE`.
        const PLUS: u32 = 3;
        let library = self.volume.library();
        let mut room = MaybeUninit::<libc::dirent64>::zeroed();
        let (mut xstat, mut entry) = (null_mut(), null_mut());
        // SAFETY: `entry` is null or points to `room`, whose name ends with NUL; `xstat` and its
        // target belong to this call until they are freed.
        unsafe {
            let next = library.glfs_xreaddirplus_r;
            let flags = if plus { PLUS } else { 0 };
            check(next(self.raw, flags, &raw mut xstat, room.as_mut_ptr(), &raw mut entry))?;
            if entry.is_null() {
                return Ok(None);
            }
            let mut listed = VolumeDirEntry::from_dirent(&*entry);
            if !xstat.is_null() {
                let stat = (library.glfs_xreaddirplus_get_stat)(xstat);
                let object = (library.glfs_xreaddirplus_get_object)(xstat);
                if plus && !stat.is_null() && !object.is_null() && (*stat).st_mode != 0 {
                    let gfid = extract(library, object).ok();
                    listed.found = gfid.map(|gfid| (gfid, *stat));
                    if keeps {
                        listed.kept.set(RetainedObject::copy(&self.volume, object));
                    }
                }
                (library.glfs_free)(xstat.cast::<c_void>());
            }
            Ok(Some(listed))
        }
    }

    /// Closes, and returns the errors of delayed writes. The servers drop the locks of the lock
    /// owner.
    pub fn close(self) -> Result<()> {
        let mut this = self;
        this.close_once()
    }

    fn close_once(&mut self) -> Result<()> {
        let raw = std::mem::replace(&mut self.raw, null_mut());
        if raw.is_null() {
            return Ok(());
        }
        let library = self.volume.library();
        // The call for directories sends no flush, but crashes with the handle of a file.
        let close = if self.is_dir { library.glfs_closedir } else { library.glfs_close };
        // SAFETY: called once, with no operation in flight: each operation owns a reference to this
        // handle.
        check(unsafe { close(raw) }).map(drop)
    }
}

impl Drop for GfapiHandle {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        if !IN_CALLBACK.get() {
            if let Err(errno) = self.close_once() {
                log::debug!("closing a file of GlusterFS: {errno}");
            }
            return;
        }
        // A call of libgfapi from its own thread would wait for itself.
        let raw = std::mem::replace(&mut self.raw, null_mut());
        let (volume, is_dir) = (Arc::clone(&self.volume), self.is_dir);
        let _ = close_queue().send(GfapiHandle { volume, raw, is_dir });
    }
}

/// Performs an operation on an open file. A brick that was away, and is there again, knows an open
/// file only after the client has opened the file again, a moment later: until then, an operation
/// fails with `EBADFD`. It is repeated, and fails with `ENOTCONN` at the end, as while the brick is
/// away.
fn run_on_open<T>(mut once: impl FnMut() -> Result<T>) -> Result<T> {
    for pause in REOPEN_PAUSES_MS {
        match once() {
            Err(errno) if errno == NOT_OPEN_THERE => {
                std::thread::sleep(Duration::from_millis(pause));
            }
            done => return done,
        }
    }
    once().map_err(|errno| if errno == NOT_OPEN_THERE { Errno::ENOTCONN } else { errno })
}

/// Runs `run` as a callback of libgfapi: handles that it drops are closed by another thread.
pub(crate) fn as_callback(run: impl FnOnce()) {
    IN_CALLBACK.set(true);
    run();
    IN_CALLBACK.set(false);
}

/// The thread that closes handles for callbacks.
fn close_queue() -> &'static Sender<GfapiHandle> {
    static CLOSER: OnceLock<Sender<GfapiHandle>> = OnceLock::new();
    CLOSER.get_or_init(|| {
        let (send, closed) = channel::<GfapiHandle>();
        let close = move || closed.into_iter().for_each(drop);
        let started = std::thread::Builder::new().name("gluster-close".to_owned()).spawn(close);
        if let Err(error) = started {
            log::error!("open files of GlusterFS will not be closed: no thread: {error}");
        }
        send
    })
}

/// An entry of a listing.
pub struct VolumeDirEntry {
    /// The name of the entry.
    pub name: Vec<u8>,
    /// The inode number for programs.
    pub ino: u64,
    /// The position after the entry.
    pub next: u64,
    /// `d_type`.
    pub kind: u8,
    /// Identity and attributes, if the server sent them.
    pub found: Option<(Gfid, libc::stat)>,
    /// The inode of the entry.
    pub kept: Cell<Option<RetainedObject>>,
}

impl VolumeDirEntry {
    fn from_dirent(entry: &libc::dirent64) -> VolumeDirEntry {
        let name = entry.d_name.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8);
        let (name, ino, next) = (name.collect(), entry.d_ino, entry.d_off as u64);
        VolumeDirEntry { name, ino, next, kind: entry.d_type, found: None, kept: Cell::new(None) }
    }
}

/// An offset as `off_t`. Fails with `EINVAL` for more than `OFFSET_MAX`.
pub(crate) fn position(offset: u64) -> Result<i64> {
    i64::try_from(offset).map_err(|_| Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_waits_until_a_brick_knows_the_open_file_again() {
        let after = |failures: usize, errno| {
            let mut count = 0;
            let done = run_on_open(|| {
                count += 1;
                if count <= failures { Err(errno) } else { Ok(count) }
            });
            (done, count)
        };
        assert_eq!(after(3, NOT_OPEN_THERE), (Ok(4), 4));
        assert_eq!(after(99, NOT_OPEN_THERE), (Err(Errno::ENOTCONN), 5));
        assert_eq!(after(1, Errno::EIO), (Err(Errno::EIO), 1));
    }
}
