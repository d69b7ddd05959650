//! `defuse tune`.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;

use defuse_trace::{FusectlMount, FusectlSetting, FusectlValues};
use serde::Serialize;

use crate::completions;
use crate::control;
use crate::error::{CommandFailure, Result, print};
use crate::target::CommandTarget;

/// Show and change the limits of a FUSE file system, or abort its connection
///
/// Without values, shows the present ones. The limits are the kernel's, which accepts 1 to 65535,
/// and for a mount of defuse over /dev/fuse the maximum number of worker threads (1 to 1024). With
/// the policies paper and merged, this is their MAX. Threads beyond a lower number end after their
/// request.
#[derive(clap::Args)]
pub struct TuneArgs {
    /// The mount point, or the number of the connection
    #[arg(value_name = "MOUNT|CONNECTION", add = completions::all_mounts())]
    target: PathBuf,
    /// max_background=N, congestion_threshold=N or workers=N
    #[arg(value_name = "KNOB=N", value_parser = setting)]
    settings: Vec<LimitSetting>,
    /// Abort the connection: all requests fail until the mount is unmounted
    #[arg(long, conflicts_with = "settings")]
    abort: bool,
    /// Abort without asking
    #[arg(long, requires = "abort")]
    yes: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "abort")]
    json: bool,
}

/// A value to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitSetting {
    /// A limit of the kernel.
    Kernel(FusectlSetting, u16),
    /// The maximum number of worker threads of a mount of defuse.
    Workers(u16),
}

/// The name of [`LimitSetting::Workers`].
const WORKERS: &str = "workers";

fn setting(text: &str) -> std::result::Result<LimitSetting, String> {
    let wrong = || {
        "write max_background=N or congestion_threshold=N, N from 1 to 65535, or workers=N, N from 1 to \
         1024"
            .to_owned()
    };
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let value = value.parse().ok().filter(|value| *value > 0).ok_or_else(wrong)?;
    if name == WORKERS {
        return (value <= 1024).then_some(LimitSetting::Workers(value)).ok_or_else(wrong);
    }
    let knob =
        FusectlSetting::ALL.into_iter().find(|knob| knob.name() == name).ok_or_else(wrong)?;
    Ok(LimitSetting::Kernel(knob, value))
}

#[derive(Serialize)]
struct ShownLimits {
    connection: u32,
    #[serde(flatten)]
    values: FusectlValues,
    /// Maximum number of worker threads, if the daemon returns it.
    #[serde(skip_serializing_if = "Option::is_none")]
    workers: Option<u64>,
}

/// Shows or changes the limits of a connection.
pub fn run(args: &TuneArgs) -> Result {
    let target = CommandTarget::find(&args.target)?;
    let knobs = FusectlMount::open().map_err(CommandFailure::from_error)?;
    let id = target.connection.id;
    if args.abort {
        let name = target.connection.name();
        if !args.yes && !is_meant(&name)? {
            return Err(CommandFailure::Failed(format!("{name} was not aborted")));
        }
        return knobs.abort(id).map_err(CommandFailure::from_error);
    }
    for setting in &args.settings {
        match *setting {
            LimitSetting::Kernel(knob, value) => {
                knobs.set(id, knob, value).map_err(CommandFailure::from_error)?
            }
            LimitSetting::Workers(count) => control::set_workers(target.daemon()?, count)?,
        }
    }
    let values = knobs.values(id).map_err(CommandFailure::from_error)?;
    // The limits of the kernel are there even if the daemon does not answer.
    let snapshot = target.ours.as_ref().and_then(|found| control::stat(found).ok());
    let workers = snapshot.and_then(|snapshot| snapshot.gauges.get("workers_max").copied());
    let shown = ShownLimits { connection: id, values, workers };
    if args.json {
        return print(&(serde_json::to_string(&shown).map_err(CommandFailure::from_error)? + "\n"));
    }
    print(&table(&shown))
}

fn table(shown: &ShownLimits) -> String {
    let FusectlValues { waiting, max_background, congestion_threshold } = shown.values;
    let rows = [
        ("connection", Some(u64::from(shown.connection))),
        ("waiting", Some(waiting)),
        ("max_background", Some(max_background)),
        ("congestion_threshold", Some(congestion_threshold)),
        (WORKERS, shown.workers),
    ];
    let mut text = String::new();
    for (name, value) in rows.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        let _ = writeln!(text, "{name:<20} {value:>7}");
    }
    text
}

/// Requests confirmation on a terminal.
fn is_meant(name: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        let text = format!("aborting {name} needs a confirmation: use --yes without a terminal");
        return Err(CommandFailure::Usage(text));
    }
    let mut error = std::io::stderr();
    let prompted = write!(error, "Abort {name}? All its requests will fail. [y/N] ");
    prompted.and_then(|()| error.flush()).map_err(CommandFailure::from_error)?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(CommandFailure::from_error)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_a_name_and_a_number() {
        assert_eq!(
            setting("max_background=12"),
            Ok(LimitSetting::Kernel(FusectlSetting::MaxBackground, 12))
        );
        assert_eq!(setting("workers=1024"), Ok(LimitSetting::Workers(1024)));
        for wrong in ["", "max_background", "max_background=0", "max_background=65536", "x=1"] {
            assert!(setting(wrong).is_err(), "{wrong}");
        }
        for wrong in ["workers=0", "workers=1025", "workers=paper"] {
            assert!(setting(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn values_are_aligned() {
        let values = FusectlValues { waiting: 3, max_background: 12, congestion_threshold: 9 };
        let expected = "connection                43\nwaiting                    3\n\
                        max_background            12\ncongestion_threshold       9\n";
        let mut shown = ShownLimits { connection: 43, values, workers: None };
        assert_eq!(table(&shown), expected);
        shown.workers = Some(16);
        assert_eq!(table(&shown), expected.to_owned() + "workers                   16\n");
    }
}
