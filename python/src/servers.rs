//! A file system in Python for other processes: as a kernel mount, or on a socket.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_compose::split;
use defuse_fs::{Errno, FileSystem};
use defuse_fuse::mount::{self, ApplyOutcome, MountEntry, MountError, MountOptions, UnmountError};
use defuse_fuse::{Session, SessionOptions};
use defuse_socket::{ServerOptions, SocketServer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyAny;

use crate::errors::CallNames;
use crate::paths::PathArgument;
use crate::program;

/// The time after which a wait looks for signals.
const SIGNAL_PATIENCE: Duration = Duration::from_millis(50);

/// The end of a server, once it is there.
#[derive(Default)]
struct ServerEnd {
    outcome: Mutex<Option<Result<(), Errno>>>,
    changed: Condvar,
}

impl ServerEnd {
    fn set(&self, outcome: Result<(), Errno>) {
        *lock(&self.outcome) = Some(outcome);
        self.changed.notify_all();
    }

    /// The outcome, for which this waits a short time.
    fn wait_a_while(&self) -> Option<Result<(), Errno>> {
        let outcome = lock(&self.outcome);
        if outcome.is_some() {
            return *outcome;
        }
        let waited = self.changed.wait_timeout(outcome, SIGNAL_PATIENCE);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The way in for other processes.
enum ServedPlace {
    Mountpoint(PathBuf, Option<u32>),
    Socket(Arc<SocketServer>),
}

/// A file system in Python that other processes use: a mount of the kernel on a directory, or a
/// socket for `defuse run` and other clients. A thread of its own serves it from its creation on.
#[pyclass(frozen, module = "defuse_fs._core")]
pub struct ProgramServer {
    place: ServedPlace,
    end: Arc<ServerEnd>,
}

#[pymethods]
impl ProgramServer {
    /// Serve the file system, an object with methods on paths, on a directory or on a new socket.
    #[new]
    #[pyo3(signature = (program, mountpoint = None, socket = None, options = ""))]
    fn new(
        py: Python<'_>,
        program: &Bound<'_, PyAny>,
        mountpoint: Option<PathArgument<'_>>,
        socket: Option<PathArgument<'_>>,
        options: &str,
    ) -> PyResult<Self> {
        let fs = program::serve(program)?;
        let path = |path: &PathArgument<'_>| -> PyResult<PathBuf> {
            Ok(std::path::absolute(OsStr::from_bytes(&path.bytes))?)
        };
        match (&mountpoint, &socket) {
            (Some(place), None) => {
                let name = program.get_type().name()?.to_string();
                let (path, options) = (path(place)?, mount_options(&name, options)?);
                let started = py.detach(|| serve_mount(&path, fs, &options));
                started.map_err(|(errno, text)| place.names().os_error(py, errno, &text))
            }
            (None, Some(place)) => {
                let path = path(place)?;
                let started = py.detach(|| serve_socket(&path, fs));
                started.map_err(|text| place.names().os_error(py, Errno::EIO, &text))
            }
            _ => Err(PyValueError::new_err("one of mountpoint and socket is needed")),
        }
    }

    /// Wait until the file system is unmounted, or stop() was called. Raises what handlers of
    /// signals raise.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        loop {
            match py.detach(|| self.end.wait_a_while()) {
                Some(Ok(())) => return Ok(()),
                Some(Err(errno)) => {
                    let text = "not everything could be made durable";
                    return Err(CallNames::default().os_error(py, errno, text));
                }
                None => py.check_signals()?,
            }
        }
    }

    /// Unmount, or close the socket, and wait for the end. Raises OSError with EBUSY while a mount
    /// is in use, unless `lazy` is set.
    #[pyo3(signature = (lazy = false))]
    fn stop(&self, py: Python<'_>, lazy: bool) -> PyResult<()> {
        if lock(&self.end.outcome).is_some() {
            return Ok(());
        }
        match &self.place {
            ServedPlace::Mountpoint(path, connection) => {
                let is_it = |now: &MountEntry| connection.is_none_or(|own| now.connection() == own);
                let unmounted = py.detach(|| mount::unmount_if(path, lazy, is_it));
                unmounted.map_err(|error| {
                    let errno = match error {
                        UnmountError::Busy { .. } => Errno::EBUSY,
                        _ => Errno::EINVAL,
                    };
                    CallNames::default().os_error(py, errno, &error.to_string())
                })?;
                // Users of a mount that was detached keep it.
                if lazy { Ok(()) } else { self.wait(py) }
            }
            ServedPlace::Socket(server) => {
                server.shut_down();
                self.wait(py)
            }
        }
    }
}

