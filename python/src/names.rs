//! Names: directories, links, renames, and the working directory.

use defuse_direct::WalkStart;
use defuse_fs::RenameFlags;
use pyo3::prelude::*;
use pyo3::types::PyAny;

use crate::errors::CallNames;
use crate::paths::{PathArgument, decode_name};
use crate::state::call;

const CWD: WalkStart<'static> = WalkStart::Cwd;

/// Create a directory, as os.mkdir().
#[pyfunction]
#[pyo3(signature = (path, mode = 0o777))]
pub fn mkdir(py: Python<'_>, path: PathArgument<'_>, mode: u32) -> PyResult<()> {
    call(py, path.names(), |state| state.client.mkdir(&state.task, CWD, &path.bytes, mode))
}

/// Create a file, fifo, socket or device, as os.mknod().
#[pyfunction]
#[pyo3(signature = (path, mode = 0o600, device = 0))]
pub fn mknod(py: Python<'_>, path: PathArgument<'_>, mode: u32, device: u64) -> PyResult<()> {
    call(py, path.names(), |state| state.client.mknod(&state.task, CWD, &path.bytes, mode, device))
}

/// Remove an empty directory, as os.rmdir().
#[pyfunction]
pub fn rmdir(py: Python<'_>, path: PathArgument<'_>) -> PyResult<()> {
    call(py, path.names(), |state| state.client.rmdir(&state.task, CWD, &path.bytes))
}

/// Remove a name that is no directory's, as os.unlink().
#[pyfunction]
pub fn unlink(py: Python<'_>, path: PathArgument<'_>) -> PyResult<()> {
    call(py, path.names(), |state| state.client.unlink(&state.task, CWD, &path.bytes))
}

/// Rename, as os.rename(): a file at the new name is replaced.
#[pyfunction]
pub fn rename(py: Python<'_>, src: PathArgument<'_>, dst: PathArgument<'_>) -> PyResult<()> {
    let flags = RenameFlags::default();
    call(py, CallNames::two(src.object(), dst.object()), |state| {
        state.client.rename(&state.task, (CWD, &src.bytes), (CWD, &dst.bytes), flags)
    })
}

/// Create a hard link, as os.link().
#[pyfunction]
#[pyo3(signature = (src, dst, *, follow_symlinks = true))]
pub fn link(
    py: Python<'_>,
    src: PathArgument<'_>,
    dst: PathArgument<'_>,
    follow_symlinks: bool,
) -> PyResult<()> {
    call(py, CallNames::two(src.object(), dst.object()), |state| {
        state.client.link(&state.task, (CWD, &src.bytes), (CWD, &dst.bytes), follow_symlinks)
    })
}

/// Create a symbolic link dst with the text src, as os.symlink().
#[pyfunction]
#[pyo3(signature = (src, dst, target_is_directory = false))]
pub fn symlink(
    py: Python<'_>,
    src: PathArgument<'_>,
    dst: PathArgument<'_>,
    target_is_directory: bool,
) -> PyResult<()> {
    let _ = target_is_directory;
    call(py, CallNames::two(src.object(), dst.object()), |state| {
        state.client.symlink(&state.task, &src.bytes, CWD, &dst.bytes)
    })
}

/// Return the text of a symbolic link, as os.readlink().
#[pyfunction]
pub fn readlink<'py>(py: Python<'py>, path: PathArgument<'py>) -> PyResult<Bound<'py, PyAny>> {
    let text =
        call(py, path.names(), |state| state.client.readlink(&state.task, CWD, &path.bytes))?;
    path.same_type(&text)
}

/// Return the path without links, `.` and `..`, as os.path.realpath(path, strict=True).
#[pyfunction]
pub fn realpath<'py>(py: Python<'py>, path: PathArgument<'py>) -> PyResult<Bound<'py, PyAny>> {
    let real = call(py, path.names(), |state| state.client.real_path(&state.task, &path.bytes))?;
    path.same_type(&real)
}

/// Set the working directory of this package to a directory of a mount, as os.chdir().
#[pyfunction]
pub fn chdir(py: Python<'_>, path: PathArgument<'_>) -> PyResult<()> {
    call(py, path.names(), |state| state.client.chdir(&state.task, &path.bytes))
}

/// Return the working directory of this package, as os.getcwd().
#[pyfunction]
pub fn getcwd(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let path = call(py, CallNames::default(), |state| state.client.getcwd(&state.task))?;
    decode_name(py, &path)
}
