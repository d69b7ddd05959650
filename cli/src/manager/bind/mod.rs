//! Devices that applications bind: the conversation with each (`defuse_bound::protocol`), and what follows from it.
//!
//! One thread talks to one application, from its first word to its end. It gives the device by ending the manager's own
//! instance first, asks from time to time if the process is alive, and sees the end of the connection. Whatever ends
//! the conversation, the device is nobody's then, and another thread opens it for the manager.

mod device;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_bound::protocol::{Answer, Ask, Channel, FIRST};
use defuse_fs::Errno;
use defuse_remote::{LaneUse, Remote, RemoteOptions};
use defuse_socket::{Others, Who};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

pub use device::{Bindable, Holder};

/// The time for the first words.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);
/// The time for an application to open or to close the device.
const OPEN_PATIENCE: Duration = Duration::from_secs(60);
/// A request may take so many times the limit for signs of life.
const REQUEST_LIMITS: u32 = 6;

/// All devices that applications may bind.
#[derive(Debug)]
pub struct Binder {
    devices: Vec<Arc<Bindable>>,
    limit: Duration,
}

/// The end of a conversation.
enum End {
    /// The application gives the device back.
    Return,
    /// It has ended, or breaks the rules, or does not answer.
    Lost(String),
    /// The manager ends.
    Manager,
}

impl Binder {
    pub fn new(devices: Vec<Arc<Bindable>>, limit: Duration) -> Binder {
        Binder { devices, limit }
    }

    /// The one at `path`, if applications may bind it.
    pub fn device(&self, path: &str) -> Option<&Arc<Bindable>> {
        self.devices.iter().find(|device| device.path == path)
    }

    /// The manager ends: nothing is opened any more.
    pub fn end(&self) {
        self.devices.iter().for_each(|device| device.end());
    }

    fn talk<S: AsFd>(&self, channel: &Channel<S>, who: Who, is_ending: &dyn Fn() -> bool) {
        let (path, keeps) = match channel.next_ask(FIRST_PATIENCE) {
            Ok(Some(Ask::Take(path))) => (path, false),
            Ok(Some(Ask::Keep(path))) => (path, true),
            _ => return,
        };
        let refuse = |errno, why: String| {
            log::debug!("process {} of user {}: {path:?}: {why}", who.pid, who.uid);
            let _ = channel.answer(&Answer::Refused { errno, why });
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
        if before == Holder::Manager {
            let refused = match keeps {
                true => Err(Errno::EBUSY),
                // What is in progress ends, and everything is durable.
                false => device.moving.leave(self.limit),
            };
            if let Err(errno) = refused {
                device.is(Holder::Manager);
                let why = match errno {
                    Errno::EBUSY => format!("calls of others do not end within {:?}", self.limit),
                    errno => format!("the manager cannot make it durable before: {errno}"),
                };
                log::warn!("{}: process {} does not get it: {why}", device.path, who.pid);
                return refuse(errno, format!("{why}: try again"));
            }
        }
        let end = self.given(channel, device, who, is_ending);
        self.ended(channel, device, who, end);
    }

    /// The device is the application's, until the end.
    fn given<S: AsFd>(
        &self,
        channel: &Channel<S>,
        device: &Bindable,
        who: Who,
        is_ending: &dyn Fn() -> bool,
    ) -> End {
        let Who { pid, uid } = who;
        let remote = match self.opened(channel, device, is_ending) {
            Ok(remote) => remote,
            Err(end) => return end,
        };
        device.moving.give_remote(remote);
        device.is(Holder::Application { pid, uid, serving: true });
        log::warn!("{}: {}", device.path, device.holder());
        if channel.answer(&Answer::Served).is_err() {
            return End::Lost(format!("process {pid} does not listen"));
        }
        self.stay(channel, device, who, is_ending)
    }

    /// Waits until the application has opened the device and answers.
    fn opened<S: AsFd>(
        &self,
        channel: &Channel<S>,
        device: &Bindable,
        is_ending: &dyn Fn() -> bool,
    ) -> Result<Remote, End> {
        let lost = |why: String| End::Lost(format!("the application did not open it: {why}"));
        let flags = SocketFlags::CLOEXEC;
        let (own, socket) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|error| lost(error.to_string()))?;
        let (source, options) = device.source();
        let granted = channel.answer(&Answer::Granted { source, options, socket });
        granted.map_err(|errno| lost(errno.to_string()))?;
        let until = Instant::now() + OPEN_PATIENCE;
        loop {
            match channel.next_ask(self.tick()) {
                Ok(Some(Ask::Serving)) => break,
                Ok(None) if Instant::now() < until && !is_ending() => {}
                _ if is_ending() => return Err(End::Manager),
                Ok(_) => return Err(lost("it does not say so".to_owned())),
                Err(errno) => return Err(lost(errno.to_string())),
            }
        }
        let timeout = Some(REQUEST_LIMITS * self.limit);
        let options =
            RemoteOptions { timeout, lanes: LaneUse::IfOffered, ..RemoteOptions::default() };
        Remote::over(own, options).map_err(|error| lost(error.to_string()))
    }

