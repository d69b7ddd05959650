//! The block device of the study: an image file on a loop device, with a new ext4 for every cell.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use defuse_measure::command;
use defuse_measure::loop_device::ImageLoopDevice;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

/// Sector size in `/sys/block/*/stat`, for all devices.
const SECTOR: u64 = 512;

/// Read-ahead as for the paper's disks. Newer kernels derive megabytes from the properties of a
/// loop device. 32 such windows exceed the available memory at scale `small`.
const READ_AHEAD_KIB: &str = "128";

/// A loop device and the mount of its file system. Dropping it removes both. If this process is
/// killed, the kernel detaches the device with its last user.
#[derive(Debug)]
pub struct StudyDevice {
    device: ImageLoopDevice,
    mountpoint: PathBuf,
    inodes: u64,
}

/// I/O statistics of a block device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUse {
    /// Number of read requests.
    pub read_requests: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Number of write requests.
    pub write_requests: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

impl StudyDevice {
    /// Creates an image of `bytes` in `work` and a loop device for it, with direct I/O if the lower
    /// file system supports it. File systems on it have room for `inodes` files.
    pub fn create(work: &Path, bytes: u64, inodes: u64) -> Result<StudyDevice> {
        let (image, mountpoint) = (work.join("image"), work.join("ext4"));
        let device = ImageLoopDevice::create(&image, bytes, SECTOR as u32)?;
        fs::create_dir(&mountpoint)?;
        let name = device.name();
        let ahead = format!("/sys/block/{name}/queue/read_ahead_kb");
        fs::write(&ahead, READ_AHEAD_KIB).with_context(|| ahead.clone())?;
        Ok(StudyDevice { device, mountpoint, inodes })
    }

    /// Creates a file system without lazy initialisation, and mounts it.
    pub fn format(&mut self) -> Result<()> {
        self.unmount()?;
        self.device.wait_until_free()?;
        let node = self.device.node().to_string_lossy().into_owned();
        let inodes = self.inodes.to_string();
        // Without discard the image keeps its blocks, so that later cells do not allocate them
        // again.
        let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
        command::output("mkfs.ext4", &["-q", "-F", "-N", &inodes, "-E", options, &node])?;
        self.mount()
    }

    /// Unmounts and mounts again, which drops all caches of the file system.
    pub fn remount(&mut self) -> Result<()> {
        self.unmount()?;
        self.mount()
    }

    fn mount(&self) -> Result<()> {
        command::output(
            "mount",
            &[
                "-t".as_ref(),
                "ext4".as_ref(),
                self.device.node().as_os_str(),
                self.mountpoint.as_os_str(),
            ],
        )?;
        Ok(())
    }

    /// Unmounts the file system, if it is mounted.
    pub fn unmount(&mut self) -> Result<()> {
        for _ in 0..200 {
            match rustix::mount::unmount(&self.mountpoint, UnmountFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::INVAL) => return Ok(()),
                // A process that has just ended may still hold a file.
                Err(rustix::io::Errno::BUSY) => sleep(Duration::from_millis(25)),
                Err(error) => bail!("cannot unmount {}: {error}", self.mountpoint.display()),
            }
        }
        bail!("{} stays in use: see fuser -vm on it", self.mountpoint.display())
    }

    /// The mount point.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// The device name, such as `loop3`.
    pub fn name(&self) -> String {
        self.device.name()
    }

    /// The device number `MAJOR:MINOR`, as control groups require it.
    pub fn number(&self) -> Result<String> {
        let file = format!("/sys/block/{}/dev", self.name());
        Ok(fs::read_to_string(&file).with_context(|| file.clone())?.trim().to_owned())
    }

    /// The I/O since the device was created.
    pub fn read_use(&self) -> Result<DeviceUse> {
        let file = format!("/sys/block/{}/stat", self.name());
        let text = fs::read_to_string(&file).with_context(|| file.clone())?;
        DeviceUse::parse(&text).with_context(|| format!("{file} is not understood"))
    }
}

impl Drop for StudyDevice {
    fn drop(&mut self) {
        if self.unmount().is_err() {
            let _ = rustix::mount::unmount(&self.mountpoint, UnmountFlags::DETACH);
        }
    }
}

impl DeviceUse {
    /// Parses the contents of a `/sys/block/*/stat`; see the kernel's
    /// `Documentation/block/stat.rst`.
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

    /// The I/O since `earlier`.
    pub fn usage_since(&self, earlier: &DeviceUse) -> DeviceUse {
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
        assert_eq!(
            after.usage_since(&before),
            DeviceUse { read_requests: 1, ..DeviceUse::default() }
        );
        assert_eq!(DeviceUse::parse("1 2"), None);
    }
}
