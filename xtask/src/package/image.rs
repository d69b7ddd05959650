//! An image for containers (OCI): a minimal Debian with the package of the program, by umoci(1),
//! without a daemon of containers.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::release::ReleaseFacts;
use crate::children::ChildPrograms;
use crate::command;
use crate::fresh::{self, DebianRelease};
use crate::packages::RequiredTool;

/// Tools for making an image.
pub const BUILD_TOOLS: &[RequiredTool] = &[
    RequiredTool::package("mmdebstrap", "mmdebstrap"),
    RequiredTool::package("util-linux", "unshare"),
    RequiredTool::package("umoci", "umoci"),
];

/// The release of the system in an image.
const RELEASE: &str = "trixie";

/// The name of the image in its layout.
pub const NAME: &str = "defuse";

/// A hook of mmdebstrap(1), by which it installs packages from files of this machine.
const LOCAL_FILES: &str = "/usr/share/mmdebstrap/hooks/file-mirror-automount";

/// Makes an image with the packages of the program among `files`, and the packages `further` of
/// Debian. It is an archive, which Podman and Docker load.
pub fn make(
    files: &[PathBuf],
    further: &[String],
    facts: &ReleaseFacts,
    to: &Path,
) -> Result<PathBuf> {
    ensure!(command::is_root(), "creating a root file system requires root: run it as root");
    let children = ChildPrograms::watch_signals()?;
    let place = fresh::place(&std::env::temp_dir())?;
    let root = fresh::bootstrap(
        &children,
        &DebianRelease::find(RELEASE)?,
        place.path(),
        &includes(files, further)?,
    )?;
    // The access of this machine to its mirror.
    let settings = root.join("etc/apt/apt.conf.d/99mmdebstrap");
    if settings.exists() {
        fs::remove_file(settings)?;
    }
    let layout = place.path().join("layout");
    let image = format!("{}:{NAME}", layout.display());
    command::run(Command::new("umoci").args(["init", "--layout"]).arg(&layout))?;
    umoci("new", &image, &[])?;
    umoci("insert", &image, &[root.as_os_str().to_owned(), "/".into()])?;
    let options =
        ["--config.cmd=defuse", "--config.cmd=--help", "--os=linux", "--architecture=amd64"];
    umoci("config", &image, &options.map(OsString::from))?;
    command::run(Command::new("umoci").args(["gc", "--layout"]).arg(&layout))?;
    let file = to.join(format!("defuse-{}-x86_64.oci.tar", facts.version));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--format=gnu", "--sort=name", "--owner=0", "--group=0"]);
    command::run(tar.arg("--file").arg(&file).arg("--directory").arg(&layout).arg("."))?;
    Ok(file)
}

fn umoci(verb: &str, image: &str, arguments: &[OsString]) -> Result<()> {
    command::run(Command::new("umoci").args([verb, "--image", image]).args(arguments))
}

/// The options of mmdebstrap(1) for the packages.
fn includes(files: &[PathBuf], further: &[String]) -> Result<Vec<OsString>> {
    let is_program = |file: &&PathBuf| {
        file.file_name().is_some_and(|name| name.as_bytes().starts_with(b"defuse_"))
    };
    let program = files.iter().find(is_program).context("there is no package of the program")?;
    let program = program.canonicalize().with_context(|| program.display().to_string())?;
    let mut options =
        vec![format!("--hook-dir={LOCAL_FILES}").into(), OsString::from("--include=")];
    options[1].push(program);
    options.extend(further.iter().map(|name| format!("--include={name}").into()));
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_the_package_of_the_program_and_what_is_named() {
        let place = tempfile::tempdir().unwrap();
        let files = ["defuse-study_1_amd64.deb", "defuse_1_amd64.deb"].map(|name| {
            let file = place.path().join(name);
            fs::write(&file, "").unwrap();
            file
        });
        let options = includes(&files, &["git".to_owned()]).unwrap();
        let program = files[1].canonicalize().unwrap();
        assert_eq!(options[1], *format!("--include={}", program.display()));
        assert_eq!(options[2..], ["--include=git"]);
        assert!(includes(&files[..1], &[]).is_err());
    }
}
