//! The side of the application: serves the manager, and reports that the process is alive.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use defuse_fs::source::SourceOpenError;
use defuse_fs::{Errno, FileSystem, Result};
use defuse_shared::LaneOffers;
use defuse_socket::{ServerOptions, serve_one};
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, shutdown};

use crate::open::wait_for_grant;
use crate::protocol::{ApplicationMessage, ManagerChannel, ManagerMessage};

/// The time for the manager to take the socket that is served.
const SERVED_PATIENCE: Duration = Duration::from_secs(60);
/// The time for the manager to end what is in progress, when the device is given back.
const RETURN_PATIENCE: Duration = Duration::from_secs(60);
/// The interval at which a thread looks if the end has come.
const TICK: Duration = Duration::from_millis(100);
/// The pauses between attempts to find the next manager.
const PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(5)];

/// The device's socket at its manager, and its path in the tree.
type DevicePlace = (PathBuf, String);

/// The devices that this process has.
static LIVING: Mutex<Vec<Weak<CompanionShared>>> = Mutex::new(Vec::new());

/// Gives all devices back that this process has bound, before it ends: others use them no more, and
/// the manager opens each when this process has ended. A program calls it whose file systems are
/// not dropped at its end. One that another thread drops at this moment is waited for.
pub fn give_back_all() {
    let living: Vec<_> = lock(&LIVING).drain(..).collect();
    for one in living.iter().filter_map(Weak::upgrade) {
        one.part();
        one.await_close(RETURN_PATIENCE);
    }
}

/// The threads beside a device that this process has.
pub(crate) struct DeviceCompanion(Arc<CompanionShared>);

struct CompanionShared {
    thread: Mutex<Option<JoinHandle<()>>>,
    place: DevicePlace,
    /// Until the device is closed.
    fs: Mutex<Option<Arc<dyn FileSystem>>>,
    /// The connection to the manager, if there is one.
    channel: Mutex<Option<Arc<ManagerChannel<OwnedFd>>>>,
    ending: AtomicBool,
    close: Mutex<CloseState>,
    closed: Condvar,
}

/// The end of the device in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CloseState {
    #[default]
    NotBegun,
    /// A thread closes it.
    Begun,
    Done,
}

/// The service of one manager.
struct ManagerService {
    socket: OwnedFd,
    thread: JoinHandle<()>,
}

impl DeviceCompanion {
    /// Serves `fs` to the manager at the other end of `channel`, which has just given the device.
    pub(crate) fn start(
        (channel, serves): (ManagerChannel<OwnedFd>, OwnedFd),
        place: DevicePlace,
        fs: Arc<dyn FileSystem>,
    ) -> Result<DeviceCompanion> {
        let service = ManagerService::start(&channel, serves, fs.clone())?;
        let channel = Arc::new(channel);
        let shared = Arc::new(CompanionShared {
            thread: Mutex::default(),
            place,
            fs: Mutex::new(Some(fs)),
            channel: Mutex::new(Some(Arc::clone(&channel))),
            ending: AtomicBool::new(false),
            close: Mutex::default(),
            closed: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let thread = Builder::new().name("defuse-bound".to_owned());
        let thread = thread.spawn(move || own.stay(channel, service))?;
        *lock(&shared.thread) = Some(thread);
        let mut living = lock(&LIVING);
        living.retain(|one| one.strong_count() > 0);
        living.push(Arc::downgrade(&shared));
        drop(living);
        Ok(DeviceCompanion(shared))
    }

    /// Ends the service, and begins to close the device. Afterwards no other process uses the file
    /// system.
    pub(crate) fn part(&self) {
        *lock(&self.0.close) = CloseState::Begun;
        self.0.part();
    }

    /// Ends the connection to the manager, which opens the device then: it is closed.
    pub(crate) fn end(&self) {
        lock(&self.0.channel).take();
        *lock(&self.0.close) = CloseState::Done;
        self.0.closed.notify_all();
    }
}

impl std::fmt::Debug for DeviceCompanion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Companion").field(&self.0.place).finish()
    }
}

impl CompanionShared {
    /// Ends the service. A second caller waits for the first.
    fn part(&self) {
        let mut thread = lock(&self.thread);
        if let Some(thread) = thread.take() {
            self.ending.store(true, Ordering::SeqCst);
            if let Some(channel) = &*lock(&self.channel) {
                let _ = channel.send_request(&ApplicationMessage::Return);
            }
            if thread.join().is_err() {
                log::error!("the thread of a bound device has panicked");
            }
            lock(&self.fs).take();
        }
    }

