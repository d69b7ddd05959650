//! Opening a volume: errors appear within seconds, and name the next step.

use std::ffi::{CStr, CString, OsStr};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use defuse_fs::{Errno, Result};

use crate::address::VolumeAddress;
use crate::ffi::library;
use crate::gluster::{Gluster, GlusterSettings};
use crate::graph_file::GraphFile;
use crate::transfer::AnswerThread;
use crate::upcalls::volfile::ClientGraph;
use crate::upcalls::{CacheCoherence, VolfileQuery};
use crate::volume::{ConnectParameters, Gfid, VolumeConnection};
use crate::{GlusterOptions, ManagementTransport};

/// The socket of the server on this machine.
const SOCKET: &str = "/var/run/glusterd.socket";

/// The port of the management servers.
const PORT: u16 = 24007;

/// With this file, libgfapi and the management servers use TLS for all that they say.
const SECURE_ACCESS: &str = "/var/lib/glusterd/secure-access";

/// Time for each server to accept a connection.
const CONNECTS_WITHIN: Duration = Duration::from_secs(3);

/// Time for all servers of the volume to answer.
const STARTS_WITHIN: Duration = Duration::from_secs(20);

/// Opens the volume at `address`.
///
/// # Errors
///
/// A text that names the object and the next step.
pub fn open(address: &VolumeAddress, options: &GlusterOptions) -> Result<Gluster, String> {
    let graph = match &address.volfile {
        Some(file) => {
            let path = Path::new(OsStr::from_bytes(file.to_bytes()));
            Some(Arc::new(GraphFile::open(path)?))
        }
        None => None,
    };
    let library = library().map_err(|missing| missing.0)?;
    let servers = match &graph {
        Some(_) => Vec::new(),
        None => servers(address, options)?,
    };
    let asks = match &address.volfile {
        Some(_) => {
            Err("a volume file names no server that knows if bricks report changes".to_owned())
        }
        None => {
            reach(&servers, options.transport)?;
            make_volfile_query(address, &servers, options)
        }
    };
    let connect = ConnectParameters {
        volume: text(&address.volume)?,
        graph,
        transport: text(options.transport.name())?,
        servers: servers
            .iter()
            .map(|(server, port)| Ok((text(server)?, *port)))
            .collect::<Result<_, String>>()?,
        log_level: options.log_level,
        translators: translators(&address.volume, options, asks.is_ok())?,
        ends: options.in_application,
    };
    let known = match &address.volfile {
        Some(file) => format!("volume file {}", file.to_string_lossy()),
        None => format!("volume {} of {}", address.volume, names(&servers)),
    };
    let volume =
        VolumeConnection::new(library, &connect).map_err(|errno| format!("{known}: {errno}"))?;
    let volume = start(Arc::new(volume), &known)?;
    volume.act_as_process();
    let root = root(&volume, &address.directory).map_err(|(name, errno)| {
        format!("{known}: the directory {}: {errno}", name.to_string_lossy())
    })?;
    let posix_acl = options.acl && keeps_acls(&volume, root);
    let graph = ClientGraph::from_volume(&volume);
    let settings = GlusterSettings {
        restores: options.in_application,
        answer_on: if options.in_application {
            AnswerThread::OwnThread
        } else {
            AnswerThread::Callback
        },
        submits: options.submits,
        posix_acl,
        graph,
        labels: Path::new("/sys/fs/selinux").exists(),
        untold_for: options.untold_for,
        takes_turns: options.keeps_here || options.in_application,
    };
    let watch = CacheCoherence::new(options.valid_for, options.keeps_here);
    let asks = asks.map_err(|reason| watch.note_reason(reason)).ok();
    let gluster = Gluster::new(volume, root, settings, (watch, asks));
    Ok(if options.keeps_here { gluster.with_metadata_cache() } else { gluster })
}

