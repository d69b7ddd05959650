//! `defuse serve`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_cache::Kind as PolicyKind;
use defuse_compose::Source;
use defuse_fs::FileSystem;
use defuse_fs::source::Locks;
use defuse_shared::{Paged, PagedOptions, Rings, Versioned};
use defuse_socket::{Admission, Server, ServerOptions};
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::SIGUSR1;

use crate::error::{Failure, Result};
use crate::options::{self, Profile, Settings};
use crate::sources::SOURCES;
use crate::{daemon, images, mount, paths, sandbox, serve, servers, signals};

/// Time limit of the end after SIGTERM. The connections may take eight seconds.
const END_PATIENCE: Duration = Duration::from_secs(20);

/// Serve a file system to other processes over a socket
///
/// Returns when the socket is ready. A background process serves it until it receives SIGTERM. All
/// clients (with the source socket:PATH) share one file system. Only the user of the server and
/// root may connect, unless other users are admitted. An admitted user has that user's permissions.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ServeArgs {
    /// The source to serve: TYPE:REST, such as memory: or passthrough:/srv/data
    source: OsString,
    /// The socket to create
    socket: PathBuf,
    /// Options of the session and of the source, as for a mount
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Vec<String>,
    /// Offer shared memory to clients, too (source shared:PATH)
    #[arg(long)]
    shared: bool,
    /// With --shared: bytes of memory for pages of files that clients read without a request
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "shared")]
    cache: Option<u64>,
    /// With --shared: the policy by which pages leave this memory: lru, lfu, arc, s3-fifo, plain-e or e
    #[arg(long, value_name = "POLICY", value_parser = PolicyKind::named, requires = "shared")]
    eviction: Option<PolicyKind>,
    /// Also admit this user, with that user's permissions; may be repeated
    #[arg(long, value_name = "UID")]
    admit: Vec<u32>,
    /// Maximum number of connections
    #[arg(long, value_name = "N", default_value_t = ServerOptions::default().max_connections)]
    max_connections: usize,
    /// Maximum number of connections of one user (default: half of all)
    #[arg(long, value_name = "N")]
    max_connections_of_user: Option<usize>,
    /// Stay in the foreground, and log to the standard error
    #[arg(short, long)]
    foreground: bool,
    /// Append the log to this file
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// Log more; twice for even more
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Run as the background process
    #[arg(long, hide = true)]
    daemon: bool,
}

impl ServeArgs {
    fn paged(&self) -> PagedOptions {
        let default = PagedOptions::default();
        PagedOptions {
            bytes: self.cache.unwrap_or(default.bytes),
            policy: self.eviction.unwrap_or(default.policy),
        }
    }

    /// The arguments of the background process.
    fn to_command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec!["serve".into(), "--daemon".into()];
        line.extend(self.options.iter().map(|list| format!("-o{list}").into()));
        line.extend(self.shared.then(|| "--shared".into()));
        line.extend(self.cache.map(|bytes| format!("--cache={bytes}").into()));
        line.extend(self.eviction.map(|policy| format!("--eviction={}", policy.name()).into()));
        line.extend(self.admit.iter().map(|uid| format!("--admit={uid}").into()));
        line.push(format!("--max-connections={}", self.max_connections).into());
        line.extend(
            self.max_connections_of_user.map(|n| format!("--max-connections-of-user={n}").into()),
        );
        if let Some(file) = &self.log_file {
            line.extend(["--log-file".into(), file.into()]);
        }
        line.extend((0..self.verbose).map(|_| "-v".into()));
        line.extend(["--".into(), self.source.clone(), self.socket.clone().into()]);
        line
    }
}

/// The value of `--cache`.
fn size(text: &str) -> std::result::Result<u64, String> {
    let bytes = images::size(text)?;
    if bytes < PagedOptions::LEAST {
        return Err("the least is 1M: without --shared there is no cache".to_owned());
    }
    Ok(bytes)
}

