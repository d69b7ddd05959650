//! Descriptors of this library. Their numbers lie above the program's descriptors.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use defuse_fs::Errno;

use crate::machine::sys;

/// A duplicate of `fd` among our own numbers, closed at exec or not.
pub fn keep_above(fd: i32, floor: i32, cloexec: bool) -> Result<i32, Errno> {
    let how = if cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    Ok(sys::plain(libc::SYS_fcntl, fd as u64, how as u64, floor as u64)? as i32)
}

/// Closes one of our own descriptors.
pub fn close(fd: i32) {
    let _ = sys::plain(libc::SYS_close, fd as u64, 0, 0);
}

/// A memfd. `EMFILE`.
pub fn memory(name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = u64::from(libc::MFD_CLOEXEC);
    let fd = sys::plain(libc::SYS_memfd_create, name.as_ptr() as u64, flags, 0)?;
    Ok(take_owned(fd as i32))
}

/// A memfd that can be executed, also where the system makes no other one executable
/// (`vm.memfd_noexec`, Linux 6.3). `EACCES` if it makes none executable.
pub fn executable_memory(name: &CStr) -> Result<OwnedFd, Errno> {
    const EXECUTABLE: u64 = 0x10;
    let flags = u64::from(libc::MFD_CLOEXEC) | EXECUTABLE;
    match sys::plain(libc::SYS_memfd_create, name.as_ptr() as u64, flags, 0) {
        // An older kernel, which makes all of them executable.
        Err(Errno::EINVAL) => memory(name),
        made => Ok(take_owned(made? as i32)),
    }
}

/// An owned descriptor. No other code closes it.
pub fn take_owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel returned the number just now, and no other value owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A descriptor of ours that a call of the kernel needs to the end of that call.
///
/// It is closed by a system call of our own: close(3) of the C library would be served, and
/// refused.
#[derive(Debug)]
pub struct HeldDescriptor(i32);

impl HeldDescriptor {
    /// A duplicate of `fd` among our own numbers, from `floor` on. `EMFILE`.
    pub fn new(fd: &OwnedFd, floor: i32) -> Result<HeldDescriptor, Errno> {
        keep_above(fd.as_raw_fd(), floor, true).map(HeldDescriptor)
    }

    /// The path by which the kernel finds what the descriptor has open.
    pub fn path(&self) -> CString {
        CString::new(format!("/proc/self/fd/{}", self.0)).unwrap_or_default()
    }
}

impl AsRawFd for HeldDescriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

impl Drop for HeldDescriptor {
    fn drop(&mut self) {
        close(self.0);
    }
}
