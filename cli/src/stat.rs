//! `defuse stat`.

use std::fmt::Write as _;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use defuse_probe::{RequestStage, StatsSnapshot};
use defuse_trace::{Collector, CollectorOptions};
use serde::Serialize;

use crate::completions;
use crate::control::{self, NegotiatedValues};
use crate::error::{CommandFailure, Result, print, warn};
use crate::kernel::KernelArgs;
use crate::prometheus;
use crate::registry::{self, RegisteredMount, RegistrationState};
use crate::served::ServerMeasurements;
use crate::servers::{self, ServerEntry};
use crate::target::CommandTarget;
use crate::until::StopCondition;

/// Show operations of a mount or a server, with their latencies
///
/// A mount of defuse has statistics since its start. With --stages, and for every other FUSE file
/// system, the kernel is traced from now on (root): the time of requests in the background queue,
/// in the pending queue, and in the daemon. For a server (serve, manager) name its socket: each
/// client and each device has figures of its own. Only the user of a daemon and root may ask it.
#[derive(clap::Args)]
pub struct StatArgs {
    /// The mount point, the number of the connection, or the socket of a server; optional if defuse
    /// has only one mount or server
    #[arg(value_name = "MOUNT|CONNECTION|SOCKET", add = completions::all_mounts())]
    target: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Print the text format of Prometheus
    #[arg(long, conflicts_with_all = ["json", "watch", "negotiated"])]
    prometheus: bool,
    /// Show the stages in the kernel, too
    #[arg(long, conflicts_with = "negotiated")]
    stages: bool,
    /// Trace the kernel for this many seconds instead of until Ctrl-C; end --watch after them
    #[arg(long = "for", value_name = "SECS", value_parser = period, conflicts_with = "negotiated")]
    duration: Option<Duration>,
    /// Show the difference after every period of this many seconds
    #[arg(long, value_name = "SECS", value_parser = period)]
    watch: Option<Duration>,
    /// Show the result of INIT, with reasons
    #[arg(long, conflicts_with = "watch")]
    negotiated: bool,
    #[command(flatten)]
    kernel: KernelArgs,
}

/// Seconds, at least 10 ms of them.
pub fn period(text: &str) -> std::result::Result<Duration, String> {
    let long_enough = |period: &Duration| *period >= Duration::from_millis(10);
    defuse_fs::source::seconds(text)
        .filter(long_enough)
        .ok_or_else(|| "write seconds, such as 1 or 0.5".into())
}

/// Prints the statistics of a mount or a server.
pub fn run(args: &StatArgs) -> Result {
    match choose(args.target.as_ref())? {
        StatSubject::Mount(target) => run_mount(args, &target),
        StatSubject::Server(server) => run_server(args, server),
    }
}

fn run_mount(args: &StatArgs, target: &CommandTarget) -> Result {
    if args.negotiated {
        let (agreement, json) = control::query_negotiated(target.daemon()?)?;
        return print(&if args.json { json + "\n" } else { describe(&agreement) });
    }
    refuse_unregistered(args, target)?;
    let with_kernel = args.stages || target.ours.is_none();
    let mut source = FigureSource::open(target, with_kernel.then_some(&args.kernel))?;
    let until = StopCondition::new(args.duration)?;
    match args.watch {
        Some(period) => watch(args, &mut source, &until, period),
        None => {
            if source.collector.is_some() {
                source.say_that_it_begins(args.duration);
                until.wait_while(|| target.is_there());
            }
            let snapshot = source.take()?;
            source.show(args, &snapshot)
        }
    }
}

/// Refuses to measure requests in the kernel until Ctrl-C where the user expects the counts of a
/// daemon.
fn refuse_unregistered(args: &StatArgs, target: &CommandTarget) -> Result {
    let is_timed = args.stages || args.duration.is_some() || args.watch.is_some();
    let daemon = target.connection.processes.iter().find(|one| one.comm.starts_with("defuse"));
    match daemon {
        Some(daemon) if target.ours.is_none() && !is_timed => Err(CommandFailure::Failed(format!(
            "process {} serves {}, and is not registered where this user looks: ask as its user, with the same \
             {}, or measure its requests in the kernel with --stages or --duration",
            daemon.pid,
            target.connection.name(),
            registry::DIR_VARIABLE
        ))),
        _ => Ok(()),
    }
}

