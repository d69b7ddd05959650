//! The kind of source `bound`, and its file system.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_compose::{IN_OWN_PROGRAMS, SourceRegistry, SourceSettings};
use defuse_fs::source::{
    FileAccess, FrontendProperties, LockPlace, OptionValue, SourceDescription, SourceFacts,
    SourceOpenError, SourceOption, SourceRest, SourceResult, SourceSharing,
};
use defuse_fs::{AbsentFileSystem, Caps, Errno, FileSystem, LockSupport, delegate};

use crate::companion::{DeviceCompanion, connect};
use crate::protocol::{ApplicationMessage, ManagerChannel, ManagerMessage};

/// The time for the manager to give the device: it ends what is in progress there first.
const GIVE_PATIENCE: Duration = Duration::from_secs(120);
/// The time in which a device that was given becomes free.
const FREE_PATIENCE: Duration = Duration::from_secs(2);

/// The kinds of the devices of a manager.
static DEVICES: SourceRegistry = SourceRegistry::new(&[IN_OWN_PROGRAMS]);

/// Settings of a device that is bound.
#[derive(Clone, Debug, Default)]
pub struct BoundSettings {
    frontend: FrontendProperties,
    device: Option<String>,
}

/// `bound:SOCKET`.
pub static BOUND: SourceDescription<BoundSettings> = SourceDescription {
    about: SourceFacts {
        name: "bound",
        form: "bound:SOCKET",
        help: "a device of a manager, which this process has until it ends (defuse manager)",
        rest: SourceRest::Path,
        sharing: SourceSharing::NeedsServer,
        rings: true,
        network: false,
        // It connects to the next manager, by the path.
        files: FileAccess::Any,
    },
    options: &[SourceOption::new(
        "device",
        OptionValue::Text(
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
    open: |rest, settings| Ok(Arc::new(BoundDevice::open(rest, settings)?)),
    images: None,
};

/// A device of a manager that this process has. Dropping it gives the device back.
pub struct BoundDevice {
    /// The file system on the device.
    inner: Arc<dyn FileSystem>,
    companion: DeviceCompanion,
}

impl BoundDevice {
    /// Takes the device at `device` of the tree of the manager at `socket`, for `frontend`.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Busy`] if another application has the device, and
    /// [`SourceOpenError::Failed`] if this user may not take it, or it cannot be opened; the
    /// manager then gets the device back.
    pub fn take(
        socket: &Path,
        device: &str,
        frontend: FrontendProperties,
    ) -> SourceResult<BoundDevice> {
        let channel = connect(socket)?;
        let failed = |errno| request_error(socket, device, errno);
        channel.send_request(&ApplicationMessage::Take(device.to_owned())).map_err(failed)?;
        let DeviceGrant { source, options, socket: serves } =
            wait_for_grant(&channel, socket, device)?;
        let inner = open_device(&source, &options, frontend)?;
        let place = (socket.to_owned(), device.to_owned());
        let companion = DeviceCompanion::start((channel, serves), place, Arc::clone(&inner));
        let companion = companion.map_err(failed)?;
        Ok(BoundDevice { inner, companion })
    }

    fn open(rest: &OsStr, settings: BoundSettings) -> SourceResult<BoundDevice> {
        let socket = PathBuf::from(rest);
        let Some(device) = settings.device else {
            let shown = socket.display();
            let text = format!("bound:{shown} names no device: add the option device=/PATH");
            return Err(SourceOpenError::Usage(text));
        };
        BoundDevice::take(&socket, &device, settings.frontend)
    }
}

impl FileSystem for BoundDevice {
    delegate!(to inner, except caps);

    /// Others change it through the manager, which notifies frontends as each of them needs. All
    /// clients share the locks.
    fn caps(&self) -> Caps {
        let inner = self.inner.caps();
        Caps { exclusive: false, locks: LockSupport::FileSystem, of_one_process: true, ..inner }
    }
}

impl Drop for BoundDevice {
    fn drop(&mut self) {
        // Nothing comes from others any more, and the manager waits for the end of the connection.
        self.companion.part();
        // The last reference: the device is closed.
        self.inner = Arc::new(AbsentFileSystem(Errno::ENODEV));
        self.companion.end();
    }
}

impl std::fmt::Debug for BoundDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound").field("companion", &self.companion).finish_non_exhaustive()
    }
}

fn request_error(socket: &Path, device: &str, errno: Errno) -> SourceOpenError {
    let shown = socket.display();
    SourceOpenError::Failed(format!(
        "{device} of the manager at {shown}: asking for it: {errno}; is {shown} the socket of `defuse manager`, and \
         this user in its `admit`?"
    ))
}

/// The answer of a manager that gives a device: the source with its options, and the socket to
/// serve on.
pub(crate) struct DeviceGrant {
    source: String,
    options: Vec<String>,
    pub(crate) socket: OwnedFd,
}

/// Waits for the manager to give the device.
pub(crate) fn wait_for_grant(
    channel: &ManagerChannel<OwnedFd>,
    socket: &Path,
    device: &str,
) -> SourceResult<DeviceGrant> {
    let shown = socket.display();
    match channel.next_answer(GIVE_PATIENCE) {
        Ok(Some(ManagerMessage::Granted { source, options, socket })) => {
            Ok(DeviceGrant { source, options, socket })
        }
        Ok(Some(ManagerMessage::Refused { errno, why })) => {
            let text = format!("{device} of the manager at {shown}: {why} ({errno})");
            Err(if errno == Errno::EBUSY {
                SourceOpenError::Busy(text)
            } else {
                SourceOpenError::Failed(text)
            })
        }
        Ok(Some(_)) => Err(request_error(socket, device, Errno::EPROTO)),
        Ok(None) => Err(request_error(socket, device, Errno::ETIMEDOUT)),
        Err(errno) => Err(request_error(socket, device, errno)),
    }
}

fn open_device(
    source: &str,
    options: &[String],
    frontend: FrontendProperties,
) -> SourceResult<Arc<dyn FileSystem>> {
    let source = DEVICES.parse(OsStr::new(source))?;
    if source.kind.images().is_none() {
        let shown = source.text().display().to_string();
        return Err(SourceOpenError::Failed(format!("{shown} is no device: it cannot be bound")));
    }
    // Locks of this process and of others are kept in one place.
    let frontend = FrontendProperties { locks: LockPlace::FileSystem, ..frontend };
    let mut settings = SourceSettings::for_frontend(frontend);
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
            Err(SourceOpenError::Busy(_)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_fs::source::SourceKind;

    #[test]
    fn a_source_without_a_device_or_a_manager_names_the_next_step() {
        let dir = tempfile::TempDir::with_prefix("defuse-bound-").unwrap();
        let socket = dir.path().join("socket");
        let open = |options: &[&str]| {
            let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
            BOUND.open(socket.as_os_str(), &FrontendProperties::default(), &options).err().unwrap()
        };
        assert!(matches!(open(&[]), SourceOpenError::Usage(text) if text.contains("device=/PATH")));
        assert!(
            matches!(open(&["device=fast"]), SourceOpenError::Usage(text) if text.contains("/fast"))
        );
        let none = open(&["device=/fast"]).to_string();
        assert!(none.contains("defuse manager") && none.contains("socket"), "{none}");
    }

    /// A manager could otherwise make its applications start programs.
    #[test]
    fn only_devices_are_opened() {
        for source in ["fuse:sh -c id", "memory:", "passthrough:/", "gluster://host/vol"] {
            let error =
                open_device(source, &[], FrontendProperties::default()).err().unwrap().to_string();
            assert!(error.contains("no sources of type") || error.contains("no device"), "{error}");
        }
    }
}
