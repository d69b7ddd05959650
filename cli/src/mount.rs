//! `defuse mount`.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::Result;
use crate::options::{self, OptionProfile, OptionSettings};
use crate::serving::ProcessArgs;
use crate::sources::SOURCES;
use crate::{daemon, mounted, paths};
use defuse_compose::ParsedSource;

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
    pub profile: OptionProfile,
    /// Maximum number of worker threads, or a policy for them: same as -o workers=
    #[arg(long, value_name = "N|paper[:MAX]|merged[:MAX]")]
    pub workers: Option<String>,
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Write the statistics to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub stats_file: Option<PathBuf>,
}

impl MountArgs {
    /// The arguments of the background process.
    pub fn to_command_line(&self) -> Vec<OsString> {
        let mut line = self.process.to_command_line("mount");
        let profile = clap::ValueEnum::to_possible_value(&self.profile);
        line.extend(profile.map(|profile| format!("--profile={}", profile.get_name()).into()));
        line.extend(self.workers.as_ref().map(|workers| format!("--workers={workers}").into()));
        if let Some(file) = &self.stats_file {
            line.extend(["--stats-file".into(), file.into()]);
        }
        for list in &self.options {
            line.push(format!("-o{list}").into());
        }
        line.extend(["--".into(), self.source.clone(), self.mountpoint.clone().into()]);
        line
    }
}

/// A mount whose command line was checked completely.
pub struct CheckedMount {
    /// The source.
    pub source: ParsedSource,
    /// The absolute path of the mount point.
    pub mountpoint: PathBuf,
    /// The settings.
    pub settings: OptionSettings,
    /// The options as given, with the options of other arguments.
    pub lists: Vec<String>,
    /// The arguments, with absolute paths.
    pub args: MountArgs,
}

impl CheckedMount {
    fn new(mut args: MountArgs) -> Result<CheckedMount> {
        let source = SOURCES.parse(&args.source)?;
        let mut lists = args.options.clone();
        // A comma in it would begin another option.
        let workers = args.workers.as_deref().map(options::escape);
        lists.extend(workers.map(|workers| format!("workers={workers}")));
        let mut settings = options::parse(args.profile, &source, &lists)?;
        args.source = source.text();
        args.mountpoint = paths::mountpoint(&args.mountpoint);
        settings.source.frontend.mountpoint = Some(args.mountpoint.clone());
        args.process.log_file = args.process.log_file.as_deref().map(paths::absolute);
        args.stats_file = args.stats_file.as_deref().map(paths::absolute);
        let mountpoint = args.mountpoint.clone();
        Ok(CheckedMount { source, mountpoint, settings, lists, args })
    }
}

/// Checks the command line of a mount without mounting.
pub fn check(args: MountArgs) -> Result {
    CheckedMount::new(args).map(drop)
}

/// Mounts, and serves in this process or in the background.
pub fn run(args: MountArgs) -> Result {
    let plan = CheckedMount::new(args)?;
    if plan.args.process.is_first() {
        return daemon::start(&plan.args.to_command_line());
    }
    let ready = plan.args.process.begin()?;
    match plan.args.process.start_log() {
        Ok(()) => mounted::run(&plan, ready),
        Err(failure) => {
            ready.tell(Err(&failure));
            Err(failure)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct MountLine {
        #[command(flatten)]
        args: MountArgs,
    }

    #[test]
    fn the_background_process_gets_the_same_arguments() {
        let line = ["x", "memory:", "/m", "-oro,size=1M", "-o", "sync", "--profile=opt", "-vv"];
        let more = ["--workers", "3", "--log-file=/l", "--stats-file=/s"];
        let args = MountLine::parse_from(line.into_iter().chain(more)).args;
        let again = MountLine::parse_from(
            args.to_command_line()[..1].iter().chain(&args.to_command_line()[1..]),
        );
        assert!(again.args.process.daemon);
        assert_eq!(again.args.options, ["ro,size=1M", "sync"]);
        assert_eq!((again.args.workers.as_deref(), again.args.process.verbose), (Some("3"), 2));
        assert_eq!(
            (again.args.process.log_file, again.args.stats_file),
            (args.process.log_file, args.stats_file)
        );
        assert_eq!((again.args.source, again.args.mountpoint), (args.source, args.mountpoint));
        assert_eq!(again.args.profile, OptionProfile::Opt);
    }
}
