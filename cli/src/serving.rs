//! A server of one file system, from the socket to the end: for `defuse serve` and
//! `defuse manager`. Further the arguments that they share with `defuse mount`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_compose::ParsedSource;
use defuse_fs::FileSystem;
use defuse_fs::namespace::Namespace;
use defuse_fuse::SessionOptions;
use defuse_shared::{PagedOptions, PartDivision, SharedLayers, SharedOptions, UnseenChanges};
use defuse_socket::{AdmissionPolicy, ServerOptions, SocketServer};
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::SIGUSR1;

use crate::daemon::{ReadyReceiver, ServiceManager};
use crate::error::{self, CommandFailure, Result};
use crate::manager::bind::DeviceBinder;
use crate::sandbox::keeper::{KeeperHandle, KeeperOrder, KeeperTask};
use crate::sandbox::{self, DaemonNamespaces, FilterNeeds, SandboxExtent};
use crate::served::ServerParts;
use crate::servers::{self, ServerRegistration, TreeDevice};
use crate::{control, daemon, inherited, paths, registry, signals, terminal};

/// Time limit of the end after SIGTERM. The connections may take eight seconds.
const END_PATIENCE: Duration = Duration::from_secs(20);

/// Time after which the log reports that a file system has not made everything durable yet.
const SETTLE_PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of every command that serves, in the background by default.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ProcessArgs {
    /// Stay in the foreground, and log to the standard error
    #[arg(short, long)]
    foreground: bool,
    /// Append the log to this file
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log more; twice for even more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Run as the background process
    #[arg(long, hide = true)]
    pub daemon: bool,
}

impl ProcessArgs {
    /// The command line of the background process of `command`, so far.
    pub fn to_command_line(&self, command: &str) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec![command.into(), "--daemon".into()];
        if let Some(file) = &self.log_file {
            line.extend(["--log-file".into(), file.into()]);
        }
        line.extend((0..self.verbose).map(|_| "-v".into()));
        line
    }

    /// True in the process that the user started, if another one is to serve.
    pub fn is_first(&self) -> bool {
        !self.foreground && !self.daemon
    }

    /// Begins to serve: in the background, away from the process that waits.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`daemon::detach`].
    pub fn begin(&self) -> Result<ReadyReceiver> {
        let notes = inherited::give_up();
        if self.daemon {
            return daemon::detach(notes);
        }
        notes.iter().for_each(|note| error::warn(note));
        Ok(ReadyReceiver::Foreground(ServiceManager::from_environment()))
    }

    /// Starts logging to the file, or to the standard error.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written.
    pub fn start_log(&self) -> Result {
        let level = match self.verbose {
            0 => log::LevelFilter::Info,
            1 => log::LevelFilter::Debug,
            _ => log::LevelFilter::Trace,
        };
        let mut builder = env_logger::Builder::new();
        builder.filter_level(level).format(|out, record| {
            use std::io::Write;
            // One record is one line, even if a name in it has line feeds.
            let (time, text) = (out.timestamp(), record.args().to_string());
            writeln!(out, "[{time} {:<5}] {}", record.level(), terminal::escape_controls(&text))
        });
        if let Some(path) = &self.log_file {
            let file = paths::open_to_append(path).map_err(|error| {
                CommandFailure::Failed(format!(
                    "cannot write the log file {}: {error}",
                    path.display()
                ))
            })?;
            builder.target(env_logger::Target::Pipe(Box::new(file)));
        }
        builder.try_init().map_err(CommandFailure::from_error)?;
        std::panic::set_hook(Box::new(|panic| log::error!("internal error: {panic}")));
        Ok(())
    }
}

/// The file system to serve, and how.
pub struct ServePlan {
    /// The text of the source, for messages.
    pub text: String,
    /// The file systems of a manager.
    pub devices: Vec<TreeDevice>,
    /// The tree of a manager, whose members are the devices.
    pub tree: Option<Arc<Namespace>>,
    /// The devices of a manager that applications may bind.
    pub binder: Option<Arc<DeviceBinder>>,
    pub fs: Arc<dyn FileSystem>,
    pub socket: PathBuf,
    /// Shared memory beside the socket, with these pages.
    pub shared: Option<PagedOptions>,
    /// Other users that may connect.
    pub admit: Vec<u32>,
    pub max_connections: usize,
    /// An eighth of `max_connections` by default.
    pub max_connections_of_user: Option<usize>,
    /// The limit of [`ServerOptions::dead_after`].
    pub dead_after: Option<Duration>,
    pub session: SessionOptions,
    /// The sandbox, if there is to be one.
    pub sandbox: Option<FilterNeeds>,
}

/// The namespaces of a server of `sources`. `stays` is the reason to keep the namespaces of the
/// user, if there is one. To be called before the sources are opened.
///
/// # Errors
///
/// Fails with the errors of [`DaemonNamespaces::leave`].
pub fn namespaces(
    sources: &[&ParsedSource],
    extent: SandboxExtent,
    stays: Option<&str>,
) -> Result<DaemonNamespaces> {
    if let Some(why) = stays.filter(|_| extent == SandboxExtent::Usual) {
        log::info!("the daemon stays in the mount namespace of its user: {why}");
        return Ok(DaemonNamespaces::stay());
    }
    DaemonNamespaces::leave(sources, extent, false)
}

