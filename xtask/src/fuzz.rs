//! `cargo xtask fuzz`: runs libFuzzer on stable Rust. `fuzz/README.md` describes the manual steps.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;
use crate::packages::{self, Tool};

/// libfuzzer-sys compiles libFuzzer, which is C++.
pub const TOOLS: &[Tool] = &[Tool::package("g++", "g++")];

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
    fuzz(&args.target, args.seconds, &args.options)
}

/// Fuzzes every target for `seconds` each.
pub fn all(seconds: u32) -> Result<()> {
    targets()?.iter().try_for_each(|target| fuzz(target, seconds, &[]))
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

fn fuzz(target: &str, seconds: u32, options: &[String]) -> Result<()> {
    let triple = host()?;
    let mut build = command::cargo();
    // The target triple is given even for this machine, so that the flags do not apply to build
    // scripts.
    build.args(["build", "--release", "--bin", target, "--target", &triple]);
    build.env("RUSTFLAGS", RUSTFLAGS).env("CARGO_TARGET_DIR", dir().join("target"));
    command::run(build.current_dir(dir()))?;
    let program = dir().join("target").join(triple).join("release").join(target);
    let (corpus, seeds) = (dir().join("corpus").join(target), dir().join("seeds").join(target));
    let artifacts = dir().join("artifacts");
    for made in [&corpus, &artifacts] {
        std::fs::create_dir_all(made).with_context(|| made.display().to_string())?;
    }
    println!("fuzzing {target} for {seconds} s");
    let mut fuzzer = Command::new(program);
    fuzzer.arg(format!("-max_total_time={seconds}")).args([
        "-max_len=1024",
        "-print_final_stats=1",
        "-verbosity=0",
    ]);
    fuzzer.arg(format!("-artifact_prefix={}/{target}-", artifacts.display())).args(options);
    fuzzer.arg(corpus);
    if seeds.is_dir() {
        fuzzer.arg(seeds);
    }
    command::run(fuzzer.current_dir(dir()))
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
