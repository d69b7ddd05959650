//! The commands of defuse that measure: `study`, `advise`, `bench` and `workload`.
//!
//! `defuse` starts this program for them, so that a user who only mounts builds and installs
//! nothing of this program. Mounts, servers and runs under measurement use the program `defuse` in
//! the same directory.

#![forbid(unsafe_code)]

mod advise;
mod bench;
mod bench_gluster;
mod man;
mod sources;
mod study;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ColorChoice, Parser, Subcommand};
use defuse_command::{CommandFailure, Result, limits, print, report, warn};

/// Measure file systems: the commands of defuse that do
#[derive(Parser)]
#[command(name = "defuse", bin_name = "defuse", version, color = ColorChoice::Never)]
#[command(disable_help_subcommand = true)]
struct StudyCli {
    #[command(subcommand)]
    command: StudyCommand,
}

#[derive(Subcommand)]
enum StudyCommand {
    Study(study::StudyArgs),
    Advise(advise::AdviseArgs),
    #[command(hide = true)]
    StudyEngine(study::EngineArgs),
    Bench(bench::BenchCommandArgs),
    #[command(hide = true)]
    BenchWorker(bench::WorkerArgs),
    #[command(hide = true)]
    BenchGluster(bench_gluster::GlusterInsideArgs),
    #[command(hide = true)]
    BenchNames(bench_gluster::NamesArgs),
    #[command(hide = true)]
    BenchReader(bench::ReaderArgs),
    Workload(workload::WorkloadArgs),
    #[command(hide = true)]
    StudyMan(man::StudyManArgs),
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| warn(&format!("internal error: {panic}"))));
    // Starting a program undoes what `defuse` has done about this limit.
    limits::survive_file_sizes();
    defuse_block::add_driver(&defuse_nvme::DRIVER);
    let code = match StudyCli::try_parse() {
        Ok(cli) => report(run(cli.command)),
        Err(error) if !error.use_stderr() => report(print(&error.to_string())),
        Err(error) => {
            // The text is complete, with usage and the next step. The output may be closed.
            let _ = error.print();
            ExitCode::from(2)
        }
    };
    defuse_bound::give_back_all();
    code
}

fn run(command: StudyCommand) -> Result {
    match command {
        StudyCommand::Study(args) => study::run(&args),
        StudyCommand::Advise(args) => advise::run(&args),
        StudyCommand::StudyEngine(args) => study::run_engine(&args),
        StudyCommand::Bench(args) => bench::run(&args),
        StudyCommand::BenchWorker(args) => bench::run_worker(&args),
        StudyCommand::BenchGluster(args) => bench_gluster::run_inside(&args),
        StudyCommand::BenchNames(args) => bench_gluster::run_names(&args),
        StudyCommand::BenchReader(args) => bench::run_reader(&args),
        StudyCommand::Workload(args) => workload::run(&args),
        StudyCommand::StudyMan(args) => man::run(&args),
    }
}

/// The path of the program `defuse`, which mounts and serves what is measured.
fn main_program() -> Result<PathBuf> {
    let own = std::env::current_exe()
        .map_err(|error| CommandFailure::Failed(format!("cannot find this program: {error}")))?;
    let path = own.with_file_name("defuse");
    if path.is_file() {
        return Ok(path);
    }
    Err(CommandFailure::Failed(format!(
        "{} is not there, which mounts what is measured: install defuse and defuse-study in one directory",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_definitions_are_consistent() {
        <StudyCli as clap::CommandFactory>::command().debug_assert();
    }
}
