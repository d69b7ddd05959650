//! The glibc for which programs are linked: that of an older Debian, from its packages, so that
//! they run there and on all later ones.
//!
//! The linker of this machine takes the start files and libraries of that release. No program of it
//! is run, and nothing needs root.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::apt::AptTool;
use crate::command;
use crate::fresh::DebianRelease;

/// The release whose glibc is 2.31, of the year 2020.
const RELEASE: &str = "bullseye";

/// Its packages for compilers: the C library, and the parts of the compiler that are linked into
/// programs.
const PACKAGES: [&str; 5] = ["libc6", "libc6-dev", "libgcc-10-dev", "libgcc-s1", "linux-libc-dev"];

/// The version of its compiler.
const GCC: &str = "10";

/// The triplet of directories of libraries.
const TRIPLET: &str = "x86_64-linux-gnu";

/// A glibc to link for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum TargetGlibc {
    /// That of 2020, from packages of Debian 11 that apt downloads
    #[value(name = "2.31")]
    Old,
    /// That of this machine
    #[value(name = "own")]
    Own,
}

impl TargetGlibc {
    /// A C compiler that links for it. It and its files are kept in the directory `dir`.
    pub fn compiler(self, dir: &Path) -> Result<PathBuf> {
        match self {
            TargetGlibc::Own => Ok(crate::library::compiler().into()),
            TargetGlibc::Old => make_old_compiler(dir).with_context(|| {
                format!(
                    "no glibc of Debian {RELEASE}: `--glibc own` links for that of this machine, and the packages say which it is"
                )
            }),
        }
    }

    /// The newest version that programs may need.
    fn most(self) -> Option<GlibcVersion> {
        (self == TargetGlibc::Old).then_some(GlibcVersion(2, 31))
    }

    /// The version that the object `files` need together.
    ///
    /// # Errors
    ///
    /// Fails if one of them needs a later glibc than it was to be linked for, and names the symbol.
    pub fn find_needed(self, files: &[&Path]) -> Result<GlibcVersion> {
        let mut needed = GlibcVersion(2, 0);
        for file in files {
            let (version, symbol) = find_needed_by(file)?;
            if self.most().is_some_and(|most| version > most) {
                bail!("{} needs glibc {version} for {symbol}", file.display());
            }
            needed = needed.max(version);
        }
        Ok(needed)
    }
}

/// A version of glibc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GlibcVersion(u32, u32);

impl std::fmt::Display for GlibcVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The latest version of glibc's symbols that an object file needs, and one of these symbols.
fn find_needed_by(file: &Path) -> Result<(GlibcVersion, String)> {
    let table = command::output(Command::new("objdump").arg("-T").arg(file))?;
    let newest = table.lines().filter_map(parse_needed_symbol).max_by_key(|(version, _)| *version);
    newest.with_context(|| format!("{} needs no symbol of glibc", file.display()))
}

/// Version and name in a line of a table of symbols, unless a program runs without the symbol or
/// the file defines it.
fn parse_needed_symbol(line: &str) -> Option<(GlibcVersion, String)> {
    if !line.contains("*UND*") {
        return None;
    }
    let (_, rest) = line.split_once("GLIBC_")?;
    let version = rest.split(|c: char| c != '.' && !c.is_ascii_digit()).next()?;
    let mut numbers = version.split('.').map_while(|number| number.parse().ok());
    let version = GlibcVersion(numbers.next()?, numbers.next().unwrap_or(0));
    Some((version, line.split_whitespace().next_back()?.to_owned()))
}

