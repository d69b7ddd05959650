//! Volumes without servers: the client has the translators of both sides, and two directories.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use defuse_measure::gluster::ROOM;

/// Initialises what libgfapi forgets.
const CONTEXT: &str = include_str!("context.c");

/// The configuration with which Debian builds GlusterFS, which the headers need.
const DEFINES: [&str; 4] =
    ["-DGF_LINUX_HOST_OS", "-DSIZEOF_LONG=8", "-DHAVE_ATOMIC_BUILTINS", "-D_FILE_OFFSET_BITS=64"];

/// Makes the directories and the description of a volume in `work`, and returns the path of the
/// latter. Each client has its own volume: nothing below them would order what two of them do in
/// one directory.
///
/// # Errors
///
/// Fails if they cannot be written.
pub fn make(work: &Path, client: &str) -> Result<PathBuf> {
    let bricks = [1, 2].map(|copy| Path::new(ROOM).join(format!("graph-{client}-{copy}")));
    for brick in &bricks {
        fs::create_dir(brick).with_context(|| brick.display().to_string())?;
    }
    let file = work.join(format!("graph-{client}.vol"));
    fs::write(&file, text(&bricks.each_ref().map(|brick| brick.as_path())))?;
    Ok(file)
}

/// The servers' and the client's parts of a replicated volume, without the network between.
fn text(bricks: &[&Path; 2]) -> String {
    let mut text = String::new();
    for (number, brick) in bricks.iter().enumerate() {
        let brick = brick.display();
        text.push_str(&format!(
            "volume graph-posix-{number}\n    type storage/posix\n    option directory {brick}\nend-volume\n\
             volume graph-client-{number}\n    type features/locks\n    subvolumes graph-posix-{number}\nend-volume\n"
        ));
    }
    text.push_str(
        "volume graph-replicate-0\n    type cluster/replicate\n    option afr-pending-xattr graph-client-0,graph-client-1\n    \
         subvolumes graph-client-0 graph-client-1\nend-volume\nvolume graph\n    type performance/io-threads\n    \
         option thread-count 6\n    subvolumes graph-replicate-0\nend-volume\n",
    );
    text
}

/// The value of `LD_PRELOAD` with which libgfapi can use `storage/posix`. The library is made in
/// `work`.
///
/// # Errors
///
/// Fails without a C compiler or the headers of GlusterFS.
pub fn preload(work: &Path) -> Result<OsString> {
    let (source, library) = (work.join("context.c"), work.join("context.so"));
    fs::write(&source, CONTEXT)?;
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-I/usr/include/glusterfs"]).args(DEFINES);
    let output = compiler.arg("-o").arg(&library).arg(&source).stdin(Stdio::null()).output();
    let output = output.context("no C compiler: install the package gcc")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let first = said.lines().find(|line| line.contains("error")).unwrap_or("");
    ensure!(
        output.status.success(),
        "libgfapi needs help with storage/posix, which cannot be compiled ({first}): install the package libglusterfs-dev"
    );
    let mut value = library.into_os_string();
    value.push(" libglusterfs.so.0");
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_translator_is_complete() {
        let text = text(&[Path::new("/a"), Path::new("/b")]);
        assert_eq!(text.matches("\nend-volume\n").count(), 6);
        assert_eq!(text.matches("volume graph").count(), 6);
        assert!(text.contains("option directory /b\n"));
    }
}
