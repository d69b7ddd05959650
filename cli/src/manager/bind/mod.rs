//! Devices that applications bind: the conversation with each (`defuse_bound::protocol`), and what
//! follows from it.
//!
//! One thread talks to one application, from its first word to its end. It gives the device by
//! ending the manager's own instance first, checks from time to time that the process is alive, and
//! sees the end of the connection. Whatever ends the conversation, the device has no holder then,
//! and another thread opens it for the manager.

mod device;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_bound::protocol::{ApplicationMessage, FIRST, ManagerChannel, ManagerMessage};
use defuse_fs::Errno;
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_socket::{OtherProtocol, PeerProcess};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

pub use device::{BindableDevice, DeviceHolder};

/// The time for the first words.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);
/// The time for an application to open or to close the device.
const OPEN_PATIENCE: Duration = Duration::from_secs(60);
/// A request may take so many times the limit for signs of life.
const REQUEST_LIMITS: u32 = 6;

/// All devices that applications may bind.
#[derive(Debug)]
pub struct DeviceBinder {
    devices: Vec<Arc<BindableDevice>>,
    limit: Duration,
}

/// The end of a conversation.
enum ConversationEnd {
    /// The application gives the device back.
    Return,
    /// It has ended, or breaks the rules, or does not answer.
    Lost(String),
    /// The manager ends.
    Manager,
}

impl DeviceBinder {
    pub fn new(devices: Vec<Arc<BindableDevice>>, limit: Duration) -> DeviceBinder {
        DeviceBinder { devices, limit }
    }

    /// The one at `path`, if applications may bind it.
    pub fn device(&self, path: &str) -> Option<&Arc<BindableDevice>> {
        self.devices.iter().find(|device| device.path == path)
    }

    /// The manager ends: nothing is opened any more.
    pub fn end(&self) {
        self.devices.iter().for_each(|device| device.end());
    }

    fn serve_application<S: AsFd>(
        &self,
        channel: &ManagerChannel<S>,
        who: PeerProcess,
        is_ending: &dyn Fn() -> bool,
    ) {
        let (path, keeps) = match channel.next_ask(FIRST_PATIENCE) {
            Ok(Some(ApplicationMessage::Take(path))) => (path, false),
            Ok(Some(ApplicationMessage::Keep(path))) => (path, true),
            _ => return,
        };
        let refuse = |errno, why: String| {
            log::debug!("process {} of user {}: {path:?}: {why}", who.pid, who.uid);
            let _ = channel.answer(&ManagerMessage::Refused { errno, why });
        };
        let Some(device) = self.device(&path) else {
            let why = "no application may have it: the device needs `bind` in the manager's configuration";
            return refuse(Errno::EACCES, why.to_owned());
        };
        if !device.admits(who.uid) {
            let why = format!("user {} may not have it: add it to `bind` of the device", who.uid);
            return refuse(Errno::EACCES, why);
        }
        let before = match device.claim(who, self.limit) {
            Ok(before) => before,
            Err(holder) => {
                return refuse(Errno::EBUSY, format!("{holder}: wait for it, or end that process"));
            }
        };
        if before == DeviceHolder::Manager {
            let refused = match keeps {
                true => Err(Errno::EBUSY),
                // Calls in progress end, and everything is durable.
                false => device.moving.leave_server(self.limit),
            };
            if let Err(errno) = refused {
                device.is(DeviceHolder::Manager);
                let why = match errno {
                    Errno::EBUSY => format!("calls of others do not end within {:?}", self.limit),
                    errno => format!("the manager cannot make it durable before: {errno}"),
                };
                log::warn!("{}: process {} does not get it: {why}", device.path, who.pid);
                return refuse(errno, format!("{why}: try again"));
            }
        }
        let end = self.give_device(channel, device, who, is_ending);
        self.finish_conversation(channel, device, who, end);
    }

    /// The device is the application's, until the end.
    fn give_device<S: AsFd>(
        &self,
        channel: &ManagerChannel<S>,
        device: &BindableDevice,
        who: PeerProcess,
        is_ending: &dyn Fn() -> bool,
    ) -> ConversationEnd {
        let PeerProcess { pid, uid } = who;
        let remote = match self.await_open(channel, device, is_ending) {
            Ok(remote) => remote,
            Err(end) => return end,
        };
        device.moving.give_remote(remote);
        device.is(DeviceHolder::Application { pid, uid, serving: true });
        log::warn!("{}: {}", device.path, device.holder());
        if channel.answer(&ManagerMessage::Served).is_err() {
            return ConversationEnd::Lost(format!("process {pid} does not listen"));
        }
        self.stay(channel, device, who, is_ending)
    }

