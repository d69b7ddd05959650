//! Sockets with a name in a mount: the name is the file system's, and what listens there the
//! kernel's, in the run's directory of nodes.

use std::ffi::CString;

use defuse_direct::{Access, At, Stat};
use defuse_fs::{Errno, FileKind};

use crate::machine::sys;
use crate::serve::call::{Call, Fail, Served, waiting_inside};
use crate::serve::nodes::Directory;

const FAMILY: [u8; 2] = (libc::AF_UNIX as u16).to_ne_bytes();
/// The path in `struct sockaddr_un`.
const PATH_MAX: usize = 108;

/// The path in the address of a call; `None` for another family, and for names without one.
fn path<'a>(call: &Call<'a>) -> Option<&'a [u8]> {
    let len = usize::try_from(call.args[2]).ok().filter(|len| *len <= 2 + PATH_MAX)?;
    let path = sys::bytes(call.args[1], len).ok()?.strip_prefix(&FAMILY)?;
    let path = path.split(|&byte| byte == 0).next()?;
    (!path.is_empty()).then_some(path)
}

/// The attributes of the socket at `path`.
fn socket(call: &Call<'_>, path: &[u8]) -> Result<Stat, Errno> {
    let stat = call.client().stat(call.task(), At::Cwd, path, true);
    let stat = stat.map_err(|_| Errno::ENOENT)?;
    match stat.attr.kind {
        FileKind::Socket => Ok(stat),
        _ => Err(Errno::from_raw(libc::ECONNREFUSED)),
    }
}

/// Makes the call with `path`, which is the kernel's, in place of the address.
fn with_path(call: &Call<'_>, path: &CString) -> Result<i64, Fail> {
    let mut address = FAMILY.to_vec();
    address.extend_from_slice(path.as_bytes_with_nul());
    if address.len() > 2 + PATH_MAX {
        return Err(Errno::ENAMETOOLONG.into());
    }
    let mut args = *call.args;
    (args[1], args[2]) = (address.as_ptr() as u64, address.len() as u64);
    // connect(2) waits for a server whose queue is full.
    waiting_inside(call.number, &args)
}

pub fn bind(call: &Call<'_>) -> Served {
    let Some(path) = path(call) else { return Err(Fail::Pass) };
    let (client, task) = (call.client(), call.task());
    let mode = FileKind::Socket.mode_bits() | 0o777;
    match client.mknod(task, At::Cwd, path, mode, 0) {
        Ok(()) => {}
        Err(defuse_direct::Stop::Errno(Errno::EEXIST)) => {
            return Err(Errno::from_raw(libc::EADDRINUSE).into());
        }
        Err(defuse_direct::Stop::Errno(errno)) => return Err(errno.into()),
        Err(defuse_direct::Stop::Outside(_)) => return Err(Fail::Pass),
    }
    let bind = || -> Result<i64, Fail> {
        let (stat, directory) = (socket(call, path)?, Directory::open(call)?);
        // The inode may have had the number of a socket that is gone.
        directory.remove(&stat);
        with_path(call, &directory.path(&stat))
    };
    let bound = bind();
    if bound.is_err() {
        let _ = client.unlink(task, At::Cwd, path);
    }
    bound
}

pub fn connect(call: &Call<'_>) -> Served {
    let Some(path) = path(call) else { return Err(Fail::Pass) };
    let connect = || -> Result<i64, Fail> {
        let node = Directory::open(call)?.node(call, &socket(call, path)?)?;
        with_path(call, &node.path())
    };
    match call.client().access(call.task(), At::Cwd, path, Access::WRITE, (true, true)) {
        Ok(()) => connect().map_err(|fail| match fail {
            // Nobody has bound it in this run.
            Fail::Errno(Errno::ENOENT) => Errno::from_raw(libc::ECONNREFUSED).into(),
            fail => fail,
        }),
        Err(defuse_direct::Stop::Errno(errno)) => Err(errno.into()),
        Err(defuse_direct::Stop::Outside(_)) => Err(Fail::Pass),
    }
}
