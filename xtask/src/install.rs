//! `cargo xtask install`: installs all files for users at the standard paths.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command;
use crate::library::{self, LibraryInstall};

/// Build in release and install: program, libraries, header, manual pages and completions
#[derive(clap::Args)]
pub struct InstallArgs {
    /// Directory of the installed files
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
    /// Write below this directory instead of /, for package builds
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
}

/// Builds and installs.
pub fn run(args: &InstallArgs) -> Result<()> {
    ensure!(args.prefix.is_absolute(), "{}: give an absolute prefix", args.prefix.display());
    let build =
        ["build", "--release", "-p", "defuse", "-p", "defuse-study-program", "-p", "defuse-capi"];
    command::run(command::cargo().args(build))?;
    let built = command::target_dir()?.join("release");
    let at = InstallTarget::new(&args.prefix, args.destdir.as_deref());
    at.copy(&built.join("defuse"), "bin/defuse", 0o755)?;
    at.copy(&built.join("defuse-study"), "bin/defuse-study", 0o755)?;
    let preload = built.join("deps/libdefuse_preload.so");
    at.copy(&preload, "lib/defuse/libdefuse_preload.so", 0o755)?;
    let compiler = library::compiler();
    LibraryInstall { prefix: &args.prefix, libdir: "lib", compiler: &compiler }
        .install(&built.join("libdefuse.a"), &at)?;
    let (program, study) = (built.join("defuse"), built.join("defuse-study"));
    helpers(args)?;
    manual(&program, "man", &at)?;
    manual(&study, "study-man", &at)?;
    completions(&program, &at)
}

/// Makes the links to the program that mount(8) and umount(8) call. They look for them in /sbin
/// alone: an installation at another place than /usr leaves that to its user.
fn helpers(args: &InstallArgs) -> Result<()> {
    if !args.prefix.starts_with("/usr") {
        println!(
            "for mount(8) and fstab: {}",
            HELPERS.map(|name| format!("/sbin/{name}")).join(", ")
        );
        println!("are to be links to {}", args.prefix.join("bin/defuse").display());
        return Ok(());
    }
    let at = InstallTarget::new(Path::new("/usr"), args.destdir.as_deref());
    links(&at, &args.prefix.join("bin/defuse").display().to_string())
}

/// The names by which mount(8) and umount(8) call the program.
const HELPERS: [&str; 2] = ["mount.fuse.defuse", "umount.fuse.defuse"];

/// Makes the links for mount(8) and umount(8) in `sbin` to `program`.
pub fn links(at: &InstallTarget, program: &str) -> Result<()> {
    HELPERS.iter().try_for_each(|helper| at.link(&format!("sbin/{helper}"), program))
}

/// Installs the manual pages that a program writes by its command `words`.
pub fn manual(program: &Path, words: &str, at: &InstallTarget) -> Result<()> {
    let place = tempfile::tempdir()?;
    command::run(Command::new(program).arg(words).arg(place.path()))?;
    for page in fs::read_dir(place.path())? {
        let page = page?.path();
        let name = page.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let section = name.rsplit('.').next().unwrap_or("1");
        at.copy(&page, &format!("share/man/man{section}/{name}"), 0o644)?;
    }
    Ok(())
}

/// Installs the completions, which the program prints.
pub fn completions(program: &Path, at: &InstallTarget) -> Result<()> {
    for (shell, to) in [
        ("bash", "share/bash-completion/completions/defuse"),
        ("zsh", "share/zsh/site-functions/_defuse"),
        ("fish", "share/fish/vendor_completions.d/defuse.fish"),
    ] {
        let script = command::output(Command::new(program).args(["completions", shell]))?;
        at.write(to, script.as_bytes(), 0o644)?;
    }
    Ok(())
}

/// The target of an installation.
pub struct InstallTarget {
    base: PathBuf,
    /// Each file is printed.
    shown: bool,
}

impl InstallTarget {
    /// An installation below `prefix`, an absolute path, or below the same path in `destdir`.
    pub fn new(prefix: &Path, destdir: Option<&Path>) -> Self {
        let below: PathBuf =
            prefix.components().filter(|part| *part != Component::RootDir).collect();
        InstallTarget { base: destdir.unwrap_or(Path::new("/")).join(below), shown: true }
    }

    /// The files of a package, in the directory `base`.
    pub fn for_package(base: &Path) -> Self {
        InstallTarget { base: base.to_owned(), shown: false }
    }

    /// Copies a file into the installation.
    pub fn copy(&self, from: &Path, name: &str, mode: u32) -> Result<()> {
        let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.write(name, &bytes, mode)
    }

    /// Writes a file atomically, so that programs running from the old one are not disturbed.
    pub fn write(&self, name: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let (path, new) = self.places(name)?;
        let put = || -> std::io::Result<()> {
            fs::write(&new, bytes)?;
            fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
            fs::rename(&new, &path)
        };
        put().with_context(|| {
            format!("cannot write {}: name another place by --prefix", path.display())
        })?;
        if self.shown {
            println!("{}", path.display());
        }
        Ok(())
    }

    /// Creates a symbolic link to `target`.
    pub fn link(&self, name: &str, target: &str) -> Result<()> {
        let (path, new) = self.places(name)?;
        symlink(target, &new)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("cannot link {}", path.display()))?;
        if self.shown {
            println!("{} -> {target}", path.display());
        }
        Ok(())
    }

    fn places(&self, name: &str) -> Result<(PathBuf, PathBuf)> {
        let path = self.base.join(name);
        let folder = path.parent().unwrap_or(&self.base);
        fs::create_dir_all(folder).with_context(|| {
            format!("cannot make {}: name another place by --prefix", folder.display())
        })?;
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let new = folder.join(format!(".{file}.new"));
        let _ = fs::remove_file(&new);
        Ok((path, new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installation(destdir: Option<&str>) -> InstallTarget {
        InstallTarget::new(Path::new("/usr"), destdir.map(Path::new))
    }

    #[test]
    fn a_package_is_made_below_another_root() {
        assert_eq!(installation(None).base, Path::new("/usr"));
        assert_eq!(installation(Some("/tmp/x")).base, Path::new("/tmp/x/usr"));
    }

    #[test]
    fn files_are_replaced_as_a_whole() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path();
        let at = InstallTarget::for_package(place);
        for text in ["one", "other"] {
            at.write("lib/x.so.0", text.as_bytes(), 0o755).unwrap();
            at.link("lib/x.so", "x.so.0").unwrap();
            assert_eq!(fs::read_to_string(place.join("lib/x.so")).unwrap(), text);
        }
        let mode = fs::metadata(place.join("lib/x.so")).unwrap().permissions().mode();
        assert_eq!((mode & 0o777, fs::read_dir(place.join("lib")).unwrap().count()), (0o755, 2));
    }
}
