//! Nodes in the kernel's name space for the fifos, devices and sockets of mounts that are no
//! directories of the kernel.
//!
//! All processes of a run that have the same user find a node under the same name, in a directory
//! of that user. Every user may create files beside that directory. Its name therefore has 128
//! random bits, and each process checks the directory that it has opened: it must belong to this
//! user, and no other user may have access. Nodes are opened relative to that descriptor, without
//! following links.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use defuse_direct::FileStat;
use defuse_fs::Errno;
use defuse_preload_plan::layout;

use crate::machine::descriptors::{HeldDescriptor, take_owned};
use crate::machine::message::write_line;
use crate::machine::sys;
use crate::serve::call::ProgramCall;

/// The directory of the nodes of this thread's user.
pub struct NodeDirectory(HeldDescriptor);

impl NodeDirectory {
    /// Opens the directory, and creates it if it is missing. Fails with `EACCES`, and prints a
    /// message, if another user has created something there, and with the errors of mkdir(2) and
    /// open(2).
    pub fn open(call: &ProgramCall<'_>) -> Result<NodeDirectory, Errno> {
        let uid = call.task().credentials().uid;
        let name = layout::node_directory(call.process.plan.token, uid);
        let path = format!("{}/{name}", layout::NODES_IN);
        let text = CString::new(path.as_str()).unwrap_or_default();
        match sys::plain(libc::SYS_mkdir, text.as_ptr() as u64, 0o700, 0) {
            Ok(_) => call.process.shared.nodes().store(1, Ordering::Relaxed),
            Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let fd = open_at(libc::AT_FDCWD, &text, flags);
        let stat = fd.as_ref().map_err(|errno| *errno).and_then(stat);
        let is_ours = stat.is_ok_and(|stat| stat.st_uid == uid && stat.st_mode & 0o077 == 0);
        match (fd, is_ours) {
            (Ok(fd), true) => HeldDescriptor::new(&fd, call.process.floor).map(NodeDirectory),
            _ => {
                write_line(&format!(
                    "{path} is not a directory of user {uid} alone: another program of this run has \
                     put it there, and fifos, devices and sockets of mounts cannot be opened"
                ));
                Err(Errno::EACCES)
            }
        }
    }

    /// The path of the node for the file with these attributes, through the open directory, which
    /// only this user can change.
    pub fn path(&self, stat: &FileStat) -> CString {
        let path = [self.0.path().as_bytes(), b"/", name(stat).as_bytes()].concat();
        CString::new(path).unwrap_or_default()
    }

    /// Removes the node for the file with these attributes.
    pub fn remove(&self, stat: &FileStat) {
        let name = name(stat);
        let _ = sys::plain(libc::SYS_unlinkat, self.0.as_raw_fd() as u64, name.as_ptr() as u64, 0);
    }

    /// Creates the node for a fifo or device if it is missing.
    pub fn make(&self, stat: &FileStat) -> Result<(), Errno> {
        let (name, mode) = (name(stat), stat.attr.kind.mode_bits() | 0o600);
        let args =
            [self.0.as_raw_fd() as u64, name.as_ptr() as u64, mode.into(), stat.attr.rdev, 0, 0];
        match sys::check(sys::pass(libc::SYS_mknodat as u64, &args)) {
            Ok(_) | Err(Errno::EEXIST) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Opens the node for the file with these attributes by `O_PATH`, and checks it. The kernel
    /// then opens or connects to this node by [`HeldDescriptor::path`]. Fails with `ENOENT` if it
    /// does not exist, and with `ENXIO` if it has another type or owner.
    pub fn node(&self, call: &ProgramCall<'_>, file: &FileStat) -> Result<HeldDescriptor, Errno> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let fd = open_at(self.0.as_raw_fd(), &name(file), flags)?;
        let stat = stat(&fd)?;
        let is_it = stat.st_mode & libc::S_IFMT == file.attr.kind.mode_bits()
            && stat.st_rdev == file.attr.rdev
            && stat.st_uid == call.task().credentials().uid;
        if is_it { HeldDescriptor::new(&fd, call.process.floor) } else { Err(Errno::ENXIO) }
    }
}

/// The node for a fifo or device of a mount, which the first open creates.
pub fn node(call: &ProgramCall<'_>, stat: &FileStat) -> Result<HeldDescriptor, Errno> {
    let directory = NodeDirectory::open(call)?;
    directory.make(stat)?;
    directory.node(call, stat)
}

fn name(stat: &FileStat) -> CString {
    let name = format!("{:x}-{:x}-{:x}", stat.dev, stat.attr.st_ino, stat.attr.rdev);
    CString::new(name).unwrap_or_default()
}

fn open_at(dir: i32, path: &CString, flags: i32) -> Result<OwnedFd, Errno> {
    let args = [dir as u64, path.as_ptr() as u64, flags as u64, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_openat as u64, &args)).map(|fd| take_owned(fd as i32))
}

fn stat(fd: &OwnedFd) -> Result<libc::stat, Errno> {
    let mut stat: libc::stat = sys::zeroed();
    let args = [fd.as_raw_fd() as u64, &raw mut stat as u64, 0, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_fstat as u64, &args)).map(|_| stat)
}