fn run_server(args: &StatArgs, mut server: ServerEntry) -> Result {
    let refused = [
        (args.stages, "--stages", "requests of its clients do not go through the kernel's FUSE"),
        (args.negotiated, "--negotiated", "each of its clients has negotiated for itself"),
    ];
    if let Some((_, option, why)) = refused.into_iter().find(|(is_set, ..)| *is_set) {
        let socket = &server.socket;
        return Err(CommandFailure::Usage(format!(
            "{socket} is the socket of a server: there is no {option} of it, because {why}; leave {option} \
             out, or name the mount point of a client"
        )));
    }
    match args.watch {
        Some(period) => watch(args, &mut server, &StopCondition::new(args.duration)?, period),
        None => {
            let served = server.take()?;
            server.show(args, &served)
        }
    }
}

/// A daemon whose statistics are shown again and again.
trait StatisticsSource {
    type Sample;

    /// The present counts.
    fn take(&mut self) -> Result<Self::Sample>;

    /// The counts between two moments.
    fn changes_since(now: &Self::Sample, before: &Self::Sample) -> Self::Sample;

    /// Prints the sample in the form that `args` select.
    fn show(&self, args: &StatArgs, sample: &Self::Sample) -> Result;

    /// True until its end.
    fn is_there(&self) -> bool;
}

fn watch<W: StatisticsSource>(
    args: &StatArgs,
    source: &mut W,
    until: &StopCondition,
    period: Duration,
) -> Result {
    let mut before = source.take()?;
    while source.is_there() && until.sleep(period) {
        // The daemon may have ended, which is no failure of watching.
        let Ok(now) = source.take() else { break };
        source.show(args, &W::changes_since(&now, &before))?;
        if !args.json {
            print("\n")?;
        }
        before = now;
    }
    Ok(())
}

fn print_json(shown: &impl Serialize) -> Result {
    print(&(serde_json::to_string(shown).map_err(CommandFailure::from_error)? + "\n"))
}

/// A snapshot as JSON, with its mount.
#[derive(Serialize)]
struct ShownMount<'a> {
    #[serde(flatten)]
    snapshot: &'a StatsSnapshot,
    connection: u32,
}

impl StatisticsSource for FigureSource<'_> {
    type Sample = StatsSnapshot;

    fn take(&mut self) -> Result<StatsSnapshot> {
        FigureSource::take(self)
    }

    fn changes_since(now: &StatsSnapshot, before: &StatsSnapshot) -> StatsSnapshot {
        now.delta_since(before)
    }

    fn show(&self, args: &StatArgs, snapshot: &StatsSnapshot) -> Result {
        let connection = &self.target.connection;
        if args.prometheus {
            return print(&prometheus::text(connection, snapshot));
        }
        if args.json {
            return print_json(&ShownMount { snapshot, connection: connection.id });
        }
        print(&snapshot.to_string())
    }

    fn is_there(&self) -> bool {
        self.target.is_there()
    }
}

/// Statistics as JSON, with their server.
#[derive(Serialize)]
struct ShownServer<'a> {
    socket: &'a str,
    source: &'a str,
    pid: u32,
    #[serde(flatten)]
    served: &'a ServerMeasurements,
}

impl StatisticsSource for ServerEntry {
    type Sample = ServerMeasurements;

    fn take(&mut self) -> Result<ServerMeasurements> {
        control::stat_server(self).map(ServerMeasurements::with_programs)
    }

    fn changes_since(now: &ServerMeasurements, before: &ServerMeasurements) -> ServerMeasurements {
        now.changes_since(before)
    }

    fn show(&self, args: &StatArgs, served: &ServerMeasurements) -> Result {
        let ServerEntry { socket, source, pid, .. } = self;
        if args.prometheus {
            return print(&prometheus::render_server(socket, served));
        }
        if args.json {
            return print_json(&ShownServer { socket, source, pid: *pid, served });
        }
        print(&served.to_string())
    }

    fn is_there(&self) -> bool {
        self.is_alive()
    }
}

/// The source of the figures of a connection: its daemon, the kernel, or both.
struct FigureSource<'a> {
    target: &'a CommandTarget,
    collector: Option<Collector>,
    /// The statistics of the daemon when tracing of the kernel began.
    before: Option<StatsSnapshot>,
}

impl<'a> FigureSource<'a> {
    fn open(target: &'a CommandTarget, kernel: Option<&KernelArgs>) -> Result<Self> {
        let Some(kernel) = kernel else {
            return Ok(FigureSource { target, collector: None, before: None });
        };
        let wanted = CollectorOptions {
            connection: Some(target.connection.id),
            ..CollectorOptions::default()
        };
        let collector = kernel.start(wanted)?;
        let before = match &target.ours {
            Some(found) => Some(control::stat(found)?),
            None => None,
        };
        Ok(FigureSource { target, collector: Some(collector), before })
    }

