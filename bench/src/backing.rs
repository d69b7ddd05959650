//! The file system that every target serves, created for the run and removed after it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::mount::UnmountFlags;

use crate::args::BackingKind;
use crate::command;

/// Size of the image. It is sparse, but written blocks stay in memory if the image is there.
const IMAGE_BYTES: u64 = 3 << 30;

/// A mounted backing file system; unmounted when dropped.
#[derive(Debug)]
pub struct BackingFileSystem {
    mountpoint: PathBuf,
}

impl BackingFileSystem {
    /// Creates and mounts a file system below `work`.
    pub fn create(kind: BackingKind, work: &Path) -> Result<Self> {
        let mountpoint = work.join("backing");
        fs::create_dir(&mountpoint)?;
        match kind {
            BackingKind::Ext4 => mount_ext4(work, &mountpoint)?,
            BackingKind::Tmpfs => mount_tmpfs(&mountpoint)?,
        }
        let backing = Self { mountpoint };
        fs::create_dir(backing.data())?;
        Ok(backing)
    }

    /// The directory that the targets serve. It is not the root, which contains `lost+found`.
    pub fn data(&self) -> PathBuf {
        self.mountpoint.join("data")
    }
}

impl Drop for BackingFileSystem {
    fn drop(&mut self) {
        // A mount made with `-o loop` frees its loop device.
        if rustix::mount::unmount(&self.mountpoint, UnmountFlags::empty()).is_err() {
            let _ = rustix::mount::unmount(&self.mountpoint, UnmountFlags::DETACH);
        }
    }
}

fn mount_ext4(work: &Path, mountpoint: &Path) -> Result<()> {
    let image = work.join("backing.img");
    fs::File::create(&image)?.set_len(IMAGE_BYTES)?;
    // Nothing may be initialised later in the background, where it would be measured.
    let options = "lazy_itable_init=0,lazy_journal_init=0";
    let image_arg = image.to_string_lossy();
    command::output("mkfs.ext4", &["-q", "-F", "-E", options, &image_arg])?;
    command::output("mount", &["-o", "loop", &image_arg, &mountpoint.to_string_lossy()])
        .context("the backing image could not be mounted; root and loop devices are needed")?;
    Ok(())
}

fn mount_tmpfs(mountpoint: &Path) -> Result<()> {
    let options = format!("size={IMAGE_BYTES}");
    let mountpoint = mountpoint.to_string_lossy();
    command::output("mount", &["-t", "tmpfs", "-o", &options, "defuse-bench", &mountpoint])?;
    Ok(())
}
