//! The kind of source `bound`, and its file system.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_compose::{IN_OWN_PROGRAMS, Registry, Settings};
use defuse_fs::source::{
    About, Description, Error, Files, Frontend, Locks, Opt, Rest, Result, Sharing, Value,
};
use defuse_fs::{Absent, Caps, Errno, FileSystem, LockSupport, delegate};

use crate::companion::{Companion, connect};
use crate::protocol::{Answer, Ask, Channel};

/// The time for the manager to give the device: it ends what is in progress there first.
const GIVE_PATIENCE: Duration = Duration::from_secs(120);
/// The time in which a device that was given becomes free.
const FREE_PATIENCE: Duration = Duration::from_secs(2);

/// The kinds of the devices of a manager.
static DEVICES: Registry = Registry::new(&[IN_OWN_PROGRAMS]);

/// Settings of a device that is bound.
#[derive(Clone, Debug, Default)]
pub struct BoundSettings {
    frontend: Frontend,
    device: Option<String>,
}

/// `bound:SOCKET`.
pub static BOUND: Description<BoundSettings> = Description {
    about: About {
        name: "bound",
        form: "bound:SOCKET",
        help: "a device of a manager, which this process has until it ends (defuse manager)",
        rest: Rest::Path,
        sharing: Sharing::NeedsServer,
        rings: true,
        network: false,
        // It connects to the next manager, by the path.
        files: Files::Any,
    },
    options: &[Opt::new(
        "device",
        Value::Text(
            "PATH",
            "the path of a device in the manager's tree, such as /fast",
            |s, path| {
                s.device = path.starts_with('/').then(|| path.to_owned());
                s.device.is_some().then_some(())
            },
        ),
        "the path of the device in the manager's tree",
    )],
    defaults: |frontend| BoundSettings { frontend: frontend.clone(), device: None },
    open: |rest, settings| Ok(Arc::new(Bound::open(rest, settings)?)),
    images: None,
};

/// A device of a manager that this process has. Dropping it gives the device back.
pub struct Bound {
    /// The file system on the device.
    inner: Arc<dyn FileSystem>,
    companion: Companion,
}

impl Bound {
    /// Takes the device at `device` of the tree of the manager at `socket`, for `frontend`.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if another application has it, and [`Error::Failed`] if this user may not have it, or it cannot be
    /// opened; the manager then has it again.
    pub fn take(socket: &Path, device: &str, frontend: Frontend) -> Result<Bound> {
        let channel = connect(socket)?;
        let failed = |errno| asking(socket, device, errno);
        channel.ask(&Ask::Take(device.to_owned())).map_err(failed)?;
        let Grant { source, options, socket: serves } = granted(&channel, socket, device)?;
        let inner = open_device(&source, &options, frontend)?;
        let place = (socket.to_owned(), device.to_owned());
        let companion = Companion::start((channel, serves), place, Arc::clone(&inner));
        let companion = companion.map_err(failed)?;
        Ok(Bound { inner, companion })
    }

    fn open(rest: &OsStr, settings: BoundSettings) -> Result<Bound> {
        let socket = PathBuf::from(rest);
        let Some(device) = settings.device else {
            let shown = socket.display();
            let text = format!("bound:{shown} names no device: add the option device=/PATH");
            return Err(Error::Usage(text));
        };
        Bound::take(&socket, &device, settings.frontend)
    }
}

impl FileSystem for Bound {
    delegate!(to inner, except caps);

    /// Others change it through the manager, and it tells frontends of that as each of them needs it. Locks are those of all.
    fn caps(&self) -> Caps {
        let inner = self.inner.caps();
        Caps { exclusive: false, locks: LockSupport::FileSystem, of_one_process: true, ..inner }
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Nothing comes from others any more, and the manager waits for the end of the connection.
        self.companion.part();
        // The last reference: the device is closed.
        self.inner = Arc::new(Absent(Errno::ENODEV));
        self.companion.end();
    }
}

impl std::fmt::Debug for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound").field("companion", &self.companion).finish_non_exhaustive()
    }
}

fn asking(socket: &Path, device: &str, errno: Errno) -> Error {
    let shown = socket.display();
    Error::Failed(format!(
        "{device} of the manager at {shown}: asking for it: {errno}; is {shown} the socket of `defuse manager`, and \
         this user in its `admit`?"
    ))
}

/// The answer of a manager that gives a device: the source with its options, and the socket to serve on.
pub(crate) struct Grant {
    source: String,
    options: Vec<String>,
    pub(crate) socket: OwnedFd,
}

/// Waits for the manager to give the device.
pub(crate) fn granted(channel: &Channel<OwnedFd>, socket: &Path, device: &str) -> Result<Grant> {
    let shown = socket.display();
    match channel.next_answer(GIVE_PATIENCE) {
        Ok(Some(Answer::Granted { source, options, socket })) => {
            Ok(Grant { source, options, socket })
        }
        Ok(Some(Answer::Refused { errno, why })) => {
            let text = format!("{device} of the manager at {shown}: {why} ({errno})");
            Err(if errno == Errno::EBUSY { Error::Busy(text) } else { Error::Failed(text) })
        }
        Ok(Some(_)) => Err(asking(socket, device, Errno::EPROTO)),
        Ok(None) => Err(asking(socket, device, Errno::ETIMEDOUT)),
        Err(errno) => Err(asking(socket, device, errno)),
    }
}

fn open_device(
    source: &str,
    options: &[String],
    frontend: Frontend,
) -> Result<Arc<dyn FileSystem>> {
    let source = DEVICES.parse(OsStr::new(source))?;
    if source.kind.images().is_none() {
        let shown = source.text().display().to_string();
        return Err(Error::Failed(format!("{shown} is no device: it cannot be bound")));
    }
    // Those of this process and those of others are kept in one place.
    let frontend = Frontend { locks: Locks::FileSystem, ..frontend };
    let mut settings = Settings::of(frontend);
    for option in options {
        match option.as_str() {
            "ro" => settings.read_only = true,
            _ => settings.options.push(option.clone()),
        }
    }
    let deadline = Instant::now() + FREE_PATIENCE;
    loop {
        match source.open(&settings) {
            // The kernel closes what a ring has a moment after the process did.
            Err(Error::Busy(_)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_fs::source::Kind;

    #[test]
    fn a_source_without_a_device_or_a_manager_names_the_next_step() {
        let dir = tempfile::TempDir::with_prefix("defuse-bound-").unwrap();
        let socket = dir.path().join("socket");
        let open = |options: &[&str]| {
            let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
            BOUND.open(socket.as_os_str(), &Frontend::default(), &options).err().unwrap()
        };
        assert!(matches!(open(&[]), Error::Usage(text) if text.contains("device=/PATH")));
        assert!(matches!(open(&["device=fast"]), Error::Usage(text) if text.contains("/fast")));
        let none = open(&["device=/fast"]).to_string();
        assert!(none.contains("defuse manager") && none.contains("socket"), "{none}");
    }

    /// A manager could otherwise make its applications start programs.
    #[test]
    fn only_devices_are_opened() {
        for source in ["fuse:sh -c id", "memory:", "passthrough:/", "gluster://host/vol"] {
            let error = open_device(source, &[], Frontend::default()).err().unwrap().to_string();
            assert!(error.contains("no sources of type") || error.contains("no device"), "{error}");
        }
    }
}
