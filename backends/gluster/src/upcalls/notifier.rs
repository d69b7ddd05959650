//! The upcall notifier: a thread that passes messages of servers on to frontends, and notices when
//! a server cannot send any.

use std::ffi::CString;
use std::io::Result;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_fs::{Errno, Ino, Name, Notify};

use super::events::NAME_CHANGED;
use super::names::NameBytes;
use super::volfile::{self, Brick};
use super::{CacheCoherence, lock};
use crate::ManagementTransport;
use crate::nodes::GlusterInodes;
use crate::volume::{Gfid, VolumeConnection};

/// Time between two checks of the connections. libgfapi connects again after three seconds at the
/// earliest.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Time between two queries for the configuration of the volume.
const ASK_EVERY: Duration = Duration::from_secs(30);

/// Time after which an invalidation is repeated: it may have overtaken an answer that the frontend
/// had not received yet.
const REPEAT_AFTER: Duration = Duration::from_millis(200);

/// Time in which messages about one inode are combined. A file to which another client writes all
/// the time would otherwise keep a processor busy.
const GATHER: Duration = Duration::from_millis(5);

/// Time for a server to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// The parameters of queries to the management servers.
#[derive(Clone, Debug)]
pub(crate) struct VolfileQuery {
    /// Hosts with their ports, or the path of a socket.
    pub servers: Vec<(String, u16)>,
    pub transport: ManagementTransport,
    pub volume: String,
    /// The longest time for which frontends may cache.
    pub at_most: Duration,
}

impl VolfileQuery {
    /// The time for which frontends may cache, or the reason why they may not.
    pub fn long(&self) -> std::result::Result<Duration, String> {
        if self.at_most.is_zero() {
            return Err("upcalls=0".to_owned());
        }
        let queried = self.fetch(&self.volume).and_then(|text| {
            let bricks = volfile::bricks(&text);
            bricks.first().map(|brick| self.fetch(&brick.key(&self.volume))).transpose()
        });
        match queried {
            Ok(Some(text)) => match volfile::find_upcall_timeout(&text) {
                Some(time) => Ok((time / 2).min(self.at_most)),
                None => Err(format!(
                    "`gluster volume set {} features.cache-invalidation on` would allow it",
                    self.volume
                )),
            },
            Ok(None) => Err("its configuration names no bricks".to_owned()),
            Err(error) => Err(format!("its servers do not send their configuration: {error}")),
        }
    }

    fn fetch(&self, key: &str) -> Result<String> {
        let mut last = Err(std::io::Error::other("no server"));
        for (server, port) in &self.servers {
            last = match self.transport {
                ManagementTransport::Unix => UnixStream::connect(server).and_then(|mut stream| {
                    stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
                    volfile::fetch(&mut stream, key)
                }),
                ManagementTransport::Tcp => tcp(server, *port).and_then(|mut stream| {
                    stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
                    stream.set_write_timeout(Some(ANSWERS_WITHIN))?;
                    volfile::fetch(&mut stream, key)
                }),
            };
            if last.is_ok() {
                break;
            }
        }
        last
    }
}

fn tcp(server: &str, port: u16) -> Result<TcpStream> {
    let none = || std::io::Error::other("the name has no address");
    let address = (server, port).to_socket_addrs()?.next().ok_or_else(none)?;
    TcpStream::connect_timeout(&address, ANSWERS_WITHIN)
}

/// A message to a frontend.
enum FrontendNotice {
    Attributes(Ino),
    Name(Ino, NameBytes),
}

/// The state of the upcall notifier.
pub(crate) struct UpcallNotifier {
    pub watch: Arc<CacheCoherence>,
    pub nodes: Arc<GlusterInodes>,
    pub volume: Arc<VolumeConnection>,
    pub asks: VolfileQuery,
    /// The time that the configuration allows.
    pub long: Duration,
    /// The reason why the configuration allows none.
    pub refusal: Option<String>,
}

/// The state of the connections, as last seen.
#[derive(Default, PartialEq, Eq)]
struct BrickConnections {
    /// The configuration that libgfapi uses.
    text: Vec<u8>,
    bricks: Vec<Brick>,
    /// All bricks are connected.
    are_up: bool,
}

