//! Packages of a build for users, on minimal systems: installed, used and removed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::glibc::TargetGlibc;
use super::release::ReleaseFacts;
use super::{build, container, deb, image, make};
use crate::children::ChildPrograms;
use crate::command;
use crate::fresh::{DebianRelease, MinimalRoot};

/// The releases, with the first that has the glibc of the packages.
pub const RELEASES: [&str; 3] = ["bullseye", "bookworm", "trixie"];

/// The commands of a user, in such a system.
const USE: &str = include_str!("use.sh");

/// The place of the packages there.
const PLACE: &str = "root/packages";

/// Builds the packages, and tries them on all releases.
pub fn check() -> Result<()> {
    let own = command::target_dir()?.join("packages");
    let built = build(TargetGlibc::Old, &own)?;
    built.check()?;
    let facts = ReleaseFacts::from_checkout()?;
    let (first, second) = (tempfile::tempdir_in(&own)?, tempfile::tempdir_in(&own)?);
    let files = make(&built, &facts, TargetGlibc::Old, first.path())?;
    let again = make(&built, &facts, TargetGlibc::Old, second.path())?;
    for (one, other) in files.iter().zip(&again) {
        ensure!(
            fs::read(one)? == fs::read(other)?,
            "{} differs when it is made again",
            one.display()
        );
    }
    let of_debian: Vec<PathBuf> =
        files.iter().filter(|file| has_end(file, "deb")).cloned().collect();
    let errors = deb::errors(&of_debian)?;
    ensure!(errors.is_empty(), "{errors}");
    RELEASES.iter().try_for_each(|release| try_on(release, &files))?;
    let image = image::make(&files, &container::PACKAGES.map(str::to_owned), &facts, first.path())?;
    container::check(&image)
}

/// Tries the packages among `files` on a minimal system of `release`.
pub fn try_on(release: &str, files: &[PathBuf]) -> Result<()> {
    ensure!(command::is_root(), "creating a root file system requires root: run it as root");
    let used = || use_on(&DebianRelease::find(release)?, files);
    used().with_context(|| format!("on a minimal {release}"))
}

fn use_on(release: &DebianRelease, files: &[PathBuf]) -> Result<()> {
    let children = ChildPrograms::watch_signals()?;
    let root = MinimalRoot::make(&children, release, &std::env::temp_dir(), "ca-certificates")?;
    let place = root.dir().join(PLACE);
    fs::create_dir_all(&place)?;
    for file in files.iter().filter(|file| has_end(file, "deb") || has_end(file, "gz")) {
        fs::copy(file, place.join(file.file_name().context("a package has a name")?))?;
    }
    println!("\n#### the packages on a minimal {}", release.name());
    root.run(&children, &["sh", "-c", USE])?;
    root.remove()
}

fn has_end(file: &Path, end: &str) -> bool {
    file.extension().is_some_and(|extension| extension == end)
}
