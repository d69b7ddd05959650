//! `defuse stat`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use defuse_probe::{Snapshot, Stage};
use defuse_trace::{Collector, Wanted};
use serde::Serialize;

use crate::control::{self, Agreement};
use crate::error::{Failure, Result, print, warn};
use crate::kernel::KernelArgs;
use crate::prometheus;
use crate::registry::{self, Found, State};
use crate::target::Target;
use crate::until::Until;

/// Show operations of a mount, with their latencies
///
/// A mount of defuse has statistics since its start. With --stages, and for every other FUSE file system,
/// the kernel is traced from now on (root): the time of requests in the background queue, in the pending
/// queue, and in the daemon.
#[derive(clap::Args)]
pub struct StatArgs {
    /// The mount point, or the number of the connection; optional with a single mount of defuse
    #[arg(value_name = "MOUNT|CONNECTION")]
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

/// Prints the statistics of a mount.
pub fn run(args: &StatArgs) -> Result {
    let target = choose(args.target.as_ref())?;
    if args.negotiated {
        let (agreement, json) = control::negotiated(target.daemon()?)?;
        return print(&if args.json { json + "\n" } else { describe(&agreement) });
    }
    let with_kernel = args.stages || target.ours.is_none();
    let mut source = Source::open(&target, with_kernel.then_some(&args.kernel))?;
    let until = Until::new(args.duration)?;
    match args.watch {
        Some(period) => watch(args, &mut source, &until, period),
        None => {
            if source.collector.is_some() {
                source.say_that_it_begins(args.duration);
                until.wait();
            }
            let snapshot = source.take()?;
            show(args, &source, &snapshot)
        }
    }
}

fn watch(args: &StatArgs, source: &mut Source, until: &Until, period: Duration) -> Result {
    let mut before = source.take()?;
    while source.target.is_there() && until.sleep(period) {
        // The mount may have ended, which is no failure of watching.
        let Ok(now) = source.take() else { break };
        show(args, source, &now.since(&before))?;
        if !args.json {
            print("\n")?;
        }
        before = now;
    }
    Ok(())
}

fn show(args: &StatArgs, source: &Source, snapshot: &Snapshot) -> Result {
    if args.prometheus {
        return print(&prometheus::text(&source.target.connection, snapshot));
    }
    if args.json {
        let shown =
            Shown { snapshot, connection: source.target.connection.id, notes: &source.notes };
        return print(&(serde_json::to_string(&shown).map_err(Failure::failed)? + "\n"));
    }
    let mut text = snapshot.to_string();
    for note in &source.notes {
        let _ = writeln!(text, "\nnote: {note}");
    }
    print(&text)
}

/// A snapshot as JSON, with its mount.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    snapshot: &'a Snapshot,
    connection: u32,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    notes: &'a [String],
}

/// The source of the figures of a connection: its daemon, the kernel, or both.
struct Source<'a> {
    target: &'a Target,
    collector: Option<Collector>,
    /// The statistics of the daemon when tracing of the kernel began.
    before: Option<Snapshot>,
    notes: Vec<String>,
}

impl<'a> Source<'a> {
    fn open(target: &'a Target, kernel: Option<&KernelArgs>) -> Result<Self> {
        let Some(kernel) = kernel else {
            return Ok(Source { target, collector: None, before: None, notes: Vec::new() });
        };
        let wanted = Wanted { connection: Some(target.connection.id), ..Wanted::default() };
        let collector = kernel.start(wanted)?;
        let notes = collector.notes().to_vec();
        let before = match &target.ours {
            Some(found) => Some(control::stat(found)?.0),
            None => None,
        };
        Ok(Source { target, collector: Some(collector), before, notes })
    }

    /// The present counts, of the daemon and the kernel over the same time.
    fn take(&mut self) -> Result<Snapshot> {
        let Some(collector) = &mut self.collector else {
            return Ok(control::stat(self.target.daemon()?)?.0);
        };
        let id = self.target.connection.id;
        // The daemon may be another process now.
        collector.refresh().map_err(Failure::failed)?;
        let mut snapshot = collector.snapshot(id).map_err(Failure::failed)?;
        let losses = collector.losses().map_err(Failure::failed)?;
        self.notes = collector.notes().to_vec();
        self.notes.extend(losses.describe());
        if let (Some(found), Some(before)) = (&self.target.ours, &self.before) {
            let user = control::stat(found)?.0.since(before);
            snapshot.ops.extend(user.ops);
            snapshot.ops.sort_by_key(|stats| (stats.stage, stats.op));
            snapshot.gauges = user.gauges;
            snapshot.figures = user.figures;
        }
        if snapshot.ops.iter().all(|stats| stats.stage != Stage::Total) {
            self.notes.push("no request ended during this time".to_owned());
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

/// The mount that the arguments name.
fn choose(target: Option<&PathBuf>) -> Result<Target> {
    if let Some(text) = target {
        return Target::find(text);
    }
    let mut serving = registry::all();
    serving.retain(|found| found.state == State::Serving);
    match serving.len() {
        0 => Err(Failure::Failed(
            "nothing is mounted by defuse: mount something first (defuse mount), or name another \
             FUSE file system"
                .into(),
        )),
        1 => Target::of_found(serving.remove(0)),
        _ => {
            let names: Vec<_> = serving.iter().map(Found::shown_mountpoint).collect();
            Err(Failure::Usage(format!(
                "there are several mounts: name one of {}",
                names.join(", ")
            )))
        }
    }
}

fn describe(agreement: &Agreement) -> String {
    let Agreement { minor, max_write, max_read, max_background, max_workers, policy, decisions } =
        agreement;
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
