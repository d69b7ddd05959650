//! Open files.

use std::sync::{Arc, PoisonError, RwLock};

use defuse_direct::{FileDescription, OpenHow, WalkStart};
use defuse_fs::{Errno, FileKind};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBytes};

use crate::attributes::stat_result;
use crate::buffers::{HeldBuffer, fill_bytes};
use crate::errors::{self, CallNames};
use crate::paths::PathArgument;
use crate::state::call;

/// Bytes by which a read to the end grows if the size of the file says nothing.
const STEP: usize = 64 << 10;

/// An open file of a mount, as a descriptor is for `os`. `RawFile` of the package makes it a file
/// of `io`.
#[pyclass(frozen, module = "defuse_fs._core")]
pub struct OpenedFile {
    file: RwLock<Option<Arc<FileDescription>>>,
}

impl OpenedFile {
    /// The open file. Raises `ValueError` after close.
    pub fn file(&self) -> PyResult<Arc<FileDescription>> {
        let held = self.file.read().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().map(Arc::clone).ok_or_else(errors::closed_file_error)
    }
}

#[pymethods]
impl OpenedFile {
    /// Open a file with the flags of os.open().
    #[new]
    #[pyo3(signature = (path, flags, mode = 0o666))]
    fn new(py: Python<'_>, path: PathArgument<'_>, flags: u32, mode: u32) -> PyResult<Self> {
        let how = OpenHow { flags, mode, ..OpenHow::default() };
        let file = call(py, path.names(), |state| {
            state.client.open(&state.task, WalkStart::Cwd, &path.bytes, how)
        })?;
        Ok(OpenedFile { file: RwLock::new(Some(file)) })
    }

