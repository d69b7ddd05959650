//! Emulated devices: a loop device that the block layer throttles to the speed of the paper's
//! devices.
//!
//! Throttling limits bytes and requests per second. It adds no latency to a request below those
//! limits, so an emulated disk has no seeks. Effects of the order of requests, or of the number in
//! flight, cannot be shown.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::rows::StorageMedia;

const MIB: u64 = 1 << 20;

/// The limits of a device; 0 for none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottleLimits {
    /// Bytes read per second.
    pub read_bps: u64,
    /// Bytes written per second.
    pub write_bps: u64,
    /// Read requests per second.
    pub read_iops: u64,
    /// Write requests per second.
    pub write_iops: u64,
}

impl ThrottleLimits {
    /// The throughput of the paper's device with native Ext4 (table 3).
    ///
    /// SSD: 120 MiB/s of sequential reads (rows 1 to 4), 129 MiB/s of sequential writes (rows 21 to
    /// 28), 25,000 random reads per second by 32 threads (row 17), 16,200 random writes (row 33).
    ///
    /// HDD: 150 and 144 MiB/s (rows 1 and 21). Its 243 to 572 random reads per second (rows 13 and
    /// 17) would limit sequential reads, in requests of 128 KiB, to 30 to 70 MiB/s. The limit is
    /// therefore the number of requests that full bandwidth needs at 128 KiB, and small random
    /// requests get a thirtieth of the bandwidth.
    pub fn for_media(media: StorageMedia) -> ThrottleLimits {
        match media {
            StorageMedia::Ssd => ThrottleLimits {
                read_bps: 120 * MIB,
                write_bps: 129 * MIB,
                read_iops: 25_000,
                write_iops: 16_200,
            },
            StorageMedia::Hdd => ThrottleLimits {
                read_bps: 150 * MIB,
                write_bps: 144 * MIB,
                read_iops: 1_200,
                write_iops: 1_152,
            },
        }
    }

    fn fields(&self) -> [(&'static str, &'static str, u64); 4] {
        [
            ("blkio.throttle.read_bps_device", "rbps", self.read_bps),
            ("blkio.throttle.write_bps_device", "wbps", self.write_bps),
            ("blkio.throttle.read_iops_device", "riops", self.read_iops),
            ("blkio.throttle.write_iops_device", "wiops", self.write_iops),
        ]
    }
}

/// The description of a throttled device.
pub fn describe(media: StorageMedia) -> String {
    let limits = ThrottleLimits::for_media(media);
    format!(
        "emulated {} (loop device throttled to {} / {} MiB/s and {} / {} requests/s, read / write)",
        media.name().to_uppercase(),
        limits.read_bps / MIB,
        limits.write_bps / MIB,
        limits.read_iops,
        limits.write_iops
    )
}

/// Limits that apply until this value is dropped.
#[derive(Debug)]
pub struct DeviceThrottle {
    undo: Vec<(PathBuf, String)>,
}

impl DeviceThrottle {
    /// Uses the files of a version 1 group.
    pub(crate) fn v1(
        folder: &Path,
        device: &str,
        limits: &ThrottleLimits,
    ) -> Result<DeviceThrottle> {
        let mut throttle = DeviceThrottle { undo: Vec::new() };
        for (file, _, limit) in limits.fields() {
            if limit > 0 {
                let file = folder.join(file);
                throttle.set(&file, &format!("{device} {limit}"), format!("{device} 0"))?;
            }
        }
        Ok(throttle)
    }

    /// Uses `io.max` of a version 2 group.
    pub(crate) fn v2(
        folder: &Path,
        device: &str,
        limits: &ThrottleLimits,
    ) -> Result<DeviceThrottle> {
        let (mut on, mut off) = (device.to_owned(), device.to_owned());
        for (_, key, limit) in limits.fields() {
            if limit > 0 {
                on.push_str(&format!(" {key}={limit}"));
                off.push_str(&format!(" {key}=max"));
            }
        }
        let mut throttle = DeviceThrottle { undo: Vec::new() };
        throttle.set(&folder.join("io.max"), &on, off)?;
        Ok(throttle)
    }

    fn set(&mut self, file: &Path, on: &str, off: String) -> Result<()> {
        fs::write(file, on).with_context(|| format!("cannot throttle by {}", file.display()))?;
        self.undo.push((file.to_owned(), off));
        Ok(())
    }
}

impl Drop for DeviceThrottle {
    fn drop(&mut self) {
        for (file, off) in &self.undo {
            // The group may have been removed, and with it the limit.
            let _ = fs::write(file, off);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_1_writes_one_file_per_limit_and_removes_them() {
        let root = tempfile::tempdir().unwrap();
        let limits =
            ThrottleLimits { read_iops: 0, ..ThrottleLimits::for_media(StorageMedia::Ssd) };
        let throttle = DeviceThrottle::v1(root.path(), "7:3", &limits).unwrap();
        let read = |name: &str| fs::read_to_string(root.path().join(name)).unwrap_or_default();
        assert_eq!(read("blkio.throttle.read_bps_device"), "7:3 125829120");
        assert_eq!(read("blkio.throttle.read_iops_device"), "");
        drop(throttle);
        assert_eq!(read("blkio.throttle.write_bps_device"), "7:3 0");
    }

    #[test]
    fn an_emulated_device_is_described_as_such() {
        assert!(describe(StorageMedia::Hdd).starts_with("emulated HDD"));
    }

    #[test]
    fn full_bandwidth_fits_into_the_requests_of_a_disk() {
        let limits = ThrottleLimits::for_media(StorageMedia::Hdd);
        assert!(limits.read_iops * (128 << 10) >= limits.read_bps);
        assert!(limits.write_iops * (128 << 10) >= limits.write_bps);
    }
}