    /// The present counts, of the daemon and the kernel over the same time.
    fn take(&mut self) -> Result<StatsSnapshot> {
        let Some(collector) = &mut self.collector else {
            return control::stat(self.target.daemon()?);
        };
        let id = self.target.connection.id;
        // The daemon may be another process now.
        collector.refresh().map_err(CommandFailure::from_error)?;
        let mut snapshot = collector.snapshot(id).map_err(CommandFailure::from_error)?;
        let losses = collector.losses().map_err(CommandFailure::from_error)?;
        snapshot.notes = collector.notes().to_vec();
        snapshot.notes.extend(losses.describe());
        if let (Some(found), Some(before)) = (&self.target.ours, &self.before) {
            let user = control::stat(found)?.delta_since(before);
            snapshot.ops.extend(user.ops);
            snapshot.ops.sort_by_key(|stats| (stats.stage, stats.op));
            snapshot.gauges = user.gauges;
            snapshot.figures = user.figures;
            snapshot.notes.extend(user.notes);
        }
        if snapshot.ops.iter().all(|stats| stats.stage != RequestStage::Total) {
            snapshot.notes.push("no request ended during this time".to_owned());
        }
        Ok(snapshot)
    }

    fn say_that_it_begins(&self, duration: Option<Duration>) {
        if duration.is_none() {
            let name = self.target.connection.name();
            warn(&format!("tracing {name}: Ctrl-C ends it and shows the result"));
        }
    }
}

/// A daemon with statistics.
enum StatSubject {
    Mount(CommandTarget),
    Server(ServerEntry),
}

/// The mount or server that the arguments name.
fn choose(target: Option<&PathBuf>) -> Result<StatSubject> {
    if let Some(text) = target {
        return find(text);
    }
    let mut serving = registry::list_all();
    serving.retain(|found| found.state == RegistrationState::Serving);
    let mut servers = servers::list_all();
    match (serving.len(), servers.len()) {
        (0, 0) => Err(CommandFailure::Failed(
            "nothing is mounted or served by defuse: mount or serve something first (defuse mount, defuse \
             serve), or name another FUSE file system"
                .into(),
        )),
        (1, 0) => CommandTarget::from_found(serving.remove(0)).map(StatSubject::Mount),
        (0, 1) => Ok(StatSubject::Server(servers.remove(0))),
        (_, count) => {
            let names = serving.iter().map(RegisteredMount::shown_mountpoint);
            let names: Vec<_> = names.chain(servers.into_iter().map(|one| one.socket)).collect();
            let what = if count > 0 { "mounts or servers" } else { "mounts" };
            Err(CommandFailure::Usage(format!(
                "there are several {what}: name one of {}",
                names.join(", ")
            )))
        }
    }
}

fn find(text: &Path) -> Result<StatSubject> {
    match CommandTarget::find(text) {
        Ok(target) => Ok(StatSubject::Mount(target)),
        Err(failure) => match servers::find_by_socket(text) {
            Some(server) => Ok(StatSubject::Server(server)),
            None if is_socket(text) => Err(CommandFailure::Failed(format!(
                "{} is a socket, and no server of defuse that you may see listens there: ask as its user or \
                 as root; `defuse list` shows the others",
                text.display()
            ))),
            // A number names a connection.
            None if text.to_str().is_some_and(|text| text.parse::<u32>().is_ok()) => Err(failure),
            None => Err(CommandFailure::Failed(format!(
                "{} is neither the mount point of a FUSE file system, nor the number of a connection, nor the \
                 socket of a server: `defuse top --once` and `defuse list` show what there is",
                text.display()
            ))),
        },
    }
}

fn is_socket(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.file_type().is_socket())
}

fn describe(agreement: &NegotiatedValues) -> String {
    let NegotiatedValues {
        minor,
        max_write,
        max_read,
        max_background,
        max_workers,
        policy,
        decisions,
    } = agreement;
    let mut text = format!(
        "protocol 7.{minor}, max_write {max_write}, max_read {max_read}, max_background \
         {max_background}, max_workers {max_workers} ({policy})\n\n"
    );
    for decision in decisions {
        let verdict = if decision.used { "used" } else { "not used" };
        let _ = writeln!(text, "{:22} {verdict:8}  {}", decision.name, decision.reason);
    }
    text
}
