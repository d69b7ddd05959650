//! `cargo xtask fuzz`: runs libFuzzer on stable Rust. `fuzz/README.md` describes the manual steps.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::command;
use crate::packages::{self, RequiredTool};

/// libfuzzer-sys compiles libFuzzer, which is C++.
pub const TOOLS: &[RequiredTool] = &[RequiredTool::package("g++", "g++")];

/// The flags that cargo-fuzz would set: LLVM counts edges and traces comparisons.
const RUSTFLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1";

/// Fuzz one target for some time
#[derive(clap::Args)]
pub struct FuzzArgs {
    /// The target, a file in fuzz/fuzz_targets
    target: String,
    /// Number of seconds
    #[arg(default_value_t = 60)]
    seconds: u32,
    /// More options of libFuzzer, after `--`
    #[arg(last = true)]
    options: Vec<String>,
}

/// Fuzzes one target.
pub fn run(args: &FuzzArgs) -> Result<()> {
    let known = targets()?;
    if !known.contains(&args.target) {
        bail!("there is no fuzz target {}: known are {}", args.target, known.join(", "));
    }
    packages::provide(TOOLS);
    let programs = build(std::slice::from_ref(&args.target))?;
    command::run(fuzzer(&programs, &args.target, args.seconds)?.args(&args.options))
}

/// Fuzzes every target for `seconds` each. A fuzzer has one thread: as many run at a time as there
/// are processors.
///
/// # Errors
///
/// Fails with the names of the targets that failed; the others run, too.
pub fn run_all(seconds: u32) -> Result<()> {
    let targets = targets()?;
    let programs = build(&targets)?;
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let failed = command::run_in_lanes(&targets, processors, |target| {
        println!("fuzzing {target} for {seconds} s");
        command::run_aside(target, fuzzer(&programs, target, seconds)?.stdin(Stdio::null()))
    });
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

/// The names of the targets.
fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in dir().join("fuzz_targets").read_dir().context("fuzz/fuzz_targets")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

fn dir() -> PathBuf {
    command::root().join("fuzz")
}

/// Builds targets, and returns the directory of their programs.
fn build(targets: &[String]) -> Result<PathBuf> {
    let triple = host()?;
    command::run(build_command(command::cargo(), targets, &triple).current_dir(dir()))?;
    Ok(dir().join("target").join(triple).join("release"))
}

/// Begins to build all targets, when no other program needs the processors. [`run_all`] waits for
/// it by the lock of cargo on the directory, and shows what fails.
pub fn build_ahead() -> Result<Child> {
    let mut idle = Command::new("chrt");
    idle.args(["--idle", "0"]).arg(command::cargo().get_program());
    let mut build = build_command(idle, &targets()?, &host()?);
    build.current_dir(dir()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    build.spawn().with_context(|| format!("cannot start {}", command::line(&build)))
}

fn build_command(mut cargo: Command, targets: &[String], triple: &str) -> Command {
    // The target triple is given even for this machine, so that the flags do not apply to build
    // scripts.
    cargo.args(["build", "--release", "--target", triple]);
    cargo.args(targets.iter().flat_map(|target| ["--bin", target]));
    cargo.env("RUSTFLAGS", RUSTFLAGS).env("CARGO_TARGET_DIR", dir().join("target"));
    cargo
}

/// The command that fuzzes a target.
fn fuzzer(programs: &Path, target: &str, seconds: u32) -> Result<Command> {
    let (corpus, seeds) = (dir().join("corpus").join(target), dir().join("seeds").join(target));
    let artifacts = dir().join("artifacts");
    for made in [&corpus, &artifacts] {
        std::fs::create_dir_all(made).with_context(|| made.display().to_string())?;
    }
    let mut fuzzer = Command::new(programs.join(target));
    fuzzer.arg(format!("-max_total_time={seconds}")).args([
        "-max_len=1024",
        "-print_final_stats=1",
        "-verbosity=0",
    ]);
    fuzzer.arg(format!("-artifact_prefix={}/{target}-", artifacts.display())).arg(corpus);
    if seeds.is_dir() {
        fuzzer.arg(seeds);
    }
    fuzzer.current_dir(dir());
    Ok(fuzzer)
}

/// The target triple of this machine.
fn host() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let text = command::output(Command::new(rustc).arg("-vV").current_dir(command::root()))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_are_those_of_the_readme() {
        let readme = std::fs::read_to_string(dir().join("README.md")).unwrap();
        let missing = RUSTFLAGS.split_whitespace().find(|flag| !readme.contains(flag));
        assert_eq!(missing, None);
    }

    #[test]
    fn every_target_can_be_built_by_name() {
        let manifest = std::fs::read_to_string(dir().join("Cargo.toml")).unwrap();
        for target in targets().unwrap() {
            assert!(manifest.contains(&format!("name = \"{target}\"")), "{target}");
        }
    }
}
