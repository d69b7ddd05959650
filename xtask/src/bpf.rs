//! `cargo xtask bpf`: compiles the BPF program of `trace/`.
//!
//! The compiled object is committed beside its source, so that building the project needs no BPF
//! compiler. A note beside them names the compiler and the checksum of the source. A test compares
//! the checksum at every run, and the step `bpf` compiles the program again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;
use crate::packages::{self, RequiredTool};

/// Tools for compiling.
pub const TOOLS: &[RequiredTool] =
    &[RequiredTool::package("clang", "clang"), RequiredTool::package("llvm", "llvm-strip")];

const SOURCES: [&str; 3] = ["kernel.h", "stages.h", "stages.bpf.c"];
const SOURCE: &str = "stages.bpf.c";
const OBJECT: &str = "stages.bpf.o";
const NOTE: &str = "stages.bpf.note";

/// Compile the BPF program of `trace/`
#[derive(clap::Args)]
pub struct BpfArgs {
    /// Only check that the object matches its source
    #[arg(long)]
    check: bool,
}

/// Compiles or checks.
pub fn run(args: &BpfArgs) -> Result<()> {
    packages::provide(TOOLS);
    if args.check { check() } else { make() }
}

fn make() -> Result<()> {
    let dir = dir();
    compile(&dir.join(OBJECT))?;
    fs::write(dir.join(NOTE), note(&compiler()?)?)?;
    println!("made {}", dir.join(OBJECT).display());
    Ok(())
}

/// Checks that compiling the source gives the committed object. The result depends on the version
/// of the compiler, so it is compared only if the same version made the object.
pub fn check() -> Result<()> {
    let dir = dir();
    let (noted, ours) = (fs::read_to_string(dir.join(NOTE))?, note(&compiler()?)?);
    let fresh = command::target_dir()?.join("stages.bpf.o");
    compile(&fresh)?;
    if source_line(&noted) != source_line(&ours) {
        bail!("{OBJECT} is outdated: run `cargo xtask bpf`, and commit the result");
    }
    if noted != ours {
        println!("{SOURCE} compiles; the object was made by another compiler and is not compared");
        return Ok(());
    }
    if fs::read(&fresh)? != fs::read(dir.join(OBJECT))? {
        bail!("{OBJECT} does not match {SOURCE}: run `cargo xtask bpf`");
    }
    Ok(())
}

fn dir() -> PathBuf {
    command::root().join("trace/bpf")
}

fn compile(object: &Path) -> Result<()> {
    let mut clang = Command::new("clang");
    clang.current_dir(dir());
    clang.args(["-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]);
    // Keeps paths of this machine out of the object.
    clang.args(["-fdebug-compilation-dir", ".", "-c", SOURCE, "-o"]).arg(object);
    command::run(&mut clang)?;
    command::run(Command::new("llvm-strip").arg("-g").arg(object))
}

fn compiler() -> Result<String> {
    let text = command::output(Command::new("clang").arg("--version"))?;
    text.lines().next().map(str::to_owned).context("clang does not say its version")
}

fn note(compiler: &str) -> Result<String> {
    Ok(format!("{}\ncompiler {compiler}\n", source_of(&dir())?))
}

fn source_line(note: &str) -> Option<&str> {
    note.lines().next()
}

/// A checksum of all sources (FNV-1a, 64 bits). It detects mistakes, not attacks.
fn source_of(dir: &Path) -> Result<String> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for name in SOURCES {
        let text = fs::read(dir.join(name)).with_context(|| format!("cannot read {name}"))?;
        for byte in text {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    Ok(format!("source {hash:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_object_was_made_from_the_committed_source() {
        let noted = fs::read_to_string(dir().join(NOTE)).unwrap();
        let source = source_of(&dir()).unwrap();
        assert_eq!(source_line(&noted), Some(source.as_str()), "run `cargo xtask bpf`");
        let object = fs::read(dir().join(OBJECT)).unwrap();
        // A 64-bit little-endian ELF file for the machine BPF (247).
        assert_eq!((&object[..6], object[18]), (&b"\x7fELF\x02\x01"[..], 247));
    }

    #[test]
    fn every_source_changes_the_checksum() {
        let there = fs::read_dir(dir()).unwrap().flatten().map(|entry| entry.path());
        let sources = there.filter(|path| path.extension().is_some_and(|e| e == "c" || e == "h"));
        assert_eq!(sources.count(), SOURCES.len());
    }
}
