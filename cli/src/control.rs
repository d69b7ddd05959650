//! The control socket of a daemon: of a mount, or of a server.
//!
//! A client sends one line with a question, receives an answer in JSON, and the connection ends.
//! The daemon answers only its own user and root.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{io, thread};

use defuse_compose::WriteSwitch;
use defuse_fuse::{NegotiatedInit, Session};
use defuse_probe::StatsSnapshot;
use defuse_socket::name::{self, SocketName};
use rustix::fs::Mode;
use rustix::net;
use serde::{Deserialize, Serialize};

use crate::error::{CommandFailure, Result};
use crate::registry::RegisteredMount;
use crate::served::ServerMeasurements;
use crate::servers::ServerEntry;

/// Time limit of the daemon for a whole question, and then for its whole answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time limit of the side that sends a question. The daemon may answer others first.
const PATIENCE_OF_CLIENT: Duration = Duration::from_secs(10);
/// Bytes that one write(2) has at most: the least buffer of the kernel that takes them at once.
const WRITTEN_AT_ONCE: usize = 16 << 10;
/// Question for the statistics.
const STAT: &str = "stat";
/// Questions that allow or refuse changes of the file system. The answer is `true`.
const READ_WRITE: &str = "read-write";
const READ_ONLY: &str = "read-only";
/// Question that changes the maximum number of worker threads, followed by the number. The answer
/// is the reason against it, or `null`.
const WORKERS: &str = "workers=";
/// Maximum length of a question in bytes.
const QUESTION_MAX: u64 = 64;
/// Maximum length of an answer in bytes: a snapshot has some hundred rows, the snapshot of a server
/// has a thousand clients and 255 devices.
const ANSWER_MAX: u64 = 16 << 20;

/// The result of INIT, as JSON shows it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NegotiatedValues {
    /// Minor version of the protocol.
    pub minor: u32,
    /// Maximum bytes in one WRITE.
    pub max_write: usize,
    /// Maximum bytes in one READ.
    pub max_read: usize,
    /// Maximum number of background requests.
    pub max_background: u16,
    /// Maximum number of worker threads.
    pub max_workers: usize,
    /// The policy for worker threads.
    #[serde(default)]
    pub policy: String,
    /// All capabilities.
    pub decisions: Vec<InitCapability>,
}

/// One capability of INIT.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitCapability {
    /// The kernel's name, without `FUSE_`.
    pub name: String,
    /// The capability is in use.
    pub used: bool,
    /// The reason.
    pub reason: String,
}

impl From<&NegotiatedInit> for NegotiatedValues {
    fn from(negotiated: &NegotiatedInit) -> Self {
        let capability = |decision: &defuse_fuse::InitDecision| InitCapability {
            name: decision.name.to_owned(),
            used: decision.used,
            reason: decision.reason.to_owned(),
        };
        NegotiatedValues {
            minor: negotiated.minor,
            max_write: negotiated.max_write,
            max_read: negotiated.max_read,
            max_background: negotiated.max_background,
            max_workers: negotiated.max_workers,
            policy: negotiated.policy.name().to_owned(),
            decisions: negotiated.decisions.iter().map(capability).collect(),
        }
    }
}

/// Listens at `path`.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let (directory, name) = name::parts(path)?;
    let directory = name::open_directory(directory)?;
    // A killed daemon may have left it.
    name::remove_in(&directory, name, None);
    let (family, flags) = (net::AddressFamily::UNIX, net::SocketFlags::CLOEXEC);
    let socket = net::socket_with(family, net::SocketType::STREAM, flags, None)?;
    SocketName::bind_in(&socket, directory, name, Mode::RUSR | Mode::WUSR)?;
    Ok(socket.into())
}

/// The answers of a mount. Answers to unknown questions are `None`.
pub fn for_session(
    session: &Session,
    (writable, can_only_be_read): (WriteSwitch, bool),
) -> impl Fn(&str) -> Option<String> + Send + 'static {
    let (statistics, workers) = (session.statistics(), session.workers());
    let agreement = NegotiatedValues::from(session.negotiated_init());
    move |question: &str| match question {
        STAT => serde_json::to_string(&statistics.snapshot()).ok(),
        "negotiated" => serde_json::to_string(&agreement).ok(),
        READ_WRITE | READ_ONLY => {
            // Without the read-only layer, changes are allowed anyway, or never.
            if let Some(writable) = &writable {
                writable.store(question == READ_WRITE, Ordering::Release);
            }
            Some((question == READ_ONLY || !can_only_be_read).to_string())
        }
        _ => {
            let count = question.strip_prefix(WORKERS)?.parse().ok()?;
            let refused = workers.resize(count).err().map(|error| error.to_string());
            serde_json::to_string(&refused).ok()
        }
    }
}

/// The answers of a server, whose statistics `look` returns. `None` after its end.
pub fn for_server(
    look: impl Fn() -> Option<ServerMeasurements> + Send + 'static,
) -> impl Fn(&str) -> Option<String> + Send + 'static {
    move |question: &str| match question {
        STAT => serde_json::to_string(&look()?).ok(),
        _ => None,
    }
}

