//! Controllers as devices that are named.

use std::sync::Arc;

use defuse_block::{Access, Driver, Opened};

use crate::host::{PciAddress, SysfsHost};
use crate::{NvmeDevice, NvmeOptions, VfioController};

/// The driver of devices that are named `nvme:ADDRESS`, such as the source `uhs:nvme:0000:01:00.0`.
pub static DRIVER: Driver = Driver { scheme: "nvme", open };

fn open(name: &str, _: Access) -> Opened {
    let address = PciAddress::parse(name).ok_or_else(|| {
        format!("{name} is no address: write it as 0000:01:00.0; `defuse nvme list`")
    })?;
    let vfio =
        VfioController::open(&SysfsHost::default(), &address).map_err(|error| error.to_string())?;
    let disk =
        NvmeDevice::open(vfio, &NvmeOptions::default()).map_err(|error| error.to_string())?;
    Ok(Arc::new(disk))
}
