//! A device that applications may bind: its holder, and the way in which the manager gets it back.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use defuse_compose::{ParsedSource, SourceOpenError, SourceSettings};
use defuse_fs::FileSystem;
use defuse_fs::source::LockPlace;
use defuse_remote::MovingClient;
use defuse_socket::PeerProcess;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::error::{CommandFailure, Result};
use crate::manager::config::ConfiguredDevice;

/// The pauses between attempts to open a device that another process has.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];

/// The process that has a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum DeviceHolder {
    /// The manager itself.
    Manager,
    /// An application.
    Application {
        /// The process; 0 in another PID namespace.
        pid: i32,
        /// Its user.
        uid: u32,
        /// It answers: others reach the device. Otherwise it is about to open or to close it.
        serving: bool,
    },
    /// No process that the manager reaches. The manager tries to open the device.
    Nobody {
        /// The reason.
        why: String,
    },
}

impl std::fmt::Display for DeviceHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceHolder::Manager => f.write_str("the manager has it"),
            DeviceHolder::Application { pid, uid, serving } => {
                let and = if *serving { "" } else { ", and others do not reach it now" };
                write!(f, "process {pid} of user {uid} has it{and}")
            }
            DeviceHolder::Nobody { why } => write!(f, "others do not reach it: {why}"),
        }
    }
}

/// One of the devices.
pub struct BindableDevice {
    /// The path in the tree, from `/` on.
    pub path: String,
    text: String,
    source: ParsedSource,
    settings: SourceSettings,
    /// Besides root and the user of the manager.
    users: Vec<u32>,
    /// The image itself, whatever happens to its name. `None` for a device of a driver.
    pin: Option<OwnedFd>,
    pub moving: Arc<MovingClient>,
    holder: Mutex<DeviceHolder>,
    /// The manager tries to open it.
    opening: AtomicBool,
    ending: AtomicBool,
}

impl BindableDevice {
    /// The device with this configuration, which has no holder yet.
    pub fn new(one: &ConfiguredDevice, users: Vec<u32>, limit: Duration) -> BindableDevice {
        let path = Path::new(&one.source.rest);
        let pin = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
        BindableDevice {
            path: one.path.clone(),
            text: one.text(),
            source: one.source.clone(),
            settings: one.settings.clone(),
            users,
            pin,
            moving: Arc::new(MovingClient::new(one.text(), limit)),
            holder: Mutex::new(DeviceHolder::Nobody { why: "it was not opened yet".to_owned() }),
            opening: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        }
    }

    /// True if a process of this user may have the device.
    pub fn admits(&self, uid: u32) -> bool {
        uid == 0 || uid == rustix::process::geteuid().as_raw() || self.users.contains(&uid)
    }

    pub fn holder(&self) -> DeviceHolder {
        self.lock().clone()
    }

    pub fn is_own(&self) -> bool {
        *self.lock() == DeviceHolder::Manager
    }

    /// The source and the options by which an application opens the device.
    pub fn source(&self) -> (String, Vec<String>) {
        let mut options = self.settings.options.clone();
        // The thread is for a process that serves many others.
        options.retain(|option| option != super::super::config::WORKER);
        options.extend(self.settings.read_only.then(|| "ro".to_owned()));
        (self.text.clone(), options)
    }

    /// Opens the device at the beginning. The manager retries to open a device that another process
    /// has.
    ///
    /// # Errors
    ///
    /// Fails with the errors of the source.
    pub fn begin(self: &Arc<Self>) -> Result {
        match self.open() {
            Ok(fs) => self.has(fs),
            Err(SourceOpenError::Busy(why)) => {
                log::warn!("{}: {why}; trying again", self.path);
                self.is_nobodys(why);
            }
            Err(error) => return Err(CommandFailure::from(error)),
        }
        Ok(())
    }

    /// An application begins to take the device: from the manager, or without a previous holder.
    ///
    /// # Errors
    ///
    /// Returns the present holder if the application cannot take the device.
    pub fn claim(
        &self,
        who: PeerProcess,
        patience: Duration,
    ) -> std::result::Result<DeviceHolder, DeviceHolder> {
        let deadline = Instant::now() + patience;
        loop {
            {
                let mut holder = self.lock();
                let opening = self.opening.load(Ordering::SeqCst);
                match &*holder {
                    DeviceHolder::Application { .. } => return Err(holder.clone()),
                    DeviceHolder::Manager | DeviceHolder::Nobody { .. } if !opening => {
                        let PeerProcess { pid, uid } = who;
                        let next = DeviceHolder::Application { pid, uid, serving: false };
                        return Ok(std::mem::replace(&mut *holder, next));
                    }
                    DeviceHolder::Manager | DeviceHolder::Nobody { .. } => {}
                }
                if Instant::now() > deadline {
                    return Err(holder.clone());
                }
            }
            std::thread::sleep(PAUSES[0]);
        }
    }

    pub fn is(&self, holder: DeviceHolder) {
        *self.lock() = holder;
    }

