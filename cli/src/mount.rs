//! `defuse mount`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Deserialize;
use toml::Spanned;

use crate::completions;
use crate::config_text::ConfigText;
use crate::error::{CommandFailure, Result};
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
    #[arg(required_unless_present = "config", default_value = "", hide_default_value = true, add = completions::sources())]
    pub source: OsString,
    /// The directory to mount on
    #[arg(required_unless_present = "config", default_value = ".", hide_default_value = true)]
    pub mountpoint: PathBuf,
    /// Take source, mountpoint, options and profile from this TOML file; -o adds to its options
    #[arg(long, value_name = "FILE", conflicts_with_all = ["source", "mountpoint", "profile"])]
    pub config: Option<PathBuf>,
    /// Options, separated by commas; later ones override earlier ones and the profile
    #[arg(short = 'o', value_name = "OPTIONS", add = completions::mount_options())]
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

/// The example in `defuse mount --help`.
pub const CONFIG_HELP: &str = "\
A configuration, for --config and the unit defuse@NAME.service (/etc/defuse/NAME.toml):
  source = \"uhs:/var/lib/files.img\"
  mountpoint = \"/files\"
  options = [\"allow_other\", \"commit=5\"]   # as for -o (default: none)
  profile = \"opt\"                         # as for --profile
";

/// The file of a mount as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MountConfigFile {
    source: Spanned<String>,
    mountpoint: Spanned<PathBuf>,
    #[serde(default)]
    options: Vec<Spanned<String>>,
    profile: Option<Spanned<String>>,
}

/// The configuration of a mount.
struct MountConfig {
    text: ConfigText,
    written: MountConfigFile,
}

impl MountConfig {
    fn read(file: &Path) -> Result<MountConfig> {
        let text = ConfigText::read(&paths::absolute(file), "defuse mount --help")?;
        Ok(MountConfig { written: text.parse()?, text })
    }

    /// The mount of the configuration, with further options of the command line. A failure of a
    /// value names file, line and key.
    fn check(self, mut args: MountArgs) -> Result<CheckedMount> {
        let wrong =
            |place: usize, failure: &CommandFailure| self.text.locate_failure(place, failure);
        let MountConfigFile { source, mountpoint, options, profile } = self.written;
        let parsed = SOURCES.parse(source.get_ref().as_ref());
        let parsed = parsed.map_err(|error| wrong(source.span().start, &error.into()))?;
        if !mountpoint.get_ref().is_absolute() {
            let why = "write an absolute path: a unit starts in another directory than a shell";
            return Err(wrong(mountpoint.span().start, &CommandFailure::usage(why)));
        }
        if let Some(profile) = profile {
            let place = profile.span().start;
            args.profile = OptionProfile::from_str(profile.get_ref(), false)
                .map_err(|why| wrong(place, &CommandFailure::Usage(why)))?;
        }
        for option in &options {
            let one = [option.get_ref().clone()];
            options::parse(args.profile, &parsed, &one)
                .map_err(|failure| wrong(option.span().start, &failure))?;
        }
        args.source = source.into_inner().into();
        args.mountpoint = mountpoint.into_inner();
        let passed = std::mem::take(&mut args.options);
        args.options = options.into_iter().map(Spanned::into_inner).chain(passed).collect();
        CheckedMount::from_args(args)
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
    fn new(args: MountArgs) -> Result<CheckedMount> {
        match args.config.clone() {
            Some(file) => MountConfig::read(&file)?.check(args),
            None => CheckedMount::from_args(args),
        }
    }

    fn from_args(mut args: MountArgs) -> Result<CheckedMount> {
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

    fn config(text: &str) -> Result<CheckedMount> {
        let text = ConfigText::new(Path::new("/etc/m.toml"), text.to_owned());
        let written = text.parse()?;
        let line = MountLine::parse_from(["x", "--config=/etc/m.toml", "-oro"]);
        MountConfig { text, written }.check(line.args)
    }

    #[test]
    fn a_configuration_is_a_command_line() {
        let text = "source = 'memory:'\nmountpoint = '/m'\noptions = ['size=1M', 'allow_other']\nprofile = 'opt'";
        let plan = config(text).unwrap();
        assert_eq!((plan.args.source, plan.mountpoint), ("memory:".into(), "/m".into()));
        assert_eq!(plan.args.options, ["size=1M", "allow_other", "ro"]);
        assert_eq!(plan.args.profile, OptionProfile::Opt);
        let help = CONFIG_HELP.lines().skip(1).collect::<Vec<_>>().join("\n");
        let plan = config(&help).unwrap();
        assert_eq!(plan.args.options, ["allow_other", "commit=5", "ro"]);
    }

    #[test]
    fn a_mistake_in_a_configuration_has_its_file_line_and_key() {
        let both = "source = 'memory:'\nmountpoint = '/m'\n";
        for (text, says) in [
            ("source = 'memory:'".to_owned(), "missing field `mountpoint`"),
            (format!("{both}option = []"), "3: option: unknown field `option`"),
            (format!("{both}options = 'ro'"), "3: options: invalid type"),
            (format!("{both}options = ['what']"), "3: options: "),
            (format!("{both}profile = 'fast'"), "3: profile: "),
            ("source = 'no:'\nmountpoint = '/m'".to_owned(), "1: source: "),
            ("source = 'memory:'\nmountpoint = 'm'".to_owned(), "2: mountpoint: write an absolute"),
        ] {
            let failure = config(&text).err().expect(&text);
            let said = failure.to_string();
            assert!(said.starts_with("/etc/m.toml:") && said.contains(says), "{text}: {said}");
            assert_eq!(failure.code(), 2, "{text}");
        }
    }

    #[test]
    fn a_mount_has_its_arguments_or_a_configuration() {
        let parse = |line: &str| MountLine::try_parse_from(line.split(' '));
        assert!(parse("x --config /f").is_ok() && parse("x memory: /m").is_ok());
        for line in ["x", "x memory:", "x --config /f memory: /m", "x --config /f --profile opt"] {
            assert!(parse(line).is_err(), "{line}");
        }
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
