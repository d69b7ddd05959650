//! The mounts of a run: parsing `--mount`, and serving the file systems that programs cannot open
//! by themselves.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use defuse_compose::{ParsedSource, SourceSettings};
use defuse_fs::FileSystem;
use defuse_fs::source::{FrontendProperties, LockPlace, SourceSharing};
use defuse_preload_plan::{ForkPolicy, MountPlan, ServerPlace};
use defuse_shared::{SharedLayers, SharedOptions};
use defuse_socket::name::SocketName;
use defuse_socket::{ServerOptions, SocketServer};
use rustix::fs::Mode;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use crate::error::{CommandFailure, Result, warn};
use crate::sources::{SOURCES, is_in_process};
use crate::{mounted, paths};

/// Parses `TARGET=TYPE:REST[,OPTION...]`.
pub fn parse(text: &OsStr, fork: ForkPolicy) -> Result<MountPlan> {
    let shown = text.display();
    let form = "write TARGET=TYPE:REST, such as /data=passthrough:/srv";
    let bytes = text.as_bytes();
    let Some(at) = bytes.iter().position(|&byte| byte == b'=') else {
        return Err(CommandFailure::Usage(format!("mount {shown} has no source: {form}")));
    };
    let (target, rest) = (&bytes[..at], &bytes[at + 1..]);
    let named = target.ends_with(b":") && target.len() > 1 && !target.contains(&b'/');
    if !named && !target.starts_with(b"/") {
        return Err(CommandFailure::Usage(format!(
            "mount {shown}: the target is neither an absolute path nor a name with a colon: {form}"
        )));
    }
    let mut names = target.split(|&byte| byte == b'/').filter(|name| !name.is_empty()).peekable();
    if names.peek().is_none() || names.any(|name| matches!(name, b"." | b"..")) {
        return Err(CommandFailure::Usage(format!(
            "mount {shown}: the target must be a directory below /, without . and .."
        )));
    }
    let end = rest.iter().position(|&byte| byte == b',').unwrap_or(rest.len());
    let source = SOURCES.parse(OsStr::from_bytes(&rest[..end]))?;
    let mut text = source.text().into_vec();
    text.extend_from_slice(&rest[end..]);
    Ok(MountPlan { target: target.to_vec(), source: text, fork, ..MountPlan::default() })
}

/// Refuses two mounts with one target: the second would hide the first.
pub fn refuse_twice(mounts: &[MountPlan]) -> Result {
    let names = |target: &[u8]| -> Vec<Vec<u8>> {
        let names = target.split(|&byte| byte == b'/').filter(|name| !name.is_empty());
        names.map(<[u8]>::to_vec).collect()
    };
    let mut known: Vec<Vec<Vec<u8>>> = Vec::new();
    for mount in mounts {
        let place = names(&mount.target);
        if known.contains(&place) {
            let target = String::from_utf8_lossy(&mount.target).into_owned();
            return Err(CommandFailure::Usage(format!(
                "mount {target}: this target is given twice: leave out one of them"
            )));
        }
        known.push(place);
    }
    Ok(())
}

/// The process that opens a source of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceOpener {
    /// Every program by itself.
    Program,
    /// The server at the socket that the source names.
    Elsewhere,
    /// This process, for all programs of the run.
    Run,
}

/// Chooses the process that opens a source. With `in_process`, the library in the programs can do
/// it; a connection of a program to a server has no options.
fn opener(
    sharing: SourceSharing,
    (in_process, options): (bool, bool),
    fork: ForkPolicy,
) -> SourceOpener {
    match (sharing, fork) {
        _ if !in_process => SourceOpener::Run,
        (SourceSharing::Remote, _) if options => SourceOpener::Run,
        (SourceSharing::Remote, _) => SourceOpener::Elsewhere,
        (_, ForkPolicy::Server) => SourceOpener::Run,
        (SourceSharing::NeedsServer, ForkPolicy::Auto) => SourceOpener::Run,
        (SourceSharing::NeedsServer | SourceSharing::InDirectory | SourceSharing::Shared, _) => {
            SourceOpener::Program
        }
    }
}

/// The servers of a run, until its end.
#[derive(Default)]
pub struct RunServers {
    running: Vec<RunServer>,
    /// The sockets that programs inherit, see [`ServerPlace::Run`].
    pub sockets: Vec<OwnedFd>,
}

