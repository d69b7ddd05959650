//! User-space file systems without the cost of FUSE: the program.
//!
//! The program combines frontends and backends, with one file for each subcommand. It implements no
//! file system and no protocol.
//!
//! `sources.rs` lists the kinds of file systems, `options.rs` the options; `mounted.rs` is the life
//! of a mount, with `daemon.rs`, `signals.rs`, `registry.rs` and `control.rs` around it.

#![forbid(unsafe_code)]

mod breakdown;
mod check;
mod completions;
mod config_text;
mod control;
mod daemon;
mod dump;
mod error;
mod fsck;
mod fuse;
mod grow;
mod images;
mod inherited;
mod kernel;
mod list;
mod man;
mod manager;
mod mkfs;
mod mount;
mod mount_flags;
mod mount_helper;
mod mount_locations;
mod mounted;
mod nvme;
mod options;
mod paths;
mod prometheus;
mod registry;
mod remount;
mod run;
mod sandbox;
mod serve;
mod served;
mod servers;
mod serving;
mod signals;
mod sources;
mod stat;
mod study;
mod target;
mod top;
mod trace;
mod tune;
mod umount;
mod umount_helper;
mod unmount_watch;
mod until;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, ColorChoice, Parser, Subcommand};
use defuse_command::{limits, terminal};

use error::{Result, print};

/// User-space file systems without the cost of FUSE
#[derive(Parser)]
#[command(name = "defuse", version, color = ColorChoice::Never, disable_help_subcommand = true)]
#[command(after_help = man::main_help())]
struct DefuseCli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    #[command(after_long_help = man::mount_help())]
    #[command(after_help = "`--help` and `defuse help options` explain the options")]
    Mount(mount::MountArgs),
    Serve(serve::ServeArgs),
    Manager(manager::ManagerArgs),
    Umount(umount::UmountArgs),
    Run(run::RunArgs),
    Fuse(fuse::FuseCommandArgs),
    Check(check::CheckArgs),
    Mkfs(mkfs::MkfsArgs),
    Fsck(fsck::FsckArgs),
    Grow(grow::GrowArgs),
    Dump(dump::DumpArgs),
    Nvme(nvme::NvmeArgs),
    #[command(hide = true)]
    Inside(run::RunInsideArgs),
    #[command(hide = true)]
    Keep,
    #[command(hide = true)]
    WatchMount(unmount_watch::WatchMountArgs),
    List(list::ListArgs),
    Stat(stat::StatArgs),
    /// Measure what user space costs, with the 45 workloads of "To FUSE or Not to FUSE"
    #[command(disable_help_flag = true)]
    Study(study::StudyWords),
    /// Measure the cost of a mount for your own command, and find options that help
    #[command(disable_help_flag = true)]
    Advise(study::StudyWords),
    /// Measure defuse itself on this machine
    #[command(disable_help_flag = true)]
    Bench(study::StudyWords),
    /// Run and measure a workload in the language of Filebench
    #[command(disable_help_flag = true)]
    Workload(study::StudyWords),
    Top(top::TopArgs),
    Trace(trace::TraceArgs),
    Breakdown(breakdown::BreakdownArgs),
    Tune(tune::TuneArgs),
    Man(man::ManPageArgs),
    Completions(completions::CompletionsArgs),
    Help(man::HelpArgs),
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| error::warn(&format!("internal error: {panic}"))));
    limits::survive_file_sizes();
    defuse_block::add_driver(&defuse_nvme::DRIVER);
    // The file of this program, also after an update has replaced it.
    defuse_remote::set_starter("/proc/self/exe".into());
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if mount_helper::is_meant(&arguments) {
        return mount_helper::run(arguments);
    }
    if umount_helper::is_meant(&arguments) {
        return umount_helper::run(&arguments);
    }
    completions::answer_shell();
    let is_fsck = arguments.get(1).is_some_and(|word| word == "fsck");
    let parsed = match parse_one(&arguments) {
        Some(command) => Ok(DefuseCli { command }),
        None => DefuseCli::try_parse_from(arguments),
    };
    let code = match parsed {
        Ok(DefuseCli { command: CliCommand::Run(args) }) => match run::run(&args) {
            Ok(code) => ExitCode::from(code),
            Err(failure) => error::report(Err(failure)),
        },
        Ok(DefuseCli { command: CliCommand::Inside(args) }) => match run::run_inside(&args) {
            Ok(code) => ExitCode::from(code),
            Err(failure) => error::report(Err(failure)),
        },
        Ok(DefuseCli { command: CliCommand::Fsck(args) }) => fsck::report(fsck::run(&args)),
        Ok(cli) => error::report(run(cli.command)),
        Err(error) if !error.use_stderr() => error::report(print(&error.to_string())),
        Err(error) => {
            // The text is complete, with usage and the next step. The output may be closed.
            let _ = error.print();
            ExitCode::from(if is_fsck { fsck::USAGE } else { 2 })
        }
    };
    defuse_bound::give_back_all();
    code
}