/// Answers questions at `listener`, on a new thread.
pub fn serve(
    listener: UnixListener,
    answer: impl Fn(&str) -> Option<String> + Send + 'static,
) -> io::Result<()> {
    let run = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => {
                    if let Err(error) = converse(stream, &answer) {
                        log::debug!("control socket: {error}");
                    }
                }
                // Out of descriptors, for instance: do not spin.
                Err(_) => thread::sleep(PATIENCE),
            }
        }
    };
    thread::Builder::new().name("defuse-control".to_owned()).spawn(run).map(drop)
}

fn converse(stream: UnixStream, answer: &dyn Fn(&str) -> Option<String>) -> io::Result<()> {
    // The mode of the socket may have been changed.
    let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    if !peer.is_root() && peer != rustix::process::geteuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut question = String::new();
    let timed = TimedStream { stream: &stream, until: Instant::now() + PATIENCE };
    BufReader::new(timed.take(QUESTION_MAX)).read_line(&mut question)?;
    let text = answer(question.trim()).unwrap_or_default();
    TimedStream { stream: &stream, until: Instant::now() + PATIENCE }.write_all(text.as_bytes())
}

/// A stream until a moment, however slowly the other side goes on.
struct TimedStream<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl TimedStream<'_> {
    fn remaining(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for TimedStream<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.remaining()?)?;
        self.stream.read(room)
    }
}

