//! Whole files by one call: read, written and copied without a file object.

use std::sync::Arc;

use defuse_direct::{FileDescription, OpenHow, Result, WalkStart};
use defuse_fs::OpenFlags;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBytes};

use crate::buffers::{HeldBuffer, fill_bytes};
use crate::errors::CallNames;
use crate::paths::PathArgument;
use crate::state::{ModuleState, call};

/// Bytes that one call copies at most, so that a signal ends a long copy.
const PIECE: usize = 64 << 20;

fn open(state: &ModuleState, path: &[u8], flags: u32, mode: u32) -> Result<Arc<FileDescription>> {
    let how = OpenHow { flags: flags | OpenFlags::CLOEXEC, mode, ..OpenHow::default() };
    state.client.open(&state.task, WalkStart::Cwd, path, how)
}

/// Return the bytes from start to end. Negative numbers count from the end of the file, as in
/// slices; None means start and end of it.
#[pyfunction]
#[pyo3(signature = (path, start = None, end = None))]
pub fn read_file<'py>(
    py: Python<'py>,
    path: PathArgument<'py>,
    start: Option<i64>,
    end: Option<i64>,
) -> PyResult<Bound<'py, PyBytes>> {
    let (file, from, to) = call(py, path.names(), |state| {
        let file = open(state, &path.bytes, 0, 0)?;
        let size = state.client.fstat(&state.task, &file)?.attr.size;
        let place = |at: i64| match u64::try_from(at) {
            Ok(at) => at.min(size),
            Err(_) => size.saturating_sub(at.unsigned_abs()),
        };
        let (from, to) = (start.map_or(0, place), end.map_or(size, place));
        Ok((file, from, to.max(from)))
    })?;
    let read = fill_bytes(py, usize::try_from(to - from)?, |room| {
        call(py, path.names(), |state| {
            let mut filled = 0;
            while filled < room.len() {
                let at = from + filled as u64;
                match state.client.pread(&state.task, &file, &mut room[filled..], at)? {
                    0 => break,
                    count => filled += count,
                }
            }
            Ok(filled)
        })
    })?;
    call(py, path.names(), |state| Ok(file.close(&state.task)?))?;
    py.detach(|| drop(file));
    Ok(read)
}

/// Create or replace a file with these bytes; with `exclusive` it must not exist.
#[pyfunction]
#[pyo3(signature = (path, data, exclusive = false, mode = 0o666))]
pub fn write_file(
    py: Python<'_>,
    path: PathArgument<'_>,
    data: &Bound<'_, PyAny>,
    exclusive: bool,
    mode: u32,
) -> PyResult<()> {
    let held = HeldBuffer::readable(data)?;
    let bytes = held.bytes();
    let how = if exclusive { OpenFlags::EXCL } else { OpenFlags::TRUNC };
    let flags = OpenFlags::WRONLY | OpenFlags::CREAT | how;
    let file = call(py, path.names(), |state| open(state, &path.bytes, flags, mode))?;
    let mut written = 0;
    while written < bytes.len() {
        written += call(py, path.names(), |state| {
            state.client.write(&state.task, &file, &bytes[written..])
        })?;
    }
    let outcome = call(py, path.names(), |state| Ok(file.close(&state.task)?));
    py.detach(|| drop(file));
    outcome
}

/// Copy the data of a file to another, which is created or replaced, also between mounts. Returns
/// the number of bytes.
#[pyfunction]
#[pyo3(signature = (src, dst, mode = 0o666))]
pub fn copy_file(
    py: Python<'_>,
    src: PathArgument<'_>,
    dst: PathArgument<'_>,
    mode: u32,
) -> PyResult<u64> {
    let names = CallNames::two(src.object(), dst.object());
    let from = call(py, src.names(), |state| open(state, &src.bytes, 0, 0))?;
    let flags = OpenFlags::WRONLY | OpenFlags::CREAT | OpenFlags::TRUNC;
    let to = call(py, dst.names(), |state| open(state, &dst.bytes, flags, mode))?;
    let mut copied = 0;
    loop {
        let count = call(py, names, |state| {
            state.client.copy_file_range(&state.task, (&from, None), (&to, None), PIECE)
        })?;
        py.check_signals()?;
        match count {
            0 => break,
            count => copied += count as u64,
        }
    }
    let outcome = call(py, names, |state| Ok(to.close(&state.task)?));
    py.detach(|| drop((from, to)));
    outcome.map(|()| copied)
}
