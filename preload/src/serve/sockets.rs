//! Sockets with a name in a mount. Sockets in a directory of the kernel are there. For others, the
//! name is the file system's, and the socket that listens is the kernel's, in the run's directory
//! of nodes.

use defuse_direct::{FileStat, NeededAccess, WalkStart};
use defuse_fs::{Errno, FileKind};

use crate::machine::descriptors::HeldDescriptor;
use crate::machine::sys;
use crate::serve::call::{CallFailure, CallResult, ProgramCall, call_waiting_inside};
use crate::serve::nodes::NodeDirectory;
use crate::serve::path::{PathOrigin, PathTarget};
use crate::serve::{lower_files, open};

const FAMILY: [u8; 2] = (libc::AF_UNIX as u16).to_ne_bytes();
/// The path in `struct sockaddr_un`.
const PATH_MAX: usize = 108;

/// The path in the address of a call; `None` for another family, and for names without one.
fn path<'a>(call: &ProgramCall<'a>) -> Option<&'a [u8]> {
    let len = usize::try_from(call.args[2]).ok().filter(|len| *len <= 2 + PATH_MAX)?;
    let path = sys::bytes(call.args[1], len).ok()?.strip_prefix(&FAMILY)?;
    let path = path.split(|&byte| byte == 0).next()?;
    (!path.is_empty()).then_some(path)
}

/// The attributes of the socket at `path`.
fn socket(call: &ProgramCall<'_>, path: &[u8]) -> Result<FileStat, Errno> {
    let stat = call.client().stat(call.task(), WalkStart::Cwd, path, true);
    let stat = stat.map_err(|_| Errno::ENOENT)?;
    match stat.attr.kind {
        FileKind::Socket => Ok(stat),
        _ => Err(Errno::from_raw(libc::ECONNREFUSED)),
    }
}

/// The absolute path of `path`.
fn full(call: &ProgramCall<'_>, path: &[u8]) -> Vec<u8> {
    if path.starts_with(b"/") {
        return path.to_vec();
    }
    open::full_path(call, &PathTarget { start: PathOrigin::Cwd, path, magic: false })
}

/// Makes the call with `path`, which is the kernel's, in place of the address.
fn with_path(call: &ProgramCall<'_>, path: &[u8]) -> Result<i64, CallFailure> {
    let address = [&FAMILY[..], path, b"\0"].concat();
    if address.len() > 2 + PATH_MAX {
        return Err(Errno::ENAMETOOLONG.into());
    }
    let mut args = *call.args;
    (args[1], args[2]) = (address.as_ptr() as u64, address.len() as u64);
    // connect(2) waits for a server whose queue is full.
    call_waiting_inside(call.number, &args)
}

/// Binds the name in a directory of the kernel; `None` if it is in none.
fn bind_below(call: &ProgramCall<'_>, path: &[u8]) -> Result<Option<i64>, CallFailure> {
    let Some(below) = lower_files::path(call, &full(call, path), true)? else { return Ok(None) };
    if below.len() < PATH_MAX {
        return with_path(call, &below).map(Some);
    }
    let cut = below.iter().rposition(|&byte| byte == b'/').ok_or(Errno::ENOENT)?;
    let directory: HeldDescriptor = lower_files::directory(call, &below[..=cut])?;
    let short = [directory.path().as_bytes(), &below[cut..]].concat();
    with_path(call, &short).map(Some)
}

/// The mode of a new socket: the mode of its descriptor, without the bits of the umask, also below
/// a default ACL.
fn mode(call: &ProgramCall<'_>) -> u32 {
    let mut stat: libc::stat = sys::zeroed();
    let args = [call.args[0], &raw mut stat as u64, 0, 0, 0, 0];
    let known = sys::check(sys::pass(libc::SYS_fstat as u64, &args)).is_ok();
    let own = if known { stat.st_mode & 0o7777 } else { 0o777 };
    FileKind::Socket.mode_bits() | own & !call.task().umask()
}

pub fn bind(call: &ProgramCall<'_>) -> CallResult {
    let Some(path) = path(call) else { return Err(CallFailure::Pass) };
    match bind_below(call, path) {
        Ok(None) => {}
        Ok(Some(value)) => return Ok(value),
        Err(CallFailure::Outside(_)) => return Err(CallFailure::Pass),
        Err(fail) => return Err(fail),
    }
    let (client, task) = (call.client(), call.task());
    match client.mknod(task, WalkStart::Cwd, path, mode(call), 0) {
        Ok(()) => {}
        Err(defuse_direct::CallError::Errno(Errno::EEXIST)) => {
            return Err(Errno::from_raw(libc::EADDRINUSE).into());
        }
        Err(defuse_direct::CallError::Errno(errno)) => return Err(errno.into()),
        Err(defuse_direct::CallError::Outside(_)) => return Err(CallFailure::Pass),
    }
    let bind = || -> Result<i64, CallFailure> {
        let (stat, directory) = (socket(call, path)?, NodeDirectory::open(call)?);
        // The inode may have had the number of a socket that is gone.
        directory.remove(&stat);
        with_path(call, directory.path(&stat).as_bytes())
    };
    let bound = bind();
    if bound.is_err() {
        let _ = client.unlink(task, WalkStart::Cwd, path);
    }
    bound
}

pub fn connect(call: &ProgramCall<'_>) -> CallResult {
    let Some(path) = path(call) else { return Err(CallFailure::Pass) };
    let connect = || -> Result<i64, CallFailure> {
        let stat = socket(call, path)?;
        if let Some(held) = lower_files::special(call, &full(call, path), &stat, false)? {
            return with_path(call, held.path().as_bytes());
        }
        let node = NodeDirectory::open(call)?.node(call, &stat)?;
        with_path(call, node.path().as_bytes())
    };
    match call.client().access(call.task(), WalkStart::Cwd, path, NeededAccess::WRITE, (true, true))
    {
        Ok(()) => connect().map_err(|fail| match fail {
            // No process has bound it in this run.
            CallFailure::Errno(Errno::ENOENT) => Errno::from_raw(libc::ECONNREFUSED).into(),
            fail => fail,
        }),
        Err(defuse_direct::CallError::Errno(errno)) => Err(errno.into()),
        Err(defuse_direct::CallError::Outside(_)) => Err(CallFailure::Pass),
    }
}
