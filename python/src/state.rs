//! The state of the module in its process: mounts and credentials, and how calls are made.

use std::sync::OnceLock;

use defuse_direct::{CallError, ClientOptions, ClientTask, DirectClient, Result};
use defuse_fs::Errno;
use pyo3::prelude::*;

use crate::errors::CallNames;
use crate::sources::SOURCES;

/// The state, one per process.
pub struct ModuleState {
    /// The mounts and the calls on them.
    pub client: DirectClient,
    /// The credentials that the process had at the first call.
    pub task: ClientTask,
}

static STATE: OnceLock<Option<ModuleState>> = OnceLock::new();

/// The state, created at the first call. Fails with `EIO` if the credentials of the process cannot
/// be read.
fn state() -> Result<&'static ModuleState> {
    let make = || {
        Some(ModuleState {
            task: ClientTask::for_this_process().ok()?,
            client: DirectClient::new(ClientOptions::default()),
        })
    };
    STATE.get_or_init(make).as_ref().ok_or(CallError::Errno(Errno::EIO))
}

/// Makes a call without the GIL, and again after a signal whose handler raises nothing (PEP 475).
pub fn call<T: Send>(
    py: Python<'_>,
    names: CallNames<'_, '_>,
    mut run: impl FnMut(&ModuleState) -> Result<T> + Send,
) -> PyResult<T> {
    loop {
        let error = match py.detach(|| run(state()?)) {
            Ok(result) => return Ok(result),
            Err(error) => error,
        };
        if error.errno() != Errno::EINTR {
            return Err(names.error(py, &error));
        }
        py.check_signals()?;
    }
}

/// Lets the record locks of a child of fork(2) be its own. Called in the child.
#[pyfunction]
pub fn after_fork() {
    if let Some(Some(state)) = STATE.get() {
        state.task.set_pid(std::process::id());
    }
}

/// Return the kinds of sources: a list of (form, description).
#[pyfunction]
pub fn kinds() -> Vec<(String, String)> {
    let about = SOURCES.kinds().map(|kind| kind.facts());
    about.map(|about| (about.form.to_owned(), about.help.to_owned())).collect()
}
