//! `defuse breakdown`: the time of one kind of request by stages.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use defuse_probe::{Op, RequestStage, StatsSnapshot};
use defuse_trace::{CollectorKind, CollectorOptions};
use serde::Serialize;

use crate::completions;
use crate::error::{CommandFailure, Result, print, warn};
use crate::kernel::KernelArgs;
use crate::stat::period;
use crate::target::CommandTarget;
use crate::until::StopCondition;

/// Show the share of each stage in the time of one operation
///
/// Traces the kernel (root) while COMMAND runs, for SECS, or until Ctrl-C.
#[derive(clap::Args)]
pub struct BreakdownArgs {
    /// The mount point, or the number of the connection
    #[arg(value_name = "MOUNT|CONNECTION", add = completions::all_mounts())]
    target: PathBuf,
    /// The operation, such as create or read
    #[arg(long, value_parser = operation)]
    op: Op,
    /// Trace for this many seconds
    #[arg(long = "for", value_name = "SECS", value_parser = period, conflicts_with = "command")]
    duration: Option<Duration>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// A command to run and trace
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<std::ffi::OsString>,
    #[command(flatten)]
    kernel: KernelArgs,
}

/// The name of an operation.
pub fn operation(text: &str) -> std::result::Result<Op, String> {
    // Values that are no requests do not appear in a trace.
    let is_request = |op: &Op| !matches!(*op, Op::UNKNOWN | Op::RESOLVE);
    Op::parse(text).filter(is_request).ok_or_else(|| {
        let text = text.to_lowercase();
        let named = Op::ALL.iter().filter(|op| is_request(op));
        let near = named
            .map(|op| op.name().to_lowercase())
            .map(|name| (strsim::jaro(&name, &text), name))
            .max_by(|a, b| a.0.total_cmp(&b.0));
        match near.filter(|(likeness, _)| *likeness > 0.75) {
            Some((_, name)) => format!("there is no such operation; did you mean {name}?"),
            None => "there is no such operation: write one of FUSE, such as read or lookup".into(),
        }
    })
}

/// The mean of one stage.
#[derive(Debug, PartialEq, Serialize)]
struct StageShare {
    stage: &'static str,
    /// Number of requests in this stage.
    count: u64,
    /// The time of all requests in this stage, divided by the number of all requests.
    mean_ns: f64,
    /// The share of the total in per cent.
    percent: f64,
}

