//! Controllers as devices with names.

use std::sync::Arc;

use defuse_block::{DeviceAccess, DeviceDriver, DriverResult};

use crate::host::{PciAddress, SysfsHost};
use crate::{NvmeDevice, NvmeOptions, VfioController};

/// The driver of devices that are named `nvme:ADDRESS`, such as the source `uhs:nvme:0000:01:00.0`.
pub static DRIVER: DeviceDriver = DeviceDriver { scheme: "nvme", open };

fn open(name: &str, _: DeviceAccess) -> DriverResult {
    let address = PciAddress::parse(name).ok_or_else(|| {
        format!("{name} is no address: write it as 0000:01:00.0; `defuse nvme list`")
    })?;
    let vfio =
        VfioController::open(&SysfsHost::default(), &address).map_err(|error| error.to_string())?;
    let disk =
        NvmeDevice::open(vfio, &NvmeOptions::default()).map_err(|error| error.to_string())?;
    Ok(Arc::new(disk))
}
