//! Files of a passthrough where the kernel has them.

use std::ffi::CString;
use std::os::fd::OwnedFd;

use defuse_direct::FileStat;
use defuse_fs::Errno;

use crate::machine::descriptors::{HeldDescriptor, take_owned};
use crate::machine::sys;
use crate::process::state::{RunMount, RunProcess};
use crate::serve::call::{CallFailure, ProgramCall};

/// The path below the mount of the file at `full`. `None` if it is in no mount of a directory.
/// `is_last_kept` if the last component may be missing, or a link that is not followed.
pub fn path(
    call: &ProgramCall<'_>,
    full: &[u8],
    is_last_kept: bool,
) -> Result<Option<Vec<u8>>, CallFailure> {
    Ok(kernel_path(call.process, &real_path(call, full, is_last_kept)?))
}

/// The special file at `full`, which has these attributes, below its mount. `None` if it is in no
/// mount of a directory. Fails with `ENXIO` if another file is there by now.
pub fn special(
    call: &ProgramCall<'_>,
    full: &[u8],
    file: &FileStat,
    is_last_kept: bool,
) -> Result<Option<HeldDescriptor>, CallFailure> {
    let Some(path) = path(call, full, is_last_kept)? else { return Ok(None) };
    let fd = handle(&path, libc::O_NOFOLLOW)?;
    let there = stat(&fd)?;
    // The upper bits tell the file systems below a mount apart.
    let is_same_number = (there.st_ino ^ file.attr.st_ino) << 16 == 0;
    let is_it = there.st_mode & libc::S_IFMT == file.attr.kind.mode_bits()
        && there.st_rdev == file.attr.rdev
        && is_same_number;
    if is_it {
        Ok(Some(HeldDescriptor::new(&fd, call.process.floor)?))
    } else {
        Err(Errno::ENXIO.into())
    }
}

/// Opens the directory at `path`, by `O_PATH`.
pub fn directory(call: &ProgramCall<'_>, path: &[u8]) -> Result<HeldDescriptor, Errno> {
    HeldDescriptor::new(&handle(path, libc::O_DIRECTORY)?, call.process.floor)
}

fn handle(path: &[u8], flags: i32) -> Result<OwnedFd, Errno> {
    let path = CString::new(path).map_err(|_| Errno::ENOENT)?;
    let flags = (libc::O_PATH | libc::O_CLOEXEC | flags) as u64;
    let args = [libc::AT_FDCWD as u64, path.as_ptr() as u64, flags, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_openat as u64, &args)).map(|fd| take_owned(fd as i32))
}

fn stat(fd: &OwnedFd) -> Result<libc::stat, Errno> {
    let mut stat: libc::stat = sys::zeroed();
    let fd = std::os::fd::AsRawFd::as_raw_fd(fd) as u64;
    let args = [fd, &raw mut stat as u64, 0, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_fstat as u64, &args)).map(|_| stat)
}

/// The path of `full` without links, but for the last component if that is to be kept.
fn real_path(
    call: &ProgramCall<'_>,
    full: &[u8],
    is_last_kept: bool,
) -> Result<Vec<u8>, CallFailure> {
    let whole = |path: &[u8]| Ok(call.client().real_path(call.task(), path)?);
    if !is_last_kept {
        return whole(full);
    }
    let cut = full.iter().rposition(|&byte| byte == b'/').ok_or(Errno::ENOENT)?;
    let mut path = whole(&full[..=cut])?;
    if !path.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend_from_slice(&full[cut + 1..]);
    Ok(path)
}

/// The kernel's path for `path`, which lies in a mount and has no links in it.
fn kernel_path(process: &RunProcess, path: &[u8]) -> Option<Vec<u8>> {
    let rest = |mounted: &RunMount| {
        let target = mounted.mount.target();
        let rest = path.strip_prefix(&*target)?;
        matches!(rest.first(), None | Some(b'/')).then(|| (target.len(), rest.to_vec()))
    };
    let mounts = process.mounts.iter().zip(&process.plan.mounts);
    let found = mounts.filter_map(|(mounted, plan)| Some((rest(mounted)?, plan)));
    let ((_, rest), plan) = found.max_by_key(|((len, _), _)| *len)?;
    let directory = crate::process::compose::directory(plan)?;
    Some([directory, rest].concat())
}