    /// Looks after the application until the end.
    fn stay<S: AsFd>(
        &self,
        channel: &Channel<S>,
        device: &Bindable,
        who: Who,
        is_ending: &dyn Fn() -> bool,
    ) -> End {
        let pid = who.pid;
        let (mut said, mut asked) = (Instant::now(), None::<Instant>);
        loop {
            let next = channel.next_ask(self.tick());
            if is_ending() {
                return End::Manager;
            }
            match next {
                Ok(Some(Ask::Pong)) if asked.take().is_some() => said = Instant::now(),
                Ok(Some(Ask::Return)) => return End::Return,
                Ok(Some(_)) | Err(Errno::EPROTO) => {
                    return End::Lost(format!("process {pid} breaks the rules"));
                }
                Ok(None) => {}
                Err(_) => {
                    return End::Lost(format!("process {pid} has ended without giving it back"));
                }
            }
            if !device.moving.is_served() {
                return End::Lost(format!("process {pid} does not answer requests"));
            }
            match asked {
                Some(asked) if asked.elapsed() > self.limit => {
                    let limit = self.limit;
                    return End::Lost(format!("process {pid} gives no sign of life for {limit:?}"));
                }
                None if said.elapsed() > self.limit / 4 => {
                    // One that does not receive does not answer either.
                    let _ = channel.answer(&Answer::Ping);
                    asked = Some(Instant::now());
                }
                _ => {}
            }
        }
    }

    fn ended<S: AsFd>(&self, channel: &Channel<S>, device: &Arc<Bindable>, who: Who, end: End) {
        let Who { pid, uid } = who;
        match end {
            // It has the device, and serves nobody any more.
            End::Manager => {}
            End::Lost(why) => {
                log::warn!("{}: {why}", device.path);
                device.is_lost(why);
            }
            End::Return => {
                device.is(Holder::Application { pid, uid, serving: false });
                if let Err(errno) = device.moving.leave(self.limit) {
                    log::error!(
                        "{}: process {pid} gives it back, and not all is durable: {errno}",
                        device.path
                    );
                    device.moving.lose();
                }
                let _ = channel.answer(&Answer::Quiet);
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

impl Others for Binder {
    fn knows(&self, first: &[u8]) -> bool {
        first.starts_with(FIRST)
    }

    /// On a thread with a larger stack than that of a client: the end of a file system may need it.
    fn serve(&self, socket: &OwnedFd, who: Who, is_ending: &(dyn Fn() -> bool + Sync)) {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("defuse-bind".to_owned());
            let talk = || self.talk(&Channel::new(socket), who, is_ending);
            if let Err(error) = thread.spawn_scoped(scope, talk) {
                log::warn!("process {} cannot bind: no thread: {error}", who.pid);
            }
        });
    }
}
