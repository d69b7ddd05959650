//! Extended attributes.

use defuse_direct::WalkStart;
use defuse_fs::{Errno, SetXattrFlags, Xattr};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBytes};

use crate::buffers::HeldBuffer;
use crate::paths::{FileArgument, PathArgument, decode_name};
use crate::state::call;

const CWD: WalkStart<'static> = WalkStart::Cwd;

/// The largest value, and the longest list, `XATTR_SIZE_MAX`.
const ROOM: usize = 1 << 16;

fn value(xattr: Xattr) -> Vec<u8> {
    match xattr {
        Xattr::Value(value) => value,
        Xattr::Size(_) => Vec::new(),
    }
}

/// Return the value of an extended attribute, as os.getxattr().
#[pyfunction]
#[pyo3(signature = (path, attribute, *, follow_symlinks = true))]
pub fn getxattr<'py>(
    py: Python<'py>,
    path: FileArgument<'py>,
    attribute: PathArgument<'py>,
    follow_symlinks: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let name = attribute.bytes.as_slice();
    let found = match path.target() {
        Ok(file) => call(py, path.names(), |state| {
            let place = (CWD, file, follow_symlinks);
            state.client.getxattr(&state.task, place, name, ROOM)
        }),
        Err(file) => {
            call(py, path.names(), |state| state.client.fgetxattr(&state.task, file, name, ROOM))
        }
    };
    Ok(PyBytes::new(py, &value(found?)))
}

/// Set an extended attribute, as os.setxattr().
#[pyfunction]
#[pyo3(signature = (path, attribute, value, flags = 0, *, follow_symlinks = true))]
pub fn setxattr(
    py: Python<'_>,
    path: FileArgument<'_>,
    attribute: PathArgument<'_>,
    value: &Bound<'_, PyAny>,
    flags: i32,
    follow_symlinks: bool,
) -> PyResult<()> {
    if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
        return Err(PyValueError::new_err("flags are XATTR_CREATE and XATTR_REPLACE"));
    }
    let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
    let flags = SetXattrFlags { create, replace, ..SetXattrFlags::default() };
    let held = HeldBuffer::readable(value)?;
    let (name, bytes) = (attribute.bytes.as_slice(), held.bytes());
    match path.target() {
        Ok(file) => call(py, path.names(), |state| {
            let place = (CWD, file, follow_symlinks);
            state.client.setxattr(&state.task, place, name, bytes, flags)
        }),
        Err(file) => call(py, path.names(), |state| {
            state.client.fsetxattr(&state.task, file, name, bytes, flags)
        }),
    }
}

/// Return the names of all extended attributes, as os.listxattr().
#[pyfunction]
#[pyo3(signature = (path, *, follow_symlinks = true))]
pub fn listxattr<'py>(
    py: Python<'py>,
    path: FileArgument<'py>,
    follow_symlinks: bool,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let found = match path.target() {
        Ok(file) => call(py, path.names(), |state| {
            state.client.listxattr(&state.task, CWD, file, follow_symlinks, ROOM)
        }),
        Err(file) => {
            call(py, path.names(), |state| state.client.flistxattr(&state.task, file, ROOM))
        }
    };
    let names = value(found?);
    let names = names.split(|&byte| byte == 0).filter(|name| !name.is_empty());
    names.map(|name| decode_name(py, name)).collect()
}

/// Remove an extended attribute, as os.removexattr().
#[pyfunction]
#[pyo3(signature = (path, attribute, *, follow_symlinks = true))]
pub fn removexattr(
    py: Python<'_>,
    path: FileArgument<'_>,
    attribute: PathArgument<'_>,
    follow_symlinks: bool,
) -> PyResult<()> {
    let name = attribute.bytes.as_slice();
    if name.is_empty() {
        return Err(path.names().error(py, &Errno::ERANGE.into()));
    }
    match path.target() {
        Ok(file) => call(py, path.names(), |state| {
            let place = (CWD, file, follow_symlinks);
            state.client.removexattr(&state.task, place, name)
        }),
        Err(file) => {
            call(py, path.names(), |state| state.client.fremovexattr(&state.task, file, name))
        }
    }
}
