//! Paths and open files as arguments.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use defuse_direct::FileDescription;
use pyo3::Borrowed;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBytes, PyString};

use crate::errors::CallNames;
use crate::files::OpenedFile;

/// A path: `str`, `bytes`, or an object with `__fspath__`.
pub struct PathArgument<'py> {
    /// The path as the client takes it.
    pub bytes: Vec<u8>,
    /// Names are returned as `bytes`.
    pub is_bytes: bool,
    object: Bound<'py, PyAny>,
}

impl<'py> PathArgument<'py> {
    /// The argument, for exceptions.
    pub fn names(&self) -> CallNames<'_, 'py> {
        CallNames::one(&self.object)
    }

    /// The argument itself.
    pub fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    /// A name that a call returned, of the type of this path.
    pub fn same_type(&self, name: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        let py = self.object.py();
        match self.is_bytes {
            true => Ok(PyBytes::new(py, name).into_any()),
            false => decode_name(py, name),
        }
    }
}

/// The name as `str`, as `os.fsdecode` makes it.
pub fn decode_name<'py>(py: Python<'py>, name: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    Ok(OsStr::from_bytes(name).into_pyobject(py)?.into_any())
}

/// The bytes of `str`, as `os.fsencode` makes them, or of `bytes`.
pub fn encode_name(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    match object.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.as_bytes().to_vec()),
        Err(_) => Ok(object.extract::<OsString>()?.into_vec()),
    }
}

impl<'py> FromPyObject<'_, 'py> for PathArgument<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let object = object.to_owned();
        let plain = match object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>()
        {
            true => object.clone(),
            false => object.getattr("__fspath__").map_err(|_| not_a_path(&object))?.call0()?,
        };
        let bytes = encode_name(&plain)?;
        if bytes.contains(&0) {
            return Err(PyValueError::new_err("embedded null byte"));
        }
        Ok(PathArgument { bytes, is_bytes: plain.is_instance_of::<PyBytes>(), object })
    }
}

fn not_a_path(object: &Bound<'_, PyAny>) -> PyErr {
    let name = object.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("path should be string, bytes or os.PathLike, not {name}"))
}

/// A path, or an open file: an object of `open`, whatever buffers it has.
pub enum FileArgument<'py> {
    /// The path.
    Path(PathArgument<'py>),
    /// The open file.
    Open(Arc<FileDescription>),
}

impl<'py> FromPyObject<'_, 'py> for FileArgument<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>() {
            return Ok(FileArgument::Path(object.extract()?));
        }
        match open_file_below(&object.to_owned())? {
            Some(file) => Ok(FileArgument::Open(file)),
            None => Ok(FileArgument::Path(object.extract()?)),
        }
    }
}

impl<'py> FileArgument<'py> {
    /// The path, for exceptions.
    pub fn names(&self) -> CallNames<'_, 'py> {
        match self {
            FileArgument::Path(path) => path.names(),
            FileArgument::Open(_) => CallNames::default(),
        }
    }

    /// The path, or else the open file, for a call without the GIL.
    pub fn target(&self) -> Result<&[u8], &FileDescription> {
        match self {
            FileArgument::Path(path) => Ok(&path.bytes),
            FileArgument::Open(open) => Err(open),
        }
    }
}

/// The open file below an object: text and buffers lead to a raw file, and that one to its file.
fn open_file_below(object: &Bound<'_, PyAny>) -> PyResult<Option<Arc<FileDescription>>> {
    let mut object = object.clone();
    for _ in 0..4 {
        if let Ok(file) = object.cast::<OpenedFile>() {
            return file.get().file().map(Some);
        }
        let below = ["opened", "raw", "buffer"].iter().find_map(|name| object.getattr(*name).ok());
        match below {
            Some(below) => object = below,
            None => return Ok(None),
        }
    }
    Ok(None)
}
