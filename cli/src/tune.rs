//! `defuse tune`.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;

use defuse_trace::{Knob, Knobs, Values};
use serde::Serialize;

use crate::error::{Failure, Result, print};
use crate::target::Target;

/// Show and change the limits of the kernel for a FUSE file system, or abort its connection
///
/// Without values, shows the present ones. The kernel accepts 1 to 65535.
#[derive(clap::Args)]
pub struct TuneArgs {
    /// The mount point, or the number of the connection
    #[arg(value_name = "MOUNT|CONNECTION")]
    target: PathBuf,
    /// max_background=N or congestion_threshold=N
    #[arg(value_name = "KNOB=N", value_parser = setting)]
    settings: Vec<Setting>,
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
struct Setting {
    knob: Knob,
    value: u16,
}

fn setting(text: &str) -> std::result::Result<Setting, String> {
    let wrong = || "write max_background=N or congestion_threshold=N, N from 1 to 65535".to_owned();
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let knob = Knob::ALL.into_iter().find(|knob| knob.name() == name).ok_or_else(wrong)?;
    let value = value.parse().ok().filter(|value| *value > 0).ok_or_else(wrong)?;
    Ok(Setting { knob, value })
}

#[derive(Serialize)]
struct Shown {
    connection: u32,
    #[serde(flatten)]
    values: Values,
}

/// Shows or changes the limits of a connection.
pub fn run(args: &TuneArgs) -> Result {
    let target = Target::find(&args.target)?;
    let knobs = Knobs::open().map_err(Failure::failed)?;
    let id = target.connection.id;
    if args.abort {
        let name = target.connection.name();
        if !args.yes && !is_meant(&name)? {
            return Err(Failure::Failed(format!("{name} was not aborted")));
        }
        return knobs.abort(id).map_err(Failure::failed);
    }
    for Setting { knob, value } in &args.settings {
        knobs.set(id, *knob, *value).map_err(Failure::failed)?;
    }
    let values = knobs.values(id).map_err(Failure::failed)?;
    if args.json {
        let shown = Shown { connection: id, values };
        return print(&(serde_json::to_string(&shown).map_err(Failure::failed)? + "\n"));
    }
    print(&table(id, &values))
}

fn table(id: u32, values: &Values) -> String {
    let Values { waiting, max_background, congestion_threshold } = values;
    let rows = [
        ("connection", u64::from(id)),
        ("waiting", *waiting),
        ("max_background", *max_background),
        ("congestion_threshold", *congestion_threshold),
    ];
    let mut text = String::new();
    for (name, value) in rows {
        let _ = writeln!(text, "{name:<20} {value:>7}");
    }
    text
}

/// Asks for confirmation on a terminal.
fn is_meant(name: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        let text = format!("aborting {name} needs a confirmation: use --yes without a terminal");
        return Err(Failure::Usage(text));
    }
    let mut error = std::io::stderr();
    let asked = write!(error, "Abort {name}? All its requests will fail. [y/N] ");
    asked.and_then(|()| error.flush()).map_err(Failure::failed)?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(Failure::failed)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_a_name_and_a_number() {
        let expected = Setting { knob: Knob::MaxBackground, value: 12 };
        assert_eq!(setting("max_background=12"), Ok(expected));
        for wrong in ["", "max_background", "max_background=0", "max_background=65536", "x=1"] {
            assert!(setting(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn values_are_aligned() {
        let values = Values { waiting: 3, max_background: 12, congestion_threshold: 9 };
        let expected = "connection                43\nwaiting                    3\n\
                        max_background            12\ncongestion_threshold       9\n";
        assert_eq!(table(43, &values), expected);
    }
}
