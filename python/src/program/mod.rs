//! A file system in Python: an object with methods on paths.
//!
//! Names and arguments are those that fusepy calls. A method that is missing is `ENOSYS`. An
//! `OSError` is the answer with its number; any other exception is shown, and the answer is `EIO`.
//! Several threads call at once.

mod handles;
mod operations;
mod values;

use std::sync::Arc;
use std::time::Duration;

use defuse_fs::path::{PathAdapter, PathRef};
use defuse_fs::{Attr, Errno, Fh, FileSystem, Result};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyAny;

use crate::errors::errno_of;
use crate::paths::decode_name;
use handles::OpenObjects;
use values::AttrDefaults;

/// The file system of an object. Raises `TypeError` for an object without `getattr` and `readdir`.
pub fn serve(program: &Bound<'_, PyAny>) -> PyResult<Arc<dyn FileSystem>> {
    for name in ["getattr", "readdir"] {
        if !program.getattr_opt(name)?.is_some_and(|method| method.is_callable()) {
            let class = program.get_type().name()?;
            let text = format!("a file system needs the method {name}, which {class} has not");
            return Err(PyTypeError::new_err(text));
        }
    }
    let valid_for = match program.getattr_opt("timeout")? {
        Some(seconds) => {
            Duration::try_from_secs_f64(seconds.extract()?).unwrap_or(Duration::from_secs(1 << 30))
        }
        None => Duration::from_secs(1),
    };
    let fs = ObjectFileSystem {
        xattrs: program.hasattr("getxattr")?,
        creates: program.hasattr("create")?,
        opens: program.hasattr("open")?,
        program: program.clone().unbind(),
        opened: OpenObjects::default(),
        defaults: AttrDefaults::of_this_process(),
        valid_for,
    };
    Ok(Arc::new(PathAdapter::new(fs)))
}

/// An object of Python as a file system.
struct ObjectFileSystem {
    program: Py<PyAny>,
    opened: OpenObjects,
    defaults: AttrDefaults,
    xattrs: bool,
    creates: bool,
    opens: bool,
    /// The time for which names and attributes hold, from the attribute `timeout`.
    valid_for: Duration,
}

impl ObjectFileSystem {
    /// Runs `call` with the method `name`. Fails with `ENOSYS` if there is none, and with `EIO`
    /// while the interpreter ends.
    fn with<T>(
        &self,
        name: &str,
        call: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        let attached = Python::try_attach(|py| {
            let found = self.program.bind(py).getattr_opt(name);
            let method = found.map_err(|error| errno_of(py, error, None))?.ok_or(Errno::ENOSYS)?;
            call(py, &method).map_err(|error| errno_of(py, error, Some(&method)))
        });
        attached.unwrap_or(Err(Errno::EIO))
    }

    fn attributes(&self, path: &[u8], fh: Option<Fh>) -> Result<Attr> {
        self.with("getattr", |py, method| {
            let found = method.call1((decode_name(py, path)?, self.opened.object(py, fh)))?;
            self.defaults.attr(&found, self.valid_for)
        })
    }
}

/// A path as methods get it.
fn text<'py>(py: Python<'py>, path: PathRef<'_>) -> PyResult<Bound<'py, PyAny>> {
    decode_name(py, path.as_bytes())
}
