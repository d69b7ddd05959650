//! Installs the programs that a suite needs, if they are missing.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::mounted::{root, succeed};

/// The path of an installed tool.
pub(super) fn path(name: &str) -> PathBuf {
    tools().join("bin").join(name)
}

fn tools() -> PathBuf {
    root().join("target/tools")
}

/// Installs the program of a crate below `target/tools`.
pub(super) fn install(name: &str, version: &str) -> Result<PathBuf> {
    let program = path(name);
    if program.exists() {
        return Ok(program);
    }
    println!("installing {name} {version}");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["install", "--quiet", "--version", version, "--root"]).arg(tools()).arg(name);
    // One target directory for all tools, because they share most dependencies. They wait for the
    // file system: an optimized build takes six times as long, and saves less than it takes.
    cargo.arg("--debug").envs([("CARGO_PROFILE_DEV_DEBUG", "0"), ("CARGO_INCREMENTAL", "0")]);
    cargo.env("CARGO_TARGET_DIR", tools().join("build"));
    succeed(&mut cargo).with_context(|| format!("{name} cannot be installed"))?;
    Ok(program)
}

/// Fails with the Debian packages of missing programs. `cargo xtask test` installs them.
pub(super) fn packages(needed: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(program, _)| !exists(program))
        .map(|(_, package)| *package)
        .collect();
    if !missing.is_empty() {
        bail!("apt-get install {}", missing.join(" "));
    }
    Ok(())
}

fn exists(program: &str) -> bool {
    let mut which = Command::new("which");
    let status = which.arg(program).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