/// The compiler of this machine, with the files of the old release.
fn make_old_compiler(dir: &Path) -> Result<PathBuf> {
    let (root, program) = (dir.join("root"), dir.join("cc"));
    if program.is_file() {
        return Ok(program);
    }
    println!("taking the C library of Debian {RELEASE} into {}", root.display());
    let _ = fs::remove_dir_all(dir);
    let debs = dir.join("packages");
    fs::create_dir_all(&debs)?;
    let release = DebianRelease::find(RELEASE)?;
    let apt = AptTool::for_empty_machine().with_options(release.apt_options(&dir.join("apt"))?);
    apt.update()?;
    for package in PACKAGES {
        let file = apt.download(package, &debs)?;
        command::run(Command::new("dpkg-deb").arg("--extract").args([&file, &root]))?;
    }
    make_relative(&root, &root)?;
    let flags = [
        format!("usr/lib/gcc/{TRIPLET}/{GCC}"),
        format!("usr/lib/{TRIPLET}"),
        format!("lib/{TRIPLET}"),
    ]
    // Otherwise the compiler takes its own files before those of the root.
    .map(|dir| format!("'-B{}'", root.join(dir).display()));
    let script =
        format!("#!/bin/sh\nexec cc '--sysroot={}' {} \"$@\"\n", root.display(), flags.join(" "));
    let new = dir.join("cc.new");
    fs::write(&new, script)?;
    fs::set_permissions(&new, Permissions::from_mode(0o755))?;
    links_for(&new, dir)?;
    // Last: it shows that all is there.
    fs::rename(new, &program)?;
    Ok(program)
}

/// Checks that a program is linked for the old glibc.
fn links_for(compiler: &Path, dir: &Path) -> Result<()> {
    let (source, program) = (dir.join("probe.c"), dir.join("probe"));
    fs::write(&source, "int main(void) { return 0; }\n")?;
    command::run(Command::new(compiler).arg("-o").arg(&program).arg(source).stdout(Stdio::null()))?;
    TargetGlibc::Old.find_needed(&[&program]).map(drop)
}

/// Makes the links below `dir` relative that lead to paths of `root`: they would lead to files of
/// this machine.
fn make_relative(root: &Path, dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let (path, kind) = entry.map(|entry| (entry.path(), entry.file_type()))?;
        let kind = kind?;
        if kind.is_dir() {
            make_relative(root, &path)?;
            continue;
        }
        if !kind.is_symlink() {
            continue;
        }
        let target = fs::read_link(&path)?;
        if let Ok(inside) = target.strip_prefix("/") {
            ensure!(
                !inside.components().any(|part| part == Component::ParentDir),
                "{}",
                path.display()
            );
            let up = dir.strip_prefix(root)?.components().map(|_| "..").collect::<PathBuf>();
            fs::remove_file(&path)?;
            symlink(up.join(inside), &path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_latest_needed_symbol() {
        let needed = "0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.34) pthread_create";
        let own = "00000000000a6f90  w   DF .text\t0000000000000026  GLIBC_2.99  own";
        let other = "0000000000000000      DF *UND*\t0000000000000000 (GCC_3.0) _Unwind_Resume";
        assert_eq!(
            parse_needed_symbol(needed),
            Some((GlibcVersion(2, 34), "pthread_create".to_owned()))
        );
        assert_eq!((parse_needed_symbol(own), parse_needed_symbol(other)), (None, None));
        let short = needed.replace("2.34", "2.2.5");
        assert_eq!(parse_needed_symbol(&short).unwrap().0, GlibcVersion(2, 2));
        assert!(GlibcVersion(2, 4) < GlibcVersion(2, 31));
    }

    #[test]
    fn links_of_the_old_release_do_not_lead_to_files_of_this_machine() {
        let root = tempfile::tempdir().unwrap();
        let lib = root.path().join("usr/lib/x");
        fs::create_dir_all(&lib).unwrap();
        symlink("/lib/x/libm.so.6", lib.join("libm.so")).unwrap();
        symlink("libz.so.1", lib.join("libz.so")).unwrap();
        make_relative(root.path(), root.path()).unwrap();
        let read = |name: &str| fs::read_link(lib.join(name)).unwrap();
        assert_eq!(read("libm.so"), Path::new("../../../lib/x/libm.so.6"));
        assert_eq!(read("libz.so"), Path::new("libz.so.1"));
    }
}