impl Write for TimedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.remaining()?)?;
        // One write(2) has its limit for each buffer of the kernel.
        self.stream.write(&bytes[..bytes.len().min(WRITTEN_AT_ONCE)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A daemon that answers questions.
struct ControlledDaemon {
    socket: PathBuf,
    /// For messages.
    name: String,
    pid: u32,
    version: String,
}

impl From<&RegisteredMount> for ControlledDaemon {
    fn from(found: &RegisteredMount) -> Self {
        ControlledDaemon {
            socket: found.socket(),
            name: format!("the daemon of {}", found.shown_mountpoint()),
            pid: found.entry.pid,
            version: found.entry.version.clone(),
        }
    }
}

impl From<&ServerEntry> for ControlledDaemon {
    fn from(server: &ServerEntry) -> Self {
        ControlledDaemon {
            socket: server.control(),
            name: format!("the server of {}", server.socket),
            pid: server.pid,
            version: server.version.clone(),
        }
    }
}

/// The statistics of a mount.
pub fn stat(found: &RegisteredMount) -> Result<StatsSnapshot> {
    parse(found, STAT).map(|(snapshot, _)| snapshot)
}

/// The statistics of a server.
pub fn stat_server(server: &ServerEntry) -> Result<ServerMeasurements> {
    stat_server_within(server, PATIENCE_OF_CLIENT)
}

/// The statistics of a server that answers in this time.
pub fn stat_server_within(server: &ServerEntry, patience: Duration) -> Result<ServerMeasurements> {
    parse_within(server, STAT, patience).map(|(served, _)| served)
}

/// Allows or refuses changes of a daemon's file system from now on. A file system that was mounted
/// read-only refuses changes independently of the kernel.
pub fn set_writable(found: &RegisteredMount, writable: bool) -> Result {
    let question = if writable { READ_WRITE } else { READ_ONLY };
    match parse::<bool>(found, question)? {
        (true, _) => Ok(()),
        (false, _) => Err(CommandFailure::Failed(format!(
            "{}: its source was opened for reading: unmount it, and mount it without ro",
            found.shown_mountpoint()
        ))),
    }
}

/// Changes the maximum number of a daemon's worker threads.
pub fn set_workers(found: &RegisteredMount, count: u16) -> Result {
    match parse::<Option<String>>(found, &format!("{WORKERS}{count}"))? {
        (None, _) => Ok(()),
        (Some(reason), _) => {
            Err(CommandFailure::Failed(format!("{}: {reason}", found.shown_mountpoint())))
        }
    }
}

/// The result of INIT of a mount, parsed and as JSON.
pub fn query_negotiated(found: &RegisteredMount) -> Result<(NegotiatedValues, String)> {
    parse(found, "negotiated")
}

fn parse<T: for<'a> Deserialize<'a>>(
    daemon: impl Into<ControlledDaemon>,
    question: &str,
) -> Result<(T, String)> {
    parse_within(daemon, question, PATIENCE_OF_CLIENT)
}

fn parse_within<T: for<'a> Deserialize<'a>>(
    daemon: impl Into<ControlledDaemon>,
    question: &str,
    patience: Duration,
) -> Result<(T, String)> {
    let ControlledDaemon { socket, name, pid, version } = daemon.into();
    let text = ask(&socket, question, patience).map_err(|error| {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotFound, PermissionDenied};
        // The daemon ends connections of other users without an answer.
        let next = match error.kind() {
            PermissionDenied | ConnectionReset | BrokenPipe => "ask as its owner or as root",
            NotFound => "it has no control socket: its log says why, or it is of an older version",
            _ => "`defuse list` shows if it runs",
        };
        CommandFailure::Failed(format!("{name} (pid {pid}) does not answer: {error}; {next}"))
    })?;
    let value = serde_json::from_str(&text).map_err(|error| {
        let ours = env!("CARGO_PKG_VERSION");
        CommandFailure::Failed(format!(
            "invalid answer of the daemon ({error}): it has version {version}, this program {ours}"
        ))
    })?;
    Ok((value, text))
}

fn ask(socket: &Path, question: &str, patience: Duration) -> io::Result<String> {
    let until = Instant::now() + patience;
    let stream = connect(socket, patience)?;
    let mut stream = TimedStream { stream: &stream, until };
    stream.write_all(format!("{question}\n").as_bytes())?;
    let mut text = String::new();
    stream.take(ANSWER_MAX).read_to_string(&mut text)?;
    if text.is_empty() { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(text) }
}

/// Connects, but waits no longer than `patience`: a stopped daemon accepts no connection, and the
/// kernel bounds the number of processes that wait for it.
fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let flags = net::SocketFlags::CLOEXEC;
    let family = net::AddressFamily::UNIX;
    let socket = net::socket_with(family, net::SocketType::STREAM, flags, None)?;
    net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Send, Some(patience))?;
    net::connect(&socket, &net::SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc::{self, Receiver};

    use super::*;

    /// The end of a conversation whose other side is the returned stream. Answers are longer than
    /// all buffers.
    fn begin_conversation() -> (UnixStream, Receiver<io::Result<()>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (done, ended) = mpsc::channel();
        thread::spawn(move || {
            let answer = |question: &str| (question == "long").then(|| "x".repeat(16 << 20));
            done.send(converse(ours, &answer)).unwrap();
        });
        (theirs, ended)
    }

    fn expect_end(ended: &Receiver<io::Result<()>>) -> io::Result<()> {
        ended
            .recv_timeout(Duration::from_secs(60))
            .expect("the conversation goes on after a minute")
    }

    /// Each byte began the time limit anew: one asker held up all others for as long as it liked.
    #[test]
    fn an_asker_that_writes_or_reads_byte_by_byte_is_left_in_time() {
        let (mut asker, ended) = begin_conversation();
        let slow = thread::spawn(move || {
            let mut written = 0;
            while asker.write_all(b"l").is_ok() {
                written += 1;
                thread::sleep(Duration::from_millis(200));
            }
            written
        });
        expect_end(&ended).unwrap_err();
        assert!(slow.join().unwrap() < QUESTION_MAX);

        let (mut asker, ended) = begin_conversation();
        asker.write_all(b"long\n").unwrap();
        let slow = thread::spawn(move || {
            let mut room = vec![0; 64 << 10];
            while asker.read(&mut room).is_ok_and(|len| len > 0) {
                thread::sleep(Duration::from_millis(500));
            }
        });
        expect_end(&ended).unwrap_err();
        slow.join().unwrap();
    }

    /// The kernel lets some connections wait until they are accepted. Connections beyond these
    /// waited without an end.
    #[test]
    fn a_daemon_that_accepts_nobody_is_left_in_time() {
        const ASKERS: usize = 25;
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("control");
        let listener = listen(&path).unwrap();
        let (done, ended) = mpsc::channel();
        let asker = thread::spawn(move || {
            // More than any backlog that listen(2) was given by the standard library. Each takes a
            // tick of the kernel or two.
            let ask = || ask(&path, STAT, Duration::from_millis(1)).unwrap_err().kind();
            let some = || (0..5000 / ASKERS).map(|_| ask()).collect::<BTreeSet<_>>();
            let errors = thread::scope(|scope| {
                let askers: Vec<_> = (0..ASKERS).map(|_| scope.spawn(some)).collect();
                askers.into_iter().flat_map(|asker| asker.join().unwrap()).collect::<BTreeSet<_>>()
            });
            done.send(errors).unwrap();
        });
        let errors =
            ended.recv_timeout(Duration::from_secs(60)).expect("an asker waits for a minute");
        assert!(
            errors
                .iter()
                .all(|kind| *kind == io::ErrorKind::TimedOut || *kind == io::ErrorKind::WouldBlock),
            "{errors:?}"
        );
        asker.join().unwrap();
        drop(listener);
    }

    #[test]
    fn a_question_without_an_end_is_read_no_further_than_its_limit() {
        let (mut asker, ended) = begin_conversation();
        let line = "long".repeat(1 << 20);
        // The daemon ends before all is written, or no process waits for the rest.
        let _ = asker.write_all(line.as_bytes());
        expect_end(&ended).unwrap();
        let mut answer = Vec::new();
        // The connection ends with unread bytes: a reset, and no answer.
        let _ = asker.read_to_end(&mut answer);
        assert!(answer.is_empty());
        // Another asker gets the whole answer.
        let (mut asker, ended) = begin_conversation();
        asker.write_all(b"long\n").unwrap();
        asker.read_to_end(&mut answer).unwrap();
        assert_eq!((answer.len(), expect_end(&ended).is_ok()), (16 << 20, true));
    }
}
