//! Loop devices on image files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::command;

/// The longest wait for others to leave a device.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time between two looks at it.
const INTERVAL: Duration = Duration::from_millis(10);

/// A loop device on an image file that is its own. The image goes with it. If this process is
/// killed, the kernel detaches the device with its last user.
#[derive(Debug)]
pub struct ImageLoopDevice {
    node: PathBuf,
    image: PathBuf,
    _open: File,
}

impl ImageLoopDevice {
    /// Makes an image of `bytes`, all of them allocated, and a device of `sector` bytes a sector on
    /// it, with direct I/O if the file system of the image supports it.
    ///
    /// # Errors
    ///
    /// Where there is no room, no loop device, or no program losetup(8).
    pub fn create(image: &Path, bytes: u64, sector: u32) -> Result<ImageLoopDevice> {
        // Allocate all blocks now. Otherwise the measurement includes allocations, and an image in
        // memory (tmpfs) is charged to the control group that first writes to it instead of to this
        // process.
        let file = File::create(image)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .with_context(|| format!("no room for {} MiB at {}", bytes >> 20, image.display()))?;
        drop(file);
        ImageLoopDevice::attach(image, sector)
    }

    /// Makes a device on an image that is there. It goes with the device, too.
    ///
    /// # Errors
    ///
    /// Where there is no loop device, or no program losetup(8).
    pub fn attach(image: &Path, sector: u32) -> Result<ImageLoopDevice> {
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
        Ok(ImageLoopDevice { node, image: image.to_owned(), _open: open })
    }

    /// The path of the device.
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// Waits until no file system on the device is mounted, in any mount namespace: a new namespace
    /// has copies of all mounts until its process has left them.
    ///
    /// # Errors
    ///
    /// Where the device is in use for ten seconds.
    pub fn wait_until_free(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            match rustix::fs::open(&self.node, OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()) {
                Err(Errno::BUSY) if begun.elapsed() < PATIENCE => thread::sleep(INTERVAL),
                opened => {
                    let shown = || {
                        format!(
                            "{} is in use: umount its file systems, in all mount namespaces",
                            self.node.display()
                        )
                    };
                    return opened.map(drop).with_context(shown);
                }
            }
        }
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

impl Drop for ImageLoopDevice {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.image);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_waited_for_until_its_last_user_leaves() {
        let dir = tempfile::tempdir().unwrap();
        let device = match ImageLoopDevice::create(&dir.path().join("image"), 1 << 20, 4096) {
            Ok(device) => device,
            Err(error) => return println!("skipped: {error:#}"),
        };
        device.wait_until_free().unwrap();
        let exclusive = OFlags::EXCL | OFlags::CLOEXEC;
        let user = rustix::fs::open(device.node(), exclusive, Mode::empty()).unwrap();
        let held = Duration::from_millis(200);
        let leaves = thread::spawn(move || {
            thread::sleep(held);
            drop(user);
        });
        let begun = Instant::now();
        device.wait_until_free().unwrap();
        assert!(begun.elapsed() >= held / 2, "somebody uses it");
        leaves.join().unwrap();
    }
}