/// The time of an operation by stages.
#[derive(Debug, PartialEq, Serialize)]
struct TimeBreakdown {
    op: Op,
    count: u64,
    errors: u64,
    mean_ns: f64,
    shares: Vec<StageShare>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// Prints the time of an operation by stages.
pub fn run(args: &BreakdownArgs) -> Result {
    let target = CommandTarget::find(&args.target)?;
    let id = target.connection.id;
    let wanted = CollectorOptions { connection: Some(id), ..CollectorOptions::default() };
    let until = StopCondition::new(args.duration)?;
    let mut collector = args.kernel.start(wanted)?;
    let status =
        match args.command.split_first() {
            Some((program, rest)) => {
                let status = Command::new(program).args(rest).status();
                let shown = program.display();
                Some(status.map_err(|error| {
                    CommandFailure::Failed(format!("cannot run {shown}: {error}"))
                })?)
            }
            None => {
                if args.duration.is_none() {
                    warn(&"tracing: Ctrl-C ends it and shows the result");
                }
                until.wait_while(|| target.is_there());
                None
            }
        };
    let snapshot = collector.snapshot(id).map_err(CommandFailure::from_error)?;
    let losses = collector.losses().map_err(CommandFailure::from_error)?;
    let mut notes = collector.notes().to_vec();
    notes.extend(losses.describe());
    let breakdown = TimeBreakdown::from_snapshot(&snapshot, args.op, notes, collector.kind())
        .map_err(|failure| {
            // A command that failed explains an empty result.
            match status.filter(|status| !status.success()) {
                Some(status) => {
                    CommandFailure::Failed(format!("the command ended with {status}; {failure}"))
                }
                None => failure,
            }
        })?;
    print(&if args.json {
        serde_json::to_string(&breakdown).map_err(CommandFailure::from_error)? + "\n"
    } else {
        breakdown.to_string()
    })?;
    match status {
        Some(status) if !status.success() => {
            Err(CommandFailure::Failed(format!("the command ended with {status}")))
        }
        _ => Ok(()),
    }
}

impl TimeBreakdown {
    fn from_snapshot(
        snapshot: &StatsSnapshot,
        op: Op,
        notes: Vec<String>,
        kind: CollectorKind,
    ) -> Result<TimeBreakdown> {
        let total = snapshot.get_stage(RequestStage::Total, op).ok_or_else(|| {
            CommandFailure::Failed(format!(
                "no {op} ended meanwhile: run a command that makes some at the same time"
            ))
        })?;
        let count = total.latency.count;
        let share = |name: &'static str, count_in: u64, ns: f64| StageShare {
            stage: name,
            count: count_in,
            mean_ns: ns / count as f64,
            percent: 100.0 * ns / (total.latency.sum_ns.max(1)) as f64,
        };
        let stages = match kind {
            CollectorKind::Bpf => &[
                RequestStage::Background,
                RequestStage::Pending,
                RequestStage::Processing,
                RequestStage::Unsplit,
            ][..],
            CollectorKind::Tracefs => &[],
        };
        let found = stages.iter().filter_map(|stage| snapshot.get_stage(*stage, op));
        let mut shares: Vec<StageShare> = found
            .map(|stats| {
                let latency = &stats.latency;
                share(stats.stage.name(), latency.count, latency.sum_ns as f64)
            })
            .collect();
        let rest = (1.0 - shares.iter().map(|share| share.percent / 100.0).sum::<f64>())
            * total.latency.sum_ns as f64;
        // A request may end between the reads of two counts, so the rest may be negative.
        shares.push(share("not seen", 0, rest));
        let (errors, mean_ns) = (total.latency.errors, total.latency.sum_ns as f64 / count as f64);
        Ok(TimeBreakdown { op, count, errors, mean_ns, shares, notes })
    }
}

impl std::fmt::Display for TimeBreakdown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TimeBreakdown { op, count, errors, mean_ns, shares, notes } = self;
        let mut text = String::new();
        let _ = writeln!(text, "{op}: {count} requests, {errors} errors\n");
        let _ = writeln!(text, "{:<18} {:>10} {:>12} {:>8}", "stage", "count", "mean us", "share");
        for StageShare { stage, count, mean_ns, percent } in shares {
            let mean_us = mean_ns / 1e3;
            // Avoids -0.
            let (mean_us, percent) = (mean_us + 0.0, percent + 0.0);
            let _ = writeln!(text, "{stage:<18} {count:>10} {mean_us:>12.3} {percent:>7.2}%");
        }
        let (mean_us, all) = (mean_ns / 1e3, 100.0);
        let _ = writeln!(text, "{:<18} {count:>10} {mean_us:>12.3} {all:>7.2}%", "total");
        for note in notes {
            let _ = writeln!(text, "\nnote: {note}");
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_probe::Recorder;

    #[test]
    fn shares_add_up_to_the_total() {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        for (stage, ns) in [
            (RequestStage::Pending, 200),
            (RequestStage::Processing, 700),
            (RequestStage::Total, 1_000),
        ] {
            cells.record_stage(stage, Op::CREATE, ns, true);
        }
        let snapshot = recorder.snapshot();
        let found =
            TimeBreakdown::from_snapshot(&snapshot, Op::CREATE, Vec::new(), CollectorKind::Bpf)
                .unwrap();
        let shares: Vec<_> = found.shares.iter().map(|s| (s.stage, s.percent.round())).collect();
        assert_eq!(shares, [("pending", 20.0), ("processing", 70.0), ("not seen", 10.0)]);
        let sum: f64 = found.shares.iter().map(|share| share.mean_ns).sum();
        assert!((sum - found.mean_ns).abs() < 1e-6);
        assert!(
            TimeBreakdown::from_snapshot(&snapshot, Op::READ, Vec::new(), CollectorKind::Bpf)
                .is_err()
        );
    }

    #[test]
    fn a_misspelt_operation_gets_a_suggestion() {
        assert_eq!(operation("Create"), Ok(Op::CREATE));
        assert!(operation("creat").unwrap_err().contains("create"));
    }
}
