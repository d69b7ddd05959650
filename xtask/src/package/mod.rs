//! `cargo xtask package`: packages of Debian, packages for rpm, and an archive, of one build.
//!
//! The packages of equal builds are equal: files have the time of the last commit, sorted names and
//! fixed owners. The build replaces the paths of this machine in its files, so that builds in other
//! directories are equal, too.

mod archive;
mod container;
mod deb;
mod glibc;
mod image;
mod release;
mod rpm;
#[cfg(test)]
mod tests;
mod tree;
mod trial;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;
use crate::packages::{self, RequiredTool};
use glibc::TargetGlibc;
use release::ReleaseFacts;
use tree::BuiltFiles;

pub use trial::check;

/// Tools for packages.
const BUILD_TOOLS: &[RequiredTool] = &[
    RequiredTool::package("dpkg-dev", "dpkg-shlibdeps"),
    RequiredTool::package("binutils", "objdump"),
    RequiredTool::package("rpm", "rpmbuild"),
    RequiredTool::package("git", "git"),
];

/// Tools for trying the packages in minimal systems.
pub const TOOLS: &[RequiredTool] = &[
    RequiredTool::package("dpkg-dev", "dpkg-shlibdeps"),
    RequiredTool::package("binutils", "objdump"),
    RequiredTool::package("rpm", "rpmbuild"),
    RequiredTool::package("git", "git"),
    RequiredTool::package("lintian", "lintian"),
    RequiredTool::package("mmdebstrap", "mmdebstrap"),
    RequiredTool::package("util-linux", "unshare"),
    RequiredTool::package("umoci", "umoci"),
    RequiredTool::package("runc", "runc"),
    RequiredTool::package("golang-github-containers-common", container::FILTER),
];

/// Paths in the files of a build, in place of those of this machine.
const SOURCE_PATH: &str = "/usr/src/defuse";
const CRATES_PATH: &str = "/usr/src/crates";

/// Build with profile `dist`, and make packages: .deb, .rpm and .tar.gz
#[derive(clap::Args)]
pub struct PackageArgs {
    /// Directory of the packages [default: `packages` in cargo's target directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The glibc to link for
    #[arg(long, value_enum, default_value_t = TargetGlibc::Old)]
    glibc: TargetGlibc,
    /// Take the files of this directory of a build, such as target/debug, instead of building
    #[arg(long, value_name = "DIR")]
    built: Option<PathBuf>,
    /// Then install, use and remove the packages on a minimal system of this release of Debian
    #[arg(long = "try", value_name = "RELEASE", value_parser = trial::RELEASES)]
    trials: Vec<String>,
    /// Also make an image for containers (OCI): a minimal Debian with the program
    #[arg(long)]
    image: bool,
    /// Further packages of Debian for the image, after commas
    #[arg(long, value_name = "PACKAGES", requires = "image", value_delimiter = ',')]
    with: Vec<String>,
}

/// Builds and makes the packages.
pub fn run(args: &PackageArgs) -> Result<()> {
    let of_image = if args.image { image::BUILD_TOOLS } else { &[] };
    for tools in [BUILD_TOOLS, of_image] {
        packages::provide(tools);
        if let Some(tool) = tools.iter().find(|tool| !tool.is_there()) {
            bail!("{} is missing: {}", tool.name, tool.install_command());
        }
    }
    let own = command::target_dir()?.join("packages");
    let to = args.out.clone().unwrap_or_else(|| own.clone());
    let built = match &args.built {
        Some(dir) => BuiltFiles::from_dir(dir, args.glibc.compiler(&own.join("glibc"))?),
        None => build(args.glibc, &own)?,
    };
    built.check()?;
    let mut facts = ReleaseFacts::from_checkout()?;
    if args.built.is_some() {
        // A build for a trial, which may be large.
        facts.level = 1;
    }
    fs::create_dir_all(&to).with_context(|| to.display().to_string())?;
    let files = make(&built, &facts, args.glibc, &to)?;
    files.iter().for_each(|file| println!("{}", file.display()));
    keep_symbols(&built, &facts, &to)?;
    if args.image {
        println!("{}", image::make(&files, &args.with, &facts, &to)?.display());
    }
    args.trials.iter().try_for_each(|release| trial::try_on(release, &files))
}

/// Keeps the symbols for debuggers, which are in no package. They are of the build id that a
/// program has.
fn keep_symbols(built: &BuiltFiles, facts: &ReleaseFacts, to: &Path) -> Result<()> {
    for program in [&built.program, &built.study] {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let symbols = to.join(format!("{name}-{}.debug", facts.version));
        let mut copy = Command::new("objcopy");
        command::run(copy.arg("--only-keep-debug").arg(program).arg(&symbols))?;
        println!("{}", symbols.display());
    }
    Ok(())
}

/// Builds all programs and libraries below the directory `own`.
fn build(glibc: TargetGlibc, own: &Path) -> Result<BuiltFiles> {
    let compiler = glibc.compiler(&own.join("glibc"))?;
    let (dir, mut cargo) = (own.join("build"), command::cargo());
    cargo.args(["build", "--profile", "dist"]).arg("--target-dir").arg(&dir);
    cargo.args(["-p", "defuse", "-p", "defuse-study-program", "-p", "defuse-capi"]);
    cargo.args(["-p", "defuse-python"]);
    cargo.env("CC", &compiler).env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", &compiler);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", remap_flags()?);
    command::run(&mut cargo)?;
    Ok(BuiltFiles::from_dir(&dir.join("dist"), compiler))
}

/// The options of rustc that replace the paths of this machine.
fn remap_flags() -> Result<String> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let crates = home.context("neither CARGO_HOME nor HOME is set")?.join("registry/src");
    let option = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    Ok([option(command::root(), SOURCE_PATH), option(&crates, CRATES_PATH)].join("\u{1f}"))
}

/// Makes all packages of a build in the directory `to`, and a file with their sums.
fn make(
    built: &BuiltFiles,
    facts: &ReleaseFacts,
    glibc: TargetGlibc,
    to: &Path,
) -> Result<Vec<PathBuf>> {
    let objects =
        [&built.program, &built.study, &built.preload, &built.module].map(PathBuf::as_path);
    let needed = glibc.find_needed(&objects)?.to_string();
    let work = tempfile::tempdir_in(to)?;
    let place = |name: &str| -> Result<PathBuf> {
        let place = work.path().join(name);
        fs::create_dir_all(&place)?;
        Ok(place)
    };
    let mut made = deb::make(built, facts, &place("deb")?, to)?;
    made.extend(rpm::make(built, facts, &place("rpm")?, to)?);
    made.push(archive::make(built, facts, &needed, &place("tar")?, to)?);
    let mut sums = Command::new("sha256sum");
    sums.args(made.iter().filter_map(|file| file.file_name())).current_dir(to);
    fs::write(to.join("SHA256SUMS"), command::output(&mut sums)?)?;
    Ok(made)
}
