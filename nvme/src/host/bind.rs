//! Giving a controller to user space, and back to the kernel.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{HostController, PciAddress, SysfsHost, VFIO};

/// A reason why a controller does not change its driver.
#[derive(Debug)]
pub enum HostError {
    /// There is no device.
    None(PciAddress),
    /// The device is no NVMe controller.
    NotNvme(PciAddress),
    /// The controller is in use.
    Used {
        /// The controller.
        address: PciAddress,
        /// The users, each as a sentence.
        holders: Vec<String>,
    },
    /// There is no IOMMU that keeps the device within the memory of its user.
    NoIommu(PciAddress),
    /// The kernel has no vfio-pci.
    NoDriver,
    /// User space does not have the controller.
    NotBound {
        /// The controller.
        address: PciAddress,
        /// The driver of the controller.
        driver: Option<String>,
    },
    /// A file of the system cannot be written or opened.
    System {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The kernel accepted the request, but another driver has the controller, or none.
    Refused {
        /// The controller.
        address: PciAddress,
        /// The driver of the controller.
        driver: Option<String>,
    },
}

impl SysfsHost {
    /// Gives the controller to vfio-pci, and so to user space. Does nothing if vfio-pci already has
    /// the controller.
    ///
    /// # Errors
    ///
    /// See [`HostError`]. A controller in use keeps its driver.
    pub fn bind(&self, address: &PciAddress) -> Result<(), HostError> {
        let found = self.controller(address)?;
        if found.driver.as_deref() == Some(VFIO) {
            return Ok(());
        }
        if found.iommu_group.is_none() {
            return Err(HostError::NoIommu(address.clone()));
        }
        if !self.driver(VFIO).exists() {
            return Err(HostError::NoDriver);
        }
        // No process can begin to use the controller from here on until it has changed its driver.
        let claims = self.claim_all(&found)?;
        self.change(address, VFIO, found.driver.as_deref())?;
        drop(claims);
        match self.controller(address)?.driver {
            Some(driver) if driver == VFIO => Ok(()),
            driver => Err(HostError::Refused { address: address.clone(), driver }),
        }
    }

    /// Gives the controller back to the kernel.
    ///
    /// # Errors
    ///
    /// See [`HostError`].
    pub fn unbind(&self, address: &PciAddress) -> Result<(), HostError> {
        let found = self.controller(address)?;
        if found.driver.as_deref() != Some(VFIO) {
            let (address, driver) = (address.clone(), found.driver);
            return Err(HostError::NotBound { address, driver });
        }
        let group = found.iommu_group.unwrap_or_default();
        let path = self.path(&format!("dev/vfio/{group}"));
        // A group has one user. The kernel would wait for its end.
        match File::open(&path) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                let holders = vec![format!("a process has {} open", path.display())];
                return Err(HostError::Used { address: address.clone(), holders });
            }
            _ => {}
        }
        self.change(address, "\n", Some(VFIO))
    }

    /// Claims the block devices of a controller, so that they are unused, and stay unused.
    fn claim_all(&self, found: &HostController) -> Result<Vec<File>, HostError> {
        let used = |holders| HostError::Used { address: found.address.clone(), holders };
        if !found.holders.is_empty() {
            return Err(used(found.holders.clone()));
        }
        let mut claims = Vec::new();
        for name in &found.namespaces {
            let claimed = self.claim(name).map_err(|(part, error)| {
                used(vec![format!("{part} cannot be had exclusively ({error}): see lsof(8)")])
            });
            claims.extend(claimed?);
        }
        Ok(claims)
    }

    /// Selects the next driver of the device, unbinds the present one, and lets the kernel probe
    /// the next.
    fn change(&self, address: &PciAddress, to: &str, from: Option<&str>) -> Result<(), HostError> {
        write(&self.device(address).join("driver_override"), to)?;
        if let Some(from) = from {
            write(&self.driver(from).join("unbind"), &address.0)?;
        }
        write(&self.path("sys/bus/pci/drivers_probe"), &address.0)
    }

    fn driver(&self, name: &str) -> PathBuf {
        self.path("sys/bus/pci/drivers").join(name)
    }
}

fn write(path: &Path, text: &str) -> Result<(), HostError> {
    let written = OpenOptions::new().write(true).open(path);
    let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| HostError::System { path: path.to_owned(), error })
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |driver: &Option<String>| match driver {
            Some(driver) => format!("the driver {driver}"),
            None => "no driver".to_owned(),
        };
        match self {
            HostError::None(address) => {
                write!(f, "there is no device {address}: `defuse nvme list` shows controllers")
            }
            HostError::NotNvme(address) => {
                write!(f, "{address} is no NVMe controller: `defuse nvme list` shows them")
            }
            HostError::Used { address, holders } => {
                write!(f, "{address} is in use: {}; end that first", holders.join(", "))
            }
            HostError::NoIommu(address) => write!(
                f,
                "{address} has no IOMMU group: enable the IOMMU in the firmware and the kernel \
                 (intel_iommu=on or amd_iommu=on); without one it could write anywhere"
            ),
            HostError::NoDriver => write!(f, "the kernel has no vfio-pci: `modprobe vfio-pci`"),
            HostError::NotBound { address, driver } => {
                let driver = name(driver);
                write!(f, "{driver} has {address}, not {VFIO}: `defuse nvme bind {address}`")
            }
            HostError::System { path, error } => {
                write!(f, "cannot use {}: {error}{}", path.display(), next_step(path, error.kind()))
            }
            HostError::Refused { address, driver } => {
                write!(f, "{} has {address} now: `dmesg` may say why", name(driver))
            }
        }
    }
}

/// The next step after an error of a file.
fn next_step(path: &Path, error: io::ErrorKind) -> String {
    let shown = path.display();
    let is_of_device =
        path.components().any(|part| part.as_os_str() == "vfio" || part.as_os_str() == "iommu");
    match error {
        io::ErrorKind::PermissionDenied if is_of_device => {
            format!("; as root, `chown USER {shown}` gives it to a user")
        }
        io::ErrorKind::PermissionDenied => "; this needs root".to_owned(),
        io::ErrorKind::ResourceBusy => format!("; another process has it: `fuser {shown}`"),
        io::ErrorKind::NotFound if is_of_device => {
            "; is vfio-pci loaded, and does this container have the file?".to_owned()
        }
        _ => String::new(),
    }
}

impl std::error::Error for HostError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_step_is_that_of_the_file_and_the_error() {
        let of = |path: &str, kind: io::ErrorKind| {
            let error = io::Error::from(kind);
            HostError::System { path: path.into(), error }.to_string()
        };
        let (group, sysfs) = ("/dev/vfio/9", "/sys/bus/pci/drivers/vfio-pci/unbind");
        assert!(of(group, io::ErrorKind::PermissionDenied).contains("`chown USER /dev/vfio/9`"));
        let iommufd = of("/dev/iommu", io::ErrorKind::PermissionDenied);
        assert!(iommufd.contains("`chown USER /dev/iommu`"), "{iommufd}");
        assert!(of(group, io::ErrorKind::ResourceBusy).ends_with("`fuser /dev/vfio/9`"));
        assert!(of(sysfs, io::ErrorKind::PermissionDenied).ends_with("needs root"));
        assert!(!of(group, io::ErrorKind::InvalidInput).contains("root"));
    }
}
