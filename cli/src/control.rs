//! The control socket of a daemon.
//!
//! A client sends one line with a question, receives an answer in JSON, and the connection ends. The
//! daemon answers only its own user and root.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{fs, io, thread};

use defuse_compose::Switch;
use defuse_fuse::{Negotiated, Session};
use defuse_probe::Snapshot;
use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};
use crate::registry::Found;

/// Time limit of each side.
const PATIENCE: Duration = Duration::from_secs(2);
/// Questions that allow or refuse changes of the file system. The answer is `true`.
const READ_WRITE: &str = "read-write";
const READ_ONLY: &str = "read-only";
/// Question that changes the maximum number of worker threads, followed by the number. The answer is the
/// reason against it, or `null`.
const WORKERS: &str = "workers=";
/// Maximum length of a question in bytes.
const QUESTION_MAX: u64 = 64;
/// Maximum length of an answer in bytes: a snapshot has some hundred rows.
const ANSWER_MAX: u64 = 16 << 20;

/// The result of INIT, as JSON shows it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agreement {
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
    pub decisions: Vec<Capability>,
}

/// One capability of INIT.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// The kernel's name, without `FUSE_`.
    pub name: String,
    /// The capability is in use.
    pub used: bool,
    /// The reason.
    pub reason: String,
}

impl From<&Negotiated> for Agreement {
    fn from(negotiated: &Negotiated) -> Self {
        let capability = |decision: &defuse_fuse::Decision| Capability {
            name: decision.name.to_owned(),
            used: decision.used,
            reason: decision.reason.to_owned(),
        };
        Agreement {
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
    // A killed daemon may have left it.
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Answers questions at `listener`, on a new thread.
pub fn serve(
    listener: UnixListener,
    session: &Session,
    (writable, can_only_be_read): (Switch, bool),
) -> io::Result<()> {
    let (statistics, workers) = (session.statistics(), session.workers());
    let agreement = Agreement::from(session.negotiated());
    let answer = move |question: &str| match question {
        "stat" => serde_json::to_string(&statistics.snapshot()).ok(),
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
    };
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
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // The mode of the socket is set a moment after it is created.
    let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    if !peer.is_root() && peer != rustix::process::geteuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut question = String::new();
    BufReader::new((&stream).take(QUESTION_MAX)).read_line(&mut question)?;
    let text = answer(question.trim()).unwrap_or_default();
    (&stream).write_all(text.as_bytes())
}

/// The statistics of a mount, as JSON.
pub fn stat(found: &Found) -> Result<(Snapshot, String)> {
    parse(found, "stat")
}

/// Allows or refuses changes of a daemon's file system from now on. A file system that was mounted
/// read-only refuses changes independently of the kernel.
pub fn set_writable(found: &Found, writable: bool) -> Result {
    let question = if writable { READ_WRITE } else { READ_ONLY };
    match parse::<bool>(found, question)? {
        (true, _) => Ok(()),
        (false, _) => Err(Failure::Failed(format!(
            "{}: its source was opened for reading: unmount it, and mount it without ro",
            found.shown_mountpoint()
        ))),
    }
}

/// Changes the maximum number of a daemon's worker threads.
pub fn set_workers(found: &Found, count: u16) -> Result {
    match parse::<Option<String>>(found, &format!("{WORKERS}{count}"))? {
        (None, _) => Ok(()),
        (Some(reason), _) => {
            Err(Failure::Failed(format!("{}: {reason}", found.shown_mountpoint())))
        }
    }
}

/// The result of INIT of a mount, parsed and as JSON.
pub fn negotiated(found: &Found) -> Result<(Agreement, String)> {
    parse(found, "negotiated")
}

fn parse<T: for<'a> Deserialize<'a>>(found: &Found, question: &str) -> Result<(T, String)> {
    let text = ask(&found.socket(), question).map_err(|error| {
        let (pid, mountpoint) = (found.entry.pid, found.shown_mountpoint());
        use io::ErrorKind::{BrokenPipe, ConnectionReset, PermissionDenied};
        // The daemon ends connections of other users without an answer.
        let next = match error.kind() {
            PermissionDenied | ConnectionReset | BrokenPipe => "ask as its owner or as root",
            _ => "`defuse list` shows if it runs",
        };
        Failure::Failed(format!(
            "the daemon of {mountpoint} (pid {pid}) does not answer: {error}; {next}"
        ))
    })?;
    let value = serde_json::from_str(&text).map_err(|error| {
        let (version, ours) = (&found.entry.version, env!("CARGO_PKG_VERSION"));
        Failure::Failed(format!(
            "invalid answer of the daemon ({error}): it has version {version}, this program {ours}"
        ))
    })?;
    Ok((value, text))
}

fn ask(socket: &Path, question: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    writeln!(stream, "{question}")?;
    let mut text = String::new();
    stream.take(ANSWER_MAX).read_to_string(&mut text)?;
    if text.is_empty() { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(text) }
}