fn mount_options(name: &str, options: &str) -> PyResult<MountOptions> {
    let mut all = MountOptions { fsname: name.to_owned(), ..MountOptions::default() };
    for option in split(options) {
        let (key, value) = match option.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (option.as_str(), None),
        };
        match all.apply(key, value) {
            Ok(ApplyOutcome::Yes) => {}
            Ok(ApplyOutcome::NotAMountOption) => {
                let known = mount::mount_option_names().collect::<Vec<_>>().join(", ");
                let text = format!("there is no mount option {key}: known are {known}");
                return Err(PyValueError::new_err(text));
            }
            Err(error) => return Err(PyValueError::new_err(error.to_string())),
        }
    }
    Ok(all)
}

fn serve_mount(
    path: &Path,
    fs: Arc<dyn FileSystem>,
    options: &MountOptions,
) -> Result<ProgramServer, (Errno, String)> {
    let prepared =
        mount::mount(path, options).map_err(|error| (mount_errno(&error), error.to_string()))?;
    let (mountpoint, watch) = (prepared.mountpoint, prepared.watch);
    let connection = mount::connection_id(&mountpoint);
    // Interrupts by signals would reach code of Python.
    let settings = SessionOptions {
        signals: false,
        default_permissions: options.default_permissions,
        ..SessionOptions::default()
    };
    let session = match Session::start(prepared.device, fs, &settings) {
        Ok(session) => session,
        Err(error) => {
            let _ = mount::unmount(&mountpoint, true);
            return Err((Errno::EIO, error.to_string()));
        }
    };
    let end = Arc::new(ServerEnd::default());
    let ended = Arc::clone(&end);
    std::thread::spawn(move || {
        let outcome = session.wait();
        drop(watch);
        ended.set(outcome.durable);
    });
    Ok(ProgramServer { place: ServedPlace::Mountpoint(mountpoint, connection), end })
}

/// The number that tells programs what is wrong.
fn mount_errno(error: &MountError) -> Errno {
    match error {
        MountError::Missing { .. } => Errno::ENOENT,
        MountError::NotADirectory { .. } | MountError::NotAFile { .. } => Errno::ENOTDIR,
        MountError::NotEmpty { .. } => Errno::ENOTEMPTY,
        MountError::DeadMount { .. } | MountError::SilentMount { .. } => Errno::EBUSY,
        MountError::NoDevice { .. } | MountError::NoFuse { .. } => Errno::ENODEV,
        MountError::DeviceNotPermitted { .. }
        | MountError::NotPermitted { .. }
        | MountError::AllowOtherRefused => Errno::EPERM,
        MountError::Unusable { errno, .. } | MountError::Refused { errno, .. } => {
            Errno::from_raw(errno.raw_os_error())
        }
        MountError::Helper { .. } | MountError::NotAFuseDevice { .. } => Errno::EIO,
    }
}

fn serve_socket(path: &Path, fs: Arc<dyn FileSystem>) -> Result<ProgramServer, String> {
    let options = ServerOptions {
        session: SessionOptions { signals: false, ..SessionOptions::default() },
        ..ServerOptions::default()
    };
    let server = SocketServer::bind(path, fs, options).map_err(|error| error.to_string())?;
    let server = Arc::new(server);
    let end = Arc::new(ServerEnd::default());
    let (serving, ended) = (Arc::clone(&server), Arc::clone(&end));
    std::thread::spawn(move || {
        serving.run();
        ended.set(Ok(()));
    });
    Ok(ProgramServer { place: ServedPlace::Socket(server), end })
}
