//! Volumes of GlusterFS on this machine, for tests and to try them.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;
use crate::packages::{RequiredTool, provide};
use crate::suite::steps::TEST_TOOLS;

/// The program of the testkit that has the servers.
const NAME: &str = "gluster_volumes";

/// Run volumes of GlusterFS on this machine: gluster://127.1.1.1/dist and gluster://127.1.1.1/repl
///
/// The servers have a network of their own, in which `run` starts its command; `up` prints how to
/// enter it. Everything is in memory and ends with the command.
#[derive(clap::Args)]
pub struct GlusterTaskArgs {
    #[command(subcommand)]
    task: GlusterTask,
}

#[derive(clap::Subcommand)]
enum GlusterTask {
    /// Run the volumes until Ctrl-C
    Up,
    /// End the volumes of `up`
    Down,
    /// Run a command with volumes of its own
    Run {
        /// The command with its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
}

/// Runs the program of the testkit that has the servers.
pub fn run(args: &GlusterTaskArgs) -> Result<()> {
    if !command::is_root() {
        bail!("only root can run servers of GlusterFS in a network of their own");
    }
    let of_gluster =
        |tool: &&RequiredTool| tool.part.is_some_and(|part| part.starts_with("GlusterFS"));
    let tools: Vec<RequiredTool> = TEST_TOOLS.iter().filter(of_gluster).copied().collect();
    provide(&tools);
    let mut volumes = Command::new(program()?);
    match &args.task {
        GlusterTask::Up => volumes.arg("up"),
        GlusterTask::Down => volumes.arg("down"),
        GlusterTask::Run { command } => volumes.arg("run").args(command),
    };
    // Replaces this process: if it is killed, the process ends whose end is also the end of the
    // servers.
    Err(volumes.exec()).with_context(|| format!("cannot start {}", command::line(&volumes)))
}

/// The program, which is built unless tests run: another build would replace the library of runs
/// that other tests use.
fn program() -> Result<PathBuf> {
    let of_tests = std::env::var_os("DEFUSE_PROGRAM").map(PathBuf::from);
    let built = of_tests.map(|defuse| defuse.with_file_name(NAME)).filter(|built| built.exists());
    if let Some(built) = built {
        return Ok(built);
    }
    let program = ["--quiet", "--package", "defuse-testkit", "--bin", NAME];
    command::run(command::cargo().arg("build").args(program))?;
    Ok(command::target_dir()?.join("debug").join(NAME))
}