    /// Waits until the application has opened the device and answers.
    fn await_open<S: AsFd>(
        &self,
        channel: &ManagerChannel<S>,
        device: &BindableDevice,
        is_ending: &dyn Fn() -> bool,
    ) -> Result<RemoteClient, ConversationEnd> {
        let lost =
            |why: String| ConversationEnd::Lost(format!("the application did not open it: {why}"));
        let flags = SocketFlags::CLOEXEC;
        let (own, socket) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|error| lost(error.to_string()))?;
        let (source, options) = device.source();
        let granted = channel.answer(&ManagerMessage::Granted { source, options, socket });
        granted.map_err(|errno| lost(errno.to_string()))?;
        let until = Instant::now() + OPEN_PATIENCE;
        loop {
            match channel.next_ask(self.tick()) {
                Ok(Some(ApplicationMessage::Serving)) => break,
                Ok(None) if Instant::now() < until && !is_ending() => {}
                _ if is_ending() => return Err(ConversationEnd::Manager),
                Ok(_) => return Err(lost("it does not say so".to_owned())),
                Err(errno) => return Err(lost(errno.to_string())),
            }
        }
        let timeout = Some(REQUEST_LIMITS * self.limit);
        let options =
            RemoteOptions { timeout, lanes: LaneUse::IfOffered, ..RemoteOptions::default() };
        RemoteClient::from_socket(own, options).map_err(|error| lost(error.to_string()))
    }

    /// Looks after the application until the end.
    fn stay<S: AsFd>(
        &self,
        channel: &ManagerChannel<S>,
        device: &BindableDevice,
        who: PeerProcess,
        is_ending: &dyn Fn() -> bool,
    ) -> ConversationEnd {
        let pid = who.pid;
        let (mut said, mut requested) = (Instant::now(), None::<Instant>);
        loop {
            let next = channel.next_ask(self.tick());
            if is_ending() {
                return ConversationEnd::Manager;
            }
            match next {
                Ok(Some(ApplicationMessage::Pong)) if requested.take().is_some() => {
                    said = Instant::now()
                }
                Ok(Some(ApplicationMessage::Return)) => return ConversationEnd::Return,
                Ok(Some(_)) | Err(Errno::EPROTO) => {
                    return ConversationEnd::Lost(format!("process {pid} breaks the rules"));
                }
                Ok(None) => {}
                Err(_) => {
                    return ConversationEnd::Lost(format!(
                        "process {pid} has ended without giving it back"
                    ));
                }
            }
            if !device.moving.is_served() {
                return ConversationEnd::Lost(format!("process {pid} does not answer requests"));
            }
            match requested {
                Some(requested) if requested.elapsed() > self.limit => {
                    let limit = self.limit;
                    return ConversationEnd::Lost(format!(
                        "process {pid} gives no sign of life for {limit:?}"
                    ));
                }
                None if said.elapsed() > self.limit / 4 => {
                    // One that does not receive does not answer either.
                    let _ = channel.answer(&ManagerMessage::Ping);
                    requested = Some(Instant::now());
                }
                _ => {}
            }
        }
    }

    fn finish_conversation<S: AsFd>(
        &self,
        channel: &ManagerChannel<S>,
        device: &Arc<BindableDevice>,
        who: PeerProcess,
        end: ConversationEnd,
    ) {
        let PeerProcess { pid, uid } = who;
        match end {
            // The application has the device, and serves no other process any more.
            ConversationEnd::Manager => {}
            ConversationEnd::Lost(why) => {
                log::warn!("{}: {why}", device.path);
                device.is_lost(why);
            }
            ConversationEnd::Return => {
                device.is(DeviceHolder::Application { pid, uid, serving: false });
                if let Err(errno) = device.moving.leave_server(self.limit) {
                    log::error!(
                        "{}: process {pid} gives it back, and not all is durable: {errno}",
                        device.path
                    );
                    device.moving.lose();
                }
                let _ = channel.answer(&ManagerMessage::Quiet);
                let until = Instant::now() + OPEN_PATIENCE;
                while Instant::now() < until && channel.next_ask(self.tick()).is_ok() {}
                log::info!("{}: process {pid} has given it back", device.path);
                device.is_nobodys(format!("process {pid} closes it"));
            }
        }
    }

    fn tick(&self) -> Duration {
        (self.limit / 16).clamp(Duration::from_millis(5), Duration::from_millis(250))
    }
}

impl OtherProtocol for DeviceBinder {
    fn knows(&self, first: &[u8]) -> bool {
        first.starts_with(FIRST)
    }

    /// Runs on a thread with a larger stack than a client's thread has: the end of a file system
    /// may need it.
    fn serve(&self, socket: &OwnedFd, who: PeerProcess, is_ending: &(dyn Fn() -> bool + Sync)) {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("defuse-bind".to_owned());
            let talk = || self.serve_application(&ManagerChannel::new(socket), who, is_ending);
            if let Err(error) = thread.spawn_scoped(scope, talk) {
                log::warn!("process {} cannot bind: no thread: {error}", who.pid);
            }
        });
    }
}
