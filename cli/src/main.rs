//! User-space file systems without the cost of FUSE: the program.
//!
//! What it is: the place where frontends meet backends, one file a subcommand. What it is not: it
//! serves nothing itself, and knows no protocol.

#![forbid(unsafe_code)]

mod compose;
mod error;
mod mount;
mod options;

use std::process::ExitCode;

use clap::{ColorChoice, Parser, Subcommand};

use error::{Failure, Result};

/// User-space file systems without the cost of FUSE.
#[derive(Parser)]
#[command(name = "defuse", version, color = ColorChoice::Never, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Mount(mount::MountArgs),
}

fn main() -> ExitCode {
    error::report(run())
}

fn run() -> Result {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => return Err(Failure::usage(error.to_string())),
        Err(error) => return error::print(&error.to_string()),
    };
    match cli.command {
        Command::Mount(args) => mount::run(args),
    }
}
