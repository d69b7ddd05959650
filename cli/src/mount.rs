//! `defuse mount`.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::{Failure, Result};
use crate::options::{self, Profile, Settings};
use crate::sources::SOURCES;
use crate::{daemon, mounted, paths, terminal};
use defuse_compose::Source;

/// Mount a file system
///
/// Returns when the mount is ready. A background process serves it until it is unmounted.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct MountArgs {
    /// The source to mount: TYPE:REST, such as passthrough:/srv/data or memory:
    pub source: OsString,
    /// The directory to mount on
    pub mountpoint: PathBuf,
    /// Options, separated by commas; later ones override earlier ones and the profile
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// The set of options to start from
    #[arg(long, value_enum, default_value_t)]
    pub profile: Profile,
    /// Maximum number of worker threads, or a policy for them: same as -o workers=
    #[arg(long, value_name = "N|paper[:MAX]|merged[:MAX]")]
    pub workers: Option<String>,
    /// Stay in the foreground, and log to the standard error
    #[arg(short, long)]
    pub foreground: bool,
    /// Append the log to this file
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Write the statistics to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub stats_file: Option<PathBuf>,
    /// Log more; twice for even more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Run as the background process
    #[arg(long, hide = true)]
    pub daemon: bool,
}

impl MountArgs {
    /// The arguments of the background process.
    pub fn to_command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec!["mount".into(), "--daemon".into()];
        let profile = clap::ValueEnum::to_possible_value(&self.profile);
        line.extend(profile.map(|profile| format!("--profile={}", profile.get_name()).into()));
        line.extend(self.workers.as_ref().map(|workers| format!("--workers={workers}").into()));
        for (flag, file) in [("--log-file", &self.log_file), ("--stats-file", &self.stats_file)] {
            if let Some(file) = file {
                line.extend([flag.into(), file.into()]);
            }
        }
        for list in &self.options {
            line.push(format!("-o{list}").into());
        }
        line.extend((0..self.verbose).map(|_| "-v".into()));
        line.extend(["--".into(), self.source.clone(), self.mountpoint.clone().into()]);
        line
    }
}

/// A mount whose command line was checked completely.
pub struct MountPlan {
    /// The source.
    pub source: Source,
    /// The absolute path of the mount point.
    pub mountpoint: PathBuf,
    /// The settings.
    pub settings: Settings,
    /// The options as given, with those of other arguments.
    pub lists: Vec<String>,
    /// The arguments, with absolute paths.
    pub args: MountArgs,
}

impl MountPlan {
    fn new(mut args: MountArgs) -> Result<MountPlan> {
        let source = SOURCES.parse(&args.source)?;
        let mut lists = args.options.clone();
        // A comma in it would begin another option.
        let workers = args.workers.as_deref().map(options::escape);
        lists.extend(workers.map(|workers| format!("workers={workers}")));
        let settings = options::parse(args.profile, &source, &lists)?;
        args.source = source.text();
        args.mountpoint = paths::mountpoint(&args.mountpoint);
        for file in [&mut args.log_file, &mut args.stats_file].into_iter().flatten() {
            *file = paths::absolute(file);
        }
        let mountpoint = args.mountpoint.clone();
        Ok(MountPlan { source, mountpoint, settings, lists, args })
    }
}

/// Checks the command line of a mount without mounting.
pub fn check(args: MountArgs) -> Result {
    MountPlan::new(args).map(drop)
}

/// Mounts, and serves in this process or in the background.
pub fn run(args: MountArgs) -> Result {
    let plan = MountPlan::new(args)?;
    if !plan.args.foreground && !plan.args.daemon {
        return daemon::start(&plan.args.to_command_line());
    }
    let ready = if plan.args.daemon { daemon::detach()? } else { daemon::Ready::Foreground };
    match start_log(plan.args.verbose, plan.args.log_file.as_deref()) {
        Ok(()) => mounted::run(&plan, ready),
        Err(failure) => {
            ready.tell(Err(&failure));
            Err(failure)
        }
    }
}

/// Starts logging to `log_file`, or to the standard error. `verbose` raises the level.
pub fn start_log(verbose: u8, log_file: Option<&Path>) -> Result {
    let level = match verbose {
        0 => log::LevelFilter::Info,
        1 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    let mut builder = env_logger::Builder::new();
    builder.filter_level(level).format(|out, record| {
        use std::io::Write;
        // One record is one line, even if a name in it has line feeds.
        let (time, text) = (out.timestamp(), record.args().to_string());
        writeln!(out, "[{time} {:<5}] {}", record.level(), terminal::foreign(&text))
    });
    if let Some(path) = log_file {
        let file = File::options().append(true).create(true).open(path);
        let file = file.map_err(|error| {
            Failure::Failed(format!("cannot write the log file {}: {error}", path.display()))
        })?;
        builder.target(env_logger::Target::Pipe(Box::new(file)));
    }
    builder.try_init().map_err(Failure::failed)?;
    std::panic::set_hook(Box::new(|panic| log::error!("internal error: {panic}")));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: MountArgs,
    }

    #[test]
    fn the_background_process_gets_the_same_arguments() {
        let line = ["x", "memory:", "/m", "-oro,size=1M", "-o", "sync", "--profile=opt", "-vv"];
        let more = ["--workers", "3", "--log-file=/l", "--stats-file=/s"];
        let args = Line::parse_from(line.into_iter().chain(more)).args;
        let again = Line::parse_from(
            args.to_command_line()[..1].iter().chain(&args.to_command_line()[1..]),
        );
        let MountArgs { daemon, .. } = again.args;
        assert!(daemon);
        assert_eq!(again.args.options, ["ro,size=1M", "sync"]);
        assert_eq!((again.args.workers.as_deref(), again.args.verbose), (Some("3"), 2));
        assert_eq!((again.args.log_file, again.args.stats_file), (args.log_file, args.stats_file));
        assert_eq!((again.args.source, again.args.mountpoint), (args.source, args.mountpoint));
        assert_eq!(again.args.profile, Profile::Opt);
    }
}
