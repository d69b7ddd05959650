//! `defuse advise`.

use std::ffi::OsString;
use std::path::PathBuf;

use defuse_study::advise::{self, AdviseOptions};
use defuse_study::options::StudyConfig;

use crate::main_program;
use defuse_command::or_failed;
use defuse_command::{CommandFailure, Result, print, warn};

/// Measure the cost of a mount for your own command, and find options that help
///
/// Runs the command on a copy of DIR and on a mount of that copy, in turns. Explains the difference
/// by requests, by their time in each stage (root), and by CPU time. Tries options that could help.
/// The command works in the directory; {} among its arguments and the variable DEFUSE_DIR have its
/// path. DIR itself is only read.
#[derive(clap::Args)]
pub struct AdviseArgs {
    /// The directory
    dir: PathBuf,
    /// The mount: default, base, opt, or NAME=COMMAND (options of a mount, or any command that
    /// mounts {source} on {mountpoint})
    #[arg(long, value_name = "CONFIG", default_value = "default", value_parser = config)]
    config: StudyConfig,
    /// Number of runs of each
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: u32,
    /// Drop the caches of the kernel before each run (root)
    #[arg(long)]
    cold: bool,
    /// Do not try options
    #[arg(long)]
    no_try: bool,
    /// The directory for copies
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    work: PathBuf,
    /// Maximum size of the directory
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = size)]
    copy_limit: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn config(text: &str) -> std::result::Result<StudyConfig, String> {
    if text.contains('=') { StudyConfig::custom(text) } else { StudyConfig::from_name(text) }
}

fn size(text: &str) -> std::result::Result<u64, String> {
    defuse_fs::source::bytes(text).ok_or_else(|| "write bytes, such as 500M or 2G".into())
}

/// Runs the command in turns, and prints the explanation.
pub fn run(args: &AdviseArgs) -> Result {
    let options = AdviseOptions {
        dir: args.dir.clone(),
        command: args.command.clone(),
        config: args.config.clone(),
        runs: args.runs,
        cold: args.cold,
        try_options: !args.no_try,
        work: args.work.clone(),
        copy_limit_bytes: args.copy_limit,
        program: main_program()?,
    };
    let advice = advise::advise(&options, &mut |line| warn(&line)).map_err(or_failed)?;
    if args.json {
        return print(
            &(serde_json::to_string(&advice).map_err(CommandFailure::from_error)? + "\n"),
        );
    }
    print(&advise::explain(&advice))
}
