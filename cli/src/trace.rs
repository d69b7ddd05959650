//! `defuse trace`: live requests.

use std::fmt::Write as _;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::Duration;

use defuse_fs::Errno;
use defuse_probe::Op;
use defuse_trace::{
    Collector, CollectorOptions, CompletedRequest, EventFilter, NodeNames, TraceTimeline,
};
use serde_json::json;

use crate::breakdown::operation;
use crate::completions;
use crate::error::{CommandFailure, Result, print, warn};
use crate::kernel::KernelArgs;
use crate::stat::period;
use crate::target::CommandTarget;
use crate::terminal;
use crate::until::StopCondition;

/// Time between two reads of the kernel's events: the maximum delay of the display.
const PERIOD: Duration = Duration::from_millis(10);

/// Show live requests
///
/// One line for each request at its end: time, operation, inode, name, offset and size, result,
/// process, and the time in each stage. Traces the kernel (root).
#[derive(clap::Args)]
pub struct TraceArgs {
    /// The mount point, or the number of the connection
    #[arg(value_name = "MOUNT|CONNECTION", add = completions::all_mounts())]
    target: PathBuf,
    /// Only these operations, such as lookup,create
    #[arg(long, value_name = "OP", value_delimiter = ',', value_parser = operation)]
    op: Vec<Op>,
    /// Only requests of this process
    #[arg(long)]
    pid: Option<u32>,
    /// Only requests that took longer than this many seconds, such as 0.001
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    slower_than: Option<Duration>,
    /// Only requests that failed
    #[arg(long)]
    errors: bool,
    /// Only requests whose name contains this text
    #[arg(long, value_name = "TEXT")]
    name: Option<String>,
    /// Exit after this many requests
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Exit after this many seconds
    #[arg(long = "for", value_name = "SECS", value_parser = period)]
    duration: Option<Duration>,
    /// Print JSON, one object per line
    #[arg(long, conflicts_with = "perfetto")]
    json: bool,
    /// Write a timeline for ui.perfetto.dev to this file instead
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    #[command(flatten)]
    kernel: KernelArgs,
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    defuse_fs::source::seconds(text).ok_or_else(|| "write seconds, such as 0.001".into())
}

/// Prints requests until the end.
pub fn run(args: &TraceArgs) -> Result {
    let target = CommandTarget::find(&args.target)?;
    let slower_than = args.slower_than.unwrap_or_default();
    let filter = EventFilter {
        ops: args.op.clone(),
        pid: args.pid,
        slower_than_ns: u64::try_from(slower_than.as_nanos()).unwrap_or(u64::MAX),
        errors: args.errors,
    };
    let connection = Some(target.connection.id);
    let wanted =
        CollectorOptions { connection, events: Some(filter), ..CollectorOptions::default() };
    let mut sink = TraceSink::open(args, &target)?;
    let until = StopCondition::new(args.duration)?;
    let mut collector = args.kernel.start(wanted)?;
    for note in collector.notes() {
        warn(&format!("note: {note}"));
    }
    let outcome = follow(args, &target, &mut collector, &until, &mut sink);
    sink.end()?;
    outcome?;
    match collector.losses().map_err(CommandFailure::from_error)?.describe() {
        Some(lost) => {
            warn(&format!("note: {lost}"));
            Ok(())
        }
        None => Ok(()),
    }
}

fn follow(
    args: &TraceArgs,
    target: &CommandTarget,
    collector: &mut Collector,
    until: &StopCondition,
    sink: &mut TraceSink,
) -> Result {
    let mut names = NodeNames::default();
    let mut left = args.count.unwrap_or(u64::MAX);
    loop {
        let goes_on = until.sleep(PERIOD) && target.is_there();
        let mut outcome = Ok(());
        let mut each = |event: CompletedRequest| {
            names.learn(&event);
            let name = names.describe(&event);
            if left == 0 || outcome.is_err() || !is_named(args.name.as_deref(), name.as_deref()) {
                return;
            }
            left -= 1;
            outcome = sink.put(&event, name.as_deref());
        };
        collector.events(&mut each).map_err(CommandFailure::from_error)?;
        outcome?;
        sink.flush()?;
        if !goes_on || left == 0 {
            return Ok(());
        }
    }
}

fn is_named(wanted: Option<&str>, name: Option<&str>) -> bool {
    wanted.is_none_or(|wanted| name.is_some_and(|name| name.contains(wanted)))
}

/// The output.
enum TraceSink {
    Lines { text: String, first_ns: Option<u64>, last_ns: u64 },
    Json { text: String },
    Perfetto { timeline: Option<TraceTimeline<BufWriter<File>>>, path: PathBuf },
}