/// Serves until SIGTERM, and then runs `settle`, which makes everything durable.
pub fn run(
    offer: ServePlan,
    namespaces: DaemonNamespaces,
    ready: ReadyReceiver,
    settle: impl FnOnce() -> Result,
) -> Result {
    let (text, socket) = (offer.text.clone(), offer.socket.clone());
    let trees = offer.tree.iter().flat_map(|tree| tree.members()).map(|member| &member.fs);
    let mut notes: Vec<String> =
        std::iter::once(&offer.fs).chain(trees).flat_map(|fs| fs.notes()).collect();
    match listen(offer, namespaces) {
        Ok(ListeningServer { server, settling, keeper, registered }) => {
            let (registered, unregistered) = match registered {
                Ok(registered) => (Some(registered), None),
                Err(why) => (None, Some(explain_unregistered(&why))),
            };
            // In the foreground the log has all notes.
            if matches!(ready, ReadyReceiver::Parent(_)) {
                unregistered.iter().for_each(|note| log::warn!("{note}"));
            }
            notes.extend(unregistered);
            ready.tell(Ok(&notes));
            server.run();
            daemon::show_the_end();
            log::info!("{} has ended", socket.display());
            let _settling = lock(&settling);
            let say = |waits| log::warn!("{waits}");
            let outcome = run_patiently(&text, SETTLE_PATIENCE, say, settle);
            drop(registered);
            if let Some(keeper) = keeper {
                keeper.order(&KeeperOrder::Remove);
                keeper.end();
            }
            outcome
        }
        Err(failure) => {
            ready.tell(Err(&failure));
            Err(failure)
        }
    }
}

/// A server that listens.
struct ListeningServer {
    server: Arc<SocketServer>,
    /// Locked while the file system makes everything durable, however long that takes.
    settling: Arc<Mutex<()>>,
    keeper: Option<Arc<KeeperHandle>>,
    /// The entry, or the reason why there is none.
    registered: Result<ServerRegistration>,
}

/// The note about a server without an entry.
fn explain_unregistered(why: &CommandFailure) -> String {
    format!(
        "the server is not registered: `defuse list`, `stat` and `top` do not know it, and `kill {}` ends it: {why}; \
         DEFUSE_RUNTIME_DIR can name a directory that can be written",
        std::process::id()
    )
}

