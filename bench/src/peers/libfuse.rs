//! libfuse's example `passthrough_hp`, compiled from the Debian source package with the Debian
//! library.
//!
//! The source is downloaded on first use, and is kept in cargo's target directory only.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::program_dir;
use crate::command;
use crate::target::{MOUNT, SOURCE, TargetRole, TargetSpec};

/// The way in which the example is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibfuseBuild {
    /// Built like the package. In 3.14 the example has no extended attributes then, because the
    /// switch for them reaches only the C files. The kernel gets ENOSYS once and sends no further
    /// request, not even before a write.
    Package,
    /// With extended attributes, as the example intends.
    Xattr,
}

/// Packages for building and running it.
const PACKAGES: [&str; 5] = ["libfuse3-dev", "fuse3", "pkg-config", "g++", "dpkg-dev"];
/// Servers with the sources of every release.
const MIRRORS: [(&str, &str, &str); 2] = [
    ("http://deb.debian.org/debian", "", "-updates"),
    ("http://deb.debian.org/debian-security", "-security", ""),
];
/// Flags of the package's build that change the program.
const FLAGS: [&str; 6] =
    ["-O2", "-g", "-D_REENTRANT", "-DHAVE_CONFIG_H", "-D_GNU_SOURCE", "-fno-strict-aliasing"];

/// The target. Builds its program if necessary.
pub fn spec(build: LibfuseBuild, timeout: u64) -> Result<TargetSpec> {
    let program = ensure(build)?;
    let mut command = vec![program.into(), "--foreground".into()];
    match timeout {
        86400 => {}
        0 => command.push("--nocache".into()),
        _ => bail!("--timeout {timeout}: passthrough_hp supports only 86400 and 0"),
    }
    command.extend([SOURCE.into(), MOUNT.into()]);
    let version = format!("passthrough_hp of libfuse3 {}", package_version()?);
    let (name, version) = match build {
        LibfuseBuild::Package => ("libfuse", format!("{version}, compiled as the package does")),
        LibfuseBuild::Xattr => ("libfuse-xattr", format!("{version}, compiled with HAVE_SETXATTR")),
    };
    Ok(TargetSpec { name: name.into(), role: TargetRole::Peer, command: Some(command), version })
}

/// Installs, downloads and compiles missing parts, and returns the program.
fn ensure(build: LibfuseBuild) -> Result<PathBuf> {
    install_packages()?;
    let version = package_version()?;
    let dir = program_dir()?.join("peers").join(format!("fuse3-{}", version.replace(':', "_")));
    let name = match build {
        LibfuseBuild::Package => "passthrough_hp",
        LibfuseBuild::Xattr => "passthrough_hp_xattr",
    };
    let program = dir.join(name);
    if program.exists() {
        return Ok(program);
    }
    let source = dir.join("source");
    if !source.exists() {
        fetch_source(&version, &dir, &source)?;
    }
    compile(build, &source, &program)?;
    Ok(program)
}

fn install_packages() -> Result<()> {
    let installed = |package: &&str| {
        command::output("dpkg-query", &["-W", "-f", "${db:Status-Status}", package])
            .is_ok_and(|status| status == "installed")
    };
    let missing: Vec<_> = PACKAGES.iter().copied().filter(|name| !installed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("installing Debian packages for the libfuse peer: {}", missing.join(" "));
    let mut args = vec!["install", "-y", "--no-install-recommends"];
    args.extend(missing);
    if command::output("apt-get", &args).is_err() {
        // The machine may have no package lists yet.
        command::output("apt-get", &["update"])?;
        command::output("apt-get", &args)?;
    }
    Ok(())
}

fn package_version() -> Result<String> {
    let version = command::output("dpkg-query", &["-W", "-f", "${Version}", "libfuse3-dev"])?;
    Ok(version.trim().to_owned())
}

/// Downloads the source package with a separate apt configuration. The machine's sources and lists
/// are not changed.
fn fetch_source(version: &str, dir: &Path, source: &Path) -> Result<()> {
    eprintln!("fetching the source package fuse3 {version} for the libfuse peer");
    let lists = dir.join("lists");
    fs::create_dir_all(lists.join("partial"))?;
    let list = dir.join("source.list");
    let release = fs::read_to_string("/etc/os-release")?;
    let suite = codename(&release).context("/etc/os-release names no Debian release")?;
    fs::write(&list, source_list(suite))?;
    let options = [
        format!("Dir::Etc::sourcelist={}", list.display()),
        "Dir::Etc::sourceparts=/dev/null".to_owned(),
        format!("Dir::State::lists={}", lists.display()),
        // The download user may not have access to the target directory.
        "APT::Sandbox::User=root".to_owned(),
    ];
    let apt = |what: &[&str]| {
        let mut args: Vec<&str> = options.iter().flat_map(|option| ["-o", option]).collect();
        args.extend(what);
        command::output_in(dir, "apt-get", &args)
    };
    apt(&["update"])?;
    apt(&["source", "--download-only", &format!("fuse3={version}")])?;
    let dsc = find_dsc(dir)?;
    command::output("dpkg-source", &["-x", &dsc.to_string_lossy(), &source.to_string_lossy()])?;
    Ok(())
}

fn source_list(suite: &str) -> String {
    let mut list = String::new();
    for (mirror, first, second) in MIRRORS {
        list.push_str(&format!("deb-src {mirror} {suite}{first} main\n"));
        if !second.is_empty() {
            list.push_str(&format!("deb-src {mirror} {suite}{second} main\n"));
        }
    }
    list
}

fn codename(os_release: &str) -> Option<&str> {
    os_release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="))
}

fn find_dsc(dir: &Path) -> Result<PathBuf> {
    let found = fs::read_dir(dir)?.flatten().map(|entry| entry.path());
    found
        .into_iter()
        .find(|path| path.extension().is_some_and(|extension| extension == "dsc"))
        .context("apt-get brought no source package")
}

fn compile(build: LibfuseBuild, source: &Path, program: &Path) -> Result<()> {
    eprintln!("compiling {}", program.display());
    let example = source.join("example/passthrough_hp.cc");
    let library = command::output("pkg-config", &["--cflags", "--libs", "fuse3"])?;
    let (example, program) = (example.to_string_lossy(), program.to_string_lossy());
    let mut args = FLAGS.to_vec();
    if build == LibfuseBuild::Xattr {
        args.extend(["-DHAVE_SETXATTR", "-DHAVE_UTIMENSAT", "-DHAVE_POSIX_FALLOCATE"]);
    }
    args.extend([&*example, "-o", &*program]);
    args.extend(library.split_whitespace());
    command::output("g++", &args)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_the_running_release_are_used() {
        assert_eq!(codename("ID=debian\nVERSION_CODENAME=bookworm\n"), Some("bookworm"));
        let list = source_list("bookworm");
        assert!(list.contains("debian bookworm main") && list.contains("bookworm-updates main"));
        assert!(list.contains("debian-security bookworm-security main"));
    }
}
