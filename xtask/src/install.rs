//! `cargo xtask install`: everything that a user of the project has, where others look for it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command;

/// Build in release and install: program, libraries, header, manual pages and completions
#[derive(clap::Args)]
pub struct InstallArgs {
    /// What the installed files are below
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
    /// Write below this directory instead of /, for whoever makes a package
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
}

/// Builds and installs.
pub fn run(args: &InstallArgs) -> Result<()> {
    ensure!(args.prefix.is_absolute(), "{}: give an absolute prefix", args.prefix.display());
    let build = ["build", "--release", "-p", "defuse", "-p", "defuse-capi"];
    command::run(command::cargo().args(build))?;
    let built = command::target_dir()?.join("release");
    let at = Installation::new(args);
    for (from, to, mode) in [
        (built.join("defuse"), "bin/defuse".to_owned(), 0o755),
        (
            built.join("deps/libdefuse_preload.so"),
            "lib/defuse/libdefuse_preload.so".to_owned(),
            0o755,
        ),
        (built.join("libdefuse.so"), format!("lib/{}", shared_library()), 0o755),
        (built.join("libdefuse.a"), "lib/libdefuse.a".to_owned(), 0o644),
        (command::root().join("capi/include/defuse.h"), "include/defuse.h".to_owned(), 0o644),
    ] {
        let bytes = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        at.write(&to, &bytes, mode)?;
    }
    at.link("lib/libdefuse.so.0", &shared_library())?;
    at.link("lib/libdefuse.so", "libdefuse.so.0")?;
    at.write("lib/pkgconfig/defuse.pc", pkg_config(&args.prefix).as_bytes(), 0o644)?;
    texts(&at, &built.join("defuse"))
}

/// What the program says about itself.
fn texts(at: &Installation, program: &Path) -> Result<()> {
    let pages = command::target_dir()?.join("man");
    command::run(Command::new(program).arg("man").arg(&pages))?;
    for page in fs::read_dir(&pages)? {
        let page = page?.path();
        let name = page.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let section = name.rsplit('.').next().unwrap_or("1");
        at.write(&format!("share/man/man{section}/{name}"), &fs::read(&page)?, 0o644)?;
    }
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

/// The file of the C library; its soname, `libdefuse.so.0`, is a link to it.
fn shared_library() -> String {
    format!("libdefuse.so.{}", env!("CARGO_PKG_VERSION"))
}

fn pkg_config(prefix: &Path) -> String {
    format!(
        "prefix={}\n\nName: defuse\nDescription: User-space file systems in the application\nVersion: \
         {}\nCflags: -I${{prefix}}/include\nLibs: -L${{prefix}}/lib -ldefuse\nLibs.private: -lm -lpthread \
         -ldl\n",
        prefix.display(),
        env!("CARGO_PKG_VERSION")
    )
}

/// Where files go.
struct Installation {
    base: PathBuf,
}

impl Installation {
    fn new(args: &InstallArgs) -> Self {
        let below: PathBuf =
            args.prefix.components().filter(|part| *part != Component::RootDir).collect();
        let root = args.destdir.clone().unwrap_or_else(|| "/".into());
        Installation { base: root.join(below) }
    }

    /// Puts a file there as a whole: what runs from the old one goes on undisturbed.
    fn write(&self, name: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let (path, new) = self.places(name)?;
        let put = || -> std::io::Result<()> {
            fs::write(&new, bytes)?;
            fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
            fs::rename(&new, &path)
        };
        put().with_context(|| {
            format!("cannot write {}: name another place by --prefix", path.display())
        })?;
        println!("{}", path.display());
        Ok(())
    }

    fn link(&self, name: &str, target: &str) -> Result<()> {
        let (path, new) = self.places(name)?;
        symlink(target, &new)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("cannot link {}", path.display()))?;
        println!("{} -> {target}", path.display());
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

    fn installation(destdir: Option<&str>) -> Installation {
        let destdir = destdir.map(PathBuf::from);
        Installation::new(&InstallArgs { prefix: "/usr".into(), destdir })
    }

    #[test]
    fn a_package_is_made_below_another_root() {
        assert_eq!(installation(None).base, Path::new("/usr"));
        assert_eq!(installation(Some("/tmp/x")).base, Path::new("/tmp/x/usr"));
    }

    #[test]
    fn files_are_replaced_as_a_whole() {
        let place = std::env::temp_dir().join(format!("xtask-install-{}", std::process::id()));
        let at = Installation { base: place.clone() };
        for text in ["one", "other"] {
            at.write("lib/x.so.0", text.as_bytes(), 0o755).unwrap();
            at.link("lib/x.so", "x.so.0").unwrap();
            assert_eq!(fs::read_to_string(place.join("lib/x.so")).unwrap(), text);
        }
        let mode = fs::metadata(place.join("lib/x.so")).unwrap().permissions().mode();
        assert_eq!((mode & 0o777, fs::read_dir(place.join("lib")).unwrap().count()), (0o755, 2));
        fs::remove_dir_all(&place).unwrap();
    }
}
