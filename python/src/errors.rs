//! From errors of calls to exceptions of Python, and back.

use defuse_direct::CallError;
use defuse_fs::Errno;
use pyo3::exceptions::{
    PyBlockingIOError, PyFileExistsError, PyFileNotFoundError, PyIsADirectoryError,
    PyNotADirectoryError, PyNotImplementedError, PyOSError, PyPermissionError, PyTimeoutError,
    PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyAny;

/// The file names that an exception of a call shows.
#[derive(Clone, Copy, Default)]
pub struct CallNames<'a, 'py> {
    /// The argument as Python passed it.
    pub first: Option<&'a Bound<'py, PyAny>>,
    /// The second one, of rename and link.
    pub second: Option<&'a Bound<'py, PyAny>>,
}

impl<'a, 'py> CallNames<'a, 'py> {
    /// The name of a call on one file.
    pub fn one(name: &'a Bound<'py, PyAny>) -> Self {
        CallNames { first: Some(name), second: None }
    }

    /// The names of a call on two.
    pub fn two(first: &'a Bound<'py, PyAny>, second: &'a Bound<'py, PyAny>) -> Self {
        CallNames { first: Some(first), second: Some(second) }
    }

    /// The exception for a failed call: a subclass of `OSError` with the number and these names.
    pub fn error(self, py: Python<'_>, error: &CallError) -> PyErr {
        match error {
            CallError::Errno(errno) => self.os_error(py, *errno, &text(*errno)),
            CallError::Outside(_) => self.os_error(
                py,
                Errno::EXDEV,
                "no mount of this process is there: mount one with defuse_fs.mount()",
            ),
        }
    }

    /// The exception for an error number, with a text of its own.
    pub fn os_error(self, py: Python<'_>, errno: Errno, text: &str) -> PyErr {
        let name = |name: Option<&Bound<'_, PyAny>>| name.map(|name| name.clone().unbind());
        match (name(self.first), name(self.second)) {
            (None, _) => PyOSError::new_err((errno.raw(), text.to_owned())),
            (Some(first), None) => PyOSError::new_err((errno.raw(), text.to_owned(), first)),
            (Some(first), Some(second)) => {
                let names = (errno.raw(), text.to_owned(), first, py.None(), second);
                PyOSError::new_err(names)
            }
        }
    }
}

/// The text of strerror(3).
fn text(errno: Errno) -> String {
    let full = errno.to_string();
    full.split(" (").next().unwrap_or(&full).to_owned()
}

/// The exception of a closed file.
pub fn closed_file_error() -> PyErr {
    PyValueError::new_err("I/O operation on closed file.")
}

/// The error number that an exception of a file system in Python stands for. An exception that is
/// no answer to a request is shown by `sys.unraisablehook`, and becomes `EIO`.
pub fn errno_of(py: Python<'_>, error: PyErr, place: Option<&Bound<'_, PyAny>>) -> Errno {
    if error.is_instance_of::<PyNotImplementedError>(py) {
        return Errno::ENOSYS;
    }
    if error.is_instance_of::<PyOSError>(py) {
        let number = error.value(py).getattr("errno").and_then(|number| number.extract::<i32>());
        return match number {
            Ok(number) => Errno::from_raw(number),
            Err(_) => by_class(py, &error),
        };
    }
    error.write_unraisable(py, place);
    Errno::EIO
}

/// The error number of an `OSError` that was raised without one.
fn by_class(py: Python<'_>, error: &PyErr) -> Errno {
    let is = [
        (error.is_instance_of::<PyFileNotFoundError>(py), Errno::ENOENT),
        (error.is_instance_of::<PyFileExistsError>(py), Errno::EEXIST),
        (error.is_instance_of::<PyIsADirectoryError>(py), Errno::EISDIR),
        (error.is_instance_of::<PyNotADirectoryError>(py), Errno::ENOTDIR),
        (error.is_instance_of::<PyPermissionError>(py), Errno::EACCES),
        (error.is_instance_of::<PyBlockingIOError>(py), Errno::EAGAIN),
        (error.is_instance_of::<PyTimeoutError>(py), Errno::ETIMEDOUT),
    ];
    is.iter().find(|(is, _)| *is).map_or(Errno::EIO, |(_, errno)| *errno)
}