/// Serves in this process or in the background.
pub fn run(mut args: ServeArgs) -> Result {
    let source = SOURCES.parse(&args.source)?;
    let settings = options::parse(Profile::Default, &source, &args.options)?;
    args.source = source.text();
    args.socket = paths::absolute(&args.socket);
    args.log_file = args.log_file.as_deref().map(paths::absolute);
    if !args.foreground && !args.daemon {
        return daemon::start(&args.to_command_line());
    }
    let ready = if args.daemon { daemon::detach()? } else { daemon::Ready::Foreground };
    let log = mount::start_log(args.verbose, args.log_file.as_deref());
    match log.and_then(|()| listen(&args, &source, &settings)) {
        Ok(Listening { server, fs, settling }) => {
            // The server works without an entry.
            let text = source.text().to_string_lossy().into_owned();
            let registered = servers::register(text, &args.socket);
            let _registered = registered.map_err(|failure| log::warn!("{failure}"));
            ready.tell(Ok(&[]));
            server.run();
            log::info!("{} has ended", args.socket.display());
            let _settling = lock(&settling);
            serve::make_durable(&*fs, &source.text().to_string_lossy())
        }
        Err(failure) => {
            ready.tell(Err(&failure));
            Err(failure)
        }
    }
}

/// A server that listens.
struct Listening {
    server: Arc<Server>,
    fs: Arc<dyn FileSystem>,
    /// Locked while the file system makes everything durable, however long that takes.
    settling: Arc<Mutex<()>>,
}

fn listen(args: &ServeArgs, source: &Source, settings: &Settings) -> Result<Listening> {
    serve::raise_file_limit();
    let mut opened = settings.source.clone();
    // The server keeps no locks, so that those of a frontend would hold for one client only.
    opened.frontend.locks = Locks::FileSystem;
    let fs = source.open(&opened)?;
    if settings.sandbox {
        sandbox::enter();
    }
    let admission = match args.admit.as_slice() {
        [] => Admission::SameUser,
        users => Admission::Users(users.to_vec()),
    };
    // Names have versions and files have pages only where all changes come through this server.
    let versioned = args.shared.then(|| Versioned::over(Arc::clone(&fs))).flatten();
    let fs = versioned.clone().map_or(fs, |versioned| versioned as Arc<dyn FileSystem>);
    let paged = args.shared.then(|| Paged::over(Arc::clone(&fs), args.paged())).flatten();
    let fs = paged.clone().map_or(fs, |paged| paged as Arc<dyn FileSystem>);
    let session = settings.session.clone();
    let max_connections = args.max_connections;
    let max_connections_of_user =
        args.max_connections_of_user.unwrap_or(max_connections / 2).max(1);
    let options = ServerOptions {
        session,
        admission,
        max_connections,
        max_connections_of_user,
        pages: paged.map(|paged| paged as _),
        versions: versioned.map(|versioned| versioned as _),
        lines: args.shared.then(|| Arc::new(Rings::default()) as _),
        ..ServerOptions::default()
    };
    let mut caught = signals::catch().map_err(Failure::failed)?;
    let server = Server::bind(&args.socket, Arc::clone(&fs), options).map_err(Failure::failed)?;
    let server = Arc::new(server);
    log::info!("{} is served at {}", source.text().display(), args.socket.display());
    let served = Arc::downgrade(&server);
    let settling = Arc::new(Mutex::new(()));
    let until_settled = Arc::clone(&settling);
    let listen = move || {
        for signal in caught.forever() {
            let Some(server) = served.upgrade() else { return };
            match signal {
                SIGUSR1 => log::info!("statistics: {}", server.snapshot()),
                _ => {
                    server.shut_down();
                    give_up_after(END_PATIENCE, Arc::clone(&until_settled));
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("defuse-signals".to_owned());
    thread.spawn(listen).map_err(Failure::failed)?;
    if settings.sandbox {
        sandbox::filter(serve::needs(source));
    }
    Ok(Listening { server, fs, settling })
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
