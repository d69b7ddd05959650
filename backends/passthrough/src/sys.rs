//! System calls that rustix lacks. This is the only module with unsafe code, and it makes no
//! decisions.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use defuse_fs::{Errno, Result};

use crate::handle::{CompactHandle, MAX_HANDLE_BYTES};
use crate::proc_path::ProcPath;

/// `struct file_handle` with room for the largest handle, name_to_handle_at(2).
#[repr(C)]
struct RawHandle {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; MAX_HANDLE_BYTES],
}

fn check(result: libc::c_long) -> Result<libc::c_long> {
    if result < 0 { Err(last_errno()) } else { Ok(result) }
}

fn last_errno() -> Errno {
    std::io::Error::last_os_error().into()
}

fn take_descriptor(result: libc::c_long) -> Result<OwnedFd> {
    let fd = check(result)? as libc::c_int;
    // SAFETY: the system call that gave `fd` succeeded just now and nothing else knows the number,
    // so this is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Blocks all signals on the calling thread, which belongs to this crate: the handlers of the
/// process expect its own threads.
pub(crate) fn take_no_signals() {
    // SAFETY: all bytes of `sigset_t` may be zero; sigfillset writes the whole set, and the mask
    // that is changed is this thread's own.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}

/// True if new files in `dir` inherit an ACL from it. Uses getxattrat(2), or /proc before Linux
/// 6.13.
pub(crate) fn has_default_list(dir: BorrowedFd<'_>) -> bool {
    const GETXATTRAT: libc::c_long = 464;
    const NAME: &CStr = c"system.posix_acl_default";
    // `struct xattr_args`: address and size of the value, both 0 to query the size, and flags.
    let args = [0u64; 2];
    // SAFETY: the kernel reads two strings and a structure of 16 bytes, and writes nothing.
    let result = check(unsafe {
        let (path, name) = (c".".as_ptr(), NAME.as_ptr());
        libc::syscall(GETXATTRAT, dir.as_raw_fd(), path, 0, name, args.as_ptr(), size_of_val(&args))
    });
    match result {
        Err(Errno::ENOSYS) => {
            rustix::fs::getxattr_query(ProcPath::new(dir).as_c_str(), NAME).is_ok_and(|len| len > 0)
        }
        other => other.is_ok_and(|len| len > 0),
    }
}

/// Runs `make` with the umask 0, while the umask of the process stays unchanged. It runs on a
/// thread with its own file-system context (no `CLONE_FS`), for which this one waits
/// (`CLONE_VFORK`). Returns `None` if the thread cannot be created.
///
/// Like a child of vfork(2), the thread shares credentials, descriptors and variables with this
/// one, so that locks and forks of the process see one thread. `make` must not panic.
pub(crate) fn with_umask_zero<T>(make: impl FnOnce() -> T) -> Option<T> {
    const STACK: usize = 64 << 10;
    const FLAGS: libc::c_int = libc::CLONE_VM
        | libc::CLONE_VFORK
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM;
    struct ThreadWork<M, T>(Option<M>, Option<T>);
    extern "C" fn run<M: FnOnce() -> T, T>(work: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the address belongs to `work` below, which no other thread uses meanwhile.
        let work = unsafe { &mut *work.cast::<ThreadWork<M, T>>() };
        rustix::process::umask(rustix::fs::Mode::empty());
        work.1 = work.0.take().map(|make| make());
        // Not through the C library, whose instruction may be patched: the code that handles it
        // uses one stack per thread, on which the waiting thread already is.
        #[cfg(target_arch = "x86_64")]
        // SAFETY: exit(2) of this thread alone, whose stack and variables belong to others.
        unsafe {
            std::arch::asm!("syscall", in("rax") libc::SYS_exit, in("rdi") 0, options(noreturn, nostack))
        }
        #[cfg(not(target_arch = "x86_64"))]
        0
    }
    fn entry<M: FnOnce() -> T, T>(
        _: &ThreadWork<M, T>,
    ) -> extern "C" fn(*mut libc::c_void) -> libc::c_int {
        run::<M, T>
    }
    let mut work = ThreadWork(Some(make), None);
    let mut stack = vec![0u128; STACK / size_of::<u128>()];
    let top = stack.as_mut_ptr_range().end;
    let start = entry(&work);
    // SAFETY: sigset_t may be all zeros, and sigfillset writes the whole set; no handler may run on
    // the thread, which shares the variables of this one. The stack and `work` live until clone
    // returns, and by `CLONE_VFORK` the thread has ended then; it allocates nothing and takes no
    // lock.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
        libc::clone(start, top.cast(), FLAGS, (&raw mut work).cast());
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
    work.1
}

/// The handle of `name` in `dir`, or of `dir` itself for an empty name. Never follows a link.
pub(crate) fn name_to_handle(dir: BorrowedFd<'_>, name: &CStr) -> Result<CompactHandle> {
    let mut raw = RawHandle {
        handle_bytes: MAX_HANDLE_BYTES as u32,
        handle_type: 0,
        f_handle: [0; MAX_HANDLE_BYTES],
    };
    let mut mount_id: libc::c_int = 0;
    let flags = if name.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: `raw` is laid out as struct file_handle and states its room, and the kernel writes no
    // further. `name` ends with a NUL and `dir` is open during the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            dir.as_raw_fd(),
            name.as_ptr(),
            &raw mut raw,
            &raw mut mount_id,
            flags,
        )
    })?;
    let bytes = raw.f_handle.get(..raw.handle_bytes as usize).ok_or(Errno::EIO)?;
    Ok(CompactHandle::new(raw.handle_type, bytes))
}