/// The command, if it is one that starts often: describing all others, with their help, takes
/// longer than the rest of the start. `None` for wrong arguments, too, which are reported with
/// everything that is known.
fn parse_one(arguments: &[OsString]) -> Option<CliCommand> {
    Some(match arguments.get(1)?.to_str()? {
        "run" => CliCommand::Run(parse_as("run", arguments)?),
        "inside" => CliCommand::Inside(parse_as("inside", arguments)?),
        "mount" => CliCommand::Mount(parse_as("mount", arguments)?),
        "serve" => CliCommand::Serve(parse_as("serve", arguments)?),
        "umount" => CliCommand::Umount(parse_as("umount", arguments)?),
        _ => return None,
    })
}

fn parse_as<T: Args>(name: &'static str, arguments: &[OsString]) -> Option<T> {
    let command = T::augment_args(clap::Command::new(name));
    T::from_arg_matches(&command.try_get_matches_from(&arguments[1..]).ok()?).ok()
}

fn run(command: CliCommand) -> Result {
    match command {
        CliCommand::Run(args) => run::run(&args).map(drop),
        CliCommand::Fuse(args) => fuse::run(&args),
        CliCommand::Mount(args) => mount::run(args),
        CliCommand::Serve(args) => serve::run(args),
        CliCommand::Manager(args) => manager::run(args),
        CliCommand::Umount(args) => umount::run(&args),
        CliCommand::Check(args) => check::run(&args),
        CliCommand::Mkfs(args) => mkfs::run(&args),
        CliCommand::Fsck(args) => fsck::run(&args).map(drop),
        CliCommand::Grow(args) => grow::run(&args),
        CliCommand::Dump(args) => dump::run(&args),
        CliCommand::Nvme(args) => nvme::run(&args),
        CliCommand::Inside(args) => run::run_inside(&args).map(drop),
        CliCommand::Keep => sandbox::keeper::run(),
        CliCommand::WatchMount(args) => unmount_watch::run(&args),
        CliCommand::List(args) => list::run(&args),
        CliCommand::Stat(args) => stat::run(&args),
        CliCommand::Study(args) => study::run("study", &args),
        CliCommand::Advise(args) => study::run("advise", &args),
        CliCommand::Bench(args) => study::run("bench", &args),
        CliCommand::Workload(args) => study::run("workload", &args),
        CliCommand::Top(args) => top::run(&args),
        CliCommand::Trace(args) => trace::run(&args),
        CliCommand::Breakdown(args) => breakdown::run(&args),
        CliCommand::Tune(args) => tune::run(&args),
        CliCommand::Man(args) => man::run(&args),
        CliCommand::Completions(args) => completions::run(&args),
        CliCommand::Help(args) => man::help(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_starts_often_is_parsed_as_among_all() {
        for words in [
            "run --mount /m=memory: -- ls -l",
            "inside -- ls",
            "mount -f memory: /m -o ro",
            "serve memory: /s --admit 7",
            "umount -l /m",
        ] {
            let words = arguments(words);
            let one = parse_one(&words).map(|command| std::mem::discriminant(&command));
            let among_all = DefuseCli::try_parse_from(&words).map(|cli| cli.command);
            assert_eq!(one, among_all.ok().map(|it| std::mem::discriminant(&it)), "{words:?}");
            assert!(one.is_some());
        }
    }

    #[test]
    fn wrong_arguments_and_help_are_for_the_parser_of_all_commands() {
        for words in ["run", "mount --help", "serve -x", "umount", "stat", "--version", ""] {
            assert!(parse_one(&arguments(words)).is_none(), "{words}");
        }
    }

    fn arguments(words: &str) -> Vec<OsString> {
        ["defuse"].into_iter().chain(words.split_whitespace()).map(OsString::from).collect()
    }
}
