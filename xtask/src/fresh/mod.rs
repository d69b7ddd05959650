//! `cargo xtask fresh`: runs both commands of the README on a minimal Debian.
//!
//! It creates a minimal root with mmdebstrap(1) in separate namespaces, and clones the committed
//! state into it. It is not a container: it uses the Rust toolchain of this machine, its downloaded
//! crates (read-only), its network settings, and its kernel.

mod release;
mod root;

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};

use crate::apt::AptTool;
use crate::children::ChildPrograms;
use crate::command;
use crate::packages::{self, RequiredTool};
use crate::suite;
pub use release::DebianRelease;
pub use root::{MinimalRoot, bootstrap, place};

/// Tools for creating a root.
pub const TOOLS: &[RequiredTool] = &[
    RequiredTool::package("mmdebstrap", "mmdebstrap"),
    RequiredTool::package("util-linux", "unshare"),
    RequiredTool::package("git", "git"),
];

/// The supported releases.
const RELEASES: [&str; 2] = ["bookworm", "trixie"];

/// The packages that a user installs first: a C compiler, and the certificates that cargo needs for
/// downloads.
const FIRST: &str = "gcc,libc6-dev,ca-certificates";

/// The two commands of the README.
const COMMANDS: [&[&str]; 2] = [&["demo"], &["test"]];

/// Run both commands of the README on a minimal Debian, from a clean clone of the committed state
#[derive(clap::Args)]
pub struct FreshArgs {
    /// The release [default: this machine's]
    #[arg(long, value_parser = RELEASES)]
    release: Option<String>,
    /// Only look up every package of the tables in the package lists of the release
    #[arg(long)]
    resolve: bool,
    /// Directory for the root [default: the directory of temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Arguments of `cargo xtask` instead of `demo` and `test`, after `--`: `-- test structure`
    #[arg(last = true)]
    command: Vec<String>,
}

/// Runs the commands, or looks up the packages.
pub fn run(args: &FreshArgs) -> Result<()> {
    let release = DebianRelease::find(args.release.as_deref().unwrap_or(&own_release()))?;
    if args.resolve {
        return resolve(&release);
    }
    ensure!(command::is_root(), "creating a root file system requires root: run it as root");
    packages::provide(TOOLS);
    if let Some(tool) = TOOLS.iter().find(|tool| !tool.is_there()) {
        bail!("{} is missing: {}", tool.name, tool.install_command());
    }
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    if args.command.is_empty() {
        return run_in(&release, &dir, &COMMANDS);
    }
    let words: Vec<&str> = args.command.iter().map(String::as_str).collect();
    run_in(&release, &dir, &[&words])
}

/// The test step: looks up the packages in all releases, and runs the commands in one.
pub fn check() -> Result<()> {
    for name in RELEASES {
        resolve(&DebianRelease::find(name)?)?;
    }
    run(&FreshArgs { release: None, resolve: false, dir: None, command: Vec::new() })
}

fn run_in(release: &DebianRelease, dir: &std::path::Path, commands: &[&[&str]]) -> Result<()> {
    let children = ChildPrograms::watch_signals()?;
    let root = MinimalRoot::make(&children, release, dir, FIRST)?;
    for words in commands {
        println!("\n#### on a new {}: cargo xtask {}", release.name(), words.join(" "));
        root.xtask(&children, words)?;
    }
    root.remove()?;
    println!("#### a new {} has passed; it is removed", release.name());
    Ok(())
}

/// Looks up every package in the lists of a release, as if none were installed.
fn resolve(release: &DebianRelease) -> Result<()> {
    let place = root::place(&std::env::temp_dir())?;
    let apt = AptTool::for_empty_machine().with_options(release.apt_options(place.path())?);
    apt.update()?;
    let names = suite::list_packages();
    let complaints = apt.check_installable(&names)?;
    ensure!(complaints.is_empty(), "{}: {}", release.name(), complaints.join("\n"));
    println!("{} packages can be installed on {}", names.len(), release.name());
    Ok(())
}

/// The release of this machine if it is supported, otherwise the first.
fn own_release() -> String {
    let own = release::codename().unwrap_or_default();
    RELEASES.into_iter().find(|name| *name == own).unwrap_or(RELEASES[0]).to_owned()
}
