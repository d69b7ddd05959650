//! Loop devices on image files.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::FallocateFlags;

use crate::command;

/// A loop device on an image file that is its own. The image goes with it. If this process is killed, the kernel
/// detaches the device with its last user.
#[derive(Debug)]
pub struct LoopDevice {
    node: PathBuf,
    image: PathBuf,
    _open: File,
}

impl LoopDevice {
    /// Makes an image of `bytes`, all of them allocated, and a device of `sector` bytes a sector on it, with
    /// direct I/O if the file system of the image supports it.
    ///
    /// # Errors
    ///
    /// Where there is no room, no loop device, or no program losetup(8).
    pub fn create(image: &Path, bytes: u64, sector: u32) -> Result<LoopDevice> {
        // Allocate all blocks now. Otherwise the measurement includes allocations, and an image in
        // memory (tmpfs) is charged to the control group that first writes to it instead of to this
        // process.
        let file = File::create(image)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .with_context(|| format!("no room for {} MiB at {}", bytes >> 20, image.display()))?;
        drop(file);
        LoopDevice::attach(image, sector)
    }

    /// Makes a device on an image that is there. It goes with the device, too.
    ///
    /// # Errors
    ///
    /// Where there is no loop device, or no program losetup(8).
    pub fn attach(image: &Path, sector: u32) -> Result<LoopDevice> {
        let (name, sector) = (image.to_string_lossy().into_owned(), sector.to_string());
        let losetup = |how: &[&str]| {
            let fixed = ["--find", "--show", "--sector-size", &sector, &name];
            command::output("losetup", &[how, &fixed].concat())
        };
        let node = losetup(&["--direct-io=on"]).or_else(|_| losetup(&[]));
        let node = node.context("no loop device is available: load the module `loop`")?;
        let node = PathBuf::from(node.trim());
        let open = File::open(&node).with_context(|| format!("open {}", node.display()));
        // While the device is open, this marks it to be detached on its last close.
        let marked = command::output("losetup", &["--detach".as_ref(), node.as_os_str()]);
        let open = open?;
        marked?;
        Ok(LoopDevice { node, image: image.to_owned(), _open: open })
    }

    /// The path of the device.
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// The path of the image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// The device name, such as `loop3`.
    pub fn name(&self) -> String {
        self.node.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.image);
    }
}
