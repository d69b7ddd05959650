//! What one program hands to the next, and what is left when one ends.
//!
//! The state of the program is text (see [`crate::inherit`] and [`crate::letter`]).

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use defuse_direct::{Description, Stat};
use defuse_fs::Errno;
use defuse_preload_plan::{VARIABLE, layout};

use crate::inherit::Estate;
use crate::process::Process;
use crate::serve::{Call, Fail};
use crate::sys;

/// A memfd. `EMFILE`.
pub fn memory(name: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = u64::from(libc::MFD_CLOEXEC);
    let fd = sys::plain(libc::SYS_memfd_create, name.as_ptr() as u64, flags, 0)?;
    Ok(owned(fd as i32))
}

/// A descriptor that is nobody else's.
#[allow(unsafe_code)]
pub fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel gave the number just now, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A copy of a file in memory that can be executed or loaded.
pub fn copy_to_memory(call: &Call<'_>, file: &Description) -> Result<OwnedFd, Fail> {
    let fd = memory(c"defuse")?;
    let mut out = File::from(fd);
    let mut piece = vec![0; 256 << 10];
    let mut at = 0;
    loop {
        let len = call.client().pread(call.task(), file, &mut piece, at)?;
        if len == 0 {
            break;
        }
        out.write_all(&piece[..len]).map_err(Errno::from)?;
        at += len as u64;
    }
    Ok(out.into())
}

/// What is handed over at an execve(2) that is under way. Dropped where it failed.
pub struct Outgoing {
    /// What the text names, which goes with it.
    _estate: Estate,
    state: OwnedFd,
    variable: CString,
    preload: Vec<u8>,
}

impl Outgoing {
    /// Writes down what the next program gets.
    pub fn new(call: &Call<'_>) -> Result<Self, Fail> {
        let process = call.process;
        let (estate, text) = Estate::of(call);
        let state = crate::letter::write(&text, process.floor)?;
        let (memory, plan, floor) = (process.memory_fd, process.plan_fd, process.floor);
        let variable = format!("{VARIABLE}={memory}:{plan}:{}:{floor}", state.as_raw_fd());
        let variable = CString::new(variable).unwrap_or_default();
        let preload = process.plan.library.clone();
        Ok(Outgoing { _estate: estate, state, variable, preload })
    }

    /// The environment with what leads to us.
    pub fn environment(&self, strings: Vec<&[u8]>) -> Vec<CString> {
        let own = format!("{VARIABLE}=");
        let mut preload = b"LD_PRELOAD=".to_vec();
        preload.extend_from_slice(&self.preload);
        let mut all = Vec::with_capacity(strings.len() + 2);
        for text in strings {
            if let Some(others) = text.strip_prefix(b"LD_PRELOAD=") {
                for other in others.split(|byte| b": ".contains(byte)) {
                    if !other.is_empty() && *other != *self.preload {
                        preload.push(b':');
                        preload.extend_from_slice(other);
                    }
                }
            } else if !text.starts_with(own.as_bytes()) {
                all.push(CString::new(text).unwrap_or_default());
            }
        }
        all.push(CString::new(preload).unwrap_or_default());
        all.push(self.variable.clone());
        let _ = &self.state;
        all
    }
}

/// The end of this process: its mappings are written back, and its open files given back.
pub fn leave(call: &Call<'_>) {
    crate::mappings::write_back_all(call);
    let view = call.process.view();
    for (fd, _) in view.table.all() {
        if let Some(entry) = view.table.remove(fd)
            && !entry.backed
        {
            let _ = entry.file().close(call.task());
        }
    }
    crate::holders::leave(&call.process.shared);
}

/// Where the kernel has what a fifo, device or socket of a mount stands for: all processes of the run
/// find it under the same name.
pub fn node_path(process: &Process, stat: &Stat) -> Option<CString> {
    let uid = sys::plain(libc::SYS_getuid, 0, 0, 0).ok()? as u32;
    let directory = layout::node_directory(uid, process.shared.id());
    let path = format!("{directory}/{:x}-{:x}-{:x}", stat.dev, stat.attr.st_ino, stat.attr.rdev);
    let directory = CString::new(directory).ok()?;
    let _ = sys::plain(libc::SYS_mkdir, directory.as_ptr() as u64, 0o700, 0);
    CString::new(path).ok()
}

/// A node of the kernel for a fifo or device of a mount, made at the first open.
pub fn node(process: &Process, stat: &Stat) -> Option<CString> {
    let path = node_path(process, stat)?;
    let mode = stat.attr.kind.mode_bits() | 0o600;
    let (path_at, rdev) = (path.as_ptr() as u64, stat.attr.rdev);
    match sys::plain(libc::SYS_mknod, path_at, u64::from(mode), rdev) {
        Ok(_) | Err(Errno::EEXIST) => Some(path),
        Err(_) => None,
    }
}
