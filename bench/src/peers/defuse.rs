//! The project's own program.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::program_dir;
use crate::args::BenchmarkArgs;
use crate::command;
use crate::target::{MOUNT, SOURCE, TargetRole, TargetSpec};

/// defuse with the given options, over /dev/fuse unless they select another transport, and its
/// variants. If the program is not built, it is left out with a message, so that the peers can be
/// measured alone; a program given on the command line must exist.
pub fn specs(args: &BenchmarkArgs) -> Result<Vec<TargetSpec>> {
    let base = join("no_io_uring", args.defuse_options.as_deref().unwrap_or_default());
    let mut wanted = vec![("defuse".to_owned(), base.clone())];
    for variant in &args.variant {
        let (name, options) = variant
            .split_once('=')
            .with_context(|| format!("--variant {variant}: NAME=OPTIONS is expected"))?;
        wanted.push((name.to_owned(), join(&base, options)));
    }
    let mut specs = build(args, wanted)?;
    if let Some(before) = &args.before {
        specs.push(make_earlier(before, &base, args.timeout)?);
    }
    Ok(specs)
}

/// An earlier build with the same options, as a peer.
fn make_earlier(program: &Path, options: &str, timeout: u64) -> Result<TargetSpec> {
    if !program.exists() {
        bail!("--before: {} is missing", program.display());
    }
    Ok(spec(program, "defuse-before".to_owned(), TargetRole::Peer, options, timeout))
}

/// defuse with the given options, over io_uring. If the kernel does not offer it, the mount fails
/// with a message that explains how to enable it; `cargo xtask bench` enables it.
pub fn targets_over_rings(args: &BenchmarkArgs) -> Result<Vec<TargetSpec>> {
    let options = join("io_uring", args.defuse_options.as_deref().unwrap_or_default());
    build(args, vec![("defuse-uring".to_owned(), options)])
}

fn build(args: &BenchmarkArgs, wanted: Vec<(String, String)>) -> Result<Vec<TargetSpec>> {
    let program = match &args.defuse {
        Some(program) if !program.exists() => bail!("--defuse: {} is missing", program.display()),
        Some(program) => program.clone(),
        None => program_dir()?.join("defuse"),
    };
    if !program.exists() {
        eprintln!(
            "defuse is left out: {} is missing; build it or name it with --defuse",
            program.display()
        );
        return Ok(Vec::new());
    }
    let of = |(name, options): (String, String)| {
        spec(&program, name, TargetRole::Ours, &options, args.timeout)
    };
    Ok(wanted.into_iter().map(of).collect())
}

fn spec(program: &Path, name: String, role: TargetRole, options: &str, timeout: u64) -> TargetSpec {
    let version = command::output(&program.to_string_lossy(), &["--version"])
        .unwrap_or_else(|_| "defuse".into())
        .trim()
        .to_owned();
    let options = join(&timeouts(timeout), options);
    let words = ["mount", &format!("passthrough:{SOURCE}"), MOUNT, "-o", &options, "--foreground"];
    let mut command: Vec<OsString> = vec![program.into()];
    command.extend(words.iter().map(OsString::from));
    TargetSpec { name, role, command: Some(command), version: format!("{version} -o {options}") }
}

/// The timeouts, equal to the peers'.
fn timeouts(seconds: u64) -> String {
    format!("entry_timeout={seconds},attr_timeout={seconds}")
}

fn join(first: &str, second: &str) -> String {
    let both: Vec<_> = [first, second].into_iter().filter(|list| !list.is_empty()).collect();
    both.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_lists_are_joined_without_stray_commas() {
        assert_eq!(join("", "a,b"), "a,b");
        assert_eq!(join("a", ""), "a");
        assert_eq!(join("a", "b"), "a,b");
    }
}
