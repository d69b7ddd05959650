//! Extended attributes: twelve calls that differ in how they name the inode.

use std::sync::Arc;

use defuse_fs::{Errno, SetXattrFlags, Xattr};

use crate::machine::sys;
use crate::process::table::DescriptorEntry;
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::path::{PathOrigin, PathTarget};

/// All of them: set, get, list and remove, each by path, by link and by descriptor.
pub fn serve_xattr_call(call: &ProgramCall<'_>) -> CallResult {
    let place = call.number as i64 - libc::SYS_setxattr;
    let (what, how) = (place / 3, place % 3);
    let place = match how {
        2 => match call.entry(0).ok_or(CallFailure::Pass)? {
            entry if entry.is_inode() => {
                let start = PathOrigin::Entry(entry);
                XattrSubject::Path(PathTarget { start, path: b"", magic: false }, true)
            }
            entry => XattrSubject::Descriptor(entry),
        },
        _ => XattrSubject::Path(call.target(None, 0, false)?, how == 0),
    };
    match what {
        0 => set(call, &place),
        1 => get(call, &place),
        2 => list(call, &place),
        _ => remove(call, &place),
    }
}

/// The file that has the attributes.
enum XattrSubject<'a> {
    /// Of an open file.
    Descriptor(Arc<DescriptorEntry>),
    /// Of what a path leads to, with links followed or not.
    Path(PathTarget<'a>, bool),
}

fn name<'a>(call: &ProgramCall<'a>) -> Result<&'a [u8], Errno> {
    match sys::string(call.args[1]) {
        Err(Errno::ENAMETOOLONG) => Err(Errno::ERANGE),
        name => name,
    }
}

fn set(call: &ProgramCall<'_>, place: &XattrSubject<'_>) -> CallResult {
    let (name, flags) = (name(call)?, call.int(4));
    if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
        return Err(Errno::EINVAL.into());
    }
    if call.args[3] > 65536 {
        return Err(Errno::E2BIG.into());
    }
    let value = sys::bytes(call.args[2], call.args[3] as usize)?;
    let flags = SetXattrFlags {
        create: flags & libc::XATTR_CREATE != 0,
        replace: flags & libc::XATTR_REPLACE != 0,
        clear_sgid: false,
    };
    let (client, task) = (call.client(), call.task());
    match place {
        XattrSubject::Descriptor(entry) => {
            client.fsetxattr(task, entry.file(), name, value, flags)?
        }
        XattrSubject::Path(target, follow) => {
            client.setxattr(
                task,
                (target.as_walk_start(), target.path, *follow),
                name,
                value,
                flags,
            )?;
        }
    }
    Ok(0)
}

/// Puts a value into the room that the program offers.
fn answer(value: Xattr, address: u64) -> CallResult {
    match value {
        Xattr::Size(size) => Ok(i64::from(size)),
        Xattr::Value(value) => {
            sys::program_memory(address, value.len())?.copy_from_slice(&value);
            Ok(value.len() as i64)
        }
    }
}

fn get(call: &ProgramCall<'_>, place: &XattrSubject<'_>) -> CallResult {
    let (name, room) = (name(call)?, (call.args[3] as usize).min(65536));
    let (client, task) = (call.client(), call.task());
    let value = match place {
        XattrSubject::Descriptor(entry) => client.fgetxattr(task, entry.file(), name, room)?,
        XattrSubject::Path(target, follow) => {
            client.getxattr(task, (target.as_walk_start(), target.path, *follow), name, room)?
        }
    };
    answer(value, call.args[2])
}

fn list(call: &ProgramCall<'_>, place: &XattrSubject<'_>) -> CallResult {
    let room = (call.args[2] as usize).min(65536);
    let (client, task) = (call.client(), call.task());
    let value = match place {
        XattrSubject::Descriptor(entry) => client.flistxattr(task, entry.file(), room)?,
        XattrSubject::Path(target, follow) => {
            client.listxattr(task, target.as_walk_start(), target.path, *follow, room)?
        }
    };
    answer(value, call.args[1])
}

fn remove(call: &ProgramCall<'_>, place: &XattrSubject<'_>) -> CallResult {
    let name = name(call)?;
    let (client, task) = (call.client(), call.task());
    match place {
        XattrSubject::Descriptor(entry) => client.fremovexattr(task, entry.file(), name)?,
        XattrSubject::Path(target, follow) => {
            client.removexattr(task, (target.as_walk_start(), target.path, *follow), name)?;
        }
    }
    Ok(0)
}
