//! The block device of the study: an image file behind a loop device, with a fresh ext4 for every cell.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use defuse_measure::command;
use rustix::fs::FallocateFlags;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

/// Bytes of a sector in `/sys/block/*/stat`, whatever the device's own.
const SECTOR: u64 = 512;

/// How far the kernel reads ahead, as for the paper's disks. Newer kernels derive megabytes from what a loop device says of
/// itself, and 32 of those windows are more than the memory that there is at scale `small`.
const READ_AHEAD_KIB: &str = "128";

/// A loop device and where its file system is mounted. Everything is undone when it is dropped; should this process be
/// killed, the kernel detaches the device with the last that holds it.
#[derive(Debug)]
pub struct Device {
    node: PathBuf,
    mountpoint: PathBuf,
    image: PathBuf,
    inodes: u64,
    _open: File,
}

/// What a block device has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUse {
    /// Requests to read.
    pub read_requests: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Requests to write.
    pub write_requests: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

impl Device {
    /// Makes an image of `bytes` in `work` and a loop device for it, which bypasses the page cache of the image where the
    /// file system below can do that. File systems on it will have room for `inodes` files.
    pub fn create(work: &Path, bytes: u64, inodes: u64) -> Result<Device> {
        let (image, mountpoint) = (work.join("image"), work.join("ext4"));
        // With all of its blocks from the beginning: none is allocated while something is measured, and an image in
        // memory (tmpfs) is charged to this process and not to the control group of whoever writes to it first.
        let file = File::create(&image)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .with_context(|| format!("no room for {} MiB at {}", bytes >> 20, image.display()))?;
        drop(file);
        fs::create_dir(&mountpoint)?;
        let name = image.to_string_lossy().into_owned();
        let losetup = |how: &[&str]| {
            command::output("losetup", &[how, &["--find", "--show", &name]].concat())
        };
        let node = losetup(&["--direct-io=on"]).or_else(|_| losetup(&[]));
        let node = node.context("no loop device could be had: is the module `loop` there?")?;
        let node = PathBuf::from(node.trim());
        let open = File::open(&node).with_context(|| format!("open {}", node.display()));
        // While it is open this does not detach it, but says that it is to be detached when nobody has it any more.
        let marked = command::output("losetup", &["--detach".as_ref(), node.as_os_str()]);
        let open = open?;
        marked?;
        let name = node.file_name().unwrap_or_default().to_string_lossy();
        let ahead = format!("/sys/block/{name}/queue/read_ahead_kb");
        fs::write(&ahead, READ_AHEAD_KIB).with_context(|| ahead.clone())?;
        Ok(Device { node, mountpoint, image, inodes, _open: open })
    }

    /// Makes a new file system, with nothing left to be initialised later, and mounts it.
    pub fn format(&mut self) -> Result<()> {
        self.unmount()?;
        let node = self.node.to_string_lossy().into_owned();
        let inodes = self.inodes.to_string();
        // Without discard the image keeps its blocks, so that later cells do not allocate them again.
        let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
        command::output("mkfs.ext4", &["-q", "-F", "-N", &inodes, "-E", options, &node])?;
        self.mount()
    }

    /// Unmounts and mounts, so that nothing of the file system is in memory.
    pub fn remount(&mut self) -> Result<()> {
        self.unmount()?;
        self.mount()
    }

    fn mount(&self) -> Result<()> {
        command::output(
            "mount",
            &["-t".as_ref(), "ext4".as_ref(), self.node.as_os_str(), self.mountpoint.as_os_str()],
        )?;
        Ok(())
    }

    /// Unmounts what is mounted.
    pub fn unmount(&mut self) -> Result<()> {
        for _ in 0..200 {
            match rustix::mount::unmount(&self.mountpoint, UnmountFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::INVAL) => return Ok(()),
                // Whoever has just ended may still hold a file.
                Err(rustix::io::Errno::BUSY) => sleep(Duration::from_millis(25)),
                Err(error) => bail!("cannot unmount {}: {error}", self.mountpoint.display()),
            }
        }
        bail!("{} stays in use: see fuser -vm on it", self.mountpoint.display())
    }

    /// Where the file system is mounted.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Such as `loop3`.
    pub fn name(&self) -> String {
        self.node.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// `MAJOR:MINOR`, as control groups want it.
    pub fn number(&self) -> Result<String> {
        let file = format!("/sys/block/{}/dev", self.name());
        Ok(fs::read_to_string(&file).with_context(|| file.clone())?.trim().to_owned())
    }

    /// What it has done since it is there.
    pub fn used(&self) -> Result<DeviceUse> {
        let file = format!("/sys/block/{}/stat", self.name());
        let text = fs::read_to_string(&file).with_context(|| file.clone())?;
        DeviceUse::parse(&text).with_context(|| format!("{file} is not understood"))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.unmount().is_err() {
            let _ = rustix::mount::unmount(&self.mountpoint, UnmountFlags::DETACH);
        }
        let _ = fs::remove_file(&self.image);
    }
}

impl DeviceUse {
    /// The text of a `/sys/block/*/stat`; see the kernel's `Documentation/block/stat.rst`.
    fn parse(text: &str) -> Option<DeviceUse> {
        let fields: Vec<u64> =
            text.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let at = |place: usize| fields.get(place).copied();
        Some(DeviceUse {
            read_requests: at(0)?,
            read_bytes: at(2)? * SECTOR,
            write_requests: at(4)?,
            write_bytes: at(6)? * SECTOR,
        })
    }

    /// What was done since `earlier`.
    pub fn since(&self, earlier: &DeviceUse) -> DeviceUse {
        DeviceUse {
            read_requests: self.read_requests.saturating_sub(earlier.read_requests),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            write_requests: self.write_requests.saturating_sub(earlier.write_requests),
            write_bytes: self.write_bytes.saturating_sub(earlier.write_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_a_block_device() {
        let before = DeviceUse::parse("  10 1 16 5 20 2 32 9 0 1 2 0 0 0 0 0 0\n").unwrap();
        assert_eq!((before.read_requests, before.read_bytes), (10, 8192));
        assert_eq!((before.write_requests, before.write_bytes), (20, 16384));
        let after = DeviceUse { read_requests: 11, ..before };
        assert_eq!(after.since(&before), DeviceUse { read_requests: 1, ..DeviceUse::default() });
        assert_eq!(DeviceUse::parse("1 2"), None);
    }
}
