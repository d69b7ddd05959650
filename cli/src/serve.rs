//! `defuse serve`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use defuse_cache::PolicyKind;
use defuse_compose::ParsedSource;
use defuse_fs::FileSystem;
use defuse_fs::source::LockPlace;
use defuse_shared::PagedOptions;
use defuse_socket::ServerOptions;

use crate::completions;
use crate::error::Result;
use crate::options::{self, OptionProfile, OptionSettings};
use crate::sandbox::SandboxExtent;
use crate::serving::{self, ProcessArgs, ServePlan};
use crate::sources::SOURCES;
use crate::{daemon, images, mounted, paths};

/// Serve a file system to other processes over a socket
///
/// Returns when the socket is ready. A background process serves it until it receives SIGTERM. All
/// clients (with the source socket:PATH) share one file system. Only the user of the server and
/// root may connect, unless other users are admitted. An admitted user has that user's permissions.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ServeArgs {
    /// The source to serve: TYPE:REST, such as memory: or passthrough:/srv/data
    #[arg(add = completions::sources())]
    source: OsString,
    /// The socket to create
    socket: PathBuf,
    /// Options of the session and of the source, as for a mount
    #[arg(short = 'o', value_name = "OPTIONS", add = completions::mount_options())]
    options: Vec<String>,
    /// Offer shared memory to clients, too (source shared:PATH)
    #[arg(long)]
    shared: bool,
    /// With --shared: bytes of memory for pages of files that clients read without a request
    #[arg(long, value_name = "SIZE", value_parser = images::cache_size, requires = "shared")]
    cache: Option<u64>,
    /// With --shared: the policy by which pages leave this memory: lru, lfu, arc, s3-fifo, plain-e
    /// or e
    #[arg(long, value_name = "POLICY", value_parser = PolicyKind::from_name, requires = "shared")]
    eviction: Option<PolicyKind>,
    /// Also admit this user, with that user's permissions; may be repeated
    #[arg(long, value_name = "UID")]
    admit: Vec<u32>,
    /// Maximum number of connections
    #[arg(long, value_name = "N", default_value_t = ServerOptions::default().max_connections)]
    max_connections: usize,
    /// Maximum number of connections of one user other than root (default: an eighth of all)
    #[arg(long, value_name = "N")]
    max_connections_of_user: Option<usize>,
    /// Release a lock if others have waited for it for this long, while its process was stopped
    /// (default: never)
    #[arg(long, value_name = "SECONDS", value_parser = crate::stat::period)]
    dead_after: Option<Duration>,
    #[command(flatten)]
    process: ProcessArgs,
}

impl ServeArgs {
    fn paged_options(&self) -> PagedOptions {
        let default = PagedOptions::default();
        PagedOptions {
            bytes: self.cache.unwrap_or(default.bytes),
            policy: self.eviction.unwrap_or(default.policy),
        }
    }

    /// The arguments of the background process.
    fn to_command_line(&self) -> Vec<OsString> {
        let mut line = self.process.to_command_line("serve");
        line.extend(self.options.iter().map(|list| format!("-o{list}").into()));
        line.extend(self.shared.then(|| "--shared".into()));
        line.extend(self.cache.map(|bytes| format!("--cache={bytes}").into()));
        line.extend(self.eviction.map(|policy| format!("--eviction={}", policy.name()).into()));
        line.extend(self.admit.iter().map(|uid| format!("--admit={uid}").into()));
        line.push(format!("--max-connections={}", self.max_connections).into());
        line.extend(
            self.max_connections_of_user.map(|n| format!("--max-connections-of-user={n}").into()),
        );
        let after = self.dead_after.map(|after| format!("--dead-after={}", after.as_secs_f64()));
        line.extend(after.map(OsString::from));
        line.extend(["--".into(), self.source.clone(), self.socket.clone().into()]);
        line
    }
}

/// Serves in this process or in the background.
pub fn run(mut args: ServeArgs) -> Result {
    let source = SOURCES.parse(&args.source)?;
    let mut settings = options::parse(OptionProfile::Default, &source, &args.options)?;
    // Clients check permissions, and need access lists for that, whatever user they belong to.
    settings.session.default_permissions = settings.default_permissions.unwrap_or(true);
    args.source = source.text();
    args.socket = paths::absolute(&args.socket);
    args.process.log_file = args.process.log_file.as_deref().map(paths::absolute);
    if args.process.is_first() {
        return daemon::start(&args.to_command_line());
    }
    let ready = args.process.begin()?;
    let opened = args.process.start_log().and_then(|()| {
        let namespaces = {
            let stays = args.dead_after.map(|_| "it looks at processes");
            serving::namespaces(&[&source], settings.sandbox, stays)?
        };
        Ok((namespaces, open(&source, &settings)?))
    });
    match opened {
        Ok((namespaces, fs)) => {
            let text = source.text().to_string_lossy().into_owned();
            let offer = ServePlan {
                text: text.clone(),
                devices: Vec::new(),
                tree: None,
                binder: None,
                fs: Arc::clone(&fs),
                socket: args.socket.clone(),
                shared: args.shared.then(|| args.paged_options()),
                admit: args.admit.clone(),
                max_connections: args.max_connections,
                max_connections_of_user: args.max_connections_of_user,
                dead_after: args.dead_after,
                session: settings.session.clone(),
                sandbox: (settings.sandbox != SandboxExtent::None).then(|| mounted::needs(&source)),
            };
            let outcome =
                serving::run(offer, namespaces, ready, || mounted::make_durable(&*fs, &text));
            mounted::release(fs);
            outcome
        }
        Err(failure) => {
            ready.tell(Err(&failure));
            Err(failure)
        }
    }
}

fn open(source: &ParsedSource, settings: &OptionSettings) -> Result<Arc<dyn FileSystem>> {
    let mut opened = settings.source.clone();
    // The server keeps no locks, so that locks of a frontend would hold for one client only.
    opened.frontend.locks = LockPlace::FileSystem;
    Ok(source.open(&opened)?)
}
