//! The directory of the demo, and its mounts, which are removed at the end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::statistics::RequestCounts;
use crate::command;

/// A temporary directory: `source` is mounted on each `mnt/PROFILE`.
pub struct DemoDir {
    dir: PathBuf,
    program: PathBuf,
    mounted: Vec<&'static str>,
}

impl DemoDir {
    /// Creates a directory below `parent`; `program` is defuse.
    pub fn new(parent: &Path, program: PathBuf) -> Result<DemoDir> {
        // Without symbolic links, as in the table of mounts.
        let parent = parent.canonicalize().with_context(|| parent.display().to_string())?;
        let dir = tempfile::Builder::new().prefix("defuse-demo-").tempdir_in(&parent);
        let dir = dir.with_context(|| parent.display().to_string())?.keep();
        let place = DemoDir { dir, program, mounted: Vec::new() };
        fs::create_dir(place.source())?;
        fs::create_dir(place.path("mnt"))?;
        Ok(place)
    }

    /// A path in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The native directory.
    pub fn source(&self) -> PathBuf {
        self.path("source")
    }

    /// The directory as programs of a target see it. With `defuse run` only they see it.
    pub fn root(&self, target: &str) -> PathBuf {
        if target == super::NATIVE { self.source() } else { self.path("mnt").join(target) }
    }

    /// The directory of a target as this process sees it.
    pub fn real_root(&self, target: &str) -> PathBuf {
        if super::is_mount(target) { self.root(target) } else { self.source() }
    }

    /// A program on a target, started in `directory`. The caller adds its arguments.
    pub fn program(&self, target: &str, program: &str, directory: Option<&Path>) -> Command {
        if target != super::DIRECT {
            let mut command = Command::new(program);
            command.current_dir(directory.unwrap_or(Path::new("/")));
            return command;
        }
        let mut mount = self.root(target).into_os_string();
        mount.push("=passthrough:");
        mount.push(self.source());
        let mut command = self.defuse(&["run", "--mount"]);
        command.arg(mount).arg("-C").arg(directory.unwrap_or(Path::new("/")));
        command.args(["--", program]);
        command
    }

    /// Mounts the native directory.
    pub fn mount(&mut self, profile: &'static str) -> Result<()> {
        let (source, root) = (self.source(), self.root(profile));
        fs::create_dir_all(&root)?;
        let mut mount = self.defuse(&["mount", "--profile", profile]);
        mount.arg(format!("passthrough:{}", source.display())).arg(root);
        // Recorded first, because the mount may exist even after a failure.
        self.mounted.push(profile);
        command::output(&mut mount).map(drop)
    }

    /// The statistics of a mount so far; empty for targets without a mount.
    pub fn statistics(&self, target: &str) -> Result<RequestCounts> {
        if !super::is_mount(target) {
            return Ok(RequestCounts::default());
        }
        let mut stat = self.defuse(&["stat", "--json"]);
        RequestCounts::parse(&command::output(stat.arg(self.root(target)))?)
    }

    /// Unmounts everything and removes the files that the programs created.
    pub fn end_round(&mut self) -> Result<()> {
        while let Some(profile) = self.mounted.last().copied() {
            let root = self.root(profile);
            command::output(self.defuse(&["umount"]).arg(root))?;
            self.mounted.pop();
        }
        let own = self.source().join("own");
        fs::remove_dir_all(&own).with_context(|| own.display().to_string())
    }

    /// Removes everything. Dropping does the same but ignores errors.
    pub fn close(mut self) -> Result<()> {
        self.clean_up()
    }

    fn defuse(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        // A separate registry keeps the demo apart from other mounts.
        command.args(arguments).env("DEFUSE_RUNTIME_DIR", self.path("run"));
        command
    }

    fn clean_up(&mut self) -> Result<()> {
        for profile in std::mem::take(&mut self.mounted) {
            let root = self.root(profile);
            if is_mounted_below(&root)
                && command::output(self.defuse(&["umount"]).arg(&root)).is_err()
            {
                let _ = command::output(self.defuse(&["umount", "--lazy"]).arg(&root));
            }
        }
        if !self.dir.exists() {
            return Ok(());
        }
        if is_mounted_below(&self.dir) {
            // Removing would delete files through the mount.
            bail!("something is still mounted below {}: it is left there", self.dir.display());
        }
        fs::remove_dir_all(&self.dir).with_context(|| self.dir.display().to_string())
    }
}

impl Drop for DemoDir {
    fn drop(&mut self) {
        if let Err(error) = self.clean_up() {
            eprintln!("xtask: {error:#}");
        }
    }
}

/// True if something is mounted at `path` or below it, or if that is unknown.
fn is_mounted_below(path: &Path) -> bool {
    let Ok(mounts) = fs::read_to_string("/proc/self/mountinfo") else { return true };
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    points.into_iter().any(|point| Path::new(point).starts_with(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_gone_when_it_is_dropped() {
        let place = DemoDir::new(&std::env::temp_dir(), "defuse".into()).unwrap();
        let dir = place.path("");
        assert!(place.source().is_dir());
        drop(place);
        assert!(!dir.exists());
    }

    #[test]
    fn mounts_below_a_path_are_detected() {
        assert!(is_mounted_below(Path::new("/proc")));
        assert!(!is_mounted_below(Path::new("/proc/self/fdinfo")));
    }
}
