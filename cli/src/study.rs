//! The commands of the program `defuse-study`, which this one starts in its place.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::error::{CommandFailure, Result};

const PROGRAM: &str = "defuse-study";

/// The commands that have a page in the manual and are listed in the help.
pub const COMMANDS: [&str; 4] = ["study", "advise", "bench", "workload"];

/// The words after the command, which that program parses.
#[derive(clap::Args)]
pub struct StudyWords {
    /// The arguments; see `--help` of the command
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    words: Vec<OsString>,
}

/// Becomes the program for `command`.
pub fn run(command: &str, args: &StudyWords) -> Result {
    become_program(command, &args.words)
}

/// Becomes the program for the help of `command`.
pub fn help(command: &str) -> Result {
    become_program(command, &["--help".into()])
}

/// The program is in the directory of this one, or in `PATH`.
fn become_program(command: &str, words: &[OsString]) -> Result {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    let path = beside.filter(|path| path.is_file()).unwrap_or_else(|| PROGRAM.into());
    let error = Command::new(&path).arg(command).args(words).exec();
    Err(CommandFailure::Failed(match error.kind() {
        ErrorKind::NotFound => format!(
            "`defuse {command}` is in the program {PROGRAM}, which is neither beside defuse nor in PATH: install it, too"
        ),
        _ => format!("cannot start {}: {error}", path.display()),
    }))
}