/// Opens the inode of `handle` in the file system of `mount`. Fails with `ESTALE` if it is gone.
///
/// While the kernel creates a new inode with the number in the handle, ext4 fails with `ENOMEM`:
/// `iget_locked()` finds an incomplete inode (`I_CREATING`) and returns nothing, as if memory were
/// short. Shortly after that the number belongs to the successor (`ESTALE`).
pub(crate) fn open_by_handle(
    mount: BorrowedFd<'_>,
    handle: &CompactHandle,
    flags: u32,
) -> Result<OwnedFd> {
    /// In milliseconds. The kernel may wait for its journal meanwhile. If memory is really short,
    /// this wastes a second.
    const PAUSES: [u64; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
    for pause in PAUSES {
        match open_by_handle_once(mount, handle, flags) {
            Err(Errno::ENOMEM) => std::thread::sleep(std::time::Duration::from_millis(pause)),
            other => return other,
        }
    }
    open_by_handle_once(mount, handle, flags)
}

fn open_by_handle_once(
    mount: BorrowedFd<'_>,
    handle: &CompactHandle,
    flags: u32,
) -> Result<OwnedFd> {
    let bytes = handle.bytes();
    let mut raw = RawHandle {
        handle_bytes: bytes.len() as u32,
        handle_type: handle.kind(),
        f_handle: [0; MAX_HANDLE_BYTES],
    };
    raw.f_handle[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: `raw` is laid out as struct file_handle, its length is within its array, and the
    // kernel only reads it; `mount` is open during the call.
    take_descriptor(unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_raw_fd(),
            &raw mut raw,
            flags as libc::c_int | libc::O_CLOEXEC,
        )
    })
}

/// Sets the file-system user of this thread and returns the previous one. The kernel ignores a
/// change that is not permitted, setfsuid(2).
pub(crate) fn setfsuid(uid: u32) -> u32 {
    // SAFETY: takes a number and touches no memory. The raw call changes only the calling thread.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) as u32 }
}

/// Sets the file-system group of this thread; see [`setfsuid`].
pub(crate) fn setfsgid(gid: u32) -> u32 {
    // SAFETY: as for setfsuid.
    unsafe { libc::syscall(libc::SYS_setfsgid, gid) as u32 }
}

/// Gives this thread its own umask and working directory, unshare(2).
pub(crate) fn unshare_fs() -> Result<()> {
    // SAFETY: CLONE_FS only separates the root, the working directory and the umask of this thread
    // from the other threads; no memory or descriptor is affected.
    check(unsafe { libc::syscall(libc::SYS_unshare, libc::CLONE_FS) }).map(drop)
}

/// Fills `buf` with `struct linux_dirent64` records, getdents64(2). Returns their length in bytes,
/// 0 at the end.
pub(crate) fn getdents(fd: BorrowedFd<'_>, buf: &mut [u8]) -> Result<usize> {
    // SAFETY: the kernel writes at most `buf.len()` bytes into `buf`, which is borrowed
    // exclusively.
    let len = check(unsafe {
        libc::syscall(libc::SYS_getdents64, fd.as_raw_fd(), buf.as_mut_ptr(), buf.len())
    })?;
    Ok(len as usize)
}

