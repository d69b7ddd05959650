//! A new ext4 file system on a loop device.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::mount::{UnmountFlags, unmount};

/// An ext4 file system for one test: the reference, and the source of passthrough.
pub struct Ext4Mount {
    path: PathBuf,
    image: PathBuf,
}

impl Ext4Mount {
    /// Creates a file system of `bytes` (a sparse image) with room for `inodes`, and mounts it on
    /// `path`, which is created.
    pub fn new(path: &Path, bytes: u64, inodes: u64) -> Result<Ext4Mount> {
        let image = path.with_extension("image");
        std::fs::create_dir_all(path)?;
        std::fs::File::create(&image)?.set_len(bytes)?;
        // Nothing here must survive a crash of the machine, so there is no journal.
        let mut mkfs = Command::new("mkfs.ext4");
        mkfs.args(["-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal", "-N"]);
        succeed(mkfs.arg(inodes.to_string()).arg(&image))?;
        let ext4 = Ext4Mount { path: path.to_path_buf(), image };
        let mut mount = Command::new("mount");
        mount.args(["-t", "ext4", "-o", "loop,acl,user_xattr"]);
        succeed(mount.arg(&ext4.image).arg(path))?;
        Ok(ext4)
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Ext4Mount {
    fn drop(&mut self) {
        // mount(8) has set up the loop device to be freed with the mount.
        let _ = unmount(&self.path, UnmountFlags::DETACH);
        let _ = std::fs::remove_file(&self.image);
    }
}

/// Runs a command, which must succeed. The error contains its output.
pub(crate) fn succeed(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{name} cannot be run"))?;
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{name} {:?}: {}\n{said}{}",
        command.get_args().collect::<Vec<_>>(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said.truncate(said.trim_end().len());
    Ok(said)
}