    /// Waits until another thread that closes the device has done so.
    fn await_close(&self, limit: Duration) {
        let close = lock(&self.close);
        let begun = |close: &mut CloseState| *close == CloseState::Begun;
        let waited = self.closed.wait_timeout_while(close, limit, begun);
        if waited.is_ok_and(|(_, waited)| waited.timed_out()) {
            log::warn!("{}: a bound device is not closed yet", self.place.1);
        }
    }

    /// Stays with one manager after the other.
    fn stay(&self, mut channel: Arc<ManagerChannel<OwnedFd>>, mut service: ManagerService) {
        loop {
            self.serve_manager(&channel);
            drop(service);
            if self.is_ending() {
                // The channel stays until the device is closed.
                return;
            }
            let (socket, device) = (self.place.0.display(), &self.place.1);
            log::warn!(
                "{device} of the manager at {socket}: it has ended or given up this process: trying again"
            );
            drop(channel);
            lock(&self.channel).take();
            let Some((found, next)) = self.find_again() else { return };
            log::warn!("{device} of the manager at {socket}: others reach it again");
            channel = Arc::new(found);
            service = next;
            *lock(&self.channel) = Some(Arc::clone(&channel));
            if self.is_ending() {
                let _ = channel.send_request(&ApplicationMessage::Return);
            }
        }
    }

    /// Answers the manager until it has gone, or nothing is in progress at the end.
    fn serve_manager(&self, channel: &ManagerChannel<OwnedFd>) {
        let mut until = None;
        loop {
            match channel.next_answer(TICK) {
                Ok(Some(ManagerMessage::Ping)) => {
                    let _ = channel.send_request(&ApplicationMessage::Pong);
                }
                Ok(Some(ManagerMessage::Quiet)) if self.is_ending() => return,
                Ok(Some(other)) => {
                    log::warn!("unexpected message of a manager: {other:?}");
                    return;
                }
                Ok(None) => {}
                Err(errno) => {
                    log::debug!("the connection to a manager has ended: {errno}");
                    return;
                }
            }
            if self.is_ending() {
                let until = *until.get_or_insert_with(|| Instant::now() + RETURN_PATIENCE);
                if Instant::now() > until {
                    log::warn!("a manager does not end its calls: they get errors");
                    return;
                }
            }
        }
    }

    /// Waits for a manager that takes this process with its device.
    fn find_again(&self) -> Option<(ManagerChannel<OwnedFd>, ManagerService)> {
        let (mut pause, mut reported) = (PAUSES[0], String::new());
        loop {
            let next = Instant::now() + pause;
            while Instant::now() < next {
                if self.is_ending() {
                    return None;
                }
                std::thread::sleep(TICK.min(pause));
            }
            pause = (2 * pause).min(PAUSES[1]);
            match self.offer() {
                Ok(found) => return Some(found),
                Err(error) => {
                    let why = error.to_string();
                    if why != reported {
                        log::warn!("others do not reach the device: {why}");
                    }
                    reported = why;
                }
            }
        }
    }

    /// Offers the device to the manager that runs at the place now.
    fn offer(
        &self,
    ) -> std::result::Result<(ManagerChannel<OwnedFd>, ManagerService), SourceOpenError> {
        let (socket, device) = &self.place;
        let fs = lock(&self.fs)
            .clone()
            .ok_or_else(|| SourceOpenError::from_error("the device is closed"))?;
        let channel = connect(socket)?;
        channel
            .send_request(&ApplicationMessage::Keep(device.clone()))
            .map_err(SourceOpenError::from_error)?;
        let grant = wait_for_grant(&channel, socket, device)?;
        let service = ManagerService::start(&channel, grant.socket, fs)
            .map_err(SourceOpenError::from_error)?;
        Ok((channel, service))
    }

    fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }
}