    /// Its application does not serve it any more. Callers that need the device meanwhile wait.
    pub fn is_lost(self: &Arc<Self>, why: String) {
        self.opening.store(true, Ordering::SeqCst);
        self.is(DeviceHolder::Nobody { why });
        self.moving.lose();
        self.opening.store(false, Ordering::SeqCst);
        self.await_it();
    }

    /// The device has no holder any more.
    pub fn is_nobodys(self: &Arc<Self>, why: String) {
        self.is(DeviceHolder::Nobody { why });
        self.await_it();
    }

    /// Opens the device when it is free, unless another application claims it first.
    fn await_it(self: &Arc<Self>) {
        let device = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("defuse-takeover".to_owned());
        if let Err(error) = thread.spawn(move || take_over(&device)) {
            log::error!("{}: the manager cannot take it over: no thread: {error}", self.path);
        }
    }

    /// The manager ends: nothing is opened any more.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        while self.opening.load(Ordering::SeqCst) {
            std::thread::sleep(PAUSES[0]);
        }
    }

    /// Opens the device, if it still has no holder. Returns false to try again.
    fn try_to_open(&self) -> bool {
        {
            let holder = self.lock();
            let is_nobodys = matches!(*holder, DeviceHolder::Nobody { .. });
            if !is_nobodys || self.ending.load(Ordering::SeqCst) {
                return true;
            }
            // Another thread may still be here: a device can be lost, taken and given back while it
            // pauses. If two threads open the device, the second finds it taken by this process,
            // and would report that it has no holder.
            if self.opening.swap(true, Ordering::SeqCst) {
                return false;
            }
        }
        let opened = self.open();
        let is_open = opened.is_ok();
        match opened {
            Ok(fs) => {
                log::warn!("{}: the manager has it again", self.path);
                self.has(fs);
            }
            Err(error) => {
                let why = error.to_string();
                let before = std::mem::replace(&mut *self.lock(), DeviceHolder::Nobody { why });
                let holder = self.holder();
                if before != holder {
                    log::warn!("{}: {holder}", self.path);
                }
            }
        }
        self.opening.store(false, Ordering::SeqCst);
        is_open
    }

    fn has(&self, fs: Arc<dyn FileSystem>) {
        self.moving.give_own(fs);
        self.is(DeviceHolder::Manager);
    }

    fn open(&self) -> std::result::Result<Arc<dyn FileSystem>, SourceOpenError> {
        let mut settings = self.settings.clone();
        // The server keeps no locks, so that locks of a frontend would hold for one client only.
        settings.frontend.locks = LockPlace::FileSystem;
        let Some(pin) = &self.pin else { return self.source.open(&settings) };
        let pinned = format!("/proc/self/fd/{}", pin.as_raw_fd());
        let source = ParsedSource { kind: self.source.kind, rest: OsString::from(&pinned) };
        let shown = self.source.rest.display().to_string();
        source.open(&settings).map_err(|error| match error {
            SourceOpenError::Usage(text) => SourceOpenError::Usage(text.replace(&pinned, &shown)),
            SourceOpenError::Failed(text) => SourceOpenError::Failed(text.replace(&pinned, &shown)),
            SourceOpenError::Busy(text) => SourceOpenError::Busy(text.replace(&pinned, &shown)),
            SourceOpenError::Interrupted(text) => {
                SourceOpenError::Interrupted(text.replace(&pinned, &shown))
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, DeviceHolder> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for BindableDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path, self.holder())
    }
}

/// Opens a device when it is free.
fn take_over(device: &Weak<BindableDevice>) {
    let mut pause = PAUSES[0];
    loop {
        match device.upgrade() {
            Some(device) if !device.try_to_open() => {}
            _ => return,
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSES[1]);
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::source::{NewImage, NoWatch};

    use super::*;
    use crate::sources::SOURCES;

    /// If two threads opened at once, the second found the device taken by its own process, and
    /// reported that it had no holder.
    #[test]
    fn of_several_threads_that_take_a_device_over_one_opens_it() {
        let place = tempfile::tempdir().unwrap();
        let image = place.path().join("image");
        let new = NewImage {
            size: Some(64 << 20),
            sparse: true,
            force: false,
            root_perm: 0o755,
            root_uid: 0,
            root_gid: 0,
        };
        let kind = SOURCES.kinds().find(|kind| kind.facts().name == "uhs").unwrap();
        kind.images().unwrap().make(&image, &new, &NoWatch).unwrap();
        let source = SOURCES.parse(format!("uhs:{}", image.display()).as_ref()).unwrap();
        let (path, settings) = ("/one".to_owned(), SourceSettings::default());
        let one = ConfiguredDevice { path, source, settings, bind: Some(Vec::new()), place: 0 };
        for _ in 0..10 {
            let device = Arc::new(BindableDevice::new(&one, Vec::new(), Duration::from_secs(1)));
            (0..4).for_each(|_| device.await_it());
            let begun = Instant::now();
            // Until all have seen it.
            while Arc::weak_count(&device) > 0 {
                let holder = device.holder();
                assert!(begun.elapsed() < Duration::from_secs(60), "{holder}");
                std::thread::sleep(PAUSES[0]);
            }
            assert_eq!(device.holder(), DeviceHolder::Manager);
        }
    }
}