impl UpcallNotifier {
    /// Runs until the file system ends.
    pub fn run(mut self) {
        self.volume.act_as_process();
        let mut seen = BrickConnections::default();
        let mut repeats: Vec<(Instant, FrontendNotice)> = Vec::new();
        let (mut looked, mut queried) = (None::<Instant>, Instant::now());
        loop {
            if looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
                self.look(&mut seen);
                looked = Some(Instant::now());
            }
            if queried.elapsed() >= ASK_EVERY {
                self.ask(&seen);
                queried = Instant::now();
            }
            let next = repeats.first().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            let taken = self.watch.inbox.take(next.unwrap_or(LOOK_EVERY).min(LOOK_EVERY));
            if taken.ended {
                self.watch.note_writes(true);
                self.watch.keep_for(Duration::ZERO);
                return;
            }
            let due = repeats.partition_point(|(at, _)| *at <= Instant::now());
            self.send(repeats.drain(..due).map(|(_, notice)| notice).collect::<Vec<_>>().iter());
            let mut notices: Vec<FrontendNotice> =
                taken.reports.iter().flat_map(|&(gfid, flags)| self.notices(gfid, flags)).collect();
            let named = taken.names.into_iter();
            notices.extend(
                named.filter_map(|(dir, name)| {
                    Some(FrontendNotice::Name(self.nodes.ino(dir)?, name))
                }),
            );
            if taken.lost {
                notices.extend(self.list_all());
            }
            self.send(notices.iter());
            self.watch.inbox.record_delivery(taken.until);
            let at = Instant::now() + REPEAT_AFTER;
            repeats.extend(notices.into_iter().map(|notice| (at, notice)));
            if !taken.reports.is_empty() {
                std::thread::sleep(GATHER);
            }
        }
    }

    /// The notices for everything that frontends keep of an inode. They may not keep it any more.
    fn notices(&self, gfid: Gfid, flags: u64) -> Vec<FrontendNotice> {
        let (mut notices, ino) = (Vec::new(), self.nodes.ino(gfid));
        let mut names = lock(&self.watch.names);
        // The names are removed even if no frontend knows the directory.
        let of_dir = names.take(gfid, Instant::now());
        let Some(ino) = ino else { return notices };
        let is_name = flags & NAME_CHANGED != 0;
        if self.nodes.take_attributes(ino) {
            notices.push(FrontendNotice::Attributes(ino));
        }
        if is_name {
            self.nodes.take_kept(ino);
        }
        for (name, listed) in of_dir {
            notices.push(FrontendNotice::Name(ino, name));
            let listed = listed.filter(|&listed| self.nodes.take_attributes(listed));
            notices.extend(listed.map(FrontendNotice::Attributes));
        }
        if is_name
            && let Ok(Some(parent)) = self.nodes.parent(ino)
            && let Some(parent_ino) = self.nodes.ino(parent)
        {
            let own = names.take_child(parent, ino);
            notices.extend(own.into_iter().map(|name| FrontendNotice::Name(parent_ino, name)));
        }
        notices
    }

    /// Everything that frontends keep.
    fn list_all(&self) -> Vec<FrontendNotice> {
        let mut notices: Vec<FrontendNotice> =
            self.nodes.take_all_kept().into_iter().map(FrontendNotice::Attributes).collect();
        for (dir, names) in lock(&self.watch.names).take_all() {
            let Some(ino) = self.nodes.ino(dir) else { continue };
            notices.extend(names.into_iter().map(|name| FrontendNotice::Name(ino, name)));
        }
        notices
    }

    fn send<'a>(&self, notices: impl Iterator<Item = &'a FrontendNotice> + Clone) {
        for frontend in self.watch.frontends() {
            notices.clone().for_each(|notice| notice.send(&*frontend));
        }
    }

    /// Checks the connections. A server that was away has forgotten which files this client knows,
    /// and has not reported changes.
    fn look(&self, seen: &mut BrickConnections) {
        let now = self.connections(seen);
        if now == *seen {
            return;
        }
        let had_some = !seen.bricks.is_empty();
        *seen = now;
        let text = String::from_utf8_lossy(&seen.text);
        self.watch.note_writes(!seen.are_up || volfile::holds_writes(&text));
        // In this order, servers report changes of everything that is fetched from now on.
        self.keep(seen);
        if had_some {
            log::info!("a server of GlusterFS was away, or the volume has new options");
            self.watch.inbox.put_all();
        }
    }

    /// Lets frontends cache for as long as configuration and connections allow.
    fn keep(&self, seen: &BrickConnections) {
        if !seen.are_up {
            self.watch.note_reason("not all of its servers are connected");
        } else if let Some(reason) = &self.refusal {
            self.watch.note_reason(reason.as_str());
        } else {
            // This is the reason if that time is no longer than the short time.
            self.watch.note_reason(format!("its servers report changes for {:?}", 2 * self.long));
        }
        self.watch.keep_for(if seen.are_up { self.long } else { Duration::ZERO });
    }

    fn connections(&self, seen: &BrickConnections) -> BrickConnections {
        let Ok(text) = self.volume.internal(c"/.meta/graphs/active/volfile") else {
            return BrickConnections::default();
        };
        let bricks = match seen.text == text {
            true => seen.bricks.clone(),
            false => volfile::bricks(&String::from_utf8_lossy(&text)),
        };
        let are_up = !bricks.is_empty() && bricks.iter().all(|brick| self.is_connected(brick));
        BrickConnections { text, bricks, are_up }
    }

    fn is_connected(&self, brick: &Brick) -> bool {
        let path = format!("/.meta/graphs/active/{}/private", brick.client);
        let Ok(path) = CString::new(path) else { return false };
        let text = self.volume.internal(&path).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().any(|line| line.trim() == "connected = 1")
    }

    /// Queries whether the option is still on, or on again.
    fn ask(&mut self, seen: &BrickConnections) {
        let queried = self.asks.long();
        if let Err(reason) = &queried
            && !self.long.is_zero()
        {
            log::info!("names and attributes are kept for a short time: {reason}");
        }
        let (long, before) = (queried.as_ref().copied().unwrap_or_default(), self.long);
        (self.long, self.refusal) = (long, queried.err());
        if long != before {
            self.keep(seen);
            self.watch.inbox.put_all();
        }
    }
}

impl FrontendNotice {
    /// Sends the notice to a frontend. A frontend that does not know the inode has nothing cached.
    fn send(&self, frontend: &dyn Notify) {
        match self {
            // Data stays: the kernel compares size and times before it uses it.
            FrontendNotice::Attributes(ino) => {
                let _ = frontend.invalidate_inode(*ino, None);
            }
            FrontendNotice::Name(dir, name) => {
                let Ok(name) = Name::new(name) else { return };
                if frontend.invalidate_entry(*dir, name, true) == Err(Errno::ENOSYS) {
                    let _ = frontend.invalidate_entry(*dir, name, false);
                }
            }
        }
    }
}
