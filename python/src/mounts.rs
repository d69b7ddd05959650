//! Mounts of this process.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use defuse_compose::{SourceOpenError, SourceSettings, split};
use defuse_direct::ClientMountArgs;
use defuse_fs::source::{CallingThreads, FrontendProperties};
use defuse_fs::{Errno, FileSystem};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBytes, PyString};

use crate::errors::CallNames;
use crate::paths::{PathArgument, encode_name};
use crate::program;
use crate::sources::SOURCES;
use crate::state::call;

/// A file system to mount, with the text of its source.
struct MountSource {
    fs: Arc<dyn FileSystem>,
    text: String,
    read_only: bool,
}

/// Mount a file system on a target: an absolute path, which need not exist, or a name with a colon.
/// The source is as on the command line, with options after commas or in `options`, or an object
/// that is a file system in Python.
#[pyfunction]
#[pyo3(signature = (target, source, options = ""))]
pub fn mount(
    py: Python<'_>,
    target: PathArgument<'_>,
    source: &Bound<'_, PyAny>,
    options: &str,
) -> PyResult<()> {
    let is_text = source.is_instance_of::<PyString>() || source.is_instance_of::<PyBytes>();
    let opened = match is_text {
        true => open_source(py, &encode_name(source)?, options, &target),
        false => open_program(source, options),
    }?;
    let args = ClientMountArgs {
        read_only: opened.read_only,
        source: opened.text,
        ..ClientMountArgs::default()
    };
    call(py, target.names(), |state| {
        state.client.mount(&target.bytes, Arc::clone(&opened.fs), &args)?;
        Ok(())
    })
}

fn open_source(
    py: Python<'_>,
    text: &[u8],
    options: &str,
    target: &PathArgument<'_>,
) -> PyResult<MountSource> {
    // The threads belong to the application, so their credentials must be restored.
    let frontend = FrontendProperties {
        threads: CallingThreads::Application,
        ..FrontendProperties::default()
    };
    let text = match options {
        "" => text.to_vec(),
        options => [text, b",", options.as_bytes()].concat(),
    };
    let settings = SourceSettings::for_frontend(frontend);
    let opened = py.detach(|| SOURCES.open(OsStr::from_bytes(&text), settings));
    let opened = opened.map_err(|error| {
        let errno = match error {
            SourceOpenError::Usage(_) => Errno::EINVAL,
            SourceOpenError::Failed(_) => Errno::EIO,
            SourceOpenError::Busy(_) => Errno::EBUSY,
            SourceOpenError::Interrupted(_) => Errno::EINTR,
        };
        target.names().os_error(py, errno, &error.to_string())
    })?;
    let text = opened.source.text().to_string_lossy().into_owned();
    Ok(MountSource { fs: opened.fs, text, read_only: opened.settings.read_only })
}

/// The file system of an object. It has the options `ro` and `rw`.
fn open_program(source: &Bound<'_, PyAny>, options: &str) -> PyResult<MountSource> {
    let mut read_only = false;
    for option in split(options) {
        read_only = match option.as_str() {
            "ro" => true,
            "rw" => false,
            _ => {
                let text = format!("a file system in Python has no option {option}: only ro, rw");
                return Err(CallNames::one(source).os_error(source.py(), Errno::EINVAL, &text));
            }
        };
    }
    let text = source.get_type().name()?.to_string();
    Ok(MountSource { fs: program::serve(source)?, text, read_only })
}

/// Unmount the file system on a target. Raises OSError with EBUSY while it has open files, unless
/// it is detached lazily: then it is released with its last open file.
#[pyfunction]
#[pyo3(signature = (target, lazy = false))]
pub fn unmount(py: Python<'_>, target: PathArgument<'_>, lazy: bool) -> PyResult<()> {
    call(py, target.names(), |state| Ok(state.client.unmount(&target.bytes, lazy)?))
}

/// Return the mounts: a list of (target, source, number of users).
#[pyfunction]
pub fn mounts(py: Python<'_>) -> PyResult<Vec<(Bound<'_, PyAny>, String, usize)>> {
    let all = call(py, CallNames::default(), |state| Ok(state.client.mounts()))?;
    let shown = all.into_iter().map(|info| {
        let target = crate::paths::decode_name(py, &info.target)?;
        Ok((target, info.source, info.users))
    });
    shown.collect()
}

/// Return the statistics of the mount on a target as JSON: calls, errors, bytes and latencies of
/// each operation.
#[pyfunction]
pub fn statistics(py: Python<'_>, target: PathArgument<'_>) -> PyResult<String> {
    call(py, target.names(), |state| {
        let snapshot = state.client.statistics(&target.bytes)?;
        Ok(serde_json::to_string(&snapshot).map_err(|_| Errno::EIO)?)
    })
}

/// Make all changes to all mounts durable, as os.sync().
#[pyfunction]
pub fn sync(py: Python<'_>) -> PyResult<()> {
    call(py, CallNames::default(), |state| {
        state.client.sync(&state.task);
        Ok(())
    })
}