impl TraceSink {
    fn open(args: &TraceArgs, target: &CommandTarget) -> Result<TraceSink> {
        if let Some(path) = &args.perfetto {
            let timeline = File::create(path)
                .and_then(|file| TraceTimeline::begin(BufWriter::new(file), &target.connection))
                .map_err(|error| write_error(path, &error))?;
            return Ok(TraceSink::Perfetto { timeline: Some(timeline), path: path.clone() });
        }
        if args.json {
            return Ok(TraceSink::Json { text: String::new() });
        }
        Ok(TraceSink::Lines { text: heading(), first_ns: None, last_ns: 0 })
    }

    fn put(&mut self, event: &CompletedRequest, name: Option<&str>) -> Result {
        match self {
            TraceSink::Lines { text, first_ns, last_ns } => {
                let first_ns = *first_ns.get_or_insert(event.ended_ns);
                *last_ns = event.ended_ns;
                // The buffers of the processors are read in turn, so requests may be slightly out
                // of order.
                let at_ns = event.ended_ns.saturating_sub(first_ns);
                line(text, at_ns, event, name);
            }
            TraceSink::Json { text } => {
                let _ = writeln!(text, "{}", as_json(event, name));
            }
            TraceSink::Perfetto { timeline, path } => {
                if let Some(timeline) = timeline {
                    timeline.add(event, name).map_err(|error| write_error(path, &error))?;
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result {
        match self {
            TraceSink::Lines { text, .. } | TraceSink::Json { text } if !text.is_empty() => {
                print(&std::mem::take(text))
            }
            _ => Ok(()),
        }
    }

    fn end(&mut self) -> Result {
        if let TraceSink::Perfetto { timeline, path } = self
            && let Some(timeline) = timeline.take()
        {
            timeline.end().map_err(|error| write_error(path, &error))?;
        }
        Ok(())
    }
}

fn write_error(path: &Path, error: &std::io::Error) -> CommandFailure {
    CommandFailure::Failed(format!("cannot write {}: {error}", path.display()))
}

fn heading() -> String {
    format!(
        "{:>12} {:<15} {:>20} {:>9} {:<12} {:>9} {:>9} {:>9} {:>9} {:<16} NAME\n",
        "TIME",
        "OP",
        "NODE",
        "SIZE",
        "RESULT",
        "BACKGR us",
        "PEND us",
        "PROC us",
        "TOTAL us",
        "WHO"
    )
}

fn line(text: &mut String, at_ns: u64, event: &CompletedRequest, name: Option<&str>) {
    let us = |ns: Option<u64>| match ns {
        Some(ns) => format!("{}.{}", ns / 1_000, ns % 1_000 / 100),
        None => "-".to_owned(),
    };
    let at = format!("{}.{:06}", at_ns / 1_000_000_000, at_ns / 1_000 % 1_000_000);
    let who = format!("{}/{}", terminal::escape_controls(&event.comm), event.pid);
    let (op, node, result) = (event.op.name(), event.nodeid, result(event.error));
    let (background, pending) = (us(event.background_ns()), us(event.pending_ns()));
    let (processing, total) = (us(event.processing_ns()), us(Some(event.total_ns())));
    let size = if event.size > 0 { event.size.to_string() } else { "-".to_owned() };
    let _ = write!(
        text,
        "{at:>12} {op:<15} {node:>20} {size:>9} {result:<12} {background:>9} {pending:>9} \
         {processing:>9} {total:>9} {who:<16} "
    );
    // A name may contain line feeds.
    let name = terminal::escape_controls(name.unwrap_or("-"));
    let _ = writeln!(text, "{name}");
}

/// `OK`, or the name of an error, such as `ENOENT`.
fn result(error: i32) -> String {
    match (error, Errno::from_raw(error).name()) {
        (0, _) => "OK".to_owned(),
        (_, Some(name)) => name.to_owned(),
        (number, None) => format!("errno {number}"),
    }
}

fn as_json(event: &CompletedRequest, name: Option<&str>) -> serde_json::Value {
    json!({
        "op": event.op, "connection": event.connection, "unique": event.unique,
        "nodeid": event.nodeid, "child": event.child, "name": name,
        "offset": event.offset, "size": event.size,
        "request_len": event.request_len, "reply_len": event.reply_len,
        "error": event.error, "result": result(event.error),
        "pid": event.pid, "comm": event.comm, "background": event.background,
        "daemon_thread": event.taker, "ended_ns": event.ended_ns,
        "background_ns": event.background_ns(), "pending_ns": event.pending_ns(),
        "processing_ns": event.processing_ns(), "pending_processing_ns": event.unsplit_ns(),
        "total_ns": event.total_ns(),
    })
}
