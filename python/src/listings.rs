//! Listings of directories.

use defuse_direct::{CallError, DirEntry, OpenHow, WalkStart};
use defuse_fs::{Errno, OpenFlags};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyList};

use crate::attributes::stat_result;
use crate::paths::PathArgument;
use crate::state::{ModuleState, call};

/// The entries of a directory without `.` and `..`.
fn entries(state: &ModuleState, path: &[u8]) -> defuse_direct::Result<Vec<DirEntry>> {
    let flags = OpenFlags::DIRECTORY | OpenFlags::CLOEXEC;
    let how = OpenHow { flags, ..OpenHow::default() };
    let dir = state.client.open(&state.task, WalkStart::Cwd, path, how)?;
    let mut all = state.client.read_dir(&state.task, &dir)?;
    dir.close(&state.task)?;
    all.retain(|entry| !matches!(&entry.name[..], b"." | b".."));
    Ok(all)
}

/// Return the names in a directory, as os.listdir().
#[pyfunction]
#[pyo3(signature = (path))]
pub fn listdir<'py>(py: Python<'py>, path: PathArgument<'py>) -> PyResult<Bound<'py, PyList>> {
    let all = call(py, path.names(), |state| entries(state, &path.bytes))?;
    let names: PyResult<Vec<_>> = all.iter().map(|entry| path.same_type(&entry.name)).collect();
    PyList::new(py, names?)
}

/// An entry as Python gets it: its name, the type bits of its mode, its inode number, and its
/// attributes if they were requested.
type ScannedEntry<'py> = (Bound<'py, PyAny>, u32, u64, Option<Bound<'py, PyAny>>);

/// Return the entries of a directory: tuples of name, type bits of the mode, inode number, and with
/// `attributes` the result of lstat.
#[pyfunction]
#[pyo3(signature = (path, attributes = false))]
pub fn scan<'py>(
    py: Python<'py>,
    path: PathArgument<'py>,
    attributes: bool,
) -> PyResult<Vec<ScannedEntry<'py>>> {
    let found = call(py, path.names(), |state| {
        let all = entries(state, &path.bytes)?;
        let mut found = Vec::with_capacity(all.len());
        for entry in all {
            let stat = match attributes {
                false => None,
                true => {
                    let full = [&path.bytes[..], b"/", &entry.name].concat();
                    match state.client.stat(&state.task, WalkStart::Cwd, &full, false) {
                        Ok(stat) => Some(stat),
                        // It was removed meanwhile.
                        Err(CallError::Errno(Errno::ENOENT)) => continue,
                        Err(error) => return Err(error),
                    }
                }
            };
            found.push((entry, stat));
        }
        Ok(found)
    })?;
    let shown = |(entry, stat): (DirEntry, Option<defuse_direct::FileStat>)| {
        let stat = stat.map(|stat| stat_result(py, &stat)).transpose()?;
        Ok((path.same_type(&entry.name)?, entry.kind.mode_bits(), entry.ino, stat))
    };
    found.into_iter().map(shown).collect()
}
