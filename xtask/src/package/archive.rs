//! The archive for systems without a package manager that is known here: a directory with all
//! files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::release::ReleaseFacts;
use super::tree::{self, BuiltFiles, PackageLayout, PackagePart};
use crate::command;
use crate::install::InstallTarget;

/// The paths in the archive. It may be unpacked anywhere; files that name their place name this
/// one.
const LAYOUT: PackageLayout = PackageLayout {
    prefix: "/usr/local",
    libdir: "lib",
    library_mode: 0o755,
    compressed: false,
    doc: Some("defuse"),
};

/// Makes the archive, whose name has the glibc that its programs need.
pub fn make(
    built: &BuiltFiles,
    facts: &ReleaseFacts,
    glibc: &str,
    work: &Path,
    to: &Path,
) -> Result<PathBuf> {
    let name = format!("defuse-{}-x86_64-linux-glibc{glibc}", facts.version);
    let base = work.join(&name);
    for part in PackagePart::ALL {
        tree::fill(&base, part, "defuse", built, &LAYOUT)?;
    }
    // systemd looks for units of the administrator in lib/systemd/system of /usr/local.
    let at = InstallTarget::for_package(&base);
    at.write("INSTALL", install(glibc).as_bytes(), 0o644)?;
    at.write("share/doc/defuse/NOTICE", facts.notices.as_bytes(), 0o644)?;
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        at.copy(&command::root().join(licence), &format!("share/doc/defuse/{licence}"), 0o644)?;
    }
    for unit in tree::units()? {
        let file = unit.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&unit)?.replace("/usr/bin/", "/usr/local/bin/");
        at.write(&format!("lib/systemd/system/{file}"), text.as_bytes(), 0o644)?;
    }
    tree::paths(&base)?;
    let file = to.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args([
        "--create",
        "--format=gnu",
        "--sort=name",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
    ]);
    tar.arg(format!("--mtime=@{}", facts.time));
    tar.args(["--use-compress-program", &format!("gzip --no-name -{}", facts.level)]);
    command::run(tar.arg("--file").arg(&file).arg("--directory").arg(work).arg(&name))?;
    Ok(file)
}

fn install(glibc: &str) -> String {
    format!(
        "defuse for Linux on x86-64 with glibc {glibc} or later.\n\n\
         bin/defuse is complete: it runs from here. For all commands, the manual and the library for C:\n\n    \
         cp -a bin include lib sbin share /usr/local/\n    ldconfig\n\n\
         For mount(8) and fstab(5), which look in /sbin alone:\n\n    \
         ln -s /usr/local/bin/defuse /sbin/mount.fuse.defuse\n    \
         ln -s /usr/local/bin/defuse /sbin/umount.fuse.defuse\n"
    )
}