/// A server on a thread of its own, and its file system.
struct RunServer {
    source: String,
    server: Arc<SocketServer>,
    thread: JoinHandle<bool>,
    fs: Arc<dyn FileSystem>,
}

/// Starts a server for each mount that the programs cannot open by themselves, and notes it in the
/// mount.
pub fn serve(mounts: &mut [MountPlan]) -> Result<RunServers> {
    let mut servers = RunServers::default();
    for mount in mounts {
        let text = OsStr::from_bytes(&mount.source);
        // Each program of the run has a cache of its own, and receives no notifications of the
        // changes of the others.
        let frontend = FrontendProperties {
            locks: LockPlace::FileSystem,
            concurrent: true,
            ..FrontendProperties::default()
        };
        let (source, settings) =
            SOURCES.parse_with_options(text, SourceSettings::for_frontend(frontend))?;
        source.kind.check(&settings.options)?;
        let how = (is_in_process(source.kind), !settings.options.is_empty());
        match opener(source.sharing(), how, mount.fork) {
            SourceOpener::Program => {}
            SourceOpener::Elsewhere => {
                mount.served_by = ServerPlace::Socket(source.rest.into_vec())
            }
            SourceOpener::Run => mount.served_by = servers.start(&source, &settings)?,
        }
    }
    Ok(servers)
}

impl RunServers {
    fn start(&mut self, source: &ParsedSource, settings: &SourceSettings) -> Result<ServerPlace> {
        let fs = source.open(settings)?;
        fs.notes().iter().for_each(|note| warn(note));
        let (listener, socket) = create_unnamed_socket()?;
        let options = SharedOptions { pages: None, ..SharedOptions::default() };
        let layers = SharedLayers::build(fs, options);
        let (versions, lanes) = (layers.version_source(), layers.transport());
        let options = ServerOptions { versions, lanes, ..ServerOptions::default() };
        let fs = layers.fs;
        let server = SocketServer::from_listener(listener, Arc::clone(&fs), options);
        let server = Arc::new(server.map_err(CommandFailure::from_error)?);
        let thread = std::thread::Builder::new().name("defuse-server".to_owned());
        let served = Arc::clone(&server);
        let thread = thread.spawn(move || served.run()).map_err(CommandFailure::from_error)?;
        let source = source.text().to_string_lossy().into_owned();
        self.running.push(RunServer { source, server, thread, fs });
        self.sockets.push(socket);
        Ok(ServerPlace::Run(self.sockets.len() - 1))
    }

    /// Ends all connections, and makes everything durable that the programs have changed. Fails
    /// with the first file system that cannot do that.
    pub fn end(self) -> Result<()> {
        let mut outcome = Ok(());
        for RunServer { source, server, thread, fs } in self.running {
            server.shut_down();
            let _ = thread.join();
            outcome = outcome.and(mounted::make_durable(&*fs, &source));
            // It ends its connections.
            drop(server);
            mounted::release(fs);
        }
        outcome
    }
}

/// Creates a listening socket without a name, and the descriptor (`O_PATH`) with which programs of
/// the run connect to it. The socket is bound in a directory that only this user may search, and
/// its name is removed at once. No process outside the run can connect, or put another socket in
/// its place after this process has ended.
fn create_unnamed_socket() -> Result<(OwnedFd, OwnedFd)> {
    let mut why = String::new();
    for base in bases() {
        match create_unnamed_socket_in(&base) {
            Ok(made) => return Ok(made),
            // No directory helps.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return Err(CommandFailure::Failed(
                    "no socket for the programs of the run, because no thread can be started: raise the limit of \
                     processes (`ulimit -u`, or pids.max of the control group)"
                        .to_owned(),
                ));
            }
            Err(error) => why += &format!("; {}: {error}", base.display()),
        }
    }
    Err(CommandFailure::Failed(format!(
        "no socket for the programs of the run{why}: make /tmp writable, or name a directory by TMPDIR"
    )))
}

