//! `cargo xtask bpf`: the BPF program of `trace/`, from its source.
//!
//! The compiled object is committed beside its source, so that building the project needs no
//! compiler for BPF. Beside both lies a note of which source and which compiler made it: a test
//! compares the source at every run, and the step `bpf` compiles it anew.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;
use crate::packages::{self, Tool};

/// What compiling needs.
pub const TOOLS: &[Tool] = &[Tool::package("clang", "clang"), Tool::package("llvm", "llvm-strip")];

const SOURCES: [&str; 3] = ["kernel.h", "stages.h", "stages.bpf.c"];
const SOURCE: &str = "stages.bpf.c";
const OBJECT: &str = "stages.bpf.o";
const NOTE: &str = "stages.bpf.note";

/// Compile the BPF program of `trace/` anew
#[derive(clap::Args)]
pub struct BpfArgs {
    /// Only compare what is there with its source
    #[arg(long)]
    check: bool,
}

/// Compiles, or compares.
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

/// Whether the object is what its source becomes. Another version of the compiler makes another
/// object, so this one is compared only with what the same has made.
pub fn check() -> Result<()> {
    let dir = dir();
    let (noted, ours) = (fs::read_to_string(dir.join(NOTE))?, note(&compiler()?)?);
    let fresh = command::target_dir()?.join("stages.bpf.o");
    compile(&fresh)?;
    if source_line(&noted) != source_line(&ours) {
        bail!("{OBJECT} is of another source: run `cargo xtask bpf`, and commit what it makes");
    }
    if noted != ours {
        println!("{SOURCE} compiles; the object is not compared: another compiler made it");
        return Ok(());
    }
    if fs::read(&fresh)? != fs::read(dir.join(OBJECT))? {
        bail!("{OBJECT} is not what {SOURCE} becomes: run `cargo xtask bpf`");
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
    // No path of this machine goes into the object.
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

/// A checksum of all sources (FNV-1a, 64 bits): against forgetting, not against malice.
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
        // ELF, 64 bits, little-endian, of the machine BPF (247).
        assert_eq!((&object[..6], object[18]), (&b"\x7fELF\x02\x01"[..], 247));
    }

    #[test]
    fn every_source_is_counted() {
        let there = fs::read_dir(dir()).unwrap().flatten().map(|entry| entry.path());
        let sources = there.filter(|path| path.extension().is_some_and(|e| e == "c" || e == "h"));
        assert_eq!(sources.count(), SOURCES.len());
    }
}
