//! `defuse stat`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::control::{self, Agreement};
use crate::error::{Failure, Result, print};
use crate::paths;
use crate::registry::{self, Found, State};

/// Show what a mount has done, and how long it took
#[derive(clap::Args)]
pub struct StatArgs {
    /// Where it is mounted; not needed where there is just one
    mountpoint: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Show what was new in every period of so many seconds
    #[arg(long, value_name = "SECS", value_parser = period)]
    watch: Option<Duration>,
    /// Show what was agreed with the kernel, and why
    #[arg(long, conflicts_with = "watch")]
    negotiated: bool,
}

fn period(text: &str) -> std::result::Result<Duration, String> {
    let long_enough = |period: &Duration| *period >= Duration::from_millis(10);
    defuse_compose::seconds(text)
        .filter(long_enough)
        .ok_or_else(|| "write seconds, such as 1 or 0.5".into())
}

/// Prints the statistics of a mount.
pub fn run(args: &StatArgs) -> Result {
    let found = choose(args.mountpoint.as_ref())?;
    if args.negotiated {
        let (agreement, json) = control::negotiated(&found)?;
        return print(&if args.json { json + "\n" } else { describe(&agreement) });
    }
    let (mut before, json) = control::stat(&found)?;
    let Some(period) = args.watch else {
        return print(&if args.json { json + "\n" } else { before.to_string() });
    };
    while found.entry.is_alive() {
        thread::sleep(period);
        // It may have ended in the meantime, which is not a failure of watching.
        let Ok((now, _)) = control::stat(&found) else { break };
        let new = now.since(&before);
        print(&if args.json {
            serde_json::to_string(&new).map_err(Failure::failed)? + "\n"
        } else {
            format!("{new}\n")
        })?;
        before = now;
    }
    Ok(())
}

/// The mount that is meant.
fn choose(mountpoint: Option<&PathBuf>) -> Result<Found> {
    if let Some(path) = mountpoint {
        let found = registry::of_mountpoint(&paths::mountpoint(path));
        return found.ok_or_else(|| {
            let path = path.display();
            Failure::Failed(format!("{path} is no mount of defuse: see `defuse list` for what is"))
        });
    }
    let mut serving = registry::all();
    serving.retain(|found| found.state == State::Serving);
    match serving.len() {
        0 => {
            Err(Failure::Failed("nothing is mounted: mount something first (defuse mount)".into()))
        }
        1 => Ok(serving.remove(0)),
        _ => {
            let names: Vec<_> = serving.iter().map(Found::shown_mountpoint).collect();
            Err(Failure::Usage(format!("which mount? Name one of {}", names.join(", "))))
        }
    }
}

fn describe(agreement: &Agreement) -> String {
    let Agreement { minor, max_write, max_read, max_background, max_workers, decisions } =
        agreement;
    let mut text = format!(
        "protocol 7.{minor}, max_write {max_write}, max_read {max_read}, max_background \
         {max_background}, max_workers {max_workers}\n\n"
    );
    for decision in decisions {
        let verdict = if decision.used { "used" } else { "not used" };
        let _ = writeln!(text, "{:22} {verdict:8}  {}", decision.name, decision.reason);
    }
    text
}