/// Directories for sockets, of which the first that can be written is used. After su(1) or
/// `sudo -E`, `XDG_RUNTIME_DIR` belongs to another user, who could exchange its contents.
fn bases() -> Vec<PathBuf> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").filter(|named| !named.is_empty());
    let named = named.and_then(|named| match paths::find_private(Path::new(&named)) {
        Ok(own) => Some(own),
        Err(error) => {
            warn(&format!("XDG_RUNTIME_DIR is not used, but /tmp: {error}"));
            None
        }
    });
    // A root directory that cannot be written has none in /tmp.
    let others = std::env::var_os("TMPDIR").filter(|named| !named.is_empty()).map(PathBuf::from);
    let usual = ["/tmp", "/dev/shm", "/var/tmp"].map(PathBuf::from);
    named.into_iter().chain(usual).chain(others).collect()
}

fn create_unnamed_socket_in(base: &Path) -> std::io::Result<(OwnedFd, OwnedFd)> {
    let place =
        tempfile::Builder::new().prefix(".defuse-").tempdir_in(paths::find_trusted(base)?)?;
    let flags = SocketFlags::CLOEXEC;
    let listener = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // Programs of the run may become other users; the server checks the user of each connection.
    let name =
        SocketName::bind(&listener, &place.path().join("socket"), Mode::from_raw_mode(0o666))?;
    Ok((listener, name.open()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(OsStr::new(text), ForkPolicy::Auto).err().unwrap().to_string()
    }

    #[test]
    fn a_mount_has_a_target_a_source_and_options() {
        let plan = parse(OsStr::new("/data=memory:,size=1G,ro"), ForkPolicy::Auto).unwrap();
        assert_eq!((plan.target, plan.source), (b"/data".to_vec(), b"memory:,size=1G,ro".to_vec()));
        assert!(parse(OsStr::new("mem:=memory:"), ForkPolicy::Auto).is_ok());
    }

    /// The later mount was used, without a message.
    #[test]
    fn one_target_is_mounted_once() {
        let plan = |text: &str| parse(OsStr::new(text), ForkPolicy::Auto).unwrap();
        let all = |texts: [&str; 2]| refuse_twice(&texts.map(plan));
        for texts in [["/a/b=memory:", "//a/b/=passthrough:/x"], ["m:=memory:", "m:=memory:"]] {
            assert!(all(texts).unwrap_err().to_string().contains("given twice"), "{texts:?}");
        }
        for texts in [["/a=memory:", "/a/b=memory:"], ["m:=memory:", "/m=memory:"]] {
            assert_eq!(all(texts), Ok(()), "{texts:?}");
        }
    }

    #[test]
    fn mistakes_name_the_next_step() {
        assert!(error("/data").contains("TARGET=TYPE:REST"));
        assert!(error("data=memory:").contains("absolute path"));
        assert!(error("/data=nfs:x").contains("passthrough:DIR"));
        for target in ["/", "//", "/a/../b", "/a/."] {
            let error = error(&format!("{target}=memory:"));
            assert!(error.contains("below /"), "{target}: {error}");
        }
    }

    #[test]
    fn a_source_that_programs_cannot_open_is_served_by_the_run() {
        use ForkPolicy::{Auto, Deny, Reopen, Server as Served, Share};
        use SourceSharing::{InDirectory, NeedsServer, Remote, Shared};
        let all = [InDirectory, NeedsServer, Remote, Shared];
        for (sharing, fork) in
            all.iter().flat_map(|s| [Auto, Share, Reopen, Served, Deny].map(|f| (*s, f)))
        {
            assert_eq!(
                opener(sharing, (false, false), fork),
                SourceOpener::Run,
                "{sharing:?} {fork:?}"
            );
        }
        for fork in [Auto, Share, Reopen, Deny] {
            assert_eq!(opener(InDirectory, (true, true), fork), SourceOpener::Program, "{fork:?}");
            assert_eq!(opener(Shared, (true, true), fork), SourceOpener::Program, "{fork:?}");
            let own = if fork == Auto { SourceOpener::Run } else { SourceOpener::Program };
            assert_eq!(opener(NeedsServer, (true, false), fork), own, "{fork:?}");
            assert_eq!(opener(Remote, (true, false), fork), SourceOpener::Elsewhere, "{fork:?}");
            assert_eq!(opener(Remote, (true, true), fork), SourceOpener::Run, "{fork:?}");
        }
        for sharing in [InDirectory, NeedsServer, Shared] {
            assert_eq!(opener(sharing, (true, false), Served), SourceOpener::Run, "{sharing:?}");
        }
        assert_eq!(opener(Remote, (true, false), Served), SourceOpener::Elsewhere);
    }
}