/// The query for the volfile, which shows if servers report changes by other clients, and the time
/// for which frontends may cache, or the reason why they may not.
fn make_volfile_query(
    address: &VolumeAddress,
    servers: &[(String, u16)],
    options: &GlusterOptions,
) -> Result<(VolfileQuery, Duration), String> {
    // The servers would reset a connection without TLS.
    if Path::new(SECURE_ACCESS).exists() {
        let reason = format!(
            "its servers are asked by TLS ({SECURE_ACCESS}), by which this program does not ask if they report changes"
        );
        log::info!("names and attributes are kept for {:?}: {reason}", options.valid_for);
        return Err(reason);
    }
    let asks = VolfileQuery {
        servers: servers.to_vec(),
        transport: options.transport,
        volume: address.volume.clone(),
        at_most: options.upcall_time,
    };
    let long = asks.long().inspect_err(|reason| {
        log::info!("names and attributes are kept for {:?}: {reason}", options.valid_for);
    })?;
    Ok((asks, long))
}

/// The options of the client's translators that differ from the options of the volume.
fn translators(
    volume: &str,
    options: &GlusterOptions,
    has_upcalls: bool,
) -> Result<Vec<(CString, CString, CString)>, String> {
    let level = match options.log_level {
        0 => "NONE",
        1..=3 => "CRITICAL",
        4 => "ERROR",
        5 => "WARNING",
        6 | 7 => "INFO",
        8 => "DEBUG",
        _ => "TRACE",
    };
    let all = [
        // Otherwise close(2) would return before the servers have the data, and the end of the
        // process would lose it.
        ("*-write-behind", "flush-behind", "off"),
        // A write with O_DIRECT returns when the servers have it, so that a file needs no flush
        // after its only write.
        ("*-write-behind", "strict-O_DIRECT", "on"),
        // An open file must be readable after another client has removed it, and an open that is
        // refused must fail. Without lazy opens, this translator still answers before the servers.
        ("*-open-behind", "lazy-open", "no"),
        ("*-open-behind", "pass-through", "on"),
        // Frontends cache data and attributes. Caches below would make them older than promised,
        // and serve old data to a file that was opened after another client has closed it.
        ("*-quick-read", "max-file-size", "0"),
        ("*-io-cache", "cache-timeout", "0"),
        ("*-md-cache", "md-cache-timeout", "0"),
        // Calls have threads, and transfers need none: an additional thread would only have to be
        // woken.
        ("*-io-threads", "pass-through", "on"),
        // Servers report changed access lists only to clients that register for them.
        ("*-md-cache", "cache-invalidation", if has_upcalls { "on" } else { "off" }),
        ("*-md-cache", "cache-posix-acl", if has_upcalls { "on" } else { "off" }),
        (volume, "log-level", level),
    ];
    let mut all = all
        .into_iter()
        .map(|(name, key, value)| Ok((text(name)?, text(key)?, text(value)?)))
        .collect::<Result<Vec<_>, String>>()?;
    if let Some(seconds) = options.ping_timeout {
        let (of_bricks, key) = (c"*-client-[0-9]*".to_owned(), c"ping-timeout".to_owned());
        all.push((of_bricks, key, text(&seconds.to_string())?));
    }
    Ok(all)
}

/// The servers with their ports.
fn servers(
    address: &VolumeAddress,
    options: &GlusterOptions,
) -> Result<Vec<(String, u16)>, String> {
    match (options.transport, address.hosts.as_slice()) {
        (ManagementTransport::Unix, []) => Ok(vec![(SOCKET.to_owned(), 0)]),
        (ManagementTransport::Unix, _) => Err(format!(
            "transport=unix reaches the server of this machine: write gluster:///{}",
            address.volume
        )),
        (ManagementTransport::Tcp, []) => Err(format!(
            "volume {}: no server: write gluster://HOST/{0}, or transport=unix for this machine",
            address.volume
        )),
        (ManagementTransport::Tcp, hosts) => {
            let port = if options.port == 0 { PORT } else { options.port };
            Ok(hosts.iter().map(|host| (host.clone(), port)).collect())
        }
    }
}

