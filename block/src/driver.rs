//! Devices without a path, which drivers open by a name of the form `SCHEME:NAME`.

use std::ffi::OsStr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{BlockDevice, DeviceAccess};

/// A device, or the reason why there is none.
pub type DriverResult = Result<Arc<dyn BlockDevice>, String>;

/// A driver for devices that have no file.
#[derive(Debug)]
pub struct DeviceDriver {
    /// The word before the colon, such as `nvme`.
    pub scheme: &'static str,
    /// Opens the device with this name. An error is a text for people, with the next step.
    pub open: fn(name: &str, access: DeviceAccess) -> DriverResult,
}

/// The drivers of this program.
static DRIVERS: Mutex<Vec<&'static DeviceDriver>> = Mutex::new(Vec::new());

/// Adds a driver to this program: from now on names that begin with its scheme are names of its
/// devices. A file with such a name can still be named by a path (`./nvme:x`).
pub fn add_driver(driver: &'static DeviceDriver) {
    let mut drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    if drivers.iter().all(|known| known.scheme != driver.scheme) {
        drivers.push(driver);
    }
}

/// The driver that `text` names, and the name of the device; `None` for a path.
pub fn driver_of(text: &OsStr) -> Option<(&'static DeviceDriver, &str)> {
    let (scheme, name) = text.to_str()?.split_once(':')?;
    let drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = drivers.iter().find(|driver| driver.scheme == scheme)?;
    Some((*driver, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RamDevice;

    static MEMORY: DeviceDriver = DeviceDriver {
        scheme: "memory-for-test",
        open: |name, _| {
            let blocks = name.parse().map_err(|_| format!("{name} is no number of blocks"))?;
            Ok(Arc::new(RamDevice::new(4096, blocks)))
        },
    };

    #[test]
    fn a_name_with_a_scheme_is_a_device_once_its_driver_is_there() {
        let find = |text: &'static str| driver_of(OsStr::new(text));
        assert!(find("memory-for-test:16").is_none());
        add_driver(&MEMORY);
        let (driver, name) = find("memory-for-test:16").unwrap();
        assert_eq!((driver.open)(name, DeviceAccess::Read).unwrap().properties().blocks, 16);
        assert!(
            (driver.open)("x", DeviceAccess::Read).is_err_and(|text| text.contains("no number"))
        );
        for path in ["./memory-for-test:16", "/memory-for-test:16", "other:16", "memory-for-test"] {
            assert!(find(path).is_none(), "{path}");
        }
    }
}