    /// Read at the file position into a buffer, and return the number of bytes.
    fn readinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (file, mut held) = (self.file()?, HeldBuffer::writable(buffer)?);
        let room = held.bytes_mut();
        call(py, CallNames::default(), |state| state.client.read(&state.task, &file, room))
    }

    /// Read at an offset into a buffer, and return the number of bytes.
    fn preadinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, offset: u64) -> PyResult<usize> {
        let (file, mut held) = (self.file()?, HeldBuffer::writable(buffer)?);
        let room = held.bytes_mut();
        call(py, CallNames::default(), |state| state.client.pread(&state.task, &file, room, offset))
    }

    /// Read up to size bytes at the file position; all if it is negative or None.
    #[pyo3(signature = (size = -1, /))]
    fn read<'py>(&self, py: Python<'py>, size: Option<isize>) -> PyResult<Bound<'py, PyBytes>> {
        let Ok(len) = usize::try_from(size.unwrap_or(-1)) else { return self.readall(py) };
        let file = self.file()?;
        fill_bytes(py, len, |room| {
            call(py, CallNames::default(), |state| state.client.read(&state.task, &file, room))
        })
    }

    /// Read up to size bytes at an offset.
    fn pread<'py>(
        &self,
        py: Python<'py>,
        size: usize,
        offset: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let file = self.file()?;
        fill_bytes(py, size, |room| {
            call(py, CallNames::default(), |state| {
                state.client.pread(&state.task, &file, room, offset)
            })
        })
    }

    /// Read from the file position to the end.
    fn readall<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let file = self.file()?;
        let left = call(py, CallNames::default(), |state| {
            let size = state.client.fstat(&state.task, &file)?.attr.size;
            Ok(usize::try_from(size.saturating_sub(file.position())).unwrap_or(usize::MAX))
        })?;
        let read = |room: &mut [u8]| {
            call(py, CallNames::default(), |state| {
                let mut filled = 0;
                while filled < room.len() {
                    match state.client.read(&state.task, &file, &mut room[filled..])? {
                        0 => break,
                        count => filled += count,
                    }
                }
                Ok(filled)
            })
        };
        let all = fill_bytes(py, left, read)?;
        // The size may be 0 for a file that is made when it is read, or old.
        let mut more = vec![0; if left == 0 { STEP } else { 1 }];
        let mut rest: Vec<u8> = Vec::new();
        while all.as_bytes().len() == left {
            match read(&mut more)? {
                0 => break,
                count => rest.extend_from_slice(&more[..count]),
            }
            more.resize(STEP, 0);
        }
        if rest.is_empty() {
            return Ok(all);
        }
        Ok(PyBytes::new(py, &[all.as_bytes(), &rest].concat()))
    }

    /// Write a buffer at the file position, and return the number of bytes.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (file, held) = (self.file()?, HeldBuffer::readable(data)?);
        let bytes = held.bytes();
        call(py, CallNames::default(), |state| state.client.write(&state.task, &file, bytes))
    }

    /// Write a buffer at an offset, and return the number of bytes.
    fn pwrite(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: u64) -> PyResult<usize> {
        let (file, held) = (self.file()?, HeldBuffer::readable(data)?);
        let bytes = held.bytes();
        call(py, CallNames::default(), |state| {
            state.client.pwrite(&state.task, &file, bytes, offset)
        })
    }

    /// Set the file position, and return it. whence is that of os.lseek().
    #[pyo3(signature = (offset, whence = 0, /))]
    fn seek(&self, py: Python<'_>, offset: i64, whence: u32) -> PyResult<u64> {
        let file = self.file()?;
        call(py, CallNames::default(), |state| {
            state.client.lseek(&state.task, &file, offset, whence)
        })
    }

    /// Return the file position.
    fn tell(&self) -> PyResult<u64> {
        Ok(self.file()?.position())
    }

    /// Set the size, that of the file position by default, and return it.
    #[pyo3(signature = (size = None, /))]
    fn truncate(&self, py: Python<'_>, size: Option<i64>) -> PyResult<i64> {
        let file = self.file()?;
        let size = match size {
            Some(size) => size,
            None => i64::try_from(file.position()).unwrap_or(i64::MAX),
        };
        call(py, CallNames::default(), |state| state.client.ftruncate(&state.task, &file, size))?;
        Ok(size)
    }

    /// Make the file durable; with datasync only what reading it needs.
    #[pyo3(signature = (datasync = false))]
    fn fsync(&self, py: Python<'_>, datasync: bool) -> PyResult<()> {
        let file = self.file()?;
        call(py, CallNames::default(), |state| state.client.fsync(&state.task, &file, datasync))
    }

    /// Make all changes to the file system of this file durable.
    fn syncfs(&self, py: Python<'_>) -> PyResult<()> {
        let file = self.file()?;
        call(py, CallNames::default(), |state| state.client.syncfs(&state.task, &file))
    }

    /// Allocate or release space, as os.posix_fallocate() and fallocate(2) with a mode.
    #[pyo3(signature = (offset, length, mode = 0))]
    fn fallocate(&self, py: Python<'_>, offset: i64, length: i64, mode: u32) -> PyResult<()> {
        let file = self.file()?;
        call(py, CallNames::default(), |state| {
            state.client.fallocate(&state.task, &file, mode, (offset, length))
        })
    }

    /// Return the attributes, as os.fstat().
    fn stat<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let file = self.file()?;
        let found = call(py, CallNames::default(), |state| state.client.fstat(&state.task, &file))?;
        stat_result(py, &found)
    }

    /// Return the flags of the open file.
    #[getter]
    fn flags(&self) -> PyResult<u32> {
        Ok(self.file()?.flags().0)
    }

    /// True for a directory.
    #[getter]
    fn is_dir(&self) -> PyResult<bool> {
        Ok(self.file()?.kind() == FileKind::Directory)
    }

    /// True after close.
    #[getter(closed)]
    fn is_closed(&self) -> bool {
        self.file.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Close the file. Raises the error of an earlier write that was not durable.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let file = self.file.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(file) = file else { return Ok(()) };
        // A signal must not close it again.
        let outcome = call(py, CallNames::default(), |state| match file.close(&state.task) {
            Err(Errno::EINTR) => Ok(()),
            outcome => Ok(outcome?),
        });
        py.detach(|| drop(file));
        outcome
    }
}

impl Drop for OpenedFile {
    /// The last reference releases the file, which may wait for a file system that needs the
    /// interpreter.
    fn drop(&mut self) {
        let file = self.file.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(file) = file {
            Python::attach(|py| py.detach(|| drop(file)));
        }
    }
}