/// Connects to one of the servers. libgfapi would try for minutes.
fn reach(servers: &[(String, u16)], transport: ManagementTransport) -> Result<(), String> {
    let mut failures = Vec::new();
    for (server, port) in servers {
        let reached = match transport {
            ManagementTransport::Unix => UnixStream::connect(server).map(drop),
            ManagementTransport::Tcp => {
                (server.as_str(), *port).to_socket_addrs().and_then(|mut all| {
                    let none = || std::io::Error::other("the name has no address");
                    let first = all.next().ok_or_else(none)?;
                    TcpStream::connect_timeout(&first, CONNECTS_WITHIN).map(drop)
                })
            }
        };
        match reached {
            Ok(()) => return Ok(()),
            Err(error) => failures.push(format!("{server} port {port}: {error}")),
        }
    }
    let failures = failures.join("; ");
    Err(format!(
        "no GlusterFS server can be reached ({failures}): start glusterd there, open the port, or name \
         another server"
    ))
}

fn start(volume: Arc<VolumeConnection>, known: &str) -> Result<Arc<VolumeConnection>, String> {
    let (send, started) = channel();
    let starting = Arc::clone(&volume);
    let run = move || {
        // After the time limit, the receiver is gone.
        let _ = send.send(starting.start());
    };
    std::thread::Builder::new()
        .name("gluster-start".to_owned())
        .spawn(run)
        .map_err(|error| format!("{known}: no thread: {error}"))?;
    let known_volume = Arc::clone(&volume);
    match started.recv_timeout(STARTS_WITHIN) {
        Ok(Ok(())) => Ok(volume),
        Ok(Err(errno)) => Err(format!(
            "{known} cannot be opened ({errno}): `gluster volume info` on a server shows its name and \
             whether it is started, -o log-level=error what libgfapi says{}",
            known_volume.last_messages()
        )),
        Err(RecvTimeoutError::Timeout) => Err(format!(
            "{known} does not answer: `gluster volume status` on a server shows which bricks are missing{}",
            known_volume.last_messages()
        )),
        Err(RecvTimeoutError::Disconnected) => Err(format!("{known} cannot be opened")),
    }
}

/// The identity of the directory that is served as the root.
fn root(volume: &VolumeConnection, directory: &[CString]) -> Result<Gfid, (CString, Errno)> {
    let at_root = |errno| (c"/".to_owned(), errno);
    let (mut object, _) = volume.look_up(None, c"/").map_err(at_root)?;
    for name in directory {
        let failed = |errno| (name.clone(), errno);
        let (found, stat) = volume.look_up(Some(&object), name).map_err(failed)?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFDIR {
            return Err(failed(Errno::ENOTDIR));
        }
        object = found;
    }
    object.gfid().map_err(at_root)
}

/// True if the file systems of the servers keep access lists.
fn keeps_acls(volume: &VolumeConnection, root: Gfid) -> bool {
    const ACL: &CStr = c"system.posix_acl_access";
    let reply = volume.object(root).and_then(|root| volume.get_xattr(&root, Some(ACL), &mut []));
    matches!(reply, Ok(_) | Err(Errno::ENODATA))
}

fn names(servers: &[(String, u16)]) -> String {
    servers.iter().map(|(server, _)| server.as_str()).collect::<Vec<_>>().join(", ")
}

fn text(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{text:?} has a NUL"))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_server_that_refuses_connections_is_named_at_once() {
        let begun = Instant::now();
        // The listener is dropped, so that its port refuses connections.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let error = reach(&[("127.0.0.1".to_owned(), port)], ManagementTransport::Tcp).unwrap_err();
        assert!(error.contains(&format!("127.0.0.1 port {port}: ")), "{error}");
        assert!(error.contains("start glusterd there"), "{error}");
        assert!(begun.elapsed() < CONNECTS_WITHIN);
    }

    #[test]
    fn a_socket_and_hosts_exclude_each_other() {
        let address = |text| VolumeAddress::parse(text).unwrap();
        let unix =
            GlusterOptions { transport: ManagementTransport::Unix, ..GlusterOptions::default() };
        assert_eq!(servers(&address("///v"), &unix), Ok(vec![(SOCKET.to_owned(), 0)]));
        assert!(servers(&address("//h/v"), &unix).unwrap_err().contains("write gluster:///v"));
        let tcp = GlusterOptions::default();
        assert_eq!(servers(&address("//h/v"), &tcp), Ok(vec![("h".to_owned(), PORT)]));
        assert!(servers(&address("///v"), &tcp).unwrap_err().contains("no server"));
    }
}
