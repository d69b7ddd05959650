//! The project's own commands: `cargo xtask test`, `demo`, `fresh`, `bench`, `install`, `package`,
//! `library`, `fuzz`, `gluster`, `crash`, `bpf` and `house`.
//!
//! This program starts other programs (cargo, git, tar, the built `defuse`), reports what it does,
//! and cleans up after them. It links none of the project's crates, so that it builds in seconds
//! and still works if they are broken.
//!
//! The table of test steps is `suite/steps.rs`, the table of the demo's programs
//! `demo/programs.rs`.

#![forbid(unsafe_code)]

mod apt;
mod bpf;
mod children;
mod command;
mod crash;
mod demo;
mod fresh;
mod fuzz;
mod gluster;
mod guest;
mod install;
mod lanes;
mod library;
mod libtest;
mod median;
mod package;
mod packages;
mod parts;
mod publish;
mod python;
mod rings;
mod runs;
mod suite;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{ColorChoice, Parser, Subcommand};

/// The project's own commands
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", color = ColorChoice::Never)]
#[command(disable_help_subcommand = true)]
struct XtaskCli {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    Test(suite::TestArgs),
    Demo(demo::DemoArgs),
    /// Run the benchmark in release, with a release build of defuse
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments of the benchmark; see `cargo xtask bench --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    Install(install::InstallArgs),
    Fresh(fresh::FreshArgs),
    Fuzz(fuzz::FuzzArgs),
    Gluster(gluster::GlusterTaskArgs),
    Crash(crash::CrashArgs),
    Bpf(bpf::BpfArgs),
    Library(library::LibraryArgs),
    Package(package::PackageArgs),
    /// Print figures of the source tree, with the bounds that step `structure` holds and the goals
    House,
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let outcome = match XtaskCli::parse().command {
        XtaskCommand::Test(args) => suite::run(&args),
        XtaskCommand::Demo(args) => demo::run(&args).map(done),
        XtaskCommand::Bench { args } => bench(&args).map(done),
        XtaskCommand::Install(args) => install::run(&args).map(done),
        XtaskCommand::Fresh(args) => fresh::run(&args).map(done),
        XtaskCommand::Fuzz(args) => fuzz::run(&args).map(done),
        XtaskCommand::Gluster(args) => gluster::run(&args).map(done),
        XtaskCommand::Crash(args) => crash::run(&args).map(done),
        XtaskCommand::Bpf(args) => bpf::run(&args).map(done),
        XtaskCommand::Library(args) => library::run(&args).map(done),
        XtaskCommand::Package(args) => package::run(&args).map(done),
        XtaskCommand::House => house().map(done),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}

/// The test has the reader of Rust, so that the other commands are built without it.
fn house() -> anyhow::Result<()> {
    let test = "house::no_figure_of_the_tree_is_worse_than_its_bound";
    command::run(
        command::cargo().args(["test", "--package", "xtask", "--test", "structure"]).args([
            "--",
            "--exact",
            test,
            "--nocapture",
        ]),
    )
}

fn bench(args: &[OsString]) -> anyhow::Result<()> {
    command::run(command::cargo().args([
        "build",
        "--release",
        "-p",
        "defuse",
        "-p",
        "defuse-bench",
    ]))?;
    let over_rings = args.iter().any(|arg| arg.to_string_lossy().contains("defuse-uring"));
    let _allowed = over_rings.then(rings::UringSetting::apply);
    let program = command::target_dir()?.join("release/defuse-bench");
    command::run(std::process::Command::new(program).args(args))
}