/// Sets the permission bits of the file of `fd` (also `O_PATH`), fchmodat2(2) of Linux 6.6. Fails
/// with `ENOSYS` on older kernels.
pub(crate) fn fchmod_path(fd: BorrowedFd<'_>, perm: u32) -> Result<()> {
    const SYS_FCHMODAT2: libc::c_long = 452;
    // SAFETY: the path is an empty literal with a NUL; the rest are numbers.
    check(unsafe {
        libc::syscall(SYS_FCHMODAT2, fd.as_raw_fd(), c"".as_ptr(), perm, libc::AT_EMPTY_PATH)
    })
    .map(drop)
}

/// Sets the attribute for access times of the mounts of `tree`, mount_setattr(2) of Linux 5.12.
pub(crate) fn set_access_times(tree: &OwnedFd, attribute: u64) -> Result<()> {
    const AT_RECURSIVE: libc::c_int = 0x8000;
    // struct mount_attr of linux/mount.h: attr_set, attr_clr (MOUNT_ATTR__ATIME),
    // propagation, userns_fd.
    let attr: [u64; 4] = [attribute, 0x70, 0, 0];
    // SAFETY: the path is an empty literal with a NUL, and the kernel only reads `attr`, whose
    // length is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | AT_RECURSIVE,
            attr.as_ptr(),
            size_of_val(&attr),
        )
    })
    .map(drop)
}

/// Sets the size of the file at `path`, truncate(2).
pub(crate) fn truncate(path: &CStr, len: u64) -> Result<()> {
    let len = libc::off64_t::try_from(len).map_err(|_| Errno::EFBIG)?;
    // SAFETY: `path` ends with a NUL.
    check(libc::c_long::from(unsafe { libc::truncate64(path.as_ptr(), len) })).map(drop)
}

/// Calls ioctl(2) with a pointer to `data`, which the kernel reads, writes, or both.
///
/// `data` must be at least as long as the driver transfers for `cmd`. All callers pass requests of
/// fixed size from the table in `control.rs`, where that size is checked.
pub(crate) fn ioctl(fd: BorrowedFd<'_>, cmd: u32, data: &mut [u8; IOCTL_BYTES]) -> Result<i32> {
    // SAFETY: the permitted requests (control.rs) transfer at most 28 bytes, and `data` holds
    // IOCTL_BYTES.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), cmd as libc::Ioctl, data.as_mut_ptr()) };
    check(libc::c_long::from(result)).map(|result| result as i32)
}

/// Room for the argument of [`ioctl`] in bytes. The largest, `struct fsxattr`, has 28.
pub(crate) const IOCTL_BYTES: usize = 64;

/// Closes `fd` and returns the error of close(2), which a drop ignores.
pub(crate) fn close(fd: OwnedFd) -> Result<()> {
    // SAFETY: `into_raw_fd` gives up the ownership, so this is the only close of the number.
    check(libc::c_long::from(unsafe { libc::close(fd.into_raw_fd()) })).map(drop)
}

/// A lock as in `struct flock`: type, first byte, length (0 to the end) and process.
pub(crate) struct FoundLock {
    pub(crate) typ: i32,
    pub(crate) start: i64,
    pub(crate) len: i64,
    pub(crate) pid: i32,
}

/// Calls fcntl(2) `F_OFD_*` for a lock of the open file description: type, first byte and length.
/// Returns the values that the kernel left in the structure.
pub(crate) fn ofd_lock(fd: BorrowedFd<'_>, cmd: i32, lock: (i32, i64, i64)) -> Result<FoundLock> {
    let (typ, start, len) = lock;
    let mut raw = libc::flock64 {
        l_type: typ as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: `raw` is a struct flock64, as these commands require. The kernel reads it and, for
    // F_OFD_GETLK, writes it; it outlives the call.
    check(libc::c_long::from(unsafe { libc::fcntl(fd.as_raw_fd(), cmd, &raw mut raw) }))?;
    Ok(FoundLock { typ: raw.l_type.into(), start: raw.l_start, len: raw.l_len, pid: raw.l_pid })
}