impl ManagerService {
    /// Serves `fs` on `socket`, whose other end the manager has.
    fn start(
        channel: &ManagerChannel<OwnedFd>,
        socket: OwnedFd,
        fs: Arc<dyn FileSystem>,
    ) -> Result<ManagerService> {
        let served = socket.try_clone()?;
        let lanes = Some(Arc::new(LaneOffers::default()) as _);
        let options = ServerOptions { lanes, ..ServerOptions::default() };
        let thread = Builder::new().name("defuse-served".to_owned()).spawn(move || {
            if let Err(errno) = serve_one(served, fs, &options, || ()) {
                log::warn!("the service of a manager has ended: {errno}");
            }
        })?;
        let service = ManagerService { socket, thread };
        channel.send_request(&ApplicationMessage::Serving)?;
        match channel.next_answer(SERVED_PATIENCE)? {
            Some(ManagerMessage::Served) => Ok(service),
            Some(ManagerMessage::Refused { errno, why }) => {
                log::warn!("{why}");
                Err(errno)
            }
            Some(_) => Err(Errno::EPROTO),
            None => Err(Errno::ETIMEDOUT),
        }
    }

    fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }
}

impl Drop for ManagerService {
    /// Returns when the service does not use the file system any more.
    fn drop(&mut self) {
        // Requests in progress are answered.
        let _ = shutdown(&self.socket, Shutdown::Read);
        let begun = Instant::now();
        while self.is_running() {
            if begun.elapsed() > SERVED_PATIENCE / 6 {
                let _ = shutdown(&self.socket, Shutdown::Both);
                log::warn!("requests of a manager do not end: the device stays open until they do");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Connects to a manager of root or of the user of this process.
pub(crate) fn connect(
    path: &Path,
) -> std::result::Result<ManagerChannel<OwnedFd>, SourceOpenError> {
    let shown = path.display();
    let failed = |error: rustix::io::Errno| {
        SourceOpenError::Failed(format!(
            "cannot connect to {shown}: {error}; is it the socket of `defuse manager`?"
        ))
    };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(failed)?;
    rustix::net::connect(&socket, &address).map_err(failed)?;
    let uid = defuse_remote::user_of_server(&socket).map_err(SourceOpenError::from_error)?;
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Err(SourceOpenError::Failed(format!(
            "{shown} is served by the untrusted user {uid}, who would see everything on the device: bind devices of \
             root or of the user of this process"
        )));
    }
    Ok(ManagerChannel::new(socket))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The end of a run gave a device back on one thread while another one did, found nothing to
    /// wait for, and ended the process: the calls of others got EIO, and the manager reported a
    /// loss.
    #[test]
    fn a_second_thread_that_gives_a_device_back_waits_for_the_first() {
        let shared = Arc::new(CompanionShared {
            thread: Mutex::default(),
            place: DevicePlace::default(),
            fs: Mutex::default(),
            channel: Mutex::default(),
            ending: AtomicBool::new(false),
            close: Mutex::default(),
            closed: Condvar::new(),
        });
        let (go, wait) = mpsc::channel::<()>();
        let served = Arc::new(AtomicBool::new(true));
        let ends = Arc::clone(&served);
        *lock(&shared.thread) = Some(std::thread::spawn(move || {
            let _ = wait.recv();
            ends.store(false, Ordering::SeqCst);
        }));
        lock(&LIVING).push(Arc::downgrade(&shared));
        let companion = DeviceCompanion(Arc::clone(&shared));
        let closed = Arc::new(AtomicBool::new(false));
        let (parted, was_parted) = mpsc::channel();
        let (ended, is_closed) = (Arc::clone(&served), Arc::clone(&closed));
        let drops = std::thread::spawn(move || {
            companion.part();
            assert!(!ended.load(Ordering::SeqCst));
            parted.send(()).unwrap();
            is_closed.store(true, Ordering::SeqCst);
            companion.end();
        });
        while *lock(&shared.close) != CloseState::Begun {
            std::thread::yield_now();
        }
        let (returned, has_returned) = mpsc::channel();
        let (ended, is_closed) = (Arc::clone(&served), Arc::clone(&closed));
        let gives = std::thread::spawn(move || {
            give_back_all();
            assert!(!ended.load(Ordering::SeqCst) && is_closed.load(Ordering::SeqCst));
            let _ = returned.send(());
        });
        // Time to return too early.
        let early = has_returned.recv_timeout(Duration::from_millis(100));
        assert!(early.is_err() && was_parted.try_recv().is_err());
        go.send(()).unwrap();
        drops.join().unwrap();
        gives.join().unwrap();
    }
}
