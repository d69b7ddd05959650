//! The `fuser` crate, by this crate's program `fuser_passthrough`.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::program_dir;
use crate::command;
use crate::target::{MOUNT, SOURCE, TargetRole, TargetSpec};

/// `fuser-N` with N event loops, or `fuser-N-wb` with the write-back cache, too.
pub fn spec(name: &str, timeout: u64) -> Result<TargetSpec> {
    let (threads, writeback) = parse(name)
        .with_context(|| format!("{name}: expected fuser-N or fuser-N-wb with N event loops"))?;
    let mut words = vec![format!("--threads={threads}"), format!("--timeout={timeout}")];
    if writeback {
        words.push("--writeback".into());
    }
    let options = words.join(" ");
    words.extend([SOURCE.to_owned(), MOUNT.to_owned()]);
    let mut command: Vec<OsString> = vec![ensure()?.into()];
    command.extend(words.into_iter().map(OsString::from));
    let version = format!("fuser {} {options}", crate_version());
    Ok(TargetSpec {
        name: name.to_owned(),
        role: TargetRole::Peer,
        command: Some(command),
        version,
    })
}

fn parse(name: &str) -> Option<(usize, bool)> {
    let rest = name.strip_prefix("fuser-")?;
    let (number, writeback) = match rest.strip_suffix("-wb") {
        Some(number) => (number, true),
        None => (rest, false),
    };
    number.parse().ok().filter(|&threads| threads > 0).map(|threads| (threads, writeback))
}

/// Builds the program, because `cargo run` builds only the program that it runs.
fn ensure() -> Result<PathBuf> {
    let program = program_dir()?.join("fuser_passthrough");
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let mut args =
        vec!["build", "--quiet", "--bin", "fuser_passthrough", "--manifest-path", manifest];
    if !cfg!(debug_assertions) {
        args.push("--release");
    }
    if let Err(error) = command::output("cargo", &args)
        && !program.exists()
    {
        return Err(error.context("fuser_passthrough could not be built"));
    }
    if !program.exists() {
        bail!("{} is missing although it was built: the profile may differ", program.display());
    }
    Ok(program)
}

/// The version in the lock file.
fn crate_version() -> String {
    let lock = include_str!("../../../Cargo.lock");
    version_in(lock, "fuser").unwrap_or("of an unknown version").to_owned()
}

fn version_in<'a>(lock: &'a str, package: &str) -> Option<&'a str> {
    let (_, rest) = lock.split_once(&format!("name = \"{package}\"\nversion = \""))?;
    rest.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_encode_the_options() {
        assert_eq!(parse("fuser-4"), Some((4, false)));
        assert_eq!(parse("fuser-1-wb"), Some((1, true)));
        assert_eq!(parse("fuser-0"), None);
        assert_eq!(parse("fuser-x"), None);
    }

    #[test]
    fn the_version_comes_from_the_lock_file() {
        let lock = "[[package]]\nname = \"fuser\"\nversion = \"0.18.0\"\n";
        assert_eq!(version_in(lock, "fuser"), Some("0.18.0"));
        assert_eq!(version_in(lock, "other"), None);
    }
}