fn listen(offer: ServePlan, namespaces: DaemonNamespaces) -> Result<ListeningServer> {
    if offer.sandbox.is_some() {
        sandbox::enter();
    }
    let admission = match offer.admit.as_slice() {
        [] => AdmissionPolicy::SameUser,
        users => AdmissionPolicy::Users(users.to_vec()),
    };
    let layers = offer.shared.map(|pages| {
        let options = options_of_layers(pages, offer.tree.as_ref());
        SharedLayers::build(Arc::clone(&offer.fs), options)
    });
    let fs = layers.as_ref().map_or(offer.fs, |layers| Arc::clone(&layers.fs));
    let max_connections = offer.max_connections;
    let max_connections_of_user =
        offer.max_connections_of_user.unwrap_or(max_connections / 8).max(1);
    let mut session = offer.session;
    namespaces.adapt(&mut session);
    let options = ServerOptions {
        session,
        admission,
        max_connections,
        max_connections_of_user,
        dead_after: offer.dead_after,
        pages: layers.as_ref().and_then(SharedLayers::page_source),
        versions: layers.as_ref().and_then(SharedLayers::version_source),
        others: offer.binder.clone().map(|binder| binder as _),
        lanes: layers.as_ref().and_then(SharedLayers::transport),
        ..ServerOptions::default()
    };
    let mut caught = signals::catch().map_err(CommandFailure::from_error)?;
    let (socket, entry) = (offer.socket.clone(), servers::place());
    let control = entry.as_deref().ok().map(registry::socket_beside);
    let files: Vec<_> = entry.iter().cloned().chain(control).collect();
    let bind = move || SocketServer::bind(&socket, fs, options);
    let server = Arc::new(namespaces.run_at_home(bind)?.map_err(CommandFailure::from_error)?);
    let task = KeeperTask::default().remove(&files).unname(&offer.socket, server.inode());
    let keeper = namespaces.entrust(task)?;
    log::info!("{} is served at {}", offer.text, offer.socket.display());
    // The process ends with the server, and not with a process that reads its state.
    let look = ServerParts {
        server: Arc::downgrade(&server),
        devices: offer.devices.clone(),
        tree: offer.tree.as_ref().map(Arc::downgrade).unwrap_or_default(),
        binder: offer.binder.as_ref().map(Arc::downgrade).unwrap_or_default(),
        paged: layers
            .and_then(|layers| layers.paged)
            .as_ref()
            .map(Arc::downgrade)
            .unwrap_or_default(),
    };
    let (served, logged) = (Arc::downgrade(&server), look.clone());
    let settling = Arc::new(Mutex::new(()));
    let until_settled = Arc::clone(&settling);
    let listen = move || {
        for signal in caught.forever() {
            let Some(server) = served.upgrade() else { return };
            match signal {
                SIGUSR1 => {
                    logged.query().iter().for_each(|served| log::info!("statistics: {served}"));
                }
                _ => {
                    server.shut_down();
                    give_up_after(END_PATIENCE, Arc::clone(&until_settled));
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("defuse-signals".to_owned());
    thread.spawn(listen).map_err(CommandFailure::from_error)?;
    // The server works without an entry.
    let (text, socket, devices) = (offer.text, offer.socket, offer.devices);
    let register = move || servers::register(entry?, text, &socket, devices);
    let (registered, listener) = match namespaces.run_at_home(register)? {
        Ok((registered, listener)) => (Ok(registered), listener),
        Err(why) => (Err(why), None),
    };
    if let Some(listener) = listener
        && let Err(error) = control::serve(listener, control::for_server(move || look.query()))
    {
        log::warn!("the control socket does not answer: {error}");
    }
    namespaces.confine()?;
    if keeper.is_some() {
        // The keeper removes it. A descriptor of its directory would lead out of the namespace.
        drop(server.take_name());
    }
    if let Some(needs) = offer.sandbox {
        sandbox::filter(needs);
    }
    Ok(ListeningServer { server, settling, keeper, registered })
}

/// Layers whose pages are counted apart for each member of a tree.
fn options_of_layers(pages: PagedOptions, tree: Option<&Arc<Namespace>>) -> SharedOptions {
    let options = SharedOptions { pages: Some(pages), ..SharedOptions::default() };
    let Some(tree) = tree.cloned() else { return options };
    let count = tree.members().len();
    let of = Arc::new(move |ino| Namespace::split(ino, count).map(|(member, _)| member));
    let members = tree.members().iter().enumerate();
    let without = members.filter(|(_, member)| member.apart).map(|(index, _)| index).collect();
    let unseen = Box::new(move |ino| tree.is_apart(ino)) as UnseenChanges;
    let parts = Some(PartDivision { count, of, without });
    SharedOptions { parts, unseen: Some(unseen), ..options }
}

/// Runs `settle`, which has all the time that it needs. After `patience`, calls `say` once with the
/// reason of the wait of this process: a file system on other machines may never answer.
fn run_patiently<T>(
    text: &str,
    patience: Duration,
    say: impl FnOnce(String) + Send + 'static,
    settle: impl FnOnce() -> T,
) -> T {
    let (settled, wait) = channel::<()>();
    let text = text.to_owned();
    let tell = move || {
        if wait.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            let pid = std::process::id();
            say(format!(
                "{text}: not everything is durable after {patience:?}, and this process waits until it is: \
                 look at the device or the servers of the source; `kill -KILL {pid}` ends the process and loses \
                 what is not durable"
            ));
        }
    };
    if let Err(error) = std::thread::Builder::new().name("defuse-settle".to_owned()).spawn(tell) {
        log::warn!("a long wait at the end will not be reported: no thread: {error}");
    }
    let result = settle();
    drop(settled);
    result
}

/// Kills this process after a time limit, if a file system does not answer or memory takes long to
/// free. Data that becomes durable has all the time that it needs.
fn give_up_after(patience: Duration, settling: Arc<Mutex<()>>) {
    let wait = move || {
        std::thread::sleep(patience);
        let _settled = lock(&settling);
        log::error!("the server did not end within {patience:?} and is killed");
        let _ = kill_process(getpid(), Signal::KILL);
    };
    if let Err(error) = std::thread::Builder::new().name("defuse-end".to_owned()).spawn(wait) {
        log::warn!("no time limit for the end: {error}");
    }
}

fn lock(settling: &Mutex<()>) -> MutexGuard<'_, ()> {
    settling.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Such a server waited without a message until it was killed.
    #[test]
    fn a_server_says_once_that_it_waits_for_a_file_system_that_does_not_answer() {
        let (say, said) = channel();
        let hour = Duration::from_secs(3600);
        let result = run_patiently(
            "gluster://host/vol",
            Duration::from_millis(1),
            move |text| say.send(text).unwrap(),
            || {
                // It answers when the message is there.
                let text = said.recv_timeout(hour).unwrap();
                assert!(
                    text.starts_with("gluster://host/vol: not everything is durable"),
                    "{text}"
                );
                assert!(text.contains(&format!("kill -KILL {}", std::process::id())), "{text}");
                // The sender is gone: there is no second message.
                said.recv_timeout(hour).unwrap_err()
            },
        );
        assert_eq!(result, RecvTimeoutError::Disconnected);
        let (say, said) = channel::<String>();
        assert_eq!(run_patiently("memory:", hour, move |text| say.send(text).unwrap(), || 7), 7);
        assert!(said.recv_timeout(hour).is_err(), "a file system that answers causes no message");
    }
}
